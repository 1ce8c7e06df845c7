"""The report of a run: a dict for JSON, and the table, page and CSV line made from it."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

from torchpipe_py.errors import UnknownNode, counted
from torchpipe_py.tools import report as shared
from torchpipe_py.tools.load import judge
from torchpipe_py.tools.load.arrivals import Load, Payload
from torchpipe_py.tools.load.measure import cpu_model, node_rows, service_rows
from torchpipe_py.tools.load.records import NO_REPLY, Outcome, Records
from torchpipe_py.tools.report import Axis, Bars, Line, aligned, chart, linear_axis, log_axis

_UNKNOWN_NODE = f":{UnknownNode.code}"  # the end of the name of such an error over Thrift and HTTP
OTHERS_LIMIT = 25.0  # percent of a core, for all processes outside the run
HEADS = ("run", "offered", "QPS", "results/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "failed", "late", "verdict")

_NINES = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999, 99.9999)
_SETTINGS = (
    "request_client",
    "request_batch",
    "arrivals",
    "rate",
    "seed",
    "duration",
    "total_number",
    "slo_p99",
    "priority",
    "node_name",
)
_FIGURES = ("offered_rate", "achieved_rate", "qps", "calls_per_s", "goodput", "window_s", "images_sent")
_COUNTS = ("images_answered", "images_ok", "images_failed", "images_unsent")
_LATENCIES = ("mean", "p50", "p90", "p99", "p99_9", "max", "min")
_CPU = ("server_cpu_percent", "tester_cpu_percent", "tester_busiest_client_percent", "other_cpu_percent")
_COLUMNS = {
    **{name: name for name in ("point", "started_at")},
    **{name: f"settings.{name}" for name in _SETTINGS},
    **{name: name for name in (*_FIGURES, *_COUNTS)},
    **{f"latency_{name}_ms": f"latency_ms.{name}" for name in _LATENCIES},
    **{f"latency_actual_{name}_ms": f"latency_actual_ms.{name}" for name in _LATENCIES},
    **{f"late_share_by_{cause}": f"late_sends.share_by_{cause}" for cause in ("tester", "waiting")},
    "errors": "",
    **{name: name for name in _CPU},
    "slo_met": "slo.met",
    **{name: name for name in ("stable", "valid", "exit_status")},
}
"""Columns of the CSV file, and the places of their values in a report."""


# --- one dict


def describe_run(settings: Mapping[str, Any], payload: Payload, libraries: Sequence[str]) -> dict[str, Any]:
    """The first part of the report: settings and machine. ``libraries`` are packages to list with versions."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in libraries:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "command": [sys.executable, *sys.argv],
        "started_at": datetime.now(timezone.utc).isoformat(),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "image_files": len(payload.bodies),
        "image_bytes_mean": sum(map(len, payload.bodies)) / len(payload.bodies),
        "versions": versions,
        "machine": {
            "cores": os.cpu_count(),
            "cores_usable": len(os.sched_getaffinity(0)),
            "cpu_model": cpu_model(),
            "system": platform.platform(),
        },
    }


def make_report(
    outcome: Outcome,
    records: Records,
    about: dict[str, Any],
    cpu: dict[str, Any],
    limits: Sequence[str],
    labelled: bool,
) -> dict[str, Any]:
    """The whole report, ready for JSON. Latencies in ms, CPU in percent of one core; null means unknown.

    Counts are in images, except ``calls`` and ``calls_answered``; "answered" means with a reply, including errors. The
    window is from the start of the clients to the last reply. ``latency_ms`` is for calls with a result, ``goodput``
    the images per second with a result within ``--slo-p99``, or at any time without it. ``limits`` are the reasons why
    the run measured the tester instead of its subject.
    """
    replied = records.ok != NO_REPLY
    in_time = replied & (records.latency <= 1e6 * (about["settings"].get("slo_p99") or float("inf")))
    sent, answered, ok = (int(images.sum()) for images in (records.size, records.size[replied], records.ok[replied]))
    replies = records.end[replied]
    window = int((replies if len(replies) else records.end).max(initial=0)) / 1e9
    warnings = [f"the tester is the limit: {reason}" for reason in limits]
    if cpu["other_cpu_percent"] is not None and cpu["other_cpu_percent"] > OTHERS_LIMIT:
        warnings.append(f"other processes used {cpu['other_cpu_percent']:.0f}% of a core")
    errors = outcome.tally.errors
    if about["settings"].get("node_name") is None and any(kind.endswith(_UNKNOWN_NODE) for kind in errors):
        warnings.append("the service has several models: give the one to load as --node_name")
    return {
        **about,
        "window_s": window,
        "images_sent": sent,
        "images_answered": answered,
        "images_ok": ok,
        "calls": len(records.end),
        "calls_answered": len(replies),
        "qps": answered / (window or float("inf")),
        "calls_per_s": len(replies) / (window or float("inf")),
        "goodput": int(records.ok[in_time].sum()) / (window or float("inf")),
        "images_failed": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "error_examples": outcome.tally.examples,
        "accuracy": sum(log.correct for log in outcome.logs) / answered if labelled and answered else None,
        "latency_ms": judge.summarize(records.good("latency")),
        "latency_failed_ms": judge.summarize(records.latency[records.ok <= 0]),
        "images_ok_per_second": judge.ok_per_second(records),
        **cpu,
        "interrupted": outcome.interrupted,
        "warnings": warnings,
        "valid": not limits and not outcome.interrupted,
    }


def load_fields(records: Records, report: dict[str, Any], load: Load) -> dict[str, Any]:
    """Data for charts and, for an open loop (``latency_ms`` counts from when calls were due), whether it kept up."""
    fields = {
        "per_second": judge.per_second(records, load.offered_images()),
        "percentiles_ms": judge.percentile_curve(records.good("latency")),
        "histogram_ms": judge.histogram(records.good("latency")),
    }
    if not load.is_open:
        return fields
    # Images dropped because the run was too late; those of broken clients are among the errors.
    owed = sum(report["errors"].get(kind, 0) for kind in ("unsent", "ClientProcessDied"))
    unsent = 0 if report["interrupted"] else max(0, (load.total or 0) - report["images_sent"] - owed)
    offered = load.offered_rate or report["qps"]  # a single call has no rate
    mean = float(records.actual.mean()) / 1e6 if len(records.actual) else 0.0
    late = judge.late_sends(records, load)
    return {
        **fields,
        "percentiles_actual_ms": judge.percentile_curve(records.good("actual")),
        "latency_actual_ms": judge.summarize(records.good("actual")),
        **judge.stability(records.good("latency"), offered, report["images_answered"], report["window_s"], unsent),
        "late_sends": late,
        "warnings": report["warnings"] + judge.late_warnings(late, len(load.plans), report["calls_per_s"], mean),
    }


# --- the table


def run_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """One run of ``load`` or ``bench`` as names and values: the answer, what to mind about it, then the details."""
    settings, is_bench = report["settings"], "config" in report["settings"]
    rows = [("run", _verdict(report)), *_answer_rows(report)]
    rows += [("WARNING", warning) for warning in report["warnings"]]
    machine = report["machine"]
    clients, images_each = counted(settings["request_client"], "client"), counted(settings["request_batch"], "image")
    more = ", priority 1 (low)" if settings.get("priority") else ""
    more += f", --node_name {settings['node_name']}" if settings.get("node_name") else ""
    about = "{config} in this process, clients are threads" if is_bench else "{host}:{port} ({transport})"
    rows += [
        ("config" if is_bench else "server", about.format_map(settings)),
        ("machine", f"{machine['cores']} cores, {machine['cpu_model']}"),
        ("load", f"{clients}, {describe_arrivals(settings)}, {images_each} per call{more}"),
        ("warm-up", f"{counted(report['warmup_calls'], 'call')} before it, not counted (--warmup)"),
        ("images", "{images_sent} sent, {images_answered} answered, {images_ok} with a result".format_map(report)),
        ("window", f"{report['window_s']:.3f} s"),
    ]
    images = report["images_ok_per_second"][: int(report["window_s"])]  # the last second is not a whole one
    more = f" ... ({len(images)} seconds)" if len(images) > 60 else ""
    rows += [("per second", " ".join(map(str, images[:60])) + more)] if images else []
    if is_bench:
        rows += node_rows(report["nodes"])
        rows.append(("process CPU", f"{_cpu(report['process_cpu_percent'])}, pipe and clients"))
    else:
        rows += _load_rows(report)
    if report["other_cpu_percent"] is not None:
        rows.append(("other processes", _cpu(report["other_cpu_percent"])))
    return rows


def _verdict(report: dict[str, Any]) -> str:
    """The verdict on the figures."""
    failed = report["images_failed"]
    parts = ["FAILED: no image has a result, QPS counts errors"] if failed and not report["images_ok"] else []
    if report["interrupted"]:
        parts.append("INTERRUPTED: the numbers are of a part of it")
    elif not report["valid"]:
        parts.append("INVALID: it measures the tester itself")
    elif not parts and report.get("tester_limited"):
        parts.append("valid for the SLO only: other figures include the tester")
    elif not parts:
        parts.append(f"valid as a measurement, but {counted(failed, 'image')} failed" if failed else "valid")
    return "; ".join(parts)


def _answer_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Throughput, latency, and whether the limits were kept."""
    rows = [
        ("QPS", f"{report['qps']:.1f} images/s, {report['calls_per_s']:.1f} calls/s"),
        ("results", f"{report['images_ok'] / (report['window_s'] or float('inf')):.1f} images/s"),
    ]
    rows += [("goodput", _results(report, " images/s"))] if report["settings"].get("slo_p99") else []
    for key, title in (("", "latency"), ("actual_", "latency from send"), ("failed_", "latency of failed calls")):
        if summary := report.get(f"latency_{key}ms"):
            figures = (f"{name.replace('_', '.')} {ms:.2f}" for name, ms in summary.items() if name != "count")
            rows.append((title, "  ".join(figures) + "  ms"))
        elif not key:
            rows.append((title, "n/a"))
    if (slo := report.get("slo")) is not None:
        measured = "none" if slo["p99_ms"] is None else f"{slo['p99_ms']:.2f} ms"
        rows.append(("SLO", f"{'met' if slo['met'] else 'MISSED'}: p99 {measured}, limit {slo['p99_limit_ms']:g} ms"))
    if "stable" in report:
        late = report["late_sends"]
        blame = f"{late['share_by_waiting']:.1%} waiting for a reply, {late['share_by_tester']:.1%} the tester's own"
        rows += [
            ("stability", "stable" if report["stable"] else "UNSTABLE: " + "; ".join(report["unstable_because"])),
            ("rate", f"{report['achieved_rate']:.1f} of {report['offered_rate']:.1f} images/s offered"),
            ("late sends", f"{late['share']:.1%} by more than {late['threshold_ms']:g} ms: {blame}"),
        ]
    if report["accuracy"] is not None:
        rows.append(("accuracy", f"{report['accuracy']:.4f}"))
    rows.append(("errors", counted(report["images_failed"], "image")))
    examples = report["error_examples"]
    for kind, count in report["errors"].items():
        rows.append((f"  {kind}", f"{count}, for example: {examples[kind]}" if kind in examples else str(count)))
    return rows


def _load_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """CPU and GPU use of server and tester, and the service's figures."""
    rows: list[tuple[str, str]] = []
    cost = f"{_cpu(report['tester_cpu_percent'])}, busiest process {_cpu(report['tester_busiest_client_percent'])}"
    if report["tester_cpu_us_per_call"] is not None:
        cost += f", {report['tester_cpu_us_per_call']:.1f} µs per call"
    rows += [("server CPU", _cpu(report["server_cpu_percent"])), ("tester CPU", cost)]
    if report["host_is_local"] and report["tester_share_of_cpu"] is not None:
        share = f"{report['tester_share_of_cpu']:.0%} of the CPU time spent on this machine"
        rows.append(("tester share", f"{share}; server and tester share its cores"))
    for gpu in report["gpus"] or ():
        shown = {name: f"{value:.0f}" if isinstance(value, float) else value or "n/a" for name, value in gpu.items()}
        figures = "{name}, {utilization_mean} % busy (most {utilization_max} %), {memory_used_max_mib} of "
        figures += "{memory_total_mib} MiB, {samples} samples; all processes together"
        rows.append((f"GPU {gpu['index']}", figures.format_map(shown)))
    return rows + service_rows(report["service"])


def describe_arrivals(settings: dict[str, Any]) -> str:
    """A description of when calls are sent."""
    arrivals, rate = settings.get("arrivals", "closed"), settings.get("rate")
    if arrivals == "closed":
        return "closed loop"
    at = "" if rate is None else f" at {rate:g} images/s"
    if arrivals == "replay":
        return f"replay of {settings['replay']}{at}"
    return f"{arrivals} arrivals{at}" + (f", seed {settings['seed']}" if arrivals == "poisson" else "")


def _results(report: dict[str, Any], unit: str = "") -> str:
    """Images per second with a result, and the SLO that they are counted against, if there is one."""
    slo_ms = report["settings"].get("slo_p99")
    return f"{report['goodput']:.1f}{unit}" + (f" within {slo_ms:g} ms" if slo_ms else "")


def _cpu(value: float | None) -> str:
    """CPU use, given in percent of a core."""
    return "n/a" if value is None else f"{value:.0f} % of a core"


def run_cells(report: dict[str, Any]) -> tuple[str, ...]:
    """One of several runs as a line, under ``HEADS``."""
    latency = report["latency_ms"] or {}
    offered, late = report.get("offered_rate"), report.get("late_sends")
    return (
        report.get("point", "run"),
        "-" if offered is None else f"{offered:.1f}",
        f"{report['qps']:.1f}",
        _results(report),
        *(f"{latency[name]:.2f}" if name in latency else "-" for name in ("p50", "p90", "p99", "p99_9")),
        str(report["images_failed"]),
        "-" if late is None else f"{late['share']:.1%}",
        judge.verdict(report),
    )


def search_line(report: dict[str, Any]) -> str:
    """The result of a search."""
    search = report["search"]
    limit = f"p99 within {search['slo_p99_ms']:g} ms, {search['arrivals']} arrivals"
    if report["stopped"] is not None:
        return f"no result ({limit}): {report['stopped']}"
    failed, open_at = search["lowest_rate_that_failed"], search["undecided_rates"]
    if search["best_rate"] is None and open_at:
        return f"no result ({limit}): the tester shares the cores and cannot tell, from {open_at[0]:.4g} images/s on"
    if search["best_rate"] is None:
        return f"no rate holds ({limit}); the lowest tried: {failed:.4g} images/s"
    above = [] if failed is None else [f"{failed:.4g} did not hold"]
    if open_at:
        above.append(f"at {open_at[0]:.4g} the tester, on shared cores, cannot tell")
    above = above or ["nothing higher was tried"]
    return f"highest rate that holds: {search['best_rate']:.4g} images/s ({'; '.join([limit, *above])})"


def print_report(report: dict[str, Any]) -> None:
    """Print the table of one or several runs to stdout; the warnings of several, which it lacks, to stderr."""
    if "runs" in report:
        print("\n".join(aligned(map(run_cells, report["runs"]), HEADS)))
        if "search" in report:
            print(search_line(report))
        elif report["stopped"] is not None:
            print(f"the sweep is not complete: {report['stopped']}")
        for run in report["runs"]:
            for warning in [*run["warnings"], *run.get("unstable_because", ())]:
                print(f"{run['point']}: {warning}", file=sys.stderr)
        return
    print("\n".join(aligned(run_rows(report))))


# --- the CSV file


def csv_text(reports: Sequence[dict[str, Any]]) -> str:
    """A line for each run; cells are empty if unknown or meaningless for the run."""

    def find(report: dict[str, Any], place: str) -> Any:
        value: Any = report
        for key in place.split("."):
            value = (value or {}).get(key)
        return value

    text = io.StringIO()
    writer = csv.DictWriter(text, [*_COLUMNS, "verdict"] if reports else [])
    writer.writeheader()
    for report in reports:
        row = {column: find(report, place) for column, place in _COLUMNS.items()}
        errors = " ".join(f"{kind}={images}" for kind, images in report["errors"].items())
        writer.writerow(row | {"errors": errors, "verdict": judge.verdict(report)})
    return text.getvalue()


# --- the page


def page(report: dict[str, Any]) -> str:
    """The HTML file of one or several runs; all text from servers and users is escaped."""
    runs = report.get("runs", [report])
    last = runs[-1]
    parts = [f'<p class="hint">{escape(last["started_at"][:19].replace("T", " "))} UTC</p>']
    if "runs" not in report:
        parts += _run_parts(report)
    else:
        if "search" in report:
            parts.append(shared.verdict(search_line(report), report["search"]["best_rate"] is not None))
        elif report["stopped"] is not None:
            parts.append(shared.verdict(report["stopped"], False))
        parts.append(shared.table(HEADS, map(run_cells, runs), f"Runs ({len(runs)})", range(1, len(HEADS) - 1)))
        parts.append(shared.charts(_runs_charts([run for run in runs if run["latency_ms"] is not None])))
        for run in runs:
            summary = f"<summary>{escape(run['point'])}: {escape(judge.verdict(run))}</summary>"
            parts += [f"<details>{summary}", *_run_parts(run), "</details>"]
    about = {**last["machine"], **{f"{name} version": version for name, version in last["versions"].items()}}
    about |= {name: value for name, value in last["settings"].items() if value is not None}
    about["images"] = f"{last['image_files']}, {last['image_bytes_mean'] / 1000:.1f} kB each on average"
    settings = [(name, str(value)) for name, value in about.items()]
    parts.append(shared.table((), settings, "Machine and settings" + " of the last run" * (len(runs) > 1)))
    parts.append(f"<h2>Command</h2><p><code>{escape(shlex.join(last['command']))}</code></p>")
    return shared.page(f"Load test of {last['settings']['host']}:{last['settings']['port']}", parts)


def _run_parts(report: dict[str, Any]) -> list[str]:
    is_good = not report["exit_status"] and report["valid"]
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.get("unstable_because", ()))
    return [
        shared.verdict(judge.verdict(report), is_good),
        f"<ul>{notes}</ul>" if notes else "",
        shared.charts(_run_charts(report)),
        shared.table((), run_rows(report)),
    ]


def _nines(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Percentiles over 1 / (1 - share), so that 90 to 99 takes as much room as 99 to 99.9."""
    return [(100 / (100 - percent), ms) for percent, ms in curve]


def _nines_axis(highest: float) -> Axis:
    ticks = [(100 / (100 - percent), f"{percent:g} %") for percent in _NINES if percent <= highest + 1e-9]
    return log_axis("percentile", 1.0, max(10.0, 100 / (100 - highest)), ticks)


def _limit(report: dict[str, Any]) -> tuple[str, float] | None:
    slo = report["slo"]
    return slo and (f"p99 limit {slo['p99_limit_ms']:g} ms", slo["p99_limit_ms"])


def _run_charts(report: dict[str, Any]) -> Iterator[str]:
    """Charts of percentiles, a histogram of latencies, and throughput and latency by second, as far as available."""
    curve, bars = report["percentiles_ms"], report["histogram_ms"]
    rows = report["per_second"][: int(report["window_s"])]  # the last second is not a whole one
    is_open = "stable" in report
    if curve:
        lines = [Line("from when it was due" if is_open else "latency", _nines(curve), "blue")]
        if is_open:
            lines.append(Line("from the send", _nines(report["percentiles_actual_ms"]), "orange", dashed=True))
        yield chart("Latency by percentile", _nines_axis(curve[-1][0]), "ms", lines, _limit(report))
    if bars:
        name = "calls, from when they were due" if is_open else "calls"
        y = linear_axis("calls", 0, max(bar[2] for bar in bars), least_step=1)
        yield chart("Latencies", log_axis("ms, log scale", bars[0][0], bars[-1][1]), y, [Bars(name, bars, "blue")])
    if len(rows) < 2:
        return
    x = linear_axis("seconds since the start", 0, len(rows), exact=True, least_step=1)

    def line(key: str, name: str, color: str, dashed: bool = False) -> Line:
        """A point in the middle of each second."""
        points = [None if row[key] is None else (row["second"] + 0.5, row[key]) for row in rows]
        return Line(name, points, color, dashed, dots=len(rows) <= 60 and not dashed)

    lines = [line("ok", "with a result", "blue")]
    lines += [line("offered", "offered", "orange", dashed=True)] if is_open else []
    lines += [line("failed", "failed", "red")] if any(row["failed"] for row in rows) else []
    most = max(row[name] for row in rows for name in ("ok", "offered", "failed"))
    yield chart("Throughput", x, linear_axis("images in a second", 0, most), lines)
    if any(row["p50_ms"] is not None for row in rows):
        lines = [line("p50_ms", "p50", "blue"), line("p99_ms", "p99", "orange")]
        yield chart("Latency by the second in which calls were due", x, "ms", lines, _limit(report))


def _runs_charts(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Charts of latency over throughput, and of the percentiles of some runs, evenly chosen."""
    if not reports:
        return
    paced = [run for run in reports if run.get("offered_rate") is not None]
    key = "offered_rate" if paced else "qps"
    chosen = sorted(paced or reports, key=lambda run: run[key] if paced else run["settings"]["request_client"])
    if len(chosen) > 1:
        p50, p99 = ([(run[key], run["latency_ms"][name]) for run in chosen] for name in ("p50", "p99"))
        labels = [] if paced else [str(run["settings"]["request_client"]) for run in chosen]
        name = "p99" if paced else "p99, at so many clients"
        lines = [Line("p50", p50, "blue", dots=True), Line(name, p99, "orange", dots=True, labels=labels)]
        label = f"images per second, {'offered' if paced else 'answered'}"
        x = linear_axis(label, min(run[key] for run in chosen), max(run[key] for run in chosen))
        yield chart("Latency by throughput", x, "ms", lines, _limit(chosen[0]))
    some = reports[:: max(1, -(-len(reports) // len(shared.COLORS)))]
    curves = [(run["point"], run["percentiles_ms"]) for run in some]
    lines = [Line(point, _nines(curve), color) for (point, curve), color in zip(curves, shared.COLORS, strict=False)]
    yield chart("Latency by percentile", _nines_axis(max(curve[-1][0] for _, curve in curves)), "ms", lines)
