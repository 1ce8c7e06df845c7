"""A node: brings requests to its instances and decides the outcome of each.

In a ``SingleNode`` each instance takes one request at a time; in a ``DeferredNode`` the work continues elsewhere
meanwhile; in a ``HandOverNode`` another process does it; in a ``BatchingNode`` an instance takes batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

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
from torchpipe_py.runtime.admission import DEADLINE_MARGIN, ComputeTimes
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.queues import RequestQueue
from torchpipe_py.runtime.nodes.wiring import Wiring
from torchpipe_py.runtime.record.statistics import summed
from torchpipe_py.runtime.request import Request

_AT_ONCE = 0.002  # seconds from the entry into a queue to an idle instance
_PAUSE = 0.05  # seconds after an exception in the loop itself, so that a repeated one does not take a whole core


class Node:
    """Instances, their queue, and the outcome of each request that they run.

    It is created once its instances are set up, and gets requests once it is open. ``put`` may be called from any
    thread.
    """

    def __init__(self, name: str, instances: Sequence[Instance]) -> None:
        self.name = name
        self.label = instances[0].backend.config.label
        self.instances = instances
        self.max = max(instance.max for instance in instances)
        self.min = min(instance.min for instance in instances)
        self.is_closing = False
        self.times = ComputeTimes()
        self._queue = RequestQueue()
        self._reached: set[Request] = set()  # requests that callers are about to run here
        self._paused: set[Instance] = set()

    def open(self, wiring: Wiring) -> None:
        """Connect the node; requests may come from now on."""
        self._wiring = wiring
        self._fail, self._deliver, self._waiting = wiring.fail, wiring.deliver, wiring.waiting
        self._order, self._target, self._contexts = wiring.order, wiring.target, wiring.contexts

    def put(self, request: Request) -> None:
        """Queue a request, from any thread; a blocked caller's request may stay on the caller's thread instead."""
        raise NotImplementedError

    def serve(self, instance: Instance) -> None:
        """Run requests until the node is closed: the main loop of an instance's thread, which survives exceptions."""
        while True:
            try:
                self._serve(instance)
                return
            except BaseException as error:
                for request in instance.taken:
                    self._fail(request, self._backend_error(error))
                instance.rest()
                self._wake_leaders()
                logger.error("node %r: instance %d goes on after %s", self.name, instance.index, describe(error))
                sleep(_PAUSE)

    def _serve(self, instance: Instance) -> None:
        """Run requests until the node is closed."""
        raise NotImplementedError

    def run_on_caller(self, request: Request) -> None:
        """Run a request that stayed with its blocked caller, on this thread."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Fail each later request with ``PipeClosed``; the first step of closing."""
        self.is_closing = True

    def close(self) -> None:
        """Let every instance finish its batch and end; requests still queued fail with ``PipeClosed``."""
        self.is_closing = True
        if self._order is not None:
            self._order.close()
        self._fail_queued()
        self._end_instances()

    def _end_instances(self) -> None:
        """Wake all instances, which end since the node is closing."""
        raise NotImplementedError

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

    # -- load ---------------------------------------------------------------------------------------------------------

    def load(self) -> int:
        """Number of requests here that could be delivered and are not yet; a momentary estimate."""
        if len(self._paused) == len(self.instances):
            return 0  # queued requests have to wait for the other nodes
        here = len(self._reached) + sum(instance.busy for instance in self.instances)
        return self.queued() + self._out_of_turn() + here

    def queued(self) -> int:
        """Number of requests that wait here for an instance; a momentary estimate."""
        return 0 if self.is_closing else len(self._queue)

    def queued_low(self) -> int:
        """Number of these that have low priority."""
        return 0 if self.is_closing else len(self._queue.low)

    def pending(self) -> int:
        """Number of requests that wait here and are still wanted.

        A request whose client has left stays queued until its turn, when it is dropped.
        """
        waiting = [] if self._order is None else self._order.waiting_requests()
        return 0 if self.is_closing else sum(not request.done for request in [*self._queued_requests(), *waiting])

    def _queued_requests(self) -> list[Request]:
        """A copy of all requests that wait here for an instance."""
        return self._queue.requests()

    def _out_of_turn(self) -> int:
        """Number of requests that wait for another one of their key, and so do not delay other keys."""
        return 0 if self._order is None or self.is_closing else self._order.waiting()

    def busy(self) -> int:
        """Number of instances that have requests."""
        return sum(1 for instance in self.instances if instance.busy)

    def idle(self) -> int:
        """Number of instances that sleep until a request comes."""
        raise NotImplementedError

    def is_idle(self) -> bool:
        """Whether no request is here, and all instances sleep."""
        return not self.load() and self.idle() == len(self.instances)

    def expected(self, now: float, priority: int = 0, is_exact: bool = False) -> tuple[float, float]:
        """Seconds that a request that arrives now waits for an instance and computes, from recent compute times.

        If ``is_exact``, requests whose clients have left do not count, which takes longer to find out.
        """
        if is_exact:
            before = sum(not each.done and priority >= each.priority for each in self._queued_requests())
        else:
            before = self.queued() - (0 if priority else self.queued_low())
        if not before and self.busy() < len(self.instances):
            return 0.0, self.times.expected(1, now)
        wait = self.times.wait(before, self.remaining(now), self.max, now)
        return wait, self.times.expected(min(self.max, before + 1), now)

    def remaining(self, now: float) -> list[float]:
        """Seconds until each instance is free, from recent compute times."""
        return [self.times.remaining(each.busy, each.started, now) for each in self.instances]

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
            "queued": self.pending(),
            "busy": self.busy(),
            "oldest_batch_s": max(instance.running_s(now) for instance in self.instances),
            **summed([instance.record for instance in self.instances]),
        }

    # -- outcomes -------------------------------------------------------------------------------------------------

    def _begin_or_complete(self, instance: Instance, request: Request, now: float, size: int = 1) -> bool:
        """Prepare the request to be run in a batch of ``size``, or complete it if it is not to be run.

        Returns whether to run it.
        """
        if request.done:
            if self._order is not None:
                self._order.leave(request)
            return False
        if self.is_closing:
            self._fail_closed(request)
            return False
        if self._target.is_on:
            if not self._limit_or_complete(instance, request, now, size):
                return False
        elif request.deadline is not None and now >= request.deadline:
            self._expire(instance, request)
            return False
        # A result or an error must come from this backend, never from an earlier one.
        data = request.data
        if TASK_RESULT_KEY in data:
            del data[TASK_RESULT_KEY]
        if TASK_ERROR_KEY in data:
            del data[TASK_ERROR_KEY]
        return True

    def _limit_or_complete(self, instance: Instance, request: Request, now: float, size: int) -> bool:
        """Complete the request if it cannot meet its deadline or, without one, has waited too long."""
        waited = now - request.arrived
        if request.deadline is not None:
            # NOTE: a request that did not wait is run even if the means predict it is too slow: this corrects them.
            needed = self.times.expected(size, now) + DEADLINE_MARGIN if waited > _AT_ONCE else 0.0
            if now + needed < request.deadline:
                return True
            self._expire(instance, request)
            return False
        request.waited += max(0.0, waited - self._batch_wait())
        if request.waited <= self._target.least or request.priority or _is_inner(request) or not self.queued():
            return True  # where no other request waits, to compute it delays none
        if not self._target.is_exceeded(request.waited, self._wiring.path_compute(now)):
            return True
        instance.record.shed += 1
        text = (
            f"waited {1000 * request.waited:.0f} ms until node {self.name!r}, which has more requests than it can take"
        )
        self._fail(request, Overloaded(text, retry_after_ms=max(1, round(1000 * self.expected(now)[0]))))
        return False

    def _batch_wait(self) -> float:
        """Seconds that a request may wait for others to share its batch, whatever the load."""
        return 0.0

    def _expire(self, instance: Instance, request: Request) -> None:
        """Fail a request whose deadline passed before it was run, or would pass while it runs."""
        if not request.done:
            instance.record.expired += 1
        self._fail(request, DeadlineExceeded(f"deadline passed while queued at node {self.name!r}"))

    def _deliver_result(self, instance: Instance, request: Request) -> None:
        try:
            data = request.data
            if TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
                data[TASK_ERROR_KEY] = NoResult(f"node {self.name!r}: {self.label} gave no result")
            self._deliver(request)
        except BaseException as error:
            self._fail_defect(instance, request, error)

    def _fail_defect(self, instance: Instance, request: Request, error: BaseException) -> None:
        instance.record.failed += 1
        if request.links is not None and request.links.timeline is not None:
            request.links.timeline.fail(request.node, error)
        request.data.pop(TASK_RESULT_KEY, None)
        self._fail(request, self._backend_error(error) if self._is_defect(request, error) else error)

    def _is_defect(self, request: Request, error: BaseException) -> bool:
        """Whether the caller gets the error as the cause of a ``BackendError``, else unchanged."""
        kind = type(error)  # ``__class__`` of an exception may raise
        if issubclass(kind, PipeClosed):
            return not self.is_closing  # for example, when the requests of a jump were closed
        if issubclass(kind, DeadlineExceeded):
            return request.deadline is None or perf_counter() < request.deadline
        return not issubclass(kind, (WorkerDied, EngineUnavailable))

    def _backend_error(self, error: BaseException) -> BackendError:
        """The error that a caller gets for an exception in a backend."""
        failure = BackendError(f"node {self.name!r}: {self.label}: {describe(error)}")
        failure.__cause__ = error
        return failure

    def _fail_closed(self, request: Request) -> None:
        self._fail(request, PipeClosed(f"the pipe was closed while the request was queued at node {self.name!r}"))

    def _fail_queued(self) -> None:
        for request in self._queue.clear():
            self._fail_closed(request)

    def _run_around(self, requests: Sequence[Request], start: float, run: Callable[[], Any]) -> Any:
        """Run a backend, in the context that belongs to the requests if there is one."""
        return self._contexts[0](requests, start, run) if self._contexts else run()

    def _wake_leaders(self) -> None:
        """Wake the leaders that wait to fill a batch and that no request can reach any more."""
        for node in list(self._waiting):
            if not node.is_awaiting():
                node.wake_leader()


def _is_inner(request: Request) -> bool:
    """Whether a node of another graph started the request, which is part of that node's computation."""
    return request.links is not None and request.links.is_inner
