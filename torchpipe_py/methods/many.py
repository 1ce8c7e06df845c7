"""Calls of many images: they enter the pipe in turns, a few at a time."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextvars import copy_context
from time import perf_counter
from typing import Any, TypeVar

from torchpipe_py.errors import Overloaded, TorchpipeError, counted, log_failure
from torchpipe_py.methods.routes import Cancellable
from torchpipe_py.runtime.pipe import pipe
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError

ROUNDS = 2
"""Batches per instance that the images in the pipe could fill: single requests beside them wait no longer."""

Data = dict[str, Any]
Outcome = Callable[[Data, BaseException | None], Any]
"""Builds the caller's result from an image's dict and error; called once for each, from any thread."""
Given = TypeVar("Given")
Root = TypeVar("Root")
Result = TypeVar("Result")


class FairAdmission:
    """Lets one image of each call enter the pipe, then the next of each, so that few are in it at a time.

    The others wait here. A request beside them waits for those in the pipe alone, and calls wait for each other's
    images, not for each other. At most ``max_inflight`` images wait.
    """

    def __init__(self, run: pipe) -> None:
        self.pipe = run
        self._places = self._most = self._room = self._free = 0
        self._calls: deque[ManyCall] = deque()
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._fit()
        run.follow_models(self._fit)

    def _fit(self) -> None:
        """Have as many places as fit the pipe; one if it has no node, so that images of an unloaded model fail."""
        stats = self.pipe.stats()
        places = max(1, ROUNDS * sum(node["instances"] * node["max"] for node in stats["nodes"].values()))
        with self._lock:
            self._free += places - self._places
            self._room += stats["max_inflight"] - self._most
            self._places, self._most = places, stats["max_inflight"]
        self.advance(0)

    def gather(
        self, items: Sequence[Data], timeout: float | None, outcome: Outcome, done: Callable[[Any], object]
    ) -> ManyCall:
        """Let the images enter; ``done`` receives all outcomes, in order, on the thread of the last.

        Images that find no room end with ``Overloaded``.
        """
        call = ManyCall(self, items, timeout, outcome, done)
        if not items:
            done([])
            return call
        with self._lock:
            waiting = max(0, len(items) - max(0, self._free))
            excess = max(0, waiting - self._room)
            call.waiting = len(items) - excess
            self._room -= call.waiting  # each gives its place back as it enters
            if call.waiting:
                self._calls.append(call)
        for index in range(call.waiting, len(items)):
            room = f"room for {waiting - excess} more (max_inflight = {self._most})"
            why = f"{counted(waiting, 'image')} would wait, with {room}"
            call.finish(index, call.items[index], Overloaded(why, 1000))
        with self.pipe.arriving():
            self.advance(0)
        return call

    def gather_each(
        self, given: Sequence[Given], enter: Callable[[Given], tuple[Root, Data]], timeout: float | None,
        answer: Callable[[Root, Data], Any], refuse: Callable[[BaseException], Any], budget: ReplyBudget,
        done: Callable[[list[Any]], object],
    ) -> ManyCall:  # fmt: skip
        """Like ``gather``, for requests that fail one by one, also before they enter.

        ``enter`` makes root and dict of what is given, and may raise a ``TorchpipeError``. ``answer`` makes the
        outcome of a dict that ran, ``refuse`` that of an error; all have the ``budget``'s size together. ``done``
        receives all outcomes, in order.
        """
        items: list[Data] = []
        roots: dict[int, Root] = {}  # by the identity of the dict: each may have its own
        refused: dict[int, Any] = {}
        for index, each in enumerate(given):
            try:
                root, data = enter(each)
            except TorchpipeError as error:
                refused[index] = budget.take_refusal(refuse(error))
            else:
                items.append(data)
                roots[id(data)] = root

        def outcome(data: Data, error: BaseException | None) -> Any:
            try:
                if error is not None:
                    raise error
                return budget.take(answer(roots[id(data)], data))
            except BaseException as failure:
                return budget.take_refusal(refuse(failure))

        def finish(outcomes: list[Any]) -> None:
            entered = iter(outcomes)
            count = len(outcomes) + len(refused)
            ordered = [refused[index] if index in refused else next(entered) for index in range(count)]
            done(budget.fit(ordered, refuse))

        return self.gather(items, timeout, outcome, finish)

    def leave(self, call: ManyCall) -> range:
        """Stop the call's images from entering; returns those that waited."""
        with self._lock:
            waiting = range(call.entered, call.waiting)
            call.entered = call.waiting
            self._room += len(waiting)
            if waiting:
                self._calls.remove(call)
        return waiting

    def advance(self, freed: int) -> None:
        """Let images enter, as far as there are places; ``freed`` more of them now."""
        with self._lock:
            self._free += freed
        # NOTE: what enters may be finished before it is in. Its place is taken below, not ever deeper in here.
        if getattr(self._thread, "advances", False):
            return
        interrupt: BaseException | None = None
        self._thread.advances = True
        try:
            while (next_ := self._next()) is not None:
                call, index = next_
                try:
                    call.enter(index)
                except (KeyboardInterrupt, SystemExit) as error:
                    interrupt = error  # raised below, since others' images wait
                except BaseException as error:
                    # NOTE: often of another call than the one that is on this thread.
                    log_failure("a call of several images ended with an internal error", error)
        finally:
            self._thread.advances = False
        if interrupt is not None:
            raise interrupt

    def _next(self) -> tuple[ManyCall, int] | None:
        with self._lock:
            if self._free <= 0 or not self._calls:
                return None
            call = self._calls.popleft()
            index = call.entered
            call.entered += 1
            if call.entered < call.waiting:
                self._calls.append(call)
            self._free -= 1
            self._room += 1
            return call, index


class ManyCall(Cancellable):
    """A call of many images, and their outcomes. ``deadline`` is in seconds of ``perf_counter``.

    ``entered`` and ``waiting``: the images before the first are in the pipe or finished, those before the second wait.
    """

    deadline: float | None = None

    def __init__(
        self, admission: FairAdmission, items: Sequence[Data], timeout: float | None, outcome: Outcome,
        done: Callable[[Any], object],
    ) -> None:  # fmt: skip
        self._admission, self.items, self._outcome, self._done = admission, list(items), outcome, done
        self.deadline = None if timeout is None else perf_counter() + timeout
        self.entered = self.waiting = 0
        self._tickets: list[Cancellable] = []
        self._ended: BaseException | None = None
        self._outcomes: list[Any] = [None] * len(items)
        self._left = len(items)
        self._lock = threading.Lock()
        self._context = copy_context()

    def enter(self, index: int) -> None:
        """Give the image to the pipe, in the context of the call, whichever thread this is."""
        data, self.items[index] = self.items[index], {}

        def finish(data: Data, error: BaseException | None) -> None:
            try:
                self.finish(index, data, error)
            finally:
                self._admission.advance(1)

        # NOTE: images of a call without a deadline are many by intent: they wait for each other, and are not shed.
        timeout = math.inf if self.deadline is None else self.deadline - perf_counter()
        try:
            # NOTE: a context is entered by one thread at a time, and images of the call enter on several.
            ticket = self._context.copy().run(self._admission.pipe.dispatch, data, finish, timeout)
        except Exception as error:
            finish(data, error)
            return
        self._tickets.append(ticket)
        if self._ended is not None:  # meanwhile
            ticket.cancel(self._ended)

    def cancel(self, error: BaseException | None = None) -> None:
        """End it with ``error``: what is in the pipe, and what waits."""
        self._ended = error = self._ended or error or CancelledError()
        waiting = self._admission.leave(self)
        for ticket in self._tickets:
            ticket.cancel(error)
        for index in waiting:
            self.finish(index, self.items[index], error)

    def finish(self, index: int, data: Data, error: BaseException | None) -> None:
        """The image has its outcome."""
        self._outcomes[index] = self._outcome(data, error)
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._done(self._outcomes)


class ReplyBudget:
    """The bytes of one reply, which the outcomes of a call share; for any thread.

    ``size`` gives the bytes of an outcome as it is sent, ``frame`` is that of what is around them, ``hint`` is for the
    client of an outcome that does not fit.
    """

    def __init__(self, most: Bound, frame: int, size: Callable[[Any], int], hint: str) -> None:
        self._most, self._left, self._size, self._hint = most, most.bytes - frame, size, hint
        self._lock = threading.Lock()

    def take(self, outcome: Result) -> Result:
        """Count a result, and return it. Raises ``ReplyTooLargeError``, and counts nothing, if it does not fit."""
        size = self._size(outcome)
        with self._lock:
            left = self._left - size
            if left >= 0:
                self._left = left
                return outcome
        raise self._too_large(left)

    def take_refusal(self, outcome: Result) -> Result:
        """Count an outcome that is an error, and return it. It has to be sent: ``fit`` makes room for it."""
        size = self._size(outcome)
        with self._lock:
            self._left -= size
        return outcome

    def fit(self, outcomes: Sequence[Result], refuse: Callable[[BaseException], Result]) -> list[Result]:
        """All outcomes of the call, the largest of them refused if errors took more than what was left.

        What does not fit even so is refused as a whole when it is sent.
        """
        fitting, error = list(outcomes), self._too_large(self._left)
        sizes = list(map(self._size, outcomes)) if self._left < 0 else []
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            if self._left >= 0:
                break
            refusal = refuse(error)
            if (size := self._size(refusal)) < sizes[index]:
                fitting[index] = refusal
                self._left += sizes[index] - size
        return fitting

    def _too_large(self, left: int) -> ReplyTooLargeError:
        return ReplyTooLargeError(self._most.bytes - left, self._most, self._hint)
