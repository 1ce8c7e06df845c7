"""The lane of nodes whose work goes on elsewhere and finishes later."""

from __future__ import annotations

from concurrent.futures import CancelledError
from functools import partial
from time import perf_counter

from torchpipe_py.backends.deferred import DeferredBackend
from torchpipe_py.errors import DeadlineExceeded, PipeClosed
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.lanes.single import SingleLane
from torchpipe_py.runtime.request import Request


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
