"""From a planned pipeline to a picture of it."""

from __future__ import annotations

from collections.abc import Iterator

from torchpipe_py.drawing.picture import Arrow, Box, Picture
from torchpipe_py.drawing.svg import svg
from torchpipe_py.filters import ALIASES, BUILT_IN, serial_skip, subgraph_skip
from torchpipe_py.plan.build import NodePlan, Pipeline
from torchpipe_py.plan.config import MapSource
from torchpipe_py.plan.graph import Graph, Hidden


def live_svg(pipeline: Pipeline) -> str:
    """The picture of a plan as SVG, with room for figures in each node."""
    return svg(depict(pipeline, live=True))


def depict(pipeline: Pipeline, live: bool = False) -> Picture:
    """Nodes in file order; edges, maps, jumps, and where a node's filter may skip to.

    ``live`` keeps room for figures in the boxes of nodes with instances of their own.
    """
    graph, plans = pipeline.graph, pipeline.plans
    return Picture(
        pipeline.spec.place.source,
        tuple(_box(plan, graph, live) for plan in plans.values()),
        tuple(arrow for name, plan in plans.items() for arrow in _arrows(name, graph, plan)),
    )


def _box(plan: NodePlan, graph: Graph, live: bool) -> Box:
    spec, limits = plan.spec, plan.batch_range()
    return Box(
        name=spec.name,
        backend=plan.label,
        instances="&".join(map(str, spec.instance_num)),
        range="" if limits is None else f"{limits[0]}..{limits[1]}",
        filter=spec.filter or "",
        alias_of=spec.owner if spec.owner != spec.name else "",
        is_root=spec.name in graph.roots,
        live=live and spec.owner == spec.name,
        shared=spec.shared,
    )


def _arrows(name: str, graph: Graph, plan: NodePlan) -> Iterator[Arrow]:
    for after in graph.successors[name]:
        yield Arrow(name, after, "next")
    for source in plan.spec.map:
        for before in (source.node,) if source.node else graph.predecessors[name]:
            yield Arrow(before, name, "map", _pairs(source))
    for target, labels in plan.jumps().items():
        yield Arrow(name, target, "jump", "; ".join(dict.fromkeys(filter(None, labels))))
    for hidden in _hidden(name, graph, plan.spec.filter or ""):
        for way_out in hidden.exits:
            yield Arrow(name, way_out.node, "skip", (plan.spec.filter or "").lower())
        if hidden.is_end:
            yield Arrow(name, "", "skip", (plan.spec.filter or "").lower())


def _pairs(source: MapSource) -> str:
    return ", ".join(f"{key}:{new}" for key, new in source.pairs)


def _hidden(name: str, graph: Graph, filter_name: str) -> list[Hidden]:
    """What the node's filter may skip; of a filter of the user's own both kinds, as far as they hide a node."""
    word = ALIASES.get(filter_name.lower(), filter_name.lower())
    built_in = BUILT_IN.get(word)
    if not word or built_in not in (None, serial_skip, subgraph_skip):
        return []
    kinds = [] if built_in is subgraph_skip else [graph.serial_chain(name)]
    kinds += [] if built_in is serial_skip else [graph.subgraph(name)]
    return list({hidden.members: hidden for hidden in kinds if len(hidden.members) > 1}.values())
