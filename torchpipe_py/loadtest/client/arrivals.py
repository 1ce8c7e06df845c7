"""When a client sends its next call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_LOOK_S = 0.25


class Turn(NamedTuple):
    """A call's times, in ns of `perf_counter_ns`: when it was due, from which its latency counts, and when it goes."""

    due: int
    sent: int


class Arrivals(Protocol):
    """One client's policy; used by one process."""

    is_open: bool
    """Whether calls are due at times that do not depend on the answers."""

    def wait_turn(self) -> Turn | None:
        """Blocks until the next call is due; None when there is no point in sending another one."""


class ClosedLoop:
    """The next call is due when the previous one is answered, until the time `until`, in ns of `perf_counter_ns`."""

    is_open = False

    def __init__(self, until: int | None) -> None:
        self._until = until

    def wait_turn(self) -> Turn | None:
        now = time.perf_counter_ns()
        return None if self._until is not None and now >= self._until else Turn(now, now)


class OpenLoop:
    """Calls are due at `times`, in ns since `start`, whatever became of those before; after `until` none is sent.

    A call whose time passed while the one before it was under way is sent at once, late.
    """

    is_open = True

    def __init__(self, times: Sequence[int], start: int, until: int, is_stopping: Callable[[], bool]) -> None:
        self._times, self._start, self._until = iter(times), start, until
        self._is_stopping = is_stopping

    def wait_turn(self) -> Turn | None:
        time_due = next(self._times, None)
        if time_due is None:
            return None
        due = self._start + time_due
        while (now := time.perf_counter_ns()) < due:
            if self._is_stopping():
                return None
            time.sleep(min((due - now) / 1e9, _LOOK_S))
        return None if now >= self._until else Turn(due, now)
