"""``python scripts/bench.py NAME|all``: limit, baselines and the pipe in one run.

Exit status 0 when every target is met, 1 when one is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks import in_process
from benchmarks.common import Report, machine, show, write_json
from benchmarks.detector import detector
from benchmarks.mean import mean
from benchmarks.processes import processes
from benchmarks.service import service

BENCHMARKS: dict[str, Callable[[float, int], Report | list[Report]]] = {
    "schedule": in_process.schedule,
    "graphs": in_process.graphs,
    "batching": in_process.batching,
    "decode": in_process.decode,
    "processes": processes,
    "detector": detector,
    "service": service,
    "mean": mean,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements whose median is shown (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write everything there as well")
    args = parser.parse_args(argv)
    names = list(BENCHMARKS) if args.name == "all" else [args.name]
    here = machine()
    print(
        f"{here['cpu']}, {here['cores']} cores, Python {here['python']}; medians of {args.rounds} x {args.seconds:g} s"
    )
    reports: list[Report] = []
    for name in names:
        outcome = BENCHMARKS[name](args.seconds, args.rounds)
        for report in outcome if isinstance(outcome, list) else [outcome]:
            show(report)
            reports.append(report)
    if args.json:
        write_json(args.json, reports)
    return 0 if all(met for report in reports for *_, met in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
