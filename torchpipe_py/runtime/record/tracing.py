"""Traces a pipe: records each visit of a request at a node, and writes the trace for Perfetto."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.runtime.record.visits import Timeline, Visit, error_in, taken_at
from torchpipe_py.runtime.request import OnDone, Request, callers_request

DEFAULT_LIMIT = 1_000_000

_INSTANCES, _REQUESTS = 1, 2  # process ids in Chrome's format


class Wanted(list[Timeline]):
    """A list of timelines; ``with_pictures``: record copies of the nodes' images, too."""

    with_pictures = False


WANTED: ContextVar[Wanted | None] = ContextVar("torchpipe_py.timelines", default=None)
"""The list that collects timelines of requests created in this context."""

MakeRequest = Callable[[Data, OnDone, str, "float | None"], Request]


def making_timelines(make: MakeRequest) -> MakeRequest:
    """Wrap ``make``: if ``WANTED`` has a list, add a timeline of each request to it."""

    def make_request(data: Data, on_done: OnDone, root: str, deadline: float | None) -> Request:
        request = make(data, on_done, root, deadline)
        wanted = WANTED.get()
        if wanted is not None:
            links = request.linked()
            links.timeline = links.timeline or Timeline(root)
            links.timeline.pictures = [] if wanted.with_pictures else None
            wanted.append(links.timeline)
        return request

    return make_request


def add_to_timelines(
    node: str, instance: int, requests: Sequence[Request], collected: float, started: float, ended: float
) -> None:
    """A ``Recorder`` that adds each batch to the timelines of its requests, if they have one."""
    for request in requests:
        timeline = None if request.links is None else request.links.timeline
        if timeline is not None:
            times = request.arrived, taken_at(request.arrived, collected, started), started, ended
            error = error_in(request.data)
            timeline.visited(Visit(request.node, instance, len(requests), *times, error=error), request.data)


class Trace:
    """A ``Recorder``: the visits recorded by ``pipe.trace``. After ``limit`` visits, further ones are only counted."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.dropped = 0
        self.is_over = False
        self._limit = limit
        self._begin = perf_counter()
        self._visits: list[Visit] = []
        self._numbers = itertools.count(1)
        self._batches = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def visits(self) -> tuple[Visit, ...]:
        """All visits so far, in the order in which they ended."""
        return tuple(self._visits)

    def __call__(
        self, node: str, instance: int, requests: Sequence[Request], collected: float, started: float, ended: float
    ) -> None:
        """A batch has run; see ``Recorder``."""
        if self.is_over:
            return
        size = len(requests)
        if len(self._visits) + size > self._limit:
            self.dropped += size
            return
        batch = next(self._batches)
        for request in requests:
            taken = taken_at(request.arrived, collected, started)
            arrived, taken, since, until = (time - self._begin for time in (request.arrived, taken, started, ended))
            caller = callers_request(request)
            with self._lock:
                caller.number = caller.number or next(self._numbers)
            self._visits.append(Visit(node, instance, size, arrived, taken, since, until, caller.number, batch))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for Perfetto (ui.perfetto.dev) or chrome://tracing, with a row for each instance and request."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": list(chrome_events(self._visits)), "displayTimeUnit": "ms"}, file)


def chrome_events(visits: Iterable[Visit]) -> Iterator[dict[str, Any]]:
    """Visits in Chrome's trace event format: batches are complete events, requests nestable asynchronous events."""
    yield _meta("process_name", _INSTANCES, 0, "instances")
    yield _meta("process_name", _REQUESTS, 0, "requests")
    lines: dict[tuple[str, int], int] = {}
    batches: dict[tuple[str, int], list[Visit]] = {}
    counts: Counter[int] = Counter()
    for visit in visits:
        if (visit.node, visit.instance) not in lines:
            lines[visit.node, visit.instance] = len(lines) + 1
            yield _meta("thread_name", _INSTANCES, len(lines), f"{visit.node} {visit.instance}")
        batches.setdefault((visit.node, visit.batch), []).append(visit)
        counts[visit.request] += 1
        # Each visit of a node has a unique identity, since visits of parallel branches overlap.
        identity = f"{visit.request}.{counts[visit.request]}"
        where = {"request": visit.request, "instance": visit.instance, "batch size": visit.size}
        for phase, start, end in visit.phases():
            common = {"name": f"{visit.node}: {phase}", "cat": "request", "id": identity, "pid": _REQUESTS, "tid": 0}
            yield {**common, "ph": "b", "ts": _us(start), "args": where}
            yield {**common, "ph": "e", "ts": _us(end)}
    for (node, _), members in batches.items():
        first = members[0]
        yield {
            "name": f"{node} x{first.size}",
            "ph": "X",
            "pid": _INSTANCES,
            "tid": lines[node, first.instance],
            "ts": _us(first.started),
            "dur": _us(first.ended - first.started),
            "args": {"requests": [visit.request for visit in members], "batch size": first.size},
        }


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
