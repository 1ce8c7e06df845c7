"""A thread writes the log lines, so that a reader who stops holds up nothing else."""

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
REQUESTS = "torchpipe_server.requests"  # the logger of --log-requests, which the operator wants in full

_REPORT_SECONDS = 10.0  # from one report of what was held back or dropped to the next
_OVERHEAD_BYTES = 100  # what a waiting line takes besides its text


class QueuedHandler(logging.Handler):
    """Makes lines of records where they are logged; a thread writes them, as many at once as a pipe takes whole.

    Owns the descriptor ``fd``, which may be closed, full or never read: no error is raised, and ``flush`` waits for
    ``FLUSH_SECONDS`` at most.
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
        self._put_bytes = self._refused = 0  # counted by those who log
        self._taken_bytes = self._unwritten = 0  # counted by the thread that writes
        self._reported, self._report_at = 0, 0.0
        # Lines, and what to call once the lines before it are written; None ends the thread.
        # NOTE: it takes no lock. The garbage collector may run anywhere in it, and what it ends may log.
        self._queue: SimpleQueue[bytes | Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="log-lines", daemon=True).start()

    @property
    def dropped(self) -> int:
        """Lines that were not written: the queue was full, or the descriptor did not take them."""
        return self._refused + self._unwritten

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line if there is room for it, and count it otherwise."""
        if self._owner != os.getpid():
            self._start()  # this process was forked: the thread is not here
        try:
            line = self._line(record)
        except Exception:  # a field that JSON does not know, say
            self._refused += 1
            return
        if self._put_bytes - self._taken_bytes >= QUEUE_BYTES:
            self._refused += line.count(b"\n")
            return
        self._put_bytes += len(line) + _OVERHEAD_BYTES
        self._queue.put(line)

    def flush(self) -> None:
        """Wait until everything is written and reported, but not long."""
        if not self._is_closed and self._owner == os.getpid():
            is_written = threading.Event()
            self._queue.put(self._report)
            self._queue.put(is_written.set)
            is_written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Let the thread write what is there, close the descriptor and end."""
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
        """Write what was held back and how much was dropped since the last report."""
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
        """Write it, for however long that takes; whether it was taken."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # the process that started the service made it non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
            except OSError:
                return False
        return True
