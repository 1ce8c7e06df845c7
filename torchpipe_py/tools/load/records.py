"""What clients leave: counters and a record of each call, in memory that client processes and parent share.

Each word of it has one writer and is read by the others as it is, without a lock; what a client wrote outlives it.
"""

from __future__ import annotations

import mmap
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchpipe_py.errors import BackendError, TorchpipeError, first_line
from torchpipe_py.tools.report import printable

NO_REPLY = -1  # in place of the number of images with a result: the call ended without a reply

_COUNTERS = ("calls_done", "sent", "correct", "cpu_ns", "wall_ns")
_ROW = struct.Struct("7q")
# Pages are taken as they are written: a run of many hours would be refused its memory. Python has the name from 3.13.
_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _counter(index: int) -> Any:
    return property(lambda log: log._words[index])


class CallLog:
    """Counters and calls of one client thread or process, which writes; the parent reads.

    Counted are calls done, images sent, images with the expected ``correct`` label; at the end CPU and wall time in ns.
    """

    calls_done, sent, correct, cpu_ns, wall_ns = map(_counter, range(len(_COUNTERS)))

    def __init__(self, calls: int) -> None:
        """Room for so many calls; most of it may never be written."""
        self._memory = mmap.mmap(-1, 8 * len(_COUNTERS) + _ROW.size * max(1, calls), _FLAGS)
        self._words = memoryview(self._memory).cast("q")

    def enter(
        self, correct: int, latency: int, end: int, ok: int, late: int, lag: int, size: int, own: int = 0
    ) -> None:
        """One call has ended; see ``Records``, but ``end`` is in ns of ``perf_counter_ns``."""
        words = self._words
        _ROW.pack_into(self._memory, 8 * len(_COUNTERS) + _ROW.size * words[0], latency, end, ok, late, lag, size, own)
        words[1] += size
        words[2] += correct
        words[0] += 1  # a row counts from now on

    def close(self, cpu_ns: int, wall_ns: int) -> None:
        """All work is done: the CPU time it took, and the time since its start, both in ns."""
        self._words[3], self._words[4] = cpu_ns, wall_ns

    @property
    def rows(self) -> np.ndarray:
        """The calls, as ``enter`` got them: latency, end, ok, late, lag, size, own; int64."""
        words = np.frombuffer(self._memory, np.int64, 7 * self.calls_done, 8 * len(_COUNTERS))
        return words.reshape(-1, 7)

    @property
    def images_ok(self) -> int:
        return int(np.maximum(self.rows[:, 2], 0).sum())


@dataclass(frozen=True)
class Answer:
    """A result; ``label`` is None where it has none."""

    label: str | None


def error_name(error: Any) -> str:
    """What an error is counted as: ``timeout``, its class, or its class and a detail: the code that a service
    gave (``InferenceError:overloaded``), the kind of a Thrift error, the class of a defect's cause.
    """
    name = type(error).__name__
    if isinstance(error, TorchpipeError):
        defect = isinstance(error, BackendError) and error.__cause__ is not None
        return f"{name}:{type(error.__cause__).__name__}" if defect else name
    if isinstance(error, TimeoutError):
        return "timeout"
    if name == "TApplicationException":
        kinds = {value: kind.lower() for kind, value in vars(type(error)).items() if kind.isupper()}
        return f"{name}:{kinds.get(error.type, error.type)}"
    more = error.type if name == "TTransportException" else getattr(error, "code", None)
    return name if more is None else f"{name}:{more}"


@dataclass
class Tally:
    """Errors in images, by name, and a message for each name."""

    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def count(self, name: str, error: Any, images: int) -> None:
        """So many images failed with this error."""
        name = printable(name)
        self.errors[name] += images
        if name not in self.examples:
            message = str(getattr(error, "message", None) or first_line(error)).strip().split("\n", 1)[0]
            self.examples[name] = printable(message)

    def add(self, other: Tally) -> None:
        """What others have counted."""
        self.errors += other.errors
        self.examples |= other.examples


@dataclass
class Outcome:
    """A run that took place: when the clients were released (ns of ``perf_counter_ns``), and what they did."""

    released: int
    logs: list[CallLog]
    interrupted: bool = False
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Records:
    """Every call of a run, in the order in which they were due, as int64 columns of equal length.

    ``due`` and ``end`` are in ns since the start of the run. ``latency`` runs from when a call was due, ``actual``
    from when it was sent; in a closed loop that is the same. ``late`` is the time between the two, ``lag`` the part of
    it that is the tester's own fault, and ``own`` the most of ``latency`` that is, as it had no CPU; all in ns.
    ``size`` is in images, and ``ok`` are those with a result, or ``NO_REPLY``.
    """

    due: np.ndarray
    end: np.ndarray
    latency: np.ndarray
    actual: np.ndarray
    size: np.ndarray
    ok: np.ndarray
    late: np.ndarray
    lag: np.ndarray
    own: np.ndarray

    def good(self, column: str) -> np.ndarray:
        """A column, of the calls that brought a result."""
        values: np.ndarray = getattr(self, column)[self.ok > 0]
        return values


def collect(logs: Sequence[CallLog], start: int) -> Records:
    """All clients' calls; ``start`` in ns of ``perf_counter_ns``."""
    table = np.concatenate([log.rows for log in logs]).T
    latency, end, ok, late, lag, size, own = table[:, np.argsort(table[1] - table[0], kind="stable")]
    return Records(end - latency - start, end - start, latency, latency - late, size, ok, late, lag, own)
