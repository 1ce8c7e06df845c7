"""``torchpipe tune``, and the same from Python: profile, calibrate, simulate, verify, report."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from torchpipe_py.errors import counted, logger
from torchpipe_py.plan.build import MOST_BY_CORES, plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.tools.load.arrivals import load_images, poisson_times, read_replay, rescale
from torchpipe_py.tools.load.measure import cpu_model
from torchpipe_py.tools.report import ToolError, check_output, write_json, write_text
from torchpipe_py.tools.tune import report as text
from torchpipe_py.tools.tune.profile import Profiler
from torchpipe_py.tools.tune.search import EXACT, Goal, Prediction, Predictor, Search, calibrate, quantile
from torchpipe_py.tools.tune.shapes import Candidate, shapes_of
from torchpipe_py.tools.tune.verify import LEAST_TURNS, Service, Trial, halve, is_off, judge, turn
from torchpipe_py.tools.tune.worker import Worker, ask_all

DEFAULT_BUDGET_S = 120.0
SLO_OF_LONE = 10.0
"""Without an SLO: so many times the p50 of a lone request, at least ``LEAST_SLO_S``."""

LEAST_SLO_S = 0.02
MOST_IMAGES = 48
"""That are profiled, evenly spaced over all."""

EXIT_INTERRUPTED = 130

_SHARES = {"profile": 0.22, "calibrate": 0.08, "simulate": 0.2, "verify": 0.5}
_ARRIVALS = 20_000
_CLOSED_CLIENTS = 20  # as torchpipe load has by default
_OPEN_LOAD = 0.7
_TRIALS = 3
_HALVED = 8
_TOLERANCE = 1e-3  # of a number in a result: batches of other sizes round differently
_NOT_TRIED = (
    "other pixels (another decoder or resize), another precision, new engines: they change results",
    "engine processes for shared nodes: see docs/gpu.md",
    "the service's own front, a tenth of a millisecond for each request: check the file with torchpipe load",
)

Progress = Callable[[str, float, float], None]
"""Takes the phase, its share that is done, and the seconds left."""


def tune(
    config: str | os.PathLike[str] | dict[str, Any],
    images: str | os.PathLike[str] | Sequence[bytes],
    *,
    slo_p99: float | None = None,
    rate: float | None = None,
    cores: int | None = None,
    gpu_memory: int | None = None,
    budget: float = DEFAULT_BUDGET_S,
    times: Sequence[float] | None = None,
    imports: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find settings of a configuration that serve more, measured; the report that ``--json`` writes.

    ``images`` are a folder or encoded images. The goal is the most requests per second of which 99 % are answered
    within ``slo_p99`` seconds, or the shortest p99 at ``rate`` requests per second. ``cores`` may be used, and
    ``gpu_memory`` bytes. It takes ``budget`` seconds, about. ``times`` are arrivals in seconds in place of Poisson's.
    ``imports`` are modules or files with backends of your own. ``report["tuned"]`` has the tables of the tuned
    configuration where one is better, else None. Ctrl-C ends it with what is known so far.
    ``ToolError`` and ``ConfigError`` say in one line what cannot be tuned.
    """
    bodies = load_images(Path(images), False).bodies if isinstance(images, (str, os.PathLike)) else list(images)
    if not bodies:
        raise ToolError("no images")
    usable = sorted(os.sched_getaffinity(0))
    count = min(cores or len(usable), len(usable))
    if count < 2:
        raise ToolError("one core: there is nothing to share out; serve with --workers 1 and one instance of each node")
    tables = parse_toml(config) if not isinstance(config, dict) else Tables(config)
    chosen = bodies[:: -(-len(bodies) // MOST_IMAGES)]
    plan_pipeline(tables)  # it warns, if of anything, once
    logger.addFilter(_is_error)
    try:
        run = _Tuning(tables, chosen, usable[:count], list(imports), budget, progress or (lambda *_: None))
        run.report |= {"img_dir": str(images) if isinstance(images, (str, os.PathLike)) else "", "rate": rate}
        with run:
            run.profile(slo_p99)
            run.set_goal(slo_p99, rate, times)
            run.calibrate()
            run.search(gpu_memory)
            run.verify()
    finally:
        logger.removeFilter(_is_error)
    return run.report


def _is_error(record: logging.LogRecord) -> bool:
    """Hundreds of plans would repeat what the first one warned of."""
    return record.levelno >= logging.ERROR


@dataclass
class _Tuning:
    """One run: the phases in their order, and the report that grows with them.

    As a context it ends the processes, and leaves what is known where Ctrl-C ends it.
    """

    tables: Tables
    images: list[bytes]
    cores: list[int]
    imports: list[str]
    budget: float
    progress: Progress
    report: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> _Tuning:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *_: Any) -> bool:
        self._profiler.close()
        if isinstance(error, KeyboardInterrupt):
            self.report["verdict"] = "interrupted"
        return isinstance(error, KeyboardInterrupt)

    def __post_init__(self) -> None:
        self._until = monotonic() + self.budget
        self._trials: list[Trial] = []
        self.report = {
            "config": self.tables.source,
            "date": datetime.now(timezone.utc).isoformat(),
            "machine": {"cpu_model": cpu_model(), "cores": os.cpu_count()},
            "cores": len(self.cores),
            "images": len(self.images),
            "verdict": "interrupted",
            "yours": None,
            "others": [],
            "best": None,
            "tuned": None,
            "notes": [],
            "not_tried": list(_NOT_TRIED),
            "slo_p99_ms": None,
            "slo_given": False,
            "simulated": 0,
        }
        self._shapes = shapes_of(self.tables)
        workers = [Worker(self.tables.source, self.images, self.imports, self.cores) for _ in self.cores]
        self._profiler = Profiler(self._shapes, workers, self._seconds("profile"))
        self._service = Service(workers, len(self.images))
        self._workers = workers

    def _seconds(self, phase: str) -> float:
        return self.budget * _SHARES[phase]

    def _left(self) -> float:
        return self._until - monotonic()

    def _show(self, phase: str, share: float) -> None:
        self.progress(phase, share, max(0.0, self._left()))

    def profile(self, slo: float | None) -> None:
        """Run the images once, and each node alone."""
        self._show("profile", 0.0)
        self._profiler.capture()
        captured = self._profiler.profile.captured[self._shapes[0].name]
        if len(captured.failed) == len(self.images):
            raise ToolError(f"{self.tables.source}: no image has a result: {next(iter(captured.failed.values()))}")
        if captured.failed:
            first = next(iter(captured.failed.values()))
            self.report["notes"].append(f"{counted(len(captured.failed), 'image')} without a result: {first}")
        lone = statistics.median(captured.lone)
        self.report["lone_ms"] = 1000 * lone
        if slo is not None and slo < lone:
            raise ToolError(f"p99 within {1000 * slo:g} ms: a request alone takes {1000 * lone:.3g} ms already")
        self._has_gpu = captured.gpu_bytes > 0
        self._profiler.measure(self._profiler.prepare(self._has_gpu), self._show)
        self.report["profile"] = text.profile_fields(self._profiler.profile)
        ask_all(self._workers, "release")

    def set_goal(self, slo: float | None, rate: float | None, times: Sequence[float] | None) -> None:
        """What is looked for, and the arrivals of all that is simulated and measured."""
        goal_slo = slo or max(LEAST_SLO_S, SLO_OF_LONE * self.report["lone_ms"] / 1000)
        unit = rescale(times, 1.0) if times else list(islice(poisson_times(1.0, 0), _ARRIVALS))
        self._goal = Goal(goal_slo, rate, [*_repeated(unit, _ARRIVALS)])
        self.report |= {"slo_p99_ms": 1000 * goal_slo, "slo_given": slo is not None}

    def calibrate(self) -> None:
        """Measure the file as it is, and fit the simulation to that."""
        self._show("calibrate", 0.0)
        workers = 1 if self._has_gpu else min(len(self.cores), MOST_BY_CORES)
        self._base = Candidate(self._shapes[0], workers)
        self._results = self._service.build(self._base)
        seconds = max(0.5, self._seconds("calibrate") / 3)
        closed = max(1.0, self._service.closed_loop(_CLOSED_CLIENTS, seconds))
        self._show("calibrate", 0.4)
        rate = _OPEN_LOAD * closed
        dues = self._goal.dues(rate, max(50, round(rate * seconds)))
        latencies = sorted(self._service.open_loop(dues, 2.0))
        measured = closed, quantile(latencies, 0.5), quantile(latencies, 0.99)
        fitted = calibrate(
            self._profiler.profile, len(self.images), self._goal, self._base, _CLOSED_CLIENTS, rate, measured
        )
        self.report["calibration"] = text.calibration_fields(fitted)
        self._predictor = Predictor(self._profiler.profile, len(self.images), fitted.machine, self._goal)
        self._closed = closed

    def search(self, gpu_memory: int | None) -> None:
        """Simulate candidates; the best, and the file as it is, become trials."""
        captured = self._profiler.profile.captured

        def is_allowed(candidate: Candidate) -> bool:
            return not gpu_memory or captured[candidate.shape.name].gpu_bytes * candidate.workers <= gpu_memory

        search = Search(self._predictor, self._shapes, self._has_gpu, is_allowed)
        best = search.run(self._base, self._seconds("simulate"), self._show)
        self._predicted = [found for found in best if self._is_other(found)]
        yours = self._predictor.predict(self._base)
        self._yours = self._trial(self._base, yours)
        for found in self._predicted[:_TRIALS]:
            exact = self._predictor.predict(found.candidate, calls=EXACT)
            self._trials.append(self._trial(found.candidate, exact or found))
        self.report["simulated"] = self._predictor.simulated
        self._write_trials()

    def _is_other(self, found: Prediction) -> bool:
        return str(found.candidate) != str(self._base)

    def _trial(self, candidate: Candidate, predicted: Prediction | None) -> Trial:
        known = predicted.limit if predicted is not None and predicted.limit > 0 else self._closed
        return Trial(candidate, predicted, self._goal.rate or known)

    def verify(self) -> None:
        """Measure the trials in turns, the file as it is among them; judge."""
        self._trials = [trial for trial in self._trials if self._has_same_results(trial)]
        end = self._left()
        self._take_turns(end)
        why = is_off([self._yours, *self._trials], self._goal)
        if why and self._left() > 0.15 * self.budget:
            self.report["notes"].append(f"{why}: the best {_HALVED} were measured by successive halving")
            self._by_halving()
        elif why:
            self.report["notes"].append(f"{why}; no time was left to measure more candidates")
        trials = [trial for trial in self._trials if trial.figures]
        verdict = judge(self._yours, trials, self._goal, self._profiler.profile.disturbed)
        self.report |= text.verdict_fields(verdict)
        self._write_trials()
        self.report["best"] = text.trial_fields(verdict.best, self._goal)
        if verdict.kind == "better":
            tables = verdict.best.candidate.config()
            self.report["tuned"] = {name: dict(table) for name, table in tables.items()}

    def _take_turns(self, seconds: float, most: int = 9) -> None:
        """The trials in turns, each turn in another order, for half of the time; three times at least."""
        until = monotonic() + seconds / 2
        self._service.share_out(seconds / 2, 1 + len(self._trials))
        for number in range(most):
            if number >= LEAST_TURNS and monotonic() > until:
                return
            trials = [self._yours, *self._trials]
            for trial in trials if number % 2 == 0 else trials[::-1]:
                turn(self._service, trial, self._goal)
                self._write_trials()
                self._show("verify", min(1.0, 1 - (until - monotonic()) / seconds * 2))

    def _by_halving(self) -> None:
        tried = {str(trial.candidate) for trial in self._trials}
        more = [found for found in self._predicted if str(found.candidate) not in tried]
        others = [self._trial(found.candidate, found) for found in more[: _HALVED - len(self._trials)]]
        others = [trial for trial in others if self._has_same_results(trial)]
        kept = halve(self._service, [*self._trials, *others], self._goal, lambda: self._left() / 2, self._show)
        for trial in [self._yours, *kept]:
            trial.figures.clear()
        self._trials = kept[:2]
        self._take_turns(2 * max(0.0, self._left()), LEAST_TURNS)

    def _has_same_results(self, trial: Trial) -> bool:
        """Whether it gives the images the results that the file as it is gives."""
        try:
            problem = "" if _same(self._results, self._service.build(trial.candidate)) else "it gives other results"
        except ToolError as error:
            problem = str(error)
        if problem:
            self.report["notes"].append(f"{trial.candidate} was left out: {problem}")
        return not problem

    def _write_trials(self) -> None:
        """What is known of them, so that Ctrl-C finds it."""
        self.report["yours"] = text.trial_fields(self._yours, self._goal)
        self.report["others"] = [text.trial_fields(trial, self._goal) for trial in self._trials]


def _repeated(times: Sequence[float], count: int) -> Iterator[float]:
    """The pattern again and again, up to ``count`` arrivals; one gap lies between."""
    span = times[-1] - times[0] + (times[-1] - times[0]) / max(1, len(times) - 1)
    for number in range(count):
        yield times[number % len(times)] + number // len(times) * span


def _same(one: Any, other: Any) -> bool:
    """Whether results are equal, numbers nearly."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (int, float, np.ndarray)) and isinstance(other, (int, float, np.ndarray)):
        return np.shape(one) == np.shape(other) and bool(np.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE))
    return bool(type(one) is type(other) and one == other)


# --- the command


def run_tune(args: argparse.Namespace) -> int:
    """0 when it is known whether something is better, 130 after Ctrl-C; ``TorchpipeError`` for what cannot be tuned."""
    path = Path(args.config)
    out = args.out or path.with_name(f"{path.stem}.tuned.toml")
    for flag, file in (("--out", out), ("--json", args.json), ("--html", args.html)):
        check_output(file, flag)
    if os.path.realpath(out) == os.path.realpath(path):
        raise ToolError(f"--out {out}: would replace the file that is tuned")
    with _progress_line(args.progress) as progress:
        report = tune(
            args.config,
            args.img_dir,
            slo_p99=args.slo_p99 and args.slo_p99 / 1000,
            rate=args.rate,
            cores=args.cores,
            gpu_memory=args.gpu_memory,
            budget=args.budget,
            times=args.replay and read_replay(args.replay, None),
            imports=[part.strip() for each in args.imports or () for part in each.split(",") if part.strip()],
            progress=progress,
        )
    if report["tuned"] is not None:
        options = f" --workers {report['best']['workers']}"
        imports = "".join(f" --import {shlex.quote(each)}" for each in args.imports or ())
        report["command"] = f"torchpipe-serve {shlex.quote(str(out))}{options}{imports}"
        text.write_tuned(out, report, report["tuned"])
    text.print_report(report)
    if report["tuned"] is not None:
        print(f"{out}\n{report['command']}")
    if args.json is not None:
        write_json(args.json, report)
    if args.html is not None:
        write_text(args.html, text.page(report))
    return EXIT_INTERRUPTED if report["verdict"] == "interrupted" else 0


@contextmanager
def _progress_line(wanted: bool) -> Iterator[Progress]:
    """Writes phase, share and time left on one line of a terminal."""
    if not (wanted and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda *_: None
        return

    def show(phase: str, share: float, left: float) -> None:
        bar = "#" * round(20 * share)
        print(f"\r{phase:<10} [{bar:<20}] about {left:.0f} s left  ", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        with suppress(OSError):
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
