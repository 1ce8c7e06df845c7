"""What ``torchpipe tune`` finds, against the best of a brute sweep over the same settings."""

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
from torchpipe_py.tools.tune import tune
from torchpipe_py.tools.tune.report import lines_of
from torchpipe_py.tools.tune.search import Goal
from torchpipe_py.tools.tune.shapes import Candidate, Shape, copied, knobs_of, shapes_of
from torchpipe_py.tools.tune.verify import Service, Trial, gains_of, interval_of, pairs_of, turn
from torchpipe_py.tools.tune.worker import Team

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
FINALISTS, PAIRS = 3, 24  # closed loops of the tuned one beside each finalist's
CLIENTS = 20


class Paced(Service):
    """Measures in seconds that are longer while the machine is slower: a shared one varies within seconds.

    ``pace`` measures the answers per second of a reference beside each open loop; ``usual`` of them make it a second.
    """

    def __init__(self, team: Team, pace: Callable[[], float], usual: float) -> None:
        super().__init__(team)
        self._pace, self._usual = pace, usual

    def open_loop(self, dues: Sequence[float], grace_s: float) -> list[float]:
        """Sorted latencies, in seconds of the usual pace."""
        pace = self._pace() / self._usual
        return [pace * each for each in super().open_loop([due / pace for due in dues], grace_s / pace)]


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

        def team(engines: int = 0) -> Team:
            return stack.enter_context(closing(Team(config, bodies, imports, cores, engines)))

        reference = Service(team())
        reference.build(Candidate(Shape.of("reference", tables), len(cores)))
        span = max(0.4, CLIENTS / reference.closed_loop(CLIENTS, 1.0))

        def answers() -> float:
            return max(1.0, reference.closed_loop(CLIENTS, span))

        if "found" not in done:
            paces = [answers()]

            def on_progress(phase: str, share: float, left: float) -> None:
                if phase == "calibrate":
                    paces.append(answers())

            found = tune(config, images, imports=imports, budget=args.budget, progress=on_progress)
            progress("\n".join(lines_of(found)))
            if not found["best"]:
                raise RuntimeError(found["verdict"])
            done |= {"found": found, "pace": statistics.median(paces)}
            save()
        found, usual, rates, turns = done["found"], done["pace"], done["rates"], done["turns"]
        best, slo = found["best"], found["slo_p99"]
        swept, service = _settings(tables, len(cores)), Service(team())
        ranked = list(swept)
        for number, part in enumerate(PASSES):
            ranked = ranked[: len(swept) // part]
            for name in ranked:
                if len(rates.setdefault(name, [])) <= number:
                    service.build(swept[name])
                    rates[name].append(service.closed_loop(CLIENTS, 2 * span) * usual / answers())
                    save()
            ranked.sort(key=lambda name: -statistics.mean(rates[name]))
        shape = Shape.of("tuned", copied(found["tuned"] or tables, config))
        tuned = Candidate(shape, best["workers"], engines=best["engines"])
        paced, gains = Paced(team(tuned.engines), answers, usual), done["gains"]

        def loop(_: int) -> float:
            return paced.closed_loop(CLIENTS, span)

        for name in ranked[:FINALISTS]:
            gains[name] = gains.get(name) or gains_of(pairs_of(paced, tuned, swept[name], range(PAIRS), loop))
            save()
        top = min(ranked[:FINALISTS], key=lambda name: statistics.mean(gains[name]))
        entered = {"tuned": tuned, top: swept[top]}
        trials = {name: Trial.around(each, best["predicted"], best["rate"]) for name, each in entered.items()}
        for number in range(args.rounds):
            # NOTE: each round has arrivals of its own, since a few hundred may have no burst by chance.
            times = list(islice(poisson_times(1.0, number), 20_000))
            goal = Goal(slo, None, times, max(args.seconds, 5 * slo))  # as in tune
            for name in list(trials)[:: -1 if number % 2 else 1]:
                figures = turns.setdefault(name, [])
                if len(figures) <= number:
                    turn(paced, trials[name], goal)
                    figures.append((trials[name].centre, min(60.0, trials[name].p99s[-1])))
                    progress(f"{case}, round {number + 1}: {name}: {figures[-1][0]:.0f}/s")
                    save()
    for name, figures in rates.items():
        report.add(f"{case}, closed loop: {name}", swept[name].workers, Load(statistics.mean(figures)))
    limits = {name: [limit for limit, _ in turns[name]] for name in trials}
    for name, figures in limits.items():
        report.loads[f"{case}: {name}", trials[name].candidate.workers] = [Load(each) for each in figures]
    _require(report, f"{case}: tuned to the best of {len(swept)}, closed loops", [*map(math.exp, gains[top])], low=0.95)
    ratios = [one / other for one, other in zip(limits["tuned"], limits[top], strict=True)]
    _require(report, f"{case}: the same, limits in open loops", ratios, low=0.95)
    _require(report, f"{case}: measured to predicted", [each / best["predicted"] for each in limits["tuned"]], high=0.1)
    p99s = [p99 / best["p99_predicted"] for _, p99 in turns["tuned"]]
    _require(report, f"{case}: p99, measured to predicted", p99s, high=0.2)


def _settings(tables: Tables, cores: int) -> dict[str, Candidate]:
    """The settings of the sweep. Nodes are set alike: each on its own would take hours."""
    swept = {}
    shapes = [each for each in shapes_of(tables) if not each.heads]  # engine processes are not swept
    for shape, workers in product(shapes, sorted({1, cores})):
        knobs = sorted((node, key) for node, plan in shape.pipeline.plans.items() for key in knobs_of(plan))
        keys = sorted({key for _, key in knobs})
        for values in product(*(SWEEP[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            name = ", ".join([f"{shape.name}, {workers} workers", *(f"{key} {chosen[key]}" for key in keys)])
            swept[name] = Candidate(shape, workers, tuple((node, key, float(chosen[key])) for node, key in knobs))
    return swept


def _require(report: Report, name: str, ratios: Sequence[float], **bar: float) -> None:
    """Hold the median ratio, or with ``high`` its distance from 1, against the bar.

    If the ratios' 95 % interval is wider than ``high`` (or 10 %) to both sides, there is a remark instead.
    """
    ends = [math.exp(bound) for bound in interval_of([math.log(ratio) for ratio in ratios])]
    name += f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f}, {len(ratios)} turns)"
    middle = statistics.median(ratios)
    if ends[1] > ends[0] * (1 + bar.get("high", 0.1)) ** 2:
        report.leave_open(f"CANNOT TELL {name}: {middle:.2f}")
    else:
        report.require(name, abs(middle - 1) if "high" in bar else middle, **bar)
