"""OpenTelemetry spans for the requests of a pipe, built from the times that its instances always record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter_ns, time_ns
from typing import Any, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import log_failure, logger
from torchpipe_py.runtime.record.visits import Outcome, Timeline, Visit
from torchpipe_py.runtime.request import OnDone, Request

MOST_WAITING = 1024
"""Maximum number of finished requests that wait for their spans; further requests get no spans."""

CLOSE_SECONDS = 2.0
"""Seconds that ``close`` waits until the spans of finished requests are created."""

T = TypeVar("T")


class Spans:
    """Creates timelines for sampled requests; a separate thread turns each into spans when it is finished.

    ``labels`` has the backends of the nodes, for the spans' attributes. ``starts_traces``: whether requests without a
    parent may be traced.
    """

    def __init__(self, provider: trace.TracerProvider, labels: Mapping[str, str], starts_traces: bool = True) -> None:
        self._starts_traces = starts_traces
        self._tracer, self._labels = provider.get_tracer("torchpipe_py"), labels
        self._finished: SimpleQueue[Timeline | None] = SimpleQueue()
        self._dropped = 0
        self._lock = threading.RLock()
        self._since_1970 = 0  # Unix time in nanoseconds at which perf_counter is 0
        self._thread = threading.Thread(target=self._main, name="torchpipe-spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Create the spans of finished requests, as far as time permits, and end the thread. Idempotent."""
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def stop(self) -> None:
        """``close`` without waiting for the thread."""
        self._finished.put(None)

    # -- while a request is under way -----------------------------------------------------------------------------

    def request(self, data: Data, on_done: OnDone, root: str, deadline: float | None) -> Request:
        """A request, traced if its parent, the current span, is sampled. Without a parent the sampler decides."""
        request = Request(data, on_done, root, deadline)
        if not self._starts_traces and not contexts.get_current():
            return request  # a fast path for a service that traces few requests: the checks below are slower
        parent = trace.get_current_span().get_span_context()
        if not (parent.trace_flags.sampled if parent.is_valid else self._starts_traces):
            return request
        span = self._tracer.start_span(f"pipe {root}")
        if span.is_recording():
            self._since_1970 = time_ns() - perf_counter_ns()
            timeline = request.linked().timeline = Timeline(root, self._finish)
            timeline.span = span
        return request

    def around(self, requests: Sequence[Request], started: float, run: Callable[[], T]) -> T:
        """Run a backend with the span of its computation current, so that the spans it creates become its children.

        If several requests of the batch are traced, this is the span of the first one; it and the others' spans are
        linked in both directions.
        """
        traced = [(request.node, timeline) for request in requests if (timeline := timeline_of(request)) is not None]
        if not traced:
            return run()
        (node, first), *others = traced
        first.links[node] = [trace.Link(self._opened(other, started).get_span_context()) for _, other in others]
        span = self._compute(first, node, self._opened(first, started), started)
        for name, other in others:
            other.links[name] = [trace.Link(span.get_span_context())]
        token = contexts.attach(trace.set_span_in_context(span))
        try:
            return run()
        finally:
            contexts.detach(token)

    def _opened(self, timeline: Timeline, started: float) -> trace.Span:
        """The span of a request, or of an element, created on first access."""
        with self._lock:
            if timeline.span is None:
                assert timeline.parent is not None
                above = timeline.parent.begun.get(timeline.node) or self._opened(timeline.parent, started)
                start = min([started, *[visit.arrived for visit in timeline.visits]])
                element = {"torchpipe.element": timeline.index}
                timeline.span = self._start(timeline.root, above, start, attributes=element)
            return timeline.span  # type: ignore[no-any-return]

    def _compute(self, timeline: Timeline, node: str, parent: trace.Span, started: float) -> trace.Span:
        links = timeline.links.get(node)
        span = timeline.begun[node] = self._start(f"{node}: compute", parent, started, links=links)
        return span

    def _start(self, name: str, parent: trace.Span, start: float, **more: Any) -> trace.Span:
        context = trace.set_span_in_context(parent, contexts.Context())
        return self._tracer.start_span(name, context, start_time=self._ns(start), **more)

    def _finish(self, timeline: Timeline) -> None:
        if self._finished.qsize() < MOST_WAITING:
            self._finished.put(timeline)
        else:
            self._dropped += 1

    # -- when it is finished, on the thread -------------------------------------------------------------------------

    def _main(self) -> None:
        while (timeline := self._finished.get()) is not None:
            try:
                self._make(timeline)
            except Exception as error:
                log_failure("the spans of a request could not be made", error)
            del timeline
            dropped, self._dropped = self._dropped, 0
            if dropped:
                logger.warning("of %d finished requests no spans were made: more than %d waited", dropped, MOST_WAITING)

    def _make(self, timeline: Timeline) -> None:
        """End the span of a request, or of an element, after creating its children."""
        span = self._opened(timeline, timeline.ended)
        for visit in list(timeline.visits):
            self._make_visit(timeline, visit, span)
        for element in list(timeline.elements):
            self._make(element)
        for begun in timeline.begun.values():
            if begun.is_recording():
                begun.end()
        _set_outcome(span, timeline.error)
        span.end(self._ns(timeline.last_end()))

    def _make_visit(self, timeline: Timeline, visit: Visit, parent: trace.Span) -> None:
        node = visit.node
        for phase, start, end in visit.phases():
            if phase != "compute":
                self._start(f"{node}: {phase}", parent, start).end(self._ns(end))
        span = timeline.begun.get(node) or self._compute(timeline, node, parent, visit.started)
        span.set_attributes(
            {
                "torchpipe.node": node,
                "torchpipe.backend": self._labels[node],
                "torchpipe.instance": visit.instance,
                "torchpipe.batch_size": visit.size,
            }
        )
        _set_outcome(span, visit.error)
        span.end(self._ns(visit.ended))

    def _ns(self, seconds: float) -> int:
        """Convert ``perf_counter`` seconds to nanoseconds since 1970."""
        return self._since_1970 + round(seconds * 1e9)


def timeline_of(request: Request) -> Timeline | None:
    """The timeline of a request, if it is traced."""
    timeline = None if request.links is None else request.links.timeline
    return timeline if timeline is not None and timeline.is_traced else None


def _set_outcome(span: trace.Span, error: Outcome | None) -> None:
    if error is not None:
        code, message = error
        span.set_attribute("error.type", code)
        span.set_status(trace.StatusCode.ERROR, message)
