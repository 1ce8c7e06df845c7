"""Scheduling, batching and decoding inside one process, without a network."""

from __future__ import annotations

import argparse
import threading
from _thread import allocate_lock
from collections.abc import Callable
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

from benchmarks.bare import Processes, cpp
from benchmarks.common import Call, Report, Subject, in_threads, picture


def schedule(args: argparse.Namespace) -> Report:
    """Three ``Identity`` nodes, QPS against the C++ library."""
    from torchpipe_py import pipe

    clients = (1, 10, 40)
    config = {"n0": {"backend": "Identity", "next": "n1"}, "n1": {"backend": "Identity", "next": "n2"}}
    config["n2"] = {"backend": "Identity"}
    report = Report("schedule: 3 Identity nodes, closed-loop client threads")
    with ExitStack() as stack:
        run = stack.enter_context(pipe(config))
        subjects = [
            Subject("torchpipe_py", in_threads(lambda: run({"data": 1}))),  # the waiting caller runs Identity itself
            Subject("torchpipe_py by submit", in_threads(lambda: run.submit({"data": 1}).result())),
            Subject("bare: a queue and a thread per node", in_threads(bare_chain())),
        ]

        def library() -> None:
            library = Processes(1, cpp, {"global": {"batching_timeout": 0}, **config})
            stack.callback(library.close)
            subjects.insert(0, Subject("C++ library", library.load))

        report.attempt("the C++ library (extra 'bench')", library)
        report.measure(subjects, clients, args.seconds, args.rounds)
    if subjects[0].name == "C++ library":
        for count, low in zip(clients, (1.2, 2.0, 2.0), strict=True):
            ratio = report.ratio(("torchpipe_py", count), ("C++ library", count))
            report.require(f"{count} clients, QPS against the C++ library", ratio, low=low)
    return report


def batching(args: argparse.Namespace) -> Report:
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
        ours = Subject("torchpipe_py", in_threads(lambda: run({"data": 1})))
        report.measure([ours], clients, args.seconds, args.rounds)
        sizes = run.stats()["nodes"]["node"]["batch_sizes"]
    for count in clients:
        report.require(f"{count} clients, p50 ms", report.median("torchpipe_py", count).p50, high=1.0)
    report.remarks.append(f"batches by size: {sizes}")
    report.remarks.append("a fixed timeout would make one client wait the whole 10 ms")
    return report


def decode(args: argparse.Namespace) -> Report:
    """Decode, resize and colour against the same OpenCV calls in bare threads."""
    import cv2
    import numpy as np

    from torchpipe_py import pipe

    jpeg, instances, clients = picture(), 2, 10

    def bare() -> None:
        image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
        cv2.cvtColor(cv2.resize(image, (224, 224)), cv2.COLOR_BGR2RGB)

    config = {"backend": "S[DecodeMat,ResizeMat,cvtColorMat]", "resize_h": 224, "resize_w": 224, "color": "rgb"}
    report = Report(f"decode: {len(jpeg) / 1000:.0f} KB JPEG, 500x375, to 224x224 RGB, {instances} instances")
    with pipe({**config, "instance_num": instances}) as run:
        limit = Subject("limit: OpenCV in {} bare threads", in_threads(bare), (instances,))
        ours = Subject("torchpipe_py", in_threads(lambda: run({"data": jpeg})))
        report.measure([limit, ours], (clients,), args.seconds, args.rounds)
    load, ratio = report.median(ours.name, clients), report.ratio((ours.name, clients), (limit.name, instances))
    report.require("QPS against bare OpenCV threads", ratio, low=0.95)
    report.require("p99 / p50", load.p99 / load.p50, high=2.0)
    return report


def bare_chain() -> Call:
    """The least that three hand-overs cost in Python: a queue and a thread for each node, nothing else."""
    queues: list[Any] = [SimpleQueue() for _ in range(3)]

    def node(get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        while True:
            put(get())

    for queue, put in zip(queues, [queues[1].put, queues[2].put, lambda done: done.release()], strict=True):
        threading.Thread(target=node, args=(queue.get, put), daemon=True).start()

    def call() -> None:
        done = allocate_lock()
        done.acquire()
        queues[0].put(done)
        done.acquire()

    return call
