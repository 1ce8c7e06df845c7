"""Pure Python work on two instances: threads, which share one GIL, against ``Process[...]``.

Run as a program it measures the loop alone: ``python -m benchmarks.in_process.processes``, then seconds on each line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from typing import Any

from benchmarks.common import Load, Report, interleave, python, run_threads
from torchpipe_py import ItemBackend, pipe, register_backend

INSTANCES, CLIENTS, LAST = 2, 4, 100_000


def total(last: int = LAST) -> int:
    """The sum of 1 to ``last``, by hand: a loop that holds the GIL."""
    result = 0
    for number in range(1, last + 1):
        result += number
    return result


class PythonLoop(ItemBackend):
    """``result`` is the sum of 1 to ``data``; worker processes import it from here."""

    def forward_item(self, item: dict[str, Any]) -> None:
        item["result"] = total(item["data"])


def processes(seconds: float, rounds: int) -> Report:
    """P6: a loop of Python in processes of its own, QPS against the same in threads."""
    register_backend(PythonLoop, "PythonLoop")
    threads = f"torchpipe_py, threads, {CLIENTS} clients"
    ours = f"torchpipe_py, Process[...], {CLIENTS} clients"
    report = Report(f"processes: sum of 1 to {LAST} in a Python loop, {INSTANCES} instances")
    with ExitStack() as stack:
        limit = _BareProcesses()
        stack.callback(limit.close)
        node = stack.enter_context(pipe({"backend": "PythonLoop", "instance_num": INSTANCES}))
        apart = stack.enter_context(pipe({"backend": "Process[PythonLoop]", "instance_num": INSTANCES}))
        subjects = {
            f"limit: {INSTANCES} bare processes": partial(limit.load, seconds),
            f"bare: {INSTANCES} threads": partial(run_threads, total, INSTANCES, seconds),
            threads: partial(run_threads, lambda: node({"data": LAST}), CLIENTS, seconds),
            ours: partial(run_threads, lambda: apart({"data": LAST}), CLIENTS, seconds),
        }
        loads = interleave(subjects, rounds)
    report.add(loads)
    report.require("Process against threads", loads[ours].qps / loads[threads].qps, low=1.8)
    share = loads[ours].qps / next(iter(loads.values())).qps
    report.remarks.append(f"Process[...] reaches {share:.0%} of the limit")
    return report


class _BareProcesses:
    """Processes that do nothing but the loop, all at the same time."""

    def __init__(self) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._processes = [python("-m", "benchmarks.in_process.processes", **pipes) for _ in range(INSTANCES)]
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    def load(self, seconds: float) -> Load:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        loads = [Load(*json.loads(process.stdout.readline())) for process in self._processes if process.stdout]
        qps, p50, p99 = zip(*map(astuple, loads), strict=True)
        return Load(sum(qps), max(p50), max(p99))

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(astuple(run_threads(total, 1, float(line)))), flush=True)


if __name__ == "__main__":
    main()
