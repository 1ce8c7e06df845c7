"""Workers and engine processes: started, watched, replaced when they die, and by the next generation at a reload."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

from torchpipe_py.errors import Overloaded, TorchpipeError
from torchpipe_server.front.loop import Loop, every
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import EXHAUSTED
from torchpipe_server.supervisor.child import LOOK_SECONDS, Child, link
from torchpipe_server.supervisor.connections import Connections
from torchpipe_server.supervisor.forker import Forked, Forker
from torchpipe_server.supervisor.generation import (
    RETRY_MS,
    START_ATTEMPTS,
    Changes,
    Generation,
    WorkerSlot,
    nobody_asks,
)
from torchpipe_server.supervisor.monitoring.figures import (
    NOTHING,
    Closed,
    Control,
    Event,
    Listening,
    Message,
    Ready,
    Released,
    Snapshot,
    add_past,
)
from torchpipe_server.worker.worker import HUNG

logger = logging.getLogger("torchpipe_server")

FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # between them
EXHAUSTED_DELAY = 1.0  # where descriptors, memory or threads were missing
SETTLED_SECONDS = 1.0  # a worker that was ready for so long can work
RECOVER_SECONDS = 1.0  # after a death, the next worker is expected
FORGET_SECONDS = 1.0  # after the end of a process, for its exit code to be there
EXIT_CODE_SECONDS = 0.2  # for the process that workers are forked from to tell how one has ended

OnControl = Callable[[str, str, Callable[[int, dict[str, Any]], object]], object]
"""Loads or unloads a model for a client of a worker; its last argument is told what came of it."""


class Fleet:
    """``options.workers`` workers. ``tables`` is the configuration, ``load`` gives that of a reload, or ConfigError.

    A slot of a generation is filled by one process after the other. A reload builds the ``_next`` generation beside the
    one that serves, ``now``, and swaps them once all its workers are ready. Processes of neither are ``_leaving``.
    ``on_failure(problem)`` is called where no worker can be started.
    """

    def __init__(
        self,
        loop: Loop,
        options: Options,
        connections: Connections,
        tables: Any,
        load: Callable[[], Any],
        on_failure: Callable[[str], object],
    ) -> None:
        self.now = Generation(tables, options)
        self._next: Generation | None = None  # while a reload is under way
        self.past = NOTHING  # figures of workers that have ended
        self.restarts: Counter[str] = Counter()  # by reason, "failed_start" besides those of a child
        self.has_begun = False  # all workers were ready, or given up
        self.has_lost = False  # a request that was accepted, since the stop began
        self._loop, self._options, self._connections = loop, options, connections
        self.on_stream_message: Callable[[Child, Event | Snapshot], object] = lambda *_: None
        self._load, self._on_failure = load, on_failure
        self.on_control: OnControl = lambda *_: None
        self._forker = Forker(loop, options, connections.journal)
        self._leaving: set[Child] = set()
        self._is_ending = self._wants_reload = False
        self._changes = Changes()
        self._on_begun: Callable[[], object] = lambda: None
        every(loop, LOOK_SECONDS, self._look)

    @property
    def tables(self) -> Any:
        """The configuration that is served."""
        return self.now.tables

    @property
    def _slots(self) -> list[WorkerSlot]:
        """Of the generation that serves, and of the next one."""
        next_ = self._next  # read once: a reload may end meanwhile
        return [*dict.fromkeys([*self.now.slots, *(next_.slots if next_ else ())])]

    @property
    def ready(self) -> list[Child]:
        """Those that take connections; where some respond, only they."""
        ready = [worker.child for worker in self.now.workers if worker.child is not None and worker.child.is_ready]
        return [child for child in ready if child.responds] or ready

    @property
    def is_recovering(self) -> bool:
        """Whether a worker that served connections died a moment ago, and the next one is not ready."""
        since = monotonic() - RECOVER_SECONDS
        return any(worker.died_at > since for worker in self.now.workers)

    @property
    def is_responding(self) -> bool:
        """Whether a worker is there that would answer, with what it needs for that."""
        return all(engine.is_ready for engine in self.now.engines) and any(child.responds for child in self.ready)

    @property
    def children(self) -> list[Child]:
        """All whose process is there, or was until a moment ago."""
        return [*(slot.child for slot in self._slots if slot.child is not None), *self._leaving]

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, on_begun: Callable[[], object]) -> None:
        """Start them all; ``on_begun`` is called once they are ready, but for those that were given up."""
        self._on_begun = on_begun
        self._begin(self.now)

    def drain(self) -> None:
        """Have each answer what it accepted, and end."""
        self._is_ending = True
        self._changes.stop("the service is stopping")
        self._drain(self._leaving)
        self._drain_rest()

    def close(self) -> None:
        """End what is left, also what is being forked."""
        self._forker.close()
        for child in self.children:
            child.close()

    def _drain_rest(self) -> None:
        """Those that are to stay longest: until no other one hands connections over any more, or asks for anything."""
        if not self._leaving:
            self._drain(self.children)

    def _drain(self, children: list[Child] | set[Child]) -> None:
        for child in children:
            if not child.clients:
                child.drain()

    def _begin(self, generation: Generation) -> None:
        """Start the engine processes, and then, once they are ready, the workers."""
        if all(engine.is_ready for engine in generation.engines):
            generation.has_started_workers = True
        for slot in generation.workers if generation.has_started_workers else generation.engines:
            self._start(slot)

    def _start(self, slot: WorkerSlot) -> None:
        is_wanted, done = partial(self._wants, slot), partial(self._forked, slot)
        self._forker.fork(slot.role, slot.index, slot.tables, is_wanted, done)

    def _wants(self, slot: WorkerSlot) -> bool:
        """Whether it belongs to a generation that serves or is to serve; for any thread."""
        return not self._is_ending and slot in self._slots

    def _forked(self, slot: WorkerSlot, forked: Forked | Exception) -> None:
        if isinstance(forked, Exception):
            self._not_forked(slot, forked)
        elif self._wants(slot):
            slot.child = Child(self._loop, slot.name, forked, self._hear, self._ended)
            self._link(slot)
        else:
            forked.abandon()  # of a reload that was given up meanwhile, or too late

    def _not_forked(self, slot: WorkerSlot, error: Exception) -> None:
        logger.error("%s cannot be started: %s", slot.name, error or type(error).__name__)
        if self._is_successor(slot):
            self._give_up_reload(f"{slot.name} cannot be started")
        elif self._wants(slot):
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                self._count_restart(slot, "failed_start")
                self._start_after(slot, EXHAUSTED_DELAY)  # no fault of the worker's, however often
            else:
                self._failed_start(slot)

    def _look(self) -> None:
        for child in self.children:
            child.look(self._options.hang_seconds)
        for slot in self._slots:
            if slot.child is not None and slot.child.needs_link and not self._is_ending:
                self._link(slot)

    # -- what becomes of a worker -------------------------------------------------------------------------------

    def _hear(self, child: Child, message: Message) -> None:
        match message:
            case Ready():
                self._became_ready(child)
            case Listening():
                self._began_to_listen(child)
            case Closed():
                self._connections.closed(child, message.slot)
            case Released():
                self._connections.released(child, message.slot)
            case Event() | Snapshot():
                self.on_stream_message(child, message)
            case Control():
                self.on_control(message.action, message.name, partial(child.tell_outcome, message.id))

    def _slot_of(self, child: Child) -> WorkerSlot | None:
        return next((slot for slot in self._slots if slot.child is child), None)

    def _is_successor(self, slot: WorkerSlot) -> bool:
        """Whether it belongs to the next generation alone."""
        return self._next is not None and slot in self._next.slots and slot not in self.now.slots

    def _became_ready(self, child: Child) -> None:
        slot = self._slot_of(child)
        if self._is_ending:
            child.drain()
        elif slot is not None:
            slot.died_at = 0.0
            if slot.role == "engine process":
                self._engine_became_ready(slot)
            elif self._is_successor(slot):
                self._swap_if_complete(child)
            elif self.has_begun:
                logger.info("%s is back (pid %d)", child.name, child.pid)
                self._listen([child])
                self._connections.became_ready(child)
            else:
                self._begin_if_complete()

    def _began_to_listen(self, child: Child) -> None:
        slot = self._slot_of(child)
        if slot is not None and self._is_successor(slot):
            self._swap_if_complete(child)
        elif slot is not None and not self._is_ending:
            self._begin_if_complete()

    def _listen(self, children: list[Child]) -> bool:
        """Have them listen at gRPC's port, if there is one; whether all do, or need not."""
        if self._options.grpc_port < 0:
            return True
        for child in children:
            child.listen()
        return all(child.listens for child in children)

    def _engine_became_ready(self, engine: WorkerSlot) -> None:
        for generation in filter(None, (self.now, self._next)):
            if engine not in generation.engines:
                continue
            if generation.has_started_workers:
                for worker in generation.workers:
                    if generation.engine_of(worker) is engine:
                        self._link(worker)
            elif all(other.is_ready for other in generation.engines):
                self._begin(generation)
        if self.has_begun and engine.restarts and engine.child is not None:
            logger.info("%s is back (pid %d)", engine.name, engine.child.pid)

    def _link(self, worker: WorkerSlot) -> None:
        """Give a worker and its engine process the two ends of a way to each other, where both are there."""
        generation = self._next if self._next is not None and self._is_successor(worker) else self.now
        engine = generation.engine_of(worker) if worker.role == "worker" else None
        if engine is None or worker.child is None or engine.child is None or not engine.is_ready:
            return
        link(worker.child, engine.child)

    def _begin_if_complete(self) -> None:
        """The first generation is there, but for what was given up."""
        if (
            not self.has_begun
            and self.ready
            and all(worker.is_ready or worker.is_given_up for worker in self.now.workers)
            and self._listen(self.ready)
        ):
            self.has_begun = True
            self.now.tell_engines(self._options)
            self._on_begun()
            if self._wants_reload:
                self._loop.call_soon(self.reload)

    def _ended(self, child: Child) -> None:
        if child.stats:
            self.past = add_past(self.past, child.stats)
        self._leaving.discard(child)
        for engine in self.children:
            if child in engine.clients:
                engine.clients.discard(child)
                if not engine.clients and (engine in self._leaving or self._is_ending):
                    engine.drain()
        slot = self._slot_of(child)
        if slot is not None:
            slot.child, slot.died_at = None, monotonic() if child.has_served else 0.0
        self._log_death(child, self._connections.died(child))
        self._loop.call_later(FORGET_SECONDS, child.forget)
        if self._is_ending:
            self._drain_rest()
        elif slot is not None:
            self._replace(slot, child)

    def _log_death(self, child: Child, lost: int) -> None:
        if child.answered or not child.ready_at or child.reason == "dismissed":
            return
        if self._is_ending:
            child.process.join(EXIT_CODE_SECONDS)
            self.has_lost = self.has_lost or lost > 0 or bool(child.clients) or child.answered is False
        how = f", exit code {child.process.exitcode}" if child.process.exitcode is not None else ""
        words = f"; it said: {said}" if (said := child.stderr.last_words()) else ""
        what = "what it had is answered by its workers" if child.clients else f"requests lost: {lost}"
        # A process that ends so has logged, as an error, which backend does not return.
        is_told = self._is_ending and child.process.exitcode == HUNG
        level = logging.WARNING if is_told else logging.ERROR
        logger.log(level, "%s (pid %d) died%s; %s%s", child.name, child.pid, how, what, words)

    def _replace(self, slot: WorkerSlot, child: Child) -> None:
        # NOTE: an engine process gets workers before there are requests; until then that is no sign.
        is_settled = child.ready_at and monotonic() - child.ready_at >= SETTLED_SECONDS
        if child.ready_at:
            slot.failures = 0
        if self._is_successor(slot):
            self._give_up_reload(child.failure or f"{slot.name} of the new configuration died while it started")
        elif is_settled or (child.has_served and self.has_begun):
            # NOTE: it can start and serve. A client whose requests end workers must not keep the others waiting.
            self._count_restart(slot, child.reason)
            slot.pauses = 0
            self._start(slot)
        elif child.failure and not self.has_begun:
            self._on_failure(child.failure)  # what a configuration lacks, it lacks at the next attempt too
        elif child.ready_at:
            # NOTE: it did start: that does not count as a failed attempt, after some of which the service ends.
            logger.error("%s ended as soon as it was ready", slot.name)
            self._count_restart(slot, child.reason)
            self._pause(slot)
        else:
            logger.error("%s ended while it started: %s", slot.name, child.failure or "killed, or crashed")
            self._failed_start(slot)

    def _count_restart(self, slot: WorkerSlot, reason: str) -> None:
        slot.restarts += 1
        self.restarts[reason] += 1

    def _pause(self, slot: WorkerSlot) -> None:
        """Another attempt, later each time."""
        slot.pauses += 1
        self._start_after(slot, min(LONGEST_DELAY, FIRST_DELAY * 2 ** (slot.pauses - 1)))

    def _start_after(self, slot: WorkerSlot, seconds: float) -> None:
        self._loop.call_later(seconds, self._start, slot)

    def _failed_start(self, slot: WorkerSlot) -> None:
        """Another attempt, unless enough in a row have failed."""
        self._count_restart(slot, "failed_start")
        slot.failures += 1
        if slot.failures < START_ATTEMPTS:
            self._pause(slot)
            return
        slot.is_given_up = True
        logger.critical("%s is given up after %d attempts to start it", slot.name, slot.failures)
        if self._next is not None and slot in self._next.engines:
            self._give_up_reload(f"{slot.name} cannot be started")  # its workers would wait for ever for that one
        else:
            self._end_if_hopeless()
        self._begin_if_complete()

    def _end_if_hopeless(self) -> None:
        problem = "" if self._next is not None else self.now.hopeless()
        if problem:
            self._on_failure(problem)

    # -- reload -------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Replace all of them, by workers of the configuration as it is now; a reload under way starts over."""
        self._wants_reload = not self.has_begun
        if self._wants_reload or self._is_ending:
            return
        if self._next is not None:
            logger.info("another SIGHUP: the reload starts over")
            self._dismiss_successors()
            self._reload_ended("a reload came in between")
        self._begin_reload(self._load, nobody_asks)

    def change(self, load: Callable[[], Any], done: Callable[[str], object]) -> None:
        """Serve what ``load`` gives once reloads under way are over; ``done`` is told why not, or "" when it serves.

        ``Overloaded`` where that cannot be begun now.
        """
        if self._is_ending or not self.has_begun:
            raise Overloaded("the service is starting or stopping", RETRY_MS)
        self._changes.add((load, done))
        self._begin_change()

    def _begin_change(self) -> None:
        change = self._changes.next() if self._next is None and not self._is_ending else None
        if change is not None:
            self._begin_reload(*change)

    def _reload_ended(self, problem: str) -> None:
        self._changes.tell(problem)
        self._loop.call_soon(self._begin_change)

    def _begin_reload(self, load: Callable[[], Any], done: Callable[[str], object]) -> None:
        self._changes.who_asks = done
        logger.info("reloading %s", self._options.config)
        try:
            tables = load()
        except TorchpipeError as error:
            self._give_up_reload(str(error))
            return
        self._next = Generation(tables, self._options, self.now)
        self._begin(self._next)

    def _swap_if_complete(self, last: Child) -> None:
        assert self._next is not None
        workers = self._next.workers
        if all(worker.is_ready for worker in workers) and self._listen(
            [worker.child for worker in workers if worker.child]
        ):
            self._swap(last)

    def _swap(self, last: Child) -> None:
        """The successors serve from now on; those before them hand over their connections and end."""
        assert self._next is not None
        before, self.now, self._next = self.now, self._next, None
        for old, new in zip(before.workers, self.now.workers, strict=True):
            new.restarts = old.restarts
        for child in self._leave(before.slots):
            if not child.is_ready:
                child.kill("dismissed")
            elif not child.clients:
                child.release()
        logger.info("reloaded %s", self._options.config)
        self.now.tell_engines(self._options, before)
        self._connections.became_ready(last)
        self._reload_ended("")

    def _give_up_reload(self, problem: str) -> None:
        logger.error("not reloaded, everything stays as it is: %s", problem)
        self._dismiss_successors()
        self._reload_ended(problem)
        self._end_if_hopeless()

    def _dismiss_successors(self) -> None:
        slots, self._next = self._next.slots if self._next else [], None
        for child in self._leave(slots):
            child.kill("dismissed")

    def _leave(self, slots: list[WorkerSlot]) -> list[Child]:
        """The processes of a generation that serves no more, or never will, but for engines that go on."""
        children = [slot.child for slot in slots if slot.child is not None and slot not in self.now.engines]
        self._leaving.update(children)
        return children
