"""Reports of the tools: aligned text, self-contained HTML pages, charts as inline SVG, files.

Pages load nothing and run no script; one palette serves light and dark.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from torchpipe_py.errors import TorchpipeError
from torchpipe_py.files import replace_file

WIDTH = 120
"""Columns of a text report that clips its lines."""


class ToolError(TorchpipeError, RuntimeError):
    """A tool cannot do its work; the message says what to change."""

    code = "tool"


# --- text


def clip(text: str, width: int = WIDTH) -> str:
    """``text`` in at most ``width`` columns, shortened in the middle."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def printable(text: str) -> str:
    """``text`` on one line, with '?' for unprintable characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def check_outputs(files: Mapping[str, Path | None], sources: Iterable[str | Path | None] = ()) -> None:
    """``ToolError`` if two options, by their names, would write one file, or one would replace an input.

    Inputs are ``sources``, the files that those name which are TOML, and all images.
    """
    from torchpipe_py.backends.image.formats import IMAGE_SUFFIXES

    flags: dict[str, str] = {}
    inputs = [each for source in sources if source is not None for each in (Path(source), *_named(Path(source)))]
    for flag, path in files.items():
        for source in inputs:
            if path is not None and path.is_file() and source.exists() and path.samefile(source):
                raise ToolError(f"--{flag} {path}: would replace the input {source}")
        if path is not None and path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
            raise ToolError(f"--{flag} {path}: would replace an image")
        if path is not None and (path.is_file() or not path.exists()):  # not a device
            other = flags.setdefault(os.path.realpath(path), flag)
            if other != flag:
                raise ToolError(f"--{other} and --{flag}: both would write {path}, one over the other")


def _named(config: Path) -> Iterator[Path]:
    """The files that a TOML file names; none if it cannot be read, which is reported where it is used."""
    if config.suffix != ".toml":
        return
    from torchpipe_py.plan.config import parse_toml

    with suppress(TorchpipeError):
        for table in parse_toml(config).values():
            for value in table.values():
                for name in re.split(r"[|&]", value) if isinstance(value, str) else ():
                    for path in (Path(name.strip()), config.parent / name.strip()):
                        with suppress(OSError, ValueError):  # a value that is no path
                            if path.is_file():
                                yield path


def aligned(rows: Iterable[Sequence[str]], heads: Sequence[str] = (), least: int = 0) -> list[str]:
    """Rows as lines: the first column, at least ``least`` wide, and the last are left-aligned, others right-aligned."""
    lines = [*([heads] if heads else []), *rows]
    if not lines:
        return []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0], last = max(least, widths[0]), len(widths) - 1
    shown = []
    for line in lines:
        cells = enumerate(zip(line, widths, strict=True))
        padded = [text.ljust(width) if at in (0, last) else text.rjust(width) for at, (text, width) in cells]
        shown.append("  ".join(padded).rstrip())
    return shown


@contextmanager
def progress_bar(wanted: bool, has_lines: bool = False) -> Iterator[Callable[[str, float, str], None]]:
    """Yields a function that shows a name, a share from 0 to 1 and a note on one line.

    Without a terminal it is silent or, with ``has_lines``, prints each new name with its note.
    """
    is_wanted = wanted and sys.stderr is not None
    is_shown = is_wanted and sys.stderr.isatty()
    last = ""

    def show(name: str, share: float, note: str) -> None:
        nonlocal last
        if is_shown:
            bar = "#" * round(20 * share)
            write(f"\r{name:<10} [{bar:<20}] {note}\x1b[K")
        elif is_wanted and has_lines and name != last:
            write(f"{name}: {note}\n")
        last = name

    def write(text: str) -> None:
        with suppress(OSError):  # nobody reads it any more
            print(text, end="", file=sys.stderr, flush=True)

    yield show
    if is_shown:
        write("\r\x1b[K")


# --- files


def refuse_existing(paths: Iterable[Path], force: bool, other: str) -> None:
    """Raise ``ToolError`` if a file exists, unless ``force``; ``other`` says how to choose another name."""
    if not force and (there := [str(path) for path in paths if os.path.exists(path)]):
        raise ToolError(f"{', '.join(there)}: there already; --force replaces, {other}")


def write_text(path: Path, text: str) -> None:
    """Write a report in UTF-8. Raises ``ToolError``; then no new file remains."""
    is_new = not os.path.lexists(path)
    try:
        # Paths and error codes may contain text that is not valid UTF-8.
        path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    except OSError as error:
        if is_new:
            path.unlink(missing_ok=True)
        raise ToolError(f"{path}: cannot be written: {error.strerror}") from error


def replace_text(path: Path, text: str) -> None:
    """``write_text``, but atomically: a service that reads the file meanwhile gets the old or the new text.

    A link stays one, and a file keeps its permissions, less the umask.
    """
    path = path.resolve()
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666
    if path.exists() and not path.is_file():  # a device
        write_text(path, text)
        return
    try:
        replace_file(path, text.encode("utf-8", "backslashreplace"), mode)
    except OSError as error:
        raise ToolError(f"{path}: cannot be written: {error.strerror}") from error


def finite(value: Any) -> Any:
    """The data with None for NaN and infinity, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(report: Mapping[str, Any]) -> str:
    """A report as JSON."""
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON. Raises ``ToolError``."""
    write_text(path, json_text(report))


# --- pages

COLORS = ("blue", "orange", "green", "purple", "red", "teal")
"""Colours of the lines of a chart, in order."""

_STYLE = Path(__file__).with_name("style")


def style(name: str) -> str:
    """A style sheet from the folder ``style``."""
    return (_STYLE / f"{name}.css").read_text(encoding="utf-8")


def palette(selector: str) -> str:
    """Style rules that define the colours, such as ``var(--ink)``, in ``selector`` for light and dark."""
    return style("palette").replace("SELECTOR", selector)


def page(title: str, parts: Iterable[str]) -> str:
    """A complete HTML file; ``title`` is escaped, ``parts`` are HTML."""
    body = "\n".join(part for part in (f"<h1>{escape(title)}</h1>", *parts) if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{palette(':root')}{style('page')}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def verdict(text: str, is_good: bool) -> str:
    """A green or red paragraph."""
    return f'<p class="{"ok" if is_good else "missed"}">{escape(text)}</p>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", numbers: Sequence[int] = ()) -> str:
    """A table of escaped texts below ``title``; ``numbers`` are the right-aligned columns.

    Without heads the first column names the rows. Without rows it is empty.
    """

    def line(tag: str, first: str, texts: Sequence[str]) -> str:
        names = [(tag if at else first) for at in range(len(texts))]
        kinds = [' class="n"' if at in numbers else "" for at in range(len(texts))]
        cells = zip(names, kinds, texts, strict=True)
        return f"<tr>{''.join(f'<{name}{kind}>{escape(text)}</{name}>' for name, kind, text in cells)}</tr>"

    lines = [line("td", "td" if heads else "th", row) for row in rows]
    if not lines:
        return ""
    head = [line("th", "th", heads)] if heads else []
    above = f"<h2>{escape(title)}</h2>\n" if title else ""
    return f'{above}<div class="scroll"><table>\n' + "\n".join([*head, *lines]) + "\n</table></div>"


# --- charts

CHART_WIDTH, CHART_HEIGHT = 620, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, CHART_WIDTH - 22, 16, CHART_HEIGHT - 48
_LETTER = 6.6  # average width of a letter, pixels
_LEAST_GAP = 6  # pixels between two labels below an axis
_TICKS = 6
_MOST_LOG_TICKS = 8
_NEAR = 3.0  # times the largest value: showing a limit beyond would flatten the chart

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """An axis from ``low`` to ``high``, logarithmic if ``log``; ``ticks`` are values and their labels."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def place(self, value: float) -> float:
        """The position from 0 to 1 along the axis, clamped to its ends."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))


def linear_axis(label: str, low: float, high: float, exact: bool = False, least_step: float = 0.0) -> Axis:
    """An axis between round numbers, or with ``exact`` from ``low`` to ``high``; ticks are at round numbers."""
    high = high if high > low else low + 1.0
    step = max(_round_step((high - low) / _TICKS), least_step)
    if not exact:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    ticks = [at * step for at in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axis(label, low, high, [(tick, _number(tick)) for tick in ticks])


def log_axis(label: str, low: float, high: float, ticks: Sequence[tuple[float, str]] = ()) -> Axis:
    """A logarithmic axis from ``low`` to ``high``, both above 0; within one decade, ticks are linear."""
    high = max(high, low * 1.001)
    if not ticks and high < 10 * low:
        ticks = [tick for tick in linear_axis(label, low, high, exact=True).ticks if tick[0] > 0]
    elif not ticks:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            values = [digit * 10.0**decade for decade in decades for digit in digits]
            ticks = [(value, _number(value)) for value in values if low * 0.999 <= value <= high * 1.001]
            if len(ticks) <= _MOST_LOG_TICKS:
                break
    return Axis(label, low, high, ticks, log=True)


def value_axis(label: str, values: Iterable[float]) -> Axis:
    """A linear axis from 0, or a logarithmic one if the largest value is far above the median."""
    above_zero = sorted(value for value in values if value > 0) or [1.0]
    if above_zero[-1] > 30 * above_zero[len(above_zero) // 2]:
        return log_axis(f"{label}, log scale", above_zero[0] * 0.9, above_zero[-1] * 1.1)
    return linear_axis(label, 0.0, above_zero[-1])


def _round_step(step: float) -> float:
    """Round up to 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _number(value: float) -> str:
    """A short form, without an exponent if possible."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{round(value, 6):g}"


@dataclass
class Line:
    """Points joined by a line, which None interrupts; ``labels`` are written beside the points."""

    name: str
    points: Sequence[Point | None]
    color: str
    dashed: bool = False
    dots: bool = False
    labels: Sequence[str] = ()


@dataclass
class Bars:
    """Bars ``(from, to, height)`` on the axis; hovering over one shows its range and height."""

    name: str
    bars: Sequence[tuple[float, float, float]]
    color: str
    dashed: bool = False


def chart(
    title: str, x: Axis, y: Axis | str, marks: Sequence[Line | Bars], limit: tuple[str, float] | None = None
) -> str:
    """A line or bar chart with title and legend, as a figure; ``y`` may be just the unit of the values.

    A ``limit``, name and value, is a line across the chart; if it is far above, it appears only in the legend.
    """
    if isinstance(y, str):
        values = [point[1] for mark in marks if isinstance(mark, Line) for point in mark.points if point is not None]
        y = value_axis(y, [*values, limit[1]] if limit and limit[1] <= _NEAR * max(values) else values)
    if limit is not None:
        across = [(x.low, limit[1]), (x.high, limit[1])]
        marks = [*marks, Line(limit[0], across if limit[1] <= y.high else [], "red", dashed=True)]
    parts = [*_grid(x, y)]
    keys = ""  # outside the drawing, so that the page can wrap them
    for mark in marks:
        parts += _bars(mark, x, y) if isinstance(mark, Bars) else _line(mark, x, y)
        style = f"border-top: 3px {'dashed' if mark.dashed else 'solid'} var(--{mark.color})"
        keys += f'<li><span style="{style}"></span>{escape(mark.name)}</li>'
    head = f'<figcaption>{escape(title)}</figcaption><ul class="keys">{keys}</ul>'
    size = f'viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}"'
    return f"<figure>{head}\n<svg {size}>\n" + "\n".join(parts) + "\n</svg></figure>"


def charts(figures: Iterable[str]) -> str:
    """Charts side by side, as far as they fit."""
    return '<div class="charts">\n' + "\n".join(figures) + "\n</div>"


def _x(axis: Axis, value: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * axis.place(value)


def _y(axis: Axis, value: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * axis.place(value)


def _line(line: Line, x: Axis, y: Axis) -> Iterator[str]:
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    for interrupted, group in groupby(line.points, key=lambda point: point is None):
        if interrupted:
            continue
        places = [(_x(x, point[0]), _y(y, point[1])) for point in group if point is not None]
        path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        yield f'<polyline points="{path}" fill="none" stroke="var(--{line.color})"{dash}/>'
        if line.dots or len(places) == 1:
            for left, top in places:
                yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3.2" fill="var(--{line.color})"/>'
    for point, label in zip(line.points, line.labels, strict=False):
        if point is not None:
            yield _text(_x(x, point[0]) - 7, _y(y, point[1]) - 6, label, "end")


def _bars(bars: Bars, x: Axis, y: Axis) -> Iterator[str]:
    for start, end, height in bars.bars:
        if height > 0:
            left, right = _x(x, start), _x(x, end)
            top = min(_y(y, height), _BOTTOM - 1.5)  # the smallest one stays visible
            size = f'width="{max(1.0, right - left - 1):.1f}" height="{_BOTTOM - top:.1f}"'
            title = f"<title>{start:.3g} to {end:.3g}: {height:g}</title>"
            yield f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="var(--{bars.color})">{title}</rect>'


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for value, text in y.ticks:
        at = _y(y, value)
        yield f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_RIGHT}" y2="{at:.1f}"/>'
        yield _text(_LEFT - 8, at + 4, text, "end")
    free_from = 0.0
    for value, text in x.ticks:
        at, half = _x(x, value), len(text) * _LETTER / 2
        yield f'<line class="axis" x1="{at:.1f}" y1="{_BOTTOM}" x2="{at:.1f}" y2="{_BOTTOM + 5}"/>'
        if at - half >= free_from:  # leave out a label that would touch the one before it
            yield _text(min(at, CHART_WIDTH - half), _BOTTOM + 18, text, "middle")
            free_from = at + half + _LEAST_GAP
    yield f'<line class="axis" x1="{_LEFT}" y1="{_BOTTOM}" x2="{_RIGHT}" y2="{_BOTTOM}"/>'
    yield _text((_LEFT + _RIGHT) / 2, CHART_HEIGHT - 10, x.label, "middle")
    middle = (_TOP + _BOTTOM) / 2
    yield f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, y.label, "middle")}</g>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
