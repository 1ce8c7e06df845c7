"""Finds the resizes for which a decoder with ``at_least`` decodes at a reduced size.

Everything between the decoder and a resize would work on the reduced image, and everything else that gets it would
take it for the whole one: so only what is known not to mind may come between, and nothing else may get it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchpipe_py.backends.base import Isolation
from torchpipe_py.errors import ConfigError, Problems, quoted
from torchpipe_py.plan.binding import BackendPlan
from torchpipe_py.plan.config import DEFAULT_FILTER, PipelineSpec
from torchpipe_py.plan.graph import Graph

Backends = Mapping[str, tuple[BackendPlan, ...]]

_After = Callable[[], list[BackendPlan]]
"""The resizes that get the result of a backend; raises ``_UnfitError`` if something else gets it."""


class _UnfitError(Exception):
    """The reason why an image must not be decoded at a reduced size."""


def with_reductions(spec: PipelineSpec, graph: Graph, backends: Backends, problems: Problems) -> Backends:
    """The backends of each node, in which decoders know their resizes, and these that they get reduced images.

    A decoder whose images also go elsewhere, or not to a resize of a known size, is added to ``problems``.
    """
    search = _Search(spec, graph, backends)
    changes: dict[int, dict[str, Any]] = {}
    for owner, names in spec.logical().items():
        for plan in backends[owner]:
            for decoder, after in _decoders(plan, partial(search.after_nodes, tuple(names))):
                try:
                    resizes = after()
                except _UnfitError as reason:
                    problems.add(_error(spec, owner, decoder, reason))
                    continue
                changes[id(decoder)] = {"reduced_for": tuple((each.cls, each.params) for each in resizes)}
                changes.update((id(each), {"takes_reduced": True}) for each in resizes)
    if not changes:
        return backends
    return {name: tuple(_changed(plan, changes) for plan in backends[name]) for name in backends}


def _error(spec: PipelineSpec, owner: str, decoder: BackendPlan, reason: _UnfitError) -> ConfigError:
    written = quoted(decoder.params["at_least"])
    why = f"{decoder.label} cannot decode at a reduced size, at least {written} of the next resize: {reason}"
    return spec.nodes[owner].at(decoder.keys.get("at_least", "at_least")).error(why)


def _decoders(plan: BackendPlan, after: _After) -> Iterator[tuple[BackendPlan, _After]]:
    """The decoders with ``at_least`` in a plan, each with what comes after it; ``after``: what comes after the plan."""
    if plan.cls.decodes_reduced and plan.params.get("at_least"):
        yield plan, after
    for index, child in enumerate(plan.children):
        yield from _decoders(child, partial(_after_child, plan, index, after) if plan.cls.is_sequence else after)


def _after_child(sequence: BackendPlan, index: int, after: _After) -> list[BackendPlan]:
    """The resizes that get the result of a child of a sequence."""
    index += 1
    if index == len(sequence.children):
        return after()
    child = sequence.children[index]
    if sequence.filters[index] is not None:
        raise _UnfitError(f"the filter before {child.label} may skip it")
    return _resizes(child, partial(_after_child, sequence, index, after))


def _resizes(plan: BackendPlan, after: _After) -> list[BackendPlan]:
    """The resizes in or after a plan that gets the image."""
    cls = plan.cls
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:  # a custom backend may do anything
        if cls.is_sequence:
            return _after_child(plan, -1, after) if plan.filters[0] is None else _refuse(plan)
        if plan.children:
            return [each for child in plan.children for each in _resizes(child, after)]
        if cls.sizes(plan.params) is not None:
            if plan.params.get("keep_original"):
                raise _UnfitError(f"{plan.label} with keep_original keeps the image, which is to be the whole one")
            return [plan]
        if cls.passes_on or (cls.keeps_sides and cls.isolation is Isolation.FOLLOWS):
            return after()
    return _refuse(plan)


def _refuse(plan: BackendPlan) -> list[BackendPlan]:
    raise _UnfitError(f"{plan.label} gets the image before a resize of Mats to a size that the configuration sets")


@dataclass(frozen=True)
class _Search:
    spec: PipelineSpec
    graph: Graph
    backends: Backends

    def after_nodes(self, names: tuple[str, ...]) -> list[BackendPlan]:
        """The resizes in the nodes that get the results of nodes."""
        return [each for name in names for each in self._after_node(name)]

    def _after_node(self, name: str) -> list[BackendPlan]:
        if readers := self.graph.readers[name]:
            raise _UnfitError(f"the map of {quoted(readers[0])} reads the result of {quoted(name)}")
        if not self.graph.successors[name]:
            raise _UnfitError(f"nothing resizes the result of {quoted(name)}")
        resizes = []
        for after in self.graph.successors[name]:
            node = self.spec.nodes[after]
            if node.map or not node.has_filter(DEFAULT_FILTER):
                raise _UnfitError(f"{quoted(after)}, which gets it, has a {'map' if node.map else 'filter'}")
            for plan in self.backends[node.owner]:
                resizes += _resizes(plan, partial(self._after_node, after))
        return resizes


def _changed(plan: BackendPlan, changes: Mapping[int, Mapping[str, Any]]) -> BackendPlan:
    """The plan with further parameters for some of its parts, by their ``id``."""
    children = tuple(_changed(child, changes) for child in plan.children)
    return replace(plan, params={**plan.params, **changes.get(id(plan), {})}, children=children)
