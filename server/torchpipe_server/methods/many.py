"""Calls of many images: they enter the pipe in turns, a few at a time."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextvars import copy_context
from time import perf_counter
from typing import Any

from torchpipe_py import Overloaded, pipe
from torchpipe_py.errors import counted
from torchpipe_server.front.services import Cancellable

ROUNDS = 4
"""How often the images in the pipe could fill every instance: single requests beside them wait no longer than that."""

Finish = Callable[[int, dict[str, Any], BaseException | None], None]
"""Takes an image's number, its dict and its error; called once for each, from any thread."""

Outcome = Callable[[dict[str, Any], BaseException | None], Any]
"""Makes of an image's dict and its error what its caller keeps."""


class Call:
    """The images of one call. ``deadline`` is in seconds of ``time.perf_counter``."""

    def __init__(self, items: Sequence[dict[str, Any]], timeout: float | None, finish: Finish) -> None:
        self.items, self.finish = list(items), finish
        self._context = copy_context()
        self.deadline = None if timeout is None else perf_counter() + timeout
        self.entered = 0  # how many of them; those before it are in the pipe, or finished
        self.tickets: list[Cancellable] = []
        self.ended: BaseException | None = None

    def enter(self, dispatch: Callable[..., Cancellable], *arguments: Any) -> Cancellable:
        """``dispatch`` an image in the context of the call, whichever thread this is."""
        # NOTE: a context is entered by one thread at a time, and images of the call enter on several.
        return self._context.copy().run(dispatch, *arguments)


class Turns:
    """Lets one image of each call enter the pipe, then the next of each, so that few are in it at a time.

    The others wait here. A request beside them waits for those in the pipe alone, and calls wait for each other's
    images, not for each other. At most ``max_inflight`` images wait.
    """

    def __init__(self, run: pipe) -> None:
        self._pipe = run
        stats = run.stats()
        self._room: int = stats["max_inflight"]
        self._free: int = ROUNDS * sum(node["instances"] * node["max"] for node in stats["nodes"].values())
        self._calls: deque[Call] = deque()
        self._lock = threading.Lock()
        self._thread = threading.local()

    def start(self, call: Call) -> None:
        """Let its images enter; those for which there is no room are finished with ``Overloaded``."""
        with self._lock:
            waiting = max(0, len(call.items) - self._free)
            excess = max(0, waiting - self._room)
            last = len(call.items) - excess
            refused, call.items = call.items[last:], call.items[:last]
            self._room -= len(call.items)  # each gives its place back as it enters
            if call.items:
                self._calls.append(call)
        for index, data in enumerate(refused, last):
            why = f"{counted(waiting, 'image')} would wait, with room for {waiting - excess}"
            call.finish(index, data, Overloaded(why, 1000))
        self._advance(0)

    def gather(
        self, items: Sequence[dict[str, Any]], timeout: float | None, outcome: Outcome, done: Callable[[Any], object]
    ) -> Gathering:
        """``start``; ``done`` is given the outcomes of all images, in their order, on the thread of the last."""
        gathering = Gathering(self, items, timeout, outcome, done)
        if items:
            self.start(gathering.call)
        else:
            done([])
        return gathering

    def cancel(self, call: Call, error: BaseException | None = None) -> None:
        """End it with ``error``: what is in the pipe, and what waits."""
        with self._lock:
            call.ended = error = call.ended or error or CancelledError()
            waiting = range(call.entered, len(call.items))
            call.entered = len(call.items)
            self._room += len(waiting)
            if waiting:
                self._calls.remove(call)
        for ticket in call.tickets:
            ticket.cancel(error)
        for index in waiting:
            call.finish(index, call.items[index], error)

    def _advance(self, freed: int) -> None:
        """Let images enter, as far as there are places; ``freed`` more of them now."""
        with self._lock:
            self._free += freed
        # NOTE: what enters may be finished before it is in. Its place is taken below, not ever deeper in here.
        if getattr(self._thread, "advances", False):
            return
        self._thread.advances = True
        try:
            while (next_ := self._next()) is not None:
                self._enter(*next_)
        finally:
            self._thread.advances = False

    def _next(self) -> tuple[Call, int] | None:
        with self._lock:
            if not self._free or not self._calls:
                return None
            call = self._calls.popleft()
            index = call.entered
            call.entered += 1
            if call.entered < len(call.items):
                self._calls.append(call)
            self._free -= 1
            self._room += 1
            return call, index

    def _enter(self, call: Call, index: int) -> None:
        data, call.items[index] = call.items[index], {}

        def finish(data: dict[str, Any], error: BaseException | None) -> None:
            try:
                call.finish(index, data, error)
            finally:
                self._advance(1)

        # NOTE: images of a call without a deadline are many by intent: they wait for each other, and are not shed.
        timeout = math.inf if call.deadline is None else call.deadline - perf_counter()
        try:
            ticket = call.enter(self._pipe.dispatch, data, finish, timeout)
        except Exception as error:
            finish(data, error)
            return
        call.tickets.append(ticket)
        if call.ended is not None:  # meanwhile
            ticket.cancel(call.ended)


class Gathering:
    """The outcomes of one call on their way, for ``Server``."""

    def __init__(
        self, turns: Turns, items: Sequence[dict[str, Any]], timeout: float | None, outcome: Outcome,
        done: Callable[[Any], object],
    ) -> None:  # fmt: skip
        self.call = Call(items, timeout, self._finish)
        self._turns, self._outcome, self._done = turns, outcome, done
        self._outcomes: list[Any] = [None] * len(items)
        self._left = len(items)
        self._lock = threading.Lock()

    @property
    def deadline(self) -> float | None:
        return self.call.deadline

    def cancel(self, error: BaseException | None = None) -> None:
        self._turns.cancel(self.call, error)

    def _finish(self, index: int, data: dict[str, Any], error: BaseException | None) -> None:
        self._outcomes[index] = self._outcome(data, error)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._done(self._outcomes)
