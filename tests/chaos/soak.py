"""The events of the reliability table in their long form, judged.

``python scripts/soak.py NAME|all``

Exit status 0 when every bar is held, 1 when one is missed. The short form is ``tests/chaos/test_chaos.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from chaos import scenarios
from chaos.service import MEBIBYTE
from chaos.tally import Report
from torchpipe_py.arguments import ArgumentParser


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def runs(args: argparse.Namespace) -> dict[str, list[Callable[[], Report]]]:
    """Each event's runs; a control's name ends with ``control``, and it has to fail."""
    at_rate = args.requests / 1000
    return {
        "overload": [partial(scenarios.overload, seconds=60.0, p99=0.01)],
        "killed": [partial(scenarios.worker_killed, count, kills=12, every=5.0, within=1.0) for count in (1, 2)],
        "gone": [partial(scenarios.clients_gone, 10_000)],
        "malformed": [partial(scenarios.malformed, 100_000)],
        "oversize": [partial(scenarios.oversize, 16 * MEBIBYTE)],
        "stopped": [scenarios.stopped, partial(scenarios.stopped, requests=100, idle=900)],
        "corrupt": [scenarios.corrupt_item],
        "concurrency": [partial(scenarios.concurrency, 64, args.calls)],
        "mixed": [partial(scenarios.mixed, args.requests, at_rate, within=5.0, say=say)],
        "hang": [partial(scenarios.hanging, 3.0)],
        "start": [
            partial(scenarios.cannot_start, "ChaosRaise", word="planted failure"),
            partial(scenarios.cannot_start, "ChaosCrash", word="given up after 5 attempts"),
            scenarios.crash_loop,
            scenarios.bad_reload,
        ],
        "orphans": [scenarios.supervisor_killed],
        "soak": [partial(scenarios.soak, 60 * args.minutes)],
        "soak-control": [partial(scenarios.soak, 6 * args.minutes, leak_bytes=2**12)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = list(runs(argparse.Namespace(requests=0, calls=0, minutes=0)))
    parser.add_argument("name", choices=[*names, "all"])
    parser.add_argument("--requests", type=int, default=200_000, help="of mixed (default: 200000)")
    parser.add_argument("--calls", type=int, default=10_000, help="of each thread of concurrency (default: 10000)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of soak (default: 30)")
    args = parser.parse_args(argv)
    is_well = True
    for name in names if args.name == "all" else [args.name]:
        for run in runs(args)[name]:
            began = time.monotonic()
            report = run()
            print(f"{report}, {time.monotonic() - began:.0f} s", flush=True)
            is_well = is_well and bool(report.problems) == name.endswith("control")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
