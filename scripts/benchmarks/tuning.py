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
from torchpipe_py.plan.config import parse_toml
from torchpipe_py.registry import import_code
from torchpipe_py.tools.load.arrivals import load_images, poisson_times
from torchpipe_py.tools.report import write_json
from torchpipe_py.tools.tune import tune
from torchpipe_py.tools.tune.report import lines_of
from torchpipe_py.tools.tune.search import Goal
from torchpipe_py.tools.tune.shapes import Candidate, Shape, copied, knobs_of, shapes_of
from torchpipe_py.tools.tune.verify import Service, Trial, interval_of, turn
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
FINALISTS = 6
CLOSED_LOOP = (0.5, 100)  # that selects them: at least so many seconds, and calls at the rate of the tuned file


def tuning(args: argparse.Namespace) -> Report:
    """Requests per second within the SLO: tuned, and the best of the sweep, measured in turns."""
    report = Report("tune: requests/s within the SLO, and the best of a sweep; clients are workers")
    report.until = monotonic() + args.most_seconds
    for case in args.case or CASES:
        report.attempt(Path(case).stem, lambda: _compare(report, case, args))  # noqa: B023
    return report


def _compare(report: Report, name: str, args: argparse.Namespace) -> None:
    config, images, imports = CASES.get(name, (name, DEMO, ()))
    case = Path(name).stem
    for module in imports:
        import_code(module)
    found = tune(config, images, imports=imports, budget=args.budget)
    progress("\n".join(lines_of(found)))
    if args.json:
        write_json(args.json.with_name(f"{case}.tune.json"), found)
    cores, best = sorted(os.sched_getaffinity(0)), found["best"] or found["yours"]
    if best is None:
        raise RuntimeError(found["verdict"])
    shape = Shape.of("tuned", copied(found["tuned"] or parse_toml(config), config))
    tuned, swept = Candidate(shape, best["workers"], engines=best["engines"]), {}
    shapes = [each for each in shapes_of(parse_toml(config)) if not each.heads]  # engine processes are not swept
    for shape, workers in product(shapes, {1, len(cores)}):
        # Nodes are set alike: each on its own would take hours.
        knobs = sorted((node, key) for node, plan in shape.pipeline.plans.items() for key in knobs_of(plan))
        keys = sorted({key for _, key in knobs})
        for values in product(*(SWEEP[key] for key in keys)):
            chosen = dict(zip(keys, values, strict=True))
            name = ", ".join([f"{shape.name}, {workers} workers", *(f"{key} {chosen[key]}" for key in keys)])
            swept[name] = Candidate(shape, workers, tuple((node, key, float(chosen[key])) for node, key in knobs))
    # NOTE: each round has arrivals of its own, since a few hundred may have no burst by chance.
    patterns = [list(islice(poisson_times(1.0, number + 1), 20_000)) for number in range(args.rounds)]
    with closing(Team(config, load_images(Path(images), False).bodies, imports, cores, best["engines"])) as team:
        service, start = Service(team), float(best["measured"] or 100.0)
        rates: dict[str, float] = {}
        for name, candidate in swept.items():
            service.build(candidate)
            rates[name] = service.closed_loop(20, max(CLOSED_LOOP[0], CLOSED_LOOP[1] / start))
            report.add(f"{case}, closed loop: {name}", candidate.workers, Load(rates[name]))
        finalists = sorted(swept, key=lambda name: -rates[name])[:FINALISTS]
        entered = {"tuned": tuned} | {name: swept[name] for name in finalists}
        trials = {name: Trial.around(each, start, start) for name, each in entered.items()}
        for number, times in enumerate(patterns):
            goal = Goal(found["slo_p99"], None, times, args.seconds)
            for name in list(trials)[:: -1 if number % 2 else 1]:
                turn(service, trials[name], goal)
                report.add(f"{case}: {name}", trials[name].candidate.workers, Load(trials[name].figures[-1]))
                progress(f"{case}, round {number + 1}: {name}: {trials[name].figures[-1]:.0f}/s")
            if number == 0:  # the better half, and the tuned file
                kept = sorted(finalists, key=lambda name: -trials[name].figure)[: FINALISTS // 2]
                trials = {name: trials[name] for name in ("tuned", *kept)}
            if monotonic() > report.until:
                break
    ratios = []
    for number, figure in enumerate(trials["tuned"].figures):
        # NOTE: the best of noisy figures is too good: the other rounds determine which is best.
        others = [(trial.figures[:number] + trial.figures[number + 1 :], trial) for trial in trials.values()]
        top = max(others, key=lambda each: statistics.median(each[0] or [0.0]))[1]
        ratios.append(figure / top.figures[number])
    _require(report, f"{case}: tuned against the best of {len(swept)}", ratios, low=0.95)
    limits = [figure / best["predicted"] for figure in best["turns"]]
    _require(report, f"{case}: measured to predicted", limits, high=0.1)
    p99s = [(point["p99"] or 60.0) / best["p99_predicted"] for point in best["points"] if point["rate"] == best["rate"]]
    _require(report, f"{case}: p99, measured to predicted", p99s, high=0.2)


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
