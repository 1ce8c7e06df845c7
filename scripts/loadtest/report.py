"""The report of a run: one dict for `--json`, and the table made of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .coordinator import Outcome
from .cpu import CpuUse, cpu_model
from .statistics import Tally, tally

CLIENT_LIMIT = 0.9  # of a core, for one client process
MACHINE_LIMIT = 0.95  # of all cores: saturated
TESTER_SHARE_LIMIT = 0.5  # of the CPU time a saturated machine spent
OTHERS_LIMIT = 0.25  # of a core, for all processes that are neither server nor tester
JUDGED_FROM_S = 0.5  # the machine's clock ticks 100 times a second: shorter runs say nothing


@dataclass(frozen=True)
class TesterCost:
    """What the load tester itself took: `cpu` in seconds, `busiest` client of one core, `share` of all CPU time spent.

    `others` is what processes that are neither server nor tester took, of one core; None where that is not known.
    """

    cpu: float
    us_per_call: float | None
    busiest: float
    share: float | None
    machine_busy: float | None
    others: float | None

    @property
    def limits(self) -> list[str]:
        """The reasons why this run measured the tester and not the server; empty for a valid run."""
        reasons = []
        if self.busiest > CLIENT_LIMIT:
            reasons.append(f"a client process used {self.busiest:.0%} of a core")
        if self.machine_busy is not None and self.share is not None:
            saturated = self.machine_busy > MACHINE_LIMIT
            if saturated and self.share > TESTER_SHARE_LIMIT:
                reasons.append(f"the machine's CPU is saturated and the tester took {self.share:.0%} of it")
        return reasons


def tester_cost(outcome: Outcome, use: CpuUse) -> TesterCost:
    """Adds up the CPU time of clients and parent during the run."""
    ledgers = [client.ledger for client in outcome.clients]
    clients = sum(ledger.cpu_ns for ledger in ledgers) / 1e9
    calls = sum(ledger.calls_done for ledger in ledgers)
    cpu = clients + use.parent
    machine = use.machine if use.wall >= JUDGED_FROM_S else None
    others = None if machine is None or use.server is None else max(0.0, machine - use.server - cpu) / use.wall
    return TesterCost(
        cpu=cpu,
        us_per_call=clients * 1e6 / calls if calls else None,
        busiest=max((ledger.cpu_ns / ledger.wall_ns for ledger in ledgers if ledger.wall_ns), default=0.0),
        share=min(1.0, cpu / machine) if machine else None,
        machine_busy=machine / use.wall / (os.cpu_count() or 1) if machine else None,
        others=others,
    )


def make_report(outcome: Outcome, use: CpuUse, about: dict[str, Any], labelled: bool) -> dict[str, Any]:
    """Everything there is to say, ready for JSON. Latencies in ms, CPU in percent of one core; null is "not known"."""
    numbers = tally([client.ledger for client in outcome.clients], outcome.released)
    cost = tester_cost(outcome, use)
    return {
        **about,
        **_machine(),
        **_throughput(numbers),
        "images_failed": sum(outcome.errors.values()),
        "errors": dict(outcome.errors.most_common()),
        "accuracy": numbers.correct / numbers.answered if labelled and numbers.answered else None,
        "latency_ms": numbers.latency,
        "latency_failed_ms": numbers.latency_failed,
        "images_ok_per_second": numbers.per_second,
        **_cpu(cost, use),
        "interrupted": outcome.interrupted,
        "warnings": _warnings(cost),
        "valid": not cost.limits and not outcome.interrupted,
    }


def _warnings(cost: TesterCost) -> list[str]:
    warnings = [f"the tester is the limit: {reason}" for reason in cost.limits]
    if cost.others is not None and cost.others > OTHERS_LIMIT:
        warnings.append(f"processes that are neither server nor tester used {cost.others:.0%} of a core")
    return warnings


def _machine() -> dict[str, Any]:
    return {
        "versions": {"python": platform.python_version(), "thriftpy2": importlib.metadata.version("thriftpy2")},
        "machine": {
            "cores": os.cpu_count(),
            "cores_usable": len(os.sched_getaffinity(0)),
            "cpu_model": cpu_model(),
            "system": platform.platform(),
        },
    }


def _throughput(numbers: Tally) -> dict[str, Any]:
    window = numbers.window or float("inf")
    return {
        "window_s": numbers.window,
        "images_sent": numbers.sent,
        "images_answered": numbers.answered,
        "images_ok": numbers.ok,
        "calls": numbers.calls,
        "calls_answered": numbers.calls_answered,
        "qps": numbers.answered / window,
        "calls_per_s": numbers.calls_answered / window,
        "goodput": numbers.ok / window,
    }


def _cpu(cost: TesterCost, use: CpuUse) -> dict[str, Any]:
    return {
        "server_cpu_percent": None if use.server is None else 100 * use.server / use.wall,
        "tester_cpu_percent": 100 * cost.cpu / use.wall,
        "tester_cpu_us_per_call": cost.us_per_call,
        "tester_busiest_client_percent": 100 * cost.busiest,
        "tester_share_of_cpu": cost.share,
        "other_cpu_percent": None if cost.others is None else 100 * cost.others,
        "machine_busy": cost.machine_busy,
        "tester_limited": bool(cost.limits),
    }


def format_table(report: dict[str, Any]) -> str:
    """The report for a person: aligned names and values."""
    rows = [*_load_rows(report), *_latency_rows(report), *_error_rows(report), *_cpu_rows(report)]
    rows += [("per second", _series(report["images_ok_per_second"]))]
    rows += [("WARNING", warning) for warning in report["warnings"]]
    rows += [("run", _verdict(report))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _load_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    settings, machine = report["settings"], report["machine"]
    load = f"{settings['request_client']} clients, closed loop, {settings['request_batch']} image(s) per call"
    sent = f"{report['images_sent']} sent, {report['images_answered']} answered, {report['images_ok']} with a result"
    rows = [
        ("server", f"{settings['host']}:{settings['port']} ({settings['transport']})"),
        ("machine", f"{machine['cores']} cores, {machine['cpu_model']}"),
        ("load", load),
        ("images", sent),
        ("window", f"{report['window_s']:.3f} s"),
        ("QPS", f"{report['qps']:.1f} images/s, {report['calls_per_s']:.1f} calls/s"),
        ("goodput", f"{report['goodput']:.1f} images/s"),
    ]
    if report["accuracy"] is not None:
        rows.append(("accuracy", f"{report['accuracy']:.4f}"))
    return rows


def _latency_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    titles = {"latency_ms": "latency", "latency_failed_ms": "latency of failed calls"}
    return [(title, _latency(report[key])) for key, title in titles.items() if report[key] or key == "latency_ms"]


def _latency(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "n/a"
    return "  ".join(f"{name.replace('_', '.')} {ms:.2f}" for name, ms in summary.items() if name != "count") + "  ms"


def _error_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("errors", f"{report['images_failed']} images")]
    return rows + [(f"  {kind}", str(images)) for kind, images in report["errors"].items()]


def _cpu_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    cost = (
        f"{_percent(report['tester_cpu_percent'])}, busiest client {_percent(report['tester_busiest_client_percent'])}"
    )
    if report["tester_cpu_us_per_call"] is not None:
        cost += f", {report['tester_cpu_us_per_call']:.1f} µs per call"
    rows = [("server CPU", _percent(report["server_cpu_percent"])), ("tester CPU", cost)]
    if report["host_is_local"] and report["tester_share_of_cpu"] is not None:
        share = f"{report['tester_share_of_cpu']:.0%} of the CPU time spent on this machine"
        rows.append(("tester share", f"{share}, whose cores server and tester share"))
    if report["other_cpu_percent"] is not None:
        rows.append(("other processes", _percent(report["other_cpu_percent"])))
    return rows


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} % of a core"


def _series(images: Sequence[int]) -> str:
    shown = " ".join(map(str, images[:60]))
    return shown + (f" ... ({len(images)} seconds)" if len(images) > 60 else "")


def _verdict(report: dict[str, Any]) -> str:
    if report["interrupted"]:
        return "INTERRUPTED: the numbers are of a part of it"
    failed = report["images_failed"]
    if report["valid"] and failed:
        return f"valid as a measurement, but {failed} images failed"
    return "valid" if report["valid"] else "INVALID: it measures the tester, not the server"


def print_report(report: dict[str, Any]) -> None:
    """The table to stdout; what makes it worthless, or failed, also to stderr."""
    print(format_table(report))
    for warning in report["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if report["errors"]:
        kinds = ", ".join(f"{kind} {images}" for kind, images in report["errors"].items())
        print(f"{report['images_failed']} images failed: {kinds}", file=sys.stderr)
