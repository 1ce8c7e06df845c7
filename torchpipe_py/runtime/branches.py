"""One request's way through a graph with branches: what its nodes put out, and what its joins still wait for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from torchpipe_py.backends.base import Data
from torchpipe_py.keys import TASK_CONTEXT_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.graph import Fold
from torchpipe_py.runtime.request import Request, Ride, nothing

Step = tuple[str, Data]
"""A node to be entered next, and the dict to enter it with."""

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Maps:
    """The ``map`` of each node that has one: (node it reads, its (key, new key) pairs), in order.

    ``rank`` is the place of a node in the file.
    """

    sources: Mapping[str, tuple[tuple[str, Pairs], ...]]
    rank: Mapping[str, int]


class Trip:
    """What the branches of one request have in common; ``leave`` may be called by several threads at once.

    ``request`` is the one the caller waits for. Each branch under way has a ``Request`` of its own in ``branches``;
    they are dropped when it is completed.
    """

    def __init__(self, request: Request, maps: Maps) -> None:
        self.request = request
        self.branches: list[Request] = []
        self._maps = maps
        self._base = request.data
        self._lock = threading.Lock()
        self._under_way = 1
        self._outputs: dict[str, Data] = {}
        self._hidden_by: dict[str, str] = {}
        self._missing: dict[str, int] = {}
        self._ends: dict[str, Data] = {}

    def leave(self, fold: Fold, data: Data) -> tuple[list[Step], bool]:
        """A branch leaves a node, or what is folded into it, with ``data``.

        The nodes that can be entered now, each a branch of its own (none where the branch ends, or waits at a join for
        another), and whether no branch is under way any more.
        """
        name, steps = fold.members[0], []
        with self._lock:
            if fold.is_read:
                self._outputs[name] = data
                for member in fold.members:
                    self._hidden_by[member] = name
            if fold.is_end:
                self._ends[name] = data
            for one in fold.exits:
                if one.ways > one.edges:
                    missing = self._missing[one.node] = self._missing.get(one.node, one.ways) - one.edges
                    if missing:
                        continue
                steps.append((one.node, self._input(one.node, data, fold.copies)))
            self._under_way += len(steps) - 1
            return steps, not self._under_way

    def _input(self, node: str, data: Data, copies: bool) -> Data:
        """What the node is entered with: the dict, a copy of it, or what its map makes of the outputs it reads."""
        sources = self._maps.sources.get(node)
        if sources is None:
            return dict(data) if copies else data
        mapped: Data = {}
        error = None
        for source, pairs in sources:
            found = self._outputs[self._hidden_by[source]]
            if TASK_CONTEXT_KEY in found:
                mapped[TASK_CONTEXT_KEY] = found[TASK_CONTEXT_KEY]
            for key, new in pairs:
                if key in found:
                    mapped[new] = found[key]
                elif new == TASK_DATA_KEY:
                    error = found.get(TASK_ERROR_KEY, error)
        if TASK_DATA_KEY not in mapped and error is not None:
            mapped[TASK_ERROR_KEY] = error
        return mapped

    def branch(self, data: Data, ride: Ride | None) -> Request:
        """A request for a further branch, on the ride of the one it comes from."""
        one = Request(data, nothing)  # nobody waits for it
        one.deadline, one.trip, one.ride = self.request.deadline, self, ride
        self.branches.append(one)
        one.done = self.request.done
        return one

    def settle(self, last: Data | None, is_failed: bool) -> None:
        """Merge the outcome into the dict that the request came with, and drop the branches that are still under way.

        The outcome is ``last``, or what the graph's ends gave; later ones in the file overwrite earlier ones.
        """
        for one in self.branches:
            one.done = True
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
