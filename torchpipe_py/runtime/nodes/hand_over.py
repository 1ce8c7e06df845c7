"""Nodes whose work is done in another process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from torchpipe_py.backends.deferred import HandOverBackend, Ran
from torchpipe_py.errors import DeadlineExceeded, PipeClosed
from torchpipe_py.keys import TASK_PRIORITY_KEY
from torchpipe_py.runtime.nodes.idle import Idle, has_handlers, is_main_thread
from torchpipe_py.runtime.nodes.instance import Instance
from torchpipe_py.runtime.nodes.node import Fail, Node
from torchpipe_py.runtime.request import Request


class HandOverNode(Node):
    """Hands requests over to another process, on the thread that brings them, since this does not block.

    If signal handlers are set, the main thread leaves this to a thread that they cannot interrupt.
    """

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Any]) -> None:
        super().__init__(name, instances, fail, waiting)
        self.idle = Idle(self._queue.normal)
        self._backends = [instance.backend for instance in instances if isinstance(instance.backend, HandOverBackend)]
        self._start, self._runs_nodes = self._backends[0].start, self._backends[0].runs_nodes
        self._under_way: set[Request] = set()
        self._has_handlers = has_handlers()
        self._from_main: SimpleQueue[Request | None] = SimpleQueue()
        self._is_closed = threading.Event()

    def put(self, request: Request) -> None:
        request.caller = None
        if not (self._has_handlers and is_main_thread()):
            self._hand_over(request)
            return
        self._from_main.put(request)
        if self.is_closing:
            self._fail_closed(request)

    def _hand_over(self, request: Request) -> None:
        instance = self.instances[0]
        try:
            if not self._starts(instance, request, request.arrived):
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
            # NOTE: each thread changes only its own state, since several run this at once.
            if not is_inner:
                threads.discard(thread)
        # NOTE: only after delivery, so that a request always counts in some node's load.
        self._under_way.discard(request)
        if self._waiting:
            self._wake_leaders()

    def _end(self, instance: Instance, request: Request, error: BaseException | None, ran: Ran | None) -> None:
        if ran is not None:
            instance.record.single(request, ran[1], ran[2])
            self.times.add(1, ran[2] - ran[1], ran[2])
        elif instance.record.traces:
            instance.record.traced((request,), request.arrived, request.arrived, perf_counter())
        if error is None:
            self._go_on(instance, request)
        elif self._runs_nodes or (type(error) is CancelledError and ran is None):  # it was abandoned
            self.fail(request, error)
        elif type(error) is DeadlineExceeded and ran is None:
            self._expire(instance, request)
        elif type(error) is PipeClosed and ran is None:
            self._fail_closed(request)
        else:
            self._fail_defect(instance, request, error)

    def close(self) -> None:
        super().close()
        self._from_main.put(None)
        for backend in self._backends:
            backend.stop()
        self._is_closed.set()

    def load(self) -> int:
        return len(self._under_way) + (0 if self.is_closing else self._from_main.qsize())

    def queued(self) -> int:
        return max(0, self.load() - len(self.instances))

    def busy(self) -> int:
        return min(len(self._under_way), len(self.instances))

    def remaining(self, now: float) -> list[float]:
        busy = self.busy()
        return [self.times.remaining(int(place < busy), 0.0, now) for place in range(len(self.instances))]

    def expected_wait(self, now: float, priority: int = 0) -> float:
        return self._backends[0].expected_wait() or super().expected_wait(now, priority)

    def _serve(self, instance: Instance) -> None:
        assert isinstance(instance.backend, HandOverBackend)
        carrier = None
        if self._has_handlers and instance is self.instances[0]:
            carrier = threading.Thread(target=self._carry, name=f"torchpipe-{self.name}-hand-over", daemon=True)
            carrier.start()
        instance.backend.keep()
        self._is_closed.wait()
        if carrier is not None:
            instance.started = perf_counter()  # user code may pack the request, and may not return
            carrier.join()
            instance.started = 0.0

    def _carry(self) -> None:
        """Hand over requests of the main thread, on a dedicated thread: an instance's thread may be blocked."""
        thread, threads = threading.get_ident(), self.instances[0].stand_ins  # a callback may close the pipe here
        threads.add(thread)
        while (request := self._from_main.get()) is not None:
            self._hand_over(request)
            del request
        self._from_main.put(None)  # after an exception in the loop, another such thread runs
        threads.discard(thread)  # NOTE: a later thread may get the same identity
