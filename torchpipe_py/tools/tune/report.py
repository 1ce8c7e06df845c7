"""The tuner's output: data for JSON, a table, the tuned file, and a page with a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from html import escape
from typing import Any

from torchpipe_py.errors import counted
from torchpipe_py.tools import report as shared
from torchpipe_py.tools.export.config import to_toml
from torchpipe_py.tools.load.measure import cpu_model
from torchpipe_py.tools.report import Line, aligned, chart, linear_axis
from torchpipe_py.tools.tune.measure import Point
from torchpipe_py.tools.tune.search import NO_TIME, Trial
from torchpipe_py.tools.tune.verify import TuningVerdict

MOST_BY_OTHERS = 0.15
"""Share of the cores that other programs may use; with more, there is no verdict."""

NO_ENGINES = "engine processes for nodes without a model or GPU decoder: their work would share one GIL"

HEADS = ("", "measured", "gain", "95 % interval", "p99 at", "p99", "settings")


@dataclass
class MeasuredTrial:
    """A trial as it is reported: ``measured`` is in requests per second or, with a rate, a p99 in seconds.

    ``p99`` is at ``rate``; ``gain`` and its ``interval`` are factors. Two gains have no interval: they do not show
    noise.
    """

    shape: str
    workers: int
    engines: int
    processes: str
    settings: dict[str, float]
    parity: str
    rate: float | None
    measured: float
    p99: float
    gain: float | None
    gains: list[float]
    figures: list[float]
    interval: tuple[float, float] | None
    points: list[Point]

    @classmethod
    def of(cls, trial: Trial, has_rate: bool, parity: Mapping[str, str]) -> MeasuredTrial:
        """The trial; ``parity`` is by the names of alternatives."""
        candidate, (low, high) = trial.candidate, trial.interval if len(trial.gains) > 2 else (0.0, 0.0)
        return cls(
            shape=candidate.shape,
            workers=candidate.workers,
            engines=candidate.engines,
            processes=candidate.processes,
            settings=dict(candidate.settings),
            parity=parity.get(candidate.alternative, ""),
            rate=trial.points[-1].rate if trial.points else None,
            measured=trial.p99 if has_rate else trial.limit,
            p99=trial.p99,
            gain=math.exp(trial.gain) if trial.gains else None,
            gains=list(trial.gains),
            figures=list(trial.figures),
            interval=(math.exp(low), math.exp(high)) if len(trial.gains) > 2 else None,
            points=list(trial.points),
        )


@dataclass
class Report:
    """The outcome of a run, completed step by step; at first that of a run that ends at once. Times are in seconds.

    ``slo_given``: the user gave ``slo_p99``, which else is chosen after the ``profile``: how long a request takes
    ``lone``, and how many ``answers`` per second waiting clients get. ``parity`` is by the names of alternatives.
    ``verdict`` is a ``TuningVerdict.kind``, for the reason ``failed``, or ``interrupted``. ``tuned`` are the tables of
    the better configuration, ``command`` serves it.
    """

    config: str
    slo_p99: float | None
    rate: float | None
    slo_given: bool
    cpu_model: str = field(default_factory=cpu_model)
    cores: int = 0
    images: int = 0
    img_dir: str | None = None
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())
    profile: dict[str, float] = field(default_factory=dict)
    parity: dict[str, str] = field(default_factory=dict)
    other_programs: float | None = None
    notes: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=lambda: [NO_ENGINES])
    verdict: str = "interrupted"
    failed: str = ""
    gain: float | None = None
    gain_interval: tuple[float, float] = (0.0, math.inf)
    best: MeasuredTrial | None = None
    tuned: dict[str, Any] | None = None
    yours: MeasuredTrial | None = None
    others: list[MeasuredTrial] = field(default_factory=list)
    command: str = ""

    def decide(self, verdict: TuningVerdict) -> None:
        """Take a verdict; ``tuned`` is left as it is."""
        self.verdict, self.failed, self.best = verdict.kind, verdict.why, self.measured(verdict.best)
        self.gain, self.gain_interval = verdict.gain, verdict.interval

    def withdraw(self, why: str) -> None:
        """There is no verdict, and nothing is better."""
        self.verdict, self.failed, self.tuned = "cannot tell", why, None

    @property
    def is_empty(self) -> bool:
        """Whether there is no verdict because no other setting was measured."""
        return self.verdict == "cannot tell" and not self.others

    def complete(self, trials: Sequence[Trial]) -> None:
        """Take the trials, as far as they were measured, and what was left out."""
        yours, others = trials[0] if trials else None, list(trials[1:])
        others.sort(key=lambda trial: (not trial.points, -trial.gain))
        failed = [trial for trial in others if not trial.gains]
        late = [trial for trial in failed if trial.failed == NO_TIME]
        self.notes += [f"{each.candidate} was left out: {each.failed}" for each in failed if each not in late]
        self.not_tried += [f"{counted(len(late), 'further setting')}: {NO_TIME}"] if late else []
        self.yours = None if yours is None else self.measured(yours)
        self.others = [self.measured(trial) for trial in others if trial.gains]

    def measured(self, trial: Trial) -> MeasuredTrial:
        """A trial of this run."""
        return MeasuredTrial.of(trial, self.rate is not None, self.parity)

    def to_json(self) -> dict[str, Any]:
        """The JSON file: the fields by their names, ``command`` only if there is one."""
        fields: dict[str, Any] = shared.finite(asdict(self))
        return fields if self.command else {name: value for name, value in fields.items() if name != "command"}


# --- text


def goal_text(report: Report) -> str:
    """The goal as text."""
    if report.rate is not None:
        return f"the shortest p99 at {report.rate:g} requests/s"
    why = "" if report.slo_given else ", as no --slo-p99 was given"
    if report.slo_p99 is None:  # it ended before the profile, which chooses one
        return f"the most requests/s with p99 within a limit that was not chosen yet{why}"
    return f"the most requests/s with p99 within {1000 * report.slo_p99:.3g} ms{why}"


def _figure(report: Report, value: float) -> str:
    if report.rate is not None:
        return _ms(value)
    return f"{value:.{0 if value >= 100 else 1}f}/s" if math.isfinite(value) else "-"


def _ms(value: float) -> str:
    return f"{1000 * value:.2f} ms" if math.isfinite(value) else "-"


def rows_of(report: Report) -> list[tuple[str, ...]]:
    """The original file and the candidates as rows under ``HEADS``."""
    rows: list[tuple[str, ...]] = []
    for number, trial in enumerate([report.yours, *report.others] if report.yours else []):
        gain = f"{trial.gain:.2f}" if trial.gain else "-"
        interval = "{:.2f} to {:.2f}".format(*trial.interval) if trial.interval else "-"
        settings = [trial.shape, trial.processes]
        settings += [f"{key} = {value:g}" for key, value in trial.settings.items()]
        settings += [trial.parity] if trial.parity else []
        name, rate = f"no. {number}" if number else "yours", f"{trial.rate:.0f}/s" if trial.rate else "-"
        figure = _figure(report, trial.measured)
        rows.append((name, figure, gain, interval, rate, _ms(trial.p99), ", ".join(settings)))
    return rows


def verdict_line(report: Report) -> str:
    """The verdict in one line."""
    low, high = report.gain_interval
    between = f"95 % interval of the gain: {low:.2f} to {high:.2f}"
    parity = f"; {report.best.parity}" if report.best and report.best.parity else ""
    why = f"measurements vary too much ({between}): tune with a longer --budget, or"
    if (report.other_programs or 0.0) > MOST_BY_OTHERS:
        why = f"{'no other settings were tried, as ' if report.is_empty else ''}{_others(report)};"
    if report.failed:
        return f"cannot tell: {report.failed}"
    return {
        "better": f"better than your file by a factor of {report.gain or 1:.2f} ({between}){parity}",
        "as good": f"your file is as good: nothing beats it beyond the noise ({between})",
        "cannot tell": f"cannot tell: {why} measure on a quiet machine",
    }.get(report.verdict, "interrupted: this is what is known so far")


def _others(report: Report) -> str:
    share = report.other_programs
    return "the use by other programs is unknown" if share is None else f"other programs took {share:.0%} of the cores"


def lines_of(report: Report, has_table: bool = True) -> list[str]:
    """The whole report as text, or without the table of candidates."""
    rows = [("goal", goal_text(report))]
    rows.append(("machine", f"{report.cpu_model}, {report.cores} cores of it; {report.images} images"))
    rows.append(("noise", _others(report)))
    if report.profile:
        lone, answers = _ms(report.profile["lone"]), report.profile["answers"]
        rows.append(("your file", f"a single request takes {lone}, clients that wait get {answers:.0f} answers/s"))
    rows += [("search", f"{len(report.others)} settings measured beside your file")] if report.others else []
    table = aligned(rows_of(report), HEADS) if report.yours and has_table else []
    return [*aligned(rows), *table, *report.notes, *(f"not tried: {each}" for each in report.not_tried)]


# --- files


def tuned_text(report: Report, tables: Mapping[str, Any], origin: str) -> str:
    """The best configuration as TOML, with its ``origin`` and figures in comments; only after a verdict."""
    assert report.best is not None
    lines = [
        f"{origin} from {report.config} on {report.date[:10]}",
        f"{report.cpu_model}, {report.cores} cores; {report.images} images of {report.img_dir}",
        f"{goal_text(report)}: {_figure(report, report.best.measured)} without a network; {verdict_line(report)}",
        f"serve it with: {report.command}",
    ]
    return "".join(f"# {shared.printable(line)}\n" for line in lines) + "\n" + to_toml(tables)


def page(report: Report) -> str:
    """The HTML file."""
    return shared.page(f"Tuning of {report.config}", page_parts(report))


def page_parts(report: Report) -> list[str]:
    """The parts of a page: verdict, plot of latency over rate, the table, and the other lines of the report."""
    is_good = report.verdict in ("better", "as good")
    parts = [shared.verdict(verdict_line(report), is_good)]
    lines = []
    trials = [report.yours, *report.others] if report.yours else []
    for name, trial, color in zip(("yours", "no. 1"), trials, ("blue", "orange"), strict=False):
        for key in ("p99", "p50"):
            latencies = [(point.rate, 1000 * getattr(point, key)) for point in trial.points]
            points = sorted(each for each in latencies if math.isfinite(each[1]))
            lines += [Line(f"{name}, {key}", points, color, key == "p50", dots=key == "p99")] if points else []
    if lines:
        rates = [point[0] for line in lines for point in line.points if point]
        limit = ("p99 limit", 1000 * report.slo_p99) if report.rate is None and report.slo_p99 else None
        x = linear_axis("requests per second", min(rates), max(rates))
        parts.append(shared.charts([chart("Latency by rate", x, "ms", lines, limit)]))
    parts.append(shared.table(HEADS, rows_of(report), "Yours and the best", range(1, 6)))
    others = escape("\n".join(lines_of(report, has_table=False)))
    parts.append(f'<pre style="white-space: pre-wrap">{others}</pre>')
    return parts
