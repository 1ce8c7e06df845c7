"""An engine and its workers in one process: what the service has in several."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc.client import Watch
from torchpipe_py.proc.engine import EngineClient, EngineServer, pipe_of_worker
from torchpipe_py.runtime import runtime


class Watcher:
    """Watches descriptors on a loop and a thread of its own, as a worker does."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="watcher", daemon=True)
        self._thread.start()

    def watch(self, fd: int, take: Callable[[], object] | None) -> None:
        change = (self._loop.remove_reader, fd) if take is None else (self._loop.add_reader, fd, take)
        self._loop.call_soon_threadsafe(*change)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Worker:
    """A pipe whose shared nodes ``server`` runs; ``way`` is that one's end of the way to it."""

    way: socket.socket

    def __init__(self, config: Any, server: EngineServer, watch: Watch | None = None) -> None:
        self._watcher = Watcher()
        self.engine, self.server = EngineClient(watch or self._watcher.watch), server
        try:
            link(self, server)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(runtime, "has_handlers", lambda: False)  # a worker of a service has none
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
