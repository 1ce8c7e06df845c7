"""The result of ``torchpipe tune``, against the best of a brute sweep over the same settings."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import islice, product
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.common import REPOSITORY, Load, Report, progress
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.registry import import_all
from torchpipe_py.tools.load.arrivals import load_images, poisson_times
from torchpipe_py.tools.report import write_json
from torchpipe_py.tools.statistics import mean_interval
from torchpipe_py.tools.tune.candidates import Candidate, copied, knobs_of, shapes_of
from torchpipe_py.tools.tune.command import find_settings
from torchpipe_py.tools.tune.engine import Wanted
from torchpipe_py.tools.tune.measure import Goal, Loops, Point, Service
from torchpipe_py.tools.tune.report import lines_of
from torchpipe_py.tools.tune.search import Trial
from torchpipe_py.tools.tune.verify import measure_open_loops

DEMO = REPOSITORY / "configs" / "demo" / "images"
EXAMPLES = REPOSITORY / "configs" / "examples"
BACKENDS = (str(EXAMPLES / "backends.py"),)
CASES = {
    "demo": ("configs/demo.toml", DEMO, ()),
    "demo_nodes": ("configs/demo_nodes.toml", DEMO, ()),
    "detector": ("configs/detector.toml", EXAMPLES / "scenes", BACKENDS),
    "branch": ("configs/branch.toml", EXAMPLES, BACKENDS),
}
SWEEP = {"instance_num": (1, 2), "max": (1, 8), "threads": (1, 2), "batching_timeout": (0, 2)}
PASSES = (1, 4, 8)  # of the sweep: over all settings, the best quarter and the best eighth
LEAST_OF_SWEEP, MOST_SPREAD, MOST_OF_BUDGET = 0.95, 1.21, 1.0
FINALISTS, PAIRS = 3, 24  # closed loops of the tuned one beside each finalist's
CLIENTS = 20


class Paced:
    """Measures in seconds that are longer while the machine is slower: a shared one varies within seconds.

    ``pace`` measures the answers per second of a reference beside each open loop; ``usual`` of them make it a second.
    """

    def __init__(self, loops: Loops, pace: Callable[[], float], usual: float) -> None:
        self._loops, self._pace, self._usual = loops, pace, usual
        self.busy = loops.busy

    def figure(self, candidate: Candidate, number: int) -> float:
        """Answers per second of a closed loop, to be compared with loops that follow at once."""
        return self._loops.figure(candidate, number)

    def point(self, candidate: Candidate, rate: float, number: int) -> Point:
        """One open loop, in seconds of the usual pace."""
        pace = self._pace() / self._usual
        measured = self._loops.point(candidate, rate * pace, number)
        return Point(rate, pace * measured.p50, pace * measured.p99)


def tuning(args: argparse.Namespace) -> Report:
    """Requests per second within the SLO: tuned, and the best of the sweep, measured in turns."""
    report = Report("tune: requests/s within the SLO, and the best of a sweep; clients are workers")
    report.until = monotonic() + args.most_seconds
    for case in args.case or CASES:
        report.is_open |= not report.attempt(Path(case).stem, lambda: _compare(report, case, args))  # noqa: B023
    return report


def _compare(report: Report, name: str, args: argparse.Namespace) -> None:
    """Tune, the sweep and the turns, from where ``CASE.tune.json`` beside ``--json`` ends."""
    config, images, imports = CASES.get(name, (name, DEMO, ()))
    case, cores, tables = Path(name).stem, sorted(os.sched_getaffinity(0)), parse_toml(config)
    bodies = load_images(Path(images), False).bodies
    import_all(",".join(imports))
    file = args.json and args.json.with_name(f"{case}.tune.json")
    done: dict[str, Any] = (
        json.loads(file.read_text()) if file and file.exists() else {"rates": {}, "gains": {}, "turns": {}}
    )

    def save() -> None:
        if file:
            write_json(file, done)
        if monotonic() > report.until:
            raise RuntimeError(f"{len(done['rates'])} settings were swept; with --json, run it again to go on")

    with ExitStack() as stack:

        def service(engines: int = 0) -> Service:
            return stack.enter_context(closing(Service(bodies, imports, cores, engines)))

        reference, unchanged = service(), Candidate("reference", tables, len(cores))
        span = max(0.4, CLIENTS / reference.closed_loop(unchanged, CLIENTS, 1.0))

        def answers() -> float:
            return reference.closed_loop(unchanged, CLIENTS, span)

        if "result" not in done:
            paces, began, paused = dict[str, float](), monotonic(), 0.0

            def on_progress(phase: str, share: float, left: float) -> None:
                nonlocal paused
                if phase not in paces:
                    paused -= monotonic()
                    paces[phase] = answers()
                    paused += monotonic()

            wanted = Wanted(imports=imports, budget=args.budget, progress=on_progress)
            found = find_settings(config, images, wanted, allow_pixels=False)
            progress("\n".join(lines_of(found)))
            if not found.best:
                raise RuntimeError(found.verdict)
            done |= {
                "result": found.to_json(),
                "pace": statistics.median(paces.values()),
                "took": monotonic() - began - paused,
            }
            save()
        result, usual, rates, turns = done["result"], done["pace"], done["rates"], done["turns"]
        best, slo = result["best"], result["slo_p99"]
        swept, sweeping = _settings(tables, len(cores)), service()
        ranked = list(swept)
        for number, part in enumerate(PASSES):
            ranked = ranked[: len(swept) // part]
            for name in ranked:
                if len(rates.setdefault(name, [])) <= number:
                    rates[name].append(sweeping.closed_loop(swept[name], CLIENTS, 2 * span) * usual / answers())
                    save()
            ranked.sort(key=lambda name: -statistics.mean(rates[name]))
        config_of_tuned = copied(result["tuned"] or tables, config)
        tuned, gains = Candidate("tuned", config_of_tuned, best["workers"], best["engines"]), done["gains"]
        measuring = service(tuned.engines)
        seconds = max(args.seconds, 5 * slo)  # as in tune

        def paced(seed: int) -> tuple[Paced, Goal]:
            # NOTE: each round has arrivals of its own, since a few hundred may have no burst by chance.
            goal = Goal(slo, None, list(islice(poisson_times(1.0, seed), 20_000)), seconds)
            return Paced(Loops(measuring, goal, CLIENTS, span), answers, usual), goal

        for name in ranked[:FINALISTS]:
            if name not in gains:
                trial = Trial(tuned)
                trial.measure(paced(0)[0], swept[name], range(PAIRS))
                gains[name] = trial.gains
                save()
        top = min(ranked[:FINALISTS], key=lambda name: statistics.mean(gains[name]))
        trials = {"tuned": Trial(tuned), top: Trial(swept[top])}
        for number in range(args.rounds):
            measurer, goal = paced(number)
            for name in list(trials)[:: -1 if number % 2 else 1]:
                figures = turns.setdefault(name, [])
                if len(figures) <= number:
                    trials[name].figures = [measurer.figure(trials[name].candidate, number)]
                    measure_open_loops(trials[name], measurer, goal)
                    figures.append(trials[name].limit)
                    progress(f"{case}, round {number + 1}: {name}: {figures[-1]:.0f}/s")
                    save()
    for name, figures in rates.items():
        report.add(f"{case}, closed loop: {name}", swept[name].workers, Load(statistics.mean(figures)))
    for name, trial in trials.items():
        report.loads[f"{case}: {name}", trial.candidate.workers] = [Load(each) for each in turns[name]]
    _require(report, f"{case}: tuned to the best of {len(swept)}, closed loops", [*map(math.exp, gains[top])])
    ratios = [one / other for one, other in zip(turns["tuned"], turns[top], strict=True)]
    _require(report, f"{case}: the same, limits in open loops", ratios)
    report.require(f"{case}: seconds of tune, of its budget", done["took"] / args.budget, high=MOST_OF_BUDGET)


def _settings(tables: Tables, cores: int) -> dict[str, Candidate]:
    """The settings of the sweep. Nodes are set alike: each on its own would take hours."""
    swept = {}
    shapes = [each for each in shapes_of(tables) if not each.heads]  # engine processes are not swept
    for shape, workers in product(shapes, sorted({1, cores})):
        knobs = sorted((node, key) for node, plan in shape.pipeline.plans.items() for key in knobs_of(plan))
        keys = sorted({key for _, key in knobs})
        for values in product(*(SWEEP[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            name = ", ".join([f"{shape.shape}, {workers} workers", *(f"{key} {chosen[key]}" for key in keys)])
            setting = Candidate(shape.shape, shape.config, workers)
            for node, key in knobs:
                setting = setting.changed(node, key, chosen[key])
            swept[name] = setting
    return swept


def _require(report: Report, name: str, ratios: Sequence[float]) -> None:
    """Hold the median ratio against the bar, or leave it open if the 95 % interval is wider than 10 % to both sides."""
    low, high = (math.exp(bound) for bound in mean_interval([math.log(ratio) for ratio in ratios]))
    name += f" (95 % interval {low:.2f} to {high:.2f}, {len(ratios)} turns)"
    middle = statistics.median(ratios)
    if high > low * MOST_SPREAD:
        report.leave_open(f"CANNOT TELL {name}: {middle:.2f}")
    else:
        report.require(name, middle, low=LEAST_OF_SWEEP)
