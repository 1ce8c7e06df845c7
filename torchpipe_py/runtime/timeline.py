"""What is recorded of a request that is traced across services; ``spans`` makes OpenTelemetry's spans of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torchpipe_py.errors import TorchpipeError, message_of
from torchpipe_py.keys import TASK_ERROR_KEY, TASK_RESULT_KEY

MOST_ELEMENTS = 256
"""Runs of other graphs that are recorded of one request; a list may be longer."""

_MESSAGE_CHARACTERS = 200

Outcome = tuple[str, str]
"""Code and message of an error. NOTE: the exception itself would keep what its traceback refers to, images too."""


@dataclass
class Visit:
    """A request at a node, with the instance that ran it and the size of its batch.

    Times are seconds of ``time.perf_counter``: it stood in the queue from ``arrived`` to ``collected``, its batch
    waited for company until ``started``, the backend ran until ``ended``.
    """

    node: str
    instance: int
    size: int
    arrived: float
    collected: float
    started: float
    ended: float
    error: Outcome | None = None


class Timeline:
    """The visits of a request and of its branches, and a timeline for each run of another graph that it started.

    ``parent`` is the request that a run belongs to, ``node`` the one of its nodes that jumps, ``index`` the place among
    the elements. ``span`` and ``begun``, the spans of nodes, belong to who makes spans. Any thread may add to it.
    """

    __slots__ = (
        "_on_end", "_room", "begun", "elements", "ended", "error", "index", "links", "node", "parent", "root", "span",
        "visits",
    )  # fmt: skip

    def __init__(self, root: str, on_end: Callable[[Timeline], object]) -> None:
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
        self._on_end = on_end
        self._room = [MOST_ELEMENTS]

    def element(self, root: str, node: str, index: int) -> Timeline | None:
        """That of a run of the graph ``root``, which ``node`` started; ``None`` where there are too many."""
        if not self._room[0]:
            return None
        self._room[0] -= 1
        element = Timeline(root, _nothing)
        element.parent, element.node, element.index, element._room = self, node, index, self._room
        self.elements.append(element)
        return element

    def fail(self, node: str, error: BaseException) -> None:
        """The backend of ``node``, where it was last, has raised."""
        visit = next((visit for visit in reversed(self.visits) if visit.node == node), None)
        if visit is not None:
            visit.error = outcome_of(error)

    def end(self, error: BaseException | None, data: Mapping[str, Any]) -> None:
        """The outcome is final; further calls do nothing."""
        if not self.ended:
            self.error = error_in(data) if error is None else outcome_of(error)
            self.ended = perf_counter()
            self._on_end(self)


def outcome_of(error: BaseException) -> Outcome:
    """What is kept of an exception."""
    code = error.code if isinstance(error, TorchpipeError) else type(error).__name__
    return code, message_of(error, _MESSAGE_CHARACTERS)


def error_in(data: Mapping[str, Any]) -> Outcome | None:
    """Why a request has no result, if it has none."""
    try:
        error = None if TASK_RESULT_KEY in data else data.get(TASK_ERROR_KEY)
    except BaseException:  # the dict may be of a class of the caller's own
        return None
    return outcome_of(error) if isinstance(error, BaseException) else None


def _nothing(timeline: Timeline) -> None:
    pass
