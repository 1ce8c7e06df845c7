"""The report as a CSV file, a line for each run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchpipe_py.loadtest.report.verdict import verdict

_SETTINGS = ("request_client", "request_batch", "arrivals", "rate", "seed", "duration", "total_number")
_FIGURES = ("offered_rate", "achieved_rate", "qps", "calls_per_s", "goodput", "window_s")
_COUNTS = ("images_sent", "images_answered", "images_ok", "images_failed", "images_unsent")
_LATENCIES = ("mean", "p50", "p90", "p99", "p99_9", "max", "min")
_CPU = ("server_cpu_percent", "tester_cpu_percent", "tester_busiest_client_percent", "other_cpu_percent")
_VERDICTS = ("stable", "valid", "exit_status")


def write_csv(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Empty cells are what is not known, or makes no sense for the run."""
    rows = [_row(report) for report in reports]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _row(report: dict[str, Any]) -> dict[str, Any]:
    latency, actual = report["latency_ms"] or {}, report.get("latency_actual_ms") or {}
    late = report.get("late_sends") or {}
    return {
        "point": report.get("point", ""),
        "started_at": report["started_at"],
        **{name: report["settings"][name] for name in _SETTINGS},
        **{name: report.get(name) for name in (*_FIGURES, *_COUNTS)},
        **{f"latency_{name}_ms": latency.get(name) for name in _LATENCIES},
        **{f"latency_actual_{name}_ms": actual.get(name) for name in _LATENCIES},
        "late_share_by_tester": late.get("share_by_tester"),
        "late_share_by_waiting": late.get("share_by_waiting"),
        "errors": " ".join(f"{kind}={images}" for kind, images in report["errors"].items()),
        **{name: report[name] for name in _CPU},
        "slo_met": report["slo"] and report["slo"]["met"],
        **{name: report.get(name) for name in _VERDICTS},
        "verdict": verdict(report),
    }
