"""Pure: the plots of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchpipe_py.loadtest.report.axes import (
    Axis,
    linear_axis,
    log_axis,
    percentile_axis,
    span_axis,
    value_axis,
)
from torchpipe_py.loadtest.report.charts import Bars, Line, Mark, Point, Rule, chart

_COLORS = ("blue", "orange", "green", "purple", "red", "teal")
_MOST_CURVES = len(_COLORS)
_NEAR = 3.0  # times the greatest value: a rule further up would flatten the plot


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
    marks: list[Mark] = []
    paced = [one for one in reports if one.get("offered_rate") is not None]
    x_name = "offered_rate" if paced else "goodput"
    chosen = sorted(paced or reports, key=lambda one: one[x_name] if paced else one["settings"]["request_client"])
    if len(chosen) < 2:
        return None
    for name, color in (("p50", "blue"), ("p99", "orange")):
        points = [(one[x_name], one["latency_ms"][name]) for one in chosen]
        labelled = name == "p99" and not paced
        labels = [str(one["settings"]["request_client"]) for one in chosen] if labelled else []
        title = f"{name}, at so many clients" if labelled else name
        marks.append(Line(title, points, color, dots=True, labels=labels))
    marks += _slo(chosen[0])
    label = "images per second, offered" if paced else "images per second with a result"
    x = linear_axis(label, [one[x_name] for one in chosen], from_zero=False)
    return chart("Latency by throughput", x, _ms_axis(marks), marks)


def _curves(reports: Sequence[dict[str, Any]]) -> str | None:
    """The percentiles of some runs, evenly chosen where there are many."""
    step = max(1, -(-len(reports) // _MOST_CURVES))
    chosen = reports[::step]
    lines = [Line(one["point"], one["percentiles_ms"], color) for one, color in zip(chosen, _COLORS, strict=False)]
    longest = max((one["percentiles_ms"] for one in chosen), key=lambda curve: curve[-1][0])
    return _percentile_chart("Latency by percentile", lines, longest)
