"""What clients leave: counters and a record of each call, in memory that client processes and parent share.

Each word of it has one writer and is read by the others as it is, without a lock; what a client wrote outlives it.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchpipe_py.tools.load.arrivals import Plan

NO_REPLY = -1  # in ``CallLog.ok``: the call ended without a reply

_COUNTERS = 7
_COLUMNS = ("latency", "end", "ok", "late", "lag")
# Pages are taken as they are written: a run of many hours would be refused its memory. Python has the name from 3.13.
_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def shared_words(count: int) -> memoryview:
    """``count`` zeroed signed 64-bit words, shared with every process forked later; most may never be written."""
    return memoryview(mmap.mmap(-1, 8 * max(1, count), _FLAGS)).cast("q")


def _counter(index: int) -> Any:
    return property(lambda log: log._counters[index])


class CallLog:
    """One client's counters, and a record of each of its calls. The client writes, the parent reads.

    Records are columns of ``calls`` words: ``latency`` in ns, ``end`` in ns of ``perf_counter_ns``, ``ok`` the images
    that have a result, or ``NO_REPLY``; and, for calls that had a time to be sent at, by how many ns they were sent
    ``late``, and ``lag``, the part of it that is the client's own fault. A record counts once ``calls_done`` says so.
    """

    calls_done, sent, answered, images_ok, correct, cpu_ns, wall_ns = map(_counter, range(_COUNTERS))

    def __init__(self, calls: int) -> None:
        words = shared_words(_COUNTERS + len(_COLUMNS) * calls)
        self._counters = words[:_COUNTERS]
        columns = (words[_COUNTERS + n * calls :][:calls] for n in range(len(_COLUMNS)))
        self.latency, self.end, self.ok, self.late, self.lag = columns

    def delay(self, late: int, lag: int) -> None:
        """How late the call was sent whose record is the next one."""
        done = self._counters[0]
        self.late[done], self.lag[done] = late, lag

    def record(self, latency: int, end: int, ok: int) -> None:
        """One call has ended."""
        done = self._counters[0]
        self.latency[done], self.end[done], self.ok[done] = latency, end, ok
        self._counters[0] = done + 1

    def count(self, sent: int, answered: int, ok: int, correct: int) -> None:
        """Adds images; ``correct`` are those with the expected label."""
        for index, images in enumerate((sent, answered, ok, correct), start=1):
            self._counters[index] += images

    def close(self, cpu_ns: int, wall_ns: int) -> None:
        """The client has done its work: the CPU time it took, and the time since its start, both in ns."""
        self._counters[5], self._counters[6] = cpu_ns, wall_ns


@dataclass
class Outcome:
    """A run that took place: when the clients were released (ns of ``perf_counter_ns``), and what they did.

    Errors are in images, by type; ``examples`` has a message of each type.
    """

    released: int
    logs: list[CallLog]
    interrupted: bool = False
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Records:
    """Every call of a run, in the order in which they were due, as int64 columns of equal length.

    ``due`` and ``end`` are in ns since the start of the run. ``latency`` runs from when a call was due, ``actual``
    from when it was sent; in a closed loop that is the same. ``late`` is the time between the two, ``lag`` the part of
    it that is the tester's own fault; all in ns. ``size`` is in images, and ``ok`` are those with a result, or
    ``NO_REPLY``.
    """

    due: np.ndarray
    end: np.ndarray
    latency: np.ndarray
    actual: np.ndarray
    size: np.ndarray
    ok: np.ndarray
    late: np.ndarray
    lag: np.ndarray

    def good(self, column: str) -> np.ndarray:
        """A column, of the calls that brought a result."""
        values: np.ndarray = getattr(self, column)[self.ok > 0]
        return values


def collect(logs: Sequence[CallLog], plans: Sequence[Plan], start: int) -> Records:
    """All clients' calls; ``start`` in ns of ``perf_counter_ns``."""
    tables = []
    for log, plan in zip(logs, plans, strict=True):
        done = log.calls_done
        sizes = np.minimum(plan.batch, plan.share - plan.batch * np.arange(done))
        tables.append(np.stack([*(np.asarray(getattr(log, name)[:done]) for name in _COLUMNS), sizes]))
    table = np.hstack(tables)
    latency, end, ok, late, lag, size = table[:, np.argsort(table[1] - table[0], kind="stable")]
    return Records(end - latency - start, end - start, latency, latency - late, size, ok, late, lag)
