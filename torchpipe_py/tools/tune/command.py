"""``torchpipe tune``, and the same from Python."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchpipe_py.errors import without_warnings
from torchpipe_py.files import output_problem
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.tools.load.arrivals import read_replay
from torchpipe_py.tools.load.judge import EXIT_INTERRUPTED
from torchpipe_py.tools.report import ToolError, check_outputs, progress_bar, replace_text, write_json, write_text
from torchpipe_py.tools.tune import report as text
from torchpipe_py.tools.tune.candidates import Candidate
from torchpipe_py.tools.tune.engine import Bench, Hooks, Wanted, measure, named_images, require
from torchpipe_py.tools.tune.pixels import alternatives_of
from torchpipe_py.tools.tune.report import Report
from torchpipe_py.tools.tune.search import Progress

DEFAULT_BUDGET_S = 120.0


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
    Raises ``ToolError``, ``TeamDied`` and ``ConfigError``, which explain in one line why it cannot be tuned; of a wrong
    argument, ``ToolError`` says the name and what is expected.
    """
    require("config", config, isinstance(config, (str, os.PathLike, Mapping)), "a file or a dict")
    require("allow_pixels", allow_pixels, isinstance(allow_pixels, bool), "True or False")
    wanted = Wanted(slo_p99, rate, cores, gpu_memory, budget, times, imports, progress)
    return find_settings(config, images, wanted, allow_pixels).to_json()


def find_settings(
    config: str | os.PathLike[str] | Mapping[str, Any],
    images: str | os.PathLike[str] | Sequence[bytes],
    wanted: Wanted,
    allow_pixels: bool,
) -> Report:
    """``tune``, but it returns the report as it is."""
    if len(wanted.usable_cores()) < 2:  # NOTE: wrong arguments are reported before files that cannot be read
        raise ToolError("one core: there is nothing to tune; serve with --workers 1 and one instance of each node")
    named, tables = named_images(images), Tables.of(config)
    report = Report(tables.source, wanted.slo_p99, wanted.rate, slo_given=wanted.slo_p99 is not None)
    report.img_dir = str(images) if isinstance(images, (str, os.PathLike)) else None
    measure(tables, named, wanted, report, Hooks(_with_other_pixels, shares_more=True) if allow_pixels else Hooks())
    return report


def _with_other_pixels(bench: Bench) -> Sequence[Candidate]:
    """The shapes with the changes of pixels and precision whose results differ little."""
    report, images = bench.report, [*bench.images.values()]
    found, report.parity, not_tried = alternatives_of(bench.shapes, report.img_dir, images, bench.service.has_gpu)
    report.not_tried += not_tried
    return [*bench.shapes, *found]


# --- the command


def run_tune(args: argparse.Namespace) -> int:
    """0 after a verdict, 1 if no other settings were tried, 130 after Ctrl-C.

    Raises ``TorchpipeError`` if it cannot tune.
    """
    path = Path(args.config)
    out = args.out or path.with_name(f"{path.stem}.tuned.toml")
    check_out(path, out, {"json": args.json, "html": args.html})
    check_outputs({"out": out, "json": args.json, "html": args.html}, [args.replay])
    times = read_replay(args.replay, None) if args.replay else None
    with progress_bar(args.progress, has_lines=True) as show:
        wanted = wanted_of(args, lambda phase, share, left: show(phase, share, f"about {left:.0f} s left"), times)
        report = find_settings(args.config, args.img_dir, wanted, args.allow_pixels)
    print("\n".join([*text.lines_of(report), text.verdict_line(report)]), flush=True)
    if report.tuned is not None:
        report.command = serve_command(out, report, wanted.imports)
        replace_text(out, text.tuned_text(report, report.tuned, "tuned by torchpipe tune"))
        print(f"{out}\n{report.command}", flush=True)
    if args.json is not None:
        write_json(args.json, report.to_json())
    if args.html is not None:
        write_text(args.html, text.page(report))
    return EXIT_INTERRUPTED if report.verdict == "interrupted" else int(report.is_empty)


def check_out(path: Path, out: Path, others: Mapping[str, Path | None]) -> None:
    """Raise ``ToolError`` or ``ConfigError`` if ``out``, made of ``path``, cannot be written or cannot work there.

    ``others`` are further files by their flags.
    """
    if problem := output_problem(out) or output_problem(out, replaces=out.is_file() or not os.path.exists(out)):
        raise ToolError(f"--out {out} cannot be written: {problem}")
    check_outputs({"out": out, **others}, [path])
    if os.path.realpath(out.parent) != os.path.realpath(path.parent):
        with without_warnings():
            plan_pipeline(path)
            moved = parse_toml(path)
            moved.source = os.fspath(out)  # in another folder, it would perhaps not find the files beside it
            plan_pipeline(moved)


def wanted_of(args: argparse.Namespace, progress: Progress, times: Sequence[float] | None = None) -> Wanted:
    """The goal that a command line of ``tune`` or ``compile`` gives."""
    slo_p99 = None if args.slo_p99 is None else args.slo_p99 / 1000
    imports = [part.strip() for each in args.imports or () for part in each.split(",") if part.strip()]
    return Wanted(slo_p99, args.rate, args.cores, args.gpu_memory, args.budget, times, imports, progress)


def serve_command(out: Path, report: Report, imports: Sequence[str]) -> str:
    """The command that serves the best configuration, once there is a verdict."""
    assert report.best is not None
    more = "".join(f" --import {shlex.quote(each)}" for each in imports)
    return f"torchpipe-serve {shlex.quote(str(out))} {report.best.processes}{more}"
