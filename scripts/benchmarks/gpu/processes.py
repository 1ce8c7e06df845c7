"""In one process and many client threads: decoding in threads, and in processes of ``Process[...]``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from time import perf_counter, process_time
from typing import Any

from benchmarks.common import Load, Report, interleave, run_threads, test_jpeg
from benchmarks.gpu.engines import SIDE, Engines
from benchmarks.gpu.in_process import cores, cpu_pipe, running

CLIENTS = (40, 100)


def processes_on_gpu(engines: Engines, seconds: float, rounds: int) -> Report:
    """CPU decode, 40 and 100 clients in process: bare OpenCV threads, a pipe with threads, one with ``Process``."""
    import cv2
    import numpy as np

    cv2.setNumThreads(1)
    encoded = test_jpeg()
    array = np.frombuffer(encoded, np.uint8)
    report = Report("processes: CPU decode and ResNet-50, many clients, in process")
    limit = f"limit: OpenCV decode+resize, {cores()} threads"
    with ExitStack() as stack:
        pipes = {
            what: stack.enter_context(running(config, encoded)) for what, config in _configurations(engines).items()
        }
        subjects: dict[str, Callable[[], Load]] = {
            limit: partial(
                run_threads,
                lambda: cv2.resize(cv2.imdecode(array, cv2.IMREAD_COLOR_RGB), (SIDE, SIDE)),
                cores(),
                seconds,
            )
        }
        for clients in CLIENTS:
            subjects[f"limit: {clients} threads wake one that wakes them"] = partial(_hand_overs, clients, seconds)
            for what, call in pipes.items():
                subjects[f"{what}, {clients} clients"] = partial(_with_cpu, call, clients, seconds)
        loads = interleave(subjects, rounds)
    notes = {name: f"{1000 * load.cpu_ms:.0f} us CPU of this process" for name, load in loads.items() if load.cpu_ms}
    report.add(loads, notes)
    for clients in CLIENTS:
        found = [
            load.qps
            for name, load in loads.items()
            if name.startswith("Process") and name.endswith(f" {clients} clients")
        ]
        report.require(f"Process against bare threads, {clients} clients", max(found) / loads[limit].qps, low=0.6)
    return report


def _hand_overs(clients: int, seconds: float) -> Load:
    """What blocked callers cost alone: each gives a thread its turn, and waits until that has woken it."""
    asked: SimpleQueue[Any] = SimpleQueue()

    def answer() -> None:
        while (wake := asked.get()) is not None:
            wake()

    own = threading.local()

    def call() -> None:
        if not hasattr(own, "lock"):
            own.lock = threading.Lock()
            own.lock.acquire()
        asked.put(own.lock.release)
        own.lock.acquire()

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    try:
        return _with_cpu(call, clients, seconds)
    finally:
        asked.put(None)
        answering.join()


def _configurations(engines: Engines) -> dict[str, dict[str, Any]]:
    """By what they are: a thread for each core but four, as many processes, and fewer."""
    most = max(1, cores() - 4)
    threads = cpu_pipe(engines, decoders=most, most=32, instances=2)
    found = {f"{most} threads": threads}
    for count in dict.fromkeys((cores(), most)):
        decode = {**threads["decode"], "backend": f"Process[{threads['decode']['backend']}]", "instance_num": count}
        found[f"Process, instance_num {count}"] = {**threads, "decode": decode}
    return found


def _with_cpu(call: Callable[[], object], clients: int, seconds: float) -> Load:
    """The load, and the processor time of this process for a call, without that of its children."""
    start, before = perf_counter(), process_time()
    load = run_threads(call, clients, seconds)
    calls = load.qps * (perf_counter() - start)
    return replace(load, cpu_ms=1000 * (process_time() - before) / calls)
