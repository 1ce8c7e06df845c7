"""The commands ``torchpipe load`` and ``torchpipe bench``: options in, one run or several, a report out."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torchpipe_py.errors import counted
from torchpipe_py.idl import load_idl
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.tools.load import judge, measure
from torchpipe_py.tools.load.arrivals import load_images, make_load, make_plans
from torchpipe_py.tools.load.client import ClientProcesses, ClientThreads
from torchpipe_py.tools.load.compare import compare_main
from torchpipe_py.tools.load.records import CallLog, collect
from torchpipe_py.tools.load.report import csv_text, describe_run, load_fields, make_report, page, print_report
from torchpipe_py.tools.options import check_node_name, parse_load
from torchpipe_py.tools.report import ToolError, check_outputs, progress_bar, write_json, write_text

EXIT_ALL_FAILED = 1  # exit status of bench
OUTSIDE_LIMIT = 0.2  # largest share of the clients' time between calls
VARIABLES = {"clients": "request_client", "rate": "rate"}
MOST_POINTS = 1000
TOLERANCE = 0.03  # relative distance of the best rate and the lowest failed one
MOST_PROBES = 20

_CLOSE_S = 10.0  # for backends that do not return after Ctrl-C
_FIRST, _UP, _DOWN = 0.8, 1.25, 0.5  # factors for the estimate, a rate that held, one that did not
_LOWEST = 1 / 256  # lowest rate tried, relative to the estimate

Run = Callable[[argparse.Namespace], dict[str, Any]]
"""Runs a load with these options and returns the report."""


@contextmanager
def progress_of(total: int | None, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that shows the number of images sent so far, of ``total`` if known."""
    began = time.perf_counter()
    with progress_bar(wanted) as show:

        def sent(images: int) -> None:
            rate = images / (time.perf_counter() - began)
            show("load", images / total if total else 0.0, f"{counted(images, 'image')} sent, {rate:.0f}/s")

        yield sent


# --- torchpipe bench


def run_bench(args: argparse.Namespace) -> int:
    """0 if any image has a result, 1 if none, 4 if invalid, 130 after Ctrl-C. ``TorchpipeError`` if it cannot run."""
    try:
        report = _bench(args)
    except KeyboardInterrupt:
        print("torchpipe: interrupted before there was anything to report", file=sys.stderr)
        return judge.EXIT_INTERRUPTED
    print_report(report)
    if args.json is not None:
        write_json(args.json, report)
    if report["interrupted"]:
        return judge.EXIT_INTERRUPTED
    if not report["valid"]:
        return judge.EXIT_INVALID
    return judge.EXIT_OK if report["images_ok"] else EXIT_ALL_FAILED


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    check_outputs({"json": args.json}, [args.config])
    plan = plan_pipeline(args.config)
    check_node_name(plan, args.node_name)
    payload = load_images(args.img_dir, args.labels_from_names)
    settings = {name: value for name, value in vars(args).items() if not callable(value)}
    about = describe_run(settings, payload, ("torchpipe_py", "torch", "onnxruntime"))
    images = len(payload.bodies)
    plans = make_plans(args.request_client, args.request_batch, args.total_number, images, args.warmup)
    run = pipe(plan)
    clients = ClientThreads(plans, run, payload, args.node_name)
    try:
        clients.warm_up()
        before = run.stats()
        # Without this process: the CPU time of backends in separate processes.
        meter = measure.CpuMeter(server=[os.getpid()], not_server=[])
        with progress_of(args.total_number, args.progress) as progress:
            meter.start()
            outcome = clients.run(progress)
            use = meter.stop()
        outside = time_outside(outcome.logs)
        limits = [f"clients spent {outside:.0%} of their time between calls"] if outside > OUTSIDE_LIMIT else []
        ours = use.parent + (use.server or 0.0)  # pipe and clients share a process: their times cannot be separated
        cpu = {"process_cpu_percent": 100 * ours / use.wall, **use.fields(ours)}
        records = collect(outcome.logs, outcome.released)
        report = make_report(outcome, records, about, cpu, limits, args.labels_from_names)
        nodes = measure.node_figures(before, run.stats(), use.wall)
        calls = sum(plan.warmup for plan in plans)
        return report | {"warmup_calls": calls, "tester_share_of_clients": outside, "nodes": nodes}
    finally:
        clients.stop()
        run.close(_CLOSE_S)


def time_outside(logs: Sequence[CallLog]) -> float:
    """The share of the clients' time between calls."""
    ended = [log for log in logs if log.wall_ns]
    inside = sum(int(log.rows[:, 0].sum()) for log in ended)
    return 1 - inside / sum(log.wall_ns for log in ended) if ended else 0.0


# --- torchpipe load


def main(arguments: Sequence[str] | None = None, program: str = "torchpipe load") -> int:
    """The command; returns its exit status. Messages begin with ``program``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["compare"]:
            return compare_main(arguments[1:], program)
        options = parse_load(arguments, program)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it as Ctrl-C does
        report = _load(options)
        print_report(report)
        if options.json is not None:
            write_json(options.json, report)
        if options.csv is not None:
            write_text(options.csv, csv_text(report.get("runs", [report])))
        if options.html is not None:
            write_text(options.html, page(report))
    except ToolError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return judge.EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print(f"{program}: interrupted before there was anything to report", file=sys.stderr)
        return judge.EXIT_INTERRUPTED
    return int(report["exit_status"])


def _load(options: argparse.Namespace) -> dict[str, Any]:
    """Run the load and return the report of one or several runs."""
    check_outputs({flag: getattr(options, flag) for flag in ("json", "csv", "html")}, [options.replay])
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    if importlib.util.find_spec("thriftpy2") is None:
        raise ToolError("thriftpy2 is not installed (pip install 'torchpipe_py[server]')")
    run = LoadRunner(options).run
    if sweep is not None:
        return run_sweep(run, options, *sweep)
    return run_search(run, options) if options.search else run(options)


class LoadRunner:
    """Runs loads on one server, one after another; owns the images and the connection settings."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read the images and probe the server. Raises ``ToolError``."""
        from torchpipe_py.tools.load import wire

        priority, name = options.priority, options.node_name
        if options.transport == "http":
            speaks: Any = wire.HttpWire(f"{options.host}:{options.port}", options.path, priority, name)
        else:
            is_framed = options.transport == "framed"
            speaks = wire.ThriftWire(load_idl(), is_framed, options.request_batch, priority, node_name=name)
        self._endpoint = wire.Endpoint(speaks, options.host, options.port, options.timeout)
        self._payload = load_images(options.img_dir, options.labels_from_names)
        asyncio.run(wire.probe(self._endpoint))
        self._is_local = measure.is_local(options.host)
        self._service = measure.ServiceMeter(options.host, options.http_port, self._is_local)
        self._service.start()  # so that a wrong port is reported before anything is sent

    def run(self, options: argparse.Namespace) -> dict[str, Any]:
        """Run once and return the report. Raises ``ToolError``."""
        server = measure.find_server(options.host, options.port, options.server_pid)
        about = describe_run(vars(options), self._payload, ["thriftpy2"])
        about |= {"host_is_local": self._is_local, "server_pids": server}
        load = make_load(options, len(self._payload.bodies))
        gpu = measure.GpuMeter(wanted=self._is_local)
        clients = ClientProcesses(load, self._endpoint, self._payload)
        cpu = measure.CpuMeter(server, clients.pids)
        try:
            warmup_calls = clients.wait_ready()
            gpu.start()
            self._service.start()
            with progress_of(load.total, options.progress) as show:
                cpu.start()
                outcome = clients.run(show)
                use, gpus, figures = cpu.stop(), gpu.stop(), self._service.stop()
        finally:
            gpu.stop()
            clients.stop()
        records = collect(outcome.logs, outcome.released)
        fields = measure.cpu_fields(outcome.logs, use)
        limits = measure.cpu_limits(fields)
        limits += judge.late_limits(judge.late_sends(records, load)) if load.is_open else []
        report = make_report(outcome, records, about, fields, limits, options.labels_from_names)
        report |= {"warmup_calls": warmup_calls, "tester_limited": bool(limits), **load_fields(records, report, load)}
        report["p99_bounds_ms"] = judge.p99_bounds(records) if load.is_open else None
        return judge.judge(report, options.slo_p99) | {"gpus": gpus, "service": figures}


# --- several runs


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """Parse ``NAME=VALUES``. Clients are whole numbers from 1 to 10,000; rates are above 0."""
    name, _, values = text.partition("=")
    points: list[float] = []
    try:
        for part in values.split(",") if name in VARIABLES else ():
            if ":" not in part:
                points.append(float(part))
                continue
            start, stop, step = map(float, part.split(":"))
            count = math.floor((stop - start) / step + 1e-9) + 1
            if step <= 0 or count < 1:
                raise ValueError(part)
            points += [start + index * step for index in range(min(count, MOST_POINTS + 1))]
    except (ValueError, ArithmeticError):
        points = []
    if not points:
        valid = "clients=1,2,5 or rate=100:400:100 (start:stop:step, stop included)"
        raise ToolError(f"--sweep {text}: valid are {valid}")
    if len(points) > MOST_POINTS:
        raise ToolError(f"--sweep {text}: too many points; 1 to {MOST_POINTS} are valid")
    for point in points:
        if name == "rate" and not 0 < point < 1e6:
            raise ToolError(f"--sweep rate={point:g}: must be more than 0 and less than a million")
        if name == "clients" and not (1 <= point <= 10_000 and point == int(point)):
            raise ToolError(f"--sweep clients={point:g}: must be a whole number between 1 and 10000")
    return name, points if name == "rate" else [int(point) for point in points]


class _Stopped(Exception):
    """The series was stopped early."""


class _Series:
    """Runs with varied options, and their reports. As a context manager it ends quietly when a run is stopped early.

    ``stopped`` is the reason: the current run was interrupted, or a later one could not start.
    """

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.reports: list[dict[str, Any]] = []
        self.stopped: str | None = None
        self._run, self._options, self._status = run, options, judge.EXIT_OK

    def __enter__(self) -> _Series:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> bool:
        return isinstance(error, _Stopped)

    def run(self, name: str, **changes: Any) -> dict[str, Any]:
        """Run once more. Exceptions of the first run are raised, since there is nothing to report."""
        try:
            report = self._run(argparse.Namespace(**{**vars(self._options), **changes}))
        except (KeyboardInterrupt, ToolError) as error:
            if not self.reports:
                raise
            if isinstance(error, ToolError):
                self._stop(f"{error} before {name}", judge.EXIT_CANNOT_RUN)
            self._stop(f"interrupted before {name}", judge.EXIT_INTERRUPTED)
        report["point"] = name
        self.reports.append(report)
        latency = report["latency_ms"]
        p99 = "no result" if latency is None else f"p99 {latency['p99']:.2f} ms"
        print(f"{name}: {report['qps']:.1f} images/s, {p99}, {judge.verdict(report)}", file=sys.stderr)
        if report["interrupted"]:
            self._stop(f"interrupted at {name}", judge.EXIT_INTERRUPTED)
        return report

    def _stop(self, why: str, status: int) -> NoReturn:
        self.stopped, self._status = why, status
        raise _Stopped

    def report(self, kind: str, about: Any, status: int) -> dict[str, Any]:
        """The report of all runs; ``status`` is used if the series was not stopped."""
        status = status if self.stopped is None else self._status
        return {"kind": kind, kind: about, "runs": self.reports, "stopped": self.stopped, "exit_status": status}


def run_sweep(run: Run, options: argparse.Namespace, name: str, values: Sequence[float]) -> dict[str, Any]:
    """A run for each value; an interrupted run, or one that cannot start, ends the sweep."""
    with _Series(run, options) as series:
        for value in values:
            series.run(f"{name} {value:g}", **{VARIABLES[name]: value})
    status = judge.worst(report["exit_status"] for report in series.reports if not report["interrupted"])
    return series.report("sweep", {"name": name, "values": list(values)}, status)


def search_rate(holds: Callable[[float], bool], estimate: float) -> float | None:
    """The highest rate that held; None if none did.

    It brackets the limit from ``estimate``, in images per second, then halves the bracket until it is narrow.
    ``holds(rate)`` runs a probe, which is noisy near the limit; no rate is tried twice.
    """
    best = too_much = None
    rate = estimate * _FIRST
    for _ in range(MOST_PROBES):
        if holds(rate):
            best = rate
        else:
            too_much = rate
        if best is None:
            rate *= _DOWN
            if rate < estimate * _LOWEST:
                break
        elif too_much is None:
            rate *= _UP
        elif too_much <= best * (1 + TOLERANCE):
            break
        else:
            rate = (best + too_much) / 2
    return best


def run_search(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Find the highest rate that meets the SLO, stably and without errors; a stopped search has no result."""
    best: float | None = None
    failed: list[tuple[float, bool]] = []  # rates that did not hold, and whether the run was valid
    with _Series(run, options) as series:

        def holds(rate: float) -> bool:
            probe = series.run(f"rate {rate:.4g}", rate=rate)
            if not probe["images_ok"]:
                series._stop(f"no image has a result at {rate:.4g} images/s", judge.EXIT_FAILED)
            if probe["exit_status"] != judge.EXIT_OK:
                failed.append((rate, probe["valid"]))
            return bool(probe["exit_status"] == judge.EXIT_OK)

        closed = series.run("closed loop", arrivals="closed", rate=None, slo_p99=None)
        if not closed["images_ok"]:
            raise ToolError(f"--search: no image has a result in a closed loop: {closed['errors']}")
        best = search_rate(holds, closed["goodput"])
    about = {
        "slo_p99_ms": options.slo_p99,
        "arrivals": options.arrivals,
        "best_rate": best,
        "lowest_rate_that_failed": min((rate for rate, is_clear in failed if is_clear), default=None),
        "undecided_rates": sorted(rate for rate, is_clear in failed if not is_clear),
        "tolerance": TOLERANCE,
        # The tester only makes latencies longer, so a rate that held would hold without it.
        "valid": best is not None or all(is_clear for _, is_clear in failed),
    }
    return series.report("search", about, judge.EXIT_SLO_MISSED if best is None else judge.EXIT_OK)
