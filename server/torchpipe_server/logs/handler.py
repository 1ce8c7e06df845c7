"""Writes log lines on a thread, so that a reader that stops blocks nothing else."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

from torchpipe_server.logs.formats import LINE_BYTES, LineFormatter
from torchpipe_server.logs.repeats import Repeats

QUEUE_BYTES = 4 * 2**20
FLUSH_SECONDS = 1.0
REQUESTS = "torchpipe_server.requests"  # the logger of --log-requests, which is never limited

_REPORT_SECONDS = 10.0  # between reports of limited and dropped lines
_OVERHEAD_BYTES = 100  # of memory for a waiting line besides its text


class QueuedHandler(logging.Handler):
    """Formats records where they are logged; a thread writes the lines, several at once up to ``LINE_BYTES``.

    Owns the descriptor ``fd``, which may be closed, full or never read: no error is raised, and ``flush`` waits at most
    ``FLUSH_SECONDS``.
    """

    def __init__(self, fd: int, formatter: LineFormatter) -> None:
        super().__init__()
        self._fd, self._is_closed = fd, False
        self._repeats = Repeats(REQUESTS)
        self.setFormatter(formatter)
        self.addFilter(self._repeats)
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._put_bytes = self._refused = 0  # counted by the logging threads
        self._taken_bytes = self._unwritten = 0  # counted by the writing thread
        self._reported, self._report_at = 0, 0.0
        # Lines, and functions to call once the lines before them are written; None ends the thread.
        # NOTE: lock-free, because the garbage collector may run anywhere, and finalisers may log.
        self._queue: SimpleQueue[bytes | Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="log-lines", daemon=True).start()

    @property
    def dropped(self) -> int:
        """Lines not written because the queue was full or writing failed."""
        return self._refused + self._unwritten

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line if there is room; otherwise count it."""
        if self._owner != os.getpid():
            self._start()  # after a fork: the thread does not exist here
        try:
            line = self._line(record)
        except Exception:  # such as a field that JSON cannot represent
            self._refused += 1
            return
        if self._put_bytes - self._taken_bytes >= QUEUE_BYTES:
            self._refused += line.count(b"\n")
            return
        self._put_bytes += len(line) + _OVERHEAD_BYTES
        self._queue.put(line)

    def flush(self) -> None:
        """Wait until everything is written, for at most ``FLUSH_SECONDS``."""
        if not self._is_closed and self._owner == os.getpid():
            is_written = threading.Event()
            self._queue.put(self._report)
            self._queue.put(is_written.set)
            is_written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Let the thread write what is queued, close the descriptor and end."""
        if not self._is_closed:
            self._is_closed = True
            for last in (self._report, partial(os.close, self._fd), None):
                self._queue.put(last)
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def _run(self) -> None:
        lines = b""
        while True:
            try:
                item = self._queue.get(not lines, _REPORT_SECONDS)
            except Empty:
                item = self._report_if_due
            if isinstance(item, bytes):
                self._taken_bytes += len(item) + _OVERHEAD_BYTES
                if len(lines) + len(item) <= LINE_BYTES:
                    lines += item
                    continue
            self._write(lines)
            lines = item if isinstance(item, bytes) else b""
            if item is None:
                return
            if not isinstance(item, bytes):
                item()

    def _report_if_due(self) -> None:
        if self._queue.empty() and monotonic() >= self._report_at:
            self._report()

    def _report(self) -> None:
        """Report the lines limited and dropped since the last report."""
        self._report_at = monotonic() + _REPORT_SECONDS
        for summary in self._repeats.summaries():
            self._write(self._line(summary))
        count = self.dropped - self._reported
        if count:
            text = "dropped %d log lines: the reader is too slow"
            record = logging.LogRecord("torchpipe_server", logging.WARNING, "", 0, text, (count,), None)
            if self._is_written(self._line(record)):
                self._reported += count

    def _write(self, lines: bytes) -> None:
        if lines and not self._is_written(lines):
            self._unwritten += lines.count(b"\n")

    def _is_written(self, data: bytes) -> bool:
        """Write ``data``, however long that takes; returns whether that succeeded."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # the parent of the service made it non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
            except OSError:
                return False
        return True
