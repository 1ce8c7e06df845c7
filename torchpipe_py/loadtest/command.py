"""``torchpipe load``: options in, a load on a server, one run or several, a report out."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.measure.verdict import EXIT_CANNOT_RUN, EXIT_INTERRUPTED, verdict
from torchpipe_py.loadtest.options import parse_arguments
from torchpipe_py.loadtest.report.compare import compare_main
from torchpipe_py.loadtest.report.page import page
from torchpipe_py.loadtest.report.summary import check_output, write_csv, write_json, writing
from torchpipe_py.loadtest.report.tables import print_report, run_table, runs_table, search_line
from torchpipe_py.loadtest.sweep import parse_sweep, run_search, run_sweep


def main(arguments: Sequence[str] | None = None, program: str = "torchpipe load") -> int:
    """The command; returns its exit status. Messages begin with ``program``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it as Ctrl-C does
    try:
        if arguments[:1] == ["compare"]:
            return compare_main(arguments[1:], program)
        options = parse_arguments(arguments, program)
        report = _run(options)
        _print(report)
        _write(report, options)
    except CannotRunError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print(f"{program}: interrupted before there was anything to report", file=sys.stderr)
        return EXIT_INTERRUPTED
    return int(report["exit_status"])


def _print(report: dict[str, Any]) -> None:
    if "runs" in report:
        _print_runs(report)
    else:
        print_report(report, run_table(report))


def _write(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json is not None:
        write_json(report, options.json)
    if options.csv is not None:
        write_csv(report.get("runs", [report]), options.csv)
    if options.html is not None:
        with writing(options.html) as file:
            file.write(page(report))


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load and returns the report, of one run or of several; `CannotRunError` when that is not possible."""
    flags: dict[str, str] = {}
    for flag in ("json", "csv", "html"):
        path = getattr(options, flag)
        check_output(path, f"--{flag}")
        if path is not None and (path.is_file() or not path.exists()):  # no device
            other = flags.setdefault(os.path.realpath(path), flag)
            if other != flag:
                raise CannotRunError(f"--{other} and --{flag}: both would write {path}, one over the other")
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    if importlib.util.find_spec("thriftpy2") is None:
        raise CannotRunError("thriftpy2 is not installed (pip install 'torchpipe_py[server]')")
    from torchpipe_py.loadtest.runs import LoadRunner

    run = LoadRunner(options).run
    if sweep is not None:
        return run_sweep(run, options, sweep, _announce)
    return run_search(run, options, _announce) if options.search else run(options)


def _announce(name: str, report: dict[str, Any]) -> None:
    latency = report["latency_ms"]
    p99 = "no result" if latency is None else f"p99 {latency['p99']:.2f} ms"
    print(f"{name}: {report['qps']:.1f} images/s, {p99}, {verdict(report)}", file=sys.stderr)


def _print_runs(report: dict[str, Any]) -> None:
    """The table of several runs, and what made some of them worthless."""
    print(runs_table(report["runs"]))
    if "search" in report:
        print(search_line(report))
    elif report["stopped"] is not None:
        print(f"the sweep is not complete: {report['stopped']}")
    for run in report["runs"]:
        for warning in [*run["warnings"], *run.get("unstable_because", ())]:
            print(f"{run['point']}: {warning}", file=sys.stderr)
