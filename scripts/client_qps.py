#!/usr/bin/env python3
"""Load tester of the inference service: closed or open loop, one process per client.

    python scripts/client_qps.py --img_dir DIR --port 8888 --request_client 20 --request_batch 1 --total_number 10000
    python scripts/client_qps.py --img_dir DIR --rate 200 --arrivals poisson --duration 30 --slo-p99 50 --html run.html
    python scripts/client_qps.py --img_dir DIR --slo-p99 50 --search
    python scripts/client_qps.py --img_dir DIR --sweep clients=1,2,5,10,20
    python scripts/client_qps.py compare A.json B.json

In a closed loop a client sends its next call when the last one is answered. In an open loop calls are due at times that
do not depend on the answers, and latency counts from then: a server that stalls is charged for all calls that would
have been sent meanwhile, not only for those that were (coordinated omission). Latency from the actual send is reported
beside it.

Exit status: 0 every image has a result, the run is stable and the SLO met; 1 it could not run; 2 some images have no
result, or an open loop was unstable (or the arguments are wrong); 3 the SLO was missed; 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torchpipe_py.loadtest.campaigns import run_search, run_sweep
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.load_options import parse_arguments
from torchpipe_py.loadtest.report.compare import compare_main
from torchpipe_py.loadtest.report.page import page
from torchpipe_py.loadtest.report.spreadsheet import write_csv
from torchpipe_py.loadtest.report.summary import check_output, print_report, write_json
from torchpipe_py.loadtest.report.tables import run_table, runs_table, search_line
from torchpipe_py.loadtest.report.verdict import EXIT_CANNOT_RUN, EXIT_INTERRUPTED, verdict
from torchpipe_py.loadtest.runs import Runner
from torchpipe_py.loadtest.sweeps import parse_sweep

_DESCRIPTION = "Load tester of the inference service. `client_qps.py compare A.json B.json` compares two reports."


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load and returns the report, of one run or of several; `CannotRunError` when that is not possible."""
    for flag in ("json", "csv", "html"):
        check_output(getattr(options, flag), f"--{flag}")
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    runner = Runner(options)
    if sweep is not None:
        return run_sweep(runner.run, options, sweep, _announce)
    return run_search(runner.run, options, _announce) if options.search else runner.run(options)


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
    for one in report["runs"]:
        for warning in [*one["warnings"], *one.get("unstable_because", ())]:
            print(f"{one['point']}: {warning}", file=sys.stderr)


def _write(report: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json is not None:
        write_json(report, options.json)
    if options.csv is not None:
        write_csv(report.get("runs", [report]), options.csv)
    if options.html is not None:
        options.html.write_text(page(report), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends it as Ctrl-C does
    try:
        if arguments[:1] == ["compare"]:
            return compare_main(arguments[1:])
        options = parse_arguments(arguments, _DESCRIPTION)
        report = run(options)
    except CannotRunError as error:
        print(f"client_qps.py: {error}", file=sys.stderr)
        return EXIT_CANNOT_RUN
    except KeyboardInterrupt:
        print("client_qps.py: interrupted before there was anything to report", file=sys.stderr)
        return EXIT_INTERRUPTED
    if "runs" in report:
        _print_runs(report)
    else:
        print_report(report, run_table(report))
    _write(report, options)
    status: int = report["exit_status"]
    return status


if __name__ == "__main__":
    sys.exit(main())
