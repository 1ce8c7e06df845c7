"""What runs behind a pipe: its nodes, the way from node to node, and every request in flight."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import BackendError, BackendUnavailable, ConfigError, NoResult, Overloaded, PipeClosed
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.runtime.creation import creators
from torchpipe_py.runtime.node import Node
from torchpipe_py.runtime.request import Countdown, Request, deadline_after, nothing
from torchpipe_py.runtime.routes import Routes

logger = logging.getLogger("torchpipe_py")


class Engine:
    """Nodes and their threads. A request is in flight from ``admit`` to ``complete``, which happens exactly once.

    The set of requests in flight is the one source of truth: whoever removes a request from it, completes it.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.name = pipeline.spec.place.source
        self.graph = graph = pipeline.graph
        self.plans = plans = pipeline.plans
        self.max_inflight = pipeline.spec.max_inflight
        self.admitted = self.rejected = 0
        self._inflight: set[Request] = set()
        self._lock = threading.Lock()
        self._inner: set[Request] = set()
        self._closed = ""
        waiting: set[Node] = set()
        self.nodes: dict[str, Node] = {
            name: Node(
                name,
                creators(plans[name], self),
                timeout=plans[name].spec.batching_timeout / 1000,
                fail=self.complete,
                waiting=waiting,
            )
            for name in graph.order
            if plans[name].spec.owner == name
        }
        logical = pipeline.spec.logical()
        self.entries = Routes(graph, plans, logical, self.nodes, self.complete).entries
        for owner, node in self.nodes.items():
            above = {plans[other].spec.owner for name in logical[owner] for other in graph.upstream[name]}
            node.upstream = tuple(self.nodes[other] for other in graph.order if other in above)
        _engines.add(self)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set up every instance of every node; where one fails, end all threads and raise its error."""
        error: BaseException | None = None
        try:
            for node in self.nodes.values():
                node.start()
            for name in self.nodes:
                error = error or self._setup_error(name)
        except BaseException:
            self.close()
            raise
        if error is not None:
            self.close()
            raise error
        for node in self.nodes.values():
            node.open()

    def _setup_error(self, name: str) -> BaseException | None:
        error = self.nodes[name].wait_setup()
        if error is None:
            return None
        plan = self.plans[name]
        kind = next((cls for cls in (BackendUnavailable, ConfigError) if isinstance(error, cls)), BackendError)
        failure = kind(f"{plan.spec.place}: {plan.label}: {error}")
        failure.__cause__ = error
        return failure

    def close(self, timeout: float | None = None) -> bool:
        """End every thread; queued requests fail with ``PipeClosed``. Idempotent, from any thread.

        ``False`` if a backend still ran after ``timeout`` seconds; its requests have failed nevertheless.
        """
        until = deadline_after(timeout)
        with self._lock:
            self._closed = self._closed or "the pipe is closed"
        for node in self.nodes.values():
            node.close()
        if any(node.current_instance() for node in self.nodes.values()):
            # Called from a callback: this thread cannot wait for itself, another one finishes the job.
            threading.Thread(target=self.close, name="torchpipe_py close", daemon=True).start()
            return False
        ended = [node.join(until) for node in self.nodes.values()]
        for request in [*self._inner, *self._inflight]:
            self.complete(request, PipeClosed("the pipe was closed before the request was finished"))
        return all(ended)

    def after_fork(self) -> None:
        """In a forked child the threads are gone: refuse instead of waiting for them."""
        self._lock = threading.Lock()
        self._closed = "the pipe was built in the parent process; threads do not survive a fork"
        self._inflight.clear()
        self._inner.clear()

    @property
    def is_closed(self) -> bool:
        return bool(self._closed)

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def inflight(self) -> int:
        """Requests admitted and not completed."""
        return len(self._inflight)

    def admit(self, requests: Sequence[Request]) -> None:
        """Count the requests in, all or none; ``Overloaded`` beyond the bound, ``PipeClosed`` after ``close``."""
        with self._lock:
            if self._closed:
                raise PipeClosed(self._closed)
            if len(self._inflight) + len(requests) <= self.max_inflight:
                self._inflight.update(requests)
                self.admitted += len(requests)
                return
            self.rejected += len(requests)
        raise Overloaded(
            f"{self.inflight} requests in flight, {len(requests)} more would pass max_inflight = {self.max_inflight}",
            retry_after_ms=self.retry_after_ms() if len(requests) <= self.max_inflight else None,
        )

    def complete(self, request: Request, error: BaseException | None = None, last: Data | None = None) -> bool:
        """Make the outcome final and tell whoever waits; ``False`` if it was final already.

        ``request`` may be a branch of the one that ends. ``last`` is the outcome where others are still under way.
        """
        trip = request.trip
        if trip is not None:
            request = trip.request
        try:
            (self._inner if request.is_inner else self._inflight).remove(request)
        except KeyError:
            return False
        request.error = error
        request.done = True
        if trip is not None:
            trip.settle(last, error is not None)
        if error is None:
            data = request.data
            if TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
                data[TASK_ERROR_KEY] = NoResult("a filter ended the request before any backend gave a result")
            if request.caller_data is not None:
                request.merge()
        # Whoever waits usually holds the request: a callback that is kept would make a cycle of the two.
        on_done, request.on_done = request.on_done, nothing
        try:
            on_done()
        except BaseException:
            logger.exception("%s: the callback of a finished request failed", self.name)
        if request.inner is not None or trip is not None:
            self._drop_inner(request)
        if trip is not None:
            # Branches that are still under way know the trip; without this it would be a cycle that holds all dicts.
            request.trip = None
            trip.branches.clear()
        return True

    def _drop_inner(self, request: Request) -> None:
        """Nobody waits any more for what a completed request's jumps have started."""
        for one in [request] if request.trip is None else [request, *request.trip.branches]:
            inner, one.inner = one.inner, None
            for each in inner or ():
                self.complete(each, CancelledError())

    # -- graphs that are run by a node of another -----------------------------------------------------------------

    def run_graphs(
        self,
        root: str,
        items: Sequence[Data],
        on_done: Callable[[list[BaseException | None]], None],
        parent: Request | None = None,
    ) -> None:
        """Bring each item, of which there is at least one, to the graph's root.

        ``on_done(errors)``, in order, is called once, from any thread, when all are through. They end with
        their ``parent``, the request whose node runs them: at its deadline, or when it is given up.
        """
        requests: list[Request] = []
        countdown = Countdown(len(items), lambda: on_done([request.error for request in requests]))
        requests += [self._inner_request(item, countdown, parent) for item in items]
        for request in requests:
            if parent is not None and parent.done:
                self.complete(request, CancelledError())
            else:
                self.entries[root](request)

    def _inner_request(self, data: Data, on_done: Callable[[], None], parent: Request | None) -> Request:
        request = Request(data, on_done)
        request.is_inner = True
        self._inner.add(request)
        if parent is not None:
            request.origin, request.deadline = parent, parent.deadline
            inner = parent.inner
            if inner is None:
                inner = parent.inner = []
            inner.append(request)
        return request

    def wait_for_graphs(self, root: str, items: Sequence[Data]) -> list[BaseException | None]:
        """Run each item through the graph and wait for all; their errors, in order. For an instance's own thread."""
        outcome: list[BaseException | None] = []
        if items:
            finished = threading.Event()

            def finish(errors: list[BaseException | None]) -> None:
                outcome.extend(errors)
                finished.set()

            self.run_graphs(root, items, finish)
            with self._blocked_instance():
                finished.wait()
        return outcome

    @contextmanager
    def _blocked_instance(self) -> Iterator[None]:
        """Meanwhile this thread's instance sends nothing to the nodes behind it: nobody waits for company from it."""
        found = next(((node, one) for node in self.nodes.values() if (one := node.current_instance())), None)
        if found is None:
            yield
            return
        node, instance = found
        with node.paused(instance):
            yield

    def retry_after_ms(self) -> int:
        """``expected_wait`` in whole milliseconds, at least 1."""
        return max(1, math.ceil(self.expected_wait() * 1000))

    def expected_wait(self) -> float:
        """How long the slowest node needs for what it holds, by its measured compute time, seconds."""
        seconds = 0.0
        for node in self.nodes.values():
            done = sum(instance.requests + instance.singles for instance in node.instances)
            spent = sum(instance.compute_time for instance in node.instances)
            if done:
                seconds = max(seconds, node.load() * spent / done / len(node.instances))
        return seconds


# Process-wide, since a fork is.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.after_fork()


os.register_at_fork(after_in_child=_after_fork)
