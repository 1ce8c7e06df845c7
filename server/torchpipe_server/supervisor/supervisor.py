"""Owns the port and every client's connection, watches the workers, and answers for all of them.

It runs one loop on one thread and imports no torch. Connections are handed on between two messages, so that a client
notices neither a reload nor a restart, beyond an error for the one request that a dead worker had.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from time import monotonic, time
from typing import Any

import torchpipe_py
from torchpipe_py.errors import ConfigError
from torchpipe_py.runtime.statistics import BOUNDS_MS
from torchpipe_server.front.loop import call_from_any_thread, every, new_loop
from torchpipe_server.logs import dropped_lines
from torchpipe_server.options import Options
from torchpipe_server.supervisor.children.child import Child
from torchpipe_server.supervisor.children.fleet import Fleet
from torchpipe_server.supervisor.children.generation import WorkerSlot
from torchpipe_server.supervisor.connections import Connections
from torchpipe_server.supervisor.figures import Figures, add_requests, service_figures
from torchpipe_server.worker.channel import Said
from torchpipe_server.worker.worker import HUNG

logger = logging.getLogger("torchpipe_server")

STEP_SECONDS = 0.1  # between two looks at whether a question, or the stop, is over
ASK_SECONDS = 1.0  # for a worker to tell its figures
EXIT_SECONDS = 5.0  # beyond drain_seconds, for a worker to end
EXIT_CODE_SECONDS = 0.2  # for the process that workers are forked from to tell it
KILL_SECONDS = 1.0  # beyond those, for those that were killed to be gone, and for what they had to be answered


@dataclass(eq=False)
class Ask:
    """Somebody waits for the workers' figures."""

    waiting: set[Child]
    until: float
    answer: Callable[[Figures], object]


class Supervisor:
    """``run`` serves on the calling thread until ``stop``.

    ``load`` gives the configuration, now and at each reload; it may raise ``ConfigError``. ``idl`` is that of
    InferenceService, or ``None`` where another one is served.
    """

    def __init__(self, listener: socket.socket, options: Options, load: Callable[[], Any], idl: Any) -> None:
        tables = load()
        self._options = options
        self.loop = new_loop(is_fast=False)
        self._connections = Connections(
            self.loop, listener, options, idl, lambda: self._fleet.ready, lambda: self._fleet.is_recovering
        )
        self._fleet = Fleet(self.loop, options, self._connections.journal, tables, load, self)
        self.monitoring: Any = None  # the other port, closed at the end
        self._asks: list[Ask] = []
        self._problem = ""
        self._has_lost = self._is_accepting = self._has_killed = False
        self._stopping_until: float | None = None
        self._began = monotonic()
        self._on_ready: Callable[[], object] = lambda: None
        every(self.loop, STEP_SECONDS, self._step)

    # -- from any thread ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop accepting, let the workers answer what was accepted, end. Safe in a signal handler."""
        call_from_any_thread(self.loop, self._begin_stop)

    def reload(self) -> None:
        """Read the configuration again and replace all workers. Safe in a signal handler."""
        call_from_any_thread(self.loop, self._fleet.reload)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, and a worker is there that would answer them."""
        return self._is_accepting and self._stopping_until is None and self._fleet.is_responding

    @property
    def graph(self) -> str:
        """The pipeline as SVG; empty as long as no worker is ready."""
        return next((worker.child.graph for worker in self._fleet.workers if worker.child and worker.child.graph), "")

    # -- life ---------------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[], object]) -> bool:
        """Until stopped; whether every accepted request was answered. ``on_ready`` is called when all workers are.

        ``ConfigError`` where no worker can be started.
        """
        self._on_ready = on_ready
        self._fleet.start()
        try:
            self.loop.run_forever()
        finally:
            self._fleet.close()
            self._connections.close()
            if self.monitoring is not None:
                self.monitoring.close()
            self.loop.close()
        if self._problem:
            raise ConfigError(self._problem)
        return not self._has_lost

    def _begin_stop(self) -> None:
        if self._stopping_until is None:
            logger.debug("stopping: answering what was accepted")
            self._stopping_until = monotonic() + self._options.drain_seconds + EXIT_SECONDS
            self._connections.drain()
            self._fleet.drain()

    def _step(self) -> None:
        now = monotonic()
        for ask in [ask for ask in self._asks if not ask.waiting or ask.until <= now]:
            self._finish(ask)
        if self._stopping_until is not None and self._is_stopped(now):
            self.loop.stop()

    def _is_stopped(self, now: float) -> bool:
        assert self._stopping_until is not None
        children = self._fleet.children
        if now < self._stopping_until:
            return not children and self._connections.is_drained
        self._has_lost = True
        if self._has_killed or not children:
            return True
        logger.error("killing what did not end: %s", ", ".join(child.name for child in children))
        self._has_killed = True
        self._stopping_until = now + KILL_SECONDS
        for child in children:
            child.kill()
        return False

    # -- what the fleet tells -----------------------------------------------------------------------------------

    def became_ready(self, child: Child) -> None:
        """The first time the port is opened; later, connections go to the newcomer."""
        if self._is_accepting:
            self._connections.became_ready(child)
            return
        self._is_accepting = True
        self._connections.open()
        self.loop.call_soon(self._on_ready)

    def died(self, child: Child) -> None:
        """What it had goes on elsewhere."""
        for ask in self._asks:
            ask.waiting.discard(child)
        lost = self._connections.died(child)
        if child.answered is not True and child.ready_at and not child.is_dismissed:
            if self._stopping_until is not None:
                child.process.join(EXIT_CODE_SECONDS)
            how = f", exit code {child.process.exitcode}" if child.process.exitcode is not None else ""
            said = f"; it said: {words}" if (words := child.last_words()) else ""
            what = "what it had is answered by its workers" if child.clients else f"requests lost: {lost}"
            # A process that ends so has logged, as an error, which backend does not return.
            is_told = self._stopping_until is not None and child.process.exitcode == HUNG
            level = logging.WARNING if is_told else logging.ERROR
            logger.log(level, "%s (pid %d) died%s; %s%s", child.name, child.pid, how, what, said)
            is_loss = lost > 0 or child.clients or child.answered is False
            self._has_lost = self._has_lost or bool(is_loss and self._stopping_until is not None)

    def said(self, child: Child, message: Said) -> None:
        """Of its connections, or of its figures."""
        kind = message["type"]
        if kind == "closed":
            self._connections.closed(child, message["slot"])
        elif kind == "released":
            self._connections.released(child, message["slot"])
        elif kind == "stats":
            for ask in list(self._asks):
                ask.waiting.discard(child)
                if not ask.waiting:
                    self._finish(ask)

    def failed(self, problem: str) -> None:
        """The service cannot go on."""
        self._problem = self._problem or problem
        self.loop.stop()

    # -- figures ------------------------------------------------------------------------------------------------

    def ask(self, answer: Callable[[Figures], object]) -> None:
        """Call ``answer(figures)`` with what ``/stats`` shows."""
        asked = {child for child in self._fleet.children if child.state in ("ready", "draining")}
        self._asks.append(Ask(set(asked), monotonic() + ASK_SECONDS, answer))
        for child in asked:
            child.ask_stats()
        if not asked:
            self._finish(self._asks[-1])

    def _finish(self, ask: Ask) -> None:
        self._asks.remove(ask)
        try:
            ask.answer(self._figures(ask.waiting))
        except Exception:
            logger.exception("the figures cannot be told")

    def _figures(self, silent: set[Child]) -> Figures:
        service = service_figures([child.stats for child in self._fleet.children if child.stats], self._fleet.past)
        connections, answered = self._connections.figures()
        service["log_lines_dropped"] += dropped_lines()
        service["requests"] |= add_requests(answered, service["requests"])
        return {
            "state": "stopping" if self._stopping_until is not None else "ready" if self.is_ready else "starting",
            "ready": self.is_ready,
            "version": torchpipe_py.__version__,
            "config": self._options.config,
            "pid": os.getpid(),
            "uptime_s": monotonic() - self._began,
            "time": time(),
            "graph_id": sha256(self.graph.encode()).hexdigest()[:16],
            "connections": connections,
            "restarts": sum(worker.restarts for worker in [*self._fleet.workers, *self._fleet.engines]),
            "restarts_by_reason": dict(self._fleet.restarts),
            "workers": [_worker_figures(worker, silent) for worker in self._fleet.workers],
            "engines": [_worker_figures(engine, silent) for engine in self._fleet.engines],
            "bounds_ms": BOUNDS_MS,
            **service,
        }


def _worker_figures(worker: WorkerSlot, silent: set[Child]) -> Figures:
    child = worker.child
    figures: Figures = {
        "index": worker.index,
        "pid": 0,
        "state": "failed" if worker.is_given_up else "waiting",
        "responding": False,
        "connections": 0,
        "inflight": 0,
        "restarts": worker.restarts,
        "uptime_s": 0.0,
        "rss_bytes": 0,
    }
    if child is None:
        return figures
    return figures | {
        "pid": child.pid,
        "state": child.state,
        "responding": child not in silent and child.responds,
        "connections": len(child.connections),
        "inflight": child.stats.get("inflight", 0),
        "uptime_s": monotonic() - child.started_at,
        "rss_bytes": child.rss_bytes(),
    }
