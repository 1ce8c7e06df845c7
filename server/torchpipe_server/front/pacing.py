"""The rate of refusals: clients that retry at once would starve admitted requests."""

from __future__ import annotations

from math import inf
from time import perf_counter
from typing import Protocol

REFUSAL_SECONDS, REFUSALS_AT_ONCE = 0.002, 500
DEADLINE_SHARE = 0.8  # a refusal waits for this share of the time to its deadline at most, to reach the client in time
PACED_SECONDS = 1.0  # longest wait of a refusal; a client that comes back later is not paced


class Client(Protocol):
    """A client that may be refused. Within ``paced_until``, of ``monotonic``, a further refusal may have to wait."""

    paced_until: float


class RefusalPacing:
    """Delays refusals of clients that come back within a second of the last one, for all protocols of a worker."""

    def __init__(self, drain_seconds: float) -> None:
        self._most_seconds = min(PACED_SECONDS, drain_seconds / 2)  # before a drain that begins meanwhile ends
        self._due = 0.0  # when the last delayed refusal is due
        self._is_stopped = False

    def stop(self) -> None:
        """Delay no further refusal: a drain would take a second for each."""
        self._is_stopped = True

    def delay(self, client: Client, now: float, deadline: float | None = None) -> float:
        """Seconds until the client's refusal is due, which is before ``deadline`` of ``perf_counter``."""
        at = now
        if now < client.paced_until and not self._is_stopped:
            earliest = max(self._due, now - REFUSALS_AT_ONCE * REFUSAL_SECONDS)
            at = self._due = min(earliest + REFUSAL_SECONDS, now + self._most_seconds)
            at = min(at, now + DEADLINE_SHARE * ((deadline or inf) - perf_counter()))
        client.paced_until = max(at, now) + PACED_SECONDS
        return at - now
