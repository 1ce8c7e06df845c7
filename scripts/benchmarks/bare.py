"""Loops in processes of their own with nothing around them: what several processes do at most."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from torchpipe_server.worker.worker import limit_threads

from benchmarks.common import Load, load_of, median_load, python, test_jpeg
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.base import Backend, BackendConfig, Data, close_all
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.tools.export.config import to_toml


class BareProcesses:
    """``count`` processes of a program that ``serves_loads``, asked for a load all at the same time."""

    def __init__(self, count: int, *program: str) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._processes = [python("-m", *program, **pipes) for _ in range(count)]
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                self.close()
                raise RuntimeError(f"{' '.join(program)} did not start")

    def load(self, seconds: float) -> Load:
        """What they do together; the latencies are those of the slowest."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        loads = [Load(*json.loads(process.stdout.readline())) for process in self._processes if process.stdout]
        qps, p50, p99, cpu_ms = zip(*map(astuple, loads), strict=True)
        return Load(sum(qps), max(p50), max(p99), max(cpu_ms))

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.communicate()


def serve_loads(load: Callable[[float], Load]) -> None:
    """What the program of ``BareProcesses`` does: a load for as many seconds as each line of its input says."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(astuple(load(float(line)))), flush=True)


def nodes_alone(config: Mapping[str, Mapping[str, Any]], count: int, batch: int, seconds: float, rounds: int) -> Load:
    """Images per second that the backends of a chain of nodes do in ``count`` processes of one thread each.

    Each takes a JPEG ``batch`` times and runs one node after the other. Latencies are of a batch.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "nodes.toml").write_text(to_toml(config), encoding="utf-8")
        (folder / "image.jpg").write_bytes(test_jpeg())
        paths = [str(folder / "nodes.toml"), str(folder / "image.jpg")]
        processes = BareProcesses(count, "benchmarks.bare", *paths, str(batch))
        stack.callback(processes.close)
        return median_load([processes.load(seconds) for _ in range(rounds)])


def main() -> None:
    """Load the backends of a chain of nodes, without a pipe."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("image")
    parser.add_argument("batch", type=int)
    args = parser.parse_args()
    limit_threads()
    plans = plan_pipeline(args.config).plans
    backends = [plan.backends[0].create(BackendConfig()) for plan in plans.values()]
    try:
        for backend in backends:
            backend.setup()
        image = Path(args.image).read_bytes()
        run_batch(backends, image, args.batch)
        serve_loads(partial(load_alone, backends, image, args.batch))
    finally:
        close_all(backends)


def load_alone(backends: list[Backend], image: bytes, batch: int, seconds: float) -> Load:
    """Images per second on the calling thread, which is that of their set-up: their CUDA streams are its own."""
    latencies: list[float] = []
    start = end = perf_counter()
    while end < start + seconds:
        run_batch(backends, image, batch)
        latencies.append(perf_counter() - end)
        end += latencies[-1]
    load = load_of(latencies, end - start)
    return Load(load.qps * batch, load.p50, load.p99)


def run_batch(backends: list[Backend], image: bytes, batch: int) -> list[Data]:
    """So many copies of the image through each backend; ``RuntimeError`` where one has no result."""
    items: list[Data] = [{TASK_RESULT_KEY: image} for _ in range(batch)]
    for backend in backends:
        for item in items:
            item[TASK_DATA_KEY] = item.pop(TASK_RESULT_KEY)
        for start in range(0, batch, backend.max()):
            backend.forward(items[start : start + backend.max()])
        for item in items:
            if TASK_RESULT_KEY not in item:
                raise RuntimeError(f"no result: {item.get(TASK_ERROR_KEY)}")
    return items


if __name__ == "__main__":
    main()
