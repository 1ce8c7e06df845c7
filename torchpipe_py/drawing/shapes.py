"""What a layout consists of, in pixels, y downwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchpipe_py.drawing.picture import Arrow, Box
from torchpipe_py.drawing.text import SMALL_LINE, SMALL_SIZE, Face, text_width

ABOVE_LINE = 3.0

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

    def moved(self, by: Point) -> Rect:
        return Rect(self.x + by[0], self.y + by[1], self.width, self.height)


@dataclass(frozen=True)
class PlacedBox:
    """``graph`` counts from the top, ``layer`` from the left."""

    box: Box
    face: Face
    rect: Rect
    graph: int
    layer: int


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

    def moved(self, by: Point) -> Route:
        label = Label(self.label.lines, self.label.rect.moved(by)) if self.label else None
        return Route(self.arrow, tuple((x + by[0], y + by[1]) for x, y in self.points), label)


@dataclass(frozen=True)
class Frame:
    heading: str
    rect: Rect


@dataclass(frozen=True)
class Layout:
    """``frames`` only if there are several graphs; ``ends`` are where skips leave a graph."""

    boxes: tuple[PlacedBox, ...]
    ends: tuple[Rect, ...]
    frames: tuple[Frame, ...]
    routes: tuple[Route, ...]
    width: float
    height: float


def lines_width(lines: Sequence[str]) -> float:
    return max((text_width(line, SMALL_SIZE) for line in lines), default=0.0)


def label_above(lines: tuple[str, ...], right: float, line_y: float, least: float | None = None) -> Label | None:
    """A label that ends at ``right``, or begins at ``least`` if it would else begin before; none without lines."""
    if not lines:
        return None
    width, height = lines_width(lines), len(lines) * SMALL_LINE
    left = right - width if least is None else max(right - width, least)
    return Label(lines, Rect(left, line_y - ABOVE_LINE - height, width, height))
