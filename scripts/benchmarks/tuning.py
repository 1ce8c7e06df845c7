"""What ``torchpipe tune`` finds, against the best of a brute sweep over the same settings."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from itertools import islice, product

from benchmarks.common import REPOSITORY, Load, Report, progress

CONFIGS = ("configs/demo.toml", "configs/demo_nodes.toml")
IMAGES = REPOSITORY / "configs" / "demo" / "images"
SLO_S = 0.02
SWEEP = {"instance_num": (1, 2), "max": (1, 4, 8), "threads": (1, 2), "batching_timeout": (0, 2)}


def tuning(args: argparse.Namespace) -> Report:
    """Requests per second with p99 within 20 ms: as written, tuned, and each of the sweep, all measured in turns."""
    report = Report(f"tune: requests/s with p99 within {1000 * SLO_S:g} ms, best of a sweep; clients are workers")
    for config in CONFIGS:
        report.attempt(config, lambda config=config: _compare(report, config, args))  # type: ignore[misc]
    return report


def _compare(report: Report, config: str, args: argparse.Namespace) -> None:
    from torchpipe_py.plan.config import Tables, parse_toml
    from torchpipe_py.tools.load.arrivals import load_images, poisson_times
    from torchpipe_py.tools.tune import tune
    from torchpipe_py.tools.tune.search import Goal, Prediction
    from torchpipe_py.tools.tune.shapes import Candidate, Shape, knobs_of, shapes_of
    from torchpipe_py.tools.tune.verify import Service, Trial, turn
    from torchpipe_py.tools.tune.worker import Team

    found = tune(config, IMAGES, slo_p99=SLO_S, budget=args.budget)
    cores, images = sorted(os.sched_getaffinity(0)), load_images(IMAGES, False).bodies
    shapes = shapes_of(parse_toml(config))
    best = found["best"] or found["yours"]
    candidates = {"as written": Candidate(shapes[0], len(cores))}
    candidates["tuned"] = Candidate(Shape.of("tuned", Tables(found["tuned"] or shapes[0].config)), best["workers"])
    for shape, workers in product(shapes, {1, len(cores)}):
        knobs = [(node, key) for node, plan in shape.pipeline.plans.items() for key in knobs_of(plan)]
        for values in product(*(SWEEP[key] for _, key in knobs)):
            chosen = tuple((*knob, float(value)) for knob, value in zip(knobs, values, strict=True))
            candidate = Candidate(shape, workers, chosen)
            candidates[str(candidate)] = candidate
    start = float(best["measured"] or 100.0)
    goal = Goal(SLO_S, None, list(islice(poisson_times(1.0, 1), 20_000)))
    trials = {name: Trial(each, Prediction(each, 0, 0, 0, (), 0), start) for name, each in candidates.items()}
    with closing(Team(config, images, (), cores)) as team:
        service = Service(team)
        service.seconds = args.seconds
        for number, (name, trial) in product(range(args.rounds), trials.items()):
            turn(service, trial, goal)
            report.add(f"{config}: {name}", trial.candidate.workers, Load(trial.figures[-1]))
            progress(f"{config}, round {number + 1}: {name}: {trial.figures[-1]:.0f}/s")
    top = max(trial.figure for trial in trials.values())
    report.require(f"{config}: tuned against the best", trials["tuned"].figure / top, low=0.95)
    report.require(f"{config}: error of its prediction", abs(best["predicted"] / best["measured"] - 1), high=0.1)
