"""Searches settings by successive halving: measures candidates beside the file in turns, and keeps the better half."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from time import monotonic

from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.statistics import mean_interval
from torchpipe_py.tools.tune.candidates import Candidate, as_served, process_candidates, setting_candidates
from torchpipe_py.tools.tune.measure import Measurer, Point, Profile

PHASE_ENDS = {"profile": 0.1, "processes": 0.35, "settings": 0.6, "verify": 0.95}
"""Share of the budget at which each phase ends; what is left is for the last loops, and to end the processes."""

FIRST_PAIRS = 2
"""Pairs of loops of each candidate in the first round; each round has twice as many as the one before."""

FIRST_ROUND_SHARE = 0.6
"""Share of the time after which no candidate is measured for the first time."""

KEPT = 3
"""Halving ends with so many candidates."""

NO_TIME = "no time was left to measure it"

MARGIN = math.log(1.01)
"""Of candidates whose gains differ by no more, the one with the fewest settings is the better one."""


Progress = Callable[[str, float, float], None]
"""Called with the phase, the finished share of it, and the seconds left."""


class Budget:
    """The time of a run by ``clock``, which it reports to ``progress``; ``ends`` has the share at which phases end."""

    def __init__(self, seconds: float, progress: Progress | None, clock: Callable[[], float] = monotonic) -> None:
        self.seconds, self._progress, self._clock, self._began = seconds, progress, clock, clock()
        self.ends: Mapping[str, float] = PHASE_ENDS

    @property
    def spent(self) -> float:
        """The share of the time that is over."""
        return (self._clock() - self._began) / self.seconds

    def left(self, phase: str) -> float:
        """Seconds until the end of a phase."""
        return (self.ends[phase] - self.spent) * self.seconds

    def show(self, phase: str) -> None:
        """Show the progress of a phase."""
        before = max((end for end in self.ends.values() if end < self.ends[phase]), default=0.0)
        share = 1 - self.left(phase) / ((self.ends[phase] - before) * self.seconds)
        if self._progress is not None:
            last = max(self.ends, key=self.ends.__getitem__)
            self._progress(phase, min(1.0, max(0.0, share)), max(0.0, self.left(last)))


@dataclass
class Trial:
    """A candidate and its measurements.

    ``gains`` are logarithms of how much better than the user's file it was beside it: those that chose it while halving
    and, after that, those of ``verify`` alone. Without gains, ``failed`` is the reason. ``figures`` are answers per
    second or, with a rate, inverse p99s. ``points`` are open loops: the highest rate within the SLO is ``limit``, and
    ``p99``, in seconds, belongs to the last one.
    """

    candidate: Candidate
    gains: list[float] = field(default_factory=list)
    figures: list[float] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    limit: float = math.nan
    p99: float = math.nan
    failed: str = NO_TIME

    @property
    def gain(self) -> float:
        """The mean of the gains; minus infinity without any."""
        return statistics.mean(self.gains) if self.gains else -math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the gain."""
        return mean_interval(self.gains)

    def measure(self, measurer: Measurer, base: Candidate, numbers: Sequence[int]) -> None:
        """Add a gain for each of the numbers: one loop of the candidate and one of ``base``, each first in turn.

        A machine's speed varies, so only loops that follow each other are compared. If the candidate cannot run, it
        loses its gains and ``failed`` is the reason.
        """
        try:
            for number in numbers:
                other = measurer.figure(base, number) if number % 2 == 0 else None
                self.figures.append(measurer.figure(self.candidate, number))
                self.gains.append(math.log(self.figures[-1] / (other or measurer.figure(base, number))))
        except ToolError as error:
            self.gains.clear()
            self.failed = str(error)


def search(
    shapes: Sequence[Candidate], profile: Profile, measurer: Measurer, budget: Budget, trials: list[Trial]
) -> list[Trial]:
    """Halve the candidates for processes, then changes of settings as long as one helps.

    The first of ``shapes`` is the file, or what takes its place. Appends all trials to ``trials``. Returns those with
    gains, the likely best first: the last winner, what it was derived from, and the others.
    """
    base, cores, known = profile.base, profile.cores, {str(profile.base)}
    first = base if shapes[0].shape == base.shape else as_served(shapes[0], cores, profile.uses_gpu)

    def halved(phase: str, candidates: Sequence[Candidate]) -> list[Trial]:
        new = {str(each): each for each in candidates if str(each) not in known}
        known.update(new)
        field = [Trial(each) for each in new.values()]
        trials.extend(field)
        return halve(field, base, measurer, budget, phase)

    # NOTE: what takes the file's place comes first, as it is measured in any case.
    ranked = halved("processes", [first, *process_candidates(shapes, cores)])
    winners = [trial for trial in ranked if trial.gain > MARGIN][:1]
    others = ranked[len(winners) :]
    # The file as it is served counts too: a noisy first round must not decide for all settings.
    starts = [*(trial.candidate for trial in winners), first]
    while budget.left("settings") > 0:
        changes = [setting_candidates(start, measurer.busy(start), cores, profile.uses_gpu) for start in starts]
        found = halved("settings", [each for each in chain(*zip_longest(*changes)) if each is not None])
        if not found or found[0].gain <= max([0.0, *(trial.gain for trial in winners)]) + MARGIN:
            return [*winners, *found, *others]
        winners, others, starts = [found[0], *winners], [*found[1:], *others], [found[0].candidate]
    return [*winners, *others]


def halve(trials: Sequence[Trial], base: Candidate, measurer: Measurer, budget: Budget, phase: str) -> list[Trial]:
    """Measure the trials beside ``base`` until the end of a phase; returns those with gains, the best first.

    The likely ones should be first: at least one is measured, and the others as far as there is time.
    """
    running, dropped, first, pairs, began = list(trials), list[Trial](), 0, FIRST_PAIRS, budget.left(phase)
    while running:
        before = budget.left(phase)
        for trial in running:
            is_late = first == 0 and budget.left(phase) < (1 - FIRST_ROUND_SHARE) * began
            if not is_late or trial is trials[0]:
                trial.measure(measurer, base, range(first, first + pairs))
                budget.show(phase)
        running = best_first(running)
        took = before - budget.left(phase)
        if len(running) <= KEPT or took > budget.left(phase):
            break
        half = max(KEPT, (len(running) + 1) // 2)
        running, dropped = running[:half], running[half:] + dropped
        first, pairs = first + pairs, 2 * pairs
    return running + dropped


def best_first(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that have gains, sorted by them; of those within ``MARGIN`` of the best, the fewest settings win."""
    ranked = sorted((each for each in trials if each.gains), key=lambda each: -each.gain)
    equal = [each for each in ranked if each.gain >= ranked[0].gain - MARGIN]
    return sorted(equal, key=lambda each: len(each.candidate.settings)) + ranked[len(equal) :]
