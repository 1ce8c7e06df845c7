"""The places of everything in a picture: layers from left to right, graphs from top to bottom, jumps around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchpipe_py.drawing.picture import Arrow, Graph, Picture, split
from torchpipe_py.drawing.plan import LANE, Plan, make_plan
from torchpipe_py.drawing.shapes import Frame, Layout, PlacedBox, Point, Rect, Route, label_above, lines_width
from torchpipe_py.drawing.text import SMALL_LINE, clean, wrap

MARGIN = 12.0
FRAME_PAD, FRAME_HEAD, FRAME_GAP = 20.0, 34.0, 22.0
JUMP_COLUMNS = 56

Place = tuple[int, int]
"""A graph and an element in it."""


@dataclass(frozen=True)
class Jump:
    """A jump by its ends; ``key`` is negative, so that it is no index of an arrow of a graph."""

    key: int
    arrow: Arrow
    start: Place
    end: Place
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Lanes:
    """Where jumps run outside the frames: y below a graph, by graph and key; x at the left margin, by key."""

    below: Mapping[Place, float]
    margin: Mapping[int, float]


def lay_out(picture: Picture) -> Layout:
    """The same picture always gives the same layout. Without boxes there is nothing but a margin."""
    graphs = split(picture)
    jumps = _jumps(picture, graphs)
    plans = [make_plan(graph, *_at_boxes(index, jumps)) for index, graph in enumerate(graphs)]
    framed = len(plans) > 1
    pad, head = (FRAME_PAD, FRAME_HEAD) if framed else (0.0, 0.0)
    left = MARGIN + (len(jumps) + bool(jumps)) * LANE
    headings = [clean(graph.heading) for graph in graphs] if framed else []
    widths = [*(plan.columns.width for plan in plans), *(lines_width([heading]) for heading in headings)]
    width = max(widths, default=0.0) + 2 * pad
    rects: list[Rect] = []
    below: dict[Place, float] = {}
    y = MARGIN
    for index, plan in enumerate(plans):
        rects.append(Rect(left, y, width, plan.height + head + pad))
        y = rects[-1].bottom
        for jump, height in _passing(index, plan, jumps):
            y += height
            below[index, jump.key] = y
        y += FRAME_GAP
    origins = [(rect.x + pad, rect.y + head) for rect in rects]
    lanes = Lanes(below, _margin_lanes(jumps, below))
    routes = [route.moved(origin) for plan, origin in zip(plans, origins, strict=True) for route in plan.routes]
    routes += [_jump_route(jump, plans, origins, lanes) for jump in jumps]
    return Layout(
        boxes=tuple(_placed(plans, origins)),
        ends=tuple(_ends(plans, origins)),
        frames=tuple(Frame(heading, rect) for heading, rect in zip(headings, rects, strict=False)),
        routes=tuple(routes),
        width=max([left + width, *(route.label.rect.right for route in routes if route.label)]) + MARGIN,
        height=max(y - FRAME_GAP, MARGIN) + MARGIN,
    )


def _jumps(picture: Picture, graphs: Sequence[Graph]) -> list[Jump]:
    where = {box.name: (index, at) for index, graph in enumerate(graphs) for at, box in enumerate(graph.boxes)}
    found = []
    for order, arrow in enumerate(arrow for arrow in picture.arrows if arrow.kind == "jump"):
        lines = wrap(arrow.label, JUMP_COLUMNS) if arrow.label.strip() else ()
        found.append(Jump(-1 - order, arrow, where[arrow.start], where[arrow.end], lines))
    return found


def _at_boxes(index: int, jumps: Iterable[Jump]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The keys of the jumps from and to each box of a graph."""
    out: dict[int, list[int]] = {}
    into: dict[int, list[int]] = {}
    for jump in jumps:
        for place, found in ((jump.start, out), (jump.end, into)):
            if place[0] == index:
                found.setdefault(place[1], []).append(jump.key)
    return out, into


def _passing(index: int, plan: Plan, jumps: Sequence[Jump]) -> list[tuple[Jump, float]]:
    """The jumps that run below a graph, with the height each needs; further up what crosses least."""
    found = []
    for jump in jumps:
        if jump.start[0] == index:
            found.append((plan.columns.exits[jump.key], jump, len(jump.lines) * SMALL_LINE + LANE))
        elif jump.end[0] == index and jump.key in plan.columns.entries:
            found.append((plan.columns.entries[jump.key], jump, LANE))
    return [(jump, height) for _, jump, height in sorted(found, key=lambda one: one[0])]


def _margin_lanes(jumps: Sequence[Jump], below: Mapping[Place, float]) -> dict[int, float]:
    order = sorted(jumps, key=lambda jump: below[jump.start[0], jump.key])
    return {jump.key: MARGIN + index * LANE for index, jump in enumerate(order)}


def _jump_route(jump: Jump, plans: Sequence[Plan], origins: Sequence[Point], lanes: Lanes) -> Route:
    """Out to the right, down below its graph, along the left margin, and in from the left."""
    (from_graph, start), (to_graph, end) = jump.start, jump.end
    from_plan, from_origin = plans[from_graph], origins[from_graph]
    to_plan, to_origin = plans[to_graph], origins[to_graph]
    first = _sum(from_plan.leave(start, jump.key), from_origin)
    last = _sum(to_plan.arrive(end, jump.key), to_origin)
    out, channel = from_origin[0] + from_plan.columns.exits[jump.key], lanes.below[from_graph, jump.key]
    margin, back = lanes.margin[jump.key], last[0]
    points = [first, (out, first[1]), (out, channel)]
    if jump.key not in to_plan.columns.entries:
        points += [(margin, channel), (margin, last[1])]
    else:
        if from_graph != to_graph:
            points.append((margin, channel))
            channel = lanes.below[to_graph, jump.key]
            points.append((margin, channel))
        back = to_origin[0] + to_plan.columns.entries[jump.key]
        points += [(back, channel), (back, last[1])]
    points.append(last)
    return Route(jump.arrow, tuple(points), label_above(jump.lines, out - LANE, points[2][1], margin + LANE))


def _sum(a: Point, b: Point) -> Point:
    return a[0] + b[0], a[1] + b[1]


def _placed(plans: Sequence[Plan], origins: Sequence[Point]) -> Iterator[PlacedBox]:
    for index, (plan, origin) in enumerate(zip(plans, origins, strict=True)):
        depth = plan.layered.depths()
        for at, box in enumerate(plan.layered.graph.boxes):
            yield PlacedBox(box, plan.faces[at], plan.rects[at].moved(origin), index, depth[at])


def _ends(plans: Sequence[Plan], origins: Sequence[Point]) -> Iterator[Rect]:
    for plan, origin in zip(plans, origins, strict=True):
        if plan.layered.end is not None:
            yield plan.rects[plan.layered.end].moved(origin)
