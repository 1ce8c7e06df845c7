"""What the tuner says: data for JSON, a table, the tuned file, and a page with a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torchpipe_py.tools import report as shared
from torchpipe_py.tools.export.config import to_toml
from torchpipe_py.tools.report import Line, aligned, chart, linear_axis, write_text
from torchpipe_py.tools.tune.profile import Profile
from torchpipe_py.tools.tune.search import Calibration, Goal, Prediction
from torchpipe_py.tools.tune.verify import Trial, Verdict

HEADS = ("", "predicted", "measured", "95 % interval", "p99 at", "settings")


def profile_fields(profile: Profile) -> dict[str, Any]:
    """Each cell, its noise, and how much of the time other programs had the cores."""
    cells = [
        {
            "node": profile.names[cell.unit],
            "threads": cell.threads or None,
            "batch": cell.size,
            "instances": cell.instances,
            "processes": cell.processes,
            "ms_per_image": [round(1000 * each, 4) for each in figures.seconds],
            "drift": round(figures.drift, 4),
        }
        for cell, figures in profile.cells.items()
    ]
    locks = {profile.names[unit]: profile.neighbours(unit) for unit in profile.limits}
    names = ("lock", "slowing")
    return {
        "cells": cells,
        "neighbours": {node: dict(zip(names, each, strict=True)) for node, each in locks.items()},
        "noisy_cells": len(profile.noisy),
        "noise": profile.noise,
        "other_programs": profile.disturbed,
    }


def calibration_fields(calibration: Calibration) -> dict[str, Any]:
    """What a hand-over costs, and the errors of the prediction of the file as it is."""
    throughput, p50, p99 = calibration.measured
    return {
        "hand_over_us": 1e6 * calibration.machine.hand_over,
        "neighbours": calibration.machine.neighbours,
        "closed_loop_per_s": throughput,
        "open_loop_p50_ms": 1000 * p50,
        "open_loop_p99_ms": _number(1000 * p99),
        "throughput_error": calibration.throughput_error,
        "p99_error": _number(calibration.p99_error),
    }


def prediction_fields(found: Prediction | None) -> dict[str, Any] | None:
    """Requests per second within the goal, and latencies there."""
    if found is None:
        return None
    return {"per_s": found.limit, "p50_ms": _number(1000 * found.p50), "p99_ms": _number(1000 * found.p99)}


def trial_fields(trial: Trial, goal: Goal) -> dict[str, Any]:
    """A candidate that was measured; the figure is in requests per second, or with a rate a p99 in ms."""
    factor, (low, high) = (1.0 if goal.rate is None else 1000.0), trial.interval()
    return {
        "shape": trial.candidate.shape.name,
        "workers": trial.candidate.workers,
        "settings": {f"{node}.{key}": value for node, key, value in trial.candidate.knobs},
        "predicted": prediction_fields(trial.predicted),
        "measured": factor * trial.figure if trial.figures else None,
        "interval": [_number(factor * low), _number(factor * high)] if trial.figures else None,
        "turns": [factor * figure for figure in trial.figures],
        "points": [[point.rate, _number(1000 * point.p50), _number(1000 * point.p99)] for point in trial.points],
    }


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """The gain as a factor."""
    low, high = verdict.interval
    return {"verdict": verdict.kind, "gain": verdict.gain, "gain_interval": [_number(low), _number(high)]}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- text


def goal_text(report: Mapping[str, Any]) -> str:
    """In words."""
    if report["rate"] is not None:
        return f"the shortest p99 at {report['rate']:g} requests/s"
    source = "" if report["slo_given"] else " (no --slo-p99 was given)"
    return f"the most requests/s with p99 within {report['slo_p99_ms']:g} ms{source}"


def rows_of(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Yours and the others as lines under ``HEADS``."""
    is_rate = report["rate"] is not None
    unit = "ms" if is_rate else "/s"
    rows: list[tuple[str, ...]] = []
    for name, trial in [
        ("yours", report["yours"]),
        *((f"no. {at}", each) for at, each in enumerate(report["others"], 1)),
    ]:
        if trial is None:
            continue
        predicted = trial["predicted"]
        figure = predicted and predicted["p99_ms" if is_rate else "per_s"]
        bounds = trial["interval"] or [None, None]
        settings = [trial["shape"], f"workers {trial['workers']}"]
        settings += [f"{key} {value:g}" for key, value in trial["settings"].items()]
        rows.append(
            (
                name,
                "-" if figure is None else f"{figure:.4g} {unit}",
                "-" if trial["measured"] is None else f"{trial['measured']:.4g} {unit}",
                "-" if None in bounds else f"{bounds[0]:.4g} to {bounds[1]:.4g}",
                _tail(trial["points"]),
                ", ".join(settings),
            )
        )
    return rows


def _tail(points: Sequence[Sequence[float | None]]) -> str:
    """The last turn's p99 at its rates."""
    last = points[-3:]
    return "  ".join(f"{rate:.0f}: {'-' if p99 is None else f'{p99:.1f}'}" for rate, _, p99 in last) or "-"


def verdict_line(report: Mapping[str, Any]) -> str:
    """One line for a person."""
    kind = report["verdict"]
    low, high = report.get("gain_interval") or (None, None)
    between = "" if low is None or high is None else f" (95 %: {low:.2f} to {high:.2f})"
    if kind == "better":
        return f"better than your file by a factor of {report['gain']:.2f}{between}"
    if kind == "as good":
        return f"your file is as good: nothing beats it beyond the noise{between}"
    if kind == "cannot tell":
        share = report["profile"]["other_programs"]
        return f"cannot tell{between}: other programs had {share:.0%} of the cores; measure on a quiet machine"
    return f"{kind}: what is known so far"


def print_report(report: Mapping[str, Any]) -> None:
    """The table, the noise, and what was not tried."""
    print(f"goal       {goal_text(report)}")
    print(f"machine    {report['machine']['cpu_model']}, {report['cores']} cores of it; {report['images']} images")
    profile = report.get("profile")
    if profile:
        noise = f"{profile['noisy_cells']} of {len(profile['cells'])} cells drifted by more than 10 %"
        others = f"other programs had {profile['other_programs']:.0%} of the cores"
        print(f"noise      {noise}; {others}")
    if calibration := report.get("calibration"):
        errors = f"throughput {calibration['throughput_error']:+.0%}"
        if calibration["p99_error"] is not None:
            errors += f", p99 {calibration['p99_error']:+.0%}"
        print(f"prediction {report['simulated']} simulations; of your file as it is: {errors}")
    if rows := rows_of(report):
        print("\n".join(aligned(rows, HEADS)))
    for note in [*report["notes"], *(f"not tried: {each}" for each in report["not_tried"])]:
        print(note)
    print(verdict_line(report))


# --- files


def write_tuned(path: Path, report: Mapping[str, Any], config: Mapping[str, Mapping[str, Any]]) -> None:
    """The tuned configuration, with where it comes from as comments."""
    best = report["best"]
    figure = f"{best['measured']:.4g} " + ("ms p99" if report["rate"] is not None else "requests/s")
    heads = [
        f"tuned by torchpipe tune from {report['config']} on {report['date'][:10]}",
        f"{report['machine']['cpu_model']}, {report['cores']} cores; {report['images']} images of {report['img_dir']}",
        f"{goal_text(report)}: {figure}, {report['gain']:.2f} times as good as before",
        f"serve it with: {report['command']}",
    ]
    write_text(path, "".join(f"# {head}\n" for head in heads) + "\n" + to_toml(config))


def page(report: Mapping[str, Any]) -> str:
    """The HTML file: verdict, a plot of latency against rate, the table, every cell of the profile."""
    is_good = report["verdict"] in ("better", "as good")
    parts = [f'<p class="{"ok" if is_good else "missed"}">{escape(verdict_line(report))}</p>']
    parts.append(f"<p>{escape(goal_text(report))}</p>")
    lines = []
    named = [("yours", report["yours"], "blue"), ("best", report.get("best"), "orange")]
    for name, trial, color in named:
        if trial is not None and not (name == "best" and trial == report["yours"]):
            for label, column, dashed in (("p99", 2, False), ("p50", 1, True)):
                points = sorted((point[0], point[column]) for point in trial["points"] if point[column] is not None)
                if points:
                    lines.append(Line(f"{name}, {label}", points, color, dashed, dots=not dashed))
    if lines:
        rates = [point[0] for line in lines for point in line.points if point is not None]
        limit = None if report["rate"] is not None else ("p99 limit", report["slo_p99_ms"])
        x = linear_axis("requests per second", min(rates), max(rates))
        parts.append(shared.charts([chart("Latency by rate", x, "ms", lines, limit)]))
    parts.append(shared.table(HEADS, rows_of(report), "Yours and the best", range(1, 4)))
    cells = report.get("profile", {}).get("cells", [])
    heads = ("node", "threads", "batch", "instances", "processes", "ms per image", "drift")
    rows = [
        (cell["node"], str(cell["threads"] or "-"), *(str(cell[key]) for key in ("batch", "instances", "processes")),
         f"{min(cell['ms_per_image']):.3f}", f"{cell['drift']:.0%}")
        for cell in cells
    ]  # fmt: skip
    parts.append(shared.table(heads, rows, "Each node alone", range(1, len(heads))))
    notes = [*report["notes"], *(f"not tried: {each}" for each in report["not_tried"])]
    parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>")
    return shared.page(f"Tuning of {report['config']}", parts)
