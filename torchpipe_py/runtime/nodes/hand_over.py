"""Nodes whose work is done in another process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from functools import partial
from time import perf_counter

from torchpipe_py.backends.deferred import HandOverBackend, Ran
from torchpipe_py.errors import DeadlineExceeded, PipeClosed
from torchpipe_py.keys import TASK_PRIORITY_KEY
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.node import Node
from torchpipe_py.runtime.request import Request


class HandOverNode(Node):
    """Hands requests over to another process, on the thread that brings them, since this does not block."""

    def __init__(self, name: str, instances: Sequence[Instance]) -> None:
        super().__init__(name, instances)
        self._backends = [instance.backend for instance in instances if isinstance(instance.backend, HandOverBackend)]
        self._start, self._runs_nodes = self._backends[0].start, self._backends[0].runs_nodes
        self._under_way: set[Request] = set()
        self._is_closed = threading.Event()

    def put(self, request: Request) -> None:
        request.caller = None
        instance = self.instances[0]
        try:
            if not self._begin_or_complete(instance, request, request.arrived):
                return
            self._under_way.add(request)
            if request.priority:
                request.data[TASK_PRIORITY_KEY] = request.priority  # which a map may have dropped
            self._start(request.data, partial(self._finish, request), request)
        except BaseException as error:
            self._under_way.discard(request)
            self._fail_defect(instance, request, error)

    def _finish(self, request: Request, error: BaseException | None, ran: Ran | None = None) -> None:
        instance = self.instances[0 if ran is None else ran[0]]
        thread, threads = threading.get_ident(), instance.stand_ins  # a callback may close the pipe here
        is_inner = thread in threads
        threads.add(thread)
        try:
            self._end(instance, request, error, ran)
        finally:
            # Each thread changes only its own state, since several run this at once.
            if not is_inner:
                threads.discard(thread)
        # NOTE: only after delivery, so that a request always counts in some node's load.
        self._under_way.discard(request)
        if self._waiting:
            self._wake_leaders()

    def _end(self, instance: Instance, request: Request, error: BaseException | None, ran: Ran | None) -> None:
        if ran is not None:
            request.waited += max(0.0, ran[1] - request.arrived)
            instance.record.single(request, ran[1], ran[2])
            self.times.add(1, ran[2] - ran[1], ran[2])
        elif instance.record.traces:
            instance.record.traced((request,), request.arrived, request.arrived, perf_counter())
        if error is None:
            self._deliver_result(instance, request)
        elif self._runs_nodes or (type(error) is CancelledError and ran is None):  # it was abandoned
            self._fail(request, error)
        elif type(error) is DeadlineExceeded and ran is None:
            self._expire(instance, request)
        elif type(error) is PipeClosed and ran is None:
            self._fail_closed(request)
        else:
            self._fail_defect(instance, request, error)

    def _serve(self, instance: Instance) -> None:
        assert isinstance(instance.backend, HandOverBackend)
        instance.backend.keep()
        self._is_closed.wait()

    def _end_instances(self) -> None:
        for backend in self._backends:
            backend.stop()
        self._is_closed.set()

    def load(self) -> int:
        return len(self._under_way)

    def queued(self) -> int:
        return max(0, self.load() - len(self.instances))

    def pending(self) -> int:
        return self.queued()

    def busy(self) -> int:
        return min(len(self._under_way), len(self.instances))

    def idle(self) -> int:
        return len(self.instances) - self.busy()

    def expected(self, now: float, priority: int = 0, is_exact: bool = False) -> tuple[float, float]:
        wait, compute = super().expected(now, priority)  # what is under way leaves at once with its client
        return self._backends[0].expected_wait() or wait, compute

    def remaining(self, now: float) -> list[float]:
        busy = self.busy()
        return [self.times.remaining(int(place < busy), 0.0, now) for place in range(len(self.instances))]
