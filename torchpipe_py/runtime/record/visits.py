"""Records of a request: its visits at nodes, and the runs of other graphs that it started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torchpipe_py.errors import TorchpipeError, message_of
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.runtime.record.pictures import MOST_PICTURES, Picture, small_copy
from torchpipe_py.wire.errors import code_of

MOST_ELEMENTS = 256
"""Maximum number of runs of other graphs recorded for one request; a list may be longer."""

_MESSAGE_CHARACTERS = 200

Outcome = tuple[str, str]
"""Code and message of an error. NOTE: the exception itself would keep images alive through its traceback."""


@dataclass
class Visit:
    """One request at one node. Times are seconds since the beginning of a ``Trace``, else of ``time.perf_counter``.

    It was queued from ``arrived`` to ``collected``, its batch waited until ``started``, and the backend ran until
    ``ended``. ``size`` is the number of requests in the batch. In a ``Trace``, ``request`` and ``batch`` are numbers,
    counted from 1; the requests of a jump have the number of the request that jumped.
    """

    node: str
    instance: int
    size: int
    arrived: float
    collected: float
    started: float
    ended: float
    request: int = 0
    batch: int = 0
    error: Outcome | None = None

    def phases(self) -> list[tuple[str, float, float]]:
        """Name, start and end of each phase that took any time."""
        times = (self.arrived, self.collected, self.started, self.ended)
        phases = zip(("queue", "batch wait", "compute"), times, times[1:], strict=False)
        return [(name, start, end) for name, start, end in phases if end > start]


def taken_at(arrived: float, collected: float, started: float) -> float:
    """When a request left the queue; a request that arrives while its batch fills up has no queue time."""
    return min(started, max(arrived, collected))


class Timeline:
    """The visits of a request and of its branches, and a timeline for each run of another graph that it started.

    For such a run, ``parent`` is the timeline it belongs to, ``node`` the node that jumps, ``index`` its position among
    the elements. ``span``, ``begun`` (the spans of nodes) and ``links`` belong to ``Spans``.
    ``pictures``, if requested, come from its visits and those of its runs. Any thread may add to it.
    """

    def __init__(self, root: str, on_end: Callable[[Timeline], object] | None = None) -> None:
        self.root = root
        self.parent: Timeline | None = None
        self.node, self.index = "", 0
        self.visits: list[Visit] = []
        self.elements: list[Timeline] = []
        self.ended = 0.0
        self.error: Outcome | None = None
        self.span: Any = None
        self.begun: dict[str, Any] = {}
        self.links: dict[str, Any] = {}
        self.pictures: list[tuple[Visit, Picture]] | None = None
        self._on_end = on_end
        self._room = [MOST_ELEMENTS]

    @property
    def is_traced(self) -> bool:
        """Whether spans are created for it."""
        return self.span is not None or (self.parent is not None and self.parent.is_traced)

    def all_visits(self) -> list[Visit]:
        """Its own visits, and those of the runs that it started."""
        return [*self.visits, *[visit for element in list(self.elements) for visit in element.all_visits()]]

    def element(self, root: str, node: str, index: int) -> Timeline | None:
        """Add a timeline for a run of the graph ``root`` that ``node`` started; ``None`` if there are too many."""
        if not self._room[0]:
            return None
        self._room[0] -= 1
        element = Timeline(root)
        element.parent, element.node, element.index, element._room = self, node, index, self._room
        element.pictures = self.pictures
        self.elements.append(element)
        return element

    def visited(self, visit: Visit, data: Mapping[str, Any]) -> None:
        """Record that a node has run; ``data`` is the request's dict at that time."""
        self.visits.append(visit)
        if self.pictures is not None and len(self.pictures) < MOST_PICTURES:
            picture = small_copy(data.get(TASK_RESULT_KEY), str(data.get(TASK_COLOR_KEY, "rgb")))
            if picture is not None:
                self.pictures.append((visit, picture))

    def fail(self, node: str, error: BaseException) -> None:
        """Record that the backend of ``node``, its last node, has raised."""
        visit = next((visit for visit in reversed(self.visits) if visit.node == node), None)
        if visit is not None:
            visit.error = outcome_of(error)

    def end(self, error: BaseException | None, data: Mapping[str, Any]) -> None:
        """Record the final outcome; further calls have no effect."""
        if not self.ended:
            self.error = error_in(data) if error is None else outcome_of(error)
            self.ended = perf_counter()
            if self._on_end is not None:
                self._on_end(self)

    def last_end(self) -> float:
        """When the request was finished. NOTE: ``ended`` is later, since the caller is notified first."""
        last = max([visit.ended for visit in self.visits], default=0.0)
        is_through = last and (self.error is None or any(visit.error for visit in self.visits))
        return last if is_through else self.ended or last


def outcome_of(error: BaseException) -> Outcome:
    """The code and message of an exception."""
    code = code_of(error) if isinstance(error, TorchpipeError) else type(error).__name__
    return code, message_of(error, _MESSAGE_CHARACTERS)


def error_in(data: Mapping[str, Any]) -> Outcome | None:
    """Why a request has no result, if it has none."""
    error = None if TASK_RESULT_KEY in data else data.get(TASK_ERROR_KEY)
    return outcome_of(error) if isinstance(error, BaseException) else None
