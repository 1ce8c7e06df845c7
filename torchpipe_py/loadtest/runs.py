"""One run: a load on the server, and the report of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from torchpipe_py.loadtest.client.connection import Endpoint, probe
from torchpipe_py.loadtest.client.coordinator import Coordinator
from torchpipe_py.loadtest.client.loads import Load, make_load, offered_images
from torchpipe_py.loadtest.client.wire import encode_body, load_idl
from torchpipe_py.loadtest.images import load_images
from torchpipe_py.loadtest.ledger import Outcome
from torchpipe_py.loadtest.measure.cost import cpu_fields, tester_cost
from torchpipe_py.loadtest.measure.cpu import CpuMeter, CpuUse
from torchpipe_py.loadtest.measure.gpu import GpuMeter
from torchpipe_py.loadtest.measure.lateness import Lateness, judge_lateness
from torchpipe_py.loadtest.measure.records import Records, collect
from torchpipe_py.loadtest.measure.series import histogram, per_second, percentile_curve
from torchpipe_py.loadtest.measure.server import find_server, is_local
from torchpipe_py.loadtest.measure.stability import judge_stability
from torchpipe_py.loadtest.measure.statistics import summarize
from torchpipe_py.loadtest.progress import progress_bar
from torchpipe_py.loadtest.report.summary import describe_run, make_report
from torchpipe_py.loadtest.report.verdict import judge


class Runner:
    """Runs loads on one server, one after the other; owns what they have in common: the images and where they go."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Reads the images and asks the server for a sign of life; `CannotRunError` when one of them is not there."""
        self._idl = load_idl()
        self._endpoint = Endpoint(options.host, options.port, options.transport == "framed", options.timeout)
        images = load_images(options.img_dir, options.labels_from_names)
        self._payload = replace(images, bodies=[encode_body(self._idl, body) for body in images.bodies])
        probe(self._idl, self._endpoint)
        self._is_local = is_local(options.host)

    def run(self, options: argparse.Namespace) -> dict[str, Any]:
        """One run and its report; `CannotRunError` when that is not possible."""
        server = find_server(options.host, options.port, options.server_pid)
        about = describe_run(vars(options), self._payload, ["thriftpy2"])
        about |= {"host_is_local": self._is_local, "server_pids": server}
        load = make_load(options, len(self._payload.bodies))
        gpu = GpuMeter(wanted=self._is_local)
        coordinator = Coordinator(load, self._endpoint, self._idl, self._payload)
        outcome, use, gpus = _measure(coordinator, CpuMeter(server, coordinator.pids), gpu, load, options.progress)
        return _report(outcome, use, load, about, options) | {"gpus": gpus}


def _measure(
    coordinator: Coordinator, meter: CpuMeter, gpu: GpuMeter, load: Load, progress: bool
) -> tuple[Outcome, CpuUse, list[dict[str, Any]] | None]:
    """The run proper."""
    try:
        coordinator.wait_ready()
        gpu.start()
        with progress_bar(load.total, progress) as show:
            meter.start()
            outcome = coordinator.run(show)
            return outcome, meter.stop(), gpu.stop()
    finally:
        gpu.stop()
        coordinator.stop()


def _report(
    outcome: Outcome, use: CpuUse, load: Load, about: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    records = collect(outcome.ledgers, load.plans, outcome.released)
    cost = tester_cost(outcome, use)
    lateness = judge_lateness(records) if load.is_open else None
    limits = cost.limits + (lateness.limits if lateness else [])
    report = make_report(outcome, about, cpu_fields(cost, use), limits, options.labels_from_names)
    report["tester_limited"] = bool(limits)
    if lateness is not None:
        report |= _open_fields(records, report, lateness, load)
    report |= _plot_fields(records, load)
    return judge(report, options.slo_p99)


def _open_fields(records: Records, report: dict[str, Any], lateness: Lateness, load: Load) -> dict[str, Any]:
    """The report's part about an open loop; `latency_ms` is from when calls were due, for it is so in the ledgers."""
    assert load.total is not None
    unsent = 0 if report["interrupted"] else _unsent(load.total, report)
    offered = load.offered_rate or report["qps"]  # of a single call there is no rate
    stability = judge_stability(records.good("latency"), offered, report["images_answered"], report["window_s"], unsent)
    mean = sum(records.actual) / len(records.actual) / 1e6 if records.actual else 0.0
    return {
        "latency_actual_ms": summarize(records.good("actual")),
        "offered_rate": stability.offered,
        "achieved_rate": stability.achieved,
        "images_unsent": unsent,
        "late_sends": lateness.fields(),
        "stable": stability.is_stable,
        "unstable_because": stability.reasons,
        "latency_halves_ms": [stability.first_ms, stability.second_ms],
        "warnings": report["warnings"] + lateness.warnings(len(load.plans), report["calls_per_s"], mean),
    }


def _unsent(total: int, report: dict[str, Any]) -> int:
    """Images that were left out because the run was too late for them; what broken clients owe is among the errors."""
    owed: int = sum(report["errors"].get(kind, 0) for kind in ("unsent", "ClientProcessDied"))
    return max(0, total - int(report["images_sent"]) - owed)


def _plot_fields(records: Records, load: Load) -> dict[str, Any]:
    fields = {
        "per_second": per_second(records, offered_images(load)),
        "percentiles_ms": percentile_curve(records.good("latency")),
        "histogram_ms": histogram(records.good("latency")),
    }
    if load.is_open:
        fields["percentiles_actual_ms"] = percentile_curve(records.good("actual"))
    return fields
