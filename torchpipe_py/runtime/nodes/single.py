"""Nodes whose instances take one request at a time, and nodes whose work continues elsewhere."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data, explain_returned
from torchpipe_py.backends.deferred import DeferredBackend
from torchpipe_py.backends.image.memory import CURRENT
from torchpipe_py.errors import DeadlineExceeded, PipeClosed
from torchpipe_py.runtime.nodes.idle import IdleStack
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.node import Fail, Node
from torchpipe_py.runtime.request import Caller, Request

_HAND_OVER = 5e-5  # seconds to wake a sleeping thread


class SingleNode(Node):
    """A node without batches and without a leader: each instance takes one request at a time.

    If the backend runs on any thread, a blocked caller runs it instead of an idle instance: waking the instance and
    being woken again would cost more than most images. If there are several instances, one is reserved for items that
    are not large, so that these never wait for a large one.
    """

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Any]) -> None:
        super().__init__(name, instances, fail, waiting)
        self.idle: IdleStack = IdleStack(self._queue.normal, self._queue.low)
        self._any_thread = all(instance.backend.any_thread() for instance in instances)
        # Large items that wait for others to end. NOTE: they return to the queue whenever a large one ends.
        self._large: deque[Request] = deque()
        self._large_lock = threading.Lock()
        self._large_left = len(instances) - 1

    def _stays_with_caller(self, request: Request, caller: Caller) -> bool:
        # One of several branches stays; more stay only if a hand-over would take longer than the backend.
        record = self.instances[0].record
        if not self._any_thread or (caller and record.compute_time > _HAND_OVER * record.singles):
            return False
        self._reached.add(request)
        caller.append((self, request))
        return True

    def run_on_caller(self, request: Request) -> None:
        """Run the backend on the calling thread instead of an idle instance; queue the request if none is idle."""
        outer = CURRENT.waiter
        instance = self.idle.borrow()
        if instance is None:
            request.caller = None
            self.put(request)
            self._reached.discard(request)
            return
        try:
            CURRENT.waiter = instance
            instance.busy = 1
            instance.stand_ins.add(get_ident())
            self._reached.discard(request)
            self._run(instance, request)
        finally:
            instance.started = instance.busy = 0
            instance.stand_ins.clear()
            self.idle.give_back(instance)
            CURRENT.waiter = outer
        if self._waiting:
            self._wake_leaders()

    def _serve(self, instance: Instance) -> None:
        queue, run, waiting = self._queue, self._run, self._waiting
        low, first = queue.low, queue.normal.popleft  # NOTE: most pipes have no requests of low priority
        while True:
            try:
                instance.taken = (request := queue.take() if low else first(),)
            except IndexError:
                if self.idle.sleep(instance):
                    continue
                return
            instance.busy = 1
            run(instance, request)
            del request  # an idle instance must not keep its last request alive
            instance.taken = ()
            # NOTE: reset busy only after delivery, so that a request always counts in some node's load.
            instance.started = instance.busy = 0
            if waiting:
                self._wake_leaders()

    def _run(self, instance: Instance, request: Request) -> None:
        """Run the backend and deliver or fail the request, which may already be over."""
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
        super()._fail_queued()
        for request in list(self._large):
            self._fail_closed(request)

    def _is_large(self, instance: Instance, request: Request) -> bool:
        try:
            return instance.backend.is_large(request.data)
        except BaseException:  # `forward` gets the same dict, and reports the error
            return False

    def _run_large(self, instance: Instance, request: Request, start: float) -> None:
        """Run the request, or put it aside until another large one has ended."""
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
                # Requeue all, since some may be over. This instance checks the queue next, or is given back.
                for large in reversed(self._large):
                    self._queue.of(large).appendleft(large)
                self._large.clear()

    def _compute(self, instance: Instance, request: Request, start: float) -> None:
        instance.deadline = request.deadline
        try:
            try:
                forward: Callable[[list[Data]], object] = instance.backend.forward
                if self.around is None:
                    returned = forward([request.data])
                else:
                    returned = self.around((request,), start, partial(forward, [request.data]))
                if returned is not None:
                    explain_returned(instance.backend, (request.data,), returned)
            finally:
                end = perf_counter()
                instance.record.single(request, start, end)
                self.times.add(1, end - start, end)
        except BaseException as error:
            self._fail_defect(instance, request, error)
        else:
            self._go_on(instance, request)


class DeferredNode(SingleNode):
    """A node with deferred backends: a request continues on the thread that finishes it."""

    def _compute(self, instance: Instance, request: Request, start: float) -> None:
        record, backend = instance.record, instance.backend
        record.queued(request, start)

        def finish(error: BaseException | None) -> None:
            record.traced((request,), start, start, perf_counter())
            if error is None:
                self._go_on(instance, request)
            elif isinstance(error, (PipeClosed, DeadlineExceeded, CancelledError)):
                self.fail(request, error)  # an error that ended the requests it started ends it, too
            else:
                self._fail_defect(instance, request, error)

        assert isinstance(backend, DeferredBackend)
        begin = partial(backend.start, request.data, finish, request)
        try:
            if self.around is None:
                begin()
            else:
                self.around((request,), start, begin)
        except BaseException as error:
            self._fail_defect(instance, request, error)
        record.computed(perf_counter() - start)  # its waiting time is counted by other nodes
