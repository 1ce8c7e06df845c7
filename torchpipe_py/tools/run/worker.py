"""A process of ``torchpipe run``: reads items, runs its pipe, and sends the lines to its parent.

It is sent the settings and the number of processes, then messages: a list of jobs; where content decides, the number of
a job that it has read and hashed, and whether to run it; ``None`` at the end. It sends ``("ready", ahead)``, then
lists of ``(number, line)`` and ``(number, SHA-256)``, bytes and a text. ``("failed", reason)`` may come any time.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from torchpipe_py.errors import TorchpipeError, describe
from torchpipe_py.proc.confine import end_with_parent
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.run.lines import Job, LineMaker, StartedJob
from torchpipe_py.tools.run.sources import is_url

READERS = 8
"""Threads that download."""


def main(descriptor: int, parent: int) -> None:
    """Run in the process, until the parent closes the channel."""
    end_with_parent(parent)
    signal(SIGINT, SIG_IGN)  # the parent ends it
    channel = Connection(descriptor)
    try:
        settings, processes, level = channel.recv()
    except (EOFError, OSError):
        os._exit(0)
    try:
        logging.getLogger("torchpipe_py").setLevel(level)
        worker = _Worker(channel, settings, processes)
    except BaseException as error:
        is_known = isinstance(error, TorchpipeError)
        channel.send(("failed", str(error) if is_known else describe(error)))
        os._exit(1)
    # NOTE: on the main thread each call of the pipe would go through a thread more, for signal handlers.
    with ThreadPoolExecutor(1, "torchpipe-run") as thread:
        thread.submit(worker.run).result()
    os._exit(0)  # threads of backends may never end


class _Worker:
    def __init__(self, channel: Connection, settings: Any, processes: int) -> None:
        self._channel = channel
        self._finished: SimpleQueue[StartedJob | tuple[int, str]] = SimpleQueue()
        self._by_content = settings.by_content
        self._maker = LineMaker(settings, processes, self._finished.put)
        self._held: dict[int, tuple[Job, Any, str]] = {}
        """The content that was read and hashed, until the parent says whether it is to run."""
        self._readers = ThreadPoolExecutor(READERS, "torchpipe-read")

    def run(self) -> None:
        """Answer messages until the channel is closed."""
        self._send(("ready", self._maker.ahead))
        threading.Thread(target=self._send_lines, name="torchpipe-lines", daemon=True).start()
        while True:
            try:
                message = self._channel.recv()
            except (EOFError, OSError):
                return
            if message is None:
                self._maker.close()
                return
            if isinstance(message, list):
                for job in message:
                    if is_url(job.where):  # others are not to wait for it
                        self._readers.submit(self._read, job)
                    else:
                        self._read(job)
            else:
                number, is_wanted = message
                job, data, digest = self._held.pop(number)
                if is_wanted:
                    self._maker.start(job, data, digest)

    def _read(self, job: Job) -> None:
        """Read a job's data and start it, or report its hash."""
        try:
            data, digest = self._maker.read(job)
        except Exception as error:
            self._maker.fail(job, error)
            return
        if not self._by_content:
            self._maker.start(job, data, digest)
            return
        self._held[job.number] = job, data, digest
        self._finished.put((job.number, digest))

    def _send_lines(self) -> None:
        """Send what has ended; on a thread of its own, so that neither instances nor reading wait for the parent."""
        finished, make = self._finished, self._maker.line
        while True:
            outcomes: list[tuple[int, bytes | str]] = []
            while not outcomes or not finished.empty():
                ended = finished.get()
                try:
                    outcomes.append(ended if isinstance(ended, tuple) else (ended.job.number, make(ended)))
                except ToolError as error:
                    self._send(outcomes)
                    self._send(("failed", str(error)))
                    return
            self._send(outcomes)

    def _send(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except OSError:
            os._exit(0)  # the parent is gone
