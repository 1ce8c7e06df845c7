"""What a node does with a batch that an instance has taken: run it, give each request one outcome, and measure."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError
from time import perf_counter

from torchpipe_py.backends.base import Backend, Data, DeferredBackend, run_padded
from torchpipe_py.errors import BackendError, DeadlineExceeded, NoResult, PipeClosed, WorkerDied
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.histogram import COUNTS, bucket
from torchpipe_py.runtime.request import Request
from torchpipe_py.runtime.roster import Sleeper
from torchpipe_py.runtime.tracing import Trace


class Instance(Sleeper):
    """One backend on its own thread; that thread, or a caller's that stands in for it, writes the counters."""

    def __init__(self, index: int, create: Callable[[int], Backend]) -> None:
        super().__init__()
        self.index = index
        self.create = create
        self.backend: Backend | None = None
        self.max = self.min = 1
        self.setup_error: BaseException | None = None
        self.ready = threading.Event()
        self.thread: threading.Thread | None = None
        self.carrier = 0  # the identity of a caller's thread that stands in for it
        self.busy = 0  # requests taken and not yet delivered
        self.collected_since = 0.0  # when the leader took the first request of the current batch
        self.singles = 0  # requests that could not be batched; the counters below are of batches
        self.requests = self.batches = self.failed = self.expired = 0
        self.queue_time = self.batch_wait = self.compute_time = self.last_compute = 0.0
        self.batch_sizes: Counter[int] = Counter()
        # Of requests, requests and batches, by `bucket`.
        self.queue_counts, self.wait_counts, self.compute_counts = ([0] * COUNTS for _ in range(3))


class Runner:
    """Runs batches of one node, on whatever thread calls it.

    Each request that goes on is given to ``deliver(request)``, each that cannot to ``fail(request, error)``. After
    ``is_closing`` is set nothing is run any more.
    """

    def __init__(self, name: str, fail: Callable[[Request, BaseException], object]) -> None:
        self.name = name
        self.label = "backend"
        self.deliver: Callable[[Request], object]
        self.fail = fail
        self.is_closing = False
        self.trace: Trace | None = None

    def run_single(self, instance: Instance, request: Request) -> None:
        """One request where no batch can form."""
        if self.is_closing or request.done or request.deadline is not None:
            self.run_batch(instance, [request])
            return
        start = perf_counter()
        data = request.data
        data.pop(TASK_RESULT_KEY, None)
        data.pop(TASK_ERROR_KEY, None)
        try:
            instance.backend.forward([data])  # type: ignore[union-attr]  # set up before the first request
            if TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
                self._explain(data)
            now = perf_counter()
            queued, computed = start - request.arrived, now - start
            instance.singles += 1
            instance.queue_time += queued
            instance.compute_time += computed
            instance.queue_counts[bucket(queued)] += 1
            instance.compute_counts[bucket(computed)] += 1
            if self.trace is not None:
                self.trace.record(self.name, instance.index, (request,), start, start, now)
            self.deliver(request)
        except BaseException as error:
            self._fail_defect(instance, request, error)

    def run_batch(self, instance: Instance, batch: list[Request]) -> None:
        """A batch, perhaps of one, of which some may be over already."""
        start = perf_counter()
        requests = [request for request in batch if self._starts(instance, request, start)]
        if not requests:
            return
        self._measure_waits(instance, requests, start)
        batch = requests
        requests = self._forward(instance, batch)
        now = perf_counter()
        instance.last_compute = now - start
        instance.compute_time += instance.last_compute
        instance.compute_counts[bucket(instance.last_compute)] += 1
        if self.trace is not None:
            self.trace.record(self.name, instance.index, batch, instance.collected_since or start, start, now)
        for request in requests:
            self._go_on(instance, request)

    def start_deferred(self, instance: Instance, request: Request) -> None:
        """One request of a ``DeferredBackend``, which goes on from whatever thread finishes it."""
        start = perf_counter()
        if not self._starts(instance, request, start):
            return
        instance.singles += 1
        instance.queue_time += start - request.arrived
        instance.queue_counts[bucket(start - request.arrived)] += 1

        def finish(error: BaseException | None) -> None:
            if self.trace is not None:
                self.trace.record(self.name, instance.index, (request,), start, start, perf_counter())
            if isinstance(error, (PipeClosed, DeadlineExceeded, CancelledError)):
                self.fail(request, error)  # what ended the request's own requests ends it as well
                return
            if error is not None:
                self._fail_defect(instance, request, error)
                return
            self._go_on(instance, request)

        backend = instance.backend
        assert isinstance(backend, DeferredBackend)
        try:
            backend.start(request.data, finish, request)
        except BaseException as error:
            self._fail_defect(instance, request, error)
        computed = perf_counter() - start  # what it waits for, is other nodes' time
        instance.compute_time += computed
        instance.compute_counts[bucket(computed)] += 1

    def _starts(self, instance: Instance, request: Request, now: float) -> bool:
        """Whether the request is to be run; its dict is ready for that then."""
        if request.done:
            return False
        if self.is_closing:
            self.fail_closed(request)
            return False
        if request.deadline is not None and now >= request.deadline:
            instance.expired += 1
            self.fail(request, DeadlineExceeded(f"deadline passed while queued at node {self.name!r}"))
            return False
        # A result or an error is what this backend says, never what an earlier one said.
        request.data.pop(TASK_RESULT_KEY, None)
        request.data.pop(TASK_ERROR_KEY, None)
        return True

    def _measure_waits(self, instance: Instance, requests: list[Request], start: float) -> None:
        count = len(requests)
        instance.requests += count
        instance.batches += 1
        instance.batch_sizes[count] += 1
        since = instance.collected_since or start
        for request in requests:
            # NOTE: what comes while the leader collects has not queued.
            taken = max(since, request.arrived)
            instance.queue_time += taken - request.arrived
            instance.batch_wait += start - taken
            instance.queue_counts[bucket(taken - request.arrived)] += 1
            instance.wait_counts[bucket(start - taken)] += 1

    def _forward(self, instance: Instance, requests: list[Request]) -> list[Request]:
        """Run the backend; the requests that go on."""
        backend = instance.backend
        assert backend is not None  # set up before the first request
        items = [request.data for request in requests]
        saved = [dict(item) for item in items] if len(items) > 1 else None
        try:
            if len(items) < instance.min:
                run_padded(backend, items)
            else:
                backend.forward(items)
        except BaseException as error:
            if saved is None:
                self._fail_defect(instance, requests[0], error)
                return []
            requests = self._forward_one_by_one(instance, backend, requests, saved)
        return requests

    def _forward_one_by_one(
        self, instance: Instance, backend: Backend, requests: list[Request], saved: list[Data]
    ) -> list[Request]:
        """After a batch raised: each item alone, from the dict as it was, so that only the bad ones fail."""
        finished = []
        for request, before in zip(requests, saved, strict=True):
            request.data.clear()
            request.data.update(before)
            try:
                run_padded(backend, [request.data])
            except BaseException as error:
                self._fail_defect(instance, request, error)
            else:
                finished.append(request)
        return finished

    def _go_on(self, instance: Instance, request: Request) -> None:
        data = request.data
        if TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
            self._explain(data)
        try:
            self.deliver(request)
        except BaseException as error:
            self._fail_defect(instance, request, error)

    def _explain(self, data: Data) -> None:
        """Say why there is no result, where the backend did not."""
        data[TASK_ERROR_KEY] = NoResult(f"node {self.name!r}: {self.label} gave no result")

    def _fail_defect(self, instance: Instance, request: Request, error: BaseException) -> None:
        instance.failed += 1
        request.data.pop(TASK_RESULT_KEY, None)
        # NOTE: Ctrl-C meets a caller that stands in for an instance in the middle of the backend.
        is_ctrl_c = request.ride is not None and isinstance(error, KeyboardInterrupt)
        is_closed = self.is_closing and isinstance(error, PipeClosed)  # a jump's own requests were, say
        is_no_defect = is_ctrl_c or is_closed or isinstance(error, WorkerDied)
        self.fail(request, error if is_no_defect else self.defect(error))

    def fail_closed(self, request: Request) -> None:
        """Fail a request that was still queued when the pipe was closed."""
        self.fail(request, PipeClosed(f"the pipe was closed while the request was queued at node {self.name!r}"))

    def defect(self, error: BaseException) -> BackendError:
        """What a caller gets for an exception in a backend."""
        defect = BackendError(f"node {self.name!r}: {self.label}: {type(error).__name__}: {error}")
        defect.__cause__ = error
        return defect
