"""One run of the tuner: profile the file, choose shapes, halve candidates, verify the best, report."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from operator import le
from pathlib import Path
from typing import Any

from torchpipe_py.backends.model.engine.api import MODULES
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import TorchpipeError, without_warnings
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables
from torchpipe_py.registry import import_code
from torchpipe_py.tools.load.arrivals import load_images, poisson_times, rescale
from torchpipe_py.tools.load.measure import CpuMeter
from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune import report as text
from torchpipe_py.tools.tune.candidates import ENGINES, Candidate, shapes_of, unkept_engines
from torchpipe_py.tools.tune.measure import CALLS, MOST_ARRIVALS, Goal, Loops, Profile, Service, profile
from torchpipe_py.tools.tune.report import Report
from torchpipe_py.tools.tune.search import NO_TIME, PHASE_ENDS, Budget, Progress, Trial, search
from torchpipe_py.tools.tune.verify import TuningVerdict, verify

MOST_ONE_BY_ONE_SHARE = 0.3
"""Share of the budget that the images may take one at a time."""

OPEN_LOOPS, OPEN_LOOPS_SHARE = 24, 0.2
"""Open loops that find limits, about six for the file and each of three candidates; and their share of the budget."""

MOST_OVERDRAFT = 2.0
"""These may take the budget so many times: each has a least number of requests."""

MOST_IMAGES = 48
"""The most images used, evenly spaced over all."""
_BUDGETS = 1e-3, 1e6  # seconds that every wait accepts


@dataclass(frozen=True)
class Wanted:
    """The goal of a run: most requests per second within ``slo_p99`` seconds, or the shortest p99 at ``rate``.

    ``cores`` may be used, and ``gpu_memory`` bytes, for about ``budget`` seconds. ``times`` are arrivals in seconds
    instead of Poisson's. ``imports`` are modules or files with custom backends.
    """

    slo_p99: float | None = None
    rate: float | None = None
    cores: int | None = None
    gpu_memory: int | None = None
    budget: float = 0.0
    times: Sequence[float] | None = None
    imports: Sequence[str] = ()
    progress: Progress | None = None

    def usable_cores(self) -> list[int]:
        """The cores to use. Raises ``ToolError``, which names the argument, for wrong values."""
        least, most = _BUDGETS
        is_right = _is_number(self.budget) and least <= self.budget <= most
        require("budget", self.budget, is_right, f"a number of seconds from {least:g} to {most:g}")
        for name in ("slo_p99", "rate", "cores", "gpu_memory"):
            value = getattr(self, name)
            if value is not None:
                require(name, value, _is_number(value) and value > 0, "a number above 0")
            if value is not None and name in ("cores", "gpu_memory"):
                require(name, value, isinstance(value, int), "a whole number")
        if self.times is not None:
            _require_arrivals(self.times)
        are_names = _is_list(self.imports) and all(isinstance(each, str) for each in self.imports)
        require("imports", self.imports, are_names, "a list of modules or files")
        require("progress", self.progress, self.progress is None or callable(self.progress), "a function")
        cores = self.cores
        if self.slo_p99 is not None and self.rate is not None:
            raise ToolError("--slo-p99 and --rate: give one goal, the most requests or the shortest p99")
        usable = sorted(os.sched_getaffinity(0))[: usable_cores()]
        if cores is not None and cores > len(usable):
            raise ToolError(f"--cores {cores}: only {len(usable)} are usable here")
        return usable[:cores]


def require(name: str, value: object, is_right: bool, expected: str) -> None:
    """Raise ``ToolError`` unless the value of an argument is right."""
    if not is_right:
        raise ToolError(f"{name}: expected {expected}, got {value!r:.80}")


def _require_arrivals(times: Any) -> None:
    each: list[Any] = list(times) if _is_list(times) else [None]
    is_right = all(map(_is_number, each)) and all(map(le, each, each[1:]))
    require("times", times, is_right, "a list of ascending numbers of seconds")
    used = each[:MOST_ARRIVALS]
    if len(used) < 2 or not (len(used) - 1) / (used[-1] - used[0] or math.nan) < math.inf:
        raise ToolError(f"times, those of --replay: the first {MOST_ARRIVALS} are all the same, or fewer than two")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class Bench:
    """A user's file in the tuner's processes: its ``shapes``, the file first, and what is ``known`` of it.

    ``images`` are encoded, by name. ``report`` and ``trials`` collect what is found.
    """

    shapes: Sequence[Candidate]
    images: Mapping[str, bytes]
    service: Service
    known: Profile
    goal: Goal
    loops: Loops
    clock: Budget
    report: Report
    trials: list[Trial]


def as_it_is(bench: Bench) -> Sequence[Candidate]:
    """A ``Hooks.choose`` that changes no result."""
    bench.report.not_tried.append("other pixels or precision: they change results; --allow-pixels tries them")
    return bench.shapes


@dataclass(frozen=True)
class Hooks:
    """Changes of a run: ``choose`` returns the shapes to search, the first being the file or what takes its place.

    ``confirm`` returns the verdict that counts. ``shares_more``: shapes may share nodes where the file cannot.
    """

    choose: Callable[[Bench], Sequence[Candidate]] = as_it_is
    confirm: Callable[[Bench, TuningVerdict], TuningVerdict] = lambda bench, verdict: verdict
    shares_more: bool = False


def measure(
    tables: Tables, images: Mapping[str, bytes], wanted: Wanted, report: Report, hooks: Hooks = Hooks()
) -> None:
    """Find better settings, shapes and whatever else the hooks choose; completes ``report``.

    Raises ``ToolError``, ``TeamDied`` and ``ConfigError``, which explain in one line why it cannot be tuned.
    """
    usable, images = wanted.usable_cores(), sample_of(images)
    report.cores, report.images = len(usable), len(images)
    for name in wanted.imports:
        import_code(name)
    trials, clock = list[Trial](), Budget(wanted.budget, wanted.progress)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable)  # NOTE: plans derive the number of instances from the cores
        plan_pipeline(tables)  # so that it warns only once
        stack.enter_context(without_warnings())
        try:
            shapes = _shapes(tables)
            clock.show("profile")
            service = _service(shapes, images, wanted, usable, hooks, stack)
            meter = CpuMeter(service.pids, [])
            meter.start()
            known = profile(service, shapes[0], len(usable), list(images), MOST_ONE_BY_ONE_SHARE * wanted.budget)
            profile_s = clock.spent * wanted.budget
            report.profile = {"lone": known.lone, "answers": known.answers}
            goal = _goal_of(wanted, known)
            if wanted.slo_p99 is not None and goal.slo < wanted.slo_p99:
                report.notes.append(f"open loops are too short for an SLO of {1000 * wanted.slo_p99:.0f} ms")
            report.slo_p99 = goal.slo
            # So that clients wait half as long as the SLO.
            clients = min(known.clients, max(len(usable), round(goal.slo * known.answers / 2)))
            loops = Loops(service, goal, clients, known.loop_s)
            bench = Bench(shapes, images, service, known, goal, loops, clock, report, trials)
            chosen = hooks.choose(bench)
            if not _is_disturbed(report, meter):
                trials.append(yours := Trial(known.base, figures=[known.answers]))
                ranked = search(chosen, known, loops, clock, trials)
                verdict = hooks.confirm(bench, verify(yours, ranked, loops, goal, clock))
                report.decide(verdict)
                if not any(trial.gains for trial in trials[1:]) and NO_TIME in [trial.failed for trial in trials[1:]]:
                    # So that the profile ends when it should.
                    report.failed += f"; --budget {math.ceil(profile_s / PHASE_ENDS['profile'])} leaves time for them"
                if not _is_disturbed(report, meter) and verdict.kind == "better":
                    report.tuned = dict(verdict.best.candidate.config)
        except KeyboardInterrupt:
            report.verdict = "interrupted"
        except TorchpipeError as error:
            if not any(trial.gains for trial in trials):
                raise
            report.withdraw(str(error))
    report.complete(trials)


def named_images(images: str | os.PathLike[str] | Sequence[bytes]) -> dict[str, bytes]:
    """Encoded images by name. ``ToolError`` if there are none, or if they are something else."""
    if isinstance(images, (str, os.PathLike)):
        payload = load_images(Path(images), False)
        named = dict(zip(map(str, payload.paths), payload.bodies, strict=True))
    else:
        try:
            each = None if isinstance(images, (bytes, Mapping)) else list(images)
        except TypeError:  # an array without dimensions, too
            each = None
        require("images", images, each is not None, "a folder, or a list of encoded images")
        named = {f"images[{number}]": body for number, body in enumerate(each or ())}
        for name, body in named.items():
            require(name, body, isinstance(body, bytes), "the bytes of an encoded image")
    if not named:
        raise ToolError("no images")
    return named


def sample_of(images: Mapping[str, bytes]) -> dict[str, bytes]:
    """At most ``MOST_IMAGES`` of them."""
    return dict([*images.items()][:: -(-len(images) // MOST_IMAGES)])


def _shapes(tables: Tables) -> list[Candidate]:
    """The shapes of a file, which must have one root."""
    shapes = shapes_of(tables)
    if len(entered := shapes[0].pipeline.graph.entered) != 1:
        roots = f"requests enter at {', '.join(entered)}; only a file with one root can be tuned"
        raise ToolError(f"{tables.source}: {roots}")
    return shapes


def _service(
    shapes: Sequence[Candidate],
    images: Mapping[str, bytes],
    wanted: Wanted,
    usable: Sequence[int],
    hooks: Hooks,
    stack: ExitStack,
) -> Service:
    """The tuner's processes, until the ``stack`` ends. ``ToolError`` if they cannot do what is wanted."""
    engines = ENGINES[-1] if hooks.shares_more or any(shape.heads for shape in shapes) else 0
    service = Service([*images.values()], wanted.imports, usable, engines, wanted.gpu_memory or math.inf)
    stack.callback(service.close)
    if wanted.gpu_memory is not None and not service.has_gpu:
        raise ToolError("--gpu-memory: there is no GPU here; without it, memory is not limited")
    builds = service.has_gpu and any(find_spec(name) for name in MODULES)
    if builds and (building := unkept_engines(shapes[0].pipeline)):
        why = "each candidate would build its engine again; set model::cache, a file that keeps it"
        raise ToolError(f"{shapes[0].config.source}: {', '.join(building)}: {why}")
    return service


def _goal_of(wanted: Wanted, known: Profile) -> Goal:
    """The goal. Raises ``ToolError`` if it cannot be reached, or not measured within the budget."""
    slo, rate, times = wanted.slo_p99, wanted.rate, wanted.times
    if slo is not None and slo < known.lone:
        raise ToolError(f"p99 within {1000 * slo:g} ms: a single request already takes {1000 * known.lone:.3g} ms")
    needed = OPEN_LOOPS * CALLS[0] / (rate or known.answers)
    if needed > MOST_OVERDRAFT * wanted.budget:
        why = f"measuring candidates needs --budget {needed:.0f} or more"
        raise ToolError(f"{rate or known.answers:.2g} requests/s: {why}")
    arrivals = list(islice(poisson_times(1.0, 0) if times is None else times, MOST_ARRIVALS))
    if times is not None:
        arrivals = rescale(arrivals, 1.0)
    return Goal.of(slo, rate, arrivals, known.lone, OPEN_LOOPS_SHARE * wanted.budget / OPEN_LOOPS)


def _is_disturbed(report: Report, meter: CpuMeter) -> bool:
    """Whether other programs use too much of the cores so far; there is no verdict then."""
    use = meter.stop()
    percent = use.fields(use.parent + (use.server or 0.0))["other_cpu_percent"]
    report.other_programs = None if percent is None else percent / 100 / len(os.sched_getaffinity(0))
    is_disturbed = (report.other_programs or 0.0) > text.MOST_BY_OTHERS
    if is_disturbed:
        report.withdraw("")
    return is_disturbed
