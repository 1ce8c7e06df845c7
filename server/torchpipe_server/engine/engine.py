"""An engine process: runs the shared nodes for the workers whose ways to it the supervisor hands over."""

from __future__ import annotations

import gc
import logging
import socket
from typing import TYPE_CHECKING, Any

from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.loop import every, new_loop
from torchpipe_server.logs import dropped_lines
from torchpipe_server.worker.channel import Channel, Said
from torchpipe_server.worker.heartbeat import Heart
from torchpipe_server.worker.worker import (
    CLOSE_SECONDS,
    Start,
    choose_device,
    die_with_parent,
    end_process,
    engine_processes,
    make_plan,
    run_process,
    say_failed,
    set_up_process,
    used_gpus,
)

if TYPE_CHECKING:
    from torchpipe_py.proc.engine import EngineServer

logger = logging.getLogger("torchpipe_server")


def engine_main(start: Start) -> None:
    """The main function of an engine process. It ends when the supervisor says so, or with the last worker."""
    run_process(start, _work)


def _work(start: Start) -> None:
    choose_device(start)
    die_with_parent(True)
    try:
        from torchpipe_py.proc.engine import EngineServer

        set_up_process(start.options)
        server = EngineServer(make_plan(start.options, start.tables, engine_processes(start.options, start.tables)))
    except Exception as error:
        say_failed(start.sock, error)
        return
    die_with_parent(False)  # from here on it ends when its workers have
    gc.freeze()
    EngineProcess(start, server).serve()
    end_process(server.pipe, server.close(CLOSE_SECONDS), 0)


class EngineProcess:
    """Serves the workers that come through the channel until the supervisor says that there are none any more."""

    def __init__(self, start: Start, server: EngineServer) -> None:
        self._server = server
        self._loop = new_loop(is_fast=False)
        every(self._loop, 0.5, self._end_if_orphan)
        self._is_orphan = False
        self._channel = Channel(self._loop, start.sock, self._hear, self._orphaned)
        self._heart = Heart(start.heartbeat, self._loop, server.pipe.stats)
        self._requests = RequestCounters("").summary()  # those of clients are the workers'

    def serve(self) -> None:
        """Until told to end."""
        self._heart.start()
        self._channel.send({"type": "ready", "graph": ""})
        self._loop.run_forever()
        self._channel.send({"type": "end", "answered": True, "stats": self._stats()})
        self._channel.finish(CLOSE_SECONDS)

    def _hear(self, message: Said, descriptor: int) -> None:
        kind = message["type"]
        if kind == "link":
            if descriptor < 0:
                logger.error("a worker cannot be linked: no descriptor is left for it")
            else:
                self._server.attach(socket.socket(fileno=descriptor))
        elif kind == "stats":
            self._channel.send({"type": "stats", "stats": self._stats()})
        elif kind in ("drain", "release"):
            self._loop.stop()

    def _orphaned(self) -> None:
        logger.error("the supervisor is gone: serving the workers until they end")
        self._is_orphan = True

    def _end_if_orphan(self) -> None:
        if self._is_orphan and not self._server.workers:
            self._loop.stop()

    def _stats(self) -> dict[str, Any]:
        stats = {**self._server.pipe.stats(), "inflight": 0, "requests": self._requests}
        return {**stats, "log_lines_dropped": dropped_lines(), "gpus": used_gpus()}
