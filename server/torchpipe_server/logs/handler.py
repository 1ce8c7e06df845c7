"""Log lines are written by a thread of their own, so that a reader who stops keeps nothing else waiting."""

from __future__ import annotations

import logging
import os
import select
import threading
from functools import partial
from logging.handlers import QueueHandler, QueueListener
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from torchpipe_server.logs.formats import LINE_BYTES, LineFormatter
from torchpipe_server.logs.repeats import Repeats

QUEUE_BYTES = 4 * 2**20
FLUSH_SECONDS = 1.0
REQUESTS = "torchpipe_server.requests"  # the logger of --log-requests, which the operator wants in full

_REPORT_SECONDS = 10.0  # from one report of what was held back or dropped to the next
_OVERHEAD_BYTES = 100  # what a waiting line takes besides its text


class LineListener(QueueListener):
    """Writes whole lines on ``fd``, and reports what was held back and how many lines were dropped.

    The queue holds lines, and what is to be called once the lines before it are written. NOTE: it takes no lock. The
    garbage collector may run anywhere in it, and what it ends may log.
    """

    def __init__(self, handler: QueuedHandler, fd: int) -> None:
        self.queue: Any
        super().__init__(SimpleQueue())  # type: ignore[arg-type]
        self._handler, self._fd = handler, fd
        self._ahead: list[Any] = []  # taken from the queue, but not handled yet
        self._is_torn = False
        self._reported = 0
        self._report_at = 0.0
        self.taken_bytes = self.unwritten = 0

    def dequeue(self, block: bool) -> Any:
        """The next item, of lines as many as a pipe takes whole; report now and then while there is none."""
        while True:
            try:
                item = self._ahead.pop() if self._ahead else self.queue.get(timeout=_REPORT_SECONDS)
                break
            except Empty:
                self.report()
        lines, size = [], 0
        while isinstance(item, bytes):
            lines.append(item)
            size += len(item)
            if self.queue.empty():
                break
            item = self.queue.get_nowait()
            if not isinstance(item, bytes) or size + len(item) > LINE_BYTES:
                self._ahead.append(item)
                break
        self.taken_bytes += size + _OVERHEAD_BYTES * len(lines)
        return b"".join(lines) if lines else item

    def handle(self, record: Any) -> None:
        """Write lines, or call what is to be called after them."""
        if not isinstance(record, bytes):
            record()
            return
        self._write(record)
        if self.queue.empty() and monotonic() >= self._report_at:
            self.report()

    def report(self) -> None:
        """Write what was held back and how much was dropped since the last report."""
        self._report_at = monotonic() + _REPORT_SECONDS
        for summary in self._handler.repeats.told():
            self._write(self._handler.prepare(summary))
        count = self._handler.dropped - self._reported
        if count:
            text = "dropped %d log lines: nobody took them"
            record = logging.LogRecord("torchpipe_server", logging.WARNING, "", 0, text, (count,), None)
            if self._is_written(self._handler.prepare(record)):
                self._reported += count

    def _write(self, lines: bytes) -> None:
        if not self._is_written(lines):
            self.unwritten += lines.count(b"\n")

    def _is_written(self, data: bytes) -> bool:
        """Write it, for however long that takes; whether it was taken."""
        rest = memoryview(b"\n" + data if self._is_torn else data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
                self._is_torn = True  # until all of it is written
            except BlockingIOError:  # the process that started the service made it non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
            except OSError:
                return False
        self._is_torn = False
        return True


class QueuedHandler(QueueHandler):
    """Makes lines of records where they are logged, and leaves the rest to a ``LineListener``.

    Owns the descriptor ``fd``, which may be closed, full or never read: no error is raised, and ``flush`` waits for
    ``FLUSH_SECONDS`` at most.
    """

    def __init__(self, fd: int, formatter: LineFormatter) -> None:
        self._fd, self._is_closed = fd, False
        self.repeats = Repeats(REQUESTS)
        self._start()
        super().__init__(self._listener.queue)
        self.setFormatter(formatter)
        self.addFilter(self.repeats)

    def _start(self) -> None:
        self._owner = os.getpid()
        self._put_bytes = self._refused = 0
        self._listener = LineListener(self, self._fd)
        self._listener.start()
        self.queue = self._listener.queue

    @property
    def dropped(self) -> int:
        """Lines that were not written: the queue was full, or the descriptor did not take them."""
        return self._refused + self._listener.unwritten

    def prepare(self, record: logging.LogRecord) -> Any:
        """The record's line, with its end."""
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def enqueue(self, record: Any) -> None:
        """Queue a line if there is room, or anything else."""
        if self._owner != os.getpid():
            self._start()  # this process was forked: the listener's thread is not here
        if isinstance(record, bytes):
            if self._put_bytes - self._listener.taken_bytes >= QUEUE_BYTES:
                self._refused += record.count(b"\n")
                return
            self._put_bytes += len(record) + _OVERHEAD_BYTES
        self.queue.put_nowait(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Count a record of which no line can be made: a field that JSON does not know, say."""
        self._refused += 1

    def flush(self) -> None:
        """Wait until everything is written and reported, but not long."""
        if not self._is_closed and self._owner == os.getpid():
            is_written = threading.Event()
            self.enqueue(self._listener.report)
            self.enqueue(is_written.set)
            is_written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Let the listener write what is there, close the descriptor and end."""
        if not self._is_closed:
            self._is_closed = True
            self.enqueue(self._listener.report)
            self.enqueue(partial(os.close, self._fd))
            self._listener.enqueue_sentinel()  # NOTE: ``stop`` would wait for the reader of the log.
        super().close()
