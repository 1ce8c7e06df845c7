"""Splits a plan in two: the part that each worker runs, and the part that an engine process runs for all workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torchpipe_py.errors import ConfigError
from torchpipe_py.filters import run
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.plan.binding import BackendPlan, FilterPlan
from torchpipe_py.plan.build import NodePlan, Pipeline, with_jumps
from torchpipe_py.plan.config import DEFAULT_FILTER, RUNS, NodeSpec, PipelineSpec, load_config
from torchpipe_py.plan.files import paths_named
from torchpipe_py.plan.graph import Graph, build_graph
from torchpipe_py.values import Value

_INSIDE = (*RUNS, "or")
"""Filters that affect only their own node, or end a request that has no result."""

MOST_WORKERS = 8
"""Maximum number of processes with a pipe if it is derived from the number of cores."""

MOST_INFLIGHT = 2**31  # in an engine process, which is limited by its slots


@dataclass(frozen=True)
class Section:
    """Shared nodes that an engine process runs in sequence, without returning to the worker in between."""

    nodes: tuple[str, ...]

    @property
    def head(self) -> str:
        """The node by whose name the section is entered."""
        return self.nodes[0]


def shared_nodes(tables: Mapping[str, Any]) -> list[str]:
    """Names in file order; empty if the configuration cannot be read, which planning reports."""
    try:
        return [node.name for node in load_config(tables).nodes.values() if node.shared]
    except ConfigError:
        return []


def usual_workers(tables: Mapping[str, Any], cores: int, has_gpu: bool) -> int:
    """Processes with a pipe each: one per core, since the GIL lets one use a single core, at most ``MOST_WORKERS``.

    1 with a GPU, unless nodes are shared: each would have a copy of the models on it.
    """
    return 1 if has_gpu and not shared_nodes(tables) else min(MOST_WORKERS, cores)


def usual_engines(tables: Mapping[str, Any]) -> int:
    """Engine processes for a device: 2 if a shared node decodes on the GPU, which keeps a thread busy, else 1."""
    shared = [node for node in load_config(tables).nodes.values() if node.shared]
    parts = (part for node in shared for call in node.calls for part in call.walk())
    return 2 if any(part.name == "DecodeTensor" for part in parts) else 1


def same_shared(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether two configurations have the same shared nodes in the same graph.

    The contents of files that they name are not compared: see ``shared_files``.
    """
    try:
        old, new = load_config(before), load_config(after)
    except ConfigError:
        return False

    def described(spec: PipelineSpec) -> list[Any]:
        files = {node.place.source for node in spec.nodes.values() if node.shared}
        nodes = [node for node in spec.nodes.values() if node.place.source in files]
        return [
            node if node.shared else (node.name, node.next, node.map, node.filter, _reductions(node)) for node in nodes
        ]

    return described(old) == described(new)


def _reductions(node: NodeSpec) -> list[Value]:
    """The values of ``at_least``: they decide whether a later resize, perhaps of a shared node, gets reduced images."""
    return [value for key, value in node.params.items() if key.rpartition("::")[2] == "at_least"]


def shared_files(tables: Mapping[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Files that the shared nodes name, and those with weights of these, with the current inode, size and modification
    time of each.
    """
    versions = {}
    for path in paths_named(tables):
        with suppress(OSError, ValueError):  # a string with a null character is no path
            status = os.stat(path)
            versions[path] = status.st_ino, status.st_size, status.st_mtime_ns
    return versions


def sections(pipeline: Pipeline) -> list[Section]:
    """All shared nodes in the order of the graph, each in exactly one section."""
    result: list[Section] = []
    assigned: set[str] = set()
    for name in pipeline.graph.order:
        if pipeline.spec.nodes[name].shared and name not in assigned:
            nodes = _chain(pipeline, name)
            assigned.update(nodes)
            result.append(Section(nodes))
    return result


def engine_part(pipeline: Pipeline) -> Pipeline:
    """The sections alone, each as a separate graph."""
    plans: dict[str, NodePlan] = {}
    for section in sections(pipeline):
        for name, after in zip(section.nodes, [*section.nodes[1:], None], strict=True):
            plan = pipeline.plans[name]
            if plan.spec.ordered_by and plan.processes > 1:
                raise plan.spec.at("ordered_by").error("works with one engine process only: use --engines 1")
            spec = replace(plan.spec, next=() if after is None else (after,), map=(), filter=None)
            is_head = name == section.head
            plans[name] = replace(
                plan,
                spec=spec,
                filter=FilterPlan(run) if is_head else plan.filter,
                reaches_caller=after is None or plan.reaches_caller,
            )
    return _with_plans(replace(pipeline, spec=replace(pipeline.spec, max_inflight=MOST_INFLIGHT, parts={})), plans)


def worker_part(pipeline: Pipeline, remote: Callable[[Section, str], BackendPlan]) -> Pipeline:
    """The plan with one node for each section, under the name of its head.

    ``remote(section, label)`` returns the backend that this node runs. All nodes before it keep Tensors on the CPU
    unless the configuration says otherwise: another process cannot take them from a GPU.
    """
    parts = sections(pipeline)
    inner = {name for section in parts for name in section.nodes[1:]}
    named = {section.nodes[-1]: section.head for section in parts}
    plans = {name: _renamed(plan, named) for name, plan in pipeline.plans.items() if name not in inner}
    before = {name for section in parts for name in pipeline.graph.upstream[section.head]}
    for name in before.union(pipeline.spec.nodes[name].owner for name in before).intersection(plans):
        plans[name] = replace(plans[name], backends=tuple(backend.on_cpu() for backend in plans[name].backends))
    for section in parts:
        plan = plans[section.head]
        next_ = pipeline.spec.nodes[section.nodes[-1]].next
        spec = replace(plan.spec, next=next_, instance_num=(1,), batching_timeout=0.0, ordered_by="")
        label = " -> ".join(pipeline.plans[name].label for name in section.nodes)
        plans[section.head] = replace(plan, spec=spec, backends=(remote(section, label),))
    return _with_plans(pipeline, plans)


def _with_plans(pipeline: Pipeline, plans: Mapping[str, NodePlan]) -> Pipeline:
    spec = replace(pipeline.spec, nodes={name: plan.spec for name, plan in plans.items()})
    return Pipeline(spec, with_jumps(build_graph(spec), spec, plans), plans)


def _renamed(plan: NodePlan, names: Mapping[str, str]) -> NodePlan:
    """The plan with new node names in its map."""
    sources = tuple(replace(source, node=names.get(source.node, source.node)) for source in plan.spec.map)
    return replace(plan, spec=replace(plan.spec, map=sources))


def _chain(pipeline: Pipeline, head: str) -> tuple[str, ...]:
    """The longest chain of shared nodes from ``head`` that needs no decision by the worker in between."""
    graph, nodes = pipeline.graph, [head]
    if not pipeline.spec.nodes[head].always_runs:
        return (head,)  # the worker calls that filter: a ``Skip`` must skip only the head, not later nodes
    while True:
        after = graph.successors[nodes[-1]]
        if len(after) != 1 or graph.readers[nodes[-1]] or len(graph.predecessors[after[0]]) != 1:
            break
        spec = pipeline.spec.nodes[after[0]]
        if not spec.shared or not _has_filter(spec, *_INSIDE):
            break
        nodes.append(after[0])
    # NOTE: a request that ends inside the chain must end here too: nothing after the chain may run without a result,
    # and no other branch of the request may continue.
    after, last = graph.successors[nodes[-1]], nodes[-1]
    is_usual = all(_has_filter(pipeline.spec.nodes[name], DEFAULT_FILTER) for name in after)
    ends_there = is_usual if after else _is_only_end(graph, last)
    return tuple(nodes) if ends_there and not _is_data_read(pipeline, last) else (head,)


def _is_data_read(pipeline: Pipeline, name: str) -> bool:
    """Whether a map reads the node's ``data``, which is not sent back from inside a chain."""
    maps = [pipeline.spec.nodes[reader].map for reader in pipeline.graph.readers[name]]
    sources = [source for each in maps for source in each if source.node == name]
    return any(key == TASK_DATA_KEY for source in sources for key, _ in source.pairs)


def _is_only_end(graph: Graph, end: str) -> bool:
    """Whether a request that reaches this end has no other end."""
    roots = graph.reached_from[end]
    return all(graph.successors[name] or name == end or not roots & graph.reached_from[name] for name in graph.order)


def _has_filter(node: NodeSpec, *names: str) -> bool:
    """Whether the node takes over its predecessor's dict, through one of these filters."""
    return not node.map and node.has_filter(*names)
