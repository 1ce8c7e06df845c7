"""``torchpipe bench``: options in, a load on a pipe in this process, a report out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from torchpipe_py.errors import TorchpipeError
from torchpipe_py.loadtest.client.threads import ClientThreads
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.measure.cpu import CpuMeter, CpuUse
from torchpipe_py.loadtest.measure.nodes import node_figures, node_rows
from torchpipe_py.loadtest.plans import load_images, make_plans
from torchpipe_py.loadtest.progress import progress_bar
from torchpipe_py.loadtest.records import CallLog, collect
from torchpipe_py.loadtest.report.summary import check_output, describe_run, make_report, write_json
from torchpipe_py.loadtest.report.tables import format_cpu, format_table, print_report
from torchpipe_py.runtime.pipe import pipe

EXIT_OK, EXIT_ALL_FAILED, EXIT_CANNOT_RUN, EXIT_INTERRUPTED = 0, 1, 2, 130

OUTSIDE_LIMIT = 0.2  # of the clients' time, between their calls

_CLOSE_S = 10.0  # for a backend that does not return after Ctrl-C
_LIBRARIES = ("torchpipe_py", "torch", "onnxruntime")


def run_bench(args: argparse.Namespace) -> int:
    """0 if any image has a result, 1 if none has, 2 where it cannot start or write its report, 130 after Ctrl-C."""
    try:
        report = _run(args)
        print_report(report, _table(report))
        if args.json is not None:
            write_json(report, args.json)
    except (CannotRunError, TorchpipeError) as error:
        print(f"torchpipe: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("torchpipe: interrupted before there was anything to report", file=sys.stderr)
        return EXIT_INTERRUPTED
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    return EXIT_OK if report["images_ok"] else EXIT_ALL_FAILED


def _run(args: argparse.Namespace) -> dict[str, Any]:
    check_output(args.json)
    payload = load_images(args.img_dir, args.labels_from_names)
    settings = {name: value for name, value in vars(args).items() if not callable(value)}
    about = describe_run(settings, payload, _LIBRARIES)
    count = len(payload.bodies)
    plans = make_plans(args.request_client, args.request_batch, args.total_number, count, args.warmup)
    run = pipe(args.config)
    clients = ClientThreads(plans, run, payload)
    try:
        clients.warm_up()
        before = run.stats()
        meter = CpuMeter(server=[os.getpid()], not_server=[])  # less this process: backends in processes of their own
        with progress_bar(args.total_number, args.progress) as progress:
            meter.start()
            outcome = clients.run(progress)
            use = meter.stop()
        records = collect(outcome.logs, plans, outcome.released)
        outside = time_outside(outcome.logs)
        limits = [f"clients spent {outside:.0%} of their time between calls"] if outside > OUTSIDE_LIMIT else []
        report = make_report(outcome, records, about, _cpu_fields(use), limits, args.labels_from_names)
        return report | {
            "tester_share_of_clients": outside,
            "nodes": node_figures(before, run.stats(), use.wall),
        }
    finally:
        clients.stop()
        run.close(_CLOSE_S)


def time_outside(logs: Sequence[CallLog]) -> float:
    """The share of the clients' time that was not spent in calls but in making and counting them."""
    ended = [log for log in logs if log.wall_ns]
    inside = sum(sum(log.latency[: log.calls_done]) for log in ended)
    return 1 - inside / sum(log.wall_ns for log in ended) if ended else 0.0


def _cpu_fields(use: CpuUse) -> dict[str, Any]:
    """Pipe and clients share a process: nobody can tell their CPU time apart."""
    ours = use.parent + (use.server or 0.0)
    others = use.others(ours)
    return {
        "process_cpu_percent": 100 * ours / use.wall,
        "other_cpu_percent": None if others is None else 100 * others,
        "machine_busy": use.machine_busy,
    }


def _table(report: dict[str, Any]) -> str:
    config = [("config", f"{report['settings']['config']} in this process, clients are threads")]
    cpu = [("process CPU", f"{format_cpu(report['process_cpu_percent'])}, pipe and clients")]
    return format_table(report, config, [*node_rows(report["nodes"]), *cpu])
