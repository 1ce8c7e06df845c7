"""Measures candidates: each beside the original file in turns, its limit in open loops, and the verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.search import Goal, Point, Prediction, quantile
from torchpipe_py.tools.tune.shapes import Candidate
from torchpipe_py.tools.tune.worker import Team

FACTORS = (0.95, 1.05)
"""Factors of the predicted limit at which the search for the measured one begins."""

FAR_OFF = 0.2
"""Relative error of predictions above which the report says so."""

MOST_GAIN = 1.15
"""The file is as good only if the interval of the gain ends below this factor; otherwise the verdict is open."""

LEAST_SHARE = 0.85
"""The least share of the file's own limit at which a gain of throughput counts."""

CLIENTS_PER_CORE = 10
"""The most clients of a measured closed loop, per core."""

BUSY = 0.15
"""The share of the cores that other programs may use; with more, there is no verdict."""

_HEAD_START_S = 0.05
_MOST_BUILT = 4  # candidates whose pipes are kept
_MOST_OF_GPU = 0.5  # share of its free memory, for those: batches take more than single images
_WARM_UP_CLIENTS, _WARM_UP_S, _WARM_UP_ON_GPU_S = 8, 0.15, 0.5
NEVER_S = 60.0
"""In place of an infinite p99."""

_LEAST = 1e-3  # in place of no request per second
_STEP = 1.15  # factor for the rate if all tried rates held, or none
_MOST_STEPS = 5
_FARTHEST = 1.0  # logarithm of p99 to SLO; more counts as much: the queue of an overload grows without end
_T95 = (math.inf, 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # by degrees of freedom


@dataclass
class Trial:
    """A measured candidate: ``gains`` are logarithms of how much better than the original file it was beside it.

    ``figures`` has one entry per turn of open loops, a limit in requests per second or a p99. ``p99s`` are measured at
    the rate for which ``predicted`` has one. ``looks`` counts the rounds in which gains were measured. ``parity`` says
    how its results differ from those of the file, empty if they do not.
    """

    candidate: Candidate
    predicted: Prediction
    centre: float
    points: list[Point] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    looks: int = 0
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
    """Runs candidates as worker processes, one at a time; several stay built, so that they can take turns.

    ``bytes_of`` predicts the GPU memory of a candidate, which may have ``gpu_memory`` bytes. Together they take no more
    than that, and no more than half of what is free.
    """

    def __init__(
        self, team: Team, bytes_of: Callable[[Candidate], int] = lambda _: 0, gpu_memory: float = math.inf
    ) -> None:
        self._team, self._slot, self._workers = team, 0, 1
        self._bytes_of, self._gpu_memory = bytes_of, gpu_memory
        self._together = min(gpu_memory, _MOST_OF_GPU * team.gpu_free())
        self._built: dict[int, Candidate] = {}  # by slot, the last used one at the end

    def build(self, candidate: Candidate) -> None:
        """Measure this one from now on: build and warm up the pipes of all its workers unless they are there.

        Raises ``ToolError`` if that fails, or takes too much GPU memory.
        """
        known, self._workers = [slot for slot, built in self._built.items() if built is candidate], candidate.workers
        if known:
            (self._slot,) = known
            del self._built[self._slot]
        else:
            self._check(self._bytes_of(candidate))
            while self._built and not self._has_room(candidate):
                oldest = next(iter(self._built))
                del self._built[oldest]
                self._team.drop(oldest)
            self._slot = next(slot for slot in range(_MOST_BUILT) if slot not in self._built)
            free = self._team.gpu_free()
            try:
                self._team.build(self._slot, candidate.config(), self._workers, candidate.engines)
                for clients in (_WARM_UP_CLIENTS, CLIENTS_PER_CORE * len(self._team)):  # small batches and large ones
                    self.closed_loop(clients, _WARM_UP_ON_GPU_S if self._team.has_gpu else _WARM_UP_S)
                self._check(free - self._team.gpu_free())
            except ToolError:
                self._team.drop(self._slot)  # NOTE: other workers may have built theirs
                raise
        self._built[self._slot] = candidate

    def _check(self, needed: int) -> None:
        if needed > self._gpu_memory:
            raise ToolError(f"needs {needed / 2**30:.1f} GiB, over --gpu-memory")

    def _has_room(self, candidate: Candidate) -> bool:
        """Whether this one fits beside those that are built."""
        together = sum(map(self._bytes_of, [*self._built.values(), candidate]))
        return len(self._built) < _MOST_BUILT and together <= self._together

    def open_loop(self, dues: Sequence[float], grace_s: float) -> list[float]:
        """Sorted latencies in seconds; workers take turns."""
        start, numbered = perf_counter() + _HEAD_START_S, list(enumerate(dues))
        shares = [(self._slot, numbered[worker :: self._workers], start, grace_s) for worker in range(self._workers)]
        return sorted(latency for each in self._team.each("open_loop", shares) for latency in each)

    def closed_loop(self, clients: int, seconds: float) -> float:
        """Requests per second, without the first tenth of the time."""
        start, ends = perf_counter() + _HEAD_START_S, [clients * at // self._workers for at in range(self._workers + 1)]
        shares = [(self._slot, max(1, last - first), seconds, start) for first, last in pairwise(ends)]
        runs = self._team.each("closed_loop", shares)
        counted = sum(1 for ends in runs for end in ends if seconds / 10 <= end < seconds)
        return counted / (0.9 * seconds)

    def measure(self, goal: Goal, rate: float, turn: int = 0) -> Point:
        """Measure one open loop at ``rate``, with the arrivals of a ``turn``."""
        latencies = self.open_loop(goal.dues(rate, turn=turn), 2 * goal.slo + 0.2)
        return Point(rate, quantile(latencies, 0.5), quantile(latencies, 0.99))


def pairs_of(
    service: Service, candidate: Candidate, base: Candidate, numbers: Iterable[int], figure: Callable[[int], float]
) -> list[tuple[float, float]]:
    """A figure of a candidate and of ``base``, more is better, in turns that are numbered: a machine varies."""
    pairs = []
    for number in numbers:
        step, measured = 1 if number % 2 else -1, list[float]()  # ``base`` first, so that it stays built
        for each in (candidate, base)[::step]:
            service.build(each)
            measured.append(max(_LEAST, figure(number)))
        one, other = measured[::step]
        pairs.append((one, other))
    return pairs


def gains_of(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """Logarithms of how much better the first of each pair is."""
    return [math.log(one / other) for one, other in pairs]


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
    trial.figures.append(trial.centre if goal.rate is None else min(points[0].p99, NEVER_S))


def limit_of(points: Sequence[Point], slo: float) -> float:
    """The rate at which the p99 crosses ``slo``, interpolated in log p99.

    A stall of the machine may spoil the p99 at a low rate, so the points that contradict the crossing are as few and as
    near to the SLO as can be.
    """
    ordered = sorted(points, key=lambda point: point.rate)
    far = [max(-_FARTHEST, min(_FARTHEST, math.log(min(point.p99, NEVER_S) / slo))) for point in ordered]

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
    """Compare the best candidate with the original file.

    ``better``, ``as good`` or ``cannot tell``, the best, and the factor of the gain with its 95 % interval. ``others``
    are the best first; what answers more but holds clearly less within the SLO is not better.
    """
    holding = [each for each in others if (each.figure / yours.figure) ** goal.sign > LEAST_SHARE]
    best = next(iter([*holding, *others]), yours)
    gain, (low, high) = statistics.mean(best.gains or [0.0]), interval_of(best.gains)
    if low > 0:
        kind = "better" if holding else "cannot tell"
    else:
        kind = "as good" if high < math.log(MOST_GAIN) else "cannot tell"
    return kind, best if kind == "better" else yours, math.exp(gain), (math.exp(low), math.exp(high))


def best_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials sorted by their gains, the best first."""
    return sorted(trials, key=lambda trial: -statistics.mean(trial.gains))


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of their mean."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = _T95[min(len(values), len(_T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values) - half, statistics.mean(values) + half
