"""The graph of a pipeline as pure data: roots, successors, order, what a skip hides; refuses invalid graphs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from torchpipe_py.errors import Problems, nearest, quoted
from torchpipe_py.plan.config import NodeSpec, PipelineSpec, Place

MAX_JUMPS = 64
"""Maximum depth of nested graphs: each level's completion is reported on the stack of the inner one."""


@dataclass(frozen=True)
class Exit:
    """A node after a ``Hidden``, from which it has ``edges`` of its ``predecessors`` incoming edges.

    It builds its dict by a map, or takes over the dict of the node before it.
    """

    node: str
    edges: int
    predecessors: int
    has_map: bool


@dataclass(frozen=True)
class Hidden:
    """A node with the later nodes that a skip hides, if any: from outside they act as one node with one dict.

    ``members`` begins with that node. ``is_end``: a path through the graph ends here. ``is_read``: the map of a node
    outside reads a member. ``copies``: the dict is used several times, so each successor needs its own copy.
    """

    members: tuple[str, ...]
    exits: tuple[Exit, ...]
    is_end: bool
    is_read: bool
    copies: bool

    @property
    def next(self) -> str | None:
        """The only next node, if it takes over the dict unchanged and waits for no other; else ``None``."""
        if len(self.exits) == 1 and not (self.is_end or self.copies or self.exits[0].has_map):
            return self.exits[0].node
        return None


@dataclass(frozen=True)
class Graph:
    """``order`` is topological; everything else is in file order.

    ``upstream[n]`` holds every node from which a request can still reach ``n``, ``reached_from[n]`` the roots.
    ``jumps[n]`` names the roots of the graphs that ``n`` runs, ``readers[n]`` the nodes with a map that reads ``n``.
    """

    order: tuple[str, ...]
    roots: tuple[str, ...]
    successors: Mapping[str, tuple[str, ...]]
    predecessors: Mapping[str, tuple[str, ...]]
    readers: Mapping[str, tuple[str, ...]]
    mapped: frozenset[str]
    reached_from: Mapping[str, frozenset[str]]
    upstream: Mapping[str, frozenset[str]]
    jumps: Mapping[str, tuple[str, ...]]

    @property
    def jumped_to(self) -> frozenset[str]:
        """Roots of graphs that are run by nodes of other graphs."""
        return frozenset(root for roots in self.jumps.values() for root in roots)

    @property
    def entered(self) -> tuple[str, ...]:
        """Roots that no jump leads to; if there is only one, requests enter it by default."""
        return tuple(root for root in self.roots if root not in self.jumped_to)

    def alone(self, name: str) -> Hidden:
        """The node ``name`` alone, as a ``Hidden``."""
        return self._hide((name,))

    def serial_chain(self, name: str) -> Hidden:
        """The longest serial chain from a node: each next one is the only successor and has no other predecessor."""
        members = [name]
        while True:
            after = self.successors[members[-1]]
            if len(after) != 1 or len(self.predecessors[after[0]]) != 1:
                return self._hide(members)
            members.append(after[0])

    def subgraph(self, name: str) -> Hidden:
        """The largest subgraph that starts at a node and holds all predecessors of its other nodes."""
        members = {name: None}
        for other in self.order:
            before = self.predecessors[other]
            if before and other not in members and all(previous in members for previous in before):
                members[other] = None
        return self._hide(members)

    def _hide(self, members: Iterable[str]) -> Hidden:
        inside = dict.fromkeys(members)
        edges: dict[str, int] = {}
        for name in inside:
            for after in self.successors[name]:
                if after not in inside:
                    edges[after] = edges.get(after, 0) + 1
        exits = [Exit(to, count, len(self.predecessors[to]), to in self.mapped) for to, count in edges.items()]
        is_read = any(reader not in inside for name in inside for reader in self.readers[name])
        is_end = any(not self.successors[name] for name in inside)
        takers = is_end + sum(not way_out.has_map for way_out in exits)
        copies = is_read or takers > 1
        return Hidden(tuple(inside), tuple(exits), is_end, is_read, copies)


def build_graph(spec: PipelineSpec) -> Graph:
    """Check edges and maps, and order the nodes; ``ConfigError`` names file, node, key and the nearest valid name."""
    problems = Problems()
    nodes = spec.nodes
    for node in nodes.values():
        _check_next(node, nodes, problems)
    problems.raise_all()
    before_of: dict[str, list[str]] = {name: [] for name in nodes}
    for node in nodes.values():
        for successor in node.next:
            before_of[successor].append(node.name)
    predecessors = {name: tuple(names) for name, names in before_of.items()}
    order = _topological(predecessors, nodes)
    roots = tuple(name for name in nodes if not predecessors[name])
    upstream: dict[str, frozenset[str]] = {}
    reached_from: dict[str, frozenset[str]] = {}
    readers: dict[str, list[str]] = {name: [] for name in order}
    for name in order:
        before = predecessors[name]
        upstream[name] = frozenset(before).union(*(upstream[previous] for previous in before))
        reached_from[name] = frozenset([] if before else [name]).union(*(reached_from[previous] for previous in before))
        with problems.gathered():
            _check_join(nodes[name], before, reached_from)
            for source in _check_map(nodes[name], before, upstream[name], reached_from):
                readers[source].append(name)
    problems.raise_all()
    return Graph(
        order=order,
        roots=roots,
        successors={name: nodes[name].next for name in order},
        predecessors=predecessors,
        readers={name: tuple(names) for name, names in readers.items()},
        mapped=frozenset(name for name in order if nodes[name].map),
        reached_from=reached_from,
        upstream=upstream,
        jumps={},
    )


def _check_next(node: NodeSpec, nodes: Mapping[str, NodeSpec], problems: Problems) -> None:
    for successor in node.next:
        if successor not in nodes:
            hint = nearest(successor, set(nodes) - {node.name})
            problems.add(node.at("next").error(f"no node {quoted(successor)}; {hint}"))


def _check_join(node: NodeSpec, before: tuple[str, ...], reached_from: Mapping[str, frozenset[str]]) -> None:
    if len(before) > 1 and not node.map:
        first, *others = before
        example = ",".join([f"{first}[result:data]", *(f"{name}[result:{name}]" for name in others)])
        text = (
            f"several predecessors ({', '.join(before)}) need a map: what it reads of each, as map = {quoted(example)}"
        )
        raise node.place.error(text)
    for previous in before:
        for root in reached_from[node.name] - reached_from[previous]:
            raise node.place.error(f"waits for {previous!r}, which a request that enters at {root!r} never reaches")


def _check_map(
    node: NodeSpec, before: tuple[str, ...], ancestors: frozenset[str], reached_from: Mapping[str, frozenset[str]]
) -> dict[str, None]:
    """The nodes that the node's map reads."""
    if not node.map:
        return {}
    if not before:
        raise node.at("map").error("the node is a root, so it has no node to map from")
    if not any(new == "data" for source in node.map for _, new in source.pairs):
        raise node.at("map").error("gives no 'data'; expected source[key:data]")
    sources: dict[str, None] = {}
    for source in node.map:
        if not source.node:
            sources.update(dict.fromkeys(before))
            continue
        if source.node not in ancestors:
            raise node.at("map").error(f"{quoted(source.node)} is not an ancestor; {nearest(source.node, ancestors)}")
        for root in reached_from[node.name] - reached_from[source.node]:
            raise node.at("map").error(f"{source.node!r} is not reached by a request that enters at {root!r}")
        sources[source.node] = None
    return sources


def _topological(predecessors: Mapping[str, Iterable[str]], nodes: Mapping[str, NodeSpec]) -> tuple[str, ...]:
    """Order the nodes; raises an error that shows the cycle, if there is one."""
    try:
        return tuple(TopologicalSorter(predecessors).static_order())
    except CycleError as error:
        cycle = error.args[1]
        raise nodes[cycle[-2]].at("next").error(f"a cycle: {' -> '.join(cycle)}") from None


def add_jumps(graph: Graph, spec: PipelineSpec, jumps: Mapping[str, tuple[str, ...]]) -> Graph:
    """The graph with the jumps of its nodes: checks their targets, and adds the upstream nodes that they imply."""
    problems = Problems()
    for name, targets in jumps.items():
        for target in targets:
            with problems.gathered():
                _check_jump(graph, spec.nodes[name], target, _place(spec, name))
    problems.raise_all()
    inside = {root: frozenset(name for name in graph.order if root in graph.reached_from[name]) for root in graph.roots}
    runs = {root: {target for name in inside[root] for target in jumps.get(name, ())} for root in graph.roots}
    _check_jump_cycles(spec, graph, jumps, runs)
    upstream = {name: set(before) for name, before in graph.upstream.items()}
    # A request returns from the graph that a node jumps to, and continues to the node's successors.
    for name, targets in jumps.items():
        within = set().union(*(_all_inside(target, inside, runs) for target in targets))
        for reached in graph.order:
            if name in graph.upstream[reached]:
                upstream[reached] |= within
    # A node that can reach a jump can reach its target; handle graphs before those they jump to.
    for root in _by_jumps(graph.roots, runs):
        for name in sorted(inside[root] & jumps.keys()):
            for target in jumps[name]:
                for reached in inside[target]:
                    upstream[reached] |= upstream[name] | {name}
    return replace(graph, upstream={name: frozenset(before) for name, before in upstream.items()}, jumps=dict(jumps))


def _place(spec: PipelineSpec, name: str) -> Place:
    """The place where a node's jump target is set."""
    owner = spec.nodes[spec.nodes[name].owner]
    return owner.at(next((key for key in owner.params if key.rpartition("::")[2] == "jump"), "jump"))


def _check_jump(graph: Graph, node: NodeSpec, target: str, place: Place) -> None:
    if target not in graph.successors:
        raise place.error(f"no node {quoted(target)}; {nearest(target, graph.roots)}")
    if target not in graph.roots:
        raise place.error(f"{target!r} is not a root, where a jump must enter a graph; {nearest(target, graph.roots)}")
    if target in graph.reached_from[node.name]:
        raise place.error(f"{target!r} is the root of the graph of {node.name!r} itself")


def _check_jump_cycles(
    spec: PipelineSpec, graph: Graph, jumps: Mapping[str, tuple[str, ...]], runs: Mapping[str, set[str]]
) -> None:
    for name, targets in jumps.items():
        for target in targets:
            back = _reachable(target, runs) & graph.reached_from[name]
            if back:
                raise _place(spec, name).error(f"from {target!r} jumps lead back to {min(back)!r}: a cycle")
    depth: dict[str, int] = {}
    for root in reversed(_by_jumps(graph.roots, runs)):
        depth[root] = 1 + max((depth[target] for target in runs[root]), default=0)
        if depth[root] > MAX_JUMPS:
            raise spec.nodes[root].place.error(f"graphs run graphs from here on, more than {MAX_JUMPS} deep")


def _reachable(root: str, runs: Mapping[str, set[str]]) -> set[str]:
    reached, left = {root}, [root]
    while left:
        for target in runs[left.pop()] - reached:
            reached.add(target)
            left.append(target)
    return reached


def _all_inside(root: str, inside: Mapping[str, frozenset[str]], runs: Mapping[str, set[str]]) -> set[str]:
    return set().union(*(inside[target] for target in _reachable(root, runs)))


def _by_jumps(roots: Iterable[str], runs: Mapping[str, set[str]]) -> list[str]:
    """Roots, each before those it jumps to; cycles have already been refused."""
    sorter = TopologicalSorter({root: runs[root] for root in roots})
    return list(sorter.static_order())[::-1]


def both_ways(before: Mapping[str, Collection[str]]) -> dict[str, Collection[str]]:
    """Maps each name to the others that are both before and after it, at any distance."""
    bits = {name: 1 << index for index, name in enumerate(before)}
    reached = {name: sum(bits[other] for other in others) for name, others in before.items()}
    for middle, bit in bits.items():
        for name in bits:
            if reached[name] & bit:
                reached[name] |= reached[middle]
    return {
        name: [each for each in bits if each != name and reached[name] & bits[each] and reached[each] & bits[name]]
        for name in bits
    }
