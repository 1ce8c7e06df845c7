"""Pure: what a run is worth, and the exit status that says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

EXIT_OK, EXIT_CANNOT_RUN, EXIT_FAILED, EXIT_SLO_MISSED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

_WORST_FIRST = (EXIT_INTERRUPTED, EXIT_FAILED, EXIT_SLO_MISSED, EXIT_OK)


def judge(report: dict[str, Any], slo_ms: float | None) -> dict[str, Any]:
    """The report with its `slo` (None without one) and `exit_status`."""
    report["slo"] = None if slo_ms is None else judge_slo(report, slo_ms)
    report["exit_status"] = exit_status(report)
    return report


def judge_slo(report: dict[str, Any], slo_ms: float) -> dict[str, Any]:
    """Whether 99 % of the calls were answered in time; calls that were never sent were not."""
    latency = report["latency_ms"]
    measured = None if latency is None else latency["p99"]
    met = measured is not None and measured <= slo_ms and not report.get("images_unsent")
    return {"p99_limit_ms": slo_ms, "p99_ms": measured, "met": met}


def exit_status(report: dict[str, Any]) -> int:
    """Of one run."""
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    if report["errors"] or not report.get("stable", True):
        return EXIT_FAILED
    return EXIT_OK if report["slo"] is None or report["slo"]["met"] else EXIT_SLO_MISSED


def worst(statuses: Iterable[int]) -> int:
    """Of several runs."""
    return min(statuses, key=_WORST_FIRST.index, default=EXIT_OK)


def verdict(report: dict[str, Any]) -> str:
    """One line for a person."""
    parts = []
    if report["interrupted"]:
        parts.append("interrupted")
    if not report["valid"] and not report["interrupted"]:
        parts.append("INVALID")
    if report["errors"]:
        parts.append(f"{report['images_failed']} failed")
    if "stable" in report:
        parts.append("stable" if report["stable"] else "UNSTABLE")
    if report["slo"] is not None:
        parts.append("SLO met" if report["slo"]["met"] else "SLO missed")
    return ", ".join(parts) or "valid"
