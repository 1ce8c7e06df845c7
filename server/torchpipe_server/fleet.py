"""The workers: started, replaced when they die, and all of them by the next generation at a reload."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from torchpipe_py.errors import TorchpipeError
from torchpipe_server.channel import Said
from torchpipe_server.child import Child
from torchpipe_server.loop import LONGEST_WAIT, Loop
from torchpipe_server.options import Options
from torchpipe_server.slots import SlotTable
from torchpipe_server.snapshot import Figures, add_past

logger = logging.getLogger("torchpipe_server")

START_ATTEMPTS = 5  # of a worker that ends before it is ready
FIRST_DELAY, LONGEST_DELAY = 0.25, 30.0  # between them
SETTLED_SECONDS = 1.0  # a worker that was ready for so long is replaced at once
HEARTBEAT_SECONDS = 1.0


@dataclass
class Seat:
    """The place of one worker; ``child`` is none while there is a pause before the next attempt, at ``start_at``."""

    index: int
    child: Child | None = None
    restarts: int = 0
    failures: int = 0  # attempts since it last worked
    start_at: float = 0.0
    is_given_up: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether its worker takes connections."""
        return self.child is not None and self.child.is_ready


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
    """``options.workers`` seats; ``load`` gives the configuration, at first and at each reload, or ``ConfigError``."""

    def __init__(
        self, loop: Loop, options: Options, slots: SlotTable, load: Callable[[], Any], watcher: Watcher
    ) -> None:
        self.seats = [Seat(index) for index in range(options.workers)]
        self.past: Figures = {}  # of workers that have ended
        self._loop, self._options, self._slots, self._load, self._watcher = loop, options, slots, load, watcher
        self._tables = self._tables_before = load()
        self._successors: list[Seat] = []  # while a reload is under way
        self._leaving: set[Child] = set()
        self._has_begun = self._is_ending = self._wants_reload = False
        self._next_beat = 0.0
        loop.steps.append(self._step)

    @property
    def ready(self) -> list[Child]:
        """Those that take connections."""
        return [seat.child for seat in self.seats if seat.child is not None and seat.child.is_ready]

    @property
    def children(self) -> list[Child]:
        """All whose process is there, or was until a moment ago."""
        seated = [seat.child for seat in [*self.seats, *self._successors] if seat.child is not None]
        return [*seated, *self._leaving]

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start them all, as soon as the process that they are forked from has imported everything."""
        # NOTE: on a thread, since that takes seconds in which the loop has to answer.
        threading.Thread(target=self._prepare, name="torchpipe-prepare", daemon=True).start()

    def drain(self) -> None:
        """Have each answer what it accepted, and end."""
        self._is_ending = True
        for child in self.children:
            child.drain()

    def close(self) -> None:
        """End what is left."""
        for child in self.children:
            child.close()

    def _prepare(self) -> None:
        try:
            process = multiprocessing.get_context("forkserver").Process(target=_nothing)
            process.start()
            process.join()
        except (OSError, EOFError) as error:
            logger.error("the process that workers are forked from: %s", error)
        self._loop.call(self._start_all)

    def _start_all(self) -> None:
        if not self._is_ending:
            for seat in self.seats:
                self._start(seat)

    def _start(self, seat: Seat) -> None:
        seat.start_at = 0.0
        try:
            seat.child = Child(
                self._loop, seat.index, self._options, self._tables, self._slots, self._hear, self._ended
            )
        except (OSError, EOFError) as error:  # the latter where the process that workers are forked from has died
            logger.error("worker %d cannot be started: %s", seat.index, error)
            if seat in self._successors:
                self._give_up_reload(str(error))
            else:
                self._postpone(seat, counts=True)

    def _step(self) -> float:
        now = monotonic()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_SECONDS
            self._beat()
        waits = [LONGEST_WAIT]
        for seat in self.seats:
            if seat.start_at and not self._is_ending:
                waits.append(seat.start_at - now)
                if waits[-1] <= 0:
                    self._start(seat)
        return min(waits)

    def _beat(self) -> None:
        """Once a second: ask for figures, and end workers that do not answer any more."""
        for child in self.children:
            # NOTE: beats are counted, not seconds: a machine that slept must not find all its workers hanging.
            if self._options.hang_seconds and child.unheard * HEARTBEAT_SECONDS > self._options.hang_seconds:
                logger.error("worker %d (pid %d) does not answer: killing it", child.index, child.pid)
                child.unheard = 0
                child.kill()
            elif child.state in ("ready", "draining"):
                child.unheard += 1
                child.ask_stats()

    # -- what becomes of a worker -------------------------------------------------------------------------------

    def _hear(self, child: Child, message: Said) -> None:
        if message["type"] == "ready":
            self._became_ready(child)
        else:
            self._watcher.said(child, message)

    def _became_ready(self, child: Child) -> None:
        if self._is_ending:
            child.drain()
        elif child in [seat.child for seat in self._successors]:
            if all(seat.is_ready for seat in self._successors):
                self._swap(child)
        elif child in [seat.child for seat in self.seats]:
            if self._has_begun:
                logger.info("worker %d is back (pid %d)", child.index, child.pid)
                self._watcher.became_ready(child)
            elif all(seat.is_ready or seat.is_given_up for seat in self.seats):
                self._has_begun = True
                self._watcher.became_ready(child)
                self._reload_again()

    def _ended(self, child: Child) -> None:
        if child.stats:
            self.past = add_past(self.past, child.stats)
        self._leaving.discard(child)
        seat = next((one for one in [*self.seats, *self._successors] if one.child is child), None)
        if seat is not None:
            seat.child = None
        self._watcher.died(child)
        if seat is not None and not self._is_ending:
            self._replace(seat, child)

    def _replace(self, seat: Seat, child: Child) -> None:
        if seat in self._successors:
            self._give_up_reload(child.failure or "a worker of the new configuration died while it started")
        elif child.ready_at and monotonic() - child.ready_at >= SETTLED_SECONDS:
            seat.restarts, seat.failures = seat.restarts + 1, 0
            self._start(seat)
        elif child.failure and not self._has_begun:
            self._watcher.failed(child.failure)  # what a configuration lacks, it lacks at the next attempt too
        elif child.ready_at:
            # NOTE: it did start. A request that kills whoever takes it must not end the service.
            logger.error("worker %d ended as soon as it was ready", seat.index)
            self._postpone(seat, counts=False)
        else:
            logger.error("worker %d ended while it started: %s", seat.index, child.failure or "killed, or crashed")
            self._postpone(seat, counts=True)

    def _postpone(self, seat: Seat, counts: bool) -> None:
        """Another attempt, later each time, unless there were enough of those that count."""
        seat.failures += 1
        seat.restarts += 1
        if not counts or seat.failures < START_ATTEMPTS:
            seat.start_at = monotonic() + min(LONGEST_DELAY, FIRST_DELAY * 2 ** (seat.failures - 1))
            return
        seat.is_given_up = True
        logger.critical("worker %d is given up after %d attempts to start it", seat.index, seat.failures)
        if all(one.is_given_up for one in self.seats):
            self._watcher.failed(f"no worker can be started, after {seat.failures} attempts each")

    # -- reload -------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Replace all of them, by workers of the configuration as it is now; a reload under way is given up."""
        if not self._has_begun or self._is_ending:
            self._wants_reload = True
            return
        if self._successors:
            self._give_up_reload("the configuration is to be read once more")
        logger.info("reloading %s", self._options.config)
        try:
            tables = self._load()
        except TorchpipeError as error:
            logger.error("not reloaded, everything stays as it is: %s", error)
            return
        self._tables_before, self._tables = self._tables, tables
        self._successors = [Seat(index) for index in range(self._options.workers)]
        for seat in list(self._successors):
            if seat in self._successors:  # not given up meanwhile
                self._start(seat)

    def _swap(self, last: Child) -> None:
        """The successors serve from now on; those before them hand over their connections and end."""
        before, self.seats, self._successors = self.seats, self._successors, []
        for old, new in zip(before, self.seats, strict=True):
            new.restarts = old.restarts
            if old.child is not None:
                self._leaving.add(old.child)
                if old.child.is_ready:
                    old.child.release()
                else:
                    old.child.kill()
        logger.info("reloaded %s", self._options.config)
        self._watcher.became_ready(last)

    def _give_up_reload(self, problem: str) -> None:
        logger.error("not reloaded, everything stays as it is: %s", problem)
        self._tables = self._tables_before
        for seat in self._successors:
            if seat.child is not None:
                self._leaving.add(seat.child)
                seat.child.kill()
        self._successors = []

    def _reload_again(self) -> None:
        if self._wants_reload:
            self._wants_reload = False
            self._loop.call(self.reload)


def _nothing() -> None:
    """What the first process that is forked does."""
