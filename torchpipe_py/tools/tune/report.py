"""The tuner's output: data for JSON, a table, the tuned file, and a page with a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from html import escape
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_py.tools import report as shared
from torchpipe_py.tools.export.config import to_toml
from torchpipe_py.tools.load.measure import cpu_model
from torchpipe_py.tools.report import Line, aligned, chart, linear_axis
from torchpipe_py.tools.tune.search import NO_TIME, Trial

MOST_BY_OTHERS = 0.15
"""Share of the cores that other programs may use; with more, there is no verdict."""

NO_ENGINES = "engine processes for nodes without a model or GPU decoder: their work would share one GIL"

HEADS = ("", "measured", "gain", "95 % interval", "p99 at", "p99", "settings")


def new_report(config: str, slo: float | None, rate: float | None) -> dict[str, Any]:
    """The report of a run that ends at once."""
    report: dict[str, Any] = {"config": config, "cpu_model": cpu_model(), "cores": 0, "images": 0, "img_dir": None}
    report |= {
        "date": datetime.now(timezone.utc).isoformat(),
        "slo_p99": slo,
        "slo_given": slo is not None,
        "rate": rate,
    }
    report |= {"profile": {}, "parity": {}, "other_programs": None, "notes": [], "not_tried": [NO_ENGINES]}
    report |= {"verdict": "interrupted", "failed": "", "gain": None, "gain_interval": (0.0, math.inf)}
    return report | {"best": None, "tuned": None}


def completed(report: dict[str, Any], trials: Sequence[Trial]) -> dict[str, Any]:
    """The report with the trials as far as they were measured, and what was left out."""
    yours, others = trials[0] if trials else None, list(trials[1:])
    others.sort(key=lambda trial: (not trial.points, -trial.gain))
    failed = [trial for trial in others if not trial.gains]
    late = [trial for trial in failed if trial.failed == NO_TIME]
    report["notes"] += [f"{each.candidate} was left out: {each.failed}" for each in failed if each not in late]
    report["not_tried"] += [f"{counted(len(late), 'further setting')}: {NO_TIME}"] if late else []
    report["yours"] = None if yours is None else trial_fields(yours, report)
    report["others"] = [trial_fields(trial, report) for trial in others if trial.gains]
    complete: dict[str, Any] = shared.finite(report)
    return complete


def trial_fields(trial: Trial, report: Mapping[str, Any]) -> dict[str, Any]:
    """A measured candidate: ``measured`` is in requests per second or, with a rate, a p99 in seconds.

    ``p99`` is at ``rate``; ``gain`` and its ``interval`` are factors. Two gains have no interval: they do not show
    noise.
    """
    candidate, point = trial.candidate, trial.points[-1] if trial.points else None
    fields: dict[str, Any] = {"shape": candidate.shape, "workers": candidate.workers, "engines": candidate.engines}
    fields |= {"processes": candidate.processes, "settings": dict(candidate.settings)}
    fields |= {"parity": report["parity"].get(candidate.alternative, ""), "rate": point and point.rate}
    fields |= {"measured": trial.limit if report["rate"] is None else trial.p99, "p99": trial.p99}
    fields |= {"gain": math.exp(trial.gain) if trial.gains else None, "gains": trial.gains, "figures": trial.figures}
    fields |= {"interval": [*map(math.exp, trial.interval)] if len(trial.gains) > 2 else None}
    return fields | {"points": [asdict(point) for point in trial.points]}


# --- text


def goal_text(report: Mapping[str, Any]) -> str:
    """The goal as text."""
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
        name, rate = f"no. {number}" if number else "yours", f"{trial['rate']:.0f}/s" if trial["rate"] else "-"
        figure = _figure(report, trial["measured"])
        rows.append((name, figure, gain, interval, rate, _ms(trial["p99"]), ", ".join(settings)))
    return rows


def verdict_line(report: Mapping[str, Any]) -> str:
    """The verdict in one line."""
    kind, (low, high) = report["verdict"], report["gain_interval"]
    between = f"95 % interval of the gain: {low or 0:.2f} to {high or math.inf:.2f}"
    parity = f"; {report['best']['parity']}" if report["best"] and report["best"]["parity"] else ""
    why = f"measurements vary too much ({between}): tune with a longer --budget, or"
    if (report["other_programs"] or 0.0) > MOST_BY_OTHERS:
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
    rows = [("goal", goal_text(report))]
    rows.append(("machine", f"{report['cpu_model']}, {report['cores']} cores of it; {report['images']} images"))
    rows.append(("noise", _others(report)))
    if report["profile"]:
        lone, answers = _ms(report["profile"]["lone"]), report["profile"]["answers"]
        rows.append(("your file", f"a single request takes {lone}, clients that wait get {answers:.0f} answers/s"))
    rows += [("search", f"{len(report['others'])} settings measured beside your file")] if report["others"] else []
    table = aligned(rows_of(report), HEADS) if report["yours"] and has_table else []
    return [*aligned(rows), *table, *report["notes"], *(f"not tried: {each}" for each in report["not_tried"])]


# --- files


def tuned_text(report: Mapping[str, Any], tables: Mapping[str, Any], origin: str) -> str:
    """The best configuration as TOML, with its ``origin`` and figures in comments."""
    lines = [
        f"{origin} from {report['config']} on {report['date'][:10]}",
        f"{report['cpu_model']}, {report['cores']} cores; {report['images']} images of {report['img_dir']}",
        f"{goal_text(report)}: {_figure(report, report['best']['measured'])} without a network; {verdict_line(report)}",
        f"serve it with: {report['command']}",
    ]
    return "".join(f"# {shared.printable(line)}\n" for line in lines) + "\n" + to_toml(tables)


def page(report: Mapping[str, Any]) -> str:
    """The HTML file."""
    return shared.page(f"Tuning of {report['config']}", page_parts(report))


def page_parts(report: Mapping[str, Any]) -> list[str]:
    """The parts of a page: verdict, plot of latency over rate, the table, and the other lines of the report."""
    is_good = report["verdict"] in ("better", "as good")
    parts = [shared.verdict(verdict_line(report), is_good)]
    lines = []
    for name, trial, color in zip(
        ("yours", "no. 1"), (report["yours"], *report["others"]), ("blue", "orange"), strict=False
    ):
        for key in ("p99", "p50") if trial else ():
            points = sorted((each["rate"], 1000 * each[key]) for each in trial["points"] if each[key] is not None)
            lines += [Line(f"{name}, {key}", points, color, key == "p50", dots=key == "p99")] if points else []
    if lines:
        rates = [point[0] for line in lines for point in line.points if point]
        limit = None if report["rate"] is not None else ("p99 limit", 1000 * report["slo_p99"])
        x = linear_axis("requests per second", min(rates), max(rates))
        parts.append(shared.charts([chart("Latency by rate", x, "ms", lines, limit)]))
    parts.append(shared.table(HEADS, rows_of(report), "Yours and the best", range(1, 6)))
    others = escape("\n".join(lines_of(report, has_table=False)))
    parts.append(f'<pre style="white-space: pre-wrap">{others}</pre>')
    return parts
