"""Which calls of an open loop were sent late, and who is to blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchpipe_py.loadtest.client.arrivals import Turn
from torchpipe_py.loadtest.measure.records import Records

LATE_MS = 1.0  # a send counts as late from here on; a sleeping process is some 0.1 ms late on a machine with time
TESTER_LIMIT = 0.01  # of all sends, late while their client was free
WAITING_LIMIT = 0.01  # of all sends, late while their client waited for a reply

_NS_PER_MS = 1e6
_CLIENTS_TO_SPARE = 1.5


class LagMeter:
    """In a client: tells how much of a late send is its own fault, be it that of an earlier call that still lasts."""

    def __init__(self) -> None:
        self._free = 0
        self._lag = 0

    def sent(self, turn: Turn) -> tuple[int, int]:
        """How late a send was, and by how much a client that always gets CPU at once would have been earlier; in ns.

        The delay after the time when the client was free and the call due is added to what is left of earlier ones: a
        client cannot be further behind the ideal one than it is behind its schedule.
        """
        late = turn.sent - turn.due
        self._lag = min(late, self._lag + turn.sent - max(turn.due, self._free))
        return late, self._lag

    def free(self, now: int) -> None:
        """The client is done with a call; `now` in ns of `perf_counter_ns`."""
        self._free = now


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
