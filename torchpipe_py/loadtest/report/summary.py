"""The report of a run: one dict for ``--json``, and the table made of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.images import Payload
from torchpipe_py.loadtest.ledger import Outcome
from torchpipe_py.loadtest.measure.cpu import cpu_model
from torchpipe_py.loadtest.measure.statistics import Tally, tally

OTHERS_LIMIT = 25.0  # percent of a core, for all processes that have no part in the run

Rows = list[tuple[str, str]]
"""Names and values of the table."""


def check_output(path: Path | None, flag: str = "--json") -> None:
    """Refuses a report file that could not be written, before the run rather than after it."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise CannotRunError(f"{flag} {path}: cannot be written")


def write_json(report: dict[str, Any], path: Path) -> None:
    """The whole report as a file."""
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


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
    outcome: Outcome, about: dict[str, Any], cpu: dict[str, Any], limits: Sequence[str], labelled: bool
) -> dict[str, Any]:
    """Everything there is to say, ready for JSON. Latencies in ms, CPU in percent of one core; null is "not known".

    ``limits`` are the reasons why the run measured the tester and not its subject.
    """
    numbers = tally(outcome.ledgers, outcome.released)
    return {
        **about,
        **_throughput(numbers),
        "images_failed": sum(outcome.errors.values()),
        "errors": dict(outcome.errors.most_common()),
        "accuracy": numbers.correct / numbers.answered if labelled and numbers.answered else None,
        "latency_ms": numbers.latency,
        "latency_failed_ms": numbers.latency_failed,
        "images_ok_per_second": numbers.per_second,
        **cpu,
        "interrupted": outcome.interrupted,
        "warnings": _warnings(limits, cpu["other_cpu_percent"]),
        "valid": not limits and not outcome.interrupted,
    }


def _warnings(limits: Sequence[str], others: float | None) -> list[str]:
    warnings = [f"the tester is the limit: {reason}" for reason in limits]
    if others is not None and others > OTHERS_LIMIT:
        warnings.append(f"other processes used {others:.0f}% of a core")
    return warnings


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
