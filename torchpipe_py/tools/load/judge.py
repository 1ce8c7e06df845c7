"""Evaluates the calls of a run: percentiles, series, and the verdict (valid, stable, SLO, exit status)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from torchpipe_py.errors import counted
from torchpipe_py.tools.load.arrivals import NS_PER_S, Load
from torchpipe_py.tools.load.records import Records

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9}
EXIT_OK, EXIT_CANNOT_RUN, EXIT_FAILED, EXIT_SLO_MISSED, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130

LATE_MS = 1.0  # a later send counts as late; on an idle machine a process wakes up about 0.1 ms late
TESTER_LIMIT = 0.01  # largest share of sends that were late while their client was free
WAITING_LIMIT = 0.01  # largest share of sends that were late while their client waited for a reply
ACHIEVED_LIMIT = 0.95  # smallest share of the offered rate
GROWTH_LIMIT = 2.0  # largest ratio of median latencies in the run's second and first half
GROWTH_LEAST_MS = 10.0  # smaller growth is noise

_NS_PER_MS = 1e6
_STEPS_PER_DECADE = 12
_BINS = 48
_CALLS_TO_JUDGE = 20
_CLIENTS_TO_SPARE = 1.5
_WORST_FIRST = (EXIT_INTERRUPTED, EXIT_INVALID, EXIT_FAILED, EXIT_SLO_MISSED, EXIT_OK)


# --- percentiles and series


def summarize(latencies: np.ndarray) -> dict[str, float] | None:
    """Mean, percentiles, extremes in ms and ``count`` of latencies in ns. None without latencies."""
    if not len(latencies):
        return None
    figures = {"mean": latencies.mean()}
    figures |= zip(PERCENTILES, np.percentile(latencies, list(PERCENTILES.values())), strict=True)
    figures |= {"max": latencies.max(), "min": latencies.min()}
    return {"count": len(latencies), **{name: float(value) / _NS_PER_MS for name, value in figures.items()}}


def _sums(times: np.ndarray, counts: np.ndarray, length: int = 0) -> list[int]:
    """Sums of ``counts`` for each whole second of ``times``."""
    sums: list[int] = np.bincount(times // NS_PER_S, counts, length).astype(int).tolist()
    return sums


def ok_per_second(records: Records) -> list[int]:
    """Images with a result, by whole second since the start."""
    return _sums(records.end, np.maximum(records.ok, 0))


def per_second(records: Records, offered: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each second since the start, in images.

    ``offered`` were due in it, ``sent`` were sent in it, ``ok`` and ``failed`` ended in it. ``p50_ms`` and ``p99_ms``
    are for calls with a result that were due in it, null if there were none.
    """
    sent_at, good = records.due + records.late, np.maximum(records.ok, 0)
    latest = max((int(times.max()) for times in (sent_at, records.end) if len(times)), default=-1)
    length = max(len(offered), latest // NS_PER_S + 1)
    columns = (
        [*offered, *[0] * (length - len(offered))],
        _sums(sent_at, records.size, length),
        _sums(records.end, good, length),
        _sums(records.end, records.size - good, length),
    )
    bounds = np.searchsorted(records.good("due"), np.arange(length + 1) * NS_PER_S)
    rows: list[dict[str, Any]] = []
    for second, counts in enumerate(zip(*columns, strict=True)):
        due_in = records.good("latency")[bounds[second] : bounds[second + 1]]
        ms = (np.percentile(due_in, (50, 99)) / _NS_PER_MS).tolist() if len(due_in) else (None, None)
        names = ("second", "offered", "sent", "ok", "failed", "p50_ms", "p99_ms")
        rows.append(dict(zip(names, (second, *counts, *ms), strict=True)))
    return rows


def percentile_curve(latencies: np.ndarray) -> list[tuple[float, float]]:
    """``(percent, ms)``, evenly spaced on a log scale of 100 - percent, up to the slowest call."""
    if not len(latencies):
        return []
    steps = math.ceil(_STEPS_PER_DECADE * math.log10(len(latencies)))
    rest = [10 ** (-step / _STEPS_PER_DECADE) for step in range(steps)] + [1 / len(latencies)]
    percents = [100 * (1 - share) for share in rest]
    return list(zip(percents, (np.percentile(latencies, percents) / _NS_PER_MS).tolist(), strict=True))


def histogram(latencies: np.ndarray) -> list[tuple[float, float, int]]:
    """``(from_ms, to_ms, calls)``: log-spaced bins from the shortest to the longest latency."""
    if not len(latencies):
        return []
    low = max(1, int(latencies.min()))
    counts, bounds = np.histogram(
        np.maximum(latencies, low), np.geomspace(low, max(2 * low, latencies.max()), _BINS + 1)
    )
    edges = (bounds / _NS_PER_MS).tolist()
    return list(zip(edges, edges[1:], counts.tolist(), strict=False))


# --- an open loop: late sends, and whether the server kept up


def late_sends(records: Records, load: Load) -> dict[str, Any]:
    """Counts of late calls: through the tester's own fault, if that caused most of the delay, or otherwise because
    their client waited for the reply to an earlier call. It is not the tester's fault if replies take too long for the
    offered rate even without the time that it had no CPU.
    """
    limit = LATE_MS * _NS_PER_MS
    late = int((records.late > limit).sum())
    waited = float((records.actual - records.own + records.lag).sum()) / NS_PER_S
    is_overload = len(load.plans) * int(records.size.sum()) < ACHIEVED_LIMIT * (load.offered_rate or 0.0) * waited
    by_tester = 0 if is_overload else int(((records.late > limit) & (2 * records.lag > records.late)).sum())
    calls = len(records.late) or 1
    return {
        "threshold_ms": LATE_MS,
        "calls": late,
        "share": late / calls,
        "share_by_tester": by_tester / calls,
        "share_by_waiting": (late - by_tester) / calls,
        "worst_ms": int(records.late.max(initial=0)) / _NS_PER_MS,
    }


def late_limits(late: dict[str, Any]) -> list[str]:
    """The reasons why late sends make a run invalid, as it measured the tester."""
    if late["share_by_tester"] <= TESTER_LIMIT:
        return []
    share = f"{late['share_by_tester']:.1%} of the sends were more than {LATE_MS:g} ms late"
    return [f"{share} although their client was free (it got no CPU)"]


def late_warnings(late: dict[str, Any], clients: int, calls_per_s: float, actual_ms: float) -> list[str]:
    """Advice about sends that waited for replies; ``actual_ms`` is the mean latency from the send.

    By Little's law the product of rate and latency is the number of busy connections.
    """
    if late["share_by_waiting"] <= WAITING_LIMIT:
        return []
    busy = calls_per_s * actual_ms / 1000
    share = f"{late['share_by_waiting']:.1%} of the sends were late because their client still waited for a reply"
    if busy * _CLIENTS_TO_SPARE > clients:
        few = f"{calls_per_s:.4g} calls/s of {actual_ms:.3g} ms keep {busy:.1f} of {clients} connections busy"
        return [f"{share}: {few}; raise --request_client, or the server is at its limit"]
    return [f"{share}: some answers took long; with more --request_client, other clients send meanwhile"]


def stability(latencies: np.ndarray, offered: float, answered: int, window: float, unsent: int) -> dict[str, Any]:
    """The part of the report on whether the server kept up with the ``offered`` images per second.

    ``latencies`` are in ns, in the order in which calls were due; ``window`` in s, up to the last reply. The achieved
    rate is ``answered`` images by ``window``: a queue that grows makes the window longer than the schedule.
    """
    half, achieved, reasons = len(latencies) // 2, answered / window if window else 0.0, []
    if unsent:
        reasons.append(f"never sent: {counted(unsent, 'image')}, because the run was too late")
    if achieved < ACHIEVED_LIMIT * offered:
        reasons.append(f"{achieved:.1f} images/s were answered of {offered:.1f} offered")
    halves: list[float | None] = [None, None]
    if len(latencies) >= _CALLS_TO_JUDGE:
        first, second = (float(np.median(part)) / _NS_PER_MS for part in (latencies[:half], latencies[half:]))
        halves = [first, second]
        if second > GROWTH_LIMIT * first and second - first > GROWTH_LEAST_MS:
            growth = f"from {first:.1f} ms in the first half to {second:.1f} ms in the second"
            reasons.append(f"the median latency grew {growth}: a queue builds up")
    return {
        "offered_rate": offered,
        "achieved_rate": achieved,
        "images_unsent": unsent,
        "stable": not reasons,
        "unstable_because": reasons,
        "latency_halves_ms": halves,
    }


# --- the verdict


def p99_bounds(records: Records) -> tuple[float, float] | None:
    """Bounds of the p99 in ms: without and with the time that the tester had no CPU; None without results."""
    latency = records.good("latency")
    if not len(latency):
        return None
    low, high = (np.percentile(values, 99) / _NS_PER_MS for values in (latency - records.good("own"), latency))
    return max(0.0, float(low)), float(high)


def judge(report: dict[str, Any], slo_ms: float | None) -> dict[str, Any]:
    """The report with its ``slo`` (None without one) and ``exit_status``.

    The SLO: 99 % of the calls were answered in time; calls that were never sent count as late.
    """
    report["slo"] = None
    if slo_ms is not None:
        measured = (report["latency_ms"] or {}).get("p99")
        met = measured is not None and measured <= slo_ms and not report.get("images_unsent")
        report["slo"] = {"p99_limit_ms": slo_ms, "p99_ms": measured, "met": met}
        if report.get("tester_limited") and (bounds := report.get("p99_bounds_ms")):
            _bound(report, slo_ms, *bounds)
    if report["interrupted"]:
        status = EXIT_INTERRUPTED
    elif not report["valid"]:
        status = EXIT_INVALID  # whatever else: its figures are the tester's
    elif report["errors"] or not report.get("stable", True):
        status = EXIT_FAILED
    else:
        status = EXIT_OK if report["slo"] is None or report["slo"]["met"] else EXIT_SLO_MISSED
    report["exit_status"] = status
    return report


def _bound(report: dict[str, Any], slo_ms: float, low: float, high: float) -> None:
    """The verdict on a run that the tester limits: valid if both bounds of the p99 are on one side of the SLO."""
    is_clear = low > slo_ms or (high <= slo_ms and report.get("stable", True))
    report["valid"] = is_clear and not report["interrupted"]
    share = report["tester_share_of_cpu"]
    took = "the cores" if share is None else f"the cores, and took {share:.0%} of what was used"
    verdict = "the SLO's verdict holds" if is_clear else "that leaves the SLO open"
    report["warnings"].append(f"the tester shares {took}: p99 between {low:.1f} and {high:.1f} ms; {verdict}")


def worst(statuses: Iterable[int]) -> int:
    """The worst exit status of several runs."""
    return min(statuses, key=_WORST_FIRST.index, default=EXIT_OK)


def verdict(report: dict[str, Any]) -> str:
    """The verdict in a few words."""
    parts = ["interrupted"] if report["interrupted"] else [] if report["valid"] else ["INVALID"]
    if report["errors"]:
        parts.append(f"{report['images_failed']} failed" if report["images_ok"] else "FAILED: no image has a result")
    if "stable" in report:
        parts.append("stable" if report["stable"] else "UNSTABLE")
    if report["slo"] is not None:
        parts.append("SLO met" if report["slo"]["met"] else "SLO missed")
    return ", ".join(parts) or "valid"
