"""Runs a plan: its nodes, the routes between them, and every request in flight."""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import TypeVar

from torchpipe_py.backends.base import Backend, Data
from torchpipe_py.backends.control.python import PythonClass
from torchpipe_py.backends.current import CURRENT
from torchpipe_py.backends.deferred import DeferredBackend, HandOverBackend
from torchpipe_py.errors import (
    BackendUnavailable,
    ConfigError,
    Overloaded,
    PipeClosed,
    SetupError,
    TorchpipeError,
    describe,
    logger,
    message_of,
)
from torchpipe_py.filters import Filter
from torchpipe_py.metrics import Metrics, collect_in, current
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.graph import both_ways
from torchpipe_py.runtime.admission import Door, Path, QueueTarget, longest_compute
from torchpipe_py.runtime.inflight import InFlight
from torchpipe_py.runtime.interrupts import EXECUTOR, InterruptSafeExecutor, has_handlers
from torchpipe_py.runtime.nodes.batching import BatchingNode
from torchpipe_py.runtime.nodes.hand_over import HandOverNode
from torchpipe_py.runtime.nodes.instance import THREAD_PREFIX, Instance, creator
from torchpipe_py.runtime.nodes.node import Node
from torchpipe_py.runtime.nodes.ordering import Order
from torchpipe_py.runtime.nodes.single import DeferredNode, SingleNode
from torchpipe_py.runtime.nodes.wiring import Around, IsDue, Source, Waiting, Wiring
from torchpipe_py.runtime.record.statistics import Recorder
from torchpipe_py.runtime.request import Countdown, Links, Request, deadline_after
from torchpipe_py.runtime.routes import Enter, Routes

LEAVE_SECONDS = 2.0
"""Seconds that a closing pipe waits for a backend to return once no caller waits for its requests."""

_LOOK_SECONDS = 0.05  # between two checks whether a caller waits

SETUP_MESSAGE_LIMIT = 100_000  # characters: compiler output may be long, and it does not come from a client

T = TypeVar("T")


def _is_arriving(since: float, until: float) -> bool:
    """Whether a request is due (see ``IsDue``) while a call of several enters."""
    return True


class Runtime:
    """Nodes, their threads, and the requests ``inflight``. ``nodes`` maps names to nodes once ``start`` returns.

    ``target`` limits how long requests wait, ``metrics`` are those of custom backends, ``recorders`` get what ran,
    ``contexts`` wrap each ``forward`` of custom backends, and ``expected`` tells which requests will come; all may
    change while the pipe runs.
    """

    door: Door

    def __init__(self, pipeline: Pipeline) -> None:
        self.name = pipeline.spec.place.source
        self.graph = pipeline.graph
        self.plans = plans = pipeline.plans
        self.inflight = InFlight(self.name, pipeline.spec.max_inflight, self.retry_after_ms)
        self.nodes: dict[str, Node] = {}
        self.recorders: list[Recorder] = []
        self.metrics = Metrics()
        self.contexts: list[Around] = []
        self.expected: list[IsDue] = []
        self._waiting: set[Waiting] = set()
        self.target = QueueTarget()
        self.is_left = False  # the pipe has stopped waiting for a backend that does not return
        self._logical = pipeline.spec.logical()
        self._main_thread = threading.main_thread().ident
        self._has_handlers = has_handlers()
        self._is_forked = False
        self._abandoned: set[Instance] = set()
        self._entries: Mapping[str, Enter] = {}
        self._instances: dict[str, list[Instance]] = {}
        for name in self.graph.order:
            if plans[name].spec.owner == name:
                create = creator(plans[name], self)
                count = max(plans[name].spec.instance_num)
                self._instances[name] = [
                    Instance(name, index, create, self.recorders, self.metrics) for index in range(count)
                ]
        _runtimes.add(self)

    @property
    def instances(self) -> list[Instance]:
        """The instances of all nodes."""
        return [instance for instances in self._instances.values() for instance in instances]

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, source: Source | None = None) -> None:
        """Set up every instance of every node; if one fails, end all threads and raise its error.

        With ``source``, nodes with batches that requests enter fetch them from it.
        """
        try:
            filters = {name: self._filter(name) for name in self.plans}
            for instance in self.instances:
                instance.start()
            for instance in self.instances:
                error = instance.wait_setup()
                if error is not None:
                    plan = self.plans[instance.node]
                    raise self._failure(error, f"{plan.spec.place}: {plan.label}") from error
            nodes = {name: self._make_node(name) for name in self._instances}
            self._wire(nodes, filters, source)
            self.nodes = nodes
            for instance in self.instances:
                instance.open(self.nodes[instance.node].serve)
        except BaseException:
            self.close()
            raise

    def _filter(self, name: str) -> Filter:
        """The node's filter; raises ``SetupError`` if its class cannot be configured."""
        plan, before = self.plans[name], current()
        collect_in(self.metrics)
        try:
            return plan.filter.create()
        except Exception as error:
            raise self._failure(error, f"{plan.spec.place}: filter {plan.spec.filter!r}") from error
        finally:
            collect_in(before)

    def _make_node(self, name: str) -> Node:
        """Create the node, of the class that its instances require; they must be set up."""
        instances = self._instances[name]
        if any(instance.max > 1 for instance in instances):
            return BatchingNode(name, instances, self.plans[name].spec.batching_timeout / 1000)
        if isinstance(instances[0].backend, HandOverBackend):
            return HandOverNode(name, instances)
        if all(isinstance(instance.backend, DeferredBackend) for instance in instances):
            return DeferredNode(name, instances)
        return SingleNode(name, instances)

    def _wire(self, nodes: Mapping[str, Node], filters: Mapping[str, Filter], source: Source | None) -> None:
        """Connect the nodes with each other, and with what they share."""
        graph, complete = self.graph, self.inflight.complete
        orders = {name: self._order(node) for name, node in nodes.items() if self.plans[name].spec.ordered_by}
        puts = {name: (orders.get(plan.spec.owner) or nodes[plan.spec.owner]).put for name, plan in self.plans.items()}
        routes = Routes(graph, self.plans, filters, self._logical, puts, complete)
        self._entries = routes.entries
        paths: dict[str, Path] = {}
        for root in graph.entered:
            self._add_path(root, nodes, paths)
        self.door = Door({root: paths[root] for root in graph.entered}, self.target)

        above = {
            owner: {self.plans[name].spec.owner for node in self._logical[owner] for name in graph.upstream[node]}
            for owner in nodes
        }
        # A request can revisit a node only through logical nodes, or graphs that several nodes jump to.
        leads_back = bool(graph.jumps) or len(nodes) < len(self.plans)
        around = both_ways(above) if leads_back else dict.fromkeys(nodes, ())
        entered = {self.plans[root].spec.owner for root in graph.entered}
        for owner, node in nodes.items():
            order, leave = orders.get(owner), routes.exits[owner]
            roots = frozenset().union(*(graph.reached_from[name] for name in self._logical[owner]))
            node.open(
                Wiring(
                    deliver=leave if order is None else order.delivering(leave),
                    fail=complete if order is None else order.fail,
                    upstream=tuple(nodes[name] for name in graph.order if name in above[owner]),
                    both_ways={nodes[name] for name in around[owner]},
                    waiting=self._waiting,
                    expected=self.expected,
                    order=order,
                    target=self.target,
                    path_compute=partial(longest_compute, [paths[root] for root in roots if root in paths]),
                    source=source if owner in entered else None,
                    together=nullcontext if source is None else source.together,
                    contexts=self.contexts if _needs_context(node, nodes) else (),
                )
            )

    def _order(self, node: Node) -> Order:
        spec = self.plans[node.name].spec
        return Order(node.name, spec.ordered_by, spec.state_seconds, node.put, self.inflight.complete)

    def _add_path(self, root: str, nodes: Mapping[str, Node], paths: dict[str, Path]) -> Path:
        """Create the path from a root, and those of the graphs that its nodes jump to."""
        if root not in paths:
            reached = [name for name in self.graph.order if root in self.graph.reached_from[name]]
            passed = {name: nodes[self.plans[name].spec.owner] for name in reached}
            inner = {
                name: [self._add_path(target, nodes, paths) for target in self.graph.jumps.get(name, ())]
                for name, node in passed.items()
                if isinstance(node, DeferredNode)  # another node computes while it waits for its jump
            }
            paths[root] = Path(passed, self.graph.predecessors, inner)
        return paths[root]

    @property
    def has_own_code(self) -> bool:
        """Whether any backend is not part of this package."""
        return any(map(_has_own_code, self.nodes.values()))

    def _failure(self, error: BaseException, place: str) -> TorchpipeError:
        """The error that building the pipe raises for an exception during set-up."""
        for kind in (BackendUnavailable, ConfigError):
            if issubclass(type(error), kind):
                return kind(f"{place}: {message_of(error, SETUP_MESSAGE_LIMIT)}")
        return SetupError(f"{place}: {describe(error, SETUP_MESSAGE_LIMIT)}")

    def close(self, timeout: float | None = None) -> bool:
        """End every thread; queued requests fail with ``PipeClosed``. Idempotent, from any thread.

        Returns ``False`` if a backend still ran after ``timeout`` seconds, or ``LEAVE_SECONDS`` after its last caller
        stopped waiting; its requests have failed nevertheless.
        """
        until = deadline_after(timeout)
        if self.current_instance() is None:
            return self.end(until)
        self.refuse()
        with suppress(RuntimeError):  # a Python that exits starts no more threads
            # A callback's thread cannot wait for itself.
            threading.Thread(target=self.end, args=(until,), name="torchpipe_py close", daemon=True).start()
        return False

    def drop(self) -> None:
        """``close`` for an unreferenced pipe, in the background: running requests may finish."""
        # NOTE: the garbage collector may call this on any thread, which may hold a lock that ``refuse`` takes.
        with suppress(RuntimeError):  # Python exits, and ends the pipe itself
            start_new_thread(self._refuse, ())
        if not threading.current_thread().name.startswith(THREAD_PREFIX):
            self._wait_for_threads(perf_counter() + LEAVE_SECONDS)

    def refuse(self) -> None:
        """Accept no further request; let every instance finish its batch, and fail queued requests."""
        self.protect(self._refuse)

    def _refuse(self) -> None:
        if self._is_forked:
            return
        self.inflight.refuse()
        # NOTE: all nodes before closing any: a node whose backend jumps must know why its inner requests fail.
        for node in self.nodes.values():
            node.refuse()
        for node in self.nodes.values():
            node.close()
        for instance in self.instances:
            instance.open(None)  # if it has not started to serve

    def end(self, until: float | None = None) -> bool:
        """``close``, on a thread outside the pipe; ``until`` is in seconds of ``time.perf_counter``."""
        self.refuse()
        left = self._wait_for_threads(until)
        self.protect(self.inflight.end)
        now = perf_counter()
        self.is_left = bool(left) and (until is None or now < until)
        for instance in left:
            seconds = instance.running_s(now)
            where = self.name, instance.node, instance.index, instance.backend.config.label
            if seconds >= LEAVE_SECONDS and instance not in self._abandoned:
                self._abandoned.add(instance)
                logger.error(
                    "%s: node %r: instance %d of %s is still running after %.1f s; abandoning it", *where, seconds
                )
            else:
                logger.debug("%s: node %r: instance %d of %s has not ended yet", *where)
        return not left

    def _wait_for_threads(self, until: float | None) -> list[Instance]:
        """Wait for the threads; returns the instances still running after the time limit, or with no caller waiting."""
        leave_at = math.inf
        while True:
            now = perf_counter()
            left = [instance for instance in self.instances if instance.is_alive]
            if not left or (until is not None and now >= until):
                return left
            if self.inflight.is_awaited(now):
                leave_at = math.inf
            elif leave_at == math.inf:
                leave_at = now + LEAVE_SECONDS
            elif now >= leave_at and all(instance.running_s(now) for instance in left):
                return left
            left[0].join(min(now + _LOOK_SECONDS, math.inf if until is None else until))

    def after_fork(self) -> None:
        """Refuse requests in a forked child, where the threads do not exist."""
        self._is_forked = True
        self.inflight.after_fork()

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def executor(self) -> InterruptSafeExecutor | None:
        """For calls of the main thread; ``None`` on other threads, and once the pipe is closed."""
        if get_ident() != self._main_thread or self.inflight.refusal:
            return None
        return EXECUTOR

    def protect(self, work: Callable[[], T]) -> T:
        """Run ``work`` so that no signal handler interrupts it; returns its result or raises its error.

        Without a signal handler when the pipe was built, as in a worker of the service, the main thread runs it.
        """
        executor = self.executor if self._has_handlers else None
        return work() if executor is None else executor.run(work)

    def submit(self, requests: Sequence[Request], stands_in: bool = False) -> None:
        """Admit all requests or none, and bring each to its root.

        With ``stands_in`` this thread, of a blocked caller with one request, runs what any thread may run. Raises
        ``Overloaded`` above the limit, ``PipeClosed`` after ``close``.
        """
        caller = requests[0].caller = [] if stands_in else None
        self.inflight.admit(requests)
        if len(requests) == 1:
            self._enter(requests[0])
        else:
            with self.arriving():
                for request in requests:
                    self._enter(request)
        if caller:
            outer = CURRENT.instance
            try:
                while caller:  # until other threads have taken over, or the request is finished
                    node, request = caller.pop()
                    node.run_on_caller(request)
            finally:
                CURRENT.instance = outer

    def _enter(self, request: Request) -> None:
        try:
            self._entries[request.node](request)
        except BaseException as error:
            self.inflight.complete(request, error)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """A context in which batches that have a timeout wait for the rest of a call, whose requests enter in turn."""
        self.expected.append(_is_arriving)
        try:
            yield
        finally:
            self.expected.remove(_is_arriving)
            for node in list(self._waiting):
                node.wake_leader()

    def start_requests(self, requests: Sequence[Request]) -> None:
        """``submit`` where no signal handler interrupts it; ``Overloaded`` is the outcome of the requests.

        Raises ``PipeClosed`` after ``close``. The main thread does not wait until they are admitted; after any other
        exception there, such as one of a signal handler, the caller must complete them.
        """
        if self.inflight.refusal:
            self.inflight.admit(requests)  # raises
        executor = self.executor if self._has_handlers else None
        if executor is None:
            self._submit_or_refuse(requests)
        else:
            executor.start(partial(self._submit_or_refuse, requests))

    def _submit_or_refuse(self, requests: Sequence[Request]) -> None:
        try:
            self.submit(requests)
        except (Overloaded, PipeClosed) as error:
            self.inflight.report_refused(requests, error)

    def complete(self, requests: Sequence[Request], error: BaseException) -> None:
        """End the requests with an error, unless they are finished."""
        for request in requests:
            self.inflight.complete(request, error)

    def current_instance(self) -> Instance | None:
        """The instance whose own thread, or a thread that acts for it, is calling."""
        return next((instance for instance in self.instances if instance.is_current), None)

    def refuse_wait(self, instance: object, requests: Sequence[Request]) -> None:
        """Raise ``RuntimeError`` if an instance's thread would wait for requests that may reach its own node."""
        for name, instances in self._instances.items():
            if instance in instances:
                reaching = frozenset().union(*({each, *self.graph.upstream[each]} for each in self._logical[name]))
                if any(request.node in reaching for request in requests):
                    raise RuntimeError(
                        f"a backend of node {name!r}, or a callback on its thread, waits for a request that may come "
                        "to that node, and would wait for itself: submit() does not wait"
                    )

    def retry_after_ms(self) -> int:
        """Expected wait of a request that enters now, in whole milliseconds, at least 1."""
        return max(1, math.ceil(self.door.expected_wait() * 1000))

    # -- graphs that are run by a node of another -----------------------------------------------------------------

    def run_graphs(
        self,
        root: str,
        items: Sequence[Data],
        on_done: Callable[[list[BaseException | None]], None],
        parent: Request | None = None,
    ) -> None:
        """Bring each item (there must be at least one) to the graph's root.

        ``on_done(errors)``, in order, is called once, from any thread, when all are finished. They end with their
        ``parent``, the request whose node runs them: at its deadline, or when it is abandoned.
        """
        requests: list[Request] = []
        countdown = Countdown(len(items), lambda data, error: on_done([request.error for request in requests]))
        timeline = None if parent is None else parent.linked().timeline
        if parent is not None:
            parent.linked().has_begun[parent.node] = lambda: True
        for index, item in enumerate(items):
            request = Request(item, countdown, root)
            request.priority = 0 if parent is None else parent.priority
            request.links = Links(parent, is_inner=True)
            if parent is not None:
                if timeline is not None:
                    request.links.timeline = timeline.element(root, parent.node, index)
                request.deadline = parent.deadline
                parent.linked().on_completed.append(partial(self.inflight.complete, request, CancelledError()))
            requests.append(request)
        self.inflight.add_inner(requests)
        for request in requests:
            if parent is not None and parent.done:
                self.inflight.complete(request, CancelledError())
            else:
                self._entries[root](request)

    def wait_for_graphs(self, root: str, items: Sequence[Data]) -> list[BaseException | None]:
        """Run each item through the graph and wait for all; returns their errors in order. For an instance's thread."""
        if not items:
            return []
        outcome: Future[list[BaseException | None]] = Future()
        self.run_graphs(root, items, outcome.set_result)
        instance = self.current_instance()
        if instance is None:
            return outcome.result()
        # Meanwhile it sends nothing to later nodes, so their batches must not wait for it.
        with self.nodes[instance.node].paused(instance):
            return outcome.result()


def _needs_context(node: Node, nodes: Mapping[str, Node]) -> bool:
    """Whether code in the node's ``forward`` may look for its context: a custom backend, or a jump to one."""
    return _has_own_code(node) or (isinstance(node, DeferredNode) and any(map(_has_own_code, nodes.values())))


def _has_own_code(node: Node) -> bool:
    return any(_is_own_code(instance.backend) for instance in node.instances)


def _is_own_code(backend: Backend) -> bool:
    is_builtin = type(backend).__module__.startswith("torchpipe_py.") and not isinstance(backend, PythonClass)
    return not is_builtin or any(map(_is_own_code, backend.config.children))


# Process-wide, because a fork affects the whole process.
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _after_fork() -> None:
    for runtime in list(_runtimes):
        runtime.after_fork()


def _at_exit() -> None:
    """End the threads of all remaining pipes, for which no caller waits any more."""
    until = perf_counter() + LEAVE_SECONDS
    runtimes = [runtime for runtime in list(_runtimes) if not runtime.is_left]
    for runtime in runtimes:
        runtime._refuse()
    for runtime in runtimes:
        runtime.end(until)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
