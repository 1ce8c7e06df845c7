"""When a client sends its next call."""

from __future__ import annotations

import time
from typing import Protocol


class Arrivals(Protocol):
    """One client's policy; used by one process."""

    def wait_turn(self) -> int:
        """Blocks until the next call is due; the time from which its latency counts, in ns of `perf_counter_ns`."""


class ClosedLoop:
    """The next call is due when the previous one is answered."""

    def wait_turn(self) -> int:
        return time.perf_counter_ns()
