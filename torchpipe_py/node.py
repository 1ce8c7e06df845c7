"""A node: one queue, N instances with a thread each, and what they measured."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Backend, Data, run_padded
from torchpipe_py.batching import Batcher
from torchpipe_py.errors import BackendError, DeadlineExceeded, NoResult, PipeClosed
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.request import Request
from torchpipe_py.roster import LeaderRoster, Roster, Sleeper

logger = logging.getLogger("torchpipe_py")

_DEADLINE_MARGIN = 0.002  # seconds for waking up, routing and the way back


def _ended(index: int) -> Backend:
    raise RuntimeError(f"instance {index} has ended")


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
        self.busy = 0  # requests taken and not yet delivered
        self.collected_since = 0.0  # when the leader took the first request of the current batch
        self.singles = 0  # requests that could not be batched; the counters below are of batches
        self.requests = self.batches = self.failed = self.expired = 0
        self.queue_time = self.batch_wait = self.compute_time = self.last_compute = 0.0
        self.batch_sizes: Counter[int] = Counter()


class Node:
    """A queue and its instances.

    ``put`` may be called from any thread. ``deliver(request)`` is called on the thread of the instance that finished
    it, ``fail(request, error)`` completes a request that cannot go on. ``upstream`` holds the nodes from which a
    request can still reach this one. ``waiting``, shared by the nodes of a pipe, holds those whose leader waits for
    company: an instance that has delivered its batch wakes the leaders for whom nothing is under way any more.

    Where batches are larger than one, one idle instance at a time is the leader: it collects the next batch and hands
    leadership on before it computes. Where they are not, and the backend runs on any thread, the blocked caller of a
    request stands in for an idle instance: waking one and being woken again would cost more than most images.
    """

    def __init__(
        self,
        name: str,
        create: Sequence[Callable[[int], Backend]],
        *,
        timeout: float,
        deliver: Callable[[Request], object],
        fail: Callable[[Request, BaseException], object],
        waiting: set[Node],
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.instances = [Instance(index, one) for index, one in enumerate(create)]
        self.upstream: tuple[Node, ...] = ()
        self._deliver, self._fail, self._waiting = deliver, fail, waiting
        self._queue: deque[Request] = deque()
        self._batcher = Batcher(timeout, self._batch_key)
        self._roster: Roster = Roster(self._queue)
        self._stopped: set[Request] = set()  # attended requests on their way in, for `load`
        self._is_lent = False
        self._opened = threading.Event()
        self._closing = False
        self.max = self.min = 1

    def start(self) -> None:
        """Start the threads; their backends are set up side by side."""
        for instance in self.instances:
            name = f"torchpipe-{self.name}-{instance.index}"
            thread = threading.Thread(target=self._main, args=(instance,), name=name, daemon=True)
            thread.start()
            instance.thread = thread

    def wait_setup(self) -> BaseException | None:
        """Wait until every backend is set up; the first error, if any."""
        for instance in self.instances:
            instance.ready.wait()
        self.max = max(instance.max for instance in self.instances)
        self.min = min(instance.min for instance in self.instances)
        if self.max > 1:
            self._roster = LeaderRoster(self._queue, self._batcher)
        error = next((instance.setup_error for instance in self.instances if instance.setup_error), None)
        if error is None and self.max == 1:
            self._is_lent = all(one.backend is not None and one.backend.any_thread() for one in self.instances)
        return error

    def put(self, request: Request) -> None:
        """Queue a request, from any thread; one that is attended may stop here instead, for ``carry``."""
        if request.attended:
            if self._is_lent:
                self._stopped.add(request)
                request.stop = self
                return
            request.attended = False
        self._queue.append(request)
        if self._roster.resting:
            self._roster.rouse()

    def carry(self, request: Request) -> None:
        """Run the backend on the calling thread, in place of an instance that is idle; queue where none is."""
        instance = self._roster.borrow()
        if instance is None:
            request.attended = False
            self.put(request)
            self._stopped.discard(request)
            return
        assert isinstance(instance, Instance)
        try:
            instance.busy = 1
            self._stopped.discard(request)
            self._run_singly(instance, request)
        finally:
            instance.busy = 0
            self._roster.give_back(instance)
        if self._waiting:
            self._wake_leaders()

    def rouse_leader(self) -> None:
        """Let a leader that waits for company look again whether any is under way."""
        if isinstance(self._roster, LeaderRoster):
            self._roster.rouse_leader()

    def open(self) -> None:
        """Let the instances take requests, once all of them are set up."""
        self._opened.set()

    def close(self) -> None:
        """Let every instance finish its batch and end; what is still queued fails with ``PipeClosed``."""
        self._closing = True
        self._opened.set()
        try:
            while True:
                self._fail(self._queue.popleft(), self._closed_error())
        except IndexError:
            self._roster.close()

    def join(self, until: float | None = None) -> bool:
        """Wait for the threads to end, no longer than ``until``; whether they did."""
        for instance in self.instances:
            if instance.thread is not None:
                instance.thread.join(None if until is None else max(0.0, until - perf_counter()))
                if instance.thread.is_alive():
                    return False
        return True

    def is_own_thread(self) -> bool:
        """Whether the calling thread is an instance's."""
        return any(instance.thread is threading.current_thread() for instance in self.instances)

    def load(self) -> int:
        """Requests here that are not delivered yet; a moment's estimate."""
        return self.queued() + len(self._stopped) + sum(instance.busy for instance in self.instances)

    def queued(self) -> int:
        """Requests that wait here; a moment's estimate."""
        return 0 if self._closing else len(self._queue) + len(self._batcher)

    # -- the instances' threads ---------------------------------------------------------------------------------

    def _main(self, instance: Instance) -> None:
        try:
            self._set_up(instance)
        except BaseException as error:
            instance.setup_error = error
        instance.ready.set()
        self._opened.wait()
        try:
            if instance.setup_error is None:
                self._serve(instance)
        finally:
            self._tear_down(instance)

    def _set_up(self, instance: Instance) -> None:
        backend = instance.backend = instance.create(instance.index)
        backend.setup()
        instance.max, instance.min = backend.max(), backend.min()
        if not 1 <= instance.min <= instance.max:
            raise ValueError(f"range {instance.min}..{instance.max} of {backend.config.label} is empty")

    def _tear_down(self, instance: Instance) -> None:
        try:
            if instance.backend is not None:
                instance.backend.close()
        except BaseException:
            logger.exception("node %r: close of instance %d failed", self.name, instance.index)
        instance.backend = None
        instance.create = _ended  # what the instances share, an engine say, goes with the last of them

    def _serve(self, instance: Instance) -> None:
        roster = self._roster
        if not isinstance(roster, LeaderRoster):
            self._serve_singly(instance)
            return
        while roster.lead(instance):
            try:
                batch = self._collect(instance, roster)
                instance.busy = len(batch)
            finally:
                roster.hand_on()
            if not batch:
                continue
            self._process(instance, batch)
            batch = []  # an idle instance keeps nothing of its last request
            # NOTE: busy ends only after delivery, so that a request is always visible in some node's load.
            instance.busy = 0
            if self._waiting:
                self._wake_leaders()

    def _serve_singly(self, instance: Instance) -> None:
        """Where no batch can form, nobody leads: each instance takes a request for itself, without any list."""
        take, run, waiting = self._queue.popleft, self._run_singly, self._waiting
        while True:
            try:
                request = take()
            except IndexError:
                if self._roster.rest(instance):
                    continue
                return
            instance.busy = 1
            run(instance, request)
            del request  # an idle instance keeps nothing of its last one
            instance.busy = 0
            if waiting:
                self._wake_leaders()

    def _run_singly(self, instance: Instance, request: Request) -> None:
        """One request where no batch can form."""
        if self._closing or request.done or request.deadline is not None:
            self._process(instance, [request])
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
            instance.singles += 1
            instance.queue_time += start - request.arrived
            instance.compute_time += now - start
            self._deliver(request)
        except BaseException as error:
            self._fail_defect(instance, request, error)

    def _collect(self, instance: Instance, roster: LeaderRoster) -> list[Request]:
        """As leader, the next batch; empty where another instance has taken what there was, or the node closes."""
        batcher, queue = self._batcher, self._queue
        instance.collected_since = perf_counter()
        while True:
            while queue:
                try:
                    request = queue.popleft()
                except IndexError:  # close() empties the queue too
                    break
                self._accept(request)
            if self._closing:
                return batcher.clear()
            if not len(batcher):
                return []
            quiet = self.timeout <= 0 or not self._is_awaiting()
            batch = batcher.take(instance.max, perf_counter(), quiet, self._lead_time(instance))
            if batch is not None:
                return batch
            self._wait(instance, roster)

    def _wait(self, instance: Instance, roster: LeaderRoster) -> None:
        """Sleep until a request comes, the next batch closes by the clock, or nothing is under way any more."""
        self._waiting.add(self)
        try:
            # NOTE: looked at again after the entry in `waiting`, or the last wake-up could be missed.
            if self._is_awaiting():
                close = self._batcher.next_close(instance.max, self._lead_time(instance))
                if close is not None:
                    roster.nap(instance, min(max(0.0, close - perf_counter()), threading.TIMEOUT_MAX))
        finally:
            self._waiting.discard(self)

    def _lead_time(self, instance: Instance) -> float:
        """How long before a deadline a batch must close to meet it, seconds."""
        return 1.5 * instance.last_compute + _DEADLINE_MARGIN

    def _accept(self, request: Request) -> None:
        try:
            self._batcher.add(request)
        except Exception as error:
            self._fail(request, self._defect(error))

    def _batch_key(self, data: Data) -> Any:
        backend = self.instances[0].backend
        return None if backend is None else backend.batch_key(data)

    def _is_awaiting(self) -> bool:
        """Whether some request in flight could still reach this node."""
        return any(node.load() for node in self.upstream)

    def _wake_leaders(self) -> None:
        for node in list(self._waiting):
            if not node._is_awaiting():
                node.rouse_leader()

    # -- one batch ----------------------------------------------------------------------------------------------

    def _process(self, instance: Instance, batch: list[Request]) -> None:
        start = perf_counter()
        requests, items = [], []
        for request in batch:
            if request.done:
                continue
            if self._closing:
                self._fail(request, self._closed_error())
            elif request.deadline is not None and start >= request.deadline:
                instance.expired += 1
                self._fail(request, DeadlineExceeded(f"deadline passed while queued at node {self.name!r}"))
            else:
                # A result or an error is what this backend says, never what an earlier one said.
                data = request.data
                data.pop(TASK_RESULT_KEY, None)
                data.pop(TASK_ERROR_KEY, None)
                requests.append(request)
                items.append(data)
        if not requests:
            return
        self._measure_waits(instance, requests, start)
        requests = self._forward(instance, requests, items)
        instance.last_compute = perf_counter() - start
        instance.compute_time += instance.last_compute
        for request in requests:
            try:
                self._deliver(request)
            except BaseException as error:
                self._fail_defect(instance, request, error)

    def _measure_waits(self, instance: Instance, requests: list[Request], start: float) -> None:
        count = len(requests)
        instance.requests += count
        instance.batches += 1
        instance.batch_sizes[count] += 1
        since = instance.collected_since or start
        for request in requests:
            arrived = request.arrived
            if arrived < since:
                instance.queue_time += since - arrived
                instance.batch_wait += start - since
            else:
                instance.batch_wait += start - arrived

    def _forward(self, instance: Instance, requests: list[Request], items: list[Data]) -> list[Request]:
        """Run the backend; the requests that go on, each with exactly one outcome."""
        backend = instance.backend
        assert backend is not None  # set up before the first request
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
        for request in requests:
            data = request.data
            if TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
                self._explain(data)
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

    def _explain(self, data: Data) -> None:
        """Say why there is no result, where the backend did not."""
        data[TASK_ERROR_KEY] = NoResult(f"node {self.name!r}: {self._label()} gave no result")

    def _label(self) -> str:
        backend = self.instances[0].backend
        return backend.config.label if backend is not None else "backend"

    def _fail_defect(self, instance: Instance, request: Request, error: BaseException) -> None:
        instance.failed += 1
        request.data.pop(TASK_RESULT_KEY, None)
        # NOTE: Ctrl-C meets a caller that stands in for an instance in the middle of the backend.
        is_ctrl_c = request.attended and isinstance(error, KeyboardInterrupt)
        self._fail(request, error if is_ctrl_c else self._defect(error))

    def _closed_error(self) -> PipeClosed:
        return PipeClosed(f"the pipe was closed while the request was queued at node {self.name!r}")

    def _defect(self, error: BaseException) -> BackendError:
        defect = BackendError(f"node {self.name!r}: {self._label()}: {type(error).__name__}: {error}")
        defect.__cause__ = error
        return defect
