"""From a profile to predictions, and from predictions to the candidates that are worth a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from torchpipe_py.plan.build import Pipeline
from torchpipe_py.tools.tune.profile import Profile
from torchpipe_py.tools.tune.shapes import Candidate, Shape, knobs_of
from torchpipe_py.tools.tune.simulate import Cost, Machine, Simulation

CALLS = 600
"""Requests of a simulated open loop while candidates are compared; of the last look ``EXACT``."""

EXACT = 2000
CLIENTS = 64
"""Of the simulated closed loop that finds the throughput at which a candidate is full."""

MOST_TAIL = 4.0
"""Of a p99 that was measured, as a multiple of the simulated one: more is an accident."""

MARGIN = 1.01
"""A change must gain more than this factor: of equal ones the simpler stays."""

TIMEOUTS = (0.0, 1.0, 2.0, 5.0, 10.0)
_FULL = 0.98  # of the throughput of a closed loop: beyond it the queue grows
_STEPS = 5  # of the bisection
_HAND_OVERS = tuple(2e-5 * 1.5**step for step in range(11))
_NEIGHBOURS = (0.5, 1.0, 1.5)
_MOST_ERROR = 3.0


@dataclass(frozen=True)
class Goal:
    """The most requests per second of which 99 % are answered within ``slo``; or, at ``rate``, the shortest p99.

    ``times`` are a schedule of arrivals with a mean of one per second, the same for all candidates.
    """

    slo: float
    rate: float | None
    times: Sequence[float]

    @property
    def sign(self) -> int:
        """-1 where less is better."""
        return 1 if self.rate is None else -1

    def dues(self, rate: float, calls: int) -> list[float]:
        """When the first calls come at ``rate``."""
        return [time / rate for time in self.times[:calls]]


@dataclass(frozen=True)
class Prediction:
    """Of a candidate: requests per second within the goal, p99 and p50 at that rate in seconds, and where it waits."""

    candidate: Candidate
    limit: float
    p99: float
    p50: float
    waits: tuple[str, ...]
    score: float

    def figure(self, goal: Goal) -> float:
        """What is measured as well: the limit, or the p99."""
        return self.limit if goal.rate is None else self.p99


class Predictor:
    """Simulates candidates, as they will be measured."""

    def __init__(self, profile: Profile, images: int, fitted: Calibration, goal: Goal) -> None:
        self.profile, self.goal, self.simulated = profile, goal, 0
        self._images, self._fitted = images, fitted

    def simulation(self, candidate: Candidate, plan: Pipeline, costs: dict[str, Cost]) -> Simulation:
        """A new one, at rest."""
        self.simulated += 1
        return Simulation([plan] * candidate.workers, costs, self._fitted.machine)

    def predict(self, candidate: Candidate, floor: float = 0.0, calls: int = CALLS) -> Prediction | None:
        """What the candidate does; ``None`` as soon as it is clear that its score is below ``floor``."""
        plan, costs = candidate.plan(), self.profile.costs(candidate, self._images)
        goal, simulation = self.goal, self.simulation(candidate, plan, costs)
        full = _FULL * simulation.closed_loop(CLIENTS, calls)[0]

        def at(rate: float) -> Prediction:
            run = self.simulation(candidate, plan, costs)
            latencies = sorted(run.open_loop(goal.dues(rate, calls)))
            p50, p99 = quantile(latencies, 0.5), quantile(latencies, 0.99) * self._fitted.tail
            score = rate if goal.rate is None else 1 / p99 if full > rate else 0.0
            return Prediction(candidate, rate, p99, p50, _waits(run), score)

        if goal.rate is not None:
            found = at(goal.rate)
            return found if found.score >= floor else None
        if full < floor:
            return None
        best = Prediction(candidate, 0.0, math.inf, math.inf, _waits(simulation), 0.0)
        rate = floor or full / 2
        for _ in range(_STEPS):
            found = at(rate)
            if found.p99 <= goal.slo:
                best = found
            elif floor and not best.limit:
                return None
            else:
                full = rate
            rate = (best.limit + full) / 2
        return best


def _waits(simulation: Simulation) -> tuple[str, ...]:
    """Nodes by the time that requests waited there, the longest first."""
    return tuple(sorted(simulation.waited, key=lambda node: -simulation.waited[node]))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values; infinite without any."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.inf


# --- calibration


@dataclass(frozen=True)
class Calibration:
    """The machine that explains best what was measured of the file as it is, and how far it still is off.

    ``measured`` has requests per second of a closed loop, and p50 and p99 of an open loop, seconds. Errors are shares:
    0.1 is 10 % too much.
    """

    machine: Machine
    measured: tuple[float, float, float]
    throughput_error: float
    p99_error: float

    @property
    def tail(self) -> float:
        """The p99 that was measured as a multiple of the simulated one: what the system adds now and then."""
        return min(MOST_TAIL, max(1.0, 1 / (1 + self.p99_error)))


def calibrate(
    profile: Profile,
    images: int,
    goal: Goal,
    base: Candidate,
    clients: int,
    rate: float,
    measured: tuple[float, float, float],
) -> Calibration:
    """Find what a hand-over costs and how neighbours weigh, from a closed loop of ``clients`` and an open one."""
    plan, costs = base.plan(), profile.costs(base, images)

    def run(machine: Machine) -> tuple[float, float, float]:
        closed = Simulation([plan] * base.workers, costs, machine).closed_loop(clients, CALLS)[0]
        latencies = sorted(Simulation([plan] * base.workers, costs, machine).open_loop(goal.dues(rate, CALLS)))
        return closed, quantile(latencies, 0.5), quantile(latencies, 0.99)

    def off(found: tuple[float, float, float]) -> float:
        """Throughput and median; the tail is what the prediction is held against."""
        return _error(found[0], measured[0]) + 0.3 * _error(found[1], measured[1])

    tried = {}
    for hand_over in _HAND_OVERS:
        machine = Machine(profile.cores, hand_over)
        tried[machine] = run(machine)
    best = min(tried, key=lambda machine: off(tried[machine]))
    for neighbours in _NEIGHBOURS:
        machine = replace(best, neighbours=neighbours)
        tried.setdefault(machine, run(machine))
    best = min(tried, key=lambda machine: off(tried[machine]))
    closed, _, p99 = tried[best]
    return Calibration(best, measured, closed / measured[0] - 1, p99 / measured[2] - 1)


def _error(found: float, measured: float) -> float:
    """Of a prediction, in logarithms; the most that counts where requests were not answered in time."""
    return min(_MOST_ERROR, abs(math.log(found / measured))) if measured < math.inf else _MOST_ERROR


# --- the search


class Search:
    """Looks for the best candidates: greedily, at the node where requests wait longest, from each shape on."""

    def __init__(
        self, predictor: Predictor, shapes: Sequence[Shape], has_gpu: bool, allowed: Callable[[Candidate], bool]
    ) -> None:
        self.predictor, self._shapes, self._has_gpu, self._allowed = predictor, shapes, has_gpu, allowed
        self.found: dict[tuple[str, str], Prediction] = {}
        self.judged: set[str] = set()
        self._until = math.inf

    def run(self, base: Candidate, seconds: float, progress: Callable[[str, float], None]) -> list[Prediction]:
        """The best candidates, best first; of each shape with each number of workers only one."""
        began = perf_counter()
        self._until = began + seconds
        counts = _doublings(self.predictor.profile.cores)
        starts = [replace(base, shape=shape, workers=workers) for shape in self._shapes for workers in counts]
        first = [found for start in starts if (found := self._judge(start, 0.0)) is not None]
        for number, start in enumerate(sorted(first, key=lambda each: -each.score)):
            share = (number + 1) / len(first)
            self._climb(start, began + seconds * share)
            progress("simulate", min(1.0, max(share, (perf_counter() - began) / seconds)))
        return sorted(self.found.values(), key=lambda each: -each.score)

    def _judge(self, candidate: Candidate, floor: float) -> Prediction | None:
        """Its prediction, remembered; ``None`` where it is worse than ``floor``, known already, or time is over."""
        if str(candidate) in self.judged or not self._allowed(candidate) or perf_counter() > self._until:
            return None
        self.judged.add(str(candidate))
        found = self.predictor.predict(candidate, floor)
        if found is not None and found.score > 0:
            place = candidate.shape.name, str(candidate.workers)
            if place not in self.found or found.score > self.found[place].score:
                self.found[place] = found
        return found

    def _climb(self, best: Prediction, until: float) -> None:
        """Change one setting after another, where it waits longest, as long as that gains something."""
        is_better = True
        while is_better and perf_counter() < until:
            is_better = False
            nodes = [*best.waits, *(node for node in best.candidate.shape.units if node not in best.waits)]
            for node in nodes:
                for change in self._changes(best.candidate, node):
                    found = self._judge(change, best.score * MARGIN)
                    if found is not None and found.score > best.score * MARGIN:
                        best, is_better = found, True
                if is_better:
                    break

    def _changes(self, candidate: Candidate, node: str) -> list[Candidate]:
        """The candidate with another setting of the node."""
        unit, profile = candidate.shape.units.get(node), self.predictor.profile
        if unit is None or unit not in profile.limits:
            return []
        threads = [each for each in profile.threads_of(unit) if each]
        choices = {
            "instance_num": _doublings(profile.cores),
            "max": profile.sizes_of(unit, (threads or [0])[0]),
            "threads": threads,
            "batching_timeout": TIMEOUTS,
        }
        knobs = knobs_of(candidate.shape.pipeline.plans[node], self._has_gpu)
        changes = [(key, float(value)) for key in knobs for value in choices[key]]  # type: ignore[attr-defined]
        return [
            candidate.with_knob(node, *change) for change in changes if candidate.value(node, change[0]) != change[1]
        ]


def _doublings(most: int) -> list[int]:
    """1, 2, 4, and so on, and ``most``."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
