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
from torchpipe_py.tools.tune.worker import Worker, answers_of, ask_all

FACTORS = (0.9, 1.0, 1.1)
"""Of the predicted limit, or of the rate that is asked for."""

FAR_OFF = 0.2
"""Between prediction and measurement: more, and only measurements count."""

LEAST_TURNS = 3
BUSY = 0.15
"""The share of the cores that other programs may take before a tie says nothing."""

_HEAD_START_S = 0.05
_EXTRA_S = 0.2  # that an open loop takes beside its length
_LEAST_S, _MOST_S = 0.15, 3.0  # of one open loop
_NEVER_S = 60.0  # for a p99 without an answer
_STEP = 1.15  # of the rate, where all of a turn's held, or none did
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
    predicted: Prediction | None
    centre: float
    points: list[Point] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)

    @property
    def figure(self) -> float:
        """The middle one."""
        return statistics.median(self.figures)

    def interval(self) -> tuple[float, float]:
        """95 % of its mean, by the turns."""
        return _interval(self.figures)


@dataclass(frozen=True)
class Verdict:
    """``kind`` is ``better``, ``as good`` or ``cannot tell``; ``gain`` is a factor with its 95 % interval."""

    kind: str
    best: Trial
    gain: float
    interval: tuple[float, float]


class Service:
    """Runs candidates as worker processes, one candidate at a time."""

    def __init__(self, workers: Sequence[Worker], images: int) -> None:
        self._workers, self._images = workers, images
        self._used: Sequence[Worker] = ()
        self.seconds = _LEAST_S
        """Of one open loop."""

    def share_out(self, seconds: float, trials: int) -> None:
        """Make open loops as long as there is time for, with so many trials to measure."""
        self.seconds = min(_MOST_S, max(_LEAST_S, seconds / (LEAST_TURNS * trials * len(FACTORS)) - _EXTRA_S))

    def build(self, candidate: Candidate) -> list[Any]:
        """Make the pipes of all its workers; the results of the first images."""
        self._used = self._workers[: candidate.workers]
        results: list[Any] = ask_all(self._used, "build", candidate.config(), candidate.workers)[0]
        return results

    def open_loop(self, dues: Sequence[float], patience: float) -> list[float]:
        """Latencies in seconds; workers take turns."""
        start, count = perf_counter() + _HEAD_START_S, len(self._used)
        for number, worker in enumerate(self._used):
            worker.ask("open_loop", [*enumerate(dues)][number::count], start, patience)
        return [latency for answer in answers_of(self._used) for latency in answer]

    def closed_loop(self, clients: int, seconds: float) -> float:
        """Requests per second."""
        start = perf_counter() + _HEAD_START_S
        for number, worker in enumerate(self._used):
            share = len(range(number, clients, len(self._used)))
            worker.ask("closed_loop", max(1, share), seconds, start)
        ends = [at for answer in answers_of(self._used) for at, _ in answer if seconds / 10 <= at < seconds]
        return len(ends) / (0.9 * seconds)


def turn(service: Service, trial: Trial, goal: Goal) -> None:
    """Measure the trial at three rates around its centre; the next turn's centre is where its limit seems to be."""
    service.build(trial.candidate)
    points = [measure(service, goal, factor * trial.centre) for factor in FACTORS]
    trial.points += points
    if goal.rate is not None:
        trial.figures.append(min(points[1].p99, _NEVER_S))
        return
    trial.figures.append(limit_of(points, goal.slo))
    trial.centre = trial.figures[-1]


def measure(service: Service, goal: Goal, rate: float) -> Point:
    """One open loop."""
    dues = goal.dues(rate, max(20, round(rate * service.seconds)))
    latencies = sorted(service.open_loop(dues, 2 * goal.slo + 0.2))
    return Point(rate, quantile(latencies, 0.5), quantile(latencies, 0.99))


def limit_of(points: Sequence[Point], slo: float) -> float:
    """The rate at which the p99 passes ``slo``, between the last that held and the first that did not, in log p99."""
    held = [point for point in points if point.p99 <= slo]
    if len(held) == len(points):
        return _STEP * points[-1].rate
    first = next(point for point in points if point.p99 > slo)
    before = [point for point in held if point.rate < first.rate]
    if not before:
        return points[0].rate / _STEP
    last = before[-1]
    if first.p99 == math.inf:
        return last.rate
    part = math.log(slo / last.p99) / math.log(first.p99 / last.p99) if first.p99 > last.p99 else 0.0
    return last.rate + part * (first.rate - last.rate)


# --- the verdict


def judge(yours: Trial, others: Sequence[Trial], goal: Goal, disturbed: float) -> Verdict:
    """Hold the best of the others against the file as it is, turn by turn."""
    sign = -1 if goal.rate is not None else 1
    best = max(others, key=lambda trial: sign * trial.figure, default=yours)
    logs = [sign * math.log(a / b) for a, b in zip(best.figures, yours.figures, strict=False)]
    low, high = _interval(logs)
    gain = statistics.mean(logs) if logs else 0.0
    interval = math.exp(low), math.exp(high)
    if best is not yours and low > 0:
        return Verdict("better", best, math.exp(gain), interval)
    kind = "cannot tell" if disturbed > BUSY else "as good"
    return Verdict(kind, best if kind != "as good" else yours, math.exp(gain), interval)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return -math.inf, math.inf
    mean, spread = statistics.mean(values), statistics.stdev(values)
    half = _T95[min(len(values), len(_T95)) - 1] * spread / math.sqrt(len(values))
    return mean - half, mean + half


def is_off(trials: Sequence[Trial], goal: Goal) -> str:
    """Why predictions are not to be trusted: an error of more than ``FAR_OFF``, or another order; else nothing."""
    known = [trial for trial in trials if trial.predicted is not None and trial.figures]
    pairs = [
        (trial, trial.predicted.p99 if goal.rate is not None else trial.predicted.limit)
        for trial in known
        if trial.predicted
    ]
    for trial, predicted in pairs:
        error = predicted / trial.figure - 1
        if abs(error) > FAR_OFF:
            return f"the prediction of {trial.candidate} is {error:+.0%} off"
    for (one, first), (other, second) in pairwise(pairs):
        logs = [math.log(a / b) for a, b in zip(one.figures, other.figures, strict=False)]
        low, high = _interval(logs)
        if (first > second and high < 0) or (first < second and low > 0):
            return f"{other.candidate} does better than {one.candidate}, unlike predicted"
    return ""


def halve(
    service: Service, trials: list[Trial], goal: Goal, left: Callable[[], float], progress: Callable[[str, float], None]
) -> list[Trial]:
    """Successive halving: a turn for each, keep the better half, until two are left or the time is over."""
    sign = -1 if goal.rate is not None else 1
    while len(trials) > 2 and left() > 0:
        for trial in trials:
            if left() > 0:
                turn(service, trial, goal)
        known = [trial for trial in trials if trial.figures]
        trials = sorted(known, key=lambda trial: -sign * trial.figure)[: max(2, len(known) // 2)]
        progress("measure", 1.0 / len(trials))
    return trials
