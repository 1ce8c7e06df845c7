"""What a worker's process writes on stderr, read by the supervisor: it is there when the worker is no more."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from torchpipe_server.front.loop import Loop
from torchpipe_server.logs.stderr import StderrLines

READ_BYTES = 2**16  # at a time
LAST_READS = 4  # once the worker has ended: a program that it has started may go on writing


class WorkerStderr:
    """The end of a pipe to read from; owns it."""

    def __init__(self, loop: Loop, pipe: Connection, pid: int) -> None:
        self._loop, self._pipe = loop, pipe
        self._lines = StderrLines(pid)
        os.set_blocking(pipe.fileno(), False)
        loop.add_reader(pipe.fileno(), self._read)

    def close(self) -> None:
        """Read what is left, and close it."""
        for _ in range(LAST_READS):
            if self._pipe.closed or not self._read():
                break
        self._end()

    def last_words(self) -> str:
        """What it wrote in the last moments, on one line."""
        return " / ".join(self._lines.recent())

    def _read(self) -> bool:
        """Whether there was anything."""
        try:
            data = os.read(self._pipe.fileno(), READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if data:
            self._lines.feed(data)
        else:
            self._end()
        return bool(data)

    def _end(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            self._lines.end()
