"""Pure Python work on two instances: threads, which share one GIL, against ``Process[...]``.

Run as a program it measures the loop alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.bare import BareProcesses, serve_loads
from benchmarks.common import Report, interleave, run_threads
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
    """A loop of Python in processes of its own, QPS against the same in threads."""
    register_backend(PythonLoop, "PythonLoop")
    threads = f"torchpipe_py, threads, {CLIENTS} clients"
    ours = f"torchpipe_py, Process[...], {CLIENTS} clients"
    report = Report(f"processes: sum of 1 to {LAST} in a Python loop, {INSTANCES} instances")
    with ExitStack() as stack:
        limit = BareProcesses(INSTANCES, "benchmarks.in_process.processes")
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


def main() -> None:
    serve_loads(partial(run_threads, total, 1))


if __name__ == "__main__":
    main()
