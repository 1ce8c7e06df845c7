"""Pure: plots as inline SVG, whose colors are variables of the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from torchpipe_py.loadtest.report.axes import Axis

WIDTH, HEIGHT = 620, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 22, 16, 48
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_LETTER = 6.6  # pixels that a letter takes, about
_LEAST_GAP = 6  # pixels between two labels below an axis

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points joined to a line, with a None where it is interrupted; `labels` are written beside the points."""

    name: str
    points: Sequence[Point | None]
    color: str
    dashed: bool = False
    dots: bool = False
    labels: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Bars:
    """Bars `(from, to, height)`, standing on the axis."""

    name: str
    bars: Sequence[tuple[float, float, float]]
    color: str


@dataclass(frozen=True)
class Rule:
    """A horizontal line across the plot."""

    name: str
    at: float
    color: str


Mark = Line | Bars | Rule


def chart(title: str, x: Axis, y: Axis, marks: Sequence[Mark]) -> str:
    """One plot with its title as a figure; nothing of it needs a script."""
    parts = [*_grid(x, y), *(part for mark in marks for part in _draw(mark, x, y))]
    text = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}"'
    return f"<figure><figcaption>{escape(title)}</figcaption>{_legend(marks)}\n<svg {size}>\n{text}\n</svg></figure>"


def _x(axis: Axis, value: float) -> float:
    return _LEFT + _PLOT_WIDTH * min(1.0, max(0.0, axis.place(value)))


def _y(axis: Axis, value: float) -> float:
    return _TOP + _PLOT_HEIGHT * (1 - min(1.0, max(0.0, axis.place(value))))


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for value, text in y.ticks:
        at = _y(y, value)
        yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        yield _text(_LEFT - 8, at + 4, text, "end")
    free_from = 0.0
    for value, text in x.ticks:
        at = _x(x, value)
        yield f'<line class="tick" x1="{at:.1f}" y1="{bottom}" x2="{at:.1f}" y2="{bottom + 5}"/>'
        half = len(text) * _LETTER / 2
        if at - half >= free_from:  # NOTE: a label that would touch the one before it is left out, its tick is not
            yield _text(min(at, WIDTH - half), bottom + 18, text, "middle")
            free_from = at + half + _LEAST_GAP
    yield f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>'
    yield _text(_LEFT + _PLOT_WIDTH / 2, HEIGHT - 10, x.label, "middle", "label")
    middle = _TOP + _PLOT_HEIGHT / 2
    turn = f'transform="rotate(-90 14 {middle})"'
    yield f'<text class="label" x="14" y="{middle}" text-anchor="middle" {turn}>{escape(y.label)}</text>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "number") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _draw(mark: Mark, x: Axis, y: Axis) -> Iterator[str]:
    if isinstance(mark, Rule):
        if y.place(mark.at) > 1:
            return
        at = _y(y, mark.at)
        place = f'x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"'
        yield f'<line class="rule" {place} stroke="var(--{mark.color})"/>'
    elif isinstance(mark, Bars):
        yield from _draw_bars(mark, x, y)
    else:
        yield from _draw_line(mark, x, y)


def _draw_bars(mark: Bars, x: Axis, y: Axis) -> Iterator[str]:
    for start, end, height in mark.bars:
        if height <= 0:
            continue
        left, right, top = _x(x, start), _x(x, end), _y(y, height)
        top = min(top, HEIGHT - _BOTTOM - 1.5)  # one call is still seen
        size = f'width="{max(1.0, right - left - 1):.1f}" height="{HEIGHT - _BOTTOM - top:.1f}"'
        yield f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="var(--{mark.color})"/>'


def _draw_line(mark: Line, x: Axis, y: Axis) -> Iterator[str]:
    dash = ' stroke-dasharray="6 4"' if mark.dashed else ""
    for piece in _pieces(mark.points):
        path = " ".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in piece)
        yield f'<polyline points="{path}" fill="none" stroke="var(--{mark.color})"{dash}/>'
        if mark.dots or len(piece) == 1:
            for a, b in piece:
                yield f'<circle cx="{_x(x, a):.1f}" cy="{_y(y, b):.1f}" r="3.2" fill="var(--{mark.color})"/>'
    for point, label in zip(mark.points, mark.labels, strict=False):
        if point is not None:
            yield _text(_x(x, point[0]) - 7, _y(y, point[1]) - 6, label, "end", "point")


def _pieces(points: Sequence[Point | None]) -> Iterator[list[Point]]:
    piece: list[Point] = []
    for point in (*points, None):
        if point is not None:
            piece.append(point)
        elif piece:
            yield piece
            piece = []


def _legend(marks: Sequence[Mark]) -> str:
    """Outside the drawing, where the page breaks the line if there is no room."""
    keys = []
    for mark in marks:
        dashed = isinstance(mark, Rule) or (isinstance(mark, Line) and mark.dashed)
        style = f"border-top: 3px {'dashed' if dashed else 'solid'} var(--{mark.color})"
        keys.append(f'<li><i style="{style}"></i>{escape(mark.name)}</li>')
    return f'<ul class="keys">{"".join(keys)}</ul>'
