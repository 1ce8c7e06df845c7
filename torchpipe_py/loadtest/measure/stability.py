"""Pure: whether the server kept up with the offered rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ACHIEVED_LIMIT = 0.95  # of the offered rate
GROWTH_LIMIT = 2.0  # of the median latency, from the first half of the run to the second
GROWTH_LEAST_MS = 10.0  # and by so much: below, it is noise

_CALLS_TO_JUDGE = 20
_NS_PER_MS = 1e6


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
            reasons.append(f"{self.unsent} images were never sent: the run was too far behind its schedule")
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
