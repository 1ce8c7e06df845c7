"""The way from node to node: filters, forks, joins, and what a skip hides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import BackendError, NoResult
from torchpipe_py.filters import Filter, Status
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY
from torchpipe_py.plan.build import NodePlan
from torchpipe_py.plan.graph import Fold, Graph
from torchpipe_py.runtime.branches import Maps, Trip
from torchpipe_py.runtime.node import Node
from torchpipe_py.runtime.request import Request

Enter = Callable[[Request], None]

_SKIPS: dict[Any, Callable[[Graph, str], Fold]] = {
    Status.Skip: Graph.fold,
    Status.SerialSkip: Graph.serial_fold,
    Status.SubGraphSkip: Graph.subgraph_fold,
}
"""What a node's skip hides."""


@dataclass(frozen=True)
class _Door:
    """What stands at the entry of a node; ``is_shared`` where several logical nodes share its instances."""

    filter: Filter
    node: Node
    is_shared: bool


class Routes:
    """``entries[name](request)`` brings a request to a node, from any thread; nodes deliver to the entry of the next.

    ``nodes`` are the physical ones, ``logical`` names those that run on each. ``complete(request, error, last)`` is the
    end of a request's way: with an error, with ``last`` as the outcome, or with its own dict.
    """

    def __init__(
        self,
        graph: Graph,
        plans: Mapping[str, NodePlan],
        logical: Mapping[str, Sequence[str]],
        nodes: Mapping[str, Node],
        complete: Callable[[Request, BaseException | None, Data | None], object],
    ) -> None:
        self.entries: dict[str, Enter] = {}
        self._graph = graph
        self._complete = complete
        self._after: dict[str, Enter] = {}
        self._maps = Maps(
            {name: _sources(name, graph, plans) for name in graph.mapped},
            {name: index for index, name in enumerate(graph.predecessors)},
        )
        self._doors = {
            name: _Door(plan.filter, nodes[plan.spec.owner], len(logical[plan.spec.owner]) > 1)
            for name, plan in plans.items()
        }
        self._folds: dict[tuple[str, Status], Fold] = {}
        for name in reversed(graph.order):
            self._after[name] = self._leaving(graph.fold(name))
            self.entries[name] = self._entry(name)
        for owner, names in logical.items():
            nodes[owner].deliver = self._after[owner] if len(names) == 1 else self._deliver_logical

    def _entry(self, name: str) -> Enter:
        """The way into a node: its filter decides on the thread that brings the request."""
        door = self._doors[name]
        filter_, put, is_shared = door.filter, door.node.put, door.is_shared
        run = Status.Run

        def enter(request: Request) -> None:
            try:
                status = filter_(request.data)
            except Exception as error:
                self._complete(request, _filter_error(name, error), None)
                return
            if status is run:
                if is_shared:
                    request.at = name
                request.arrived = perf_counter()
                put(request)
            else:
                fold = self._turn(name, request, status)
                if fold is not None:
                    self._leave(fold, request)

        return enter

    def _turn(self, name: str, request: Request, status: Any) -> Fold | None:
        """What a filter says; past skipped nodes up to the next fork, join or end, which is still to be left."""
        while isinstance(status, Status) and status in _SKIPS:
            fold = self._fold(name, status)
            if fold.next is None:
                return fold
            name = fold.next
            status = self._ask(name, request)
        if status is Status.Run:
            request.at, request.arrived = name, perf_counter()
            self._doors[name].node.put(request)
        elif status is Status.Break:
            self._complete(request, None, request.data)
        elif status is Status.Error:
            self._complete(request, BackendError(f"node {name!r}: its filter says Error"), None)
        else:
            wrong = f"node {name!r}: its filter gave {status!r}, which is no Status"
            self._complete(request, BackendError(wrong), None)
        return None

    def _fold(self, name: str, status: Status) -> Fold:
        """The node with what it hides when it is skipped in this way."""
        found = self._folds.get((name, status))
        if found is None:
            found = self._folds[name, status] = _SKIPS[status](self._graph, name)
        return found

    def _deliver_logical(self, request: Request) -> None:
        self._after[request.at](request)

    def _leaving(self, fold: Fold) -> Enter:
        """The way out of a node."""
        return self.entries[fold.next] if fold.next is not None else partial(self._leave, fold)

    def _leave(self, fold: Fold, request: Request) -> None:
        """Out of a node, or of what is folded into it, where there is more to do than to go on to the next."""
        left = [(fold, request)]
        while left:
            fold, request = left.pop()
            if not fold.exits and request.trip is None:
                self._complete(request, None, None)
                continue
            for name, branch in self._branches(fold, request):
                following = self._step(name, branch)
                if following is not None:
                    left.append((following, branch))

    def _branches(self, fold: Fold, request: Request) -> list[tuple[str, Request]]:
        """The nodes that can be entered now, each with the branch that enters it."""
        if request.trip is None:
            # NOTE: what the caller waits for travels no further, so that `settle` has its dict for itself.
            request.trip = trip = Trip(request, self._maps)
            request = trip.branch(request.data, request.ride)
        trip = request.trip
        steps, is_over = trip.leave(fold, request.data)
        if is_over:
            self._complete(request, None, None)
        branches: list[tuple[str, Request]] = []
        for name, data in steps:
            if not branches:
                request.data = data
            branches.append((name, trip.branch(data, request.ride) if branches else request))
        return branches

    def _step(self, name: str, request: Request) -> Fold | None:
        """Into a node, as far as ``_turn``."""
        if TASK_DATA_KEY not in request.data:
            self._end_without_data(name, request)
            return None
        return self._turn(name, request, self._ask(name, request))

    def _ask(self, name: str, request: Request) -> Any:
        """What the node's filter says; ``Error`` where it raised, and the request has failed of that."""
        try:
            return self._doors[name].filter(request.data)
        except Exception as error:
            self._complete(request, _filter_error(name, error), None)
            return Status.Error

    def _end_without_data(self, name: str, request: Request) -> None:
        """What a map reads has no result: there is none."""
        data = request.data
        if TASK_ERROR_KEY not in data:
            sources = self._maps.sources[name]
            reads = [(source, key) for source, pairs in sources for key, new in pairs if new == TASK_DATA_KEY]
            missing = ", ".join(f"{source!r} has no {key!r}" for source, key in reads)
            data[TASK_ERROR_KEY] = NoResult(f"node {name!r}: its map gives no {TASK_DATA_KEY!r}: {missing}")
        self._complete(request, None, data)


def _sources(name: str, graph: Graph, plans: Mapping[str, NodePlan]) -> tuple[tuple[str, Any], ...]:
    """What a node's map reads, with every predecessor where it names none."""
    found: list[tuple[str, Any]] = []
    for source in plans[name].spec.map:
        names = (source.node,) if source.node else graph.predecessors[name]
        found.extend((one, source.pairs) for one in names)
    return tuple(found)


def _filter_error(node: str, error: BaseException) -> BackendError:
    failure = BackendError(f"node {node!r}: its filter: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
