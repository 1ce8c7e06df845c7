"""What clients and parent share: anonymous memory made before the fork, and the gate that starts all at once.

Each word of it has one writer and is read by the others as it is, without a lock. What a client wrote outlives it.
"""

from __future__ import annotations

import mmap
import os

WAITING, GOING, STOPPING = range(3)

NO_REPLY = -1  # in `Ledger.ok`: the call ended without a reply

_COUNTERS = 7


def _shared_words(count: int) -> memoryview:
    """`count` zeroed signed 64-bit words, shared with every process forked later."""
    return memoryview(mmap.mmap(-1, 8 * max(1, count))).cast("q")


class Gate:
    """Holds the clients until the parent opens it, and tells them to stop.

    Clients sleep in a read of a pipe that only the parent can write: closing it wakes all of them, and so does the
    parent's death, which leaves the state at `WAITING`.
    """

    def __init__(self) -> None:
        self._state = _shared_words(1)
        self._parent = os.getpid()
        self._read_end, self._write_end = os.pipe()

    @property
    def is_stopping(self) -> bool:
        """In a client: whether to end, being told to or orphaned."""
        return self._state[0] == STOPPING or self.is_orphaned

    @property
    def is_orphaned(self) -> bool:
        """In a client: whether its parent is no more."""
        return os.getppid() != self._parent

    def wait(self) -> bool:
        """In a client: blocks until the gate is opened; whether there is work to do."""
        os.read(self._read_end, 1)
        return self._state[0] == GOING

    def enter_client(self) -> None:
        """In a client, right after the fork: gives up its copy of the parent's end."""
        os.close(self._write_end)

    def open(self) -> None:
        """In the parent: every client starts."""
        self._state[0] = GOING
        self._wake()

    def stop(self) -> None:
        """In the parent: every client ends, at the latest after the call it is in. May be called again."""
        self._state[0] = STOPPING
        self._wake()

    def _wake(self) -> None:
        end, self._write_end = self._write_end, -1  # NOTE: before the close: an interrupt must not close it twice
        if end >= 0:
            os.close(end)


class Ledger:
    """One client's counters, and a record of each of its calls. The client writes, the parent reads.

    Records are three columns of `calls` words: `latency` in ns, `end` in ns of `perf_counter_ns`, `ok` the images that
    have a result, or `NO_REPLY`. A record counts once `calls_done` says so.
    """

    def __init__(self, calls: int) -> None:
        words = _shared_words(_COUNTERS + 3 * calls)
        self._counters = words[:_COUNTERS]
        self.latency, self.end, self.ok = (words[_COUNTERS + n * calls :][:calls] for n in range(3))

    def record(self, latency: int, end: int, ok: int) -> None:
        """One call has ended."""
        done = self._counters[0]
        self.latency[done] = latency
        self.end[done] = end
        self.ok[done] = ok
        self._counters[0] = done + 1

    def count(self, sent: int, answered: int, ok: int, correct: int) -> None:
        """Adds images; `correct` are those with the expected label."""
        for index, images in enumerate((sent, answered, ok, correct), start=1):
            self._counters[index] += images

    def close(self, cpu_ns: int, wall_ns: int) -> None:
        """The client has done its work: the CPU time it took, and the time since the gate opened, both in ns."""
        self._counters[5] = cpu_ns
        self._counters[6] = wall_ns

    calls_done = property(lambda self: self._counters[0])
    sent = property(lambda self: self._counters[1])
    answered = property(lambda self: self._counters[2])
    images_ok = property(lambda self: self._counters[3])
    correct = property(lambda self: self._counters[4])
    cpu_ns = property(lambda self: self._counters[5])
    wall_ns = property(lambda self: self._counters[6])
