"""The pipe: built from a configuration, called from any thread, closed once."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from itertools import islice
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from torchpipe_py.backends.base import Backend
from torchpipe_py.backends.control.python import PythonClass
from torchpipe_py.backends.image.memory import CURRENT
from torchpipe_py.backends.signature import Signature
from torchpipe_py.errors import DeadlineExceeded, InvalidRequest, UnknownNode, nearest, shown
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_NODE_NAME_KEY, TASK_PRIORITY_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import Pipeline, plan_pipeline
from torchpipe_py.registry import Registry
from torchpipe_py.registry import default as default_registry
from torchpipe_py.runtime.admission import Patience
from torchpipe_py.runtime.batching import BatchingNode, Due
from torchpipe_py.runtime.idle import is_main_thread
from torchpipe_py.runtime.mapping import in_order
from torchpipe_py.runtime.node import Node, Source
from torchpipe_py.runtime.record.tracing import (
    DEFAULT_LIMIT,
    WANTED,
    MakeRequest,
    TimelineRecorder,
    Trace,
    Wanted,
    making_timelines,
)
from torchpipe_py.runtime.record.visits import Timeline
from torchpipe_py.runtime.request import Countdown, OnDone, Request, checked_priority, deadline_after
from torchpipe_py.runtime.runtime import Runtime
from torchpipe_py.runtime.single import DeferredNode

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from torchpipe_py.runtime.record.spans import Spans

Data = dict[str, Any]

Given = TypeVar("Given", bound="Data | Sequence[Data]")
"""What a call is given and returns: the dict of a request, or a list of them."""


class pipe:
    """A pipeline that any number of threads may call at once.

    ``config`` is a path ending in ``.toml``, a flat dict (one node) or a dict of dicts (``"global"`` holds defaults),
    or what ``plan_pipeline`` made of one.
    Raises ``ConfigError`` for a configuration that cannot be built, ``BackendUnavailable`` where a backend lacks a
    library or device here, ``SetupError`` for any other failure of a backend's ``setup``; each of these is both a
    ``ValueError`` and a ``RuntimeError``. No thread is left then.

    A request is a dict with ``data``; it is changed in place. Afterwards ``result`` holds the result. Where there is
    none (bytes that are no image, say), ``error`` holds an exception that says why. A defect in a backend raises
    ``BackendError`` in the caller. ``node_name`` selects the root where there are several (or more than one that no
    jump leads to). ``priority`` 1 is low: batches take requests of 0, which is normal, first and fill up with these;
    one that has waited for a second gets each fourth turn. They are admitted while no more than half of
    ``max_inflight`` are in flight. A list of dicts is several requests: the call returns when all are finished, each
    item with its ``result`` or its ``error``, and raises the first error if any raised. A call returns the dict, or the
    list, that it was given.
    ``timeout`` (seconds) bounds a call: ``DeadlineExceeded`` after it, and the dict is not touched any more.
    Beyond ``max_inflight`` requests in flight, ``Overloaded`` at once. ``registry`` has the backends, filters and
    postprocessors that ``config`` names; without it they are those of ``register_backend`` and its like.
    """

    def __init__(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | Pipeline, *, registry: Registry | None = None
    ) -> None:
        plan = plan_pipeline(config, default_registry if registry is None else registry)
        self._runtime = Runtime(plan)
        # The threads know the runtime only: a pipe that is dropped is closed. At exit, the runtime closes itself.
        self._finalizer = weakref.finalize(self, self._runtime.drop)
        self._finalizer.atexit = False
        self._runtime.start()
        self.models = plan.models
        """Every root that a request may enter, as a ``Model``: ``name``, ``version``, ``root``."""
        self.roots, self.only_root = plan.roots, plan.only_root
        """The root that a request enters, by what it may say under ``node_name``; that of one that says nothing."""
        self._make_request: MakeRequest = Request
        self._timelines: TimelineRecorder | None = None
        self._spans: Spans | None = None

    def __call__(self, data: Given, timeout: float | None = None) -> Given:
        """Run one request, or several, and wait until all are finished; returns ``data``.

        ``RuntimeError`` on the thread of an instance to whose node a request may come, where it would wait for itself.
        """
        lock = allocate_lock()
        lock.acquire()
        # NOTE: a function of C: no handler of a signal can raise before the lock is released.
        requests = self._requests(data, cast(OnDone, lock.__exit__), timeout)
        if not requests:
            return data
        if CURRENT.waiter is not None:
            self._runtime.refuse_wait(CURRENT.waiter, requests)
        stands_in = timeout is None and len(requests) == 1 and not is_main_thread()
        caller = requests[0].caller = [] if stands_in else None
        try:
            self._runtime.inflight.submit(requests)
            while caller:  # until other threads have taken over, or the request is through
                node, request = caller.pop()
                node.run_on_caller(request)
            if timeout is None:
                lock.acquire()
            elif not lock.acquire(timeout=_seconds(timeout)):
                self._expire(requests, timeout)
                lock.acquire()
        except BaseException as interrupt:
            for request in requests:
                self._runtime.inflight.complete(request, interrupt)
            raise
        for request in requests:
            if request.error is not None:
                raise request.error
        return data

    def submit(self, data: Given, timeout: float | None = None) -> Future[Given]:
        """Start one request, or several; the future's result is ``data``. Cancelling it drops what is still queued.

        The deadline is looked at before each node: no thread watches it while a backend runs.
        """
        return self._start(data, timeout)[0]

    def map(
        self, items: Iterable[Data], ahead: int = 16, *, newest: bool = False, return_errors: bool = False
    ) -> Iterator[Data]:
        """Run a request for each dict of ``items``, at most ``ahead`` at once; the finished dicts, in order.

        An item is taken from ``items`` when there is room for it. With ``newest`` they are read as they come, on a
        thread of their own, and of those for which there is no room only the newest waits (a camera's frames, say).
        What a call would raise is raised in its place, and the rest is cancelled; with ``return_errors`` the dict has
        it as ``error``. ``ValueError`` for ``ahead`` below 1.
        """
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, not {ahead!r}")
        return in_order(self.submit, items, ahead, newest, return_errors)

    async def acall(self, data: Given, timeout: float | None = None) -> Given:
        """``submit``, awaited no longer than ``timeout``; returns ``data``. Cancelling drops what is queued."""
        future, requests = self._start(data, timeout)
        outcome = asyncio.wrap_future(future)
        if timeout is None:
            return await outcome
        timer = asyncio.get_running_loop().call_later(_seconds(timeout), self._expire, requests, timeout)
        try:
            return await outcome
        finally:
            timer.cancel()

    def dispatch(
        self, data: Data, on_done: Callable[[Data, BaseException | None], None], timeout: float | None = None
    ) -> Ticket:
        """Start one request without a waiting thread, for servers.

        ``on_done(data, error)`` is called exactly once, unless ``dispatch`` itself raises, on the thread that
        finishes the request, perhaps before ``dispatch`` returns; it must not block. The deadline is looked at
        before each node; ``Ticket.cancel`` ends the request earlier.
        """
        if not isinstance(data, dict):
            raise InvalidRequest(f"expected a dict, got {type(data).__name__}")
        request = self._request(data, on_done, deadline_after(timeout))
        ticket = Ticket(self._runtime, request)
        patience = self._runtime.door.patience
        if patience is not None and patience.is_learning:
            request.on_done = ticket.noting(on_done)
        self._runtime.inflight.submit((request,))
        return ticket

    @property
    def has_own_code(self) -> bool:
        """Whether a backend is none of this package's."""
        return any(_has_own_code(node) for node in self._runtime.nodes.values())

    def draw_from(self, source: Source) -> bool:
        """Before the first request: have the nodes that requests enter fetch them there when they form a batch.

        ``False`` where some do not, as they form none: ``source`` brings to these what it has, as it comes. Each batch
        is delivered inside ``source.together()``.
        """
        runtime = self._runtime
        for node in runtime.nodes.values():
            node.together = source.together
        entered = [runtime.nodes[owner] for owner in {runtime.plans[root].spec.owner for root in self.roots.values()}]
        fetching = [node for node in entered if isinstance(node, BatchingNode)]
        for node in fetching:
            node.draw_from(source)
        return len(fetching) == len(entered)

    @contextmanager
    def expecting(self, is_due: Due) -> Iterator[None]:
        """Meanwhile batches wait for requests that are due before they close by their ``batching_timeout``.

        ``is_due(since, until)`` says whether one is that has not come yet, in seconds from now; it must not block.
        """
        dues = self._runtime.dues
        dues.append(is_due)
        try:
            yield
        finally:
            dues.remove(is_due)

    def max(self) -> int:
        """The largest batch any node forms."""
        return max(node.max for node in self._runtime.nodes.values())

    def min(self) -> int:
        """The smallest batch any node forms."""
        return min(node.min for node in self._runtime.nodes.values())

    def signature(self, node_name: str | None = None) -> Signature:
        """What ``data`` and ``result`` of a request to this root hold, as far as its backends can say.

        ``UnknownNode`` where the root is none, or missing where there are several.
        """
        root = self.only_root if node_name is None and self.only_root else self._root(node_name)
        graph = self._runtime.graph
        ends = [name for name, roots in graph.reached_from.items() if root in roots and not graph.successors[name]]
        outputs = self._signature_of(ends[0]).outputs if len(ends) == 1 else ()
        return Signature(self._signature_of(root).inputs, outputs)

    def _signature_of(self, name: str) -> Signature:
        runtime = self._runtime
        return runtime.nodes[runtime.plans[name].spec.owner].instances[0].backend.signature()

    def expected_wait(self) -> float:
        """Seconds that a request which comes now waits at its nodes, by recent compute times."""
        return self._runtime.door.expected_wait()

    def limit_delays(self, target: float | None = None) -> None:
        """Before the first request: bound the time that requests wait, for servers.

        A request that cannot meet its deadline is dropped before it is computed. One without a deadline is refused with
        ``Overloaded`` where a queue stands: where its oldest request has waited longer than ``target`` seconds for 0.1
        s, those that have waited more than twice that. ``None`` is four times what a batch takes, at least 0.05 s, and
        ten times as much while no clients leave before they are answered; 0.0 sheds nothing. Requests of low priority
        wait as long as their deadlines let them.
        """
        self._runtime.door.limit_delays(target)

    def nodes_of(self, node_name: str) -> list[str]:
        """The nodes to which requests of this root may come, jumps included, by the names that ``stats`` has for them.

        ``UnknownNode`` where the root is none.
        """
        graph, plans = self._runtime.graph, self._runtime.plans
        found: dict[str, None] = {}
        left = [self._root(node_name)]
        while left:
            root = left.pop()
            reached = [name for name in graph.order if root in graph.reached_from[name] and name not in found]
            found.update(dict.fromkeys(reached))
            left += [target for name in reached for target in graph.jumps.get(name, ())]
        return list(dict.fromkeys(plans[name].spec.owner for name in found))

    def check_delay(self, seconds: float | None, priority: int = 0, node_name: object = None) -> None:
        """``Overloaded``, with ``retry_after_ms``, where a request that comes now would not be finished in ``seconds``.

        Without a time limit: where a queue stands and it would be shed there, or where most clients have left by then.
        Only the way from the root ``node_name`` counts, if that is one.
        """
        root = self.roots.get(node_name) if isinstance(node_name, str) else self.only_root
        self._runtime.door.check(seconds, root, self._runtime.inflight.admitted, priority)

    def stats(self) -> dict[str, Any]:
        """Counts and times since the pipe was built; see ``torchpipe_py.runtime.record.statistics``."""
        runtime = self._runtime
        return {
            "inflight": len(runtime.inflight),
            "max_inflight": runtime.inflight.most,
            "admitted": runtime.inflight.admitted,
            "rejected": runtime.inflight.rejected,
            "nodes": {name: node.stats() for name, node in runtime.nodes.items()},
        }

    @contextmanager
    def trace(self, limit: int = DEFAULT_LIMIT) -> Iterator[Trace]:
        """Record each visit of a request at a node meanwhile, at most ``limit``; ``save`` them, or look at ``visits``.

        ``RuntimeError`` if the pipe is being traced already. A request under way at either end is recorded in part.
        """
        recorders = self._runtime.recorders
        if any(isinstance(each, Trace) and not each.is_over for each in recorders):
            raise RuntimeError("the pipe is being traced already")
        trace = Trace(limit)
        try:
            # NOTE: a trace whose end was interrupted is still among them.
            recorders[:] = [trace, *[each for each in recorders if not isinstance(each, Trace)]]
            yield trace
        finally:
            trace.is_over = True
            recorders[:] = [each for each in recorders if each is not trace]

    @contextmanager
    def timed(self, with_pictures: bool = False) -> Iterator[list[Timeline]]:
        """Record where the time of each request goes that is started meanwhile on this thread, in its timeline.

        They may finish later. ``Timeline.all_visits`` has what is recorded when the request is finished, ``pictures``
        small copies of the images that its nodes made, if they are wanted.
        """
        if self._make_request in (Request, getattr(self._spans, "request", None)):
            self._make_request = making_timelines(self._make_request)
        self._record_timelines()
        timelines = Wanted()
        timelines.with_pictures = with_pictures
        token = WANTED.set(timelines)
        try:
            yield timelines
        finally:
            WANTED.reset(token)

    def _record_timelines(self) -> None:
        if self._timelines is None:
            self._timelines = TimelineRecorder()
            self._runtime.recorders.append(self._timelines)

    def instrument(self, tracer_provider: TracerProvider | None = None, *, starts_traces: bool = True) -> None:
        """Make OpenTelemetry spans of the requests from now on, as children of the span that is current at each call.

        A parent's sampled flag is honoured; without a parent the sampler of ``tracer_provider`` decides, or nothing is
        made if not ``starts_traces``. Without a provider the global one is taken. ``close`` makes the spans that are
        left. ``ImportError`` without OpenTelemetry, ``RuntimeError`` where the pipe makes spans already.
        """
        if self._spans is not None:
            raise RuntimeError("the pipe makes spans already")
        try:
            from opentelemetry.trace import get_tracer_provider

            from torchpipe_py.runtime.record.spans import Spans
        except ImportError as error:
            raise ImportError(f"spans need OpenTelemetry (pip install 'torchpipe_py[otel]'): {error}") from error
        runtime = self._runtime
        labels = {name: plan.label for name, plan in runtime.plans.items()}
        spans = self._spans = Spans(tracer_provider or get_tracer_provider(), labels, starts_traces)
        weakref.finalize(self, spans.stop).atexit = False
        self._record_timelines()
        # Only backends that are not this package's make spans inside ``forward``, and the jumps that lead to them.
        for node in runtime.nodes.values():
            if _has_own_code(node) or (self.has_own_code and isinstance(node, DeferredNode)):
                node.around = spans.around
        self._make_request = spans.request

    def close(self, timeout: float | None = None) -> bool:
        """Finish running batches, fail what is queued with ``PipeClosed``, end every thread. Idempotent.

        ``False`` if a backend still runs after ``timeout`` seconds, or 2 s after every request that it runs was given
        up (at its deadline, say); its requests have failed nevertheless. An error in the log names a backend that has
        run for 2 s.
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

    def _start(self, data: Given, timeout: float | None) -> tuple[Future[Given], Sequence[Request]]:
        """What ``submit`` starts, and the future of it."""
        future: Future[Given] = Future()
        runtime = self._runtime  # not self: a future that is kept must not keep the pipe

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
                for request in requests:
                    runtime.inflight.complete(request, CancelledError())

        requests = self._requests(data, settle, timeout)
        runtime.inflight.submit(requests)
        if not requests:
            settle()
        future.add_done_callback(drop_if_cancelled)
        return future, requests

    def _expire(self, requests: Sequence[Request], timeout: float) -> None:
        for request in requests:
            self._runtime.inflight.complete(request, DeadlineExceeded(f"not finished within {timeout} s"))

    def _requests(self, data: Data | Sequence[Data], on_done: OnDone, timeout: float | None) -> Sequence[Request]:
        """Requests and the roots they enter, all checked before any starts; ``on_done`` is called after the last."""
        deadline = deadline_after(timeout)
        if isinstance(data, dict):
            return (self._request(data, on_done, deadline),)
        items = _checked_list(data)
        countdown = Countdown(len(items), on_done)
        return [self._request(item, countdown, deadline) for item in items]

    def _request(self, data: Data, on_done: OnDone, deadline: float | None) -> Request:
        root = self.only_root
        if root is None or TASK_NODE_NAME_KEY in data:
            root = self._root(data.get(TASK_NODE_NAME_KEY))
        if TASK_DATA_KEY not in data:
            keys = ", ".join([shown(key) for key in islice(data, 16)]) or "none"
            raise InvalidRequest(f"a request needs the key {TASK_DATA_KEY!r}; found {keys}")
        data.pop(TASK_RESULT_KEY, None)
        data.pop(TASK_ERROR_KEY, None)
        request = self._make_request(data, on_done, root, deadline)
        if TASK_PRIORITY_KEY in data:
            request.priority = checked_priority(data[TASK_PRIORITY_KEY])
        return request

    def _root(self, name: object) -> str:
        if name is None:
            raise UnknownNode(f"{TASK_NODE_NAME_KEY!r} must name one of the roots: {', '.join(self.roots)}")
        if not isinstance(name, str) or name not in self.roots:
            hint = nearest(name if isinstance(name, str) else "", self.roots)
            raise UnknownNode(f"{TASK_NODE_NAME_KEY!r}: no root {shown(name)}; {hint}")
        return self.roots[name]


class Ticket:
    """A request started with ``pipe.dispatch``."""

    __slots__ = ("_request", "_runtime", "_since")

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._runtime, self._request = runtime, request
        self._since = 0.0 if runtime.door.patience is None else perf_counter()

    @property
    def deadline(self) -> float | None:
        """When the request's time is over, in seconds of ``time.perf_counter``."""
        return self._request.deadline

    @property
    def is_over(self) -> bool:
        """Whether its outcome is final."""
        return self._request.done

    @property
    def is_running(self) -> bool:
        """Whether an instance has it; a moment's answer, for a request of one branch."""
        return any(self._request in instance.taken for instance in self._runtime.instances)

    def cancel(self, error: BaseException | None = None) -> bool:
        """End the request with ``error``, or because its client left; what is queued is dropped.

        ``False`` if it was finished already.
        """
        is_cancelled = self._runtime.inflight.complete(self._request, error or CancelledError())
        if is_cancelled and error is None:
            self.client_left()
        return is_cancelled

    def client_left(self) -> None:
        """Its client waits no longer, as far as can be seen: remember how long it has, once."""
        if (patience := self._patience()) is not None:
            patience.left(perf_counter() - self._since)
            self._since = 0.0

    def noting(self, on_done: Callable[[Data, BaseException | None], None]) -> OnDone:
        """``on_done``, before which it is remembered how long the client has waited, if it still does."""

        def note(data: Data, error: BaseException | None) -> None:
            patience = self._patience()
            if patience is not None and not isinstance(error, CancelledError):
                patience.answered(perf_counter() - self._since)
            on_done(data, error)

        return note

    def _patience(self) -> Patience | None:
        """What is to know how long its client waits, until it has left."""
        return self._runtime.door.patience if self._request.deadline is None and self._since else None


def _has_own_code(node: Node) -> bool:
    return any(_is_own_code(instance.backend) for instance in node.instances)


def _is_own_code(backend: Backend) -> bool:
    is_builtin = type(backend).__module__.startswith("torchpipe_py.") and not isinstance(backend, PythonClass)
    return not is_builtin or any(map(_is_own_code, backend.config.children))


def _seconds(timeout: float) -> float:
    """How long to wait for it."""
    return min(max(0.0, timeout), threading.TIMEOUT_MAX)


def _checked_list(data: Any) -> list[Data]:
    if not isinstance(data, (list, tuple)):
        raise InvalidRequest(f"expected a dict or a list of dicts, got {type(data).__name__}")
    for index, item in enumerate(data):
        if not isinstance(item, dict):
            raise InvalidRequest(f"item {index}: expected a dict, got {type(item).__name__}")
    if len({id(item) for item in data}) < len(data):
        raise InvalidRequest("the same dict stands in the list twice; each request needs its own")
    return list(data)
