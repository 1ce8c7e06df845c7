"""What candidates really do: open loops in turns, a measured limit of each, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

from torchpipe_py.tools.tune.search import Goal, Prediction, quantile
from torchpipe_py.tools.tune.shapes import Candidate
from torchpipe_py.tools.tune.worker import Team

FACTORS = (0.9, 1.0, 1.1)
"""Of the predicted limit, or of the rate that is asked for."""

FAR_OFF = 0.2
"""Between prediction and measurement: more, and only measurements count."""

LEAST_TURNS, TURNS, MOST_TURNS = 3, 5, 9
LEAST_CALLS = 20  # of an open loop
BUSY = 0.15
"""The share of the cores that other programs may take before a tie says nothing."""

_HEAD_START_S = 0.05
_EXTRA_S = 0.2  # that an open loop takes beside its length
_LEAST_S, _MOST_S = 0.15, 2.0  # of one open loop
_NEVER_S = 60.0  # for a p99 without an answer
_STEP = 1.15  # of the rate, where all that were tried held, or none did
_MOST_STEPS = 5
_T95 = (math.inf, 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # by degrees of freedom


@dataclass(frozen=True)
class Point:
    """One open loop: requests per second, and seconds; infinite where more than 1 % had no answer."""

    rate: float
    p50: float
    p99: float


@dataclass
class Trial:
    """A candidate that is measured: ``figures`` has one for each turn, a limit in requests per second, or a p99."""

    candidate: Candidate
    predicted: Prediction
    centre: float
    points: list[Point] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)

    @property
    def figure(self) -> float:
        """The middle one."""
        return statistics.median(self.figures)


@dataclass(frozen=True)
class Verdict:
    """``kind`` is ``better``, ``as good`` or ``cannot tell``; ``gain`` is a factor with its 95 % interval."""

    kind: str
    best: Trial
    gain: float
    interval: tuple[float, float]


class Service:
    """Runs a candidate as worker processes, one candidate at a time; an open loop takes ``seconds``."""

    def __init__(self, team: Team) -> None:
        self._team, self._workers, self.seconds = team, 1, _LEAST_S

    def share_out(self, seconds: float, trials: int) -> None:
        """Make open loops as long as there is time for, with so many trials to measure."""
        self.seconds = min(_MOST_S, max(_LEAST_S, seconds / (TURNS * trials * len(FACTORS)) - _EXTRA_S))

    def build(self, candidate: Candidate) -> list[Any]:
        """Make the pipes of all its workers; the first results."""
        self._workers = candidate.workers
        results: list[Any] = self._team.all("build", candidate.config(), self._workers, most=self._workers)[0]
        return results

    def open_loop(self, dues: Sequence[float], patience: float) -> list[float]:
        """Latencies in seconds, sorted; workers take turns."""
        start, numbered = perf_counter() + _HEAD_START_S, list(enumerate(dues))
        shares = [(numbered[worker :: self._workers], start, patience) for worker in range(self._workers)]
        return sorted(latency for each in self._team.each("open_loop", shares) for latency in each)

    def closed_loop(self, clients: int, seconds: float) -> float:
        """Requests per second, without the first tenth of the time."""
        start = perf_counter() + _HEAD_START_S
        each = max(1, clients // self._workers)
        ends = self._team.all("closed_loop", each, seconds, start, most=self._workers)
        counted = [end for worker in ends for end in worker if seconds / 10 <= end < seconds]
        return len(counted) / (0.9 * seconds)

    def measure(self, goal: Goal, rate: float) -> Point:
        """One open loop at ``rate``."""
        dues = goal.dues(rate, max(LEAST_CALLS, round(rate * self.seconds)))
        latencies = self.open_loop(dues, 2 * goal.slo + 0.2)
        return Point(rate, quantile(latencies, 0.5), quantile(latencies, 0.99))


def turn(service: Service, trial: Trial, goal: Goal) -> None:
    """Measure the trial around its centre, further up or down until its limit lies between two rates."""
    service.build(trial.candidate)
    points = [service.measure(goal, factor * trial.centre) for factor in FACTORS]
    for _ in range(_MOST_STEPS if goal.rate is None else 0):
        held = [point.p99 <= goal.slo for point in points]
        if any(held) and not all(held):
            break
        rates = [point.rate for point in points]
        points.append(service.measure(goal, max(rates) * _STEP if all(held) else min(rates) / _STEP))
    trial.points += points
    trial.figures.append(limit_of(points, goal.slo) if goal.rate is None else min(points[1].p99, _NEVER_S))
    if goal.rate is None:
        trial.centre = trial.figure


def limit_of(points: Sequence[Point], slo: float) -> float:
    """The rate at which the p99 passes ``slo``, in log p99: where as many rates that held lie above as others below.

    A tail is noisy near the limit: the middle of all places where neighbouring rates pass it.
    """
    ordered = sorted(points, key=lambda point: point.rate)
    places = []
    for low, high in pairwise(ordered):
        if (low.p99 <= slo) != (high.p99 <= slo):
            finite = max(low.p99, high.p99) < math.inf
            part = math.log(slo / low.p99) / math.log(high.p99 / low.p99) if finite else float(high.p99 <= slo)
            places.append(low.rate + part * (high.rate - low.rate))
    if places:
        return statistics.median(places)
    return _STEP * ordered[-1].rate if ordered[-1].p99 <= slo else ordered[0].rate / _STEP


# --- the verdict


def judge(yours: Trial, others: Sequence[Trial], goal: Goal, disturbed: float) -> Verdict:
    """Hold the best of the others against the file as it is, turn by turn; others took ``disturbed`` of the cores."""
    best = max(others, key=lambda trial: goal.sign * trial.figure, default=yours)
    logs = [goal.sign * math.log(one / other) for one, other in zip(best.figures, yours.figures, strict=False)]
    low, high = interval_of(logs)
    kind = "cannot tell" if disturbed > BUSY and high >= 0 else "as good"
    kind = "better" if best is not yours and low > 0 else kind
    gain = statistics.mean(logs) if logs else 0.0
    return Verdict(kind, best if kind != "as good" else yours, math.exp(gain), (math.exp(low), math.exp(high)))


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """95 % of their mean."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = _T95[min(len(values), len(_T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def is_off(trials: Sequence[Trial], goal: Goal) -> str:
    """Why predictions are not to be trusted: an error of more than ``FAR_OFF``, or another order; else nothing."""
    for trial in trials:
        error = trial.predicted.figure(goal) / trial.figure - 1
        if abs(error) > FAR_OFF:
            return f"the prediction of {trial.candidate} is {error:+.0%} off"
    for one, other in pairwise(trials):
        low, high = interval_of([math.log(a / b) for a, b in zip(one.figures, other.figures, strict=False)])
        is_more = one.predicted.figure(goal) > other.predicted.figure(goal)
        if high < 0 if is_more else low > 0:
            return f"{one.candidate} and {other.candidate} come in another order than predicted"
    return ""


def halve(service: Service, trials: list[Trial], goal: Goal, left: Callable[[], float]) -> list[Trial]:
    """Successive halving: a turn for each, keep the better half, until two are left or the time is over."""
    while len(trials) > 2 and left() > 0:
        for trial in trials:
            if left() > 0:
                turn(service, trial, goal)
        known = sorted((trial for trial in trials if trial.figures), key=lambda trial: -goal.sign * trial.figure)
        trials = known[: max(2, len(known) // 2)]
    return trials
