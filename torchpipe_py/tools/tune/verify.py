"""Measures the best candidates and the user's file in open loops and beside each other, and gives the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.statistics import crossing
from torchpipe_py.tools.tune.measure import NEVER_S, Goal, Measurer, Point
from torchpipe_py.tools.tune.search import Budget, Trial, best_first

FINALISTS = 3

MOST_PAIRS = 16
"""Pairs of loops of each finalist beside the user's file."""

LEAST_PAIRS = 4
"""The same where the time is over: fewer have an interval too wide for a verdict."""

MOST_GAIN = 1.15
"""The file is as good only if the interval of the gain ends below this factor; otherwise the verdict is open."""

LEAST_SHARE = 0.85
"""A gain counts if the candidate holds at least this share of what the file does in open loops."""

P99_SHARE = 0.75
"""Share of the limit at which the p99 is measured."""

FIRST_RATES = (0.75, 0.85)
"""Shares of the answers of a closed loop at which the search for the limit begins."""

RATE_STEP = 1.15
"""Factor for the next rate if all tried rates held, or none; at most ``MOST_STEPS`` times."""

MOST_STEPS = 5

MOST_EXCESS = 1.0
"""A p99 counts as at most e times the SLO: the queue of an overload grows without end."""


@dataclass(frozen=True)
class TuningVerdict:
    """The outcome: ``kind`` is ``better``, ``as good`` or ``cannot tell``; ``why`` is a reason for the last one.

    ``best`` is the trial that is better, else the one of the file. ``gain`` is its factor, with the 95 % interval.
    """

    kind: str
    best: Trial
    gain: float = 1.0
    interval: tuple[float, float] = (0.0, math.inf)
    why: str = ""


def verify(yours: Trial, ranked: Sequence[Trial], measurer: Measurer, goal: Goal, budget: Budget) -> TuningVerdict:
    """Measure the file and the first of ``ranked`` in open loops, then these beside the file, and compare them.

    The gains that chose them are forgotten: what won among many was also lucky.
    """
    for trial in (yours, *ranked[:FINALISTS]):
        trial.gains.clear()
        try:
            measure_open_loops(trial, measurer, goal)
        except ToolError as error:
            trial.failed = str(error)
        budget.show("verify")
    finalists = [trial for trial in ranked[:FINALISTS] if trial.points]
    for number in range(MOST_PAIRS):
        for trial in finalists:
            if number < LEAST_PAIRS or budget.left("verify") > 0:
                trial.measure(measurer, yours.candidate, [number])
                budget.show("verify")
        finalists = [trial for trial in finalists if trial.gains]
    return judge(yours, finalists, goal)


def judge(yours: Trial, finalists: Sequence[Trial], goal: Goal) -> TuningVerdict:
    """Compare the best finalist with the file.

    What answers more but holds clearly less within the SLO is not better.
    """
    if goal.rate is not None and min(each.p99 for each in (yours, *finalists)) >= NEVER_S:
        return TuningVerdict("cannot tell", yours, why=f"at {goal.rate:g} requests/s nothing answers in time")
    if not finalists:
        return TuningVerdict("cannot tell", yours, why="no other settings could be measured")
    ranked = best_first(finalists)
    holding = [trial for trial in ranked if _share_held(trial, yours, goal) > LEAST_SHARE]
    best, kind = (holding or ranked)[0], "cannot tell"
    interval = low, high = math.exp(best.interval[0]), math.exp(best.interval[1])
    if low > 1 and holding:
        kind = "better"
    elif low <= 1 and high < MOST_GAIN:
        kind = "as good"
    return TuningVerdict(kind, best if kind == "better" else yours, math.exp(best.gain), interval)


def _share_held(trial: Trial, yours: Trial, goal: Goal) -> float:
    """The rate of a trial in open loops, as a share of that of the file."""
    return trial.limit / yours.limit if goal.rate is None else yours.p99 / trial.p99


def measure_open_loops(trial: Trial, measurer: Measurer, goal: Goal) -> None:
    """Measure a limit, trying rates until two enclose it, and the p99 below it; with a rate, only the p99 at it."""
    rate = goal.rate
    if rate is None:
        answers = statistics.median(trial.figures)
        points = [measurer.point(trial.candidate, share * answers, 0) for share in FIRST_RATES]
        for _ in range(MOST_STEPS):
            held, rates = [point.p99 <= goal.slo for point in points], [point.rate for point in points]
            if any(held) and not all(held):
                break
            rate = max(rates) * RATE_STEP if all(held) else min(rates) / RATE_STEP
            points.append(measurer.point(trial.candidate, rate, 0))
        trial.points, trial.limit = points, limit_of(points, goal.slo)
        rate = P99_SHARE * trial.limit
    trial.points.append(measurer.point(trial.candidate, rate, 0))
    trial.p99 = min(trial.points[-1].p99, NEVER_S)


def limit_of(points: Sequence[Point], slo: float) -> float:
    """The rate at which the p99 crosses ``slo``, interpolated in log p99."""
    excess = [math.log(min(point.p99, NEVER_S) / slo) for point in points]
    bounded = [max(-MOST_EXCESS, min(MOST_EXCESS, each)) for each in excess]
    return crossing([point.rate for point in points], bounded, RATE_STEP)
