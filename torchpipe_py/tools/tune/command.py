"""``torchpipe tune``, and the same from Python: profile, calibrate, compare, simulate, verify, report."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import TorchpipeError, logger
from torchpipe_py.files import output_problem
from torchpipe_py.plan.build import MOST_BY_CORES, plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.plan.sharing import usual_engines
from torchpipe_py.registry import import_code
from torchpipe_py.tools.load.arrivals import load_images, poisson_times, read_replay, rescale
from torchpipe_py.tools.load.judge import EXIT_INTERRUPTED
from torchpipe_py.tools.load.measure import CpuMeter, cpu_model
from torchpipe_py.tools.report import ToolError, check_outputs, progress_bar, write_json, write_text
from torchpipe_py.tools.tune import report as text
from torchpipe_py.tools.tune import verify
from torchpipe_py.tools.tune.pixels import ALTERNATIVES, UNAVAILABLE, changed, parity_of
from torchpipe_py.tools.tune.profile import Profiler
from torchpipe_py.tools.tune.search import (
    ENGINES,
    LEAST_CALLS,
    LIGHT,
    MOST_CALLS,
    Goal,
    Prediction,
    Predictor,
    Search,
    calibrate,
    starts_of,
)
from torchpipe_py.tools.tune.shapes import Candidate, Shape, shapes_of, twin_of
from torchpipe_py.tools.tune.verify import Service, Trial
from torchpipe_py.tools.tune.worker import Team

DEFAULT_BUDGET_S = 120.0
SLO_OF_LONE, LEAST_SLO_S = 10.0, 0.02
"""The default SLO: a multiple of a single request's time, and its least value in seconds."""

MOST_IMAGES = 48
"""The most images used, evenly spaced over all."""

_SHARES = {"profile": 0.16, "calibrate": 0.12, "compare": 0.18, "simulate": 0.08, "verify": 0.42}  # of the budget
_ARRIVALS = 8 * MOST_CALLS  # of the schedule
_OPEN_LOAD = 0.6  # of its throughput, from where the limit is searched
_FIELD, _FINALISTS = 6, 3  # candidates that are measured, and those that open loops measure too
_PLAIN = 2  # of the field: the fastest numbers of processes, without other settings
_PAIRS, _COMPARED = 12, 2  # closed loops beside the file's: of each round of verifying, and of each shape before
_ANSWERS, _LEAST_LOOP_S, _MOST_LOOP_S = 60, 0.3, 2.0  # of a closed loop
_QUEUE_S = 0.3  # that its clients wait at most, if they are more than two per core
_TURNS, _LOOPS, _EXTRA_S = 6, 4, 0.2  # of open loops, loops of each, and seconds that each takes besides its length
_LEAST_START = 0.5  # share of what a closed loop answers, from where their limit is searched
_OPEN_SHARE = 0.4  # of the time to verify, for those
_LEAST_S, _MOST_S = 0.15, 2.0  # of an open loop
_LEAST_SLOS = 5  # of it: in a shorter one a queue that only grows stays within the SLO
_LEAST_OF_LONE = 4  # a lone request's time, in the longest SLO that is measured
_MOST_OFF = 1.25  # factor between a closed loop as predicted from open ones, and measured; more is an accident
_MEASURED_AGAIN = 1.5  # factor for the time to measure a field, as it is halved
_OVERDRAWN = 2.0  # factor by which the least time needed may exceed the budget
_NOT_TRIED = ("engine processes for nodes without a model or GPU decoder: there their work would share one GIL",)

Progress = Callable[[str, float, float], None]
"""Called with the phase, the finished share of it, and the seconds left."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def tune(
    config: str | os.PathLike[str] | Mapping[str, Any],
    images: str | os.PathLike[str] | Sequence[bytes],
    *,
    slo_p99: float | None = None,
    rate: float | None = None,
    cores: int | None = None,
    gpu_memory: int | None = None,
    allow_pixels: bool = False,
    budget: float = DEFAULT_BUDGET_S,
    times: Sequence[float] | None = None,
    imports: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find better settings of a configuration and verify them; returns the report that ``--json`` writes.

    ``images`` are a folder or encoded images. The goal is the most requests per second of which 99 % are answered
    within ``slo_p99`` seconds, or the shortest p99 at ``rate`` requests per second. ``cores`` may be used, and
    ``gpu_memory`` bytes. It takes about ``budget`` seconds. ``times`` are arrivals in seconds instead of Poisson's.
    ``imports`` are modules or files with custom backends. With ``allow_pixels``, settings that change pixels or
    precision are tried too; their ``parity`` says how results differ.
    ``report["verdict"]`` is ``better``, ``as good``, ``cannot tell`` or, after Ctrl-C, ``interrupted``;
    ``report["tuned"]`` has the tables of the tuned configuration if it is better, else None. Times are in seconds.
    Raises ``ToolError``, ``TeamDied`` and ``ConfigError``, which explain in one line why it cannot be tuned.
    """
    folder = Path(images) if isinstance(images, (str, os.PathLike)) else None
    loaded = load_images(folder, False) if folder else None
    bodies: Any = loaded.bodies if loaded else images
    names: Any = loaded.paths if loaded else [f"images[{number}]" for number in range(len(bodies))]
    all_cores = os.sched_getaffinity(0)
    usable = sorted(all_cores)[: usable_cores()]
    for name, value in {"slo_p99": slo_p99, "rate": rate, "cores": cores, "budget": budget}.items():
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise ToolError(f"{name}: expected a number above 0, got {value!r}")
    if cores is not None and not isinstance(cores, int):
        raise ToolError(f"cores: expected a whole number, got {cores!r}")
    if times is not None and (isinstance(times, str) or not all(_is_number(time) for time in times)):
        raise ToolError(f"times: expected numbers of seconds, got {times!r:.80}")
    if times is not None and (len(times) < 2 or not 0 < max(times) - min(times) < math.inf):
        raise ToolError("times: the times of --replay are all the same, or fewer than two")
    if slo_p99 is not None and rate is not None:
        raise ToolError("--slo-p99 and --rate: give one goal, the most requests or the shortest p99")
    if cores is not None and cores > len(usable):
        raise ToolError(f"--cores {cores}: only {len(usable)} are usable here")
    usable = usable[:cores]
    if not bodies:
        raise ToolError("no images")
    if len(usable) < 2:
        raise ToolError("one core: there is nothing to tune; serve with --workers 1 and one instance of each node")
    pattern = rescale(times[:_ARRIVALS], 1.0) if times else list(islice(poisson_times(1.0, 0), _ARRIVALS))
    for name in imports:
        import_code(name)
    tables = Tables.of(config)
    with ExitStack() as stack:
        os.sched_setaffinity(0, usable)  # NOTE: plans derive the number of instances from the cores
        stack.callback(os.sched_setaffinity, 0, all_cores)
        plan_pipeline(tables)  # so that it warns only once
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel("ERROR")  # hundreds of plans would repeat warnings
        some = slice(None, None, -(-len(bodies) // MOST_IMAGES))
        run = _Tuning(tables, dict(zip(map(str, names[some]), bodies[some], strict=True)), usable, budget, progress)
        run.report |= {"img_dir": folder and str(folder), "rate": rate, "slo_given": slo_p99 is not None}
        run.report["slo_p99"] = slo_p99 or LEAST_SLO_S
        try:
            team = run.start(imports, gpu_memory)
            stack.callback(team.close)
            if gpu_memory is not None and not team.has_gpu:
                raise ToolError("--gpu-memory: there is no GPU here; without it, memory is not limited")
            run.add_alternatives(allow_pixels)
            run.profile(slo_p99)
            run.set_goal(slo_p99, pattern)
            run.calibrate()
            if not run.is_disturbed():
                run.compare()
                run.search()
                run.verify()
        except KeyboardInterrupt:
            run.report["verdict"] = "interrupted"
        except TorchpipeError as error:
            if not run.report["simulated"]:
                raise
            run.give_up(str(error))
    return run.finish()


class _Tuning:
    """One run: its phases in order, and the report that they extend."""

    def __init__(
        self,
        tables: Tables,
        images: Mapping[str, bytes],
        cores: Sequence[int],
        budget: float,
        progress: Progress | None,
    ) -> None:
        self._names, self._images = list(images), list(images.values())
        self._cores, self._budget, self._progress = cores, budget, progress
        self._until = monotonic() + budget
        self._shapes = shapes_of(tables)
        entered = self._shapes[0].pipeline.graph.entered
        if len(entered) != 1:
            raise ToolError(
                f"{tables.source}: requests enter at {', '.join(entered)}; only a file with one root can be tuned"
            )
        self._trials: list[Trial] = []
        self.report: dict[str, Any] = {
            "config": tables.source,
            "date": datetime.now(timezone.utc).isoformat(),
            "cpu_model": cpu_model(),
            "cores": len(cores),
            "images": len(images),
            "profile": {},
            "calibration": {},
            "best": None,
            "tuned": None,
            "verdict": "interrupted",
            "gain": None,
            "gain_interval": (0.0, math.inf),
            "simulated": 0,
            "other_programs": None,
            "failed": "",
            "notes": [],
            "not_tried": list(_NOT_TRIED),
        }

    def start(self, imports: Sequence[str], gpu_memory: int | None) -> Team:
        """Start the processes."""
        self._show("profile", 0.0)
        engines = ENGINES[-1] if any(shape.heads for shape in self._shapes) else 0
        self._team = Team(self.report["config"], self._images, imports, self._cores, engines, self._budget)
        self._service = Service(self._team, self._gpu_bytes, gpu_memory or math.inf)
        self._meter = CpuMeter(self._team.pids, [])
        self._meter.start()
        self._profiler = Profiler(self._shapes, self._team, self._seconds("profile"), self._names)
        self._profile = self._profiler.profile
        return self._team

    def add_alternatives(self, is_allowed: bool) -> None:
        """Add the shapes that change results, or say why not."""
        notes: list[str] = self.report["not_tried"]
        if not is_allowed:
            notes.append("other pixels or precision: they change results; --allow-pixels tries them")
            return
        plain = [shape for shape in self._shapes if shape.twin == shape.name]
        for each in ALTERNATIVES:
            if each.needs_gpu and not self._team.has_gpu:
                notes.append(f"{each.name}: there is no GPU")
                continue
            shapes = [shape for shape in (changed(shape, each) for shape in plain) if shape is not None]
            self._shapes += shapes
            if each.needs_gpu:
                self._shapes += [twin for twin in map(twin_of, shapes) if twin is not None]
            if not shapes:
                notes.append(f"{each.name}: no node of the file can change to it")
        notes += UNAVAILABLE

    def _gpu_bytes(self, candidate: Candidate) -> int:
        """The GPU memory that a candidate takes."""
        return self._profile.captured[candidate.shape.twin].gpu_bytes * (candidate.engines or candidate.workers)

    def _seconds(self, phase: str) -> float:
        return self._budget * _SHARES[phase]

    def _left(self) -> float:
        return self._until - monotonic()

    def _show(self, phase: str, share: float) -> None:
        if self._progress is not None:
            self._progress(phase, min(1.0, share), max(0.0, self._left()))

    def profile(self, slo: float | None) -> None:
        """Run the images once, and each node alone."""
        left_out = self._profiler.capture()
        self.report["not_tried"] += [f"{name}: {why}" for name, why in left_out.items()]
        captured = self._profile.captured[self._shapes[0].name]
        self.report["lone"] = lone = statistics.median(captured.lone)
        if slo is not None and slo < lone:
            raise ToolError(f"p99 within {1000 * slo:g} ms: a single request already takes {1000 * lone:.3g} ms")
        self._has_gpu = captured.gpu_bytes > 0
        self._profiler.measure(self._profiler.prepare(self._has_gpu), self._show)
        self.report["profile"] = text.profile_fields(self._profile)
        self._team.all("release")

    def set_goal(self, slo: float | None, times: Sequence[float]) -> None:
        """Set the goal, and the arrivals of every simulated and measured open loop."""
        longest = max(_MOST_S / _LEAST_SLOS, _LEAST_OF_LONE * self.report["lone"])
        if slo is not None and slo > longest:
            self.report["notes"].append(f"open loops are too short for an SLO of {1000 * slo:.0f} ms")
        slo = min(longest, slo or max(LEAST_SLO_S, SLO_OF_LONE * self.report["lone"]))
        self.report["slo_p99"] = slo
        even = _OPEN_SHARE * self._seconds("verify") / (_LOOPS * _TURNS) - _EXTRA_S
        seconds = min(_MOST_S, max(_LEAST_S, even, _LEAST_SLOS * slo))
        self._goal = Goal(slo, self.report["rate"], list(_repeated(times, _ARRIVALS)), seconds)

    def calibrate(self) -> None:
        """Measure the original file with the default number of workers, and fit the simulation to that."""
        self._show("calibrate", 0.0)
        written, workers = self._shapes[0], min(len(self._cores), MOST_BY_CORES)
        workers = 1 if self._has_gpu and not written.heads else workers
        engines = usual_engines(written.config) if written.heads and workers > 1 else 0
        base = self._base = Candidate(written, workers, engines=min(engines, workers))
        began, seconds = monotonic(), self._seconds("calibrate")
        try:
            self._service.build(base)
        except ToolError as error:
            raise ToolError(f"the file as it is: {error}") from None
        built = monotonic() - began
        self._clients = verify.CLIENTS_PER_CORE * len(self._cores)
        self._closed = max(1.0, self._service.closed_loop(self._clients, 2 * self._goal.seconds))
        few = max(2 * len(self._cores), int(_QUEUE_S * self._closed))
        self._clients = min(self._clients, few)  # NOTE: else a slow pipe answers nothing within a loop
        self._loop_s = min(_MOST_LOOP_S, max(_LEAST_LOOP_S, _ANSWERS / self._closed))
        rate = self._goal.rate
        loop_s = self._goal.dues(rate)[-1] if rate else self._loop_s
        self._pair_s = 2 * (loop_s + _EXTRA_S)
        self._each_s = built + _COMPARED * self._pair_s
        needed = _TURNS * LEAST_CALLS / (rate or self._closed / _LOOPS)
        if needed > _OVERDRAWN * self._budget:
            raise ToolError(
                f"{rate or self._closed:.2g} requests/s: measuring candidates needs --budget {needed:.0f} or more"
            )
        goal, start = self._goal, _OPEN_LOAD * self._closed
        trial = self._calibrated = Trial.around(base, start, goal.rate or LIGHT * start)
        self._turn_s = 0.0
        while not trial.figures or monotonic() - began + self._turn_s / 2 < seconds:
            turn_began = monotonic()
            verify.turn(self._service, trial, goal)
            self._turn_s = monotonic() - turn_began
            trial.predicted = replace(trial.predicted, rate=goal.rate or LIGHT * trial.centre)
            self._show("calibrate", (monotonic() - began) / seconds)
        full, light = verify.typical_of(trial, goal), verify.typical_of(trial, goal, LIGHT)
        fitted = calibrate(self._profile, goal, base, (self._clients, self._closed), full, light)
        self.report["calibration"] = asdict(fitted) | {"points": [asdict(point) for point in trial.points]}
        self._predictor = Predictor(self._profile, fitted, self._goal)

    def compare(self) -> None:
        """Measure each shape with several numbers of processes beside the file, and fit the simulation to each."""
        self._show("compare", 0.0)
        began, seconds = monotonic(), self._seconds("compare")
        starts, gains = starts_of(self._shapes, len(self._cores)), dict[str, float]()
        bases = [self._closed]
        for start in starts:
            found: list[tuple[float, float]] | str = "no time was left to measure it"
            if str(start) == str(self._base):
                found = []
            elif monotonic() < began + seconds:
                found = self._pairs(start, range(_COMPARED), self._answers)
            if isinstance(found, str):
                self.report["not_tried"].append(f"{start.place}: {found}")
            else:
                gains[start.place] = statistics.mean(verify.gains_of(found) or [0.0])
                bases += [base for _, base in found]
            self._show("compare", (monotonic() - began) / seconds)
        if len(bases) > 1:
            self._each_s = max(self._each_s, (monotonic() - began) * _COMPARED / (len(bases) - 1))
        self._starts = sorted(
            (start for start in starts if start.place in gains), key=lambda start: -gains[start.place]
        )
        base, fitted = statistics.median(bases), self._predictor.closed_loop(self._base, self._clients)
        fitted = min(base * _MOST_OFF, max(base / _MOST_OFF, fitted))
        rates = [(self._clients, fitted * math.exp(gains[start.place])) for start in self._starts]
        shapes = [(shape.name, dict(shape.config), shape.twin) for shape in self._shapes]
        self._team.all("learn", self._predictor, shapes)
        asked = [(*each.setting, *rate) for each, rate in zip(self._starts, rates, strict=True)]
        slower = self._in_team("fit", asked)
        self._slower = dict(zip((start.place for start in self._starts), slower, strict=True))

    def _in_team(self, name: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method of those with each of the arguments, in as many at once as there are."""
        most = len(self._team)
        parts = [arguments[at : at + most] for at in range(0, len(arguments), most)]
        return [answer for part in parts for answer in self._team.each(name, part)]

    def _answers(self, _: int) -> float:
        """Answers per second of a closed loop."""
        rate = self._service.closed_loop(self._clients, self._loop_s)
        if not rate:
            raise ToolError(f"nothing was answered within {self._loop_s:g} s")
        return rate

    def _shortness(self, number: int) -> float:
        """The inverse of the p99 of an open loop at the given rate, with other arrivals in each pair."""
        goal, rate = self._goal, self._goal.rate or 1.0
        # NOTE: if over 1 % have no answer, the length of the loop stands for the p99.
        return 1 / min(goal.dues(rate)[-1] + goal.slo, self._service.measure(goal, rate, number).p99)

    def _pairs(
        self, candidate: Candidate, numbers: Iterable[int], figure: Callable[[int], float]
    ) -> list[tuple[float, float]] | str:
        """Figures of it and of the file in turns, or why it cannot be built."""
        try:
            return verify.pairs_of(self._service, candidate, self._base, numbers, figure)
        except ToolError as error:
            return str(error)

    def search(self) -> None:
        """Simulate candidates; the best ones and the original file become trials."""
        self._show("simulate", 0.0)
        search = Search(self._profile, self._predict, self._has_gpu)
        found = search.run(self._starts, self._seconds("simulate"), self._show)
        self.report["not_tried"] += [f"{name}: {why}" for name, why in search.not_tried.items()]
        self.report["simulated"] = len(search.judged)
        likely = [each.candidate for each in found]
        likely[_PLAIN - 1 : _PLAIN - 1] = self._starts[:_PLAIN]  # after the best one
        best = {str(each): each for each in likely}
        best.pop(str(self._base), None)
        same = [each for each in best.values() if not each.shape.alternative]
        others = [each for each in best.values() if each.shape.alternative]
        most = (1 - _OPEN_SHARE) * self._seconds("verify") / (_MEASURED_AGAIN * self._each_s)
        field = min(_FIELD, max(1, int(most)))
        half = field // 2 if others else 0
        chosen = [self._base, *same[: field - half], *others[:half]]
        for each in self._predict([(candidate, 0.0) for candidate in chosen], is_exact=True):
            if isinstance(each, Prediction):
                self._add_trial(Trial(each.candidate, each, each.limit or self._closed))
        # So that clients wait half as long as the SLO.
        clients = round(self._goal.slo * max(each.centre for each in self._trials) / 2)
        self._clients = min(self._clients, max(len(self._cores), clients))

    def _add_trial(self, trial: Trial) -> None:
        """Add a candidate, unless it changes results too much."""
        is_similar = True
        if trial.candidate.shape.alternative:
            trial.parity, is_similar = self._parity(trial.candidate.shape)
        if is_similar:
            self._trials.append(trial)
        else:
            self.report["notes"].append(f"{trial.candidate} was left out: {trial.parity}")

    def _predict(
        self, asked: Sequence[tuple[Candidate, float]], is_exact: bool = False
    ) -> list[Prediction | str | None]:
        """Predict candidates in the team's processes, as many at once as there are."""
        how = [(*each.setting, floor, is_exact, self._slower.get(each.place, 1.0)) for each, floor in asked]
        answers = self._in_team("predict", how)
        return [
            replace(found, candidate=one) if isinstance(found, Prediction) else found
            for (one, _), found in zip(asked, answers, strict=True)
        ]

    def is_disturbed(self) -> bool:
        """Whether other programs use too much of the cores; the verdict is then ``cannot tell``."""
        use = self._meter.stop()
        percent = use.fields(use.parent + (use.server or 0.0))["other_cpu_percent"]
        self.report["other_programs"] = percent and percent / 100 / len(os.sched_getaffinity(0))
        is_disturbed = (self.report["other_programs"] or 0.0) > verify.BUSY
        if is_disturbed:
            self.report["verdict"] = "cannot tell"
        return is_disturbed

    def verify(self) -> None:
        """Halve the candidates by gains beside the file while there is time, and measure the best in open loops."""
        yours, *field = self._trials
        yours.centre = self._calibrated.centre
        finalists = max(1, min(_FINALISTS, int(_OPEN_SHARE * self._seconds("verify") / self._turn_s) - 1))
        reserve, began = (1 + finalists) * self._turn_s, monotonic()
        ranked = self._ranked(field, reserve, is_first=True)
        running, took = len(ranked), monotonic() - began
        while ranked and self._left() > reserve + took:
            began, running = monotonic(), (running + 1) // 2
            ranked = verify.best_of([*self._ranked(ranked[:running], reserve), *ranked[running:]])
            took = monotonic() - began
        # NOTE: a single look is for the choice only.
        ranked.sort(key=lambda trial: -verify.interval_of(trial.gains)[0] if trial.looks > 1 else math.inf)
        self._trials = [yours, *ranked]
        ranked = ranked[:finalists]
        self._turn([yours, *ranked])
        if self._left() > 2 * self._turn_s:
            self._turn([*ranked[:1], yours])
        off = max(abs(each.predicted.figure(self._goal) / each.figure - 1) for each in (yours, *ranked))
        if verify.FAR_OFF < off < math.inf:
            self.report["notes"].append(f"predictions are up to {off:.0%} off; what was measured decides")
        kind, best, gain, interval = verify.judge(yours, ranked, self._goal)
        self.report |= {"verdict": kind, "gain": gain, "gain_interval": interval}
        self.report["best"] = text.trial_fields(best, self._goal)
        if not ranked:
            self.give_up("no other settings could be measured")
        elif self._goal.rate is not None and min(each.figure for each in (yours, *ranked)) >= verify.NEVER_S:
            self.give_up(f"at {self._goal.rate:g} requests/s nothing answers in time")
        if not self.is_disturbed() and self.report["verdict"] == "better":
            self.report["tuned"] = dict(best.candidate.config())

    def _ranked(self, trials: Sequence[Trial], reserve_s: float, is_first: bool = False) -> list[Trial]:
        """Measure their gains until ``reserve_s`` is left, at first not of all then; and sort them, the best first."""
        figure = self._answers if self._goal.rate is None else self._shortness
        pairs = min(_PAIRS, (self._left() - reserve_s) / self._pair_s) / max(1, len(trials))
        for trial in trials:
            found: list[tuple[float, float]] | str = "no time was left to measure it"
            if not is_first or trial is trials[0] or self._left() > reserve_s:
                first = trial.looks * _PAIRS
                found = self._pairs(trial.candidate, range(first, first + max(_COMPARED, int(pairs))), figure)
            if isinstance(found, str):
                self.report["notes"].append(f"{trial.candidate} was left out: {found}")
                trial.gains.clear()
            else:
                # NOTE: the first gains, by which it was chosen, are too good.
                trial.gains = [*(trial.gains if trial.looks > 1 else []), *verify.gains_of(found)]
                trial.looks += 1
                if self._goal.rate is None:  # open loops begin near what a closed one answers
                    closed = statistics.median(rate for rate, _ in found)
                    trial.centre = min(closed, max(_LEAST_START * closed, trial.centre))
            self._show_verified()
        return verify.best_of([trial for trial in trials if trial.gains])

    def _turn(self, trials: Sequence[Trial]) -> None:
        """Measure each once in open loops."""
        for trial in trials:
            verify.turn(self._service, trial, self._goal)
            self._show_verified()

    def _show_verified(self) -> None:
        self._show("verify", 1 - self._left() / self._seconds("verify"))

    def _parity(self, shape: Shape) -> tuple[str, bool]:
        """The verdict of ``torchpipe parity`` on a shape, and whether it passes."""
        with TemporaryDirectory() as folder:
            for number, body in enumerate([] if self.report["img_dir"] else self._images):
                Path(folder, f"{number}.jpg").write_bytes(body)
            try:
                return parity_of(self._shapes[0], shape, self.report["img_dir"] or folder)
            except TorchpipeError as error:
                return str(error), False

    def give_up(self, why: str) -> None:
        """The verdict is open."""
        self.report |= {"verdict": "cannot tell", "failed": why}

    def finish(self) -> dict[str, Any]:
        """The report, with the trials as far as they were measured."""
        trials = [text.trial_fields(trial, self._goal) for trial in self._trials]
        self.report |= {"yours": trials[0] if trials else None, "others": trials[1:]}
        finite: dict[str, Any] = text.finite(self.report)
        return finite


def _repeated(times: Sequence[float], count: int) -> Iterator[float]:
    """Repeat the pattern up to ``count`` arrivals, with gaps of 1 in between."""
    span = times[-1] - times[0] + 1
    return (times[number % len(times)] + number // len(times) * span for number in range(count))


# --- the command


def run_tune(args: argparse.Namespace) -> int:
    """0 after a verdict, 130 after Ctrl-C. Raises ``TorchpipeError`` if it cannot tune."""
    path = Path(args.config)
    out = args.out or path.with_name(f"{path.stem}.tuned.toml")
    if problem := output_problem(out):
        raise ToolError(f"--out {out} cannot be written: {problem}")
    check_outputs({"out": out, "json": args.json, "html": args.html})
    for option, file in (("--out", out), ("--json", args.json), ("--html", args.html)):
        if file is not None and file.exists() and path.exists() and file.samefile(path):
            raise ToolError(f"{option} {file}: would replace the file to tune")
    if os.path.realpath(out.parent) != os.path.realpath(path.parent):
        plan_pipeline(path)
        moved = parse_toml(path)
        moved.source = os.fspath(out)  # in another folder, it would perhaps not find the files beside it
        plan_pipeline(moved)
    imports = [part.strip() for each in args.imports or () for part in each.split(",") if part.strip()]
    with progress_bar(args.progress, has_lines=True) as show:
        report = tune(
            args.config,
            args.img_dir,
            slo_p99=args.slo_p99 and args.slo_p99 / 1000,
            rate=args.rate,
            cores=args.cores,
            gpu_memory=args.gpu_memory,
            allow_pixels=args.allow_pixels,
            budget=args.budget,
            times=args.replay and read_replay(args.replay, None),
            imports=imports,
            progress=lambda phase, share, left: show(phase, share, f"about {left:.0f} s left"),
        )
    print("\n".join([*text.lines_of(report), text.verdict_line(report)]), flush=True)
    if report["tuned"] is not None:
        more = "".join(f" --import {shlex.quote(each)}" for each in imports)
        report["command"] = f"torchpipe-serve {shlex.quote(str(out))} {report['best']['processes']}{more}"
        text.write_tuned(out, report)
        print(f"{out}\n{report['command']}", flush=True)
    if args.json is not None:
        write_json(args.json, report)
    if args.html is not None:
        write_text(args.html, text.page(report))
    return EXIT_INTERRUPTED if report["verdict"] == "interrupted" else 0
