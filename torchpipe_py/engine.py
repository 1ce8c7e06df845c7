"""What runs behind a pipe: its nodes, the way from node to node, and every request in flight."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from torchpipe_py.build import NodePlan
from torchpipe_py.errors import BackendError, BackendUnavailable, ConfigError, NoResult, Overloaded, PipeClosed
from torchpipe_py.filters import Filter, Status
from torchpipe_py.graph import Graph
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.node import Node
from torchpipe_py.request import Request, deadline_after

logger = logging.getLogger("torchpipe_py")

Enter = Callable[[Request], None]


class Engine:
    """Nodes and their threads. A request is in flight from ``admit`` to ``complete``, which happens exactly once.

    The set of requests in flight is the one source of truth: whoever removes a request from it, completes it.
    """

    def __init__(self, name: str, graph: Graph, plans: Mapping[str, NodePlan], max_inflight: int) -> None:
        self.name = name
        self.graph = graph
        self.plans = plans
        self.max_inflight = max_inflight
        self.admitted = self.rejected = 0
        self._inflight: set[Request] = set()
        self._lock = threading.Lock()
        self._closed = ""
        self._waiting: set[Node] = set()
        self.nodes: dict[str, Node] = {}
        self.entries: dict[str, Enter] = {}
        for node_name in reversed(graph.order):
            self._add(node_name)
        for node_name, node in self.nodes.items():
            node.upstream = tuple(self.nodes[other] for other in sorted(graph.upstream[node_name]))
        _engines.add(self)

    def _add(self, name: str) -> None:
        """Successors first: a node's requests are delivered to the entry of the next."""
        plan = self.plans[name]
        successors = self.graph.successors[name]
        after = self.entries[successors[0]] if successors else self.complete

        node = Node(
            name,
            plan.creators(),
            timeout=plan.spec.batching_timeout / 1000,
            deliver=after,
            fail=self.complete,
            waiting=self._waiting,
        )
        self.nodes[name] = node
        self.entries[name] = self._entry(node, plan.filter, after)

    def _entry(self, node: Node, filter_: Filter, after: Callable[[Request], Any]) -> Enter:
        """The way into a node: its filter decides on the thread that brings the request."""
        put = node.put
        run = Status.Run

        def enter(request: Request) -> None:
            try:
                status = filter_(request.data)
            except Exception as error:
                self.complete(request, _filter_error(node.name, error))
                return
            if status is run:
                request.arrived = perf_counter()
                put(request)
            elif status is Status.Skip:
                after(request)
            elif status is Status.Break:
                self.complete(request)
            else:
                self.complete(request, BackendError(f"node {node.name!r}: its filter says {status.name}"))

        return enter

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set up every instance of every node; where one fails, end all threads and raise its error."""
        error: BaseException | None = None
        try:
            for node in self.nodes.values():
                node.start()
            for name in self.graph.order:
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
        failure = kind(f"{plan.spec.place}: {plan.backend.label}: {error}")
        failure.__cause__ = error
        return failure

    def close(self, timeout: float | None = None) -> bool:
        """End every thread; queued requests fail with ``PipeClosed``. Idempotent, from any thread.

        ``False`` if a backend still ran after ``timeout`` seconds; its requests have failed nevertheless.
        """
        until = deadline_after(timeout)
        with self._lock:
            self._closed = self._closed or "the pipe is closed"
        for name in self.graph.order:
            self.nodes[name].close()
        if any(node.is_own_thread() for node in self.nodes.values()):
            # Called from a callback: this thread cannot wait for itself, another one finishes the job.
            threading.Thread(target=self.close, name="torchpipe_py close", daemon=True).start()
            return False
        ended = [node.join(until) for node in self.nodes.values()]
        for request in list(self._inflight):
            self.complete(request, PipeClosed("the pipe was closed before the request was finished"))
        return all(ended)

    def after_fork(self) -> None:
        """In a forked child the threads are gone: refuse instead of waiting for them."""
        self._lock = threading.Lock()
        self._closed = "the pipe was built in the parent process; threads do not survive a fork"
        self._inflight.clear()

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

    def complete(self, request: Request, error: BaseException | None = None) -> bool:
        """Make the outcome final and tell whoever waits; ``False`` if it was final already."""
        try:
            self._inflight.remove(request)
        except KeyError:
            return False
        request.error = error
        request.done = True
        if error is None:
            data = request.data
            if TASK_RESULT_KEY not in data and TASK_ERROR_KEY not in data:
                data[TASK_ERROR_KEY] = NoResult("a filter ended the request before any backend gave a result")
            if request.caller_data is not None:
                request.merge()
        # Whoever waits usually holds the request: a callback that is kept would make a cycle of the two.
        on_done, request.on_done = request.on_done, _nothing
        try:
            on_done()
        except BaseException:
            logger.exception("%s: the callback of a finished request failed", self.name)
        return True

    def retry_after_ms(self) -> int:
        """How long the slowest node needs for what it holds, by its measured compute time; at least 1 ms."""
        seconds = 0.0
        for node in self.nodes.values():
            done = sum(instance.requests + instance.singles for instance in node.instances)
            spent = sum(instance.compute_time for instance in node.instances)
            if done:
                seconds = max(seconds, node.load() * spent / done / len(node.instances))
        return max(1, math.ceil(seconds * 1000))


def _nothing() -> None:
    """The callback of a request that is completed."""


def _filter_error(node: str, error: BaseException) -> BackendError:
    failure = BackendError(f"node {node!r}: its filter: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


# Process-wide, since a fork is.
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.after_fork()


os.register_at_fork(after_in_child=_after_fork)
