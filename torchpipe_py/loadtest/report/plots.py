"""Pure: the plots of a report as inline SVG, whose colors are variables of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any, Protocol

_COLORS = ("blue", "orange", "green", "purple", "red", "teal")
_MOST_CURVES = len(_COLORS)
_NEAR = 3.0  # times the greatest value: a rule further up would flatten the plot

WIDTH, HEIGHT = 620, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 22, 16, 48
_PLOT_WIDTH, _PLOT_HEIGHT = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
_LETTER = 6.6  # pixels that a letter takes, about
_LEAST_GAP = 6  # pixels between two labels below an axis

_TICKS = 6
_LOG_DECADES = 1.0  # a log axis that is shorter has linear ticks
_MOST_LOG_TICKS = 8
_NINES = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999, 99.9999)


# --- the plots


def run_plots(report: dict[str, Any]) -> list[str]:
    """Of one run; a plot that would be empty is left out."""
    plots = [_percentiles(report), _histogram(report), _throughput(report), _latency_series(report)]
    return [plot for plot in plots if plot is not None]


def _is_open(report: dict[str, Any]) -> bool:
    return "percentiles_actual_ms" in report


def _percentiles(report: dict[str, Any]) -> str | None:
    curve = report["percentiles_ms"]
    if not curve:
        return None
    marks: list[Mark] = []
    if _is_open(report):
        marks.append(Line("from when it was due", curve, "blue"))
        marks.append(Line("from the send", report["percentiles_actual_ms"], "orange", dashed=True))
    else:
        marks.append(Line("latency", curve, "blue"))
    marks += _slo(report)
    return _percentile_chart("Latency by percentile", marks, curve)


def _percentile_chart(title: str, marks: Sequence[Mark], longest: Sequence[Point]) -> str:
    return chart(title, percentile_axis("percentile", longest[-1][0]), _ms_axis(marks), marks)


def _ms_axis(marks: Sequence[Mark]) -> Axis:
    """High enough for all lines, and for rules that are not far above them: those are left to the legend."""
    values = [point[1] for mark in marks if isinstance(mark, Line) for point in mark.points if point is not None]
    near = [mark.at for mark in marks if isinstance(mark, Rule) and mark.at <= _NEAR * max(values)]
    return value_axis("ms", values + near)


def _slo(report: dict[str, Any]) -> list[Mark]:
    slo = report["slo"]
    return [] if slo is None else [Rule(f"p99 limit {slo['p99_limit_ms']:g} ms", slo["p99_limit_ms"], "red")]


def _histogram(report: dict[str, Any]) -> str | None:
    bars = report["histogram_ms"]
    if not bars:
        return None
    x = log_axis("ms, log scale", bars[0][0], bars[-1][1])
    name = "calls, from when they were due" if _is_open(report) else "calls"
    return chart("Latencies", x, linear_axis("calls", [bar[2] for bar in bars], whole=True), [Bars(name, bars, "blue")])


def _by_second(report: dict[str, Any], name: str) -> list[Point | None]:
    """A point in the middle of each second."""
    rows = report["per_second"]
    return [None if row[name] is None else (row["second"] + 0.5, row[name]) for row in rows]


def _throughput(report: dict[str, Any]) -> str | None:
    rows = report["per_second"]
    if len(rows) < 2:
        return None
    marks: list[Mark] = [Line("with a result", _by_second(report, "ok"), "blue", dots=len(rows) <= 60)]
    if _is_open(report):
        marks.append(Line("offered", _by_second(report, "offered"), "orange", dashed=True))
    if any(row["failed"] for row in rows):
        marks.append(Line("failed", _by_second(report, "failed"), "red"))
    values = [row[name] for row in rows for name in ("ok", "offered", "failed")]
    return chart("Throughput", _seconds(rows), linear_axis("images in a second", values), marks)


def _latency_series(report: dict[str, Any]) -> str | None:
    rows = report["per_second"]
    if len(rows) < 2 or all(row["p50_ms"] is None for row in rows):
        return None
    dots = len(rows) <= 60
    marks: list[Mark] = [
        Line("p50", _by_second(report, "p50_ms"), "blue", dots=dots),
        Line("p99", _by_second(report, "p99_ms"), "orange", dots=dots),
        *_slo(report),
    ]
    return chart("Latency by the second in which calls were due", _seconds(rows), _ms_axis(marks), marks)


def _seconds(rows: Sequence[dict[str, Any]]) -> Any:
    return span_axis("seconds since the start", 0, len(rows), step_at_least=1)


def runs_plots(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Of several runs together."""
    done = [report for report in reports if report["latency_ms"] is not None]
    plots = [_latency_by_throughput(done), _curves(done)] if done else []
    return [plot for plot in plots if plot is not None]


def _latency_by_throughput(reports: Sequence[dict[str, Any]]) -> str | None:
    paced = [run for run in reports if run.get("offered_rate") is not None]
    x_name = "offered_rate" if paced else "goodput"
    chosen = sorted(paced or reports, key=lambda run: run[x_name] if paced else run["settings"]["request_client"])
    if len(chosen) < 2:
        return None
    p50, p99 = ([(run[x_name], run["latency_ms"][name]) for run in chosen] for name in ("p50", "p99"))
    labels = [] if paced else [str(run["settings"]["request_client"]) for run in chosen]
    marks: list[Mark] = [
        Line("p50", p50, "blue", dots=True),
        Line("p99" if paced else "p99, at so many clients", p99, "orange", dots=True, labels=labels),
        *_slo(chosen[0]),
    ]
    label = "images per second, offered" if paced else "images per second with a result"
    x = linear_axis(label, [run[x_name] for run in chosen], from_zero=False)
    return chart("Latency by throughput", x, _ms_axis(marks), marks)


def _curves(reports: Sequence[dict[str, Any]]) -> str | None:
    """The percentiles of some runs, evenly chosen where there are many."""
    step = max(1, -(-len(reports) // _MOST_CURVES))
    chosen = reports[::step]
    lines = [Line(run["point"], run["percentiles_ms"], color) for run, color in zip(chosen, _COLORS, strict=False)]
    longest = max((run["percentiles_ms"] for run in chosen), key=lambda curve: curve[-1][0])
    return _percentile_chart("Latency by percentile", lines, longest)


# --- drawing

Point = tuple[float, float]


class Mark(Protocol):
    """What is drawn in a plot; ``name`` and ``color`` stand in its legend."""

    name: str
    color: str
    dashed: bool

    def draw(self, x: Axis, y: Axis) -> Iterator[str]: ...


@dataclass
class Line:
    """Points joined to a line, with a None where it is interrupted; `labels` are written beside the points."""

    name: str
    points: Sequence[Point | None]
    color: str
    dashed: bool = False
    dots: bool = False
    labels: Sequence[str] = field(default_factory=tuple)

    def draw(self, x: Axis, y: Axis) -> Iterator[str]:
        dash = ' stroke-dasharray="6 4"' if self.dashed else ""
        for interrupted, group in groupby(self.points, key=lambda point: point is None):
            if interrupted:
                continue
            places = [(_x(x, point[0]), _y(y, point[1])) for point in group if point is not None]
            path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
            yield f'<polyline points="{path}" fill="none" stroke="var(--{self.color})"{dash}/>'
            if self.dots or len(places) == 1:
                for left, top in places:
                    yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.2" fill="var(--{self.color})"/>'
        for point, label in zip(self.points, self.labels, strict=False):
            if point is not None:
                yield _text(_x(x, point[0]) - 7, _y(y, point[1]) - 6, label, "end", "point")


@dataclass
class Bars:
    """Bars `(from, to, height)`, standing on the axis."""

    name: str
    bars: Sequence[tuple[float, float, float]]
    color: str
    dashed: bool = False

    def draw(self, x: Axis, y: Axis) -> Iterator[str]:
        for start, end, height in self.bars:
            if height <= 0:
                continue
            left, right, top = _x(x, start), _x(x, end), _y(y, height)
            top = min(top, HEIGHT - _BOTTOM - 1.5)  # one call is still seen
            size = f'width="{max(1.0, right - left - 1):.1f}" height="{HEIGHT - _BOTTOM - top:.1f}"'
            yield f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="var(--{self.color})"/>'


@dataclass
class Rule:
    """A horizontal line across the plot."""

    name: str
    at: float
    color: str
    dashed: bool = True

    def draw(self, x: Axis, y: Axis) -> Iterator[str]:
        if y.place(self.at) <= 1:
            at = _y(y, self.at)
            place = f'x1="{_LEFT}" y1="{at:.1f}" x2="{WIDTH - _RIGHT}" y2="{at:.1f}"'
            yield f'<line class="rule" {place} stroke="var(--{self.color})"/>'


def chart(title: str, x: Axis, y: Axis, marks: Sequence[Mark]) -> str:
    """One plot with its title as a figure; nothing of it needs a script."""
    text = "\n".join([*_grid(x, y), *(part for mark in marks for part in mark.draw(x, y))])
    keys = ""  # outside the drawing, where the page breaks the line if there is no room
    for mark in marks:
        style = f"border-top: 3px {'dashed' if mark.dashed else 'solid'} var(--{mark.color})"
        keys += f'<li><i style="{style}"></i>{escape(mark.name)}</li>'
    head = f'<figcaption>{escape(title)}</figcaption><ul class="keys">{keys}</ul>'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}"'
    return f"<figure>{head}\n<svg {size}>\n{text}\n</svg></figure>"


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
    rotated = f'transform="rotate(-90 14 {middle})"'
    yield f'<text class="label" x="14" y="{middle}" text-anchor="middle" {rotated}>{escape(y.label)}</text>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "number") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# --- axes: where a value goes, and which values have a tick


@dataclass(frozen=True)
class Axis:
    """`place` maps a value to 0 to 1 along the axis; `ticks` are values and what is written there."""

    label: str
    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


def linear_axis(label: str, values: Iterable[float], from_zero: bool = True, whole: bool = False) -> Axis:
    """From 0, or the least value, to a round number above the greatest; `whole` has no ticks between whole numbers."""
    finite = list(values) or [0.0]
    low, high = (0.0 if from_zero else min(finite)), max(finite)
    if high <= low:
        high = low + 1.0
    step = _round_step((high - low) / _TICKS)
    step = max(1.0, step) if whole else step
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    count = round((high - low) / step)
    ticks = [low + index * step for index in range(count + 1)]
    return Axis(label, lambda value: (value - low) / (high - low), [(tick, number(tick)) for tick in ticks])


def span_axis(label: str, low: float, high: float, step_at_least: float = 0.0) -> Axis:
    """Exactly from `low` to `high`, with ticks at round numbers between."""
    high = max(high, low + 1e-9)
    step = max(_round_step((high - low) / _TICKS), step_at_least)
    ticks = [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axis(label, lambda value: (value - low) / (high - low), [(tick, number(tick)) for tick in ticks])


def log_axis(label: str, low: float, high: float) -> Axis:
    """Logarithmic from `low` to `high`, both above 0."""
    high = max(high, low * 1.001)
    start, length = math.log10(low), math.log10(high / low)

    def place(value: float) -> float:
        return (math.log10(max(value, low)) - start) / length

    if length < _LOG_DECADES:
        return Axis(label, place, [tick for tick in span_axis(label, low, high).ticks if tick[0] > 0])
    decades = range(math.floor(start), math.ceil(start + length) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) <= _MOST_LOG_TICKS:
            break
    return Axis(label, place, [(tick, number(tick)) for tick in ticks])


def percentile_axis(label: str, highest: float) -> Axis:
    """Of percentiles from 0 to `highest`, below 100: as much room for 90 to 99 as for 99 to 99.9."""
    length = max(1.0, -math.log10(1 - highest / 100))
    ticks = [nines for nines in _NINES if nines <= highest + 1e-9]
    return Axis(label, lambda percent: -math.log10(1 - percent / 100) / length, [(t, f"{t:g} %") for t in ticks])


def value_axis(label: str, values: Sequence[float]) -> Axis:
    """Linear from 0, or logarithmic where the greatest value is far above the middle one."""
    above_zero = sorted(value for value in values if value > 0)
    if above_zero and above_zero[-1] > 30 * above_zero[len(above_zero) // 2]:
        return log_axis(f"{label}, log scale", above_zero[0] * 0.9, above_zero[-1] * 1.1)
    return linear_axis(label, values)


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9)))


def number(value: float) -> str:
    """Short, without an exponent where that is possible."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{round(value, 6):g}"
