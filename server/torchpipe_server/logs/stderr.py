"""Turns lines on stderr into log records: output of libraries, tracebacks, programs that a backend starts."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import sys
import threading
from collections import deque
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

logger = logging.getLogger("stderr")

REST_BYTES = 2000  # without a line end count as a line
KEPT_LINES = 5
RECENT_SECONDS = 5.0
READ_BYTES = 2**16  # at a time
LAST_READS = 4  # after the end of the process; a program that it started may go on writing

_line_end = re.compile(rb"[\r\n]+")


class StderrLines:
    """Makes a record of each line, for any thread. ``process`` is the pid of another process that wrote them.

    Clients may influence what libraries write, including line ends. Each record begins with a bar, so that it cannot be
    mistaken for a line of the service.
    """

    def __init__(self, process: int | None = None) -> None:
        self._process = process
        self._rest = b""
        self._kept: deque[tuple[float, bytes]] = deque(maxlen=KEPT_LINES)
        self._lock = threading.RLock()
        self._is_logging = False

    def feed(self, data: bytes) -> None:
        """Add bytes of the stream."""
        with self._lock:
            if self._is_logging:
                return  # NOTE: a custom log handler may write these records to sys.stderr again
            *lines, self._rest = _line_end.split(self._rest + data)
            if len(self._rest) > REST_BYTES:
                lines.append(self._rest)
                self._rest = b""
            self._is_logging = True
            try:
                for line in filter(None, lines):
                    self._kept.append((monotonic(), line))
                    self._log(f"| {_text(line)}")
            finally:
                self._is_logging = False

    def recent(self) -> list[str]:
        """The last lines, if they are recent."""
        return [_text(line) for at, line in self._kept if at > monotonic() - RECENT_SECONDS]

    def _log(self, text: str) -> None:
        if logger.isEnabledFor(logging.WARNING):
            record = logger.makeRecord(logger.name, logging.WARNING, "", 0, "%s", (text,), None)
            record.process = self._process or record.process
            logger.handle(record)


class StderrPipe:
    """Owns the read end of a pipe that is the stderr of another process.

    Thereby the last lines are known after that process is gone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: Connection, process: int) -> None:
        self._loop, self._pipe, self.lines = loop, pipe, StderrLines(process)
        os.set_blocking(pipe.fileno(), False)
        loop.add_reader(pipe.fileno(), self._read)

    def close(self) -> None:
        """Read the rest, then close the pipe."""
        if self._pipe.closed:
            return
        for _ in range(LAST_READS):
            if not self._read():
                break
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        self.lines.feed(b"\n")  # ends an incomplete line

    def _read(self) -> bool:
        """Read once; returns whether there was data."""
        try:
            data = os.read(self._pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._pipe.fileno())
        self.lines.feed(data)
        return bool(data)


def _text(line: bytes) -> str:
    return line.decode("utf-8", "backslashreplace")


class _Raw(io.RawIOBase):
    """The raw stream below ``sys.stderr``."""

    def __init__(self) -> None:
        self._lines = StderrLines()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._lines.feed(bytes(data))
        return len(data)

    def fileno(self) -> int:
        return 2


def take_over_stderr(descriptor: int = 2) -> None:
    """Make log records of output on ``sys.stderr``, and redirect descriptor 2 to ``descriptor``.

    Native libraries write to descriptor 2 directly. Set up logging before: it keeps using the original stderr.
    """
    if descriptor != 2:
        os.dup2(descriptor, 2)
    raw: Any = _Raw()
    sys.stderr = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)


def open_standard_streams() -> None:
    """Open closed descriptors among 0 to 2: otherwise a socket would take their place and get their output."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def print_line(descriptor: int, text: str) -> threading.Thread:
    """Write a plain line on a thread, so that a reader that has stopped blocks nothing."""

    def write() -> None:
        try:
            os.write(descriptor, f"{text}\n".encode("utf-8", "backslashreplace"))
        except OSError:
            logger.info("%s; cannot write to descriptor %d", text, descriptor)

    thread = threading.Thread(target=write, name="torchpipe-print", daemon=True)
    thread.start()
    return thread
