"""Writes log lines on a thread, so that a reader that stops blocks nothing else."""

from __future__ import annotations

import logging
import os
import select
import threading
from logging.handlers import QueueHandler
from queue import Empty, SimpleQueue
from time import monotonic

from torchpipe_server.logs.formats import LineFormatter
from torchpipe_server.logs.repeats import RepeatFilter

QUEUE_LINES = 8192
FLUSH_SECONDS = 1.0
REPORT_SECONDS = 10.0  # between reports of limited and dropped lines
REQUESTS = "torchpipe_server.requests"  # the logger of --log-requests, which is never limited


class LogWriter(QueueHandler):
    """Formats records where they are logged; a thread writes their lines to the descriptor ``fd``, which it owns.

    At most ``QUEUE_LINES`` wait; further ones are counted and dropped. The descriptor may be closed, full or never
    read: no error is raised, and ``flush`` waits at most ``FLUSH_SECONDS``.
    """

    def __init__(self, fd: int, formatter: LineFormatter) -> None:
        self._start_queue()
        super().__init__(self.queue)
        self._fd, self._is_closed = fd, False
        self._repeats = RepeatFilter(REQUESTS)
        self.addFilter(self._repeats)
        self.setFormatter(formatter)
        self._start_thread()

    def _start_queue(self) -> None:
        self._owner = os.getpid()
        self._refused = 0  # counted by the logging threads
        self._unwritten = self._reported = 0  # counted by the writing thread
        # Records, and events to set once the records before them are written; None ends the thread.
        # NOTE: not a `Queue`, whose lock is not re-entrant: the garbage collector may run anywhere, and finalisers log.
        self.queue: SimpleQueue[logging.LogRecord | threading.Event | None] = SimpleQueue()

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name="log-lines", daemon=True).start()

    @property
    def dropped(self) -> int:
        """Lines not written because the queue was full or writing failed."""
        return self._refused + self._unwritten

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a formatted record if there is room; otherwise count it."""
        if self._owner != os.getpid():  # after a fork: the thread does not exist here
            self._start_queue()
            self._start_thread()
        if self.queue.qsize() < QUEUE_LINES:
            self.queue.put(record)
        else:
            self._refused += 1

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Count a record that cannot be formatted, such as one with a field that JSON cannot represent."""
        self._refused += 1

    def flush(self) -> None:
        """Wait until everything is written, for at most ``FLUSH_SECONDS``."""
        if not self._is_closed and self._owner == os.getpid():
            is_written = threading.Event()
            self.queue.put(is_written)
            is_written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Let the thread write what is queued, close the descriptor and end."""
        if not self._is_closed:
            self._is_closed = True
            self.queue.put(None)
        super().close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        report_at = monotonic()
        while True:
            try:
                item = self.queue.get(timeout=REPORT_SECONDS)
            except Empty:
                self._report()
                continue
            if isinstance(item, logging.LogRecord):
                self._unwritten += not self._write(item.getMessage())
                if self.queue.empty() and monotonic() >= report_at:
                    self._report()
                    report_at = monotonic() + REPORT_SECONDS
                continue
            self._report()
            if item is None:
                os.close(self._fd)
                return
            item.set()

    def _report(self) -> None:
        """Report the lines limited and dropped since the last report."""
        for summary in self._repeats.summaries():
            self._unwritten += not self._write(self.format(summary))
        count = self.dropped - self._reported
        if count:
            text = "dropped %d log lines: the reader is too slow"
            record = logging.LogRecord("torchpipe_server", logging.WARNING, "", 0, text, (count,), None)
            if self._write(self.format(record)):
                self._reported += count

    def _write(self, text: str) -> bool:
        """Write a record's lines, however long that takes; returns whether that succeeded."""
        rest = memoryview((text + "\n").encode("utf-8", "backslashreplace"))
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
