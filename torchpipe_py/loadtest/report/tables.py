"""What the load tester prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchpipe_py.loadtest.measure.cost import cpu_rows
from torchpipe_py.loadtest.measure.gpu import gpu_rows
from torchpipe_py.loadtest.report.summary import Rows, format_table
from torchpipe_py.loadtest.report.verdict import verdict

HEADS = ("run", "offered", "QPS", "goodput", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "failed", "late", "verdict")


def run_table(report: dict[str, Any]) -> str:
    """One run: names and values."""
    settings = report["settings"]
    server = f"{settings['host']}:{settings['port']} ({settings['transport']})"
    rows = [*_open_rows(report), *_slo_rows(report), *cpu_rows(report), *gpu_rows(report["gpus"])]
    return format_table(report, [("server", server)], rows, describe_arrivals(settings))


def describe_arrivals(settings: dict[str, Any]) -> str:
    """When calls are sent, in words."""
    arrivals, rate = settings["arrivals"], settings["rate"]
    if arrivals == "closed":
        return "closed loop"
    at = "" if rate is None else f" at {rate:g} images/s"
    if arrivals == "replay":
        return f"replay of {settings['replay']}{at}"
    return f"{arrivals} arrivals{at}" + (f", seed {settings['seed']}" if arrivals == "poisson" else "")


def _open_rows(report: dict[str, Any]) -> Rows:
    if "stable" not in report:
        return []
    late, rates = report["late_sends"], (report["achieved_rate"], report["offered_rate"])
    blame = f"{late['share_by_waiting']:.1%} behind a reply, {late['share_by_tester']:.1%} the tester's own"
    stability = "stable" if report["stable"] else "UNSTABLE: " + "; ".join(report["unstable_because"])
    return [
        ("rate", f"{rates[0]:.1f} of {rates[1]:.1f} images/s offered"),
        ("late sends", f"{late['share']:.1%} by more than {late['threshold_ms']:g} ms: {blame}"),
        ("stability", stability),
    ]


def _slo_rows(report: dict[str, Any]) -> Rows:
    slo = report["slo"]
    if slo is None:
        return []
    measured = "none" if slo["p99_ms"] is None else f"{slo['p99_ms']:.2f} ms"
    return [("SLO", f"{'met' if slo['met'] else 'MISSED'}: p99 {measured}, limit {slo['p99_limit_ms']:g} ms")]


def runs_table(reports: Sequence[dict[str, Any]]) -> str:
    """Several runs: a line for each."""
    lines = [HEADS, *(run_cells(report) for report in reports)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(_pad(line, widths)).rstrip() for line in lines)


def _pad(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Words to the left, numbers to the right."""
    ends = (0, len(line) - 1)
    cells = enumerate(zip(line, widths, strict=True))
    return [text.ljust(width) if at in ends else text.rjust(width) for at, (text, width) in cells]


def run_cells(report: dict[str, Any]) -> tuple[str, ...]:
    """One run as a line, under `HEADS`."""
    latency = report["latency_ms"] or {}
    offered, late = report.get("offered_rate"), report.get("late_sends")
    return (
        report.get("point", "run"),
        "-" if offered is None else f"{offered:.1f}",
        f"{report['qps']:.1f}",
        f"{report['goodput']:.1f}",
        *(f"{latency[name]:.2f}" if name in latency else "-" for name in ("p50", "p90", "p99", "p99_9")),
        str(report["images_failed"]),
        "-" if late is None else f"{late['share']:.1%}",
        verdict(report),
    )


def search_line(report: dict[str, Any]) -> str:
    """What a search found."""
    search = report["search"]
    limit = f"p99 within {search['slo_p99_ms']:g} ms, {search['arrivals']} arrivals"
    if report["stopped"] is not None:
        return f"no result ({limit}): {report['stopped']}"
    if search["best_rate"] is None:
        return f"no rate holds ({limit}); the lowest tried: {search['lowest_rate_that_failed']:.4g} images/s"
    failed = search["lowest_rate_that_failed"]
    above = "nothing higher was tried" if failed is None else f"{failed:.4g} did not hold"
    doubt = "" if search["valid"] else "; some runs are INVALID, so the limit may be the tester's"
    return f"highest rate that holds: {search['best_rate']:.4g} images/s ({limit}; {above}){doubt}"
