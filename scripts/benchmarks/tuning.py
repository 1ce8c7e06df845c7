"""What ``torchpipe tune`` finds, against the best of a brute sweep over the same settings."""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from contextlib import closing
from itertools import islice, product
from pathlib import Path
from time import monotonic

from benchmarks.common import REPOSITORY, Load, Report, progress

DEMO = REPOSITORY / "configs" / "demo" / "images"
EXAMPLES = REPOSITORY / "configs" / "examples"
CASES = {
    "demo": ("configs/demo.toml", DEMO, ()),
    "demo_nodes": ("configs/demo_nodes.toml", DEMO, ()),
    "detector": ("configs/detector.toml", EXAMPLES / "scenes", (str(EXAMPLES / "backends.py"),)),
    "branch": ("configs/branch.toml", EXAMPLES, (str(EXAMPLES / "backends.py"),)),
}
SWEEP = {"instance_num": (1, 2), "max": (1, 8), "threads": (1, 2), "batching_timeout": (0, 2)}
_SCREEN_S, _SCREEN_CALLS, _SCREEN_SHARE, _FINALISTS = 0.3, 60, 0.5, 6


def tuning(args: argparse.Namespace) -> Report:
    """Requests per second within the SLO: tuned, and the best of the sweep, measured in turns."""
    report = Report("tune: requests/s within the SLO, and the best of a sweep; clients are workers")
    for case in args.case or CASES:
        config, images, imports = CASES.get(case, (case, DEMO, ()))
        name = Path(case).stem
        report.attempt(name, lambda: _compare(report, name, config, str(images), imports, args))  # noqa: B023
    return report


def _compare(
    report: Report, case: str, config: str, images: str, imports: tuple[str, ...], args: argparse.Namespace
) -> None:
    from torchpipe_py.plan.config import parse_toml
    from torchpipe_py.registry import import_code
    from torchpipe_py.tools.load.arrivals import load_images, poisson_times
    from torchpipe_py.tools.report import write_json
    from torchpipe_py.tools.tune import tune
    from torchpipe_py.tools.tune.report import lines_of
    from torchpipe_py.tools.tune.search import Goal
    from torchpipe_py.tools.tune.shapes import Candidate, Shape, copied, knobs_of, shapes_of
    from torchpipe_py.tools.tune.verify import Service, Trial, turn
    from torchpipe_py.tools.tune.worker import Team

    for name in imports:
        import_code(name)
    began = monotonic()
    found = tune(config, images, imports=imports, budget=args.budget)
    progress("\n".join(lines_of(found)))
    if args.json:
        write_json(args.json.with_name(f"{case}.tune.json"), found)
    cores, best = sorted(os.sched_getaffinity(0)), found["best"] or found["yours"]
    if best is None:
        raise RuntimeError(found["verdict"])
    shapes = [shape for shape in shapes_of(parse_toml(config)) if not shape.heads]  # engine processes are not swept
    tuned = Candidate(
        Shape.of("tuned", copied(found["tuned"] or parse_toml(config), config)),
        best["workers"],
        engines=best["engines"],
    )
    swept = {}
    for shape, workers in product(shapes, {1, len(cores)}):
        # Nodes are set alike: each on its own would take hours.
        knobs = [(node, key) for node, plan in shape.pipeline.plans.items() for key in knobs_of(plan)]
        keys = sorted({key for _, key in knobs})
        for values in product(*(SWEEP[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            settings = tuple(sorted((node, key, float(chosen[key])) for node, key in knobs))
            name = ", ".join([f"{shape.name}, {workers} workers", *(f"{key} {chosen[key]}" for key in keys)])
            swept[name] = Candidate(shape, workers, settings)
    # NOTE: each round has arrivals of its own, since a few hundred may have no burst by chance.
    patterns = [list(islice(poisson_times(1.0, number + 1), 20_000)) for number in range(args.rounds)]
    goals = [Goal(found["slo_p99"], None, times, args.seconds) for times in patterns]
    with closing(Team(config, load_images(Path(images), False).bodies, imports, cores, best["engines"])) as team:
        service = Service(team)
        start = float(best["measured"] or 100.0)
        rates: dict[str, list[float]] = {name: [] for name in swept}
        for name in [*swept, *reversed(swept)]:
            if rates[name] and monotonic() - began > _SCREEN_SHARE * args.most:
                break
            service.build(swept[name])
            rates[name].append(service.closed_loop(20, max(_SCREEN_S, _SCREEN_CALLS / start)))
            report.add(f"{case}, closed loop: {name}", swept[name].workers, Load(rates[name][-1]))
        every = {"tuned": tuned} | {
            name: swept[name] for name in sorted(rates, key=lambda name: -statistics.mean(rates[name]))[:_FINALISTS]
        }
        trials = {name: Trial.around(each, start, start) for name, each in every.items()}
        for number, goal in enumerate(goals):
            round_began = monotonic()
            for name in list(trials)[:: -1 if number % 2 else 1]:
                turn(service, trials[name], goal)
                report.add(f"{case}: {name}", trials[name].candidate.workers, Load(trials[name].figures[-1]))
                progress(f"{case}, round {number + 1}: {name}: {trials[name].figures[-1]:.0f}/s")
            if number == 0:  # the better half, and the tuned file
                kept = sorted(list(trials)[1:], key=lambda name: -trials[name].figure)[: _FINALISTS // 2]
                trials = {name: trials[name] for name in ("tuned", *kept)}
            if monotonic() - began + (monotonic() - round_began) > args.most:
                break
    ratios = []
    for number, figure in enumerate(trials["tuned"].figures):
        # NOTE: the best of noisy figures is too good: which is best say the other rounds.
        others = [(trial.figures[:number] + trial.figures[number + 1 :], trial) for trial in trials.values()]
        top = max(others, key=lambda each: statistics.median(each[0] or [0.0]))[1]
        ratios.append(figure / top.figures[number])
    _require(report, f"{case}: tuned against the best of {len(swept)}", ratios, 1.0, low=0.95)
    p99s = [point["p99"] or 60.0 for point in best["points"] if point["rate"] == best["rate"]]
    _require(report, f"{case}: measured to predicted", best["turns"], best["predicted"], high=0.1)
    _require(report, f"{case}: p99, measured to predicted", p99s, best["p99_predicted"], high=0.2)


def _require(
    report: Report, name: str, figures: Sequence[float], of: float, low: float | None = None, high: float | None = None
) -> None:
    """Hold the median of ``figures / of``, or with ``high`` its distance from 1, against the bar.

    If the 95 % interval of the figures is wider than ``high`` (10 %) to both sides, there is a remark instead.
    """
    from torchpipe_py.tools.tune.verify import interval_of

    ends = [math.exp(bound) / of for bound in interval_of([math.log(figure) for figure in figures])]
    name += f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f}, {len(figures)} turns)"
    middle = statistics.median(figures) / of
    if not ends[1] <= ends[0] * (1 + (high or 0.1)) ** 2:
        report.remarks.append(f"CANNOT TELL {name}: {middle:.2f}")
    else:
        report.require(name, middle if low is not None else abs(middle - 1), low=low, high=high)
