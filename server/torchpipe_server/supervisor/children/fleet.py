"""Workers and engine processes: started, replaced when they die, and by the next generation at a reload."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any, Protocol

from torchpipe_py.errors import TorchpipeError
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import Loop, every
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import EXHAUSTED
from torchpipe_server.supervisor.children.child import LOOK_SECONDS, Child
from torchpipe_server.supervisor.children.forker import Forked, Forker
from torchpipe_server.supervisor.children.generation import Generation, WorkerSlot
from torchpipe_server.supervisor.children.retirement import Retirement
from torchpipe_server.supervisor.figures import Figures, add_past
from torchpipe_server.worker.channel import Said

logger = logging.getLogger("torchpipe_server")

START_ATTEMPTS = 5  # of a worker that ends before it is ready
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # between them
EXHAUSTED_DELAY = 1.0  # where descriptors, memory or threads were missing
SETTLED_SECONDS = 1.0  # a worker that was ready for so long can work
RECOVER_SECONDS = 1.0  # after a death, the next worker is expected


class Watcher(Protocol):
    """Who hears of the workers, on the loop's thread."""

    def became_ready(self, child: Child) -> None:
        """One more takes connections; at a start or a reload only the last of them is told."""

    def died(self, child: Child) -> None:
        """Its process is no more; whoever takes its place is started after this."""

    def said(self, child: Child, message: Said) -> None:
        """What is not about its life."""

    def failed(self, problem: str) -> None:
        """No worker can be started."""


class Fleet:
    """``options.workers`` workers. ``tables`` is the configuration, ``load`` gives that of a reload, or ConfigError."""

    def __init__(
        self,
        loop: Loop,
        options: Options,
        journal: Journal,
        tables: Any,
        load: Callable[[], Any],
        watcher: Watcher,
    ) -> None:
        self._now = Generation(tables, options)
        self._next: Generation | None = None  # while a reload is under way
        self.past: Figures = {}  # of workers that have ended
        self.restarts: Counter[str] = Counter()  # by reason, "failed_start" besides those of a child
        self._loop, self._options, self._load, self._watcher = loop, options, load, watcher
        self._forker = Forker(loop, options, journal)
        self._leaving: set[Child] = set()
        self._retirement = Retirement(loop, options.hang_seconds)
        self._has_begun = self._is_ending = self._wants_reload = False
        every(loop, LOOK_SECONDS, self._look)

    @property
    def workers(self) -> list[WorkerSlot]:
        """Those that serve now."""
        return self._now.workers

    @property
    def engines(self) -> list[WorkerSlot]:
        """The engine processes that serve them."""
        return self._now.engines

    @property
    def _slots(self) -> list[WorkerSlot]:
        """Of the generation that serves, and of the next one."""
        return [*dict.fromkeys([*self._now.slots, *(self._next.slots if self._next else ())])]

    @property
    def ready(self) -> list[Child]:
        """Those that take connections; where some respond, only they."""
        children = [worker.child for worker in self.workers]
        ready = [child for child in children if child is not None and child.is_ready]
        return [child for child in ready if child.responds] or ready

    @property
    def is_recovering(self) -> bool:
        """Whether a worker that served connections died a moment ago, and the next one is not ready."""
        since = monotonic() - RECOVER_SECONDS
        return any(worker.died_at > since for worker in self.workers)

    @property
    def is_responding(self) -> bool:
        """Whether a worker is there that would answer, with what it needs for that."""
        return all(engine.is_ready for engine in self.engines) and any(child.responds for child in self.ready)

    @property
    def children(self) -> list[Child]:
        """All whose process is there, or was until a moment ago."""
        current = [slot.child for slot in self._slots if slot.child is not None]
        return [*current, *self._leaving]

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start them all."""
        self._begin(self._now)

    def _begin(self, generation: Generation) -> None:
        """Start the engine processes, and then, once they are ready, the workers."""
        if all(engine.is_ready for engine in generation.engines):
            generation.has_started_workers = True
            for worker in generation.workers:
                self._start(worker)
        else:
            for engine in generation.engines:
                self._start(engine)

    def drain(self) -> None:
        """Have each answer what it accepted, and end."""
        self._is_ending = True
        for child in self._leaving:
            if not child.clients:
                child.drain()
        self._drain_rest()

    def _drain_rest(self) -> None:
        """Those that are to stay longest: until no other one hands connections over any more, or asks for anything."""
        if not self._leaving:
            for child in self.children:
                if not child.clients:
                    child.drain()

    def close(self) -> None:
        """End what is left, also what is being forked."""
        self._forker.close()
        for child in self.children:
            child.close()

    def _start(self, worker: WorkerSlot) -> None:
        self._forker.fork(
            worker.role, worker.index, worker.tables, partial(self._wants, worker),
            partial(self._forked, worker), partial(self._not_forked, worker),
        )  # fmt: skip

    def _wants(self, worker: WorkerSlot) -> bool:
        """Whether it belongs to a generation that serves or is to serve; for any thread."""
        return not self._is_ending and worker in self._slots

    def _forked(self, worker: WorkerSlot, forked: Forked) -> None:
        child = Child(self._loop, worker.name, forked, self._hear, self._ended)
        if self._wants(worker):
            worker.child = child
            self._link(worker)
        else:
            self._leaving.add(child)  # of a reload that was given up meanwhile, or too late
            child.dismiss()

    def _not_forked(self, worker: WorkerSlot, error: Exception) -> None:
        logger.error("%s cannot be started: %s", worker.name, error or type(error).__name__)
        if self._is_successor(worker):
            self._give_up_reload(f"{worker.name} cannot be started")
        elif worker in self._now.slots and not self._is_ending:
            self._count_restart(worker, "failed_start")
            if isinstance(error, OSError) and error.errno in EXHAUSTED:
                self._start_after(worker, EXHAUSTED_DELAY)  # no fault of the worker's, however often
            else:
                self._pause(worker, is_failure=True)

    def _look(self) -> None:
        self._retirement.look(self.children)
        self._forker.look(LOOK_SECONDS)
        self._link_again()

    def _start_after(self, worker: WorkerSlot, seconds: float) -> None:
        def start() -> None:
            if worker in self._now.slots and not self._is_ending:
                self._start(worker)

        self._loop.call_later(seconds, start)

    # -- what becomes of a worker -------------------------------------------------------------------------------

    def _hear(self, child: Child, message: Said) -> None:
        if message["type"] == "ready":
            self._became_ready(child)
        else:
            self._watcher.said(child, message)

    def _became_ready(self, child: Child) -> None:
        slot = next((slot for slot in self._slots if slot.child is child), None)
        if slot is not None:
            slot.died_at = 0.0
        if self._is_ending:
            child.drain()
        elif slot is None:
            return
        elif slot.role == "engine process":
            self._engine_became_ready(slot)
        elif self._is_successor(slot):
            assert self._next is not None
            if all(worker.is_ready for worker in self._next.workers):
                self._swap(child)
        elif self._has_begun:
            logger.info("%s is back (pid %d)", child.name, child.pid)
            self._watcher.became_ready(child)
        else:
            self._begin_if_complete()

    def _engine_became_ready(self, engine: WorkerSlot) -> None:
        generations = [each for each in (self._now, self._next) if each is not None and engine in each.engines]
        for generation in generations:
            if generation.has_started_workers:
                for worker in generation.workers:
                    if generation.engine_of(worker) is engine:
                        self._link(worker)
            elif all(other.is_ready for other in generation.engines):
                self._begin(generation)
        if self._has_begun and engine.restarts and engine.child is not None:
            logger.info("%s is back (pid %d)", engine.name, engine.child.pid)

    def _link(self, worker: WorkerSlot) -> None:
        """Give a worker and its engine process the two ends of a way to each other, where both are there."""
        engine = self._generation_of(worker).engine_of(worker) if worker.role == "worker" else None
        if engine is None or worker.child is None or engine.child is None or not engine.is_ready:
            return
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                engine.child.link(ours, worker.child)
                worker.child.link(theirs)
        except OSError as error:
            logger.error("%s and %s cannot be linked: %s", worker.name, engine.name, error)
            worker.child.needs_link = True

    def _link_again(self) -> None:
        """Where descriptors or memory were missing for it, and both live: nothing else would."""
        for worker in self._slots:
            if worker.child is not None and worker.child.needs_link and not self._is_ending:
                self._link(worker)

    def _generation_of(self, slot: WorkerSlot) -> Generation:
        return self._next if self._next is not None and self._is_successor(slot) else self._now

    def _is_successor(self, slot: WorkerSlot) -> bool:
        """Whether it belongs to the next generation alone."""
        return self._next is not None and slot in self._next.slots and slot not in self._now.slots

    def _begin_if_complete(self) -> None:
        """The first generation is there, but for what was given up."""
        if not self._has_begun and self.ready and all(worker.is_ready or worker.is_given_up for worker in self.workers):
            self._has_begun = True
            self._now.tell_engines(self._options)
            self._watcher.became_ready(self.ready[0])
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
        worker = next((slot for slot in self._slots if slot.child is child), None)
        if worker is not None:
            worker.child, worker.died_at = None, monotonic() if child.has_served else 0.0
        self._watcher.died(child)
        if self._is_ending:
            self._drain_rest()
        elif worker is not None:
            self._replace(worker, child)

    def _replace(self, worker: WorkerSlot, child: Child) -> None:
        if child.ready_at:
            worker.failures = 0
        if self._is_successor(worker):
            self._give_up_reload(child.failure or f"{worker.name} of the new configuration died while it started")
        elif self._can_serve(child):
            # NOTE: it can start and serve. A client whose requests end workers must not keep the others waiting.
            self._count_restart(worker, child.reason)
            worker.pauses = 0
            self._start(worker)
        elif child.failure and not self._has_begun:
            self._watcher.failed(child.failure)  # what a configuration lacks, it lacks at the next attempt too
        elif child.ready_at:
            # NOTE: it did start: that does not count as a failed attempt, after some of which the service ends.
            logger.error("%s ended as soon as it was ready", worker.name)
            self._count_restart(worker, child.reason)
            self._pause(worker, is_failure=False)
        else:
            logger.error("%s ended while it started: %s", worker.name, child.failure or "killed, or crashed")
            self._count_restart(worker, "failed_start")
            self._pause(worker, is_failure=True)

    def _can_serve(self, child: Child) -> bool:
        # NOTE: an engine process gets workers before there are requests; until then that is no sign.
        is_settled = child.ready_at and monotonic() - child.ready_at >= SETTLED_SECONDS
        return bool(is_settled) or (child.has_served and self._has_begun)

    def _count_restart(self, worker: WorkerSlot, reason: str) -> None:
        worker.restarts += 1
        self.restarts[reason] += 1

    def _pause(self, worker: WorkerSlot, is_failure: bool) -> None:
        """Another attempt, later each time, unless enough starts in a row have failed."""
        worker.pauses += 1
        worker.failures += is_failure
        if worker.failures < START_ATTEMPTS:
            self._start_after(worker, min(LONGEST_DELAY, FIRST_DELAY * 2 ** (worker.pauses - 1)))
            return
        worker.is_given_up = True
        logger.critical("%s is given up after %d attempts to start it", worker.name, worker.failures)
        if self._next is not None and worker in self._next.engines:
            self._give_up_reload(f"{worker.name} cannot be started")  # its workers would wait for ever for that one
        else:
            self._end_if_hopeless()
        self._begin_if_complete()

    def _end_if_hopeless(self) -> None:
        if self._next is not None:
            return
        for slots in (self.workers, self.engines):
            if slots and all(slot.is_given_up for slot in slots):
                self._watcher.failed(f"no {slots[0].role} can be started, after {START_ATTEMPTS} attempts each")
                return
        missing = [engine.name for engine in self.engines if engine.is_given_up]
        if missing and not self._now.has_started_workers:  # which wait for all of them
            self._watcher.failed(f"{missing[0]} cannot be started, after {START_ATTEMPTS} attempts")

    # -- reload -------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Replace all of them, by workers of the configuration as it is now; a reload under way starts over."""
        if not self._has_begun or self._is_ending:
            self._wants_reload = True
            return
        self._wants_reload = False
        if self._next is not None:
            logger.info("another SIGHUP: the reload starts over")
            self._dismiss_successors()
        logger.info("reloading %s", self._options.config)
        try:
            tables = self._load()
        except TorchpipeError as error:
            logger.error("not reloaded, everything stays as it is: %s", error)
            return
        self._next = Generation(tables, self._options, self._now)
        self._begin(self._next)

    def _swap(self, last: Child) -> None:
        """The successors serve from now on; those before them hand over their connections and end."""
        assert self._next is not None
        before, self._now, self._next = self._now, self._next, None
        for old, new in zip(before.workers, self.workers, strict=True):
            new.restarts = old.restarts
        for old in before.slots:
            if old.child is not None and old not in self.engines:
                self._leaving.add(old.child)
                if not old.child.is_ready:
                    old.child.dismiss()
                elif not old.child.clients:
                    old.child.release()
        logger.info("reloaded %s", self._options.config)
        self._now.tell_engines(self._options, before)
        self._watcher.became_ready(last)

    def _give_up_reload(self, problem: str) -> None:
        logger.error("not reloaded, everything stays as it is: %s", problem)
        self._dismiss_successors()
        self._end_if_hopeless()

    def _dismiss_successors(self) -> None:
        slots, self._next = self._next.slots if self._next else [], None
        for slot in slots:
            if slot.child is not None and slot not in self.engines:
                self._leaving.add(slot.child)
                slot.child.dismiss()
