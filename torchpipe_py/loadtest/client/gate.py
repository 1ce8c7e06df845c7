"""The gate that starts all client processes at once, in memory that they share with the parent."""

from __future__ import annotations

import os

from torchpipe_py.loadtest.ledger import shared_words

WAITING, GOING, STOPPING = range(3)


class Gate:
    """Holds the clients until the parent opens it, and tells them to stop.

    Clients sleep in a read of a pipe that only the parent can write: closing it wakes all of them, and so does the
    parent's death, which leaves the state at `WAITING`.
    """

    def __init__(self) -> None:
        self._state = shared_words(2)
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

    @property
    def start(self) -> int:
        """In a client: when the run begins, in ns of `perf_counter_ns`, which is one clock for all processes."""
        return self._state[1]

    def wait(self) -> bool:
        """In a client: blocks until the gate is opened; whether there is work to do."""
        os.read(self._read_end, 1)
        return self._state[0] == GOING

    def enter_client(self) -> None:
        """In a client, right after the fork: gives up its copy of the parent's end."""
        os.close(self._write_end)

    def open(self, start: int) -> None:
        """In the parent: every client goes to work; the run begins at `start`, in ns of `perf_counter_ns`."""
        self._state[1] = start
        self._state[0] = GOING
        self._wake()

    def stop(self) -> None:
        """In the parent: every client ends, at the latest after the call it is in. May be called again."""
        self._state[0] = STOPPING
        self._wake()

    def close(self) -> None:
        """In the parent, once no client is left. May be called again."""
        end, self._read_end = self._read_end, -1
        if end >= 0:
            os.close(end)

    def _wake(self) -> None:
        end, self._write_end = self._write_end, -1  # NOTE: before the close: an interrupt must not close it twice
        if end >= 0:
            os.close(end)
