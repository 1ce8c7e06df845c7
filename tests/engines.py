"""An engine and its workers in one process: what the service has in several."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc.client import Watch
from torchpipe_py.proc.engine import EngineClient, EngineServer, pipe_of_worker
from torchpipe_py.runtime import hand_over


class Watcher:
    """Watches descriptors on a thread of its own, as the loop of a worker does."""

    def __init__(self) -> None:
        self._takes: dict[int, Callable[[], object]] = {}
        self._changes: deque[tuple[int, Callable[[], object] | None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def watch(self, fd: int, take: Callable[[], object] | None) -> None:
        self._changes.append((fd, take))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self._is_closed:
            for fd, _ in poller.poll():
                if fd == self._wake:
                    os.eventfd_read(fd)
                else:
                    self._takes[fd]()
            while self._changes:
                fd, take = self._changes.popleft()
                if take is not None:
                    self._takes[fd] = take
                    poller.register(fd, select.POLLIN)
                else:
                    poller.unregister(fd)
                    del self._takes[fd], take


class Worker:
    """A pipe whose shared nodes ``server`` runs; ``way`` is that one's end of the way to it."""

    way: socket.socket

    def __init__(self, config: Any, server: EngineServer, watch: Watch | None = None) -> None:
        self._watcher = Watcher()
        self.engine, self.server = EngineClient(watch or self._watcher.watch), server
        try:
            link(self, server)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hand_over, "has_handlers", lambda: False)  # a worker of a service has none
                self.pipe = pipe_of_worker(plan_pipeline(config), self.engine)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        self.pipe.close()
        self._end()

    def _end(self) -> None:
        self.engine.close()
        self._watcher.close()


def link(worker: Worker, server: EngineServer) -> None:
    """Give both a way to each other."""
    ours, theirs = socket.socketpair()
    server.attach(ours)
    worker.engine.attach(theirs)
    worker.way = ours


@contextmanager
def engine_of(config: Any) -> Iterator[EngineServer]:
    """The engine's end of a configuration."""
    server = EngineServer(plan_pipeline(config))
    try:
        yield server
    finally:
        server.close()


@contextmanager
def workers_of(config: Any, count: int = 1) -> Iterator[list[Worker]]:
    """So many workers of one engine."""
    with engine_of(config) as server, ExitStack() as stack:
        workers = []
        for _ in range(count):
            worker = Worker(config, server)
            stack.callback(worker.close)
            workers.append(worker)
        yield workers
