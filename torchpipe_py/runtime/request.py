"""The state of one request in a pipe, and its links to others: branches, and runs of other graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import InvalidRequest, shown
from torchpipe_py.keys import (
    TASK_CONTEXT_KEY,
    TASK_DATA_KEY,
    TASK_ERROR_KEY,
    TASK_PRIORITY_KEY,
    TASK_RESULT_KEY,
)
from torchpipe_py.plan.graph import Hidden
from torchpipe_py.runtime.record.visits import Timeline

OnDone = Callable[[Data, BaseException | None], object]
"""Called once, when a request is completed: with the dict it came with, and its error."""


class Request:
    """One dict on its way through a pipe, which completes it exactly once, on the thread that finishes it.

    ``data`` is the dict that backends see. ``caller_data`` is set if that is a private copy, so that a request
    abandoned at its deadline cannot change the caller's dict later. ``node`` is the root it enters, then its current
    logical node. ``deadline`` and ``arrived`` (the entry into the current node's queue) are ``time.perf_counter``
    seconds. ``priority`` is 0 (normal) or 1 (low). ``caller`` is set while it is on the thread of its blocked caller:
    the nodes that the caller will run next, each with the request or branch that is there. ``number`` is its number in
    a trace. ``waited`` are the seconds that it waited at earlier nodes, if the pipe limits waits. ``links`` is ``None``
    for a request without branches, jumps and spans.
    """

    __slots__ = (
        "arrived", "caller", "caller_data", "data", "deadline", "done", "error", "links", "node", "number", "on_done",
        "priority", "waited",
    )  # fmt: skip

    def __init__(self, data: Data, on_done: OnDone, node: str = "", deadline: float | None = None) -> None:
        self.data = data
        self.on_done = on_done
        self.node = node
        self.deadline = deadline
        self.caller_data: Data | None = None
        self.error: BaseException | None = None
        self.done = False
        self.arrived = self.waited = 0.0
        self.caller: Caller | None = None
        self.links: Links | None = None
        self.number = self.priority = 0
        if deadline is not None:
            self.caller_data, self.data = data, dict(data)

    def linked(self) -> Links:
        """Its links, created on first access."""
        if self.links is None:
            self.links = Links()
        return self.links


Caller = list[tuple[Any, Request]]


class Links:
    """Links of a request to others; shared by all its branches.

    ``branches`` is their common state, once the request has forked. ``is_inner`` marks a request that a node of
    another graph started: ``parent`` is the request that waits for it, if any. ``on_completed`` holds functions to call
    when the request is completed, which end the work that it started elsewhere.
    ``has_begun`` says of each node that has handed it, or a branch of it, over to another process or to other requests
    whether these work on it, as long as it is at that node. ``timeline`` is set if spans or a timeline are recorded.
    """

    def __init__(self, parent: Request | None = None, is_inner: bool = False) -> None:
        self.parent, self.is_inner = parent, is_inner
        self.branches: Branches | None = None
        self.on_completed: list[Callable[[], object]] = []
        self.has_begun: dict[str, Callable[[], bool]] = {}
        self.timeline: Timeline | None = None


def callers_request(request: Request) -> Request:
    """The caller's request that this is a branch of, or that started this one through jumps."""
    while request.links is not None and request.links.parent is not None:
        request = request.links.parent
    links = request.links
    return request if links is None or links.branches is None else links.branches.request


Step = tuple[str, Data]
"""The next node to enter, and the dict to enter it with."""

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Maps:
    """The ``map`` of each node that has one: (source node, its (key, new key) pairs), in order.

    ``rank`` is the position of a node in the file.
    """

    sources: Mapping[str, tuple[tuple[str, Pairs], ...]]
    rank: Mapping[str, int]


class Branches:
    """The branches of one request: the outputs of its nodes, and the inputs its joins still wait for.

    ``request`` is the one to be completed. Each branch under way has its own ``Request`` in ``requests``; these are
    dropped on completion. ``leave`` may be called by several threads at once.
    """

    def __init__(self, request: Request, maps: Maps) -> None:
        self.request = request
        self._maps = maps
        self._base = request.data
        self._lock = threading.Lock()  # for all below
        self.requests: list[Request] = []
        self._under_way = 1
        self._outputs: dict[str, Data] = {}
        self._hidden_by: dict[str, str] = {}
        self._reached: dict[str, int] = {}  # number of arrivals at each join
        self._ends: dict[str, Data] = {}

    def add(self, data: Data, origin: Request) -> Request:
        """Add a branch, on the same thread as the request or the branch it comes from."""
        branch = Request(data, ignore_outcome)
        branch.priority = self.request.priority
        branch.deadline, branch.caller, branch.waited = self.request.deadline, origin.caller, origin.waited
        branch.links = self.request.links
        with self._lock:
            self.requests.append(branch)
            branch.done = self.request.done
        return branch

    def leave(self, hidden: Hidden, data: Data) -> tuple[list[Step], bool]:
        """Let a branch leave ``hidden`` (a node and any later nodes that a skip hides) with ``data``.

        Returns the nodes that can be entered now, each by a separate branch (empty if the branch ends, or waits at a
        join for another), and whether all branches have ended.
        """
        name = hidden.members[0]
        with self._lock:
            if hidden.is_read:
                self._outputs[name] = data
                for member in hidden.members:
                    self._hidden_by[member] = name
            if hidden.is_end:
                self._ends[name] = data
            entered = []
            for way_out in hidden.exits:
                reached = self._reached.get(way_out.node, 0) + way_out.edges
                self._reached[way_out.node] = reached
                if reached == way_out.predecessors:
                    entered.append(way_out.node)
            self._under_way += len(entered) - 1
            is_over = not self._under_way
        return [(node, self._input(node, data, hidden.copies)) for node in entered], is_over

    def _input(self, node: str, data: Data, copies: bool) -> Data:
        """The input of the node: the dict, a copy of it, or the dict that its map builds from other nodes' outputs."""
        sources = self._maps.sources.get(node)
        if sources is None:
            return dict(data) if copies else data
        mapped: Data = {}
        error = None
        for source, pairs in sources:
            output = self._outputs[self._hidden_by[source]]
            if TASK_CONTEXT_KEY in output:
                mapped[TASK_CONTEXT_KEY] = output[TASK_CONTEXT_KEY]
            for key, new in pairs:
                if key in output:
                    mapped[new] = output[key]
                elif new == TASK_DATA_KEY:
                    error = output.get(TASK_ERROR_KEY, error)
        if TASK_DATA_KEY not in mapped and error is not None:
            mapped[TASK_ERROR_KEY] = error
        return mapped

    def settle(self, last: Data | None, is_failed: bool) -> None:
        """Merge the outcome into the request's original dict, and drop the branches that are still under way.

        The outcome is ``last``, or the outputs of the graph's ends; those later in the file overwrite earlier ones.
        """
        with self._lock:
            for branch in self.requests:
                branch.done = True
        merged: Data = {}
        if last is not None:
            merged.update(last)
        elif not is_failed:
            for name in sorted(self._ends, key=self._maps.rank.__getitem__):
                merged.update(self._ends[name])
        self._base.pop(TASK_RESULT_KEY, None)
        self._base.pop(TASK_ERROR_KEY, None)
        self._base.update(merged)
        self.request.data = self._base


class Countdown:
    """Calls ``on_done`` once ``count`` requests have called it on completion.

    It stores the error of a failed request in its dict: the call that waits for all raises only one of them.
    """

    def __init__(self, count: int, on_done: OnDone) -> None:
        self._left, self._on_done = count, on_done
        self._lock = threading.Lock()

    def __call__(self, data: Data, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            data.pop(TASK_RESULT_KEY, None)
            data[TASK_ERROR_KEY] = error
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._on_done(data, error)


def ignore_outcome(data: Data, error: BaseException | None) -> None:
    """Do nothing: the callback of a request that no caller waits for."""


def checked_priority(value: object) -> int:
    """0 (normal) or 1 (low); ``InvalidRequest`` for anything else."""
    if type(value) is not int or value not in (0, 1):
        raise InvalidRequest(f"{TASK_PRIORITY_KEY!r}: expected 0 (normal) or 1 (low), got {shown(value)}")
    return 1 if value else 0


def deadline_after(timeout: float | None) -> float | None:
    """The deadline ``timeout`` seconds from now; ``None`` stays ``None``.

    Raises ``TypeError`` for what is no number and ``ValueError`` for NaN.
    """
    if timeout is None:
        return None
    try:
        seconds = 0.0 + timeout
    except TypeError:
        raise TypeError(f"timeout is a number of seconds, or None, got {timeout!r:.60}") from None
    if seconds != seconds:
        raise ValueError("timeout is a number of seconds, or None, got nan")
    return perf_counter() + seconds
