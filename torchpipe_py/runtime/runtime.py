"""What runs a plan: its nodes, the way from node to node, and every request in flight."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import partial
from time import perf_counter

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import (
    BackendUnavailable,
    ConfigError,
    Overloaded,
    SetupError,
    TorchpipeError,
    describe,
    message_of,
)
from torchpipe_py.filters import Filter
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.graph import both_ways
from torchpipe_py.runtime.admission import ControlledDelay, Path, Patience, longest
from torchpipe_py.runtime.inflight import InFlight
from torchpipe_py.runtime.instance import Instance
from torchpipe_py.runtime.lanes.deferred import DeferredLane
from torchpipe_py.runtime.lanes.lane import Around, Led, Source
from torchpipe_py.runtime.node import Node, creators
from torchpipe_py.runtime.request import Countdown, Links, Request, deadline_after
from torchpipe_py.runtime.routes import Routes
from torchpipe_py.runtime.signals import is_main_thread
from torchpipe_py.runtime.tracing import Recorder

logger = logging.getLogger("torchpipe_py")

LEAVE_SECONDS = 2.0
"""How long a pipe that is closed waits for a backend to return when nobody waits for its requests any more."""

THREAD_PREFIX = "torchpipe-"
"""Of the names of threads that a pipe has."""

_LOOK_SECONDS = 0.05  # between two looks at whether somebody does

SETUP_MESSAGE_LIMIT = 100_000  # characters: what a compiler says may be long, and no client has a part in it


class Runtime:
    """Nodes and their threads, and the requests ``inflight``."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.name = pipeline.spec.place.source
        self.graph = pipeline.graph
        self.plans = plans = pipeline.plans
        self.inflight = InFlight(self.name, pipeline.spec.max_inflight, self.retry_after_ms)
        self._logical = pipeline.spec.logical()
        self._is_forked = False
        self.is_left = False  # nobody waits any more for a backend that does not return
        self.patience: Patience | None = None
        self._paths: dict[str, Path] = {}
        self._abandoned: set[Instance] = set()
        waiting: set[Led] = set()
        self.nodes: dict[str, Node] = {
            name: Node(
                name,
                creators(plans[name], self),
                timeout=plans[name].spec.batching_timeout / 1000,
                fail=self.inflight.complete,
                waiting=waiting,
            )
            for name in self.graph.order
            if plans[name].spec.owner == name
        }
        _runtimes.add(self)

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set up every instance of every node; where one fails, end all threads and raise its error."""
        error: BaseException | None = None
        try:
            filters = {name: self._filter(name) for name in self.plans}
            for node in self.nodes.values():
                node.start()
            for name in self.nodes:
                error = error or self._setup_error(name)
            if error is not None:
                raise error
            self._connect(filters)
            for node in self.nodes.values():
                node.open()
        except BaseException:
            self.close()
            raise

    def _filter(self, name: str) -> Filter:
        """The node's filter; where its class cannot be configured, ``SetupError``."""
        plan = self.plans[name]
        try:
            return plan.filter.create()
        except Exception as error:
            raise self._failure(error, f"{plan.spec.place}: filter {plan.spec.filter!r}") from error

    def _connect(self, filters: Mapping[str, Filter]) -> None:
        """Settle where requests go from each lane, and from which lanes they come."""
        lanes = {name: node.lane for name, node in self.nodes.items()}
        routes = Routes(self.graph, self.plans, filters, self._logical, lanes, self.inflight.complete)
        self.inflight.entries = routes.entries
        above = {
            owner: {self.plans[name].spec.owner for node in self._logical[owner] for name in self.graph.upstream[node]}
            for owner in lanes
        }
        # Only logical nodes, and graphs that several nodes jump to, lead back to where a request has been.
        leads_back = bool(self.graph.jumps) or len(lanes) < len(self.plans)
        around = both_ways(above) if leads_back else dict.fromkeys(lanes, ())
        for root in self.graph.roots:
            reached = [name for name in self.graph.order if root in self.graph.reached_from[name]]
            owners = {name: lanes[self.plans[name].spec.owner] for name in reached}
            self._paths[root] = Path(owners, self.graph.predecessors)
        for owner, lane in lanes.items():
            lane.upstream = tuple(lanes[name] for name in self.graph.order if name in above[owner])
            lane.both_ways = {lanes[name] for name in around[owner]}

    def instrument(self, recorder: Recorder, around: Around) -> None:
        """Tell ``recorder`` of each batch from now on.

        Backends that are not this package's are run by ``around``, and with them the jumps that lead to them: the rest
        makes no spans inside ``forward``.
        """
        own = {name for name, node in self.nodes.items() if node.has_own_code}
        for name, node in self.nodes.items():
            jumps = bool(own) and isinstance(node.lane, DeferredLane)
            node.instrument(recorder, around if jumps or name in own else None)

    def _setup_error(self, name: str) -> BaseException | None:
        error = self.nodes[name].wait_setup()
        if error is None:
            return None
        plan = self.plans[name]
        failure = self._failure(error, f"{plan.spec.place}: {plan.label}")
        failure.__cause__ = error
        return failure

    def _failure(self, error: BaseException, place: str) -> TorchpipeError:
        """What the builder of the pipe gets for an exception in a set-up."""
        for kind in (BackendUnavailable, ConfigError):
            if issubclass(type(error), kind):
                return kind(f"{place}: {message_of(error, SETUP_MESSAGE_LIMIT)}")
        return SetupError(f"{place}: {describe(error, SETUP_MESSAGE_LIMIT)}")

    def close(self, timeout: float | None = None) -> bool:
        """End every thread; queued requests fail with ``PipeClosed``. Idempotent, from any thread.

        ``False`` if a backend still ran after ``timeout`` seconds, or ``LEAVE_SECONDS`` after nobody waited for it any
        more; its requests have failed nevertheless.
        """
        until = deadline_after(timeout)
        is_callback = any(node.current_instance() for node in self.nodes.values())
        if is_callback:
            self.refuse()
        elif not is_main_thread():
            return self.end(until)
        # A callback's thread cannot wait for itself, and that of the handlers of signals may be torn out of the wait.
        ended: list[bool] = []
        closer = _closer(lambda: ended.append(self.end(until)))
        try:
            closer.start()
        except RuntimeError:  # Python ends, and starts no thread any more
            return not is_callback and self.end(until)
        if not is_callback:
            closer.join()
        return ended == [True]

    def drop(self) -> None:
        """``close`` for a pipe that nobody refers to. What runs may finish; nobody waits for it longer than that."""
        # NOTE: a collection may call this on any thread: on one of this pipe's, which may hold a lock that refusing
        # takes as well, or on one that takes the answers which the pipe's threads wait for.
        is_of_pipe = threading.current_thread().name.startswith(THREAD_PREFIX)
        if is_of_pipe or any(node.current_instance() for node in self.nodes.values()):
            with suppress(RuntimeError):  # Python ends, and ends the pipe itself
                start_new_thread(self.refuse, ())
        else:
            self.refuse()
            self._wait_for_threads(perf_counter() + LEAVE_SECONDS)

    def refuse(self) -> None:
        """Take no further request; let every instance finish its batch, and fail what is queued."""
        if self._is_forked:
            return
        self.inflight.refuse()
        # NOTE: all of them before any is closed: a node whose backend jumps has to know why what it runs there ends.
        for node in self.nodes.values():
            node.refuse()
        for node in self.nodes.values():
            node.close()

    def end(self, until: float | None = None) -> bool:
        """``close`` on a thread that nothing interrupts; ``until`` is in seconds of ``time.perf_counter``."""
        self.refuse()
        left = self._wait_for_threads(until)
        self.inflight.end()
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
        """The instances whose threads have not ended: their time is over, or nobody waits for what they run."""
        leave_at = math.inf
        while True:
            now = perf_counter()
            left = [instance for node in self.nodes.values() for instance in node.instances if instance.is_alive]
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
        """In a forked child the threads are gone: refuse instead of waiting for them."""
        self._is_forked = True
        self.inflight.after_fork()

    # -- requests -----------------------------------------------------------------------------------------------

    def is_taken(self, request: Request) -> bool:
        """Whether an instance has the request in its batch."""
        return any(request in instance.taken for node in self.nodes.values() for instance in node.instances)

    def refuse_wait(self, waiter: object, requests: Sequence[Request]) -> None:
        """``RuntimeError`` where an instance's thread is about to wait for what may come to its own node."""
        for name, node in self.nodes.items():
            if waiter in node.instances:
                reaching = frozenset().union(*({each, *self.graph.upstream[each]} for each in self._logical[name]))
                if any(request.node in reaching for request in requests):
                    raise RuntimeError(
                        f"a backend of node {name!r}, or a callback on its thread, waits for a request that may come "
                        "to that node, and would wait for itself: submit() does not wait"
                    )

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
        countdown = Countdown(len(items), lambda data, error: on_done([request.error for request in requests]))
        timeline = None if parent is None else parent.linked().timeline
        for index, item in enumerate(items):
            request = Request(item, countdown, root)
            request.links = Links(parent, is_inner=True)
            if parent is not None:
                if timeline is not None:
                    request.links.timeline = timeline.element(root, parent.node, index)
                request.deadline = parent.deadline
                parent.linked().give_up.append(partial(self.inflight.complete, request, CancelledError()))
            requests.append(request)
        self.inflight.add_inner(requests)
        for request in requests:
            if parent is not None and parent.done:
                self.inflight.complete(request, CancelledError())
            else:
                self.inflight.entries[root](request)

    def wait_for_graphs(self, root: str, items: Sequence[Data]) -> list[BaseException | None]:
        """Run each item through the graph and wait for all; their errors, in order. For an instance's own thread."""
        if not items:
            return []
        outcome: Future[list[BaseException | None]] = Future()
        self.run_graphs(root, items, outcome.set_result)
        with self._blocked_instance():
            return outcome.result()

    @contextmanager
    def _blocked_instance(self) -> Iterator[None]:
        """Meanwhile this thread's instance sends nothing to the nodes behind it: nobody waits for company from it."""
        for node in self.nodes.values():
            instance = node.current_instance()
            if instance is not None:
                with node.lane.paused(instance):
                    yield
                return
        yield

    @property
    def has_own_code(self) -> bool:
        """Whether a backend is none of this package's."""
        return any(node.has_own_code for node in self.nodes.values())

    def draw_from(self, source: Source) -> bool:
        """Have what enters the pipe fetched from there, before the first request; see ``pipe.draw_from``."""
        for node in self.nodes.values():
            node.lane.together = source.together
        entered = {self.plans[root].spec.owner for root in self.graph.roots}
        fetching = [self.nodes[owner].draw_from(source) for owner in entered]
        return all(fetching)

    def retry_after_ms(self) -> int:
        """``expected_wait`` in whole milliseconds, at least 1."""
        return max(1, math.ceil(self.expected_wait() * 1000))

    def expected_wait(self) -> float:
        """How long a request that enters now waits along its longest way, by recent times, seconds."""
        now = perf_counter()
        return max(path.expected(now)[0] for path in self._paths.values())

    def limit_delays(self, target: float | None) -> None:
        """Shed requests without a deadline that wait too long, before the first request; see ``pipe.limit_delays``."""
        self.patience = None if target == 0.0 else Patience()
        for node in self.nodes.values():
            node.lane.delay = ControlledDelay(target)

    def check_delay(self, seconds: float | None, root: str | None) -> None:
        """``Overloaded`` where a request that comes now cannot be finished in time; see ``pipe.check_delay``."""
        now, bound, why, shedding = perf_counter(), seconds, "its deadline is", []
        if bound is None:
            if self.patience is None:
                return
            bound, why = self.patience.bound(self.inflight.admitted, now), "clients leave after"
            delays = [node.lane.delay for node in self.nodes.values()]
            shedding = [delay for delay in delays if delay is not None and delay.is_shedding(now)]
            if bound == math.inf and not shedding:
                return
        for path in self._paths.values() if root is None else [self._paths[root]]:
            waits, computes = path.expected(now)
            # NOTE: a request that need not wait is begun even if the means say that it takes too long.
            if not waits:
                continue
            takes = waits + computes
            if shedding and takes > longest(computes):
                for delay in shedding:
                    delay.refused(now)
            elif takes <= (bound if seconds is not None else max(bound, 2 * computes)):
                continue
            limit = f"{why} {1000 * bound:.15g} ms" if bound < math.inf else "more come than can be taken"
            raise Overloaded(f"a request takes {1000 * takes:.0f} ms now, {limit}", max(1, math.ceil(1000 * waits)))

    def signature(self, root: str) -> Signature:
        """The inputs of the graph's root, and the outputs of its end, where it has one only."""
        ends = [name for name, roots in self.graph.reached_from.items() if root in roots]
        ends = [name for name in ends if not self.graph.successors[name]]
        outputs = self._signature_of(ends[0]).outputs if len(ends) == 1 else ()
        return Signature(self._signature_of(root).inputs, outputs)

    def _signature_of(self, name: str) -> Signature:
        return self.nodes[self.plans[name].spec.owner].instances[0].backend.signature()

    def describe(self) -> str:
        """The graph, a line for each node."""
        state = "closed" if self.inflight.refusal else f"{len(self.inflight)} in flight"
        lines = [f"pipe({self.name}, {state})"]
        for name in self.graph.order:
            plan = self.plans[name]
            node = self.nodes[plan.spec.owner]
            after = self.graph.successors[name]
            arrow = f" -> {', '.join(after)}" if after else ""
            lines.append(f"  {name}: {plan.label} x{len(node.instances)} [{node.min}..{node.max}]{arrow}")
        return "\n".join(lines)


def _closer(end: Callable[[], object]) -> threading.Thread:
    return threading.Thread(target=end, name="torchpipe_py close", daemon=True)


# Process-wide, since a fork is.
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _after_fork() -> None:
    for runtime in list(_runtimes):
        runtime.after_fork()


def _at_exit() -> None:
    """End the threads of the pipes that are still there; nobody waits for them any more."""
    until = perf_counter() + LEAVE_SECONDS
    runtimes = [runtime for runtime in list(_runtimes) if not runtime.is_left]
    for runtime in runtimes:
        runtime.refuse()
    for runtime in runtimes:
        runtime.end(until)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
