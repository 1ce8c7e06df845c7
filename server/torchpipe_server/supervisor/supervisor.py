"""Owns the port and every client's connection, watches the workers, and reports on all of them.

It runs one loop on one thread and imports no torch. Connections move between two messages, so that clients notice
neither a reload nor a restart, except for an error for the request that a dead worker had.

The service ends in these steps:

1. SIGTERM or SIGINT: the handler in ``cli`` calls ``stop``, and the loop calls ``_begin_stop``. ``/ready`` says 503.
2. Clients that read streams get the end of their answers, and those that list models an error. ``Connections.drain``
   accepts what clients have already connected, closes the port, and leaves connections that still wait for a worker to
   the fallback, which answers with an error. ``RpcFallback``, if no worker took its place, closes the port of gRPC.
3. ``Fleet.drain`` sends "drain" to workers that a reload has replaced, then to all others, and to an engine process
   once its workers have ended.
4. In a worker, ``Server.drain`` (``RpcServer.drain`` for gRPC) lets each connection answer its request and closes it.
   For each the worker sends "gone", and the supervisor closes its copy of the socket.
5. When no connection is left, or after ``drain_seconds``, ``Worker._end_if_finished`` stops the worker's loop. The
   worker sends "end", closes its pipe and exits.
6. ``Fleet._ended`` has ``Connections.died`` answer what the worker left unanswered with ``worker_died``.
7. ``_step`` looks ten times a second: once no process is left and the fallback is done, the loop stops. What has not
   ended ``EXIT_SECONDS`` after ``drain_seconds`` is killed, and the loop stops ``KILL_SECONDS`` later.
8. ``run`` closes what is left and returns whether every accepted request was answered; the exit status is 0 or 1.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection
from functools import partial
from hashlib import sha256
from time import monotonic, time
from typing import Any

import torchpipe_py
from torchpipe_py import ConfigError
from torchpipe_py.serving import BOUNDS_MS, TOTALS, Done, Folder, add, answers, call_from_any_thread
from torchpipe_server.front.loop import every, new_loop, take_each
from torchpipe_server.logs import dropped_lines
from torchpipe_server.options import Options
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.connections import Connections
from torchpipe_server.supervisor.fallback import RpcFallback
from torchpipe_server.supervisor.fleet import Fleet
from torchpipe_server.supervisor.generation import Configuration, WorkerSlot
from torchpipe_server.supervisor.messages import Control, Figures
from torchpipe_server.supervisor.monitoring.figures import request_figures, service_figures
from torchpipe_server.supervisor.repository import Repository
from torchpipe_server.supervisor.streams import SharedStreams, read_tables

logger = logging.getLogger("torchpipe_server")

STEP_SECONDS = 0.1  # between two checks whether the stop is complete
ASK_SECONDS = 1.0  # time limit for workers to report their statistics
ASK_STEP_SECONDS = 0.005  # between two checks whether they have
EXIT_SECONDS = 5.0  # beyond drain_seconds, for a worker to end
KILL_SECONDS = 1.0  # after those, for killed workers to end and their requests to be answered


class Supervisor:
    """``run`` serves on the calling thread until ``stop``.

    ``tables`` is the configuration; ``load`` returns it at each reload, on another thread, or raises ``ConfigError``.
    ``idl`` is that of InferenceService, or ``None`` for a custom service.
    """

    def __init__(
        self, listener: socket.socket, options: Options, tables: Any, load: Callable[[], Any], idl: Any
    ) -> None:
        streams = read_tables(options.streams)
        self._options, self._port = options, listener.getsockname()[1]
        self.loop = new_loop(is_fast=False)
        self._connections = Connections(
            self.loop, listener, options, idl, lambda: self._fleet.ready, lambda: self._fleet.is_recovering,
            lambda: not self._fleet.has_begun,
        )  # fmt: skip
        self.streams = SharedStreams(self.loop, options.streams, streams)

        def load_again() -> Configuration:
            return Configuration.of(load(), read_tables(options.streams), options)

        configuration = Configuration.of(tables, streams, options)
        self._fleet = Fleet(self.loop, options, self._connections, configuration, load_again, self._fail)
        self._fleet.on_message = self._receive
        self.repository: Repository | None = None
        if isinstance(tables, Folder):
            self.repository = Repository(self.loop, self._fleet, options.repository_control)
        self._rpc = None if options.grpc_port < 0 else RpcFallback(self.loop, options)
        self.monitoring: Any = None  # the monitoring port, closed at the end
        self._asking: list[Done] = []
        self._problem = ""
        self._has_lost = self._has_begun = self._has_killed = False
        self._stopping_until: float | None = None
        self._began = monotonic()
        self._on_ready: Callable[[], object] = lambda: None
        every(self.loop, STEP_SECONDS, self._step)

    # -- from any thread ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop accepting, answer accepted requests, end. Safe in a signal handler."""
        call_from_any_thread(self.loop, self._begin_stop)

    def reload(self) -> None:
        """Read the configuration again and replace all workers. Safe in a signal handler."""
        call_from_any_thread(self.loop, self._fleet.reload)

    # -- life ---------------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[], object]) -> bool:
        """Serve until stopped; returns whether every accepted request was answered.

        ``on_ready`` is called once all workers are ready. Raises ``ConfigError`` if no worker can be started.
        """
        self._on_ready = on_ready
        self._connections.open()
        self._fleet.start(self._begin)
        self._serve_rpc()
        try:
            self.loop.run_forever()
        finally:
            self._fleet.close()
            self._connections.close()
            if self._rpc is not None:
                self._rpc.end()
            if self.monitoring is not None:
                self.monitoring.close()
            self.loop.close()
        if self._problem:
            raise ConfigError(self._problem)
        return not (self._has_lost or self._fleet.has_lost)

    def _begin(self) -> None:
        self._has_begun = True
        self._connections.became_ready(self._fleet.ready[-1])
        on_ready = partial(self.loop.call_soon, self._on_ready)
        if self._rpc is None:
            on_ready()
        else:
            self._rpc.close(on_ready)  # NOTE: the first client of a service that is ready must find a worker

    def _serve_rpc(self) -> None:
        """Answer over gRPC here while no worker does."""
        if self._rpc is None:
            return
        if self._stopping_until is None and not self._fleet.listens:
            self._rpc.open()
        else:
            self._rpc.close()

    def _fail(self, problem: str) -> None:
        """End the service because of ``problem``."""
        self._problem = self._problem or problem
        self.loop.stop()

    def _begin_stop(self) -> None:
        if self._stopping_until is None:
            logger.debug("stopping: answering what was accepted")
            self._stopping_until = monotonic() + self._options.drain_seconds + EXIT_SECONDS
            self.streams.close()
            if self.repository is not None:
                self.repository.stop()
            self._connections.drain()
            self._fleet.drain()

    def _step(self) -> None:
        self._serve_rpc()
        if self._stopping_until is None:
            if self._fleet.has_begun:  # NOTE: later ones would restart files that the first worker plays
                workers = self._fleet.generation.workers
                ready = {worker.child: worker.index for worker in workers if worker.child and worker.child.is_ready}
                self.streams.share_out(self._fleet.generation, ready)
            return
        children, is_late = self._fleet.children, monotonic() >= self._stopping_until
        self._has_lost = self._has_lost or is_late
        if is_late and children and not self._has_killed:
            logger.error("killing what did not end: %s", ", ".join(child.name for child in children))
            self._has_killed = True
            self._stopping_until = monotonic() + KILL_SECONDS
            for child in children:
                child.kill()
        elif is_late or (not children and self._connections.is_drained):
            self.loop.stop()

    def _receive(self, child: Child, message: Any) -> None:
        if isinstance(message, Control):
            self._control(message, partial(child.send, "outcome", id=message.id))
        else:
            self.streams.receive(child, message)

    def _control(self, message: Control, send: Callable[..., object]) -> None:
        """Do what a client of a worker asks for, and ``send`` the outcome, whatever fails."""

        def done(status: int, body: Figures) -> None:
            send(status=status, body=body)

        def answer_with(make: Callable[[Any], Figures], result: Any) -> None:
            try:
                if isinstance(result, Exception):
                    raise result
                body = make(result)
            except Exception as error:
                done(*answers.failure(error)[:2])
            else:
                done(200, body)

        if message.action == "statistics":
            self.ask(partial(answer_with, _model_figures))
        elif self.repository is not None and message.action == "index":
            self.repository.index(partial(answer_with, lambda rows: {"models": rows}))
        elif self.repository is None or not self._options.repository_control:
            done(403, {"error": "models are not loaded and unloaded here", "code": "forbidden"})
        else:
            self.repository.control(message.action, message.name, done)

    # -- status ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted and a worker would answer them."""
        return self._has_begun and self._stopping_until is None and self._fleet.is_responding

    @property
    def graph(self) -> str:
        """The pipeline as SVG; empty until a worker is ready."""
        graphs = [worker.child.graph for worker in self._fleet.generation.workers if worker.child]
        return next(filter(None, graphs), "")

    def ask(self, answer: Done) -> None:
        """Call ``answer`` with the statistics of ``/stats``, or an exception. Concurrent callers get the same."""
        self._asking.append(answer)
        if len(self._asking) == 1:
            asked = [child for child in self._fleet.children if child.is_serving]
            for child in asked:
                child.ask_stats()
            self._await_figures(asked, monotonic() + ASK_SECONDS)

    def _await_figures(self, asked: Collection[Child], until: float) -> None:
        silent = {child for child in asked if child.is_serving and child.is_asked}
        if silent and monotonic() < until:
            self.loop.call_later(ASK_STEP_SECONDS, self._await_figures, silent, until)
            return
        asking, self._asking = self._asking, []
        figures: Figures | Exception
        try:
            figures = self._figures(silent)
        except Exception as error:
            figures = error
        take_each(
            asking,
            lambda answer: answer(figures),
            lambda _: logger.exception("internal error while figures were answered"),
        )

    def _figures(self, silent: set[Child]) -> Figures:
        fleet = self._fleet
        service = service_figures([child.stats for child in fleet.children if child.stats], fleet.ended_stats)
        connections, answered = self._connections.figures()
        service["log_lines_dropped"] += dropped_lines()
        if self._rpc is not None:
            answered = add(answered, self._rpc.figures())
        service["requests"] = request_figures(add(service["requests"], answered))
        service["streams"] = self.streams.figures(service["streams"])
        return {
            "state": "stopping" if self._stopping_until is not None else "ready" if self.is_ready else "starting",
            "ready": self.is_ready,
            "version": torchpipe_py.__version__,
            "config": self._options.config,
            "page_port": 0 if self._options.no_page or self._options.handler else self._port,
            "pid": os.getpid(),
            "uptime_s": monotonic() - self._began,
            "time": time(),
            "graph_id": sha256(self.graph.encode()).hexdigest()[:16],
            "connections": connections,
            "restarts": sum(slot.restarts for slot in [*fleet.generation.workers, *fleet.generation.engines]),
            "restarts_by_reason": dict(fleet.restarts),
            "reloads": dict(fleet.reloads),
            "reload_successful": fleet.is_last_reload_ok,
            "workers": [_slot_figures(worker, silent) for worker in fleet.generation.workers],
            "engines": [_slot_figures(engine, silent) for engine in fleet.generation.engines],
            "bounds_ms": BOUNDS_MS,
            **service,
        }


def _model_figures(figures: Figures) -> Figures:
    """The figures that a worker needs for the statistics of models."""
    nodes = {name: {key: node[key] for key in (*TOTALS, "max")} for name, node in figures["nodes"].items()}
    return {"models": figures["models"], "nodes": nodes}


def _slot_figures(slot: WorkerSlot, silent: set[Child]) -> Figures:
    child = slot.child
    return {
        "index": slot.index,
        "pid": child.pid if child else 0,
        "state": child.state if child else "failed" if slot.is_given_up else "waiting",
        "responding": bool(child and child not in silent and child.responds),
        "connections": len(child.connections) if child else 0,
        "inflight": child.stats.get("inflight", 0) if child else 0,
        "restarts": slot.restarts,
        "uptime_s": monotonic() - child.started_at if child else 0.0,
        "rss_bytes": child.rss_bytes() if child else 0,
    }
