"""Lays out a picture: columns by the longest path, graphs from top to bottom.

An arrow to the next column is a curve in the gap between them. A longer one has its own lane, above the boxes for a
skip, else below. A jump runs below its graph and along the left margin. So arrows never cross boxes. All lengths are
pixels, y downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from torchpipe_py.tools.draw import picture as drawn
from torchpipe_py.tools.draw.picture import SMALL_LINE, SMALL_SIZE, Arrow, Box, Component, Face, Picture

MARGIN = 12.0
FRAME_PAD, FRAME_HEAD, FRAME_GAP = 20.0, 34.0, 22.0
BOX_SPACE, END_SIZE = 26.0, 22.0
LANE, CURVE, ARROW = 14.0, 64.0, 20.0
SLOT, LABEL_SPACE, ABOVE_LINE = 14.0, 8.0, 3.0
JUMP_COLUMNS = 56
RANK = {"skip": 0, "next": 1, "map": 2, "jump": 3}  # where arrows meet a box, from top to bottom

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
    """A box with its place; ``graph`` counts from the top, ``column`` from the left."""

    box: Box
    face: Face
    rect: Rect
    graph: int
    column: int


@dataclass(eq=False)
class Route:
    """An arrow, its ``points``, from the start's right side to the end's left side, and the place of its ``lines``.

    The lines of text are right-aligned in ``label``.

    A step to another height is an S-curve between its two points; the steps of a jump are straight.
    """

    arrow: Arrow
    points: Sequence[Point] = ()
    label: Rect | None = None
    leaves: float = 0.0
    enters: float = 0.0

    def __post_init__(self) -> None:
        limit = JUMP_COLUMNS if self.is_jump else drawn.LINE_COLUMNS
        self.lines = drawn.wrap(self.arrow.label, limit) if self.arrow.label.strip() else ()
        self.width = max((drawn.text_width(line, SMALL_SIZE) for line in self.lines), default=0.0)
        self.end = None if self.arrow.to_end else self.arrow.end  # None is the end of the graph
        self.slot = len(self.lines) * SMALL_LINE + LABEL_SPACE if self.lines and not self.is_jump else SLOT

    @property
    def is_jump(self) -> bool:
        return self.arrow.kind == "jump"

    def put_label(self, right: float, line_y: float) -> None:
        """Place the label above a line at ``line_y``."""
        height = len(self.lines) * SMALL_LINE
        if self.lines:
            self.label = Rect(right - self.width, line_y - ABOVE_LINE - height, self.width, height)


@dataclass(frozen=True)
class Layout:
    """The places of everything. ``frames`` and headings exist for several graphs; ``ends`` are ends of graphs."""

    boxes: tuple[PlacedBox, ...]
    ends: tuple[Rect, ...]
    frames: tuple[tuple[str, Rect], ...]
    routes: tuple[Route, ...]
    width: float
    height: float


def lay_out(picture: Picture) -> Layout:
    """Lay out a picture, deterministically. Without boxes there is only a margin."""
    graphs = drawn.split(picture)
    jumps = [Route(arrow) for arrow in picture.arrows if arrow.kind == "jump"]
    framed = len(graphs) > 1
    pad, head = (FRAME_PAD, FRAME_HEAD) if framed else (0.0, 0.0)
    left, y = MARGIN + LANE * (len(jumps) + bool(jumps)), MARGIN
    placed = []
    for index, graph in enumerate(graphs):
        placed.append(_Placed(index, graph, jumps, left + pad, y + head))
        y = placed[-1].bottom + pad + FRAME_GAP
    headings = [drawn.clean(graph.heading) for graph in graphs] if framed else []
    widths = [drawn.text_width(heading, SMALL_SIZE) for heading in headings]
    right = max([left + pad, *(graph.right for graph in placed), *(left + pad + width for width in widths)]) + pad
    frames = [
        (heading, Rect(left, graph.top - head, right - left, graph.bottom - graph.top + head + pad))
        for heading, graph in zip(headings, placed, strict=False)
    ]
    rects = {name: rect for graph in placed for name, rect in graph.rects.items()}
    for index, jump in enumerate(jumps):  # along the margin, and in at the left
        margin, target = MARGIN + index * LANE, rects[jump.end]
        points = [(margin, jump.points[-1][1]), (margin, jump.enters), (target.x, jump.enters)]
        jump.points = [*jump.points, *points]
    return Layout(
        boxes=tuple(box for graph in placed for box in graph.boxes),
        ends=tuple(graph.rects[None] for graph in placed if None in graph.rects),
        frames=tuple(frames),
        routes=(*(route for graph in placed for route in graph.routes), *jumps),
        width=right + MARGIN,
        height=max(y - FRAME_GAP, MARGIN) + MARGIN,
    )


class _Placed:
    """A graph with its top left corner at ``left`` and ``top``, and lanes for its long arrows and jumps."""

    def __init__(self, index: int, graph: Component, jumps: Sequence[Route], left: float, top: float) -> None:
        self.top = top
        self.routes = [Route(arrow) for arrow in graph.arrows]
        faces = {box.name: drawn.face(box) for box in graph.boxes}
        column = _columns(graph)
        leaving = [jump for jump in jumps if jump.arrow.start in faces]
        out = {name: [route for route in (*self.routes, *leaving) if route.arrow.start == name] for name in column}
        into = {name: [r for r in (*self.routes, *jumps) if r.end == name] for name in column}
        self._heights: dict[str | None, float] = {}
        for name in column:
            own = END_SIZE if name is None else faces[name].height
            self._heights[name] = max(own, SLOT * len(out[name]), sum(route.slot for route in into[name]))
        middles = self._middles(column)
        spans = {route: column[route.end] - column[route.arrow.start] for route in self.routes}
        long = sorted((route for route in self.routes if spans[route] > 1), key=spans.__getitem__)
        above = [route for route in long if route.arrow.kind == "skip"]
        first = top + LANE * len(above)

        # Columns from left to right; in a gap first the curves, and the lanes of jumps among them, then the labels.
        self.rects: dict[str | None, Rect] = {}
        turns, x, last = [], left, max(column.values(), default=0)
        for at in range(last + 1):
            names = [name for name in column if column[name] == at]
            width = max(END_SIZE if name is None else faces[name].width for name in names)
            for name in names:
                height = self._heights[name]
                self.rects[name] = Rect(x, first + middles[name] - height / 2, width, height)
            lanes = LANE * sum(column[jump.arrow.start] == at for jump in leaving)
            turns.append((x + width, x + width + CURVE + lanes))
            self.right = x + width + lanes
            labels = [route.width for route in self.routes if column[route.end] == at + 1]
            x = turns[-1][1] + max(labels, default=0.0) + ARROW
        for name, rect in self.rects.items():
            _spread(out[name], [SLOT] * len(out[name]), rect.middle, "leaves")
            _spread(into[name], [route.slot for route in into[name]], rect.middle, "enters")

        self.bottom = max(rect.bottom for rect in self.rects.values())
        lane = {route: first - LANE * number for number, route in enumerate(above, start=1)}
        for route in long:
            if route not in lane:
                self.bottom += LANE
                lane[route] = self.bottom
        for route in self.routes:
            start, end = self.rects[route.arrow.start], self.rects[route.end]
            before, after = turns[column[route.arrow.start]], turns[column[route.end] - 1]
            through = [(before[1], lane[route]), (after[0], lane[route])] if route in lane else []
            points = [(start.right, route.leaves), *through, (after[1], route.enters), (end.x, route.enters)]
            route.points = points
            route.put_label(end.x - ARROW, route.enters)
        used = [0] * (last + 1)
        for jump in leaving:
            start = self.rects[jump.arrow.start]
            used[column[jump.arrow.start]] += 1
            x = start.right + LANE * used[column[jump.arrow.start]]
            self.bottom += LANE + len(jump.lines) * SMALL_LINE
            jump.points = [(start.right, jump.leaves), (x, jump.leaves), (x, self.bottom)]
            jump.put_label(max(x - LANE, left + jump.width), self.bottom)
            self.right = max(self.right, jump.label.right if jump.label else 0.0)
        self.boxes = [PlacedBox(b, faces[b.name], self.rects[b.name], index, column[b.name]) for b in graph.boxes]

    def _middles(self, column: dict[str | None, int]) -> dict[str | None, float]:
        """Order each column by its sources, as near to them as possible; the highest box is at 0."""
        before: dict[str | None, list[str]] = {name: [] for name in column}
        for route in sorted(self.routes, key=lambda route: route.arrow.kind != "next"):
            if route.arrow.kind == "next" or not before[route.end]:
                before[route.end].append(route.arrow.start)
        middles: dict[str | None, float] = {}
        for at in range(max(column.values(), default=0) + 1):
            wanted = {
                name: sum(middles[b] for b in before[name]) / (len(before[name]) or 1)
                for name in column
                if column[name] == at
            }
            y, names = 0.0, sorted(wanted, key=wanted.__getitem__)
            for name in names:
                middles[name] = y + self._heights[name] / 2
                y += self._heights[name] + BOX_SPACE
            shift = sum(wanted[name] - middles[name] for name in names) / len(names)
            middles |= {name: middles[name] + shift for name in names}
        highest = min(middles[name] - self._heights[name] / 2 for name in middles)
        return {name: middle - highest for name, middle in middles.items()}


def _columns(graph: Component) -> dict[str | None, int]:
    """The column of each name in file order: the length of the longest path to it; the end, ``None``, is last."""
    before: dict[str, list[str]] = {box.name: [] for box in graph.boxes}
    for arrow in graph.arrows:
        if not arrow.to_end:
            before[arrow.end].append(arrow.start)
    column: dict[str | None, int] = dict.fromkeys(before, 0)
    for name in TopologicalSorter(before).static_order():
        column[name] = max((column[b] + 1 for b in before[name]), default=0)
    return column | ({None: max(column.values()) + 1} if graph.has_end else {})


def _spread(routes: Sequence[Route], slots: Sequence[float], middle: float, side: str) -> None:
    """Spread the arrows over one side of a box around its ``middle``, in slots of these heights."""
    y = middle - sum(slots) / 2
    for route, slot in sorted(zip(routes, slots, strict=True), key=lambda pair: RANK[pair[0].arrow.kind]):
        y += slot
        setattr(route, side, y - SLOT / 2)
