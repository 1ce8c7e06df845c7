"""What every lane keeps to: a queue, the loop of an instance's thread, and the outcome of each request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import perf_counter, sleep
from typing import Protocol, TypeVar

from torchpipe_py.errors import (
    BackendError,
    DeadlineExceeded,
    EngineUnavailable,
    NoResult,
    Overloaded,
    PipeClosed,
    WorkerDied,
    describe,
)
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.admission import ComputeTimes, ControlledDelay
from torchpipe_py.runtime.idle import IdleStack, Leadership, Sleeper
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.request import CallerThread, Request

_PAUSE = 0.05  # seconds after an exception in the loop itself, so that one that comes at once does not take a core

Fail = Callable[[Request, BaseException], object]

T = TypeVar("T")


class Around(Protocol):
    """Runs a backend on requests, as of the time it started, in a context of their own."""

    def __call__(self, requests: Sequence[Request], started: float, run: Callable[[], T]) -> T: ...


class Led(Protocol):
    """A lane that has a leader."""

    idle: Leadership

    def is_awaiting(self) -> bool:
        """Whether some request in flight could still reach this node."""


class Source(Protocol):
    """Where requests wait before they come to a pipe: the leaders of the lanes that they enter fetch them."""

    def fetch(self, lane: Lane) -> None:
        """Bring what is there, on the calling thread. The lane's leader comes again before it sleeps."""

    def announce(self, lane: Lane) -> bool:
        """The lane's leader is about to sleep: bring what comes, until it fetches; whether something is there now."""

    def together(self) -> AbstractContextManager[None]:
        """What the calling thread completes meanwhile is told at once at the end."""


logger = logging.getLogger("torchpipe_py")


class Lane:
    """The queue of a node, and the outcome of each request that its instances run.

    ``put`` may be called from any thread. ``deliver(request)`` takes on what is finished, on the thread that finished
    it; ``fail(request, error)`` completes what cannot go on. ``upstream`` holds the lanes from which a request can
    still reach this one, perhaps itself, and ``both_ways`` other lanes that come before this one and behind it, in
    however many steps; they and ``deliver`` are set before the first request. ``waiting``, shared by
    the lanes of a pipe, holds those whose leader waits for company: an instance that has delivered its batch wakes the
    leaders for whom nothing is under way any more. ``around`` runs each ``forward`` where spans are made of requests.
    A batch is delivered inside ``together()``. With ``delay``, requests that are not worth computing any more are
    refused when they leave the queue, and the leader makes batches that meet their deadlines.
    """

    idle: IdleStack[Instance] | IdleStack[Sleeper] | Leadership
    upstream: Sequence[Lane]
    both_ways: Collection[Lane]
    deliver: Callable[[Request], object]

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Led]) -> None:
        self.name = name
        self.label = instances[0].backend.config.label
        self.instances = instances
        self.fail = fail
        self.is_closing = False
        self.around: Around | None = None
        self.times = ComputeTimes()
        self.delay: ControlledDelay | None = None
        self.together: Callable[[], AbstractContextManager[None]] = nullcontext
        self._waiting = waiting
        self._queue: deque[Request] = deque()
        self._reached: set[Request] = set()  # requests that callers are about to run here
        self._paused: set[Instance] = set()

    def put(self, request: Request) -> None:
        """Queue a request, from any thread; that of a blocked caller may stay with its thread instead."""
        if request.caller is not None and self._stays_with_caller(request, request.caller):
            return
        request.caller = None
        self._queue.append(request)
        if self.idle.to_wake:
            self.idle.wake_one()
        if self.is_closing:
            self._fail_queued()

    def _stays_with_caller(self, request: Request, caller: CallerThread) -> bool:
        """Whether the caller's thread is to run the request here itself, when it comes to that."""
        return False

    def serve(self, instance: Instance) -> None:
        """Run what comes until the lane is closed: the main loop of an instance's thread, which no exception ends."""
        error: BaseException | None = None
        while True:
            try:
                if error is not None:
                    self._recover(instance, error)
                self._serve(instance)
                return
            except BaseException as raised:
                error = raised

    def _serve(self, instance: Instance) -> None:
        """Run what comes until the lane is closed."""
        raise NotImplementedError

    def _recover(self, instance: Instance, error: BaseException) -> None:
        """Where an exception in the loop itself has met the instance: fail what it holds, so that it can go on."""
        for request in instance.taken:
            self.fail(request, self._backend_error(error))
        instance.taken = ()
        instance.started = instance.busy = 0
        self.idle.recover(instance)
        self._wake_leaders()
        logger.error("node %r: instance %d goes on after %s", self.name, instance.index, describe(error))
        sleep(_PAUSE)

    def close(self) -> None:
        """Let every instance finish its batch and end; what is still queued fails with ``PipeClosed``."""
        self.is_closing = True
        self._fail_queued()
        self.idle.close()

    @contextmanager
    def paused(self, instance: Instance) -> Iterator[None]:
        """Meanwhile the instance's batch counts as not under way: its backend waits for what other nodes do."""
        busy, instance.busy = instance.busy, 0
        started, instance.started = instance.started, 0.0
        self._paused.add(instance)
        self._wake_leaders()
        try:
            yield
        finally:
            self._paused.discard(instance)
            instance.busy, instance.started = busy, started

    def load(self) -> int:
        """Requests here that are not delivered yet, and could be; a moment's estimate."""
        if len(self._paused) == len(self.instances):
            return 0  # what is queued has to wait for the other nodes
        return self.queued() + len(self._reached) + sum(instance.busy for instance in self.instances)

    def queued(self) -> int:
        """Requests that wait here; a moment's estimate."""
        return 0 if self.is_closing else len(self._queue)

    def busy(self) -> int:
        """Instances that have requests."""
        return sum(1 for instance in self.instances if instance.busy)

    def expected_wait(self, now: float) -> float:
        """How long a request that comes now waits for an instance, by recent compute times, seconds."""
        most = max(instance.max for instance in self.instances)
        return self.times.wait(self.queued(), self.busy(), len(self.instances), most, now)

    def expected_compute(self, now: float) -> float:
        """How long it is computed then, seconds."""
        most = max(instance.max for instance in self.instances)
        return self.times.expected(min(most, self.queued() + 1), now)

    # -- outcomes -------------------------------------------------------------------------------------------------

    def _starts(self, instance: Instance, request: Request, now: float, size: int = 1) -> bool:
        """Whether the request is to be run in a batch of ``size``, its dict ready for that; else it is completed."""
        if request.done:
            return False
        if self.is_closing:
            self._fail_closed(request)
            return False
        if self.delay is not None:
            if not self._is_worth_it(self.delay, instance, request, now, size):
                return False
        elif request.deadline is not None and now >= request.deadline:
            self._expire(instance, request)
            return False
        try:
            # A result or an error is what this backend says, never what an earlier one said.
            request.data.pop(TASK_RESULT_KEY, None)
            request.data.pop(TASK_ERROR_KEY, None)
        except BaseException as error:  # the dict may be of a class of the caller's own
            self._fail_defect(instance, request, error)
            return False
        return True

    def _is_worth_it(self, delay: ControlledDelay, instance: Instance, request: Request, now: float, size: int) -> bool:
        """Whether the request can meet its deadline, or, without one, has not waited too long; else it is completed."""
        if request.deadline is None and not delay.sheds:
            return True
        waited, compute = now - request.arrived, self.times.expected(size, now)
        if request.deadline is not None:
            if now + compute < request.deadline:
                return True
            self._expire(instance, request)
        elif delay.took(waited, compute, now):
            instance.record.expired += 1
            retry = max(1, round(1000 * self.expected_wait(now)))
            text = f"waited {1000 * waited:.0f} ms at node {self.name!r}, which has more requests than it can take"
            self.fail(request, Overloaded(text, retry_after_ms=retry))
        else:
            return True
        return False

    def _expire(self, instance: Instance, request: Request) -> None:
        """The request's deadline has passed before it was run, or would pass meanwhile."""
        if not request.done:
            instance.record.expired += 1
        self.fail(request, DeadlineExceeded(f"deadline passed while queued at node {self.name!r}"))

    def _go_on(self, instance: Instance, request: Request) -> None:
        try:
            data = request.data
            if TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
                data[TASK_ERROR_KEY] = NoResult(f"node {self.name!r}: {self.label} gave no result")
            self.deliver(request)
        except BaseException as error:
            self._fail_defect(instance, request, error)

    def _fail_defect(self, instance: Instance, request: Request, error: BaseException) -> None:
        instance.record.failed += 1
        if request.links is not None and request.links.timeline is not None:
            request.links.timeline.fail(request.node, error)
        with suppress(BaseException):  # what the dict's class does, or the backend did to it
            request.data.pop(TASK_RESULT_KEY, None)
        self.fail(request, error if self._is_no_defect(request, error) else self._backend_error(error))

    def _is_no_defect(self, request: Request, error: BaseException) -> bool:
        """Whether the caller gets the error as it is."""
        kind = type(error)  # what an exception says of its own class may raise
        if issubclass(kind, PipeClosed):
            return self.is_closing  # a jump's own requests were closed, say
        if issubclass(kind, DeadlineExceeded):
            return request.deadline is not None and perf_counter() >= request.deadline
        return issubclass(kind, (WorkerDied, EngineUnavailable))

    def _backend_error(self, error: BaseException) -> BackendError:
        """What a caller gets for an exception in a backend."""
        failure = BackendError(f"node {self.name!r}: {self.label}: {describe(error)}")
        failure.__cause__ = error
        return failure

    def _fail_closed(self, request: Request) -> None:
        self.fail(request, PipeClosed(f"the pipe was closed while the request was queued at node {self.name!r}"))

    def _fail_queued(self) -> None:
        for request in list(self._queue):
            self._fail_closed(request)
            with suppress(ValueError):  # an instance may have taken it meanwhile
                self._queue.remove(request)

    def _wake_leaders(self) -> None:
        for lane in list(self._waiting):
            if not lane.is_awaiting():
                lane.idle.wake_leader()
