"""A node: one queue, N instances with a thread each, and who of them takes what."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Backend, Data, DeferredBackend
from torchpipe_py.runtime.batching import Batcher
from torchpipe_py.runtime.request import Request
from torchpipe_py.runtime.roster import LeaderRoster, Roster
from torchpipe_py.runtime.runner import Instance, Runner
from torchpipe_py.runtime.tracing import Trace

logger = logging.getLogger("torchpipe_py")

_HAND_OVER = 5e-5  # seconds from one thread to another that sleeps
_DEADLINE_MARGIN = 0.002  # seconds for waking up, routing and the way back


def _ended(index: int) -> Backend:
    raise RuntimeError(f"instance {index} has ended")


class Node:
    """A queue and its instances.

    ``put`` may be called from any thread. ``deliver(request)``, to be set before ``start``, is called on the thread of
    the instance that finished it, ``fail(request, error)`` completes a request that cannot go on. ``upstream`` holds
    the nodes from which a request can still reach this one, perhaps itself. ``waiting``, shared by the nodes of a pipe,
    holds those whose leader waits for company: an instance that has delivered its batch wakes the leaders for whom
    nothing is under way any more.

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
        fail: Callable[[Request, BaseException], object],
        waiting: set[Node],
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.instances = [Instance(index, one) for index, one in enumerate(create)]
        self.upstream: tuple[Node, ...] = ()
        self._waiting = waiting
        self._runner = Runner(name, fail)
        self._run_single = self._runner.run_single
        self._queue: deque[Request] = deque()
        self._batcher = Batcher(timeout, self._batch_key)
        self._roster: Roster = Roster(self._queue)
        self._stopped: set[Request] = set()  # requests on a ride that are on their way in, for `load`
        self._is_lent = False
        self._paused = 0
        self._pausing = threading.Lock()
        self._opened = threading.Event()
        self.max = self.min = 1

    @property
    def deliver(self) -> Callable[[Request], object]:
        return self._runner.deliver

    @deliver.setter
    def deliver(self, deliver: Callable[[Request], object]) -> None:
        self._runner.deliver = deliver

    @property
    def trace(self) -> Trace | None:
        """Where the node's batches are recorded, if anywhere."""
        return self._runner.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._runner.trace = trace

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
        if error is None:
            backends = [one.backend for one in self.instances if one.backend is not None]
            self._runner.label = backends[0].config.label
            self._is_lent = self.max == 1 and all(one.any_thread() for one in backends)
            if all(isinstance(one, DeferredBackend) for one in backends):
                self._run_single = self._runner.start_deferred
        return error

    def put(self, request: Request) -> None:
        """Queue a request, from any thread; one on a ride may stop here instead, for ``carry``."""
        ride = request.ride
        if ride is not None:
            # Of several branches one rides; more of them only where a hand-over would take longer than the backend.
            if self._is_lent and (not ride.stops or self._is_quick()):
                self._stopped.add(request)
                ride.stops.append((self, request))
                return
            request.ride = None
        self._queue.append(request)
        if self._roster.resting:
            self._roster.rouse()
        if self._runner.is_closing:
            self._fail_queued()

    def forget(self, request: Request) -> None:
        """A request that stopped here is not carried on."""
        self._stopped.discard(request)

    def _is_quick(self) -> bool:
        one = self.instances[0]
        return one.compute_time <= _HAND_OVER * one.singles

    def carry(self, request: Request) -> None:
        """Run the backend on the calling thread, in place of an instance that is idle; queue where none is."""
        instance = self._roster.borrow()
        if instance is None:
            request.ride = None
            self.put(request)
            self._stopped.discard(request)
            return
        assert isinstance(instance, Instance)
        try:
            instance.busy, instance.carrier = 1, threading.get_ident()
            self._stopped.discard(request)
            self._run_single(instance, request)
        finally:
            instance.busy = instance.carrier = 0
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
        self._runner.is_closing = True
        self._opened.set()
        self._fail_queued()
        self._roster.close()

    def _fail_queued(self) -> None:
        try:
            while True:
                self._runner.fail_closed(self._queue.popleft())
        except IndexError:
            return

    def join(self, until: float | None = None) -> bool:
        """Wait for the threads to end, no longer than ``until``; whether they did."""
        for instance in self.instances:
            if instance.thread is not None:
                instance.thread.join(None if until is None else max(0.0, until - perf_counter()))
                if instance.thread.is_alive():
                    return False
        return True

    def current_instance(self) -> Instance | None:
        """The instance whose thread, or whose stand-in, is calling."""
        thread, identity = threading.current_thread(), threading.get_ident()
        mine = (one for one in self.instances if one.thread is thread or one.carrier == identity)
        return next(mine, None)

    @contextmanager
    def paused(self, instance: Instance) -> Iterator[None]:
        """Meanwhile the instance's batch counts as not under way: its backend waits for what other nodes do."""
        busy, instance.busy = instance.busy, 0
        with self._pausing:
            self._paused += 1
        self._wake_leaders()
        try:
            yield
        finally:
            with self._pausing:
                self._paused -= 1
            instance.busy = busy

    def load(self) -> int:
        """Requests here that are not delivered yet, and could be; a moment's estimate."""
        if self._paused == len(self.instances):
            return 0  # what is queued has to wait for the other nodes
        return self.queued() + len(self._stopped) + sum(instance.busy for instance in self.instances)

    def queued(self) -> int:
        """Requests that wait here; a moment's estimate."""
        return 0 if self._runner.is_closing else len(self._queue) + len(self._batcher)

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
            self._runner.run_batch(instance, batch)
            batch = []  # an idle instance keeps nothing of its last request
            # NOTE: busy ends only after delivery, so that a request is always visible in some node's load.
            instance.busy = 0
            if self._waiting:
                self._wake_leaders()
        if roster.retire():
            for request in self._batcher.clear():
                self._runner.fail_closed(request)

    def _serve_singly(self, instance: Instance) -> None:
        """Where no batch can form, nobody leads: each instance takes a request for itself, without any list."""
        take, run, waiting = self._queue.popleft, self._run_single, self._waiting
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
            if self._runner.is_closing:
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
            self._runner.fail(request, self._runner.defect(error))

    def _batch_key(self, data: Data) -> Any:
        backend = self.instances[0].backend
        return None if backend is None else backend.batch_key(data)

    def _is_awaiting(self) -> bool:
        """Whether some request in flight could still reach this node."""
        for node in self.upstream:
            if node is not self:
                if node.load():
                    return True
            elif any(instance.busy for instance in self.instances):
                return True  # through a logical node, a request comes by a second time
        return False

    def _wake_leaders(self) -> None:
        for node in list(self._waiting):
            if not node._is_awaiting():
                node.rouse_leader()
