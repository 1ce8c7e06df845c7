"""Counters and a record of each call, in memory that client processes and their parent share.

Each word has one writer and is read without a lock; what a client wrote outlives the client.
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

NO_REPLY = -1  # instead of a number of images with a result: the call ended without a reply

_COUNTERS = ("calls_done", "sent", "correct", "cpu_ns", "wall_ns")
_ROW = struct.Struct("7q")
# Reserve no memory before it is written, or long runs would be refused. Python has the name from 3.13.
_FLAGS = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _counter(index: int) -> Any:
    return property(lambda log: log._words[index])


class CallLog:
    """Counters and calls of one client thread or process, which writes them for the parent.

    It counts calls done, images sent, images with the expected label (``correct``), and CPU and wall time in ns.
    """

    calls_done, sent, correct, cpu_ns, wall_ns = map(_counter, range(len(_COUNTERS)))

    def __init__(self, calls: int) -> None:
        """Room for ``calls`` calls; most of it may never be written."""
        self._memory = mmap.mmap(-1, 8 * len(_COUNTERS) + _ROW.size * max(1, calls), _FLAGS)
        self._words = memoryview(self._memory).cast("q")

    def enter(
        self, correct: int, latency: int, end: int, ok: int, late: int, lag: int, size: int, own: int = 0
    ) -> None:
        """Record a call; see ``Records``, but ``end`` is in ns of ``perf_counter_ns``."""
        words = self._words
        _ROW.pack_into(self._memory, 8 * len(_COUNTERS) + _ROW.size * words[0], latency, end, ok, late, lag, size, own)
        words[1] += size
        words[2] += correct
        words[0] += 1  # now the row counts

    def close(self, cpu_ns: int, wall_ns: int) -> None:
        """Record the CPU time and the wall time of all work, in ns."""
        self._words[3], self._words[4] = cpu_ns, wall_ns

    @property
    def rows(self) -> np.ndarray:
        """The recorded calls: latency, end, ok, late, lag, size, own; int64."""
        words = np.frombuffer(self._memory, np.int64, 7 * self.calls_done, 8 * len(_COUNTERS))
        return words.reshape(-1, 7)

    @property
    def images_ok(self) -> int:
        return int(np.maximum(self.rows[:, 2], 0).sum())


@dataclass(frozen=True)
class Answer:
    """A result; ``label`` is None if it has no label."""

    label: str | None


def error_name(error: Any) -> str:
    """The name under which an error is counted: ``timeout``, or its class with a detail such as a service's code
    (``InferenceError:overloaded``), the kind of a Thrift error or the class of a defect's cause.
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
    """Failed images by error name, and an example message for each name."""

    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def count(self, name: str, error: Any, images: int, where: str = "") -> None:
        """Count ``images`` that failed with this error; ``where`` begins its example."""
        name = printable(name)
        self.errors[name] += images
        if name not in self.examples:
            message = str(getattr(error, "message", None) or first_line(error)).strip().split("\n", 1)[0]
            self.examples[name] = printable(where + message)

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.errors += other.errors
        self.examples |= other.examples


@dataclass
class Outcome:
    """The outcome of a run; ``released`` is the start in ns of ``perf_counter_ns``."""

    released: int
    logs: list[CallLog]
    interrupted: bool = False
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class Records:
    """Every call of a run, in the order in which they were due, as int64 columns of equal length.

    ``due`` and ``end`` are in ns since the start of the run. ``latency`` counts from when a call was due, ``actual``
    from when it was sent; in a closed loop they are equal. ``late`` is the difference, ``lag`` the part of it that is
    the tester's own fault, and ``own`` the most of ``latency`` that is, because it had no CPU; all in ns. ``size`` is
    in images, ``ok`` the number with a result, or ``NO_REPLY``.
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
        """A column, only for calls with a result."""
        values: np.ndarray = getattr(self, column)[self.ok > 0]
        return values


def collect(logs: Sequence[CallLog], start: int) -> Records:
    """The calls of all clients; ``start`` is in ns of ``perf_counter_ns``."""
    table = np.concatenate([log.rows for log in logs]).T
    latency, end, ok, late, lag, size, own = table[:, np.argsort(table[1] - table[0], kind="stable")]
    return Records(end - latency - start, end - start, latency, latency - late, size, ok, late, lag, own)
