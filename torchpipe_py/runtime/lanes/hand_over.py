"""The lane of nodes whose work is done in another process."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torchpipe_py.backends.base import HandOverBackend
from torchpipe_py.runtime.idle import IdleStack
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.lanes.lane import Fail, Lane, Led
from torchpipe_py.runtime.request import Request


class HandOverLane(Lane):
    """Where requests go to another process: on whatever thread brings them, since that waits for nothing."""

    def __init__(self, name: str, instances: Sequence[Instance], fail: Fail, waiting: set[Led]) -> None:
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
