"""Nodes whose instances take one request at a time, and nodes whose work continues elsewhere."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from threading import get_ident
from time import perf_counter

from torchpipe_py.backends.base import Data, explain_returned
from torchpipe_py.backends.current import CURRENT
from torchpipe_py.backends.deferred import DeferredBackend
from torchpipe_py.errors import DeadlineExceeded, PipeClosed
from torchpipe_py.runtime.nodes.idle import IdleStack
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.node import Node
from torchpipe_py.runtime.request import Caller, Request

_HAND_OVER = 5e-5  # seconds to wake a sleeping thread


class SingleNode(Node):
    """A node without batches and without a leader: each instance takes one request at a time.

    If the backend runs on any thread, a blocked caller runs it instead of an idle instance: waking the instance and
    being woken again would cost more than most images. If there are several instances, one is reserved for items that
    are not large, so that these never wait for a large one.
    """

    def __init__(self, name: str, instances: Sequence[Instance]) -> None:
        super().__init__(name, instances)
        self._idle: IdleStack[Instance] = IdleStack(self._queue)
        self._any_thread = all(instance.backend.any_thread() for instance in instances)
        self._large: deque[Request] = deque()  # large items that wait for others to end
        self._large_left = len(instances) - 1  # how many more may run
        self._large_lock = threading.Lock()  # for the two above

    def put(self, request: Request) -> None:
        caller = request.caller
        if caller is not None:
            if self._suits(caller):
                self._reached.add(request)
                caller.append((self, request))
                return
            request.caller = None
        self._queue.put(request)
        self._idle.wake_one()
        if self.is_closing:
            self._fail_queued()

    def _suits(self, caller: Caller) -> bool:
        """Whether a blocked caller should run a request here itself."""
        if not caller or not self._any_thread:
            return self._any_thread
        # One of several branches stays; more stay only if a hand-over would take longer than the backend.
        record = self.instances[0].record
        return record.compute_time <= _HAND_OVER * record.singles

    def run_on_caller(self, request: Request) -> None:
        """Run the backend on the calling thread instead of an idle instance; queue the request if none is idle.

        ``CURRENT.instance`` then is that instance, until the caller resets it.
        """
        instance = self._idle.borrow()
        if instance is None:
            request.caller = None
            self.put(request)
            self._reached.discard(request)
            return
        try:
            CURRENT.instance = instance
            instance.busy = 1
            instance.stand_ins.add(get_ident())
            self._reached.discard(request)
            self._run(instance, request)
        finally:
            instance.started = instance.busy = 0
            instance.stand_ins.clear()
            self._idle.give_back(instance)
        if self._waiting:
            self._wake_leaders()

    def _serve(self, instance: Instance) -> None:
        take, run, waiting = self._queue.take, self._run, self._waiting
        while True:
            request = take(perf_counter())
            if request is None:
                if self._idle.sleep(instance):
                    continue
                return
            instance.taken = (request,)
            instance.busy = 1
            run(instance, request)
            del request  # an idle instance must not keep its last request alive
            instance.taken = ()
            # NOTE: reset busy only after delivery, so that a request always counts in some node's load.
            instance.started = instance.busy = 0
            if waiting:
                self._wake_leaders()

    def _run(self, instance: Instance, request: Request) -> None:
        """Run the backend and deliver or fail the request, which may already be over; or put a large one aside."""
        is_large = len(self.instances) > 1 and self._is_large(instance, request)
        if is_large and not self._reserve_or_put_aside(request):
            return
        try:
            instance.started = start = perf_counter()
            if self._begin_or_complete(instance, request, start):
                self._compute(instance, request, start)
        finally:
            if is_large:
                self._release_large()

    def queued(self) -> int:
        return super().queued() + (0 if self.is_closing else len(self._large))

    def _queued_requests(self) -> list[Request]:
        return [*super()._queued_requests(), *self._large.copy()]

    def idle(self) -> int:
        return self._idle.idle_count()

    def _fail_queued(self) -> None:
        super()._fail_queued()
        with self._large_lock:
            large = [*self._large]
            self._large.clear()
        for request in large:
            self._fail_closed(request)

    def _end_instances(self) -> None:
        self._idle.close()

    def _is_large(self, instance: Instance, request: Request) -> bool:
        try:
            return instance.backend.is_large(request.data)
        except BaseException:  # `forward` gets the same dict, and reports the error
            return False

    def _reserve_or_put_aside(self, request: Request) -> bool:
        """Let one more large request run, or put it aside until another one has ended; returns whether it may run."""
        with self._large_lock:
            may_run = self._large_left > 0
            if may_run:
                self._large_left -= 1
            else:
                request.caller = None
                self._large.append(request)
        if not may_run and self.is_closing:
            self._fail_queued()
        return may_run

    def _release_large(self) -> None:
        """A large request has ended: queue those put aside, since some may be over."""
        with self._large_lock:
            self._large_left += 1
            # This instance checks the queue next, or is given back.
            for large in reversed(self._large):
                self._queue.put_back(large)
            self._large.clear()

    def _compute(self, instance: Instance, request: Request, start: float) -> None:
        instance.deadline = request.deadline
        try:
            try:
                forward: Callable[[list[Data]], object] = instance.backend.forward
                if self._contexts:
                    returned = self._run_around((request,), start, partial(forward, [request.data]))
                else:
                    returned = forward([request.data])
                if returned is not None:
                    explain_returned(instance.backend, (request.data,), returned)
            finally:
                end = perf_counter()
                instance.record.single(request, start, end)
                self.times.add(1, end - start, end)
        except BaseException as error:
            self._fail_defect(instance, request, error)
        else:
            self._deliver_result(instance, request)


class DeferredNode(SingleNode):
    """A node with deferred backends: a request continues on the thread that finishes it."""

    def _compute(self, instance: Instance, request: Request, start: float) -> None:
        record, backend = instance.record, instance.backend
        record.queued(request, start)

        def finish(error: BaseException | None) -> None:
            record.traced((request,), start, start, perf_counter())
            if error is None:
                self._deliver_result(instance, request)
            elif isinstance(error, (PipeClosed, DeadlineExceeded, CancelledError)):
                self._fail(request, error)  # an error that ended the requests it started ends it, too
            else:
                self._fail_defect(instance, request, error)

        assert isinstance(backend, DeferredBackend)
        try:
            self._run_around((request,), start, partial(backend.start, request.data, finish, request))
        except BaseException as error:
            self._fail_defect(instance, request, error)
        record.computed(perf_counter() - start)  # its waiting time is counted by other nodes
