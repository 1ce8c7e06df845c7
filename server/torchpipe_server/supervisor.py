"""Owns the port and every client's connection; starts workers, shares the connections out, replaces what dies.

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

from torchpipe_py.errors import ConfigError, TorchpipeError, WorkerDied
from torchpipe_py.histogram import BOUNDS_MS
from torchpipe_server.acceptor import Acceptor, slots_for
from torchpipe_server.channel import Said
from torchpipe_server.child import Child
from torchpipe_server.fallback import Fallback
from torchpipe_server.loop import Loop
from torchpipe_server.options import Options
from torchpipe_server.server import Server
from torchpipe_server.slots import SlotTable
from torchpipe_server.snapshot import Figures, add_past, add_requests, service_figures

logger = logging.getLogger("torchpipe_server")

START_ATTEMPTS = 5  # of a worker that ends before it is ready, or as soon as it is
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0
SETTLED_SECONDS = 1.0  # a worker that was ready for so long is replaced at once
HOLD_SECONDS = 0.4  # connections wait so long for a worker before their requests are answered with an error
HEARTBEAT_SECONDS = 1.0
ASK_SECONDS = 1.0  # for a worker to tell its figures
EXIT_SECONDS = 5.0  # beyond drain_seconds, for a worker to end


@dataclass
class Seat:
    """The place of one worker; ``child`` is none while there is a pause before the next attempt, at ``start_at``."""

    index: int
    child: Child | None = None
    restarts: int = 0
    failures: int = 0  # since it last worked
    start_at: float = 0.0
    is_given_up: bool = False


@dataclass
class Ask:
    """Somebody waits for the workers' figures."""

    waiting: set[Child]
    until: float
    answer: Callable[[Figures], object]


class Supervisor:
    """``run`` serves on the calling thread until ``stop``; ``load`` gives the configuration, now and at each reload."""

    def __init__(self, listener: socket.socket, options: Options, load: Callable[[], Any], idl: Any) -> None:
        self._options, self._load = options, load
        self._tables = load()
        self._loop = Loop(lambda error: logger.error("a defect", exc_info=error))
        self._slots = SlotTable(slots_for(options.max_connections))
        self._acceptor = Acceptor(self._loop, listener, options.max_connections, self._take)
        self._fallback = Fallback(self._loop, idl)
        self._waiting_room = Server(self._loop, self._fallback, options, self._left_waiting_room)
        self._sockets: dict[int, socket.socket] = {}
        self._refused: set[int] = set()
        self._held: dict[int, float] = {}  # slots that wait for a worker, since when
        self._seats = [Seat(index) for index in range(options.workers)]
        self._successors: list[Seat] = []  # while a reload is under way
        self._leaving: set[Child] = set()
        self._asks: list[Ask] = []
        self._past: Figures = {}
        self._problem = ""
        self._has_lost = False
        self._is_accepting = self._wants_reload = False
        self._stopping_until: float | None = None
        self._began, self._next_beat = monotonic(), 0.0
        self._on_ready: Callable[[], object] = lambda: None
        self._loop.steps.append(self._step)

    # -- from any thread ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop accepting, let the workers answer what was accepted, end. Safe in a signal handler."""
        self._loop.call(self._begin_stop)

    def reload(self) -> None:
        """Read the configuration again and replace all workers, one generation by the next."""
        self._loop.call(self._begin_reload)

    def ask(self, answer: Callable[[Figures], object]) -> None:
        """Call ``answer(figures)`` with what ``/stats`` shows, on the loop's thread."""
        self._loop.call(lambda: self._begin_ask(answer))

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken, and a worker is there for them."""
        return self._is_accepting and self._stopping_until is None and any(map(_is_ready, self._seats))

    @property
    def graph(self) -> str:
        """The pipeline as SVG; empty as long as no worker is ready."""
        return next((seat.child.graph for seat in self._seats if seat.child is not None and seat.child.graph), "")

    # -- life ---------------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[], object]) -> bool:
        """Until stopped; whether every accepted request was answered. ``on_ready`` is called when all workers are.

        ``ConfigError`` where no worker can be started.
        """
        self._on_ready = on_ready
        for seat in self._seats:
            self._start(seat)
        try:
            self._loop.run()
        finally:
            self._close_all()
        if self._problem:
            raise ConfigError(self._problem)
        return not self._has_lost

    def _close_all(self) -> None:
        self._waiting_room.close()
        for child in self._children():
            child.close()
        for slot in list(self._sockets):
            self._close(slot)
        self._loop.close()
        self._slots.close()

    def _start(self, seat: Seat) -> None:
        seat.start_at = 0.0
        try:
            seat.child = Child(
                self._loop, seat.index, self._options, self._tables, self._slots, self._hear, self._child_ended
            )
        except (OSError, EOFError) as error:  # the latter where the process that workers are forked from has died
            logger.error("worker %d cannot be started: %s", seat.index, error)
            self._postpone(seat)

    def _step(self) -> float:
        now = monotonic()
        waits = [self._next_beat - now]
        if waits[0] <= 0:
            self._beat()
            waits[0] = HEARTBEAT_SECONDS
        for seat in [*self._seats, *self._successors]:
            if seat.start_at and self._stopping_until is None:
                if seat.start_at <= now:
                    self._start(seat)
                else:
                    waits.append(seat.start_at - now)
        for slot in [slot for slot, since in self._held.items() if now - since >= HOLD_SECONDS]:
            self._show_waiting_room(slot)
        if self._held:
            waits.append(HOLD_SECONDS / 4)
        self._finish_asks(now)
        if self._asks:
            waits.append(ASK_SECONDS / 4)
        if self._stopping_until is not None and self._is_stopped(now):
            self._loop.stop()
        return min(waits)

    def _beat(self) -> None:
        """Once a second: ask for figures, and end workers that do not answer any more."""
        self._next_beat = monotonic() + HEARTBEAT_SECONDS
        for child in self._children():
            # NOTE: beats are counted, not seconds: a machine that slept must not find all its workers hanging.
            if self._options.hang_seconds and child.unheard * HEARTBEAT_SECONDS > self._options.hang_seconds:
                logger.error("worker %d (pid %d) does not answer: killing it", child.index, child.pid)
                child.unheard = 0
                child.kill()
            elif child.state in ("ready", "draining"):
                child.unheard += 1
                child.ask_stats()

    def _children(self) -> list[Child]:
        seated = [seat.child for seat in [*self._seats, *self._successors] if seat.child is not None]
        return [*seated, *self._leaving]

    # -- connections --------------------------------------------------------------------------------------------

    def _take(self, sock: socket.socket, slot: int, is_refused: bool) -> None:
        self._sockets[slot] = sock
        if is_refused:
            self._refused.add(slot)
        self._place(slot)

    def _place(self, slot: int) -> None:
        """Give the connection to the worker with the fewest, or let it wait for one."""
        children = [seat.child for seat in self._seats if seat.child is not None and seat.child.is_ready]
        if not children:
            self._held[slot] = monotonic()
            if self._stopping_until is not None:
                self._show_waiting_room(slot)
            return
        child = min(children, key=lambda one: (len(one.slots), one.stats.get("inflight", 0)))
        self._slots.wipe(slot)
        try:
            child.give(self._sockets[slot], slot, slot in self._refused)
        except OSError as error:
            logger.error("a connection cannot be handed over: %s", error)
            child.slots.discard(slot)
            self._close(slot)

    def _close(self, slot: int) -> None:
        sock = self._sockets.pop(slot)
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the client was faster
        sock.close()
        self._refused.discard(slot)
        self._held.pop(slot, None)
        self._acceptor.release(slot)

    def _show_waiting_room(self, slot: int) -> None:
        """Answer its requests with errors until there is a worker."""
        del self._held[slot]
        try:
            sock = self._sockets[slot].dup()
        except OSError as error:
            logger.error("a connection cannot be answered: %s", error)
            self._close(slot)
            return
        self._waiting_room.adopt(sock, slot, self._slots.mark(slot))

    def _left_waiting_room(self, slot: int, is_closed: bool) -> None:
        if is_closed:
            self._close(slot)
        else:
            self._place(slot)

    def _place_waiting(self) -> None:
        """A worker is there."""
        held, self._held = self._held, {}
        for slot in held:
            self._place(slot)
        self._waiting_room.shed(self._waiting_room.connections)

    def _balance(self, newcomer: Child) -> None:
        """Let the others give connections back, so that a worker that comes late gets its share."""
        ready = [seat.child for seat in self._seats if seat.child is not None and seat.child.is_ready]
        share = sum(len(child.slots) for child in ready) // len(ready)
        for child in ready:
            if child is not newcomer and len(child.slots) > share + 1:
                child.shed(len(child.slots) - share - 1)

    # -- workers ------------------------------------------------------------------------------------------------

    def _hear(self, child: Child, message: Said) -> None:
        kind = message["type"]
        if kind == "closed":
            child.slots.discard(message["slot"])
            self._close(message["slot"])
        elif kind == "released":
            child.slots.discard(message["slot"])
            self._place(message["slot"])
        elif kind == "ready":
            self._became_ready(child)
        elif kind == "stats":
            for ask in self._asks:
                ask.waiting.discard(child)

    def _became_ready(self, child: Child) -> None:
        if self._stopping_until is not None:
            child.drain()
        elif child in self._leaving:
            return  # of a reload that was given up
        elif child in [seat.child for seat in self._successors]:
            if all(map(_is_ready, self._successors)):
                self._swap()
        elif self._is_accepting:
            logger.info("worker %d is back (pid %d)", child.index, child.pid)
            self._place_waiting()
            self._balance(child)
        elif all(_is_ready(seat) or seat.is_given_up for seat in self._seats):
            self._is_accepting = True
            self._acceptor.start()
            self._on_ready()

    def _child_ended(self, child: Child) -> None:
        """Its process is no more: its connections go on elsewhere, and another process takes its place."""
        if child.stats:
            self._past = add_past(self._past, child.stats)
        for ask in self._asks:
            ask.waiting.discard(child)
        self._leaving.discard(child)
        seat = next((one for one in [*self._seats, *self._successors] if one.child is child), None)
        if seat is not None:
            seat.child = None
        lost = [slot for slot in sorted(child.slots) if self._take_over(slot)]
        child.slots.clear()
        if child.answered is not True and child.ready_at:
            logger.error("worker %d (pid %d) died; %d requests lost", child.index, child.pid, len(lost))
            self._has_lost = self._has_lost or self._stopping_until is not None
        if seat is not None and self._stopping_until is None:
            self._replace(seat, child)

    def _take_over(self, slot: int) -> bool:
        """Go on with a dead worker's connection; whether a request was lost with it."""
        found = self._slots.find(slot)
        if found.request is not None:
            error = WorkerDied("the worker process ended while it had the request")
            reply = self._fallback.reply_to(found.request, error)
            self._waiting_room.ledger.add(found.request.name, error.code, 0.0, "")
            if not self._write(slot, reply):
                found = found._replace(is_lost=True)
        if found.is_lost or self._stopping_until is not None:
            self._close(slot)
        else:
            self._place(slot)
        return found.request is not None or found.is_lost

    def _write(self, slot: int, reply: bytes) -> bool:
        try:
            return self._sockets[slot].send(reply) == len(reply)
        except OSError:
            return False

    def _replace(self, seat: Seat, child: Child) -> None:
        if seat in self._successors:
            self._give_up_reload(child.failure or "a worker of the new configuration died while it started")
            return
        if child.ready_at and monotonic() - child.ready_at >= SETTLED_SECONDS:
            seat.restarts, seat.failures = seat.restarts + 1, 0
            self._start(seat)
            return
        if child.failure and not self._is_accepting:
            self._fail(child.failure)  # what a configuration lacks, it lacks at the next attempt too
            return
        logger.error("worker %d ended while it started: %s", seat.index, child.failure or "killed, or crashed")
        self._postpone(seat)

    def _postpone(self, seat: Seat) -> None:
        """Another attempt, later each time, unless there were enough of them."""
        seat.failures += 1
        seat.restarts += 1
        if seat.failures < START_ATTEMPTS:
            seat.start_at = monotonic() + min(LONGEST_DELAY, FIRST_DELAY * 2 ** (seat.failures - 1))
            return
        seat.is_given_up = True
        logger.critical("worker %d is given up after %d attempts to start it", seat.index, seat.failures)
        if all(one.is_given_up for one in self._seats):
            self._fail(f"no worker can be started, after {seat.failures} attempts each")

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._loop.stop()

    # -- reload -------------------------------------------------------------------------------------------------

    def _begin_reload(self) -> None:
        if not self._is_accepting or self._stopping_until is not None:
            return
        if self._successors:
            self._wants_reload = True  # once more, when this one is through
            return
        logger.info("reloading %s", self._options.config)
        try:
            self._tables, before = self._load(), self._tables
        except TorchpipeError as error:
            logger.error("not reloaded, everything stays as it is: %s", error)
            return
        self._before = before
        self._successors = [Seat(index) for index in range(self._options.workers)]
        for seat in self._successors:
            self._start(seat)

    def _swap(self) -> None:
        """The successors serve from now on; those before them hand over their connections and end."""
        before, self._seats, self._successors = self._seats, self._successors, []
        for old, new in zip(before, self._seats, strict=True):
            new.restarts = old.restarts
            if old.child is not None:
                self._leaving.add(old.child)
                if old.child.is_ready:
                    old.child.release()
                else:
                    old.child.kill()
        logger.info("reloaded %s", self._options.config)
        self._place_waiting()
        self._reload_again()

    def _give_up_reload(self, problem: str) -> None:
        logger.error("not reloaded, everything stays as it is: %s", problem)
        self._tables = self._before
        for seat in self._successors:
            if seat.child is not None:
                self._leaving.add(seat.child)
                seat.child.kill()
        self._successors = []
        self._reload_again()

    def _reload_again(self) -> None:
        if self._wants_reload:
            self._wants_reload = False
            self._loop.call(self._begin_reload)

    # -- the end ------------------------------------------------------------------------------------------------

    def _begin_stop(self) -> None:
        if self._stopping_until is not None:
            return
        self._acceptor.close()
        self._stopping_until = monotonic() + self._options.drain_seconds + EXIT_SECONDS
        for slot in list(self._held):
            self._show_waiting_room(slot)
        self._waiting_room.drain()
        for child in self._children():
            child.drain()

    def _is_stopped(self, now: float) -> bool:
        assert self._stopping_until is not None
        children = self._children()
        if now >= self._stopping_until:
            logger.error("%d workers have not ended: killing them", len(children))
            self._has_lost = True
            return True
        self._has_lost = self._has_lost or any(child.answered is False for child in children)
        return not children and (self._waiting_room.is_finished or not self._waiting_room.connections)

    # -- figures ------------------------------------------------------------------------------------------------

    def _begin_ask(self, answer: Callable[[Figures], object]) -> None:
        asked = {child for child in self._children() if child.state in ("ready", "draining")}
        self._asks.append(Ask(set(asked), monotonic() + ASK_SECONDS, answer))
        for child in asked:
            child.ask_stats()

    def _finish_asks(self, now: float) -> None:
        for ask in [ask for ask in self._asks if not ask.waiting or ask.until <= now]:
            self._asks.remove(ask)
            try:
                ask.answer(self._figures(ask.waiting))
            except Exception:
                logger.exception("the figures cannot be told")

    def _figures(self, silent: set[Child]) -> Figures:
        children = self._children()
        told = service_figures([child.stats for child in children if child.stats], self._past)
        requests = told["requests"]
        requests |= add_requests(self._waiting_room.ledger.summary(), requests)
        return {
            "state": self._state(),
            "ready": self.is_ready,
            "version": _version(),
            "config": self._options.config,
            "pid": os.getpid(),
            "uptime_s": monotonic() - self._began,
            "time": time(),
            "graph_id": sha256(self.graph.encode()).hexdigest()[:16],
            "connections": {
                "open": self._acceptor.open,
                "max": self._options.max_connections,
                "accepted": self._acceptor.accepted,
                "refused": self._acceptor.refused,
            },
            "restarts": sum(seat.restarts for seat in self._seats),
            "workers": [self._worker(seat, silent) for seat in self._seats],
            "bounds_ms": BOUNDS_MS,
            **told,
        }

    def _state(self) -> str:
        if self._stopping_until is not None:
            return "stopping"
        return "ready" if self.is_ready else "starting"

    def _worker(self, seat: Seat, silent: set[Child]) -> Figures:
        child = seat.child
        state = child.state if child is not None else "failed" if seat.is_given_up else "waiting"
        return {
            "index": seat.index,
            "pid": child.pid if child is not None else 0,
            "state": state,
            "responding": child is not None and child not in silent,
            "connections": len(child.slots) if child is not None else 0,
            "inflight": child.stats.get("inflight", 0) if child is not None else 0,
            "restarts": seat.restarts,
            "uptime_s": monotonic() - child.started_at if child is not None else 0.0,
            "rss_bytes": child.rss_bytes() if child is not None else 0,
        }


def _is_ready(seat: Seat) -> bool:
    return seat.child is not None and seat.child.is_ready


def _version() -> str:
    import torchpipe_py

    return torchpipe_py.__version__
