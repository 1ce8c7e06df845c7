"""The places of everything in a picture: columns by the longest path, graphs from top to bottom.

An arrow to the next column is a curve in the gap between the two. A longer one runs in a lane of its own, above the
boxes if it is a skip and else below them. A jump runs below its graph and along the left margin. So no arrow meets a
box. All lengths are pixels, y downwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from torchpipe_py.tools.draw.picture import (
    SMALL_LINE,
    SMALL_SIZE,
    Arrow,
    Box,
    Component,
    Face,
    Picture,
    clean,
    face,
    split,
    text_width,
    wrap,
)

MARGIN = 12.0
FRAME_PAD, FRAME_HEAD, FRAME_GAP = 20.0, 34.0, 22.0
BOX_SPACE, END_SIZE = 26.0, 22.0
LANE, CURVE, ARROW = 14.0, 64.0, 20.0
SLOT, LABEL_SPACE, ABOVE_LINE = 14.0, 8.0, 3.0
JUMP_COLUMNS = 56
# Where arrows meet a box, from top to bottom.
RANK = {"skip": 0, "next": 1, "map": 2, "jump": 3}

Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class PlacedBox:
    """``graph`` counts from the top, ``column`` from the left."""

    box: Box
    face: Face
    rect: Rect
    graph: int
    column: int


@dataclass(frozen=True)
class Label:
    """Lines of text, all ending at the right of ``rect``."""

    lines: tuple[str, ...]
    rect: Rect


@dataclass(frozen=True)
class Route:
    """``points`` from the start's right side to the end's left side.

    A step to another height is an S-curve between its two points, but for a jump, whose steps are all straight.
    """

    arrow: Arrow
    points: tuple[Point, ...]
    label: Label | None


@dataclass(frozen=True)
class Layout:
    """``frames``, with their headings, only if there are several graphs; ``ends`` are where skips leave a graph."""

    boxes: tuple[PlacedBox, ...]
    ends: tuple[Rect, ...]
    frames: tuple[tuple[str, Rect], ...]
    routes: tuple[Route, ...]
    width: float
    height: float


@dataclass(eq=False)
class _Edge:
    """An arrow with the lines of its label, and how far from the middle of its two boxes it leaves and enters."""

    arrow: Arrow
    lines: tuple[str, ...]
    leaves: float = 0.0
    enters: float = 0.0

    @property
    def start(self) -> str:
        return self.arrow.start

    @property
    def end(self) -> str | None:
        """``None`` is the end of the graph."""
        return None if self.arrow.to_end else self.arrow.end

    @property
    def label_width(self) -> float:
        return max((text_width(line, SMALL_SIZE) for line in self.lines), default=0.0)

    def label(self, right: float, line_y: float) -> Label | None:
        """The label above a line at ``line_y``."""
        if not self.lines:
            return None
        height = len(self.lines) * SMALL_LINE
        return Label(self.lines, Rect(right - self.label_width, line_y - ABOVE_LINE - height, self.label_width, height))


def lay_out(picture: Picture) -> Layout:
    """The same picture always gives the same layout. Without boxes there is nothing but a margin."""
    graphs = split(picture)
    jumps = [_edge(arrow, JUMP_COLUMNS) for arrow in picture.arrows if arrow.kind == "jump"]
    framed = len(graphs) > 1
    pad, head = (FRAME_PAD, FRAME_HEAD) if framed else (0.0, 0.0)
    left, y = MARGIN + LANE * (len(jumps) + bool(jumps)), MARGIN
    placed = []
    for index, graph in enumerate(graphs):
        placed.append(_Placed(index, graph, jumps, left + pad, y + head))
        y = placed[-1].bottom + pad + FRAME_GAP
    headings = [clean(graph.heading) for graph in graphs] if framed else []
    widths = [text_width(heading, SMALL_SIZE) for heading in headings]
    right = max([left + pad, *(graph.right for graph in placed), *(left + pad + width for width in widths)]) + pad
    frames = [
        (heading, Rect(left, graph.top - head, right - left, graph.bottom - graph.top + head + pad))
        for heading, graph in zip(headings, placed, strict=False)
    ]
    routes = [route for graph in placed for route in graph.routes]
    rects = {name: rect for graph in placed for name, rect in graph.rects.items() if name is not None}
    leaving = [way for graph in placed for way in graph.leaving]
    for index, (edge, points, label) in enumerate(leaving):
        margin, target = MARGIN + index * LANE, rects[edge.arrow.end]
        entry = target.middle + edge.enters
        points = [*points, (margin, points[-1][1]), (margin, entry), (target.x, entry)]
        routes.append(Route(edge.arrow, tuple(points), label))
    return Layout(
        boxes=tuple(box for graph in placed for box in graph.boxes),
        ends=tuple(graph.rects[None] for graph in placed if None in graph.rects),
        frames=tuple(frames),
        routes=tuple(routes),
        width=right + MARGIN,
        height=max(y - FRAME_GAP, MARGIN) + MARGIN,
    )


def _edge(arrow: Arrow, limit: int | None = None) -> _Edge:
    if not arrow.label.strip():
        return _Edge(arrow, ())
    return _Edge(arrow, wrap(arrow.label, limit) if limit else wrap(arrow.label))


class _Placed:
    """A graph whose left top corner is at ``left`` and ``top``, with the lanes of its long arrows and of its jumps.

    ``leaving`` has the jumps from its boxes: each with its points as far as the lane below, and its label.
    """

    def __init__(self, index: int, graph: Component, jumps: Sequence[_Edge], left: float, top: float) -> None:
        self.top = top
        edges = [_edge(arrow) for arrow in graph.arrows]
        faces = {box.name: face(box) for box in graph.boxes}
        columns = _columns(graph)
        column_of = {name: at for at, names in enumerate(columns) for name in names}
        self.heights = _heights(graph, [*edges, *jumps], faces, column_of)
        middles = self._middles(columns, edges)
        long = [edge for edge in edges if column_of[edge.end] > column_of[edge.start] + 1]
        long.sort(key=lambda edge: column_of[edge.end] - column_of[edge.start])
        above = [edge for edge in long if edge.arrow.kind == "skip"]
        below = [edge for edge in long if edge.arrow.kind != "skip"]
        first = top + LANE * len(above)
        leaving = [edge for edge in jumps if edge.start in faces]

        # Columns from left to right; in a gap first the curves, and the lanes of jumps among them, then the labels.
        self.rects: dict[str | None, Rect] = {}
        turns, x = [], left
        for at, names in enumerate(columns):
            width = max(faces[name].width if name is not None else END_SIZE for name in names)
            for name in names:
                height = self.heights[name]
                self.rects[name] = Rect(x, first + middles[name] - height / 2, width, height)
            x += width
            lanes = LANE * sum(column_of[edge.start] == at for edge in leaving)
            if at + 1 == len(columns):
                self.right = x + lanes
            else:
                turns.append((x, x + CURVE + lanes))
                labels = [edge.label_width for edge in edges if column_of[edge.end] == at + 1]
                x = turns[-1][1] + max(labels) + ARROW

        self.bottom = max(rect.bottom for rect in self.rects.values())
        lane = {edge: first - LANE * number for number, edge in enumerate(above, start=1)}
        for edge in below:
            self.bottom += LANE
            lane[edge] = self.bottom
        self.routes = [self._route(edge, turns, column_of, lane.get(edge)) for edge in edges]
        self.leaving = []
        used = [0] * len(columns)
        for edge in leaving:
            start = self.rects[edge.start]
            used[column_of[edge.start]] += 1
            out = start.right + LANE * used[column_of[edge.start]]
            self.bottom += LANE + len(edge.lines) * SMALL_LINE
            points = [(start.right, start.middle + edge.leaves), (out, start.middle + edge.leaves), (out, self.bottom)]
            label = edge.label(max(out - LANE, left + edge.label_width), self.bottom)
            self.right = max(self.right, label.rect.right if label else 0.0)
            self.leaving.append((edge, points, label))
        self.boxes = [PlacedBox(b, faces[b.name], self.rects[b.name], index, column_of[b.name]) for b in graph.boxes]

    def _middles(self, columns: Sequence[list[str | None]], edges: Iterable[_Edge]) -> dict[str | None, float]:
        """Each column in the order of what leads to it, and as near to that as it can be; the highest box is at 0."""
        before: dict[str | None, list[str]] = {name: [] for names in columns for name in names}
        for kinds in (("next",), ("map", "skip")):
            for edge in edges:
                if edge.arrow.kind in kinds and (kinds == ("next",) or not before[edge.end]):
                    before[edge.end].append(edge.start)
        middles: dict[str | None, float] = {}
        for names in columns:
            wanted = {name: sum(middles[b] for b in before[name]) / (len(before[name]) or 1) for name in names}
            names.sort(key=wanted.__getitem__)
            y = 0.0
            for name in names:
                middles[name] = y + self.heights[name] / 2
                y += self.heights[name] + BOX_SPACE
            shift = sum(wanted[name] - middles[name] for name in names) / len(names)
            for name in names:
                middles[name] += shift
        highest = min(middles[name] - self.heights[name] / 2 for name in middles)
        return {name: middle - highest for name, middle in middles.items()}

    def _route(
        self, edge: _Edge, turns: Sequence[Point], column_of: dict[str | None, int], lane: float | None
    ) -> Route:
        start, end = self.rects[edge.start], self.rects[edge.end]
        entry = end.middle + edge.enters
        points = [(start.right, start.middle + edge.leaves)]
        if lane is not None:
            points += [(turns[column_of[edge.start]][1], lane), (turns[column_of[edge.end] - 1][0], lane)]
        points += [(turns[column_of[edge.end] - 1][1], entry), (end.x, entry)]
        return Route(edge.arrow, tuple(points), edge.label(end.x - ARROW, entry))


def _columns(graph: Component) -> list[list[str | None]]:
    """Names by column, which is the longest way to them; the end, ``None``, comes last."""
    before: dict[str, list[str]] = {box.name: [] for box in graph.boxes}
    for arrow in graph.arrows:
        if not arrow.to_end:
            before[arrow.end].append(arrow.start)
    column: dict[str, int] = {}
    for name in TopologicalSorter(before).static_order():
        column[name] = max((column[b] + 1 for b in before[name]), default=0)
    names: list[list[str | None]] = [[] for _ in range(max(column.values()) + 1)]
    for box in graph.boxes:
        names[column[box.name]].append(box.name)
    return [*names, [None]] if graph.has_end else names


def _heights(
    graph: Component, edges: Iterable[_Edge], faces: dict[str, Face], column_of: dict[str | None, int]
) -> dict[str | None, float]:
    """Spread the arrows over the sides of their boxes; a box is as high as its texts and its arrows need."""
    order: dict[str | None, int] = {box.name: index for index, box in enumerate(graph.boxes)}

    def key(edge: _Edge) -> tuple[int, int, int, int]:
        span = column_of.get(edge.end, 0) - column_of.get(edge.start, 0)
        rank = RANK[edge.arrow.kind]
        return rank, span if rank else -span, order.get(edge.start, 0), order.get(edge.end, len(order))

    edges = sorted(edges, key=key)
    heights: dict[str | None, float] = {}
    for name in [*faces, *[None] * graph.has_end]:
        out = [edge for edge in edges if edge.start == name]
        into = [edge for edge in edges if edge.end == name]
        leaves, needed_out = _spread([(edge, SLOT) for edge in out])
        enters, needed_in = _spread([(edge, _slot(edge)) for edge in into])
        for edge in out:
            edge.leaves = leaves[edge]
        for edge in into:
            edge.enters = enters[edge]
        heights[name] = max(faces[name].height if name is not None else END_SIZE, needed_out, needed_in)
    return heights


def _slot(edge: _Edge) -> float:
    return len(edge.lines) * SMALL_LINE + LABEL_SPACE if edge.lines and edge.arrow.kind != "jump" else SLOT


def _spread(slots: Sequence[tuple[_Edge, float]]) -> tuple[dict[_Edge, float], float]:
    """Offsets from the middle, at which the ``next`` arrows are, and the height that all need."""
    lines, y = {}, 0.0
    for edge, height in slots:
        y += height
        lines[edge] = y - SLOT / 2
    main = [line for edge, line in lines.items() if edge.arrow.kind == "next"] or list(lines.values())
    middle = sum(main) / (len(main) or 1)
    return {edge: line - middle for edge, line in lines.items()}, 2 * max(middle, y - middle)
