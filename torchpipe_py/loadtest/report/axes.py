"""Pure: axes of a plot: where a value goes, and which values have a tick."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_TICKS = 6
_LOG_DECADES = 1.0  # a log axis that is shorter has linear ticks
_MOST_LOG_TICKS = 8
_NINES = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999, 99.9999)


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
