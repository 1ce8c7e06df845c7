"""``torchpipe load compare A.json B.json``: two reports side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.files import read_bytes
from torchpipe_py.tools.load.judge import EXIT_FAILED, EXIT_OK
from torchpipe_py.tools.options import number, parse_load
from torchpipe_py.tools.report import ToolError, aligned
from torchpipe_py.tools.statistics import RESAMPLES, ratio_interval

LEAST_SECONDS = 5  # whole seconds of each run that resampling needs

_FIGURES = {"QPS": "qps", "results/s": "goodput", "calls/s": "calls_per_s"}
_LATENCIES = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p99.9": "p99_9", "max": "max"}
_IRRELEVANT = {"json", "csv", "html", "progress", "img_dir", "host", "port", "server_pid", "sweep", "search"}

_HOW = f"""\
The interval of the QPS ratio is a percentile bootstrap of 95 %: the images with a result in each whole second of
a run are drawn {RESAMPLES} times with replacement, for both runs, and the ratios of their means sorted. It reflects
variation within a run, not between runs; repeat runs to measure that."""


def compare_main(arguments: Sequence[str], program: str) -> int:
    """The subcommand; 0, or 2 when B is worse than A by more than ``--max-regression`` allows."""
    parser = ArgumentParser(
        prog=f"{program} compare",
        description="Two reports of --json side by side; ratios are B/A.",
        epilog="exit status: 0; 1 a report cannot be read; 2 B is worse by more than --max-regression allows",
    )
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    allowed = "percent by which B's QPS and results/s may be lower than A's, and its p99 higher"
    percent = number("a number of percent, 0 or more", 0, 1e308)
    parser.add_argument("--max-regression", type=percent, metavar="PCT", help=allowed)
    options = parser.parse_args(arguments)
    reports = read_report(options.a), read_report(options.b)
    print(comparison(*reports))
    worse = [] if options.max_regression is None else regressions(*reports, options.max_regression)
    for line in worse:
        print(f"REGRESSION: {line}")
    return EXIT_FAILED if worse else EXIT_OK


def read_report(path: Path) -> dict[str, Any]:
    """Read the report of one run; ``ToolError`` if the file has none."""
    try:
        report = json.loads(read_bytes(path).decode("utf-8-sig"))
    except OSError as error:
        raise ToolError(f"compare {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ToolError(f"compare {path}: not a JSON file: {error}") from error
    if isinstance(report, dict) and "runs" in report:
        raise ToolError(f"compare {path}: the report of a {report.get('kind', 'sweep')}; expected that of a single run")
    if not isinstance(report, dict) or not {"qps", "goodput", "latency_ms", "settings", "machine"} <= set(report):
        raise ToolError(f"compare {path}: not a report of this load tester")
    return report


def comparison(a: dict[str, Any], b: dict[str, Any]) -> str:
    """The table, an interval for the ratio of QPS, and doubts about the runs."""

    def row(title: str, *pair: float | None) -> tuple[str, ...]:
        before, after = pair
        ratio = "n/a" if before is None or after is None or not before else f"{after / before:.3f}"
        return title, *("n/a" if value is None else f"{value:.2f}" for value in pair), ratio

    rows = [row(title, a[name], b[name]) for title, name in _FIGURES.items()]
    for title, name in _LATENCIES.items():
        rows.append(row(f"{title} ms", *((run["latency_ms"] or {}).get(name) for run in (a, b))))
    rows.append(("errors", str(a["images_failed"]), str(b["images_failed"]), ""))
    kinds = sorted({*a["errors"], *b["errors"]})
    rows += [(f"  {kind}", *(str(run["errors"].get(kind, 0)) for run in (a, b)), "") for kind in kinds]
    # Whole seconds, without the first, in which clients start, and the last, which is incomplete.
    seconds = [run["images_ok_per_second"][1:-1] for run in (a, b)]
    interval = ratio_interval(*seconds) if min(map(len, seconds)) >= LEAST_SECONDS else None
    if interval is None:
        line = f"no interval: both runs must have {LEAST_SECONDS} whole seconds"
    else:
        low, high = interval
        meaning = "which includes 1: no difference is shown" if low <= 1 <= high else "which excludes 1"
        line = f"95 % interval {low:.3f} to {high:.3f}, {meaning}\n{_HOW}"
    lines = [*aligned(rows, ("", "A", "B", "B/A")), "", f"QPS ratio B/A: {line}", *differences(a, b)]
    for name, run in (("A", a), ("B", b)):
        doubts = [*run["warnings"], *([] if run["valid"] else ["the run is not valid"])]
        doubts += ["no image has a result: its QPS counts errors"] if run["errors"] and not run["images_ok"] else []
        doubts += [f"unstable: {reason}" for reason in run.get("unstable_because", ())]
        lines += [f"{name}: {doubt}" for doubt in doubts]
    return "\n".join(lines)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Lines with the settings, images and machine properties that differ."""
    usual = vars(parse_load(["--img_dir", "."], ""))  # for reports of a version without some option
    parts = [("settings", usual | a["settings"], usual | b["settings"])]
    parts += [(what, a[what], b[what]) for what in ("machine", "versions")]
    images = [{key: run[key] for key in ("image_files", "image_bytes_mean")} for run in (a, b)]
    parts.append(("images", images[0], images[1]))
    return [
        f"DIFFERENT {what}: {name} is {before.get(name)} in A, {after.get(name)} in B"
        for what, before, after in parts
        for name in sorted({*before, *after} - _IRRELEVANT)
        if before.get(name) != after.get(name)
    ]


def regressions(a: dict[str, Any], b: dict[str, Any], percent: float) -> list[str]:
    """Figures that are worse in B by more than ``percent``: lower throughput, higher p99, or no result at all."""
    lines = []
    for title in ("QPS", "results/s"):
        before, after = a[_FIGURES[title]], b[_FIGURES[title]]
        if after < before * (1 - percent / 100):
            lines.append(f"{title} {before:.2f} to {after:.2f}, {1 - after / before:.1%} lower")
    before, after = ((run["latency_ms"] or {}).get("p99") for run in (a, b))
    if before is not None and (after is None or after > before * (1 + percent / 100)):
        change = "no result" if after is None else f"{after:.2f} ms, {after / before - 1:.1%} higher"
        lines.append(f"p99 {before:.2f} ms to {change}")
    return lines
