"""The report for a person: what the load tester prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torchpipe_py.loadtest.measure.verdict import verdict

Rows = list[tuple[str, str]]
"""Names and values of the table."""

HEADS = ("run", "offered", "QPS", "goodput", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "failed", "late", "verdict")


# --- one run


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


def cpu_rows(report: dict[str, Any]) -> Rows:
    """The table's part about CPU time."""
    busiest = format_cpu(report["tester_busiest_client_percent"])
    cost = f"{format_cpu(report['tester_cpu_percent'])}, busiest client {busiest}"
    if report["tester_cpu_us_per_call"] is not None:
        cost += f", {report['tester_cpu_us_per_call']:.1f} µs per call"
    rows = [("server CPU", format_cpu(report["server_cpu_percent"])), ("tester CPU", cost)]
    if report["host_is_local"] and report["tester_share_of_cpu"] is not None:
        share = f"{report['tester_share_of_cpu']:.0%} of the CPU time spent on this machine"
        rows.append(("tester share", f"{share}, whose cores server and tester share"))
    return rows


def gpu_rows(gpus: list[dict[str, Any]] | None) -> Rows:
    """The table's part: a line for each GPU."""
    return [(f"GPU {gpu['index']}", _gpu_line(gpu)) for gpu in gpus or ()]


def _gpu_line(gpu: dict[str, Any]) -> str:
    def show(name: str) -> str:
        return "n/a" if gpu[name] is None else f"{gpu[name]:.0f}"

    use = f"{show('utilization_mean')} % busy (most {show('utilization_max')} %)"
    memory = f"{show('memory_used_max_mib')} of {show('memory_total_mib')} MiB"
    return f"{gpu['name']}, {use}, {memory}, {gpu['samples']} samples; all processes together"


def format_table(report: dict[str, Any], subject: Rows, cpu: Rows, loop: str = "closed loop") -> str:
    """The report for a person: aligned names and values, from what was tested to what it cost.

    ``loop`` says when the clients call.
    """
    rows = [*subject, *_load_rows(report, loop), *_latency_rows(report), *_error_rows(report), *cpu]
    if report["other_cpu_percent"] is not None:
        rows.append(("other processes", format_cpu(report["other_cpu_percent"])))
    rows += [("per second", _series(report["images_ok_per_second"]))]
    rows += [("WARNING", warning) for warning in report["warnings"]]
    rows += [("run", _verdict(report))]
    return align(rows)


def align(rows: Rows) -> str:
    """A line for each name and value."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _load_rows(report: dict[str, Any], loop: str) -> Rows:
    settings, machine = report["settings"], report["machine"]
    load = f"{settings['request_client']} clients, {loop}, {settings['request_batch']} image(s) per call"
    sent = f"{report['images_sent']} sent, {report['images_answered']} answered, {report['images_ok']} with a result"
    rows = [
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


def _latency_rows(report: dict[str, Any]) -> Rows:
    titles = {"latency_ms": "latency", "latency_actual_ms": "latency from send"}
    titles["latency_failed_ms"] = "latency of failed calls"
    return [(title, _latency(report[key])) for key, title in titles.items() if report.get(key) or key == "latency_ms"]


def _latency(summary: dict[str, float] | None) -> str:
    if summary is None:
        return "n/a"
    return "  ".join(f"{name.replace('_', '.')} {ms:.2f}" for name, ms in summary.items() if name != "count") + "  ms"


def _error_rows(report: dict[str, Any]) -> Rows:
    rows = [("errors", f"{report['images_failed']} images")]
    return rows + [(f"  {kind}", str(images)) for kind, images in report["errors"].items()]


def format_cpu(value: float | None) -> str:
    """CPU time in percent of a core."""
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
    return "valid" if report["valid"] else "INVALID: it measures the tester itself"


def print_report(report: dict[str, Any], table: str) -> None:
    """The table to stdout; what makes it worthless, or failed, also to stderr."""
    print(table)
    for warning in report["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if report["errors"]:
        kinds = ", ".join(f"{kind} {images}" for kind, images in report["errors"].items())
        print(f"{report['images_failed']} images failed: {kinds}", file=sys.stderr)


# --- several runs


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
