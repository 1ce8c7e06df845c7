"""``torchpipe tune``, and the same from Python: profile the file, halve candidates, verify the best, report."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import TorchpipeError, logger
from torchpipe_py.files import output_problem
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.registry import import_code
from torchpipe_py.tools.load.arrivals import load_images, poisson_times, read_replay, rescale
from torchpipe_py.tools.load.judge import EXIT_INTERRUPTED
from torchpipe_py.tools.load.measure import CpuMeter
from torchpipe_py.tools.report import ToolError, check_outputs, progress_bar, write_json, write_text
from torchpipe_py.tools.tune import report as text
from torchpipe_py.tools.tune.candidates import ENGINES, shapes_of
from torchpipe_py.tools.tune.measure import CALLS, MOST_ARRIVALS, Goal, Loops, Profile, Service, profile
from torchpipe_py.tools.tune.pixels import alternatives_of
from torchpipe_py.tools.tune.search import Budget, Progress, Trial, search
from torchpipe_py.tools.tune.verify import verify

DEFAULT_BUDGET_S = 120.0

MOST_ONE_BY_ONE_SHARE = 0.3
"""Share of the budget that the images may take one at a time."""

OPEN_LOOPS, OPEN_LOOPS_SHARE = 24, 0.2
"""Open loops that find limits, about six for the file and each of three candidates; and their share of the budget."""

MOST_OVERDRAFT = 2.0
"""These may take the budget so many times: each has a least number of requests."""

MOST_IMAGES = 48
"""The most images used, evenly spaced over all."""


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
    usable, named = _checked(slo_p99, rate, cores, budget, times), _named_images(images)
    for name in imports:
        import_code(name)
    tables, trials, clock = Tables.of(config), list[Trial](), Budget(budget, progress)
    report = text.new_report(tables.source, len(usable), len(named), slo_p99, rate)
    report["img_dir"] = str(images) if isinstance(images, (str, os.PathLike)) else None
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable)  # NOTE: plans derive the number of instances from the cores
        plan_pipeline(tables)  # so that it warns only once
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel("ERROR")  # many plans would repeat warnings
        try:
            shapes = shapes_of(tables)
            if len(entered := shapes[0].pipeline.graph.entered) != 1:
                roots = f"requests enter at {', '.join(entered)}; only a file with one root can be tuned"
                raise ToolError(f"{tables.source}: {roots}")
            clock.show("profile")
            # NOTE: with other pixels, more nodes may be shared: those that decode on the GPU.
            engines = ENGINES[-1] if allow_pixels or any(shape.heads for shape in shapes) else 0
            service = Service([*named.values()], imports, usable, engines, gpu_memory or math.inf)
            stack.callback(service.close)
            if gpu_memory is not None and not service.has_gpu:
                raise ToolError("--gpu-memory: there is no GPU here; without it, memory is not limited")
            meter = CpuMeter(service.pids, [])
            meter.start()
            if allow_pixels:
                found = alternatives_of(shapes, report["img_dir"], [*named.values()], service.has_gpu)
                shapes, report["parity"] = [*shapes, *found[0]], found[1]
                report["not_tried"] += found[2]
            else:
                report["not_tried"].append("other pixels or precision: they change results; --allow-pixels tries them")
            known = profile(service, shapes[0], len(usable), list(named), MOST_ONE_BY_ONE_SHARE * budget)
            goal = _goal_of(slo_p99, rate, times, known, budget)
            if slo_p99 is not None and goal.slo < slo_p99:
                report["notes"].append(f"open loops are too short for an SLO of {1000 * slo_p99:.0f} ms")
            report |= {"slo_p99": goal.slo, "profile": {"lone": known.lone, "answers": known.answers}}
            if not _is_disturbed(report, meter):
                trials.append(yours := Trial(known.base, figures=[known.answers]))
                # So that clients wait half as long as the SLO.
                clients = min(known.clients, max(len(usable), round(goal.slo * known.answers / 2)))
                loops = Loops(service, goal, clients, known.loop_s)
                ranked = search(shapes, known, loops, clock, trials)
                verdict = verify(yours, ranked, loops, goal, clock)
                report |= {"verdict": verdict.kind, "failed": verdict.why, "gain": verdict.gain}
                report |= {"gain_interval": verdict.interval, "best": text.trial_fields(verdict.best, report)}
                if not _is_disturbed(report, meter) and verdict.kind == "better":
                    report["tuned"] = dict(verdict.best.candidate.config)
        except KeyboardInterrupt:
            report["verdict"] = "interrupted"
        except TorchpipeError as error:
            if not any(trial.gains for trial in trials):
                raise
            report |= {"verdict": "cannot tell", "failed": str(error), "tuned": None}
    return text.completed(report, trials)


def _checked(slo: Any, rate: Any, cores: Any, budget: Any, times: Any) -> list[int]:
    """The cores to use. Raises ``ToolError`` for wrong arguments of ``tune``."""

    def is_number(value: object) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    for name, value in {"slo_p99": slo, "rate": rate, "cores": cores, "budget": budget}.items():
        if value is not None and not (is_number(value) and 0 < value < math.inf):
            raise ToolError(f"{name}: expected a number above 0, got {value!r}")
    if cores is not None and not isinstance(cores, int):
        raise ToolError(f"cores: expected a whole number, got {cores!r}")
    if times is not None and (isinstance(times, str) or not all(map(is_number, times))):
        raise ToolError(f"times: expected numbers of seconds, got {times!r:.80}")
    if times is not None and (len(times) < 2 or not 0 < max(times) - min(times) < math.inf):
        raise ToolError("times: the times of --replay are all the same, or fewer than two")
    if slo is not None and rate is not None:
        raise ToolError("--slo-p99 and --rate: give one goal, the most requests or the shortest p99")
    usable = sorted(os.sched_getaffinity(0))[: usable_cores()]
    if cores is not None and cores > len(usable):
        raise ToolError(f"--cores {cores}: only {len(usable)} are usable here")
    if min(cores or 2, len(usable)) < 2:
        raise ToolError("one core: there is nothing to tune; serve with --workers 1 and one instance of each node")
    return usable[:cores]


def _named_images(images: str | os.PathLike[str] | Sequence[bytes]) -> dict[str, bytes]:
    """At most ``MOST_IMAGES`` encoded images by name."""
    if isinstance(images, (str, os.PathLike)):
        payload = load_images(Path(images), False)
        named = list(zip(map(str, payload.paths), payload.bodies, strict=True))
    else:
        named = [(f"images[{number}]", body) for number, body in enumerate(images)]
    if not named:
        raise ToolError("no images")
    return dict(named[:: -(-len(named) // MOST_IMAGES)])


def _goal_of(slo: float | None, rate: float | None, times: Any, known: Profile, budget: float) -> Goal:
    """The goal. Raises ``ToolError`` if it cannot be reached, or not measured within the budget."""
    if slo is not None and slo < known.lone:
        raise ToolError(f"p99 within {1000 * slo:g} ms: a single request already takes {1000 * known.lone:.3g} ms")
    needed = OPEN_LOOPS * CALLS[0] / (rate or known.answers)
    if needed > MOST_OVERDRAFT * budget:
        why = f"measuring candidates needs --budget {needed:.0f} or more"
        raise ToolError(f"{rate or known.answers:.2g} requests/s: {why}")
    arrivals = rescale(times[:MOST_ARRIVALS], 1.0) if times else list(islice(poisson_times(1.0, 0), MOST_ARRIVALS))
    return Goal.of(slo, rate, arrivals, known.lone, OPEN_LOOPS_SHARE * budget / OPEN_LOOPS)


def _is_disturbed(report: dict[str, Any], meter: CpuMeter) -> bool:
    """Whether other programs use too much of the cores so far; there is no verdict then."""
    use = meter.stop()
    percent = use.fields(use.parent + (use.server or 0.0))["other_cpu_percent"]
    report["other_programs"] = None if percent is None else percent / 100 / len(os.sched_getaffinity(0))
    is_disturbed = bool((report["other_programs"] or 0.0) > text.MOST_BY_OTHERS)
    if is_disturbed:
        report |= {"verdict": "cannot tell", "failed": ""}
    return is_disturbed


# --- the command


def run_tune(args: argparse.Namespace) -> int:
    """0 after a verdict, 130 after Ctrl-C. Raises ``TorchpipeError`` if it cannot tune."""
    path = Path(args.config)
    out = args.out or path.with_name(f"{path.stem}.tuned.toml")
    if problem := output_problem(out):
        raise ToolError(f"--out {out} cannot be written: {problem}")
    check_outputs({"out": out, "json": args.json, "html": args.html}, path)
    if os.path.realpath(out.parent) != os.path.realpath(path.parent):
        plan_pipeline(path)
        moved = parse_toml(path)
        moved.source = os.fspath(out)  # in another folder, it would perhaps not find the files beside it
        plan_pipeline(moved)
    imports = [part.strip() for each in args.imports or () for part in each.split(",") if part.strip()]
    options = {name: getattr(args, name) for name in ("rate", "cores", "gpu_memory", "allow_pixels", "budget")}
    options |= {"slo_p99": args.slo_p99 and args.slo_p99 / 1000, "imports": imports}
    options["times"] = args.replay and read_replay(args.replay, None)
    with progress_bar(args.progress, has_lines=True) as show:
        options["progress"] = lambda phase, share, left: show(phase, share, f"about {left:.0f} s left")
        report = tune(args.config, args.img_dir, **options)
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
