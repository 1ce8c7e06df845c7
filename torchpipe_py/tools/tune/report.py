"""The tuner's output: data for JSON, a table, the tuned file, and a page with a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from torchpipe_py.tools import report as shared
from torchpipe_py.tools.export.config import to_toml
from torchpipe_py.tools.report import Line, aligned, chart, linear_axis, write_text
from torchpipe_py.tools.tune.profile import DRIFT, Profile
from torchpipe_py.tools.tune.search import Goal
from torchpipe_py.tools.tune.verify import BUSY, Trial, interval_of

HEADS = ("", "predicted", "measured", "gain", "95 % interval", "p99 at", "predicted", "measured", "settings")
CELLS = ("node", "threads", "batch", "instances", "processes", "ms per image", "drift")


def finite(value: Any) -> Any:
    """The data with None for NaN and infinity, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def profile_fields(profile: Profile) -> dict[str, Any]:
    """Each cell under ``CELLS``, and the number of noisy ones."""
    cells = []
    for cell, figures in profile.cells.items():
        milliseconds = [1000 * seconds for seconds in figures.seconds]
        name, threads = profile.names[cell.unit], cell.threads or None
        row = (name, threads, cell.size, cell.instances, cell.processes, milliseconds, figures.drift)
        cells.append(dict(zip(CELLS, row, strict=True)))
    noisy = sum(figures.drift > DRIFT for figures in profile.cells.values())
    return {"cells": cells, "noisy_cells": noisy}


def trial_fields(trial: Trial, goal: Goal) -> dict[str, Any]:
    """A measured candidate: figures in requests per second or, with a rate, p99s in seconds.

    p99s are at ``rate``; ``gain`` and its ``interval`` are factors. Two gains have no interval: they do not show noise.
    """
    gain = math.exp(statistics.mean(trial.gains)) if trial.gains else None
    interval = [math.exp(bound) for bound in interval_of(trial.gains)] if len(trial.gains) > 2 else None
    return {
        "shape": trial.candidate.shape.name,
        "workers": trial.candidate.workers,
        "engines": trial.candidate.engines,
        "processes": trial.candidate.processes,
        "parity": trial.parity,
        "settings": {f"{node}.{key}": value for node, key, value in trial.candidate.knobs},
        "predicted": trial.predicted.figure(goal),
        "measured": trial.figure if trial.figures else None,
        "rate": trial.predicted.rate,
        "p99_predicted": trial.predicted.p99,
        "p99_measured": statistics.median(trial.p99s) if trial.p99s else None,
        "gain": gain,
        "interval": interval,
        "gains": trial.gains,
        "turns": trial.figures,
        "points": [asdict(point) for point in trial.points],
    }


# --- text


def goal_text(report: Mapping[str, Any]) -> str:
    """In words."""
    if report["rate"] is not None:
        return f"the shortest p99 at {report['rate']:g} requests/s"
    why = "" if report["slo_given"] else ", as no --slo-p99 was given"
    return f"the most requests/s with p99 within {1000 * report['slo_p99']:.3g} ms{why}"


def _figure(report: Mapping[str, Any], value: float | None) -> str:
    if report["rate"] is not None:
        return _ms(value)
    return "-" if value is None or not math.isfinite(value) else f"{value:.{0 if value >= 100 else 1}f}/s"


def _ms(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{1000 * value:.2f} ms"


def rows_of(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The original file and the candidates as rows under ``HEADS``."""
    rows: list[tuple[str, ...]] = []
    for number, trial in enumerate([report["yours"], *report["others"]] if report["yours"] else []):
        gain = f"{trial['gain']:.2f}" if trial["gain"] else "-"
        interval = "{:.2f} to {:.2f}".format(*trial["interval"]) if trial["interval"] else "-"
        settings = [trial["shape"], trial["processes"]]
        settings += [f"{key} = {value:g}" for key, value in trial["settings"].items()]
        settings += [trial["parity"]] if trial["parity"] else []
        figures = [_figure(report, trial[key]) for key in ("predicted", "measured")]
        p99s = [_ms(trial[key]) for key in ("p99_predicted", "p99_measured")]
        name, rate = f"no. {number}" if number else "yours", f"{trial['rate'] or 0:.0f}/s"
        rows.append((name, *figures, gain, interval, rate, *p99s, ", ".join(settings)))
    return rows


def verdict_line(report: Mapping[str, Any]) -> str:
    """The verdict in one line."""
    kind, (low, high) = report["verdict"], report["gain_interval"]
    between = f"95 % interval of the gain: {low or 0:.2f} to {high or math.inf:.2f}"
    parity = f"; {report['best']['parity']}" if report["best"] and report["best"]["parity"] else ""
    why = f"measurements vary too much ({between}): tune with a longer --budget, or"
    if (report["other_programs"] or 0.0) > BUSY:
        why = f"{_others(report)};"
    if report["failed"]:
        return f"cannot tell: {report['failed']}"
    return {
        "better": f"better than your file by a factor of {report['gain'] or 1:.2f} ({between}){parity}",
        "as good": f"your file is as good: nothing beats it beyond the noise ({between})",
        "cannot tell": f"cannot tell: {why} measure on a quiet machine",
    }.get(kind, "interrupted: this is what is known so far")


def _others(report: Mapping[str, Any]) -> str:
    share = report["other_programs"]
    return "the use by other programs is unknown" if share is None else f"other programs took {share:.0%} of the cores"


def lines_of(report: Mapping[str, Any], has_table: bool = True) -> list[str]:
    """The whole report as text, or without the table of candidates."""
    profile, calibration = report["profile"], report["calibration"]
    rows = [("goal", goal_text(report))]
    rows.append(("machine", f"{report['cpu_model']}, {report['cores']} cores of it; {report['images']} images"))
    if profile:
        drift = f"{profile['noisy_cells']} of {len(profile['cells'])} measurements of nodes drifted by more than 10 %"
        rows.append(("noise", f"{drift}; {_others(report)}"))
    if calibration:
        machine, light = calibration["machine"], calibration["light"]
        rows.append(("calibration", f"to wake a thread takes {_ms(machine['handover'])}"))
        rates = [("at the limit", machine), ("at lower rates", light)]
        for rate, each in rates if report["rate"] is None else [("at the rate", light)]:
            slower = f"nodes take {each['slower']:.2f} times as long as alone"
            rows.append(("", f"{rate}, {slower}, and other delays add {_ms(each['tail'])} to the p99"))
        rows.append(("", f"the prediction of a closed loop is {calibration['residual']:.0%} off"))
    if report["simulated"]:
        rows.append(("search", f"{report['simulated']} settings simulated"))
    table = aligned(rows_of(report), HEADS) if report["yours"] and has_table else []
    return [*aligned(rows), *table, *report["notes"], *(f"not tried: {each}" for each in report["not_tried"])]


# --- files


def write_tuned(path: Path, report: Mapping[str, Any]) -> None:
    """Write the tuned configuration, with its origin in comments."""
    lines = [
        f"tuned by torchpipe tune from {report['config']} on {report['date'][:10]}",
        f"{report['cpu_model']}, {report['cores']} cores; {report['images']} images of {report['img_dir']}",
        f"{goal_text(report)}: {_figure(report, report['best']['measured'])} without a network; {verdict_line(report)}",
        f"serve it with: {report['command']}",
    ]
    write_text(path, "".join(f"# {shared.printable(line)}\n" for line in lines) + "\n" + to_toml(report["tuned"]))


def page(report: Mapping[str, Any]) -> str:
    """The HTML file: verdict, plot of latency over rate, the table, and the other lines of the report."""
    is_good = report["verdict"] in ("better", "as good")
    parts = [shared.verdict(verdict_line(report), is_good)]
    lines, first = [], next(iter(report["others"]), None)
    for name, trial, color in (("yours", report["yours"], "blue"), ("no. 1", first, "orange")):
        for key in ("p99", "p50"):
            points = sorted(
                (each["rate"], 1000 * each[key])
                for each in (trial or {"points": ()})["points"]
                if each[key] is not None
            )
            lines += [Line(f"{name}, {key}", points, color, key == "p50", dots=key == "p99")] if points else []
    if lines:
        rates = [point[0] for line in lines for point in line.points if point]
        limit = None if report["rate"] is not None else ("p99 limit", 1000 * report["slo_p99"])
        x = linear_axis("requests per second", min(rates), max(rates))
        parts.append(shared.charts([chart("Latency by rate", x, "ms", lines, limit)]))
    parts.append(shared.table(HEADS, rows_of(report), "Yours and the best", range(1, 8)))
    others = escape("\n".join(lines_of(report, has_table=False)))
    parts.append(f'<pre style="white-space: pre-wrap">{others}</pre>')
    return shared.page(f"Tuning of {report['config']}", parts)
