"""The work of the benchmark of processes: a Python loop, which holds the GIL; worker processes import it from here.

Run as a program it measures the loop alone: ``python -m benchmarks.python_loop``, then a number of seconds per line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import astuple
from typing import Any

from benchmarks.common import run_threads
from torchpipe_py import ItemBackend


def total(last: int = 100_000) -> int:
    """The sum of 1 to ``last``, by hand."""
    result = 0
    for number in range(1, last + 1):
        result += number
    return result


class PythonLoop(ItemBackend):
    """``result`` is the sum of 1 to ``data``."""

    def forward_item(self, item: dict[str, Any]) -> None:
        item["result"] = total(item["data"])


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(astuple(run_threads(total, 1, float(line)))), flush=True)


if __name__ == "__main__":
    main()
