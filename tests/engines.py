"""An engine and its workers in one process: what the service has in several."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torchpipe_py.backends.shared.client import Watch
from torchpipe_py.engine import Engine, EngineServer, pipe_of_worker
from torchpipe_py.plan.build import plan_pipeline


class Worker:
    """A pipe whose shared nodes ``server`` runs; ``way`` is that one's end of the way to it."""

    way: socket.socket

    def __init__(self, config: Any, server: EngineServer, watch: Watch | None = None) -> None:
        self.engine, self.server = Engine(watch), server
        link(self, server)
        try:
            self.pipe = pipe_of_worker(plan_pipeline(config), self.engine)
        except BaseException:
            self.engine.close()
            raise

    def close(self) -> None:
        self.pipe.close()
        self.engine.close()


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
