"""A node: brings requests to its instances and decides the outcome of each.

In a ``SingleNode`` each instance takes one request at a time; in a ``DeferredNode`` the work continues elsewhere
meanwhile; in a ``HandOverNode`` another process does it; in a ``BatchingNode`` an instance takes batches.
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
from torchpipe_py.runtime.nodes.idle import Idle
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.ordering import Order
from torchpipe_py.runtime.record.statistics import summed
from torchpipe_py.runtime.request import Caller, Request

_AT_ONCE = 0.002  # seconds from the entry into a queue to an idle instance
_PAUSE = 0.05  # seconds after an exception in the loop itself, so that a repeated one does not take a whole core

Fail = Callable[[Request, BaseException], object]

Around = Callable[[Sequence[Request], float, Callable[[], Any]], Any]
"""``around(requests, started, run)`` calls ``run``, which runs a backend, in a context that belongs to the requests."""


class Source(Protocol):
    """A queue before a pipe: the leaders of the nodes that requests enter fetch the requests from it."""

    def fetch(self, node: Node, /) -> None:
        """Submit all waiting requests, on the calling thread. The node's leader calls it again before it sleeps."""

    def announce(self, node: Node, /) -> bool:
        """The node's leader will sleep: submit new requests until its next ``fetch``; returns whether any wait now."""

    def together(self) -> AbstractContextManager[None]:
        """A context that collects the requests completed on the calling thread and reports them together at its end."""


class RequestQueue:
    """``normal`` requests in order, and ``low`` priority requests, which are taken when no normal ones wait.

    One low-priority request that waited ``AGING`` seconds is taken after every ``AGED`` others. Thread-safe.
    """

    # NOTE: callers look at the deques directly: a method call to check for requests would cost a tenth of a short one.
    __slots__ = ("_since_aged", "low", "normal")
    AGING, AGED = 1.0, 3

    def __init__(self) -> None:
        self.normal: deque[Request] = deque()
        self.low: deque[Request] = deque()
        self._since_aged = 0

    def of(self, request: Request) -> deque[Request]:
        """The deque in which the request waits."""
        return self.low if request.priority else self.normal

    def take(self) -> Request:
        """Remove and return the next request; ``IndexError`` if there is none."""
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
    """Instances, their queue, and the outcome of each request that they run. It is created once they are set up.

    ``put`` may be called from any thread. ``deliver(request)`` passes a finished request on, on the thread that
    finished it; ``fail(request, error)`` completes a request with an error. ``upstream`` holds the nodes from which a
    request can still reach this one, perhaps itself, and ``both_ways`` the other nodes that are both before and after
    this one, at any distance; they and ``deliver`` are set before the first request. ``waiting``, shared by the nodes
    of a pipe, holds nodes whose leader waits to fill a batch: an instance that has delivered its batch wakes the
    leaders that no request can reach any more. ``around`` runs each ``forward`` if spans are recorded. A batch is
    delivered inside ``together()``. With ``delay``, requests that are no longer worth computing are refused when they
    leave the queue, and the leader forms batches that meet their deadlines. With ``order``, requests enter by
    ``order.put``.
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
        """Process one request of each key at a time, with the key's state; to be called before ``connect``."""
        self.order = Order(self.name, ordered_by, state_seconds, self.put, self.fail)
        self.fail = self.order.fail

    @property
    def entrance(self) -> Callable[[Request], object]:
        """The function that brings a request to the node."""
        return self.put if self.order is None else self.order.put

    def connect(self, deliver: Callable[[Request], object]) -> None:
        """Set the function that takes finished requests."""
        self.deliver = deliver if self.order is None else self.order.delivering(deliver)

    def put(self, request: Request) -> None:
        """Queue a request, from any thread; a blocked caller's request may stay on the caller's thread instead."""
        if request.caller is not None and self._stays_with_caller(request, request.caller):
            return
        request.caller = None
        queue = self._queue
        (queue.low if request.priority else queue.normal).append(request)
        if self.idle.to_wake:
            self.idle.wake_one()
        if self.is_closing:
            self._fail_queued()

    def _stays_with_caller(self, request: Request, caller: Caller) -> bool:
        """Whether the caller's thread will run the request here itself."""
        return False

    def serve(self, instance: Instance) -> None:
        """Run requests until the node is closed: the main loop of an instance's thread, which survives exceptions."""
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
        """Run requests until the node is closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Let every instance finish its batch and end; requests still queued fail with ``PipeClosed``."""
        self.is_closing = True
        if self.order is not None:
            self.order.close()
        self._fail_queued()
        self.idle.close()

    @contextmanager
    def paused(self, instance: Instance) -> Iterator[None]:
        """A context in which the instance's batch does not count as under way: its backend waits for other nodes."""
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
        """Number of requests here that could be delivered and are not yet; a momentary estimate."""
        if len(self._paused) == len(self.instances):
            return 0  # queued requests have to wait for the other nodes
        here = len(self._reached) + sum(instance.busy for instance in self.instances)
        return self.queued() + self._out_of_turn() + here

    def queued(self) -> int:
        """Number of requests that wait here for an instance; a momentary estimate."""
        return 0 if self.is_closing else len(self._queue.normal) + len(self._queue.low)

    def _out_of_turn(self) -> int:
        """Number of requests that wait for another one of their key, and so do not delay other keys."""
        return 0 if self.order is None or self.is_closing else self.order.waiting()

    def queued_before(self, priority: int) -> int:
        """Number of requests before a new one of this priority; a momentary estimate."""
        return self.queued() - (0 if priority else len(self._queue.low))

    def busy(self) -> int:
        """Number of instances that have requests."""
        return sum(1 for instance in self.instances if instance.busy)

    def expected_wait(self, now: float, priority: int = 0) -> float:
        """Seconds that a request that arrives now waits for an instance, from recent compute times."""
        return self.times.wait(self.queued_before(priority), self.remaining(now), self.max, now)

    def remaining(self, now: float) -> list[float]:
        """Seconds until each instance is free, from recent compute times."""
        return [self.times.remaining(each.busy, each.started, now) for each in self.instances]

    def expected_compute(self, now: float) -> float:
        """Expected compute seconds of that request."""
        return self.times.expected(min(self.max, self.queued_before(0) + 1), now)

    def stats(self) -> dict[str, Any]:
        """The node's current state and its totals; see ``torchpipe_py.runtime.record.statistics``.

        ``alive`` counts the instances whose thread runs, ``busy`` those that have requests. ``oldest_batch_s`` is the
        running time of the oldest ``forward`` still running, 0.0 if none runs.
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
        """Whether to run the request in a batch of ``size``; prepares its dict, or else completes the request."""
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
        # A result or an error must come from this backend, never from an earlier one.
        request.data.pop(TASK_RESULT_KEY, None)
        request.data.pop(TASK_ERROR_KEY, None)
        return True

    def _is_worth_it(self, delay: ControlledDelay, instance: Instance, request: Request, now: float, size: int) -> bool:
        """Whether the request can meet its deadline or, without one, did not wait too long; else completes it."""
        waited = now - request.arrived
        if request.deadline is None and waited <= delay.calm_wait:
            return True
        compute = self.times.expected(size, now)
        if request.deadline is not None:
            # NOTE: a request that did not wait is run even if the means predict it is too slow: this corrects them.
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
        """Fail a request whose deadline passed before it was run, or would pass while it runs."""
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
        """Whether the caller gets the error unchanged, not as a ``BackendError``."""
        kind = type(error)  # ``__class__`` of an exception may raise
        if issubclass(kind, PipeClosed):
            return self.is_closing  # for example, when the requests of a jump were closed
        if issubclass(kind, DeadlineExceeded):
            return request.deadline is not None and perf_counter() >= request.deadline
        return issubclass(kind, (WorkerDied, EngineUnavailable))

    def _backend_error(self, error: BaseException) -> BackendError:
        """The error that a caller gets for an exception in a backend."""
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
