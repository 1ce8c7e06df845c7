"""Writes log lines from a thread of its own, so that whoever does not read them keeps nobody waiting."""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from time import monotonic

from torchpipe_server.logs.formats import LINE_BYTES, LineFormatter
from torchpipe_server.logs.repeats import Repeats

QUEUE_BYTES = 4 * 2**20
FLUSH_SECONDS = 1.0
REQUESTS = "torchpipe_server.requests"  # the logger of --log-requests, which the operator wants in full

_TELL_SECONDS = 1.0
_OVERHEAD_BYTES = 100  # what a waiting line takes besides its text


class QueuedHandler(logging.Handler):
    """Lines wait for the thread in a queue; beyond ``QUEUE_BYTES`` they are dropped and counted.

    Owns the descriptor ``fd``. It may be closed or full, or nobody reads it: nothing of that is raised, and ``flush``
    waits for ``FLUSH_SECONDS`` at most.
    """

    def __init__(self, fd: int, formatter: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._fd = fd
        self._repeats = Repeats(self._wake)
        # Lines; each figure is written by one side only, so that neither needs a lock.
        self._refused = 0  # by emit
        self._unwritten = self._told = 0  # by the thread
        self._tell_at = 0.0
        self._is_torn = self._is_closed = False
        self._start()

    @property
    def dropped(self) -> int:
        """Lines that were not written: the queue was full, or the descriptor did not take them."""
        return self._refused + self._unwritten

    def emit(self, record: logging.LogRecord) -> None:
        """Format the record, and queue it if there is room."""
        try:
            if record.name == REQUESTS or self._repeats.admits(record):
                self._put(self._line(record))
        except Exception:
            self._refused += 1  # a field that JSON does not know, say

    def flush(self) -> None:
        """Wait until everything is written, but not long."""
        if self._is_closed or self._owner != os.getpid():
            return
        is_written = threading.Event()
        self._queue.put(is_written)
        is_written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Have the thread write what is there, close the descriptor and end."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        super().close()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._queue: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._put_bytes = self._taken_bytes = 0
        threading.Thread(target=self._run, name="torchpipe-log", daemon=True).start()

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def _put(self, line: bytes) -> None:
        if self._owner != os.getpid():
            self._start()  # this process was forked: the thread is not here
        if self._put_bytes - self._taken_bytes >= QUEUE_BYTES:
            self._refused += 1
            return
        self._put_bytes += len(line) + _OVERHEAD_BYTES
        self._queue.put(line)

    def _wake(self) -> None:
        """The thread looks again how long it may wait."""
        self._queue.put(b"")

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Until ``None`` comes. Lines that wait are written together, as many as a pipe takes whole."""
        lines: list[bytes] = []
        size = 0
        while True:
            try:
                item = self._queue.get(not lines, self._seconds_to_wait())
            except queue.Empty:
                item = b""
            if isinstance(item, bytes) and item:
                self._taken_bytes += len(item) + _OVERHEAD_BYTES
                if size + len(item) > LINE_BYTES:
                    self._write(lines)
                    lines, size = [], 0
                lines.append(item)
                size += len(item)
                continue
            self._write(lines)
            lines, size = [], 0
            self._tell(at_once=item != b"")
            if isinstance(item, threading.Event):
                item.set()
            elif item is None:
                os.close(self._fd)
                return

    def _seconds_to_wait(self) -> float | None:
        """Seconds until there may be something to tell without another line; ``None``: there is nothing."""
        return _TELL_SECONDS if self._repeats.is_holding or self.dropped > self._told else None

    def _tell(self, at_once: bool) -> None:
        """Say what was not written, after what was."""
        for record in self._repeats.told(at_once):
            self._write([self._line(record)])
        count = self.dropped - self._told
        if count and (at_once or (self._queue.empty() and monotonic() >= self._tell_at)):
            text = "dropped %d log lines: nobody took them"
            record = logging.LogRecord("torchpipe_server", logging.WARNING, "", 0, text, (count,), None)
            self._tell_at = monotonic() + _TELL_SECONDS
            if self._is_written(self._line(record)):
                self._told += count

    def _write(self, lines: list[bytes]) -> None:
        if lines and not self._is_written(b"".join(lines)):
            self._unwritten += len(lines)

    def _is_written(self, data: bytes) -> bool:
        """Write it, for however long that takes; whether it was taken."""
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
                self._is_torn = True  # until all of it is written
            except BlockingIOError:  # whoever started the service made it so
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
            except OSError:
                return False
        self._is_torn = False
        return True
