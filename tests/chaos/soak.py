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
from typing import Any

from chaos import scenarios
from chaos.service import MEBIBYTE
from torchpipe_py.arguments import ArgumentParser


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def runs(args: argparse.Namespace) -> dict[str, list[Callable[[], dict[str, Any]]]]:
    """Each event's runs; a control's name ends with ``control``, and it has to fail."""
    minute = 60.0
    return {
        "overload": [partial(scenarios.overload, minute, p99=0.01, share=0.9, more_seconds=0.0)],
        "gone": [partial(scenarios.clients_gone, 10_000)],
        "malformed": [partial(scenarios.malformed, 100_000)],
        "mixed": [partial(scenarios.mixed, args.requests, args.requests / 1000, within=5.0, say=say)],
        "hang": [scenarios.hanging],
        "start": [*scenarios.CANNOT_START.values(), scenarios.crash_loop, scenarios.bad_reload],
        "models": [partial(scenarios.models, 100)],
        "orphans": [scenarios.supervisor_killed],
        "soak": [partial(scenarios.soak, minute * args.minutes, 20 * MEBIBYTE)],
        "soak-control": [partial(scenarios.soak, 0.1 * minute * args.minutes, leak_bytes=2**12)],
    }


def is_passed(name: str, run: Callable[[], dict[str, Any]]) -> bool:
    """Run it and print what came of it."""
    began = time.monotonic()
    try:
        outcome = "passed: " + ", ".join(f"{key} {value}" for key, value in run().items())
    except AssertionError as error:
        outcome = f"FAILED: {error}"
    print(f"{name}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
    return outcome.startswith("passed")


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
            is_well = is_passed(name, run) != name.endswith("control") and is_well
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
