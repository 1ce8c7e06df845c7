"""The report for a person: what the load tester prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_py.loadtest.measure.service import service_rows
from torchpipe_py.loadtest.measure.verdict import verdict

Rows = list[tuple[str, str]]
"""Names and values of the table."""

HEADS = ("run", "offered", "QPS", "goodput", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "failed", "late", "verdict")


# --- one run


def run_table(report: dict[str, Any]) -> str:
    """A run of ``torchpipe load``: names and values."""
    settings, slo = report["settings"], report["slo"]
    rows: Rows = []
    if "stable" in report:
        late = report["late_sends"]
        blame = f"{late['share_by_waiting']:.1%} behind a reply, {late['share_by_tester']:.1%} the tester's own"
        rows += [
            ("rate", f"{report['achieved_rate']:.1f} of {report['offered_rate']:.1f} images/s offered"),
            ("late sends", f"{late['share']:.1%} by more than {late['threshold_ms']:g} ms: {blame}"),
            ("stability", "stable" if report["stable"] else "UNSTABLE: " + "; ".join(report["unstable_because"])),
        ]
    if slo is not None:
        measured = "none" if slo["p99_ms"] is None else f"{slo['p99_ms']:.2f} ms"
        met = "met" if slo["met"] else "MISSED"
        rows.append(("SLO", f"{met}: p99 {measured}, limit {slo['p99_limit_ms']:g} ms"))
    cost = f"{format_cpu(report['tester_cpu_percent'])}, busiest client "
    cost += format_cpu(report["tester_busiest_client_percent"])
    if report["tester_cpu_us_per_call"] is not None:
        cost += f", {report['tester_cpu_us_per_call']:.1f} µs per call"
    rows += [("server CPU", format_cpu(report["server_cpu_percent"])), ("tester CPU", cost)]
    if report["host_is_local"] and report["tester_share_of_cpu"] is not None:
        share = f"{report['tester_share_of_cpu']:.0%} of the CPU time spent on this machine"
        rows.append(("tester share", f"{share}, whose cores server and tester share"))
    rows += [(f"GPU {gpu['index']}", _gpu_line(gpu)) for gpu in report["gpus"] or ()]
    rows += service_rows(report["service"])
    server = f"{settings['host']}:{settings['port']} ({settings['transport']})"
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


def _gpu_line(gpu: dict[str, Any]) -> str:
    names = ("utilization_mean", "utilization_max", "memory_used_max_mib", "memory_total_mib")
    busy, most, used, total = ("n/a" if gpu[name] is None else f"{gpu[name]:.0f}" for name in names)
    figures = f"{busy} % busy (most {most} %), {used} of {total} MiB, {gpu['samples']} samples"
    return f"{gpu['name']}, {figures}; all processes together"


def format_table(report: dict[str, Any], subject: Rows, cpu: Rows, loop: str = "closed loop") -> str:
    """The report for a person: aligned names and values, from what was tested to what it cost.

    ``loop`` says when the clients call.
    """
    settings, machine, images = report["settings"], report["machine"], report["images_ok_per_second"]
    clients, images_each = counted(settings["request_client"], "client"), counted(settings["request_batch"], "image")
    sent = f"{report['images_sent']} sent, {report['images_answered']} answered, {report['images_ok']} with a result"
    rows = [
        *subject,
        ("machine", f"{machine['cores']} cores, {machine['cpu_model']}"),
        ("load", f"{clients}, {loop}, {images_each} per call"),
        ("images", sent),
        ("window", f"{report['window_s']:.3f} s"),
        ("QPS", f"{report['qps']:.1f} images/s, {report['calls_per_s']:.1f} calls/s"),
        ("goodput", f"{report['goodput']:.1f} images/s"),
    ]
    if report["accuracy"] is not None:
        rows.append(("accuracy", f"{report['accuracy']:.4f}"))
    rows.append(("latency", _latency(report["latency_ms"])))
    for key, title in (("actual", "latency from send"), ("failed", "latency of failed calls")):
        if report.get(f"latency_{key}_ms"):
            rows.append((title, _latency(report[f"latency_{key}_ms"])))
    rows.append(("errors", counted(report["images_failed"], "image")))
    rows += [(f"  {kind}", str(count)) for kind, count in report["errors"].items()]
    rows += cpu
    if report["other_cpu_percent"] is not None:
        rows.append(("other processes", format_cpu(report["other_cpu_percent"])))
    cut = f" ... ({len(images)} seconds)" if len(images) > 60 else ""
    rows.append(("per second", " ".join(map(str, images[:60])) + cut))
    rows += [("WARNING", warning) for warning in report["warnings"]]
    if report["interrupted"]:
        rows.append(("run", "INTERRUPTED: the numbers are of a part of it"))
    elif not report["valid"]:
        rows.append(("run", "INVALID: it measures the tester itself"))
    else:
        failed = report["images_failed"]
        rows.append(("run", f"valid as a measurement, but {counted(failed, 'image')} failed" if failed else "valid"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _latency(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "n/a"
    return "  ".join(f"{name.replace('_', '.')} {ms:.2f}" for name, ms in summary.items() if name != "count") + "  ms"


def format_cpu(value: float | None) -> str:
    """CPU time in percent of a core."""
    return "n/a" if value is None else f"{value:.0f} % of a core"


def print_report(report: dict[str, Any], table: str) -> None:
    """The table to stdout; what makes it worthless, or failed, also to stderr."""
    print(table)
    for warning in report["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if report["errors"]:
        kinds = ", ".join(f"{kind} {images}" for kind, images in report["errors"].items())
        print(f"{counted(report['images_failed'], 'image')} failed: {kinds}", file=sys.stderr)
    for kind, message in report["error_examples"].items():
        print(f"{kind}, for example: {message}", file=sys.stderr)


# --- several runs


def runs_table(reports: Sequence[dict[str, Any]]) -> str:
    """Several runs: a line for each."""
    lines = [HEADS, *(run_cells(report) for report in reports)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    last = len(HEADS) - 1
    shown = []
    for line in lines:  # words to the left, numbers to the right
        cells = enumerate(zip(line, widths, strict=True))
        padded = [text.ljust(width) if at in (0, last) else text.rjust(width) for at, (text, width) in cells]
        shown.append("  ".join(padded).rstrip())
    return "\n".join(shown)


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
    """The result of a search."""
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
