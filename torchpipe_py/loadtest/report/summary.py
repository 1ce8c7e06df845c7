"""The report of a run: one dict, and the files made of it."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from torchpipe_py.files import output_problem
from torchpipe_py.loadtest.arrivals import Load
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.measure.cpu import cpu_model
from torchpipe_py.loadtest.measure.statistics import histogram, ok_per_second, per_second, percentile_curve, summarize
from torchpipe_py.loadtest.measure.verdict import Lateness, judge_stability, verdict
from torchpipe_py.loadtest.plans import Payload
from torchpipe_py.loadtest.records import NO_REPLY, Outcome, Records

OTHERS_LIMIT = 25.0  # percent of a core, for all processes that have no part in the run

_CSV_SETTINGS = ("request_client", "request_batch", "arrivals", "rate", "seed", "duration", "total_number")
_CSV_FIGURES = ("offered_rate", "achieved_rate", "qps", "calls_per_s", "goodput", "window_s", "images_sent")
_CSV_COUNTS = ("images_answered", "images_ok", "images_failed", "images_unsent")
_CSV_LATENCIES = ("mean", "p50", "p90", "p99", "p99_9", "max", "min")
_CSV_CPU = ("server_cpu_percent", "tester_cpu_percent", "tester_busiest_client_percent", "other_cpu_percent")
_CSV_VERDICTS = ("stable", "valid", "exit_status")


def describe_run(settings: Mapping[str, Any], payload: Payload, libraries: Sequence[str]) -> dict[str, Any]:
    """What is run, and where: the report's first part. ``libraries`` are packages whose versions matter."""
    return {
        "command": [sys.executable, *sys.argv],
        "started_at": datetime.now(timezone.utc).isoformat(),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "image_files": len(payload.bodies),
        "image_bytes_mean": sum(map(len, payload.bodies)) / len(payload.bodies),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in libraries}},
        "machine": {
            "cores": os.cpu_count(),
            "cores_usable": len(os.sched_getaffinity(0)),
            "cpu_model": cpu_model(),
            "system": platform.platform(),
        },
    }


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_report(
    outcome: Outcome,
    records: Records,
    about: dict[str, Any],
    cpu: dict[str, Any],
    limits: Sequence[str],
    labelled: bool,
) -> dict[str, Any]:
    """Everything there is to say, ready for JSON. Latencies in ms, CPU in percent of one core; null is "not known".

    Counts are in images, but for ``calls`` and ``calls_answered``; answered are those that had a reply, be it an error.
    The window runs from the release of the clients to the last reply. ``latency_ms`` is of calls that brought a result.
    ``limits`` are the reasons why the run measured the tester and not its subject.
    """
    sent, answered, ok = (sum(getattr(log, name) for log in outcome.logs) for name in ("sent", "answered", "images_ok"))
    replies = [end for end, images in zip(records.end, records.ok, strict=True) if images != NO_REPLY]
    failed = [ns for ns, images in zip(records.latency, records.ok, strict=True) if images <= 0]
    window = max(replies or records.end, default=0) / 1e9
    warnings = [f"the tester is the limit: {reason}" for reason in limits]
    if cpu["other_cpu_percent"] is not None and cpu["other_cpu_percent"] > OTHERS_LIMIT:
        warnings.append(f"other processes used {cpu['other_cpu_percent']:.0f}% of a core")
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
        "goodput": ok / (window or float("inf")),
        "images_failed": sum(outcome.errors.values()),
        "errors": dict(outcome.errors.most_common()),
        "error_examples": outcome.examples,
        "accuracy": sum(log.correct for log in outcome.logs) / answered if labelled and answered else None,
        "latency_ms": summarize(records.good("latency")),
        "latency_failed_ms": summarize(failed),
        "images_ok_per_second": ok_per_second(records),
        **cpu,
        "interrupted": outcome.interrupted,
        "warnings": warnings,
        "valid": not limits and not outcome.interrupted,
    }


def open_loop_fields(records: Records, report: dict[str, Any], lateness: Lateness, load: Load) -> dict[str, Any]:
    """The report's part about an open loop; `latency_ms` is from when calls were due, for it is so in the records."""
    assert load.total is not None
    # Images that were left out because the run was too late for them; what broken clients owe is among the errors.
    owed = sum(report["errors"].get(kind, 0) for kind in ("unsent", "ClientProcessDied"))
    unsent = 0 if report["interrupted"] else max(0, load.total - report["images_sent"] - owed)
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


def plot_fields(records: Records, load: Load) -> dict[str, Any]:
    """What the plots show."""
    fields = {
        "per_second": per_second(records, load.offered_images()),
        "percentiles_ms": percentile_curve(records.good("latency")),
        "histogram_ms": histogram(records.good("latency")),
    }
    if load.is_open:
        fields["percentiles_actual_ms"] = percentile_curve(records.good("actual"))
    return fields


# --- files


def check_output(path: Path | None, flag: str = "--json") -> None:
    """Refuses a report file that could not be written, before the run rather than after it."""
    if path is not None and (problem := output_problem(path)):
        raise CannotRunError(f"{flag} {path}: cannot be written: {problem}")


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """A report file; ``CannotRunError`` where it cannot be written."""
    try:
        # A path, or an error's code, may be no UTF-8.
        with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            yield file
    except OSError as error:
        raise CannotRunError(f"{path}: cannot be written: {error.strerror}") from error


def write_json(report: dict[str, Any], path: Path) -> None:
    """The whole report as a file."""
    with writing(path) as file:
        file.write(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def write_csv(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """A line for each run. Empty cells are what is not known, or makes no sense for the run."""
    rows = [_csv_row(report) for report in reports]
    with writing(path) as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(report: dict[str, Any]) -> dict[str, Any]:
    latency, actual = report["latency_ms"] or {}, report.get("latency_actual_ms") or {}
    late = report.get("late_sends") or {}
    return {
        "point": report.get("point", ""),
        "started_at": report["started_at"],
        **{name: report["settings"][name] for name in _CSV_SETTINGS},
        **{name: report.get(name) for name in (*_CSV_FIGURES, *_CSV_COUNTS)},
        **{f"latency_{name}_ms": latency.get(name) for name in _CSV_LATENCIES},
        **{f"latency_actual_{name}_ms": actual.get(name) for name in _CSV_LATENCIES},
        "late_share_by_tester": late.get("share_by_tester"),
        "late_share_by_waiting": late.get("share_by_waiting"),
        "errors": " ".join(f"{kind}={images}" for kind, images in report["errors"].items()),
        **{name: report[name] for name in _CSV_CPU},
        "slo_met": report["slo"] and report["slo"]["met"],
        **{name: report.get(name) for name in _CSV_VERDICTS},
        "verdict": verdict(report),
    }
