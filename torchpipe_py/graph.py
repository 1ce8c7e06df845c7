"""The graph of a pipeline as pure data: roots, successors, order, and everything that is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchpipe_py.config import NodeSpec, PipelineSpec
from torchpipe_py.errors import ConfigError, nearest


@dataclass(frozen=True)
class Graph:
    """``order`` is topological; ``upstream[n]`` holds every node from which a request can still reach ``n``."""

    order: tuple[str, ...]
    roots: tuple[str, ...]
    successors: Mapping[str, tuple[str, ...]]
    upstream: Mapping[str, frozenset[str]]


def build_graph(spec: PipelineSpec) -> Graph:
    """Check the edges and order them; ``ConfigError`` names file, node, key and the nearest valid name."""
    nodes = spec.nodes
    for node in nodes.values():
        _check_edges(node, nodes)
    order = _topological(nodes)
    predecessors = {name: tuple(n for n in order if name in nodes[n].next) for name in order}
    for name in order:
        _check_join(nodes[name], predecessors[name])
    upstream: dict[str, frozenset[str]] = {}
    for name in order:
        upstream[name] = frozenset(predecessors[name]).union(*(upstream[p] for p in predecessors[name]))
    return Graph(
        order=order,
        roots=tuple(name for name in nodes if not predecessors[name]),
        successors={name: nodes[name].next for name in order},
        upstream=upstream,
    )


def _check_edges(node: NodeSpec, nodes: Mapping[str, NodeSpec]) -> None:
    for successor in node.next:
        if successor not in nodes:
            raise node.at("next").error(f"no node {successor!r}; {nearest(successor, set(nodes) - {node.name})}")
    if len(node.next) > 1:
        raise _later(node, "next", "several successors")
    if node.map:
        raise _later(node, "map", "a map")
    if len(node.calls) > 1:
        raise _later(node, "backend", "a composition with '&'")
    if "." in node.name:
        raise node.place.error("logical nodes (name.alias) are not supported in this version")


def _later(node: NodeSpec, key: str, what: str) -> ConfigError:
    return node.at(key).error(f"{what}: understood, but not supported in this version")


def _check_join(node: NodeSpec, predecessors: tuple[str, ...]) -> None:
    if len(predecessors) > 1 and not node.map:
        raise node.place.error(f"several predecessors ({', '.join(predecessors)}) need a map")


def _topological(nodes: Mapping[str, NodeSpec]) -> tuple[str, ...]:
    """Depth first from every node, without recursion; a cycle is an error that shows it."""
    order: list[str] = []
    done: set[str] = set()
    for start in nodes:
        path: list[str] = []
        stack = [(start, False)]
        while stack:
            name, leaving = stack.pop()
            if leaving:
                path.pop()
                if name not in done:
                    done.add(name)
                    order.append(name)
            elif name in path:
                cycle = " -> ".join([*path[path.index(name) :], name])
                raise nodes[path[-1]].at("next").error(f"a cycle: {cycle}")
            elif name not in done:
                path.append(name)
                stack.append((name, True))
                stack.extend((successor, False) for successor in reversed(nodes[name].next))
    order.reverse()
    return tuple(order)
