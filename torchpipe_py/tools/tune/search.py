"""Predicts candidates from a profile, and finds those worth measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

from torchpipe_py.errors import ConfigError
from torchpipe_py.tools.tune.profile import MOST_ON_GPU, Profile
from torchpipe_py.tools.tune.shapes import WRITTEN, Candidate, Shape, has_batches, knobs_of
from torchpipe_py.tools.tune.simulate import Machine, Simulation

CALLS = 500
"""Requests of a simulated open loop while candidates are compared: fewer would favor what suits a single burst."""

LEAST_CALLS, MOST_CALLS = 20, 2500
"""Requests of an open loop that is measured, and of the simulation that predicts it."""

CLIENTS = 64
"""Clients of the simulated closed loop that determines a candidate's throughput."""

LIGHT = 0.75
"""Share of the limit at which the p99 is predicted and measured."""

MARGIN = 1.01
"""A change must gain more than this factor; otherwise the simpler candidate is kept."""

ENGINES = (1, 2)
"""Numbers of engine processes for all workers."""

TIMEOUTS = (0.0, 1.0, 2.0, 5.0, 10.0)
_FULL = 0.98  # of a closed loop's throughput, beyond which the queue grows
_STEPS = 5  # of the bisection
_MOST_TAIL = 0.75  # of the SLO
_SLOWER, _FITS = (0.4, 2.5), 8  # range and steps of the bisection
_FITS_CLOSED = 3  # steps, each of which scales


@dataclass(frozen=True)
class Goal:
    """The most requests per second of which 99 % are answered within ``slo``; or, at ``rate``, the shortest p99.

    ``times`` is the schedule of arrivals for all candidates, on average one per second. An open loop takes ``seconds``.
    """

    slo: float
    rate: float | None
    times: Sequence[float]
    seconds: float

    @property
    def sign(self) -> int:
        """-1 if less is better, else 1."""
        return 1 if self.rate is None else -1

    def dues(self, rate: float, count: int | None = None, turn: int = 0) -> list[float]:
        """The times at which ``count`` calls of an open loop at ``rate`` are due, by default those of ``seconds``.

        Other turns have other parts of the schedule, each at the same rate.
        """
        count = count or max(LEAST_CALLS, min(MOST_CALLS, round(rate * self.seconds)))
        first = turn * count % max(1, len(self.times) - count)
        some = self.times[first : first + count]
        factor = (len(some) - 1) / rate / (some[-1] - some[0] or math.inf)
        return [(time - some[0]) * factor for time in some]


@dataclass(frozen=True)
class Prediction:
    """For a candidate: requests per second within the goal, the p99 at ``rate`` in seconds, and where requests wait."""

    candidate: Candidate
    limit: float
    rate: float
    p99: float
    waits: tuple[str, ...]
    score: float

    def figure(self, goal: Goal) -> float:
        """The figure that is also measured: the limit, or the p99."""
        return self.limit if goal.rate is None else self.p99


class Predictor:
    """Simulates candidates in the same way as they are measured.

    Where nodes are ``slower``, they take so many times as long as in the file that ``fitted`` explains.
    """

    def __init__(self, profile: Profile, fitted: Calibration, goal: Goal) -> None:
        self.profile, self.goal, self._fitted = profile, goal, fitted

    def closed_loop(self, candidate: Candidate, clients: int, slower: float = 1.0) -> float:
        """Requests per second of a closed loop."""
        machine = replace(self._fitted.machine, slower=slower * self._fitted.machine.slower)
        return Simulation(candidate.plans(), self.profile.costs(candidate), machine).closed_loop(clients, CALLS)

    def fit(self, candidate: Candidate, clients: int, rate: float) -> float:
        """How many times as long nodes take if ``rate`` is that of its closed loop."""
        slower = 1.0
        for _ in range(_FITS_CLOSED):
            slower *= self.closed_loop(candidate, clients, slower) / rate
        return slower

    def predict(
        self, candidate: Candidate, floor: float = 0.0, is_exact: bool = False, slower: float = 1.0
    ) -> Prediction | None:
        """Predict a candidate; ``None`` as soon as its score is clearly below ``floor``."""
        calls, steps = (None, _STEPS + 2) if is_exact else (CALLS, _STEPS)
        plans = candidate.plans()
        costs = self.profile.costs(candidate)
        goal = self.goal
        full_load, light_load = (
            replace(each, slower=slower * each.slower) for each in (self._fitted.machine, self._fitted.light)
        )

        def at(rate: float, machine: Machine = full_load) -> tuple[float, tuple[str, ...]]:
            run = Simulation(plans, costs, machine)
            latencies = sorted(run.open_loop(goal.dues(rate, calls)))
            waits = sorted(run.waited, key=lambda node: -run.waited[node])
            return quantile(latencies, 0.99) + machine.tail, tuple(waits)

        full = Simulation(plans, costs, full_load).closed_loop(CLIENTS, CALLS)
        if goal.rate is not None:
            p99, waits = at(goal.rate, light_load)
            score = 1 / p99 if _FULL * full > goal.rate else 0.0
            return Prediction(candidate, goal.rate, goal.rate, p99, waits, score) if score >= floor else None
        full *= 1 + goal.slo / goal.seconds  # NOTE: within a run, the queue may grow up to the SLO
        if full < floor:
            return None
        limit, rate = 0.0, floor or full / 2
        where: tuple[str, ...] = ()
        for _ in range(steps):
            p99, waits = at(rate)
            if p99 <= goal.slo:
                limit, where = rate, waits
            elif floor and not limit:
                return None
            else:
                full, where = rate, where or waits
            rate = (limit + full) / 2
        light = LIGHT * limit
        p99 = at(light, light_load)[0] if light and is_exact else math.inf
        return Prediction(candidate, limit, light, p99, where, limit)


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values; infinite without any."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else math.inf


# --- calibration


@dataclass(frozen=True)
class Point:
    """One open loop: requests per second, and latencies in seconds; infinite if over 1 % had no answer."""

    rate: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Calibration:
    """The machine parameters that explain the original file at its limit, and at the rate of the p99: ``light``.

    ``residual`` is the share by which the closed loop, to which nothing is fitted, is off.
    """

    machine: Machine
    light: Machine
    residual: float


def calibrate(
    profile: Profile, goal: Goal, base: Candidate, closed: tuple[int, float], full: Point, light: Point
) -> Calibration:
    """Determine how much slower nodes are in the pipe than alone, and what other delays add to the p99.

    Cores that are idle at times are slower, so this differs between ``full``, the limit, and ``light``. ``closed`` has
    the clients of a closed loop and its requests per second.
    """
    plans, costs = base.plans(), profile.costs(base)
    handover = profile.captured[base.shape.twin].handover

    def fitted(point: Point) -> Machine:
        low, high = _SLOWER
        for _ in range(_FITS):
            middle = math.sqrt(low * high)
            machine = Machine(profile.cores, middle, handover)
            latencies = sorted(Simulation(plans, costs, machine).open_loop(goal.dues(point.rate)))
            is_fast = quantile(latencies, 0.5) < point.p50 and quantile(latencies, 0.99) < point.p99
            low, high = (middle, high) if is_fast else (low, middle)
        tail = max(0.0, min(_MOST_TAIL * goal.slo, point.p99 - quantile(latencies, 0.99)))
        return replace(machine, tail=tail)

    machine = fitted(full)
    residual = abs(Simulation(plans, costs, machine).closed_loop(closed[0], CALLS) / closed[1] - 1)
    return Calibration(machine, fitted(light), residual)


# --- the search


Predict = Callable[[Sequence[tuple[Candidate, float]]], "Iterable[Prediction | str | None]"]
"""Predicts candidates and their floors at once, as ``Predictor`` does; a text says why one cannot be built."""


class Search:
    """Searches greedily from each shape, changing the node where requests wait longest.

    ``predict`` gets at most as many candidates as there are cores. ``not_tried`` has the reasons by place.
    """

    def __init__(self, profile: Profile, predict: Predict, has_gpu: bool) -> None:
        self._profile, self._predict, self._has_gpu = profile, predict, has_gpu
        self.found: dict[str, Prediction] = {}
        self.judged: set[str] = set()
        self.not_tried: dict[str, str] = {}
        self._until = math.inf

    def run(
        self, starts: Sequence[Candidate], seconds: float, progress: Callable[[str, float], None]
    ) -> list[Prediction]:
        """The best candidates, best first; one for each place of ``starts``."""
        began = perf_counter()
        self._until = began + seconds
        first = self._judge(starts, 0.0)
        for number, start in enumerate(sorted(first, key=lambda each: -each.score)):
            share = (number + 1) / len(first)
            self._climb(start, began + seconds * share)
            progress("simulate", min(1.0, max(share, (perf_counter() - began) / seconds)))
        return sorted(self.found.values(), key=lambda each: -each.score)

    def _judge(self, candidates: Sequence[Candidate], floor: float) -> list[Prediction]:
        """Predict and remember the candidates that are new; returns those that are not worse than ``floor``."""
        good = []
        new = [each for each in candidates if str(each) not in self.judged]
        for first in range(0, len(new), self._profile.cores):
            if perf_counter() > self._until:
                self.not_tried["further settings"] = "the time for simulations was over"
                break
            some = new[first : first + self._profile.cores]
            self.judged.update(map(str, some))
            for candidate, found in zip(some, self._predict([(each, floor) for each in some]), strict=True):
                if isinstance(found, str):
                    self.not_tried[candidate.place] = found
                elif found is not None:
                    best = self.found.get(candidate.place)
                    if found.score > (best.score if best else 0.0):
                        self.found[candidate.place] = found
                    good.append(found)
        return good

    def _climb(self, best: Prediction, until: float) -> None:
        """Change one setting at a time, where requests wait longest, as long as it helps."""
        is_better = True
        while is_better and perf_counter() < until:
            is_better = False
            nodes = [*best.waits, *(node for node in best.candidate.shape.units if node not in best.waits)]
            for node in nodes:
                found = self._judge(self._changes(best.candidate, node), best.score * MARGIN)
                top = max(found, key=lambda each: each.score, default=best)
                if top.score > best.score * MARGIN:
                    best, is_better = top, True
                    break

    def _changes(self, candidate: Candidate, node: str) -> list[Candidate]:
        """The candidates with one other setting of the node."""
        unit, profile = candidate.shape.units.get(node), self._profile
        if unit is None or unit not in profile.limits:
            return []
        threads = [each for each in profile.threads_of(unit) if each]
        plan = candidate.shape.pipeline.plans[node]
        most = min(profile.cores, MOST_ON_GPU) if self._has_gpu and has_batches(plan) else profile.cores
        choices = {
            "instance_num": _doublings(most),
            "max": profile.sizes_of(unit, (threads or [0])[0]),
            "threads": threads,
            "batching_timeout": TIMEOUTS,
        }
        knobs = knobs_of(plan, self._has_gpu)
        changes = [(key, float(value)) for key in knobs for value in choices[key]]  # type: ignore[attr-defined]
        return [
            candidate.with_knob(node, *change) for change in changes if candidate.value(node, change[0]) != change[1]
        ]


def starts_of(shapes: Sequence[Shape], cores: int) -> list[Candidate]:
    """Each shape with several numbers of workers and, if it shares nodes, of engine processes; the likely ones first.

    Nodes of several workers get no more instances together than there are cores.
    """
    starts = []
    half = -(-cores // 2)
    for workers in sorted({half, -(-cores // 4), cores, 1}, key=lambda each: (abs(math.log(each / half)), each)):
        for shape in shapes:
            # NOTE: with one worker, ``shared`` changes nothing.
            engines = [count for count in ENGINES if count <= workers] if shape.heads and workers > 1 else [0]
            for start in [Candidate(shape, workers, engines=count) for count in engines]:
                with suppress(ConfigError):  # building it says why
                    for node, plan in shape.pipeline.plans.items():
                        few = 1 if has_batches(plan) else -(-cores // workers)
                        is_mine = "instance_num" in knobs_of(plan) and not (start.engines and plan.spec.shared)
                        if workers > 1 and is_mine and start.value(node, "instance_num") > few:
                            start = start.with_knob(node, "instance_num", few)
                starts.append(start)
    return [each for each in starts if each.engines or each.shape.name == WRITTEN or not each.shape.heads]


def _doublings(most: int) -> list[int]:
    """1, 2, 4, … and ``most``."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]
