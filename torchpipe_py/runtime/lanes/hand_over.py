"""The lane of nodes whose work is done in another process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from torchpipe_py.backends.deferred import HandOverBackend, Ran
from torchpipe_py.errors import DeadlineExceeded, PipeClosed
from torchpipe_py.runtime.idle import IdleStack, Sleeper
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.lanes.lane import Fail, Lane, Led
from torchpipe_py.runtime.request import Request
from torchpipe_py.runtime.signals import has_handlers, is_main_thread


class HandOverLane(Lane):
    """Where requests go to another process: on whatever thread brings them, since that waits for nothing.

    The main thread leaves them to one that no handler of a signal interrupts, where there are any.
    """

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Led]) -> None:
        super().__init__(name, instances, fail, waiting)
        self.idle: IdleStack[Sleeper] = IdleStack(self._queue)
        self._has_handlers = has_handlers()
        self._backends = [instance.backend for instance in instances if isinstance(instance.backend, HandOverBackend)]
        self._start, self._runs_nodes = self._backends[0].start, self._backends[0].runs_nodes
        self._under_way: set[Request] = set()

    def put(self, request: Request) -> None:
        request.caller = None
        if self._has_handlers and is_main_thread():
            super().put(request)
        else:
            self._hand_over(request)

    def _hand_over(self, request: Request) -> None:
        instance = self.instances[0]
        try:
            if not self._starts(instance, request, request.arrived):
                return
            self._under_way.add(request)
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
            # NOTE: each thread changes only what is its own, since several are here at once.
            if not is_inner:
                threads.discard(thread)
        # NOTE: only after delivery, so that a request is always visible in some node's load.
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
        elif self._runs_nodes:
            self.fail(request, error)
        elif type(error) is DeadlineExceeded and ran is None:
            self._expire(instance, request)
        elif type(error) is PipeClosed and ran is None:
            self._fail_closed(request)
        else:
            self._fail_defect(instance, request, error)

    def close(self) -> None:
        super().close()
        for backend in self._backends:
            backend.stop()

    def load(self) -> int:
        return len(self._under_way) + super().queued()

    def queued(self) -> int:
        return max(0, self.load() - len(self.instances))

    def busy(self) -> int:
        return min(len(self._under_way), len(self.instances))

    def expected_wait(self, now: float) -> float:
        return self._backends[0].expected_wait() or super().expected_wait(now)

    def _serve(self, instance: Instance) -> None:
        assert isinstance(instance.backend, HandOverBackend)
        carrier = None
        if self._has_handlers and instance is self.instances[0]:
            carrier = threading.Thread(target=self._carry_aside, name=f"torchpipe-{self.name}-hand-over", daemon=True)
            carrier.start()
        instance.backend.keep()
        self._carry(instance)
        if carrier is not None:
            instance.started = perf_counter()  # code of the user's own may pack what is handed over, and not return
            carrier.join()
            instance.started = 0.0

    def _carry_aside(self) -> None:
        """Hand over what the main thread brings, on a thread that does nothing else: an instance's may be kept."""
        thread, threads = threading.get_ident(), self.instances[0].stand_ins  # a callback may close the pipe here
        threads.add(thread)
        try:
            self._carry(Sleeper())
        finally:
            threads.discard(thread)  # NOTE: a later thread may have its identity

    def _carry(self, sleeper: Sleeper) -> None:
        """Hand over what is queued, until the lane is closed."""
        while True:
            try:
                request = self._queue.popleft()
            except IndexError:
                if self.idle.sleep(sleeper):
                    continue
                return
            self._hand_over(request)
            del request
