"""Scheduling, batching and decoding inside one process, without a network."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from _thread import allocate_lock
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from typing import Any

from benchmarks.common import Call, Load, Report, interleave, python, run_threads, test_jpeg

CPP_PACKAGE = "torchpipe"


def schedule(seconds: float, rounds: int) -> Report:
    """Three ``Identity`` nodes, QPS against the C++ library."""
    from torchpipe_py import pipe

    config = identity_nodes(3)
    clients = (1, 10, 40)
    report = Report("schedule: 3 Identity nodes, closed-loop client threads")
    cpp, chain = _CppLibrary(config), _BareChain()
    with pipe(config) as run:
        subjects = {}
        for count in clients:
            if cpp.missing is None:
                subjects[f"C++ library, {count} clients"] = partial(cpp.load, count, seconds)
            subjects[f"torchpipe_py, {count} clients"] = partial(run_threads, by_call(run), count, seconds)
            subjects[f"torchpipe_py by submit, {count} clients"] = partial(run_threads, by_submit(run), count, seconds)
            bare = f"bare: a queue and a thread per node, {count} clients"
            subjects[bare] = partial(run_threads, chain.call, count, seconds)
        loads = interleave(subjects, rounds)
    chain.close()
    cpp.close()
    report.add(loads)
    if cpp.missing is not None:
        report.remarks.append(f"no baseline: {cpp.missing}")
        return report
    for count, low in zip(clients, (1.2, 2.0, 2.0), strict=True):
        ratio = loads[f"torchpipe_py, {count} clients"].qps / loads[f"C++ library, {count} clients"].qps
        report.require(f"{count} clients, QPS against the C++ library", ratio, low=low)
    return report


def graphs(seconds: float, rounds: int) -> Report:
    """A graph of ten ``Identity`` nodes with three diamonds, against a chain of ten."""
    from torchpipe_py import pipe

    report = Report("graphs: 10 Identity nodes, in a chain and as three diamonds in a row")
    with pipe(identity_nodes(10)) as chain, pipe(diamonds(3)) as diamond:
        runs = {"chain": chain, "diamonds": diamond}
        subjects = {}
        for count in (1, 10):
            for name, run in runs.items():
                subjects[f"{name}, {count} clients"] = partial(run_threads, by_call(run), count, seconds)
                subjects[f"{name} by submit, {count} clients"] = partial(run_threads, by_submit(run), count, seconds)
        loads = interleave(subjects, rounds)
    report.add(loads)
    for count in (1, 10):
        slower = loads[f"chain by submit, {count} clients"].qps / loads[f"diamonds by submit, {count} clients"].qps
        report.require(f"time against the chain by submit, {count} clients", slower, high=2.0)
    slower = loads["chain, 1 clients"].qps / loads["diamonds, 1 clients"].qps
    report.remarks.append(f"where the caller runs every node itself, no thread is woken: {slower:.1f} times the chain")
    return report


def by_call(run: Any) -> Call:
    """A request of a caller that waits: it runs ``Identity`` itself."""
    return lambda: run({"data": 1})


def by_submit(run: Any) -> Call:
    """A request that the nodes' own threads run."""
    return lambda: run.submit({"data": 1}).result()


def diamonds(count: int) -> dict[str, dict[str, str]]:
    """a -> b, c -> d, again and again: 3 * ``count`` + 1 nodes."""
    nodes: dict[str, dict[str, str]] = {"top0": {}}
    for index in range(count):
        left, right, below = f"left{index}", f"right{index}", f"top{index + 1}"
        nodes[f"top{index}"]["next"] = f"{left},{right}"
        nodes[left] = nodes[right] = {"next": below}
        nodes[below] = {"map": f"{left}[result:data],{right}[result:other]"}
    return nodes


def batching(seconds: float, rounds: int) -> Report:
    """A batching timeout of 10 ms must cost a lone client nothing."""
    from torchpipe_py import Backend, pipe, register_backend

    class BatchedNoOp(Backend):
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["result"] = item["data"]

        def max(self) -> int:
            return 4

    register_backend(BatchedNoOp, "BatchedNoOp")
    clients = (1, 2, 3, 4, 10)
    report = Report("batching: one no-op node, batching_timeout 10 ms, max 4, one instance")
    with pipe({"backend": "BatchedNoOp", "batching_timeout": 10}) as run:
        subjects = {
            f"{count} clients": partial(run_threads, lambda: run({"data": 1}), count, seconds) for count in clients
        }
        loads = interleave(subjects, rounds)
        sizes = run.stats()["nodes"]["node"]["batch_sizes"]
    report.add(loads)
    for name, load in loads.items():
        report.require(f"{name}, p50 ms", load.p50, high=1.0)
    report.remarks.append(f"batches by size: {sizes}")
    report.remarks.append("a fixed timeout would make one client wait the whole 10 ms")
    return report


def decode(seconds: float, rounds: int) -> Report:
    """Decode, resize and colour against the same OpenCV calls in bare threads."""
    import cv2
    import numpy as np

    from torchpipe_py import pipe

    jpeg, instances, clients = test_jpeg(), 2, 10

    def bare() -> None:
        image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
        cv2.cvtColor(cv2.resize(image, (224, 224)), cv2.COLOR_BGR2RGB)

    config = {"backend": "S[DecodeMat,ResizeMat,cvtColorMat]", "resize_h": 224, "resize_w": 224, "color": "rgb"}
    report = Report(f"decode: {len(jpeg) / 1000:.0f} KB JPEG, 500x375, to 224x224 RGB, {instances} instances")
    with pipe({**config, "instance_num": instances}) as run:
        subjects = {
            f"limit: OpenCV in {instances} bare threads": partial(run_threads, bare, instances, seconds),
            f"torchpipe_py, {clients} clients": partial(run_threads, lambda: run({"data": jpeg}), clients, seconds),
        }
        loads = interleave(subjects, rounds)
    report.add(loads)
    limit, ours = loads.values()
    report.require("QPS against bare OpenCV threads", ours.qps / limit.qps, low=0.95)
    report.require("p99 / p50", ours.p99 / ours.p50, high=2.0)
    return report


def identity_nodes(count: int) -> dict[str, dict[str, Any]]:
    """A chain of ``Identity`` nodes."""
    names = [f"n{index}" for index in range(count)]
    config: dict[str, dict[str, Any]] = {name: {"backend": "Identity"} for name in names}
    for name, after in itertools.pairwise(names):
        config[name]["next"] = after
    return config


# In a process of its own, so that its threads and allocator stay out of ours, and only one, since importing the
# library tries for most of a minute to compile extensions that nothing here needs.
_CPP_SCRIPT = """
import json, sys
from benchmarks.common import run_threads
import torchpipe
run = torchpipe.pipe(json.loads(sys.argv[1]))
print("RESULT ready", flush=True)
for line in sys.stdin:
    clients, seconds = line.split()
    load = run_threads(lambda: run({"data": 1}), int(clients), float(seconds))
    print("RESULT", json.dumps([load.qps, load.p50, load.p99]), flush=True)
"""


class _CppLibrary:
    """The C++ library's own pipe on the same configuration, driven line by line; ``missing`` says why it is not."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.missing: str | None = None
        if find_spec(CPP_PACKAGE) is None:
            self.missing = f"{CPP_PACKAGE} is not installed (extra 'bench')"
            return
        settings = json.dumps({"global": {"batching_timeout": 0}, **config})
        self._process = python(
            "-c", _CPP_SCRIPT, settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._result()
        except RuntimeError as error:
            self.missing = str(error)

    def load(self, clients: int, seconds: float) -> Load:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{clients} {seconds}\n")
        self._process.stdin.flush()
        return Load(*json.loads(self._result()))

    def close(self) -> None:
        if self.missing is None:
            self._process.kill()
            self._process.communicate()

    def _result(self) -> str:
        """The next result; its log lines go by."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return line.removeprefix("RESULT ")
        raise RuntimeError(f"the C++ library ended with status {self._process.wait()}")


class _BareChain:
    """What three hand-overs cost in Python at the least: a queue and a thread for each node, nothing else."""

    def __init__(self) -> None:
        self.queues: list[Any] = [SimpleQueue() for _ in range(3)]
        for index in range(3):
            threading.Thread(target=self._node, args=(index,), daemon=True).start()

    def call(self) -> None:
        done = allocate_lock()
        done.acquire()
        self.queues[0].put(done)
        done.acquire()

    def close(self) -> None:
        for queue in self.queues:
            queue.put(None)

    def _node(self, index: int) -> None:
        get = self.queues[index].get
        put = self.queues[index + 1].put if index < 2 else None
        while True:
            done = get()
            if done is None:
                return
            if put is None:
                done.release()
            else:
                put(done)
