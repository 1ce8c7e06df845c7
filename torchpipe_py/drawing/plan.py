"""The layout of one graph by itself: columns, the places of its boxes, the routes of its arrows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchpipe_py.drawing.coordinates import END_SIZE, Sides, heights, middles, sides
from torchpipe_py.drawing.layers import Layered, layered
from torchpipe_py.drawing.picture import Graph
from torchpipe_py.drawing.shapes import Point, Rect, Route, label_above, lines_width
from torchpipe_py.drawing.text import Face, face, wrap

LANE = 14.0
ARROW, LABEL_END = 16.0, 4.0
CURVE_LEAST, CURVE_MOST, CURVE_SHARE = 40.0, 130.0, 0.22
STRAIGHT = 0.5


@dataclass(frozen=True)
class Columns:
    """The layers and the gaps behind them: lanes for jumps, then the curves, then room for labels.

    ``exits`` and ``entries`` are the lanes on which a jump leaves this graph's boxes and comes to them. A jump to a box
    of the first layer needs none: it comes in from the left.
    """

    lefts: tuple[float, ...]
    widths: tuple[float, ...]
    turns: tuple[float, ...]
    curves: tuple[float, ...]
    exits: Mapping[int, float]
    entries: Mapping[int, float]
    width: float


@dataclass(frozen=True)
class Plan:
    """A graph laid out with its origin at the left top; elements as in ``layers``."""

    layered: Layered
    faces: tuple[Face, ...]
    ports: Sides
    columns: Columns
    rects: Mapping[int, Rect]
    routes: tuple[Route, ...]
    height: float

    def leave(self, element: int, key: int) -> Point:
        """Where a jump starts."""
        rect = self.rects[element]
        return rect.right, rect.middle + self.ports.right[element, key]

    def arrive(self, element: int, key: int) -> Point:
        """Where a jump ends."""
        rect = self.rects[element]
        return rect.x, rect.middle + self.ports.left[element, key]


def make_plan(graph: Graph, jumps_out: Mapping[int, Sequence[int]], jumps_in: Mapping[int, Sequence[int]]) -> Plan:
    """``jumps_out`` and ``jumps_in`` hold the keys of the jumps at a box; no key may be the index of an arrow."""
    layers = layered(graph)
    faces = tuple(face(box) for box in graph.boxes)
    labels = [wrap(arrow.label) if arrow.label.strip() else () for arrow in graph.arrows]
    ports = sides(layers, labels, jumps_out, jumps_in)
    tall = heights(layers, faces, ports)
    y = middles(layers, tall, ports)
    top = min(y[one] - tall[one] / 2 for one in y)
    y = {one: middle - top for one, middle in y.items()}
    columns = _columns(layers, faces, _gaps(layers, labels, y, ports), (jumps_out, jumps_in))
    depth = layers.depths()
    rects = {
        one: Rect(columns.lefts[depth[one]], y[one] - tall[one] / 2, columns.widths[depth[one]], tall[one]) for one in y
    }
    routes = tuple(_routes(layers, labels, columns, rects, ports))
    return Plan(layers, faces, ports, columns, rects, routes, max(rect.bottom for rect in rects.values()))


def _gaps(
    graph: Layered, labels: Sequence[Sequence[str]], y: Mapping[int, float], ports: Sides
) -> tuple[list[float], list[float]]:
    """Behind each layer but the last: the width for the curves and the width for the labels."""
    depth, last = graph.depths(), len(graph.layers) - 1
    curves, rooms = [CURVE_LEAST] * last, [ARROW] * last
    for strand in graph.strands:
        for a, b in strand.steps:
            rise = abs(y[a] + ports.right[a, strand.index] - y[b] - ports.left[b, strand.index])
            curves[depth[a]] = min(max(curves[depth[a]], CURVE_SHARE * rise), CURVE_MOST)
        if labels[strand.index]:
            gap = depth[strand.elements[-1]] - 1
            rooms[gap] = max(rooms[gap], lines_width(labels[strand.index]) + ARROW + LABEL_END)
    return curves, rooms


def _columns(
    graph: Layered,
    faces: Sequence[Face],
    gaps: tuple[list[float], list[float]],
    jumps: tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]]],
) -> Columns:
    exits: dict[int, float] = {}
    entries: dict[int, float] = {}
    lefts, widths, turns, x = [], [], [], 0.0
    for index, layer in enumerate(graph.layers):
        lefts.append(x)
        widths.append(max((faces[one].width for one in layer if one < len(faces)), default=END_SIZE))
        x += widths[-1]
        following = graph.layers[index + 1] if index + 1 < len(graph.layers) else ()
        for lanes, elements, at in ((exits, layer, jumps[0]), (entries, following, jumps[1])):
            for key in (key for one in elements for key in at.get(one, ())):
                x += LANE
                lanes[key] = x
        turns.append(x)
        if following:
            x += gaps[0][index] + gaps[1][index]
    return Columns(tuple(lefts), tuple(widths), tuple(turns), tuple(gaps[0]), exits, entries, x)


def _routes(
    graph: Layered,
    labels: Sequence[tuple[str, ...]],
    columns: Columns,
    rects: Mapping[int, Rect],
    ports: Sides,
) -> list[Route]:
    depth, routes = graph.depths(), []
    for strand in graph.strands:
        points: list[Point] = []
        for a, b in strand.steps:
            start = rects[a].middle + ports.right[a, strand.index]
            end = rects[b].middle + ports.left[b, strand.index]
            turn, curve = columns.turns[depth[a]], columns.curves[depth[a]]
            points += [(rects[a].right, start), (turn, start), (turn + curve, end), (rects[b].x, end)]
        label = label_above(labels[strand.index], points[-1][0] - ARROW, points[-1][1])
        routes.append(Route(strand.arrow, _without_stops(points), label))
    return routes


def _without_stops(points: Sequence[Point]) -> tuple[Point, ...]:
    """Straight runs from their beginning to their end."""
    points = list(dict.fromkeys(points))
    kept = [points[0]]
    for before, point, after in zip(points, points[1:], points[2:], strict=False):
        if abs(before[1] - point[1]) + abs(after[1] - point[1]) >= STRAIGHT:
            kept.append(point)
    return (*kept, points[-1])
