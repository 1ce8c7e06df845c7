"""How the requests of a node come to its instances, and what becomes of them there: one lane for each node.

``SingleLane`` where each instance takes one request at a time, ``DeferredLane`` where the work goes on elsewhere
meanwhile, ``BatchingLane`` where an instance takes batches. Which it is, is settled once, after set-up.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter, sleep
from typing import Any, Protocol, TypeVar

from torchpipe_py.backends.base import Data, DeferredBackend, HandOverBackend, run_padded
from torchpipe_py.errors import (
    BackendError,
    DeadlineExceeded,
    EngineUnavailable,
    NoResult,
    PipeClosed,
    WorkerDied,
    describe,
)
from torchpipe_py.images.memory import CURRENT
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.batching import BatchQueue
from torchpipe_py.runtime.idle import IdleStack, Leadership
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.request import CallerThread, Request

_HAND_OVER = 5e-5  # seconds from one thread to another that sleeps
_DEADLINE_MARGIN = 0.002  # seconds for waking up, routing and the way back

_PAUSE = 0.05  # seconds after an exception in the loop itself, so that one that comes at once does not take a core

Fail = Callable[[Request, BaseException], object]

T = TypeVar("T")


class Around(Protocol):
    """Runs a backend on requests, as of the time it started, in a context of their own."""

    def __call__(self, requests: Sequence[Request], started: float, run: Callable[[], T]) -> T: ...


logger = logging.getLogger("torchpipe_py")


class Lane:
    """The queue of a node, and the outcome of each request that its instances run.

    ``put`` may be called from any thread. ``deliver(request)`` takes on what is finished, on the thread that finished
    it; ``fail(request, error)`` completes what cannot go on. ``upstream`` holds the lanes from which a request can
    still reach this one, perhaps itself; it and ``deliver`` are set before the first request. ``waiting``, shared by
    the lanes of a pipe, holds those whose leader waits for company: an instance that has delivered its batch wakes the
    leaders for whom nothing is under way any more. ``around`` runs each ``forward`` where spans are made of requests.
    """

    idle: IdleStack[Instance] | Leadership
    upstream: Sequence[Lane]
    deliver: Callable[[Request], object]

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[BatchingLane]) -> None:
        self.name = name
        self.label = instances[0].backend.config.label
        self.instances = instances
        self.fail = fail
        self.is_closing = False
        self.around: Around | None = None
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

    def expected_wait(self) -> float:
        """How long the node needs for what it holds, by its measured compute time, seconds."""
        records = [instance.record for instance in self.instances]
        done = sum(record.requests + record.singles for record in records)
        spent = sum(record.compute_time for record in records)
        return self.load() * spent / done / len(records) if done else 0.0

    # -- outcomes -------------------------------------------------------------------------------------------------

    def _starts(self, instance: Instance, request: Request, now: float) -> bool:
        """Whether the request is to be run, with its dict ready for that; where it is not, it is completed."""
        if request.done:
            return False
        if self.is_closing:
            self._fail_closed(request)
            return False
        if request.deadline is not None and now >= request.deadline:
            instance.record.expired += 1
            self.fail(request, DeadlineExceeded(f"deadline passed while queued at node {self.name!r}"))
            return False
        try:
            # A result or an error is what this backend says, never what an earlier one said.
            request.data.pop(TASK_RESULT_KEY, None)
            request.data.pop(TASK_ERROR_KEY, None)
        except BaseException as error:  # the dict may be of a class of the caller's own
            self._fail_defect(instance, request, error)
            return False
        return True

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


class SingleLane(Lane):
    """Where no batch can form, nobody leads: each instance takes a request for itself.

    Where the backend runs on any thread, the blocked caller of a request stands in for an idle instance: waking one
    and being woken again would cost more than most images. Of several instances one is kept for items that are not
    large, so that these never wait for a large one to end.
    """

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[BatchingLane]) -> None:
        super().__init__(name, instances, fail, waiting)
        self.idle: IdleStack[Instance] = IdleStack(self._queue)
        self._any_thread = all(instance.backend.any_thread() for instance in instances)
        # Large items that wait while as many run as may. NOTE: they go back to the queue whenever one of these ends.
        self._large: deque[Request] = deque()
        self._large_lock = threading.Lock()
        self._large_left = len(instances) - 1

    def _stays_with_caller(self, request: Request, caller: CallerThread) -> bool:
        # One of several branches stays; more of them only where a hand-over would take longer than the backend.
        if not self._any_thread or (caller.reached and not self._is_quick()):
            return False
        self._reached.add(request)
        caller.reached.append((self, request))
        return True

    def _is_quick(self) -> bool:
        record = self.instances[0].record
        return record.compute_time <= _HAND_OVER * record.singles

    def run_on_caller(self, request: Request) -> None:
        """Run the backend on the calling thread, in place of an instance that is idle; queue where none is."""
        outer = CURRENT.waiter
        instance = self.idle.borrow()
        if instance is None:
            request.caller = None
            self.put(request)
            self._reached.discard(request)
            return
        try:
            CURRENT.waiter = instance
            instance.busy, instance.stand_in = 1, threading.get_ident()
            self._reached.discard(request)
            self.run(instance, request)
        finally:
            instance.started = instance.busy = instance.stand_in = 0
            self.idle.give_back(instance)
            CURRENT.waiter = outer
        if self._waiting:
            self._wake_leaders()

    def forget(self, request: Request) -> None:
        """A request that has come here is not run after all."""
        self._reached.discard(request)

    def _serve(self, instance: Instance) -> None:
        take, run, waiting = self._queue.popleft, self.run, self._waiting
        while True:
            try:
                instance.taken = (request := take(),)
            except IndexError:
                if self.idle.sleep(instance):
                    continue
                return
            instance.busy = 1
            run(instance, request)
            del request  # an idle instance keeps nothing of its last one
            instance.taken = ()
            # NOTE: busy ends only after delivery, so that a request is always visible in some node's load.
            instance.started = instance.busy = 0
            if waiting:
                self._wake_leaders()

    def run(self, instance: Instance, request: Request) -> None:
        """Run the backend and deliver or fail the request, which may be over already."""
        instance.started = start = perf_counter()
        if not self._starts(instance, request, start):
            return
        if len(self.instances) > 1 and self._is_large(instance, request):
            self._run_large(instance, request, start)
        else:
            self._compute(instance, request, start)

    def queued(self) -> int:
        return super().queued() + (0 if self.is_closing else len(self._large))

    def _fail_queued(self) -> None:
        with self._large_lock:
            self._queue.extend(self._large)
            self._large.clear()
        super()._fail_queued()

    def _is_large(self, instance: Instance, request: Request) -> bool:
        try:
            return instance.backend.is_large(request.data)
        except BaseException:  # `forward` has the same dict, and says what is wrong with it
            return False

    def _run_large(self, instance: Instance, request: Request, start: float) -> None:
        """Run it, or put it aside until another large one has ended."""
        with self._large_lock:
            may_run = self._large_left > 0
            if may_run:
                self._large_left -= 1
            else:
                request.caller = None
                self._large.append(request)
        if not may_run:
            if self.is_closing:
                self._fail_queued()
            return
        try:
            self._compute(instance, request, start)
        finally:
            with self._large_lock:
                self._large_left += 1
                # All of them, since some may be over. This instance looks into the queue next, or is given back.
                self._queue.extendleft(reversed(self._large))
                self._large.clear()

    def _compute(self, instance: Instance, request: Request, start: float) -> None:
        instance.deadline = request.deadline
        try:
            try:
                if self.around is None:
                    instance.backend.forward([request.data])
                else:
                    self.around((request,), start, partial(instance.backend.forward, [request.data]))
            finally:
                instance.record.single(request, start, perf_counter())
        except BaseException as error:
            self._fail_defect(instance, request, error)
        else:
            self._go_on(instance, request)


class DeferredLane(SingleLane):
    """Where backends are deferred: a request goes on from whatever thread finishes it."""

    def run(self, instance: Instance, request: Request) -> None:
        instance.started = start = perf_counter()
        if not self._starts(instance, request, start):
            return
        record, backend = instance.record, instance.backend
        record.queued(request, start)

        def finish(error: BaseException | None) -> None:
            record.traced((request,), start, start, perf_counter())
            if error is None:
                self._go_on(instance, request)
            elif isinstance(error, (PipeClosed, DeadlineExceeded, CancelledError)):
                self.fail(request, error)  # what ended the request's own requests ends it as well
            else:
                self._fail_defect(instance, request, error)

        assert isinstance(backend, DeferredBackend)
        try:
            if self.around is None:
                backend.start(request.data, finish, request)
            else:
                self.around((request,), start, partial(backend.start, request.data, finish, request))
        except BaseException as error:
            self._fail_defect(instance, request, error)
        record.computed(perf_counter() - start)  # what it waits for, is other nodes' time


class HandOverLane(Lane):
    """Where requests go to another process: on whatever thread brings them, since that waits for nothing."""

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[BatchingLane]) -> None:
        super().__init__(name, instances, fail, waiting)
        self.idle: IdleStack[Instance] = IdleStack(self._queue)
        backend = instances[0].backend
        assert isinstance(backend, HandOverBackend)
        self._backend = backend

    def put(self, request: Request) -> None:
        request.caller = None
        instance, start = self.instances[0], request.arrived
        if not self._starts(instance, request, start):
            return

        def finish(error: BaseException | None) -> None:
            if instance.record.traces:
                instance.record.traced((request,), start, start, perf_counter())
            if error is None:
                self._go_on(instance, request)
            else:
                self.fail(request, error)
            if self._waiting:
                self._wake_leaders()

        try:
            self._backend.start(request.data, finish, request)
        except BaseException as error:
            self._fail_defect(instance, request, error)

    def load(self) -> int:
        return self._backend.pending()

    def expected_wait(self) -> float:
        return self._backend.expected_wait()

    def _serve(self, instance: Instance) -> None:
        while self.idle.sleep(instance):
            pass


class BatchingLane(Lane):
    """One idle instance at a time leads: it collects the next batch, and hands leadership over before it computes."""

    def __init__(
        self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[BatchingLane], timeout: float
    ) -> None:
        super().__init__(name, instances, fail, waiting)
        self._timeout = timeout
        self._batches = BatchQueue(timeout, self._batch_key)
        self.idle: Leadership = Leadership(self._queue, self._batches)

    def queued(self) -> int:
        return 0 if self.is_closing else len(self._queue) + len(self._batches)

    def is_awaiting(self) -> bool:
        """Whether some request in flight could still reach this node."""
        for lane in self.upstream:
            if lane is not self:
                if lane.load():
                    return True
            elif any(instance.busy for instance in self.instances):
                return True  # through a logical node, a request comes by a second time
        return False

    def _serve(self, instance: Instance) -> None:
        while self.idle.lead(instance):
            since = perf_counter()
            instance.taken = batch = self._collect(instance)
            instance.busy = len(batch)
            self.idle.hand_over()
            if not batch:
                continue
            self.run(instance, batch, since)
            instance.taken = batch = []  # an idle instance keeps nothing of its last request
            # NOTE: busy ends only after delivery, so that a request is always visible in some node's load.
            instance.started = instance.busy = 0
            if self._waiting:
                self._wake_leaders()
        if self.idle.lead_last(instance):
            for request in self._batches.clear():
                self._fail_closed(request)

    def _recover(self, instance: Instance, error: BaseException) -> None:
        if self.idle.is_leader(instance):
            instance.taken = [*instance.taken, *self._batches.clear()]
        super()._recover(instance, error)

    def _collect(self, instance: Instance) -> list[Request]:
        """As leader, the next batch; empty where another instance has taken what there was, or the node closes."""
        batches, queue = self._batches, self._queue
        while True:
            while queue:
                try:
                    instance.taken = (queue.popleft(),)
                except IndexError:  # close() empties the queue too
                    break
                try:
                    batches.add(instance.taken[0])
                except BaseException as error:
                    self.fail(instance.taken[0], self._backend_error(error))
            if self.is_closing:
                return batches.clear()
            if not batches:
                return []
            quiet = self._timeout <= 0 or not self.is_awaiting()
            instance.taken = batch = batches.take(instance.max, perf_counter(), quiet, self._lead_time(instance)) or []
            if batch:
                return batch
            self._wait(instance)

    def _wait(self, leader: Instance) -> None:
        """Sleep until a request comes, the next batch closes by the clock, or nothing is under way any more."""
        self._waiting.add(self)
        try:
            # NOTE: looked at again after the entry in `waiting`, or the last wake-up could be missed.
            if self.is_awaiting():
                close = self._batches.next_close(leader.max, self._lead_time(leader))
                if close is not None:
                    self.idle.wait(leader, min(max(0.0, close - perf_counter()), threading.TIMEOUT_MAX))
        finally:
            self._waiting.discard(self)

    def _lead_time(self, instance: Instance) -> float:
        """How long before a deadline a batch must close to meet it, seconds."""
        return 1.5 * instance.last_compute + _DEADLINE_MARGIN

    def _batch_key(self, data: Data) -> Any:
        return self.instances[0].backend.batch_key(data)

    def run(self, instance: Instance, batch: list[Request], collected: float) -> None:
        """Run a batch of which some may be over already; deliver or fail each."""
        instance.started = start = perf_counter()
        requests = [request for request in batch if self._starts(instance, request, start)]
        if not requests:
            return
        if self.around is None:
            errors = self._forward(instance, requests)
        else:
            errors = self.around(requests, start, partial(self._forward, instance, requests))
        now = perf_counter()
        instance.last_compute = now - start
        instance.record.batch(requests, collected, start, now)
        for request in requests:
            if errors and request in errors:
                self._fail_defect(instance, request, errors[request])
            else:
                self._go_on(instance, request)

    def _forward(self, instance: Instance, requests: list[Request]) -> Mapping[Request, BaseException]:
        """Run the backend; the errors of the requests that it failed for."""
        items = [request.data for request in requests]
        instance.deadline = _last_deadline(requests)
        saved: list[Data] = []
        try:
            if len(items) > 1:
                saved = [dict(item) for item in items]
            if len(items) < instance.min:
                run_padded(instance.backend, items)
            else:
                instance.backend.forward(items)
            return {}
        except BaseException as error:
            if len(requests) == 1:
                return {requests[0]: error}
        # After a batch raised: each item alone, from the dict as it was, so that only the bad ones fail.
        errors = {}
        for index, request in enumerate(requests):
            instance.started, instance.deadline = perf_counter(), request.deadline
            try:
                if saved:
                    request.data.clear()
                    request.data.update(saved[index])
                run_padded(instance.backend, [request.data])
            except BaseException as error:
                errors[request] = error
        return errors


def _last_deadline(requests: Sequence[Request]) -> float | None:
    """When the last of them need not be run any more; ``None`` where one has no deadline."""
    last = 0.0
    for request in requests:
        if request.deadline is None:
            return None
        last = max(last, request.deadline)
    return last
