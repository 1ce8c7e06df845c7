"""An engine process: runs the shared nodes for the workers whose ways to it the supervisor hands over."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.loop import every, new_loop
from torchpipe_server.worker.worker import (
    CLOSE_SECONDS,
    Post,
    Start,
    end_process,
    engine_processes,
    make_plan,
    run_process,
    set_up_process,
)

logger = logging.getLogger("torchpipe_server")

ORPHAN_SECONDS = 0.5  # between two looks at whether the last worker has ended, where the supervisor is gone


def engine_main(start: Start) -> None:
    """The main function of an engine process. It ends when the supervisor says so, or with the last worker."""
    run_process(start, lambda: EngineProcess(start).serve)


class EngineProcess:
    """Serves the workers that the supervisor links to it until it says that there are none any more."""

    def __init__(self, start: Start) -> None:
        from torchpipe_py.proc.engine import EngineServer

        set_up_process(start.options)
        plan = make_plan(start.options, start.tables, engine_processes(start.options, start.tables))
        self._server = EngineServer(plan)
        self._loop = new_loop(is_fast=False)
        hear: dict[str, Callable[[dict[str, Any], int], object]] = {
            "link": self._attach,
            "drain": lambda *_: self._loop.stop(),
            "release": lambda *_: self._loop.stop(),
        }
        self._requests = RequestCounters("").summary()  # those of clients are the workers'
        self._post = Post(start, self._loop, hear, self._figures, self._server.pipe.stats, self._orphaned)

    def serve(self) -> NoReturn:
        """Until told to end, and the process with it."""
        self._post.run("")
        self._post.end(True)
        end_process(self._server.pipe, self._server.close(CLOSE_SECONDS), 0)

    def _attach(self, message: dict[str, Any], descriptor: int) -> None:
        if descriptor < 0:
            logger.error("a worker cannot be linked: no descriptor is left for it")
        else:
            self._server.attach(socket.socket(fileno=descriptor))

    def _orphaned(self) -> None:
        logger.error("the supervisor is gone: serving the workers until they end")
        every(self._loop, ORPHAN_SECONDS, lambda: self._server.workers or self._loop.stop())

    def _figures(self) -> dict[str, Any]:
        return {**self._server.pipe.stats(), "inflight": 0, "requests": self._requests}
