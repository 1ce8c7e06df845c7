"""A node: how requests come to its instances, and what becomes of them there.

It is a ``SingleNode`` where each instance takes one request at a time, a ``DeferredNode`` where the work goes on
elsewhere meanwhile, a ``HandOverNode`` where another process does it, a ``BatchingNode`` where it takes batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import perf_counter, sleep
from typing import Any, Protocol

from torchpipe_py.errors import (
    BackendError,
    DeadlineExceeded,
    EngineUnavailable,
    NoResult,
    Overloaded,
    PipeClosed,
    WorkerDied,
    describe,
    logger,
)
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.admission import ComputeTimes, ControlledDelay
from torchpipe_py.runtime.idle import Idle
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.ordering import Order
from torchpipe_py.runtime.record.statistics import summed
from torchpipe_py.runtime.request import Caller, Request

_AT_ONCE = 0.002  # seconds from the entry into a queue to an instance that was idle
_PAUSE = 0.05  # seconds after an exception in the loop itself, so that one that comes at once does not take a core

Fail = Callable[[Request, BaseException], object]

Around = Callable[[Sequence[Request], float, Callable[[], Any]], Any]
"""``around(requests, started, run)`` calls ``run``, which runs a backend on them, in a context of theirs."""


class Source(Protocol):
    """Where requests wait before they come to a pipe: the leaders of the nodes that they enter fetch them."""

    def fetch(self, node: Node, /) -> None:
        """Bring what is there, on the calling thread. The node's leader comes again before it sleeps."""

    def announce(self, node: Node, /) -> bool:
        """The node's leader is about to sleep: bring what comes, until it fetches; whether something is there now."""

    def together(self) -> AbstractContextManager[None]:
        """What the calling thread completes meanwhile is told at once at the end."""


class RequestQueue:
    """Requests that are ``normal`` in their order, and those of ``low`` priority, which come when no others wait.

    Of those that have waited for ``AGING`` seconds one comes for every ``AGED`` others. Any thread may add and take.
    """

    # NOTE: two deques for whoever asks, since a method that says whether one is left takes a tenth of a short request.
    __slots__ = ("_since_aged", "low", "normal")
    AGING, AGED = 1.0, 3

    def __init__(self) -> None:
        self.normal: deque[Request] = deque()
        self.low: deque[Request] = deque()
        self._since_aged = 0

    def of(self, request: Request) -> deque[Request]:
        """Where the request waits."""
        return self.low if request.priority else self.normal

    def take(self) -> Request:
        """The next one, removed; ``IndexError`` if there is none."""
        if self.low:
            with suppress(IndexError):  # another thread may take it
                if self._since_aged >= self.AGED and self.low[0].arrived + self.AGING <= perf_counter():
                    self._since_aged = 0
                    return self.low.popleft()
            self._since_aged += 1
            try:
                return self.normal.popleft()
            except IndexError:
                return self.low.popleft()
        return self.normal.popleft()


class Node:
    """Instances, their queue, and the outcome of each request that they run. It is made when they are set up.

    ``put`` may be called from any thread. ``deliver(request)`` takes on what is finished, on the thread that finished
    it; ``fail(request, error)`` completes what cannot go on. ``upstream`` holds the nodes from which a request can
    still reach this one, perhaps itself, and ``both_ways`` other nodes that come both before and after this one, in
    however many steps; they and ``deliver`` are set before the first request. ``waiting``, shared by
    the nodes of a pipe, holds those whose leader waits for company: an instance that has delivered its batch wakes the
    leaders for whom nothing is under way any more. ``around`` runs each ``forward`` where spans are made of requests.
    A batch is delivered inside ``together()``. With ``delay``, requests that are not worth computing any more are
    refused when they leave the queue, and the leader makes batches that meet their deadlines. With ``order``, requests
    come by ``order.put``.
    """

    idle: Idle
    upstream: Sequence[Node]
    both_ways: Collection[Node]
    deliver: Callable[[Request], object]

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Any]) -> None:
        self.name = name
        self.label = instances[0].backend.config.label
        self.instances = instances
        self.max = max(instance.max for instance in instances)
        self.min = min(instance.min for instance in instances)
        self.fail = fail
        self.is_closing = False
        self.around: Around | None = None
        self.times = ComputeTimes()
        self.delay: ControlledDelay | None = None
        self.order: Order | None = None
        self.together: Callable[[], AbstractContextManager[None]] = nullcontext
        self._waiting = waiting
        self._queue = RequestQueue()
        self._reached: set[Request] = set()  # requests that callers are about to run here
        self._paused: set[Instance] = set()

    def keep_order(self, ordered_by: str, state_seconds: float) -> None:
        """Before it is connected: take one request of each key at a time, with the key's state."""
        self.order = Order(self.name, ordered_by, state_seconds, self.put, self.fail)
        self.fail = self.order.fail

    @property
    def entrance(self) -> Callable[[Request], object]:
        """Where requests are brought to."""
        return self.put if self.order is None else self.order.put

    def connect(self, deliver: Callable[[Request], object]) -> None:
        """Where requests go on to."""
        self.deliver = deliver if self.order is None else self.order.delivering(deliver)

    def put(self, request: Request) -> None:
        """Queue a request, from any thread; that of a blocked caller may stay with its thread instead."""
        if request.caller is not None and self._stays_with_caller(request, request.caller):
            return
        request.caller = None
        self._queue.of(request).append(request)
        if self.idle.to_wake:
            self.idle.wake_one()
        if self.is_closing:
            self._fail_queued()

    def _stays_with_caller(self, request: Request, caller: Caller) -> bool:
        """Whether the caller's thread is to run the request here itself, when it comes to that."""
        return False

    def serve(self, instance: Instance) -> None:
        """Run what comes until the node is closed: the main loop of an instance's thread, which no exception ends."""
        while True:
            try:
                self._serve(instance)
                return
            except BaseException as error:
                for request in instance.taken:
                    self.fail(request, self._backend_error(error))
                instance.rest()
                self._wake_leaders()
                logger.error("node %r: instance %d goes on after %s", self.name, instance.index, describe(error))
                sleep(_PAUSE)

    def _serve(self, instance: Instance) -> None:
        """Run what comes until the node is closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Let every instance finish its batch and end; what is still queued fails with ``PipeClosed``."""
        self.is_closing = True
        if self.order is not None:
            self.order.close()
        self._fail_queued()
        self.idle.close()

    @contextmanager
    def paused(self, instance: Instance) -> Iterator[None]:
        """Meanwhile the instance's batch counts as not under way: its backend waits for what other nodes do."""
        busy, instance.busy = instance.busy, 0
        self._paused.add(instance)
        self._wake_leaders()
        try:
            with instance.waiting():
                yield
        finally:
            self._paused.discard(instance)
            instance.busy = busy

    def load(self) -> int:
        """Requests here that are not delivered yet, and could be; a moment's estimate."""
        if len(self._paused) == len(self.instances):
            return 0  # what is queued has to wait for the other nodes
        here = len(self._reached) + sum(instance.busy for instance in self.instances)
        return self.queued() + self._out_of_turn() + here

    def queued(self) -> int:
        """Requests that wait here for an instance; a moment's estimate."""
        return 0 if self.is_closing else len(self._queue.normal) + len(self._queue.low)

    def _out_of_turn(self) -> int:
        """Requests that wait for another one of their key: those of other keys need not wait for them."""
        return 0 if self.order is None or self.is_closing else self.order.waiting()

    def queued_before(self, priority: int) -> int:
        """Requests that come before one of this priority; a moment's estimate."""
        return self.queued() - (0 if priority else len(self._queue.low))

    def busy(self) -> int:
        """Instances that have requests."""
        return sum(1 for instance in self.instances if instance.busy)

    def expected_wait(self, now: float, priority: int = 0) -> float:
        """How long a request that comes now waits for an instance, by recent compute times, seconds."""
        return self.times.wait(self.queued_before(priority), self.remaining(now), self.max, now)

    def remaining(self, now: float) -> list[float]:
        """Seconds until each instance is free, by recent compute times."""
        return [self.times.remaining(each.busy, each.started, now) for each in self.instances]

    def expected_compute(self, now: float) -> float:
        """How long it is computed then, seconds."""
        return self.times.expected(min(self.max, self.queued_before(0) + 1), now)

    def stats(self) -> dict[str, Any]:
        """The node now, and since it started; see ``torchpipe_py.runtime.record.statistics``.

        ``alive`` counts the instances whose thread runs, ``busy`` those that have requests. ``oldest_batch_s`` is how
        long the ``forward`` runs that has run longest, 0.0 where none does.
        """
        now = perf_counter()
        return {
            "instances": len(self.instances),
            "alive": sum(1 for instance in self.instances if instance.is_alive),
            "min": self.min,
            "max": self.max,
            "queued": self.queued() + self._out_of_turn(),
            "busy": self.busy(),
            "oldest_batch_s": max(instance.running_s(now) for instance in self.instances),
            **summed([instance.record for instance in self.instances]),
        }

    # -- outcomes -------------------------------------------------------------------------------------------------

    def _starts(self, instance: Instance, request: Request, now: float, size: int = 1) -> bool:
        """Whether the request is to be run in a batch of ``size``, its dict ready for that; else it is completed."""
        if request.done:
            if self.order is not None:
                self.order.leave(request)
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
        # A result or an error is what this backend says, never what an earlier one said.
        request.data.pop(TASK_RESULT_KEY, None)
        request.data.pop(TASK_ERROR_KEY, None)
        return True

    def _is_worth_it(self, delay: ControlledDelay, instance: Instance, request: Request, now: float, size: int) -> bool:
        """Whether the request can meet its deadline, or, without one, has not waited too long; else it is completed."""
        if request.deadline is None and not delay.sheds:
            return True
        waited, compute = now - request.arrived, self.times.expected(size, now)
        if request.deadline is not None:
            # NOTE: what has not waited is run even if the means say that it takes too long: else nothing corrects them.
            if now + (compute if waited > _AT_ONCE else 0.0) < request.deadline:
                return True
            self._expire(instance, request)
        elif not request.priority and delay.took(waited, compute, now):
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
        for request in [*self._queue.normal, *self._queue.low]:
            self._fail_closed(request)

    def _wake_leaders(self) -> None:
        for node in list(self._waiting):
            if not node.is_awaiting():
                node.idle.wake_leader()
