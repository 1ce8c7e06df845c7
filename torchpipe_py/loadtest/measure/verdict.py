"""Pure: what a run is worth: whether it measured the server, whether that kept up, and the exit status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_py.loadtest.records import Records

EXIT_OK, EXIT_CANNOT_RUN, EXIT_FAILED, EXIT_SLO_MISSED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

LATE_MS = 1.0  # a send counts as late from here on; a sleeping process is some 0.1 ms late on a machine with time
TESTER_LIMIT = 0.01  # of all sends, late while their client was free
WAITING_LIMIT = 0.01  # of all sends, late while their client waited for a reply

ACHIEVED_LIMIT = 0.95  # of the offered rate
GROWTH_LIMIT = 2.0  # of the median latency, from the first half of the run to the second
GROWTH_LEAST_MS = 10.0  # and by so much: below, it is noise

_CALLS_TO_JUDGE = 20
_CLIENTS_TO_SPARE = 1.5
_NS_PER_MS = 1e6
_WORST_FIRST = (EXIT_INTERRUPTED, EXIT_FAILED, EXIT_SLO_MISSED, EXIT_OK)


# --- late sends: which calls of an open loop were sent late, and why


@dataclass(frozen=True)
class Lateness:
    """How many of `calls` were sent late: `by_tester` where most of the delay was the client's own, `by_waiting` where
    the replies to its earlier calls had not come; `worst_ms` is the latest one.
    """

    calls: int
    by_tester: int
    by_waiting: int
    worst_ms: float

    @property
    def tester_share(self) -> float:
        return self.by_tester / self.calls if self.calls else 0.0

    @property
    def waiting_share(self) -> float:
        return self.by_waiting / self.calls if self.calls else 0.0

    @property
    def limits(self) -> list[str]:
        """Why the run measured the tester; empty for a valid one."""
        if self.tester_share <= TESTER_LIMIT:
            return []
        share = f"{self.tester_share:.1%} of the sends were more than {LATE_MS:g} ms late"
        return [f"{share} although their client was free (it got no CPU)"]

    def warnings(self, clients: int, calls_per_s: float, actual_ms: float) -> list[str]:
        """What to do about sends that waited for replies; `actual_ms` is the mean latency from the send.

        By Little's law `calls_per_s` calls of that latency are under way in as many connections as their product says.
        """
        if self.waiting_share <= WAITING_LIMIT:
            return []
        busy = calls_per_s * actual_ms / 1000
        share = f"{self.waiting_share:.1%} of the sends were late because their client still waited for a reply"
        if busy * _CLIENTS_TO_SPARE > clients:
            few = f"{calls_per_s:.4g} calls/s of {actual_ms:.3g} ms keep {busy:.1f} of {clients} connections busy"
            return [f"{share}: {few}; raise --request_client, or the server is at its limit"]
        return [f"{share}: single answers took long; more --request_client would send on meanwhile"]

    def fields(self) -> dict[str, Any]:
        """The report's part."""
        return {
            "threshold_ms": LATE_MS,
            "calls": self.by_tester + self.by_waiting,
            "share": self.tester_share + self.waiting_share,
            "share_by_tester": self.tester_share,
            "share_by_waiting": self.waiting_share,
            "worst_ms": self.worst_ms,
        }


def judge_lateness(records: Records) -> Lateness:
    """Counts them."""
    limit = LATE_MS * _NS_PER_MS
    late = sum(ns > limit for ns in records.late)
    by_tester = sum(ns > limit and 2 * lag > ns for ns, lag in zip(records.late, records.lag, strict=True))
    return Lateness(len(records.late), by_tester, late - by_tester, max(records.late, default=0) / _NS_PER_MS)


# --- stability: whether the server kept up with the offered rate


@dataclass(frozen=True)
class Stability:
    """`reasons` say what was not stable; rates are in images per second.

    `first_ms` and `second_ms` are the median latencies of the run's halves, None for too few calls.
    """

    offered: float
    achieved: float
    first_ms: float | None
    second_ms: float | None
    unsent: int

    @property
    def is_stable(self) -> bool:
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        reasons = []
        if self.unsent:
            reasons.append(f"never sent: {counted(self.unsent, 'image')}, as the run was too far behind its schedule")
        if self.achieved < ACHIEVED_LIMIT * self.offered:
            reasons.append(f"{self.achieved:.1f} images/s were answered of {self.offered:.1f} offered")
        if self.first_ms is not None and self.second_ms is not None and self._grows(self.first_ms, self.second_ms):
            halves = f"from {self.first_ms:.1f} ms in the first half to {self.second_ms:.1f} ms in the second"
            reasons.append(f"the median latency grew {halves}: a queue builds up")
        return reasons

    @staticmethod
    def _grows(first: float, second: float) -> bool:
        return second > GROWTH_LIMIT * first and second - first > GROWTH_LEAST_MS


def judge_stability(latencies: Sequence[int], offered: float, answered: int, window: float, unsent: int) -> Stability:
    """`latencies` are corrected ones in ns, in the order in which calls were due; `window` in s, up to the last reply.

    The achieved rate is `answered` images by `window`. A run at its limit answers what it was offered only if it is
    given time: a queue that grows makes the window longer than the schedule.
    """
    half = len(latencies) // 2
    halves: tuple[float | None, float | None] = (None, None)
    if len(latencies) >= _CALLS_TO_JUDGE:
        halves = (median(latencies[:half]) / _NS_PER_MS, median(latencies[half:]) / _NS_PER_MS)
    return Stability(offered, answered / window if window else 0.0, *halves, unsent)


# --- the verdict


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
