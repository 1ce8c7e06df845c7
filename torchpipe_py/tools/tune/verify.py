"""Measures candidates: open loops in turns, the limit of each, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from time import perf_counter

from torchpipe_py.tools.tune.search import Goal, Point, Prediction, quantile
from torchpipe_py.tools.tune.shapes import Candidate
from torchpipe_py.tools.tune.worker import Team

FACTORS = (0.95, 1.05)
"""Factors of the predicted limit at which the search for the measured one begins."""

FAR_OFF = 0.2
"""Relative error of predictions above which more candidates are measured."""

MOST_GAIN = 1.25
"""The file is as good only if the interval of the gain ends below this factor; otherwise the verdict is open."""

LEAST_TURNS, TURNS, MOST_TURNS = 3, 4, 9
CLIENTS_PER_CORE = 10
"""Clients of a measured closed loop."""

BUSY = 0.15
"""The share of the cores that other programs may use; with more, there is no verdict."""

_HEAD_START_S = 0.05
_WARM_UP_CLIENTS, _WARM_UP_S, _WARM_UP_ON_GPU_S = 8, 0.15, 0.5
_NEVER_S = 60.0  # in place of an infinite p99
_STEP = 1.15  # factor for the rate if all tried rates held, or none
_MOST_STEPS = 5
_FARTHEST = 1.0  # logarithm of p99 to SLO; more counts as much: the queue of an overload grows without end
_T95 = (math.inf, 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # by degrees of freedom


@dataclass
class Trial:
    """A measured candidate: ``figures`` has one entry per turn, a limit in requests per second or a p99.

    ``p99s`` are measured at the rate for which ``predicted`` has one. ``parity`` says how its results differ from those
    of the original file, empty if they do not.
    """

    candidate: Candidate
    predicted: Prediction
    centre: float
    points: list[Point] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    parity: str = ""

    @classmethod
    def around(cls, candidate: Candidate, limit: float, rate: float) -> Trial:
        """Without a prediction: the search for the limit begins at ``limit``."""
        return cls(candidate, Prediction(candidate, limit, rate, math.inf, (), 0.0), limit)

    @property
    def figure(self) -> float:
        """The median figure."""
        return statistics.median(self.figures)


class Service:
    """Runs a candidate as worker processes, one candidate at a time."""

    def __init__(self, team: Team) -> None:
        self._team, self._workers = team, 1
        self._built: Candidate | None = None

    def build(self, candidate: Candidate) -> None:
        """Build and warm up the pipes of all its workers, unless they are the ones that run."""
        if candidate is self._built:
            return
        self._built, self._workers = None, candidate.workers
        self._team.build(candidate.config(), self._workers, candidate.engines)
        for clients in (_WARM_UP_CLIENTS, CLIENTS_PER_CORE * len(self._team)):  # small batches and large ones
            self.closed_loop(clients, _WARM_UP_ON_GPU_S if self._team.has_gpu else _WARM_UP_S)
        self._built = candidate

    def open_loop(self, dues: Sequence[float], grace_s: float) -> list[float]:
        """Sorted latencies in seconds; workers take turns."""
        start, numbered = perf_counter() + _HEAD_START_S, list(enumerate(dues))
        shares = [(numbered[worker :: self._workers], start, grace_s) for worker in range(self._workers)]
        return sorted(latency for each in self._team.each("open_loop", shares) for latency in each)

    def closed_loop(self, clients: int, seconds: float) -> float:
        """Requests per second, without the first tenth of the time."""
        start = perf_counter() + _HEAD_START_S
        each = max(1, clients // self._workers)
        runs = self._team.all("closed_loop", each, seconds, start, most=self._workers)
        counted = sum(1 for ends in runs for end in ends if seconds / 10 <= end < seconds)
        return counted / (0.9 * seconds)

    def measure(self, goal: Goal, rate: float) -> Point:
        """Measure one open loop at ``rate``."""
        latencies = self.open_loop(goal.dues(rate), 2 * goal.slo + 0.2)
        return Point(rate, quantile(latencies, 0.5), quantile(latencies, 0.99))


def turn(service: Service, trial: Trial, goal: Goal) -> None:
    """Measure the trial at the rate of its predicted p99, then around its limit until two rates enclose it."""
    service.build(trial.candidate)
    points = [service.measure(goal, trial.predicted.rate or trial.centre)]
    trial.p99s.append(points[0].p99)
    if goal.rate is None:
        points += [service.measure(goal, factor * trial.centre) for factor in FACTORS]
        for _ in range(_MOST_STEPS):
            held = [point.p99 <= goal.slo for point in points]
            if any(held) and not all(held):
                break
            rates = [point.rate for point in points]
            points.append(service.measure(goal, max(rates) * _STEP if all(held) else min(rates) / _STEP))
        trial.centre = limit_of(points, goal.slo)
    trial.points += points
    trial.figures.append(trial.centre if goal.rate is None else min(points[0].p99, _NEVER_S))


def limit_of(points: Sequence[Point], slo: float) -> float:
    """The rate at which the p99 crosses ``slo``, interpolated in log p99.

    A stall of the machine may spoil the p99 at a low rate, so the points that contradict the crossing are as few and as
    near to the SLO as can be.
    """
    ordered = sorted(points, key=lambda point: point.rate)
    far = [max(-_FARTHEST, min(_FARTHEST, math.log(min(point.p99, _NEVER_S) / slo))) for point in ordered]

    def contradicts(cut: int) -> float:
        return sum(max(0.0, each) for each in far[:cut]) - sum(min(0.0, each) for each in far[cut:])

    cut = min(range(len(far) + 1), key=contradicts)
    if cut in (0, len(far)):
        return _STEP * ordered[-1].rate if cut else ordered[0].rate / _STEP
    part = far[cut - 1] / (far[cut - 1] - far[cut])
    return ordered[cut - 1].rate + part * (ordered[cut].rate - ordered[cut - 1].rate)


def typical_of(trial: Trial, goal: Goal, share: float = 1.0) -> Point:
    """The medians of the points nearest to a ``share`` of the limit, as many as turns; at the limit the p99 is the SLO.

    With a rate as the goal, those of all points, which are at that rate.
    """
    limit = goal.rate or trial.figure
    near = sorted(trial.points, key=lambda point: abs(point.rate - share * limit))[: len(trial.figures)]
    rate, p50, p99 = (statistics.median(getattr(point, key) for point in near) for key in ("rate", "p50", "p99"))
    return Point(rate, p50, p99) if goal.rate or share < 1 else Point(limit, p50, goal.slo)


# --- the verdict


def judge(yours: Trial, others: Sequence[Trial], goal: Goal) -> tuple[str, Trial, float, tuple[float, float]]:
    """Compare the best candidate with the original file, turn by turn.

    ``better``, ``as good`` or ``cannot tell``, the best, and the factor of the gain with its 95 % interval.
    """
    best = best_of(others, goal)[0] if others else yours
    logs = _ratios(best, yours, goal)
    low, high = interval_of(logs)
    kind = "better" if low > 0 else "as good" if high < math.log(MOST_GAIN) else "cannot tell"
    gain = statistics.mean(logs) if logs else 0.0
    return kind, best if kind == "better" else yours, math.exp(gain), (math.exp(low), math.exp(high))


def best_of(trials: Sequence[Trial], goal: Goal) -> list[Trial]:
    """The trials sorted by their figures, the best first."""
    return sorted(trials, key=lambda trial: -goal.sign * trial.figure)


def _ratios(one: Trial, other: Trial, goal: Goal) -> list[float]:
    """Logarithms of how much better one is, turn by turn."""
    return [goal.sign * math.log(a / b) for a, b in zip(one.figures, other.figures, strict=False)]


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of their mean."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = _T95[min(len(values), len(_T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half


def is_off(trials: Sequence[Trial], goal: Goal, repeated: Sequence[float]) -> str:
    """Why predictions cannot be trusted: an error above ``FAR_OFF``, or another order; else empty.

    Figures that differ by a smaller factor than the ``repeated`` ones of one candidate may be in any order.
    """
    for trial in trials:
        error = trial.predicted.figure(goal) / trial.figure - 1
        if abs(error) > FAR_OFF:
            return f"at first, {trial.candidate} was predicted {abs(error):.0%} too {'high' if error > 0 else 'low'}"
    ordered = sorted(trials, key=lambda trial: -goal.sign * trial.predicted.figure(goal))
    for better, worse in combinations(ordered, 2):
        if (worse.figure / better.figure) ** goal.sign > max(repeated) / min(repeated):
            return f"at first, {worse.candidate} was better than {better.candidate}, and predicted to be worse"
    return ""
