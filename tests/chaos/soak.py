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
from chaos.scenarios import Report
from chaos.service import MEBIBYTE
from torchpipe_py.arguments import ArgumentParser


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def runs(args: argparse.Namespace) -> dict[str, list[Callable[[], Report]]]:
    """Each event's runs; a control's name ends with ``control``, and it has to fail."""
    minute = 60.0
    return {
        "overload": [partial(scenarios.overload, minute, p99=0.01, share=0.9, more_seconds=0.0)],
        "gone": [partial(scenarios.clients_gone, 10_000)],
        "malformed": [partial(scenarios.malformed, 100_000)],
        "mixed": [partial(scenarios.mixed, args.requests, args.requests / 1000, within=5.0, say=say)],
        "hang": [scenarios.hanging],
        "start": [
            partial(scenarios.cannot_start, "ChaosRaise", "planted failure"),
            partial(scenarios.cannot_start, "ChaosCrash", "given up after 5 attempts"),
            scenarios.crash_loop,
            scenarios.bad_reload,
        ],
        "models": [partial(scenarios.models, 100)],
        "orphans": [scenarios.supervisor_killed],
        "soak": [partial(scenarios.soak, minute * args.minutes, 20 * MEBIBYTE)],
        "soak-control": [partial(scenarios.soak, 0.1 * minute * args.minutes, leak_bytes=2**12)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = list(runs(argparse.Namespace(requests=0, minutes=0)))
    parser.add_argument("name", choices=[*names, "all"])
    parser.add_argument("--requests", type=int, default=200_000, help="of mixed (default: 200000)")
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
