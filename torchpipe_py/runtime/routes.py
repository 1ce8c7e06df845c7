"""Routes requests from node to node: filters, forks, joins, and the nodes that a skip hides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import BackendError, NoResult, describe
from torchpipe_py.filters import Filter, Status
from torchpipe_py.filters import run as always_run
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY
from torchpipe_py.plan.build import NodePlan
from torchpipe_py.plan.graph import Graph, Hidden
from torchpipe_py.runtime.request import Branches, Maps, Request

Enter = Callable[[Request], object]

_SKIPS: dict[Any, Callable[[Graph, str], Hidden]] = {
    Status.Skip: Graph.alone,
    Status.SerialSkip: Graph.serial_chain,
    Status.SubGraphSkip: Graph.subgraph,
}
"""The nodes that each kind of skip hides."""


class Routes:
    """``entries[name](request)`` brings a request to a node, from any thread; ``exits[owner]`` lets it leave.

    ``filters`` has the filter of each node, ``puts`` the function that queues a request there. ``logical`` names all
    nodes that run on the instances of an ``owner``.
    ``complete(request, error, last)`` ends a request: with an error, with ``last`` as the outcome, or with its own
    dict.
    """

    def __init__(
        self,
        graph: Graph,
        plans: Mapping[str, NodePlan],
        filters: Mapping[str, Filter],
        logical: Mapping[str, Sequence[str]],
        puts: Mapping[str, Enter],
        complete: Callable[[Request, BaseException | None, Data | None], object],
    ) -> None:
        self._graph = graph
        self._complete = complete
        self._maps = Maps(
            {name: _sources(name, graph, plans) for name in graph.mapped},
            {name: index for index, name in enumerate(graph.predecessors)},
        )
        self._hidden: dict[tuple[str, Status], Hidden] = {}
        self._steps = {name: self._step(name, filters[name], puts[name]) for name in plans}
        self.entries: dict[str, Enter] = {name: self._entry(name, filters[name], puts[name]) for name in plans}
        self._leave_node = {name: self._way_out(graph.alone(name)) for name in plans}
        self.exits: dict[str, Enter] = {
            owner: self._leave_node[owner] if len(names) == 1 else self._leave_logical
            for owner, names in logical.items()
        }

    def _step(self, name: str, filter_: Filter, put: Enter) -> Callable[[Request], Hidden | None]:
        """A function that calls a node's filter, on the thread that brings the request, and obeys its status.

        It returns the skipped nodes, which the request must still leave.
        """
        run, is_mapped = Status.Run, name in self._maps.sources

        def step(request: Request) -> Hidden | None:
            if is_mapped and TASK_DATA_KEY not in request.data:
                self._end_without_data(name, request)
                return None
            try:
                status = filter_(request.data)
            except BaseException as error:
                failure = BackendError(f"node {name!r}: its filter: {describe(error)}")
                failure.__cause__ = error
                self._complete(request, failure, None)
                return None
            if status is not run:
                return self._decide(name, request, status)
            request.node, request.arrived = name, perf_counter()
            put(request)
            return None

        return step

    def _entry(self, name: str, filter_: Filter, put: Enter) -> Enter:
        """The function through which requests enter a node."""
        step = self._steps[name]

        def enter_at_once(request: Request) -> None:
            request.node, request.arrived = name, perf_counter()
            put(request)

        def enter(request: Request) -> None:
            hidden = step(request)
            if hidden is not None:
                self._leave(hidden, request)

        return enter_at_once if filter_ is always_run else enter

    def _way_out(self, hidden: Hidden) -> Enter:
        if hidden.next is not None:
            return self.entries[hidden.next]
        leave, complete = partial(self._leave, hidden), self._complete
        if hidden.exits:
            return leave

        def end(request: Request) -> None:
            if request.links is None:
                complete(request, None, None)
            else:
                leave(request)

        return end

    def _leave_logical(self, request: Request) -> None:
        """Let a request leave its logical node, one of several that share instances."""
        self._leave_node[request.node](request)

    def _leave(self, hidden: Hidden, request: Request) -> None:
        """Let a request leave a node, or skipped nodes, and move on until no filter skips again."""
        left = [(hidden, request)]
        while left:
            hidden, request = left.pop()
            if hidden.next is not None:
                steps = [(hidden.next, request)]
            elif hidden.exits or (request.links is not None and request.links.branches is not None):
                steps = self._branches(hidden, request)
            else:
                self._complete(request, None, None)
                continue
            for name, branch in steps:
                skipped = self._steps[name](branch)
                if skipped is not None:
                    left.append((skipped, branch))

    def _branches(self, hidden: Hidden, request: Request) -> list[tuple[str, Request]]:
        """The nodes that can be entered now, each with the branch that enters it."""
        links = request.linked()
        branches = links.branches
        if branches is None:
            # NOTE: the caller's request itself goes no further, so that only `settle` uses its dict.
            branches = links.branches = Branches(request, self._maps)
            request = branches.add(request.data, request)
        steps, is_over = branches.leave(hidden, request.data)
        if is_over:
            self._complete(request, None, None)
        if not steps:
            return []
        (first, request.data), *others = steps
        return [(first, request), *[(name, branches.add(data, request)) for name, data in others]]

    def _decide(self, name: str, request: Request, status: Any) -> Hidden | None:
        """End the request, or return the skipped nodes."""
        if status is Status.Break:
            self._complete(request, None, request.data)
        elif status is Status.Error:
            self._complete(request, BackendError(f"node {name!r}: its filter returned Status.Error"), None)
        elif isinstance(status, Status):
            if (name, status) not in self._hidden:
                self._hidden[name, status] = _SKIPS[status](self._graph, name)
            return self._hidden[name, status]
        else:
            given = "None" if status is None else f"an object of type {type(status).__name__}"  # repr may raise
            self._complete(request, BackendError(f"node {name!r}: its filter returned {given}, not a Status"), None)
        return None

    def _end_without_data(self, name: str, request: Request) -> None:
        """End the request without a result, because its map's source did not produce the data."""
        data = request.data
        if TASK_ERROR_KEY not in data:
            sources = self._maps.sources[name]
            reads = [(source, key) for source, pairs in sources for key, new in pairs if new == TASK_DATA_KEY]
            missing = ", ".join(f"{source!r} has no {key!r}" for source, key in reads)
            data[TASK_ERROR_KEY] = NoResult(f"node {name!r}: its map gives no {TASK_DATA_KEY!r}: {missing}")
        self._complete(request, None, data)


def _sources(name: str, graph: Graph, plans: Mapping[str, NodePlan]) -> tuple[tuple[str, Any], ...]:
    """The sources of a node's map; a source without a node name means every predecessor."""
    sources: list[tuple[str, Any]] = []
    for source in plans[name].spec.map:
        names = (source.node,) if source.node else graph.predecessors[name]
        sources.extend((node, source.pairs) for node in names)
    return tuple(sources)
