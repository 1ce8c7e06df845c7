"""The pipe: built from a configuration, called from any thread, closed once."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from _thread import LockType, allocate_lock
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torchpipe_py.backends.current import CURRENT
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import DeadlineExceeded, InvalidRequest, UnknownNode, listed, nearest, shown
from torchpipe_py.keys import (
    TASK_DATA_KEY,
    TASK_NODE_NAME_KEY,
    TASK_PRIORITY_KEY,
)
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.registry import Registry
from torchpipe_py.registry import default as default_registry
from torchpipe_py.runtime.interrupts import InterruptSafeExecutor
from torchpipe_py.runtime.mapping import in_order
from torchpipe_py.runtime.nodes.batching import BatchingNode
from torchpipe_py.runtime.nodes.wiring import IsDue, Source
from torchpipe_py.runtime.record.tracing import (
    DEFAULT_LIMIT,
    WANTED,
    MakeRequest,
    Trace,
    Wanted,
    add_to_timelines,
    making_timelines,
)
from torchpipe_py.runtime.record.visits import Timeline
from torchpipe_py.runtime.request import Countdown, OnDone, Request, checked_priority, deadline_after, ignore_outcome
from torchpipe_py.runtime.runtime import Runtime

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from torchpipe_py.runtime.record.spans import Spans

Data = dict[str, Any]

Given = TypeVar("Given", bound="Data | Sequence[Data]")
"""The argument and return value of a call: the dict of a request, or a list of dicts."""


class pipe:
    """A pipeline that any number of threads may call at once.

    ``config`` is a path ending in ``.toml``, a flat dict (one node), a dict of dicts (``"global"`` holds defaults), or
    a result of ``plan_pipeline``.
    Raises ``ConfigError`` for a configuration that cannot be built, ``BackendUnavailable`` if a backend lacks a
    library or device, ``SetupError`` for any other failure of a backend's ``setup``; each of these is both a
    ``ValueError`` and a ``RuntimeError``. After an error no thread is left.

    A request is a dict with ``data``; it is changed in place. Afterwards ``result`` holds the result. If there is no
    result (the bytes are not an image, for example), ``error`` holds an exception that explains why. A defect in a
    backend raises ``BackendError`` in the caller. ``node_name`` selects the root if there are several (not counting
    roots that a jump leads to). ``priority`` 1 is low: batches take normal requests (0) first and fill up with
    low ones; a low one that waited for a second gets every fourth turn. Low-priority requests are admitted up to half
    of ``max_inflight``. A list of dicts is several requests: the call returns when all are finished, each with its
    ``result`` or ``error``, and raises the first error if any raised. A call returns its argument.
    ``timeout`` (seconds) limits a call: then it raises ``DeadlineExceeded`` and no longer changes the dict.
    Above ``max_inflight`` requests in flight it raises ``Overloaded`` at once. Ctrl-C, or another signal handler, may
    raise anywhere in a call: the call ends with that exception, and nothing else is lost; this holds for ``submit`` and
    ``acall`` if the handler was set when the pipe was built. A signal handler must not call the pipe.
    ``registry`` has the backends, filters and postprocessors that ``config`` names; the default registry is that of
    ``register_backend`` and similar. With ``source``, root nodes that form batches fetch their requests from it, and
    each batch is delivered inside ``source.together()``.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline,
        *,
        registry: Registry | None = None,
        source: Source | None = None,
    ) -> None:
        plan = plan_pipeline(config, default_registry if registry is None else registry)
        self._runtime = Runtime(plan)
        # The threads refer only to the runtime, so a dropped pipe is closed. At exit, the runtime closes itself.
        self._finalizer = weakref.finalize(self, self._runtime.drop)
        self._finalizer.atexit = False
        self._runtime.start(source)
        self.models = plan.models
        """Every root that a request may enter, as a ``Model``: ``name``, ``version``, ``root``."""
        self.roots, self.only_root = plan.roots, plan.only_root
        """Maps each valid ``node_name`` to a root; and the root of a request without ``node_name``."""
        self._recording = threading.Lock()  # of what records: ``recorders``, ``_make_request``, ``_spans``
        self._make_request: MakeRequest = Request
        self._spans: Spans | None = None

    def __call__(self, data: Given, timeout: float | None = None) -> Given:
        """Run one request or several, and wait until all are finished; returns ``data``.

        Raises ``RuntimeError`` on the thread of an instance whose node a request may reach: it would deadlock.
        """
        finished = allocate_lock()
        finished.acquire()
        wake: Any = finished.__exit__  # ``release``, whatever its arguments
        requests = self._requests(data, wake, timeout)
        if not requests:
            return data
        if CURRENT.instance is not None:
            self._runtime.refuse_wait(CURRENT.instance, requests)
        stands_in = timeout is None and len(requests) == 1
        executor = self._runtime.executor
        if executor is None:
            self._runtime.submit(requests, stands_in)
            if timeout is None:
                finished.acquire()
            elif not finished.acquire(timeout=_seconds(timeout)):
                self._expire(requests, timeout)
                finished.acquire()
        else:
            self._call_on(executor, finished, requests, stands_in, timeout)
        for request in requests:
            if request.error is not None:
                raise request.error
        return data

    def _call_on(
        self,
        executor: InterruptSafeExecutor,
        finished: LockType,
        requests: Sequence[Request],
        stands_in: bool,
        timeout: float | None,
    ) -> None:
        """``call`` on the main thread: wait, while the executor submits the requests and perhaps runs them."""
        runtime = self._runtime
        refusals: list[BaseException] = []

        def call() -> None:
            try:
                runtime.submit(requests, stands_in)
            except BaseException as error:  # then none was started
                refusals.append(error)
                finished.release()

        try:
            executor.start(call)
            if timeout is None:
                finished.acquire()
            elif not finished.acquire(timeout=_seconds(timeout)):
                executor.start(partial(self._expire, requests, timeout))
                finished.acquire()
        except BaseException as interrupt:
            executor.abandon(partial(runtime.complete, requests, interrupt))
            raise
        if refusals:
            raise refusals[0]

    def submit(self, data: Given, timeout: float | None = None) -> Future[Given]:
        """Start one request or several; the future's result is ``data``. Cancelling it drops queued requests.

        ``Overloaded`` is the future's error, too; raises ``PipeClosed`` after ``close``.
        The deadline is checked before each node: no thread watches it while a backend runs.
        """
        future: Future[Given] = Future()
        try:
            self._start(data, future, timeout)
            return future
        except BaseException:  # a signal handler may raise once they have started
            future.cancel()
            raise

    def map(
        self, items: Iterable[Data], ahead: int = 16, *, newest: bool = False, return_errors: bool = False
    ) -> Iterator[Data]:
        """Run a request for each dict of ``items``, at most ``ahead`` at once; yields the finished dicts in order.

        An item is read from ``items`` when there is room for it. With ``newest`` a separate thread reads items as they
        come, and if there is no room only the newest waits (for camera frames, for example).
        An error of a request is raised in its place and the rest is cancelled; with ``return_errors`` the dict holds
        it as ``error``. Raises ``ValueError`` for ``ahead`` below 1.
        """
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, not {ahead!r}")
        return in_order(self._start, items, ahead, newest, return_errors)

    async def acall(self, data: Given, timeout: float | None = None) -> Given:
        """Await ``submit`` for at most ``timeout`` seconds; returns ``data``. Cancelling drops queued requests."""
        future: Future[Given] = Future()
        outcome = asyncio.wrap_future(future)
        try:
            requests = self._start(data, future, timeout)
            if timeout is None:
                return await outcome
            timer = asyncio.get_running_loop().call_later(_seconds(timeout), self._expire, requests, timeout)
            try:
                return await outcome
            finally:
                timer.cancel()
        except BaseException:
            future.cancel()  # no effect on one that is done
            raise

    def dispatch(
        self, data: Data, on_done: Callable[[Data, BaseException | None], None], timeout: float | None = None
    ) -> Ticket:
        """Start one request without a waiting thread, for servers.

        ``on_done(data, error)`` is called exactly once, with ``Overloaded`` too, unless ``dispatch`` itself raises, on
        the thread that finishes the request, perhaps before ``dispatch`` returns; it must not block. The deadline is
        checked before each node; ``Ticket.cancel`` ends the request earlier. Raises ``PipeClosed`` after ``close``.
        """
        if not isinstance(data, dict):
            raise InvalidRequest(f"expected a dict, got {type(data).__name__}")
        runtime = self._runtime
        request = self._request(data, on_done, deadline_after(timeout))
        ticket = Ticket(runtime, request)
        try:
            runtime.start_requests((request,))
            return ticket
        except BaseException as error:
            request.on_done = ignore_outcome
            ticket.cancel(error)
            raise

    def follow_models(self, changed: Callable[[], object]) -> None:
        """Call ``changed`` after each change of ``models``, which never change here; see ``Pipes``."""

    def check_loaded(self, name: str) -> None:
        """Raise ``ModelUnavailable`` for a model that is known and not loaded: none here; see ``Pipes``."""

    hint_if_unknown = ""
    """The end of the message about an unknown model; see ``Pipes``."""

    @property
    def has_own_code(self) -> bool:
        """Whether any backend is not part of this package."""
        return self._runtime.has_own_code

    @property
    def forms_batches_at_entry(self) -> bool:
        """Whether every node that requests enter forms batches, and so fetches from a ``source`` itself."""
        runtime = self._runtime
        entered = {runtime.plans[root].spec.owner for root in self.roots.values()}
        return all(isinstance(runtime.nodes[owner], BatchingNode) for owner in entered)

    @contextmanager
    def expecting(self, is_due: IsDue) -> Iterator[None]:
        """A context in which batches wait for requests that are due before their ``batching_timeout`` ends.

        ``is_due(since, until)`` returns whether a request that has not arrived is due in that time, in seconds from
        now; it must not block.
        """
        expected = self._runtime.expected
        expected.append(is_due)
        try:
            yield
        finally:
            expected.remove(is_due)

    def arriving(self) -> AbstractContextManager[None]:
        """A context in which batches that have a timeout wait for the rest of a call, whose requests enter in turn."""
        return self._runtime.arriving()

    def max(self) -> int:
        """Size of the largest batch that any node forms."""
        return max(node.max for node in self._runtime.nodes.values())

    def min(self) -> int:
        """Size of the smallest batch that any node forms."""
        return min(node.min for node in self._runtime.nodes.values())

    def signature(self, node_name: str | None = None) -> Signature:
        """The types of ``data`` and ``result`` of a request to this root, as far as its backends declare them, and the
        parameters that any of them reads.

        Raises ``UnknownNode`` if it is not a root, or if it is omitted and there are several.
        """
        root = self.only_root if node_name is None and self.only_root else self._root(node_name)
        graph = self._runtime.graph
        ends = [name for name, roots in graph.reached_from.items() if root in roots and not graph.successors[name]]
        outputs = self._signature_of(ends[0]).outputs if len(ends) == 1 else ()
        reached = map(self._signature_of, self._reached(root))
        parameters = dict.fromkeys(name for signature in reached for name in signature.parameters)
        return Signature(self._signature_of(root).inputs, outputs, tuple(parameters))

    def _signature_of(self, name: str) -> Signature:
        runtime = self._runtime
        return runtime.nodes[runtime.plans[name].spec.owner].instances[0].backend.signature()

    def setup_choices(self) -> dict[str, list[str]]:
        """What the backends of each node chose at set-up, by node: see ``Backend.setup_choices``."""
        choices = {
            name: sorted({choice for instance in node.instances for choice in instance.backend.setup_choices()})
            for name, node in self._runtime.nodes.items()
        }
        return {name: found for name, found in choices.items() if found}

    def expected_wait(self) -> float:
        """Seconds that a request that arrives now waits at its nodes, from recent compute times."""
        return self._runtime.door.expected_wait()

    def limit_delays(self, target: float | None = None) -> None:
        """Limit the time that requests wait, for servers; to be called before the first request.

        A request that cannot meet its deadline is dropped before it is computed. Without a deadline, ``check_delay``
        refuses it if it would wait longer than ``target`` seconds, and a node drops it with ``Overloaded`` before it
        computes it if it has waited longer than that and its compute time while others wait. ``None`` means 0.1 s,
        or four times the compute time of its path if that is more; 0.0 means no limit. Requests of low priority wait as
        long as their deadlines allow.
        """
        self._runtime.target.set(target)

    def keys_read(self, node_name: str | None = None) -> frozenset[str] | None:
        """The keys of a request's dict, beside ``data``, that nodes after this root may read; ``None``: any.

        Raises ``UnknownNode`` as ``signature`` does.
        """
        root = self.only_root if node_name is None and self.only_root else self._root(node_name)
        read: set[str] = set()
        for name in self._reached(root):
            keys = self._runtime.plans[name].keys_read()
            if keys is None:
                return None
            read.update(keys)
        return frozenset(read)

    def nodes_of(self, node_name: str) -> list[str]:
        """The nodes that requests of this root may reach, jumps included, by their names in ``stats``.

        Raises ``UnknownNode`` if it is not a root.
        """
        plans = self._runtime.plans
        return list(dict.fromkeys(plans[name].spec.owner for name in self._reached(self._root(node_name))))

    def _reached(self, root: str) -> Collection[str]:
        """The logical nodes that requests of this root may reach, jumps included."""
        graph = self._runtime.graph
        found: dict[str, None] = {}
        left = [root]
        while left:
            root = left.pop()
            reached = [name for name in graph.order if root in graph.reached_from[name] and name not in found]
            found.update(dict.fromkeys(reached))
            left += [target for name in reached for target in graph.jumps.get(name, ())]
        return found.keys()

    def check_delay(self, seconds: float | None, priority: int = 0, node_name: object = None) -> None:
        """Raise ``Overloaded``, with ``retry_after_ms``, if a new request would not be finished in ``seconds``.

        Without a time limit, raise it if the request would wait longer than the target of ``limit_delays``. If
        ``node_name`` is a root, only the nodes reached from it count.
        """
        root = self.roots.get(node_name) if isinstance(node_name, str) else self.only_root
        self._runtime.door.check(seconds, root, priority)

    @property
    def is_refusing(self) -> bool:
        """Whether ``check_delay`` refused a request within the last second.

        Then it pays to check the next request before its inputs are read.
        """
        return self._runtime.door.is_refusing

    def stats(self) -> dict[str, Any]:
        """Counts and times since the pipe was built; see ``torchpipe_py.runtime.record.statistics``.

        ``metrics`` are those of custom backends, see ``torchpipe_py.metrics.Family``.
        """
        runtime = self._runtime
        return {
            "inflight": len(runtime.inflight),
            "max_inflight": runtime.inflight.most,
            "admitted": runtime.inflight.admitted,
            "rejected": runtime.inflight.rejected,
            "nodes": {name: node.stats() for name, node in runtime.nodes.items()},
            "metrics": runtime.metrics.stats(),
        }

    @contextmanager
    def trace(self, limit: int = DEFAULT_LIMIT) -> Iterator[Trace]:
        """A context that records up to ``limit`` visits of requests at nodes; ``save`` them, or read ``visits``.

        Raises ``RuntimeError`` if the pipe is already traced. Requests under way at start or end are partly recorded.
        """
        recorders, trace = self._runtime.recorders, Trace(limit)
        try:
            with self._recording:
                if any(isinstance(each, Trace) and not each.is_over for each in recorders):
                    raise RuntimeError("the pipe is being traced already")
                # NOTE: remove a trace whose end was interrupted.
                recorders[:] = [trace, *[each for each in recorders if not isinstance(each, Trace)]]
            yield trace
        finally:
            trace.is_over = True
            with self._recording:
                recorders[:] = [each for each in recorders if each is not trace]

    @contextmanager
    def timed(self, with_pictures: bool = False) -> Iterator[list[Timeline]]:
        """A context that records the timeline of each request started on this thread.

        The requests may finish later. Once one is finished, ``Timeline.all_visits`` holds its visits and, if requested,
        ``pictures`` small copies of the images that its nodes produced.
        """
        self.record_timelines()
        with wanted_timelines(with_pictures) as timelines:
            yield timelines

    def record_timelines(self) -> None:
        """Prepare for ``timed``: requests have timelines where ``wanted_timelines`` asks for them."""
        with self._recording:
            if self._make_request in (Request, getattr(self._spans, "request", None)):
                self._make_request = making_timelines(self._make_request)
            self._record_timelines()

    def _record_timelines(self) -> None:
        if add_to_timelines not in self._runtime.recorders:
            self._runtime.recorders.append(add_to_timelines)

    def instrument(self, tracer_provider: TracerProvider | None = None, *, starts_traces: bool = True) -> None:
        """Record OpenTelemetry spans of requests from now on, as children of the span that is current at each call.

        A parent's sampled flag is honoured; without a parent the sampler of ``tracer_provider`` decides, or, if
        ``starts_traces`` is false, no spans are recorded. The default is the global provider. ``close`` records the
        remaining spans. Raises ``ImportError`` without OpenTelemetry, ``RuntimeError`` if spans are already recorded.
        """
        try:
            from opentelemetry.trace import get_tracer_provider

            from torchpipe_py.runtime.record.spans import Spans
        except ImportError as error:
            raise ImportError(f"spans need OpenTelemetry (pip install 'torchpipe_py[otel]'): {error}") from error
        runtime = self._runtime
        labels = {name: plan.label for name, plan in runtime.plans.items()}
        with self._recording:
            if self._spans is not None:
                raise RuntimeError("the pipe makes spans already")
            spans = self._spans = Spans(tracer_provider or get_tracer_provider(), labels, starts_traces)
            weakref.finalize(self, spans.stop).atexit = False
            self._record_timelines()
            runtime.contexts.append(spans.around)
            self._make_request = spans.request

    def close(self, timeout: float | None = None) -> bool:
        """Finish running batches, fail queued requests with ``PipeClosed``, end every thread. Idempotent.

        Returns ``False`` if a backend still runs after ``timeout`` seconds, or 2 s after all its requests were
        abandoned (at their deadlines, for example); its requests have failed nevertheless. A backend that runs for 2 s
        is logged as an error.
        """
        ended = self._runtime.close(timeout)
        if ended or self._runtime.is_left:
            self._finalizer.detach()
        if self._spans is not None:
            self._spans.close()
        return ended

    def __enter__(self) -> pipe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a pipe has threads, which cannot be pickled or copied: build another one where it is needed")

    def __repr__(self) -> str:
        runtime = self._runtime
        inflight = runtime.inflight
        lines = [f"pipe({runtime.name}, {'closed' if inflight.refusal else f'{len(inflight)} in flight'})"]
        for name in runtime.graph.order:
            plan = runtime.plans[name]
            node = runtime.nodes[plan.spec.owner]
            after = runtime.graph.successors[name]
            arrow = f" -> {', '.join(after)}" if after else ""
            lines.append(f"  {name}: {plan.label} x{len(node.instances)} [{node.min}..{node.max}]{arrow}")
        return "\n".join(lines)

    # -- requests -----------------------------------------------------------------------------------------------

    def _start(self, data: Given, future: Future[Given], timeout: float | None = None) -> Sequence[Request]:
        """Start the requests, which settle the future, and return them.

        Cancelling the future drops them, whether they have started or not. So does a caller that gets an exception,
        which may come when they have started.
        """
        runtime = self._runtime  # not self: a stored future must not keep the pipe alive

        def settle(*last: object) -> None:
            if not future.set_running_or_notify_cancel():
                return
            error = next((request.error for request in requests if request.error is not None), None)
            if error is None:
                future.set_result(data)
            else:
                future.set_exception(error)

        def drop_if_cancelled(done: Future[Any]) -> None:
            if done.cancelled():
                runtime.protect(partial(runtime.complete, requests, CancelledError()))

        requests = self._requests(data, settle, timeout)
        future.add_done_callback(drop_if_cancelled)
        if requests:
            runtime.start_requests(requests)
        else:
            settle()
        return requests

    def _expire(self, requests: Sequence[Request], timeout: float) -> None:
        self._runtime.complete(requests, DeadlineExceeded(f"not finished within {timeout} s"))

    def _requests(self, data: Data | Sequence[Data], on_done: OnDone, timeout: float | None) -> Sequence[Request]:
        """Create the requests, all before any starts; ``on_done`` is called after the last is finished."""
        deadline = deadline_after(timeout)
        if isinstance(data, dict):
            return [self._request(data, on_done, deadline)]
        items = _checked_list(data)
        countdown = Countdown(len(items), on_done)
        return [self._request(item, countdown, deadline) for item in items]

    def _request(self, data: Data, on_done: OnDone, deadline: float | None) -> Request:
        name = data.get(TASK_NODE_NAME_KEY)
        root = self.only_root if name is None else None
        if root is None:
            root = self._root(name)
        if TASK_DATA_KEY not in data:
            keys = ", ".join([shown(key) for key in islice(data, 16)]) or "none"
            own = any(spec.name in data for spec in self._signature_of(root).inputs)
            hint = f': a model\'s inputs go into it, as in {{"{TASK_DATA_KEY}": {{…}}}}' if own else ""
            raise InvalidRequest(f"a request needs the key {TASK_DATA_KEY!r}; found {keys}{hint}")
        request = self._make_request(data, on_done, root, deadline)
        if TASK_PRIORITY_KEY in data:
            request.priority = checked_priority(data[TASK_PRIORITY_KEY])
        return request

    def _root(self, name: object) -> str:
        if not isinstance(name, str) or name not in self.roots:
            raise unknown_root(name, self.roots)
        return self.roots[name]


def unknown_root(name: object, roots: Mapping[str, str]) -> UnknownNode:
    """The error for a ``node_name`` that is none of ``roots``; ``None`` if it is missing."""
    each: dict[str, str] = {}  # a root has several names in a folder: NAME/VERSION, and NAME for the latest one
    for known, root in roots.items():
        each[root] = min(each.get(root, known), known, key=len)
    names = list(each.values())
    if name is None:
        return UnknownNode(f"{TASK_NODE_NAME_KEY!r} must name one of the roots: {listed(names)}")
    hint = nearest(name if isinstance(name, str) else "", names)
    return UnknownNode(f"{TASK_NODE_NAME_KEY!r}: no root {shown(name)}; {hint}")


@contextmanager
def wanted_timelines(with_pictures: bool) -> Iterator[list[Timeline]]:
    """A context that asks for the timelines of requests started on this thread; see ``pipe.timed``."""
    timelines = Wanted()
    timelines.with_pictures = with_pictures
    token = WANTED.set(timelines)
    try:
        yield timelines
    finally:
        WANTED.reset(token)


class Ticket:
    """A request started with ``pipe.dispatch``."""

    __slots__ = ("_request", "_runtime")

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime, self._request = runtime, request

    @property
    def deadline(self) -> float | None:
        """The request's deadline in seconds of ``time.perf_counter``."""
        return self._request.deadline

    @property
    def is_over(self) -> bool:
        """Whether its outcome is final."""
        return self._request.done

    @property
    def is_running(self) -> bool:
        """Whether an instance has it at this moment; only for a request with one branch."""
        return any(self._request in instance.taken for instance in self._runtime.instances)

    @property
    def is_queued(self) -> bool:
        """Whether nothing works on it yet, here or in another process; a momentary answer."""
        links = self._request.links
        requests = [self._request] if links is None or links.branches is None else [*links.branches.requests]
        # NOTE: in this order, or a request that ends in between counts as queued.
        is_elsewhere = links is not None and any(
            links.has_begun[request.node]() for request in requests if request.node in links.has_begun
        )
        taken = [request for instance in self._runtime.instances for request in instance.taken]
        return not (is_elsewhere or any(request in taken for request in requests) or self.is_over)

    def cancel(self, error: BaseException | None = None) -> bool:
        """End the request with ``error``, or because its client left; drops it if it is queued.

        Returns ``False`` if it was already finished.
        """
        complete = partial(self._runtime.inflight.complete, self._request, error or CancelledError())
        return self._runtime.protect(complete)


def _seconds(timeout: float) -> float:
    """The timeout in seconds, limited to what a wait accepts."""
    return min(max(0.0, float(timeout)), threading.TIMEOUT_MAX)


def _checked_list(data: Any) -> list[Data]:
    if not isinstance(data, (list, tuple)):
        raise InvalidRequest(f"expected a dict or a list of dicts, got {type(data).__name__}")
    for index, item in enumerate(data):
        if not isinstance(item, dict):
            raise InvalidRequest(f"item [{index}]: expected a dict, got {type(item).__name__}")
    if len({id(item) for item in data}) < len(data):
        raise InvalidRequest("a dict occurs twice in the list; each request needs its own")
    return list(data)
