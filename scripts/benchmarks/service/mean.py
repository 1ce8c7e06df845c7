"""Decode and mean as a service: next to no work behind the network, against mosec and against bare threads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from benchmarks.common import Load, Report, interleave, run_threads, test_jpeg
from benchmarks.service.peer import CLIENTS, mosec_subjects
from benchmarks.service.servers import run_clients, serving
from torchpipe_py.errors import counted

_BACKEND = '''
import cv2
from torchpipe_py import ItemBackend, register_backend

class MeanMat(ItemBackend):
    """The mean of all values of a Mat."""

    def any_thread(self):
        return True

    def forward_item(self, item):
        item["result"] = ("mean", sum(cv2.mean(item["data"])[:3]) / 3)

register_backend(MeanMat, "MeanMat")
'''
_TOML = '[mean]\nbackend = "S[DecodeMat,MeanMat]"\ninstance_num = {instances}\n'
_SERVICES = ((1, 2), (2, 1))  # workers, instances of each


def mean(seconds: float, rounds: int) -> Report:
    """One image each time, 10 clients and one."""
    jpeg = test_jpeg()
    report = Report(f"service: decode and mean, {len(jpeg) / 1000:.0f} KB JPEG, client processes, same cores")
    subjects: dict[str, Callable[[], Load]] = {
        f"limit: OpenCV in {threads} bare threads": partial(run_threads, partial(_work, jpeg), threads, seconds)
        for threads in (2, 4)
    }
    ours: dict[int, list[str]] = {CLIENTS: [], 1: []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "image.jpg").write_bytes(jpeg)
        (folder / "mean_backend.py").write_text(_BACKEND, encoding="utf-8")
        for workers, instances in _SERVICES:
            config = folder / f"mean{workers}.toml"
            config.write_text(_TOML.format(instances=instances), encoding="utf-8")
            options = ["--workers", str(workers), "--import", str(folder / "mean_backend.py")]
            port = stack.enter_context(serving(str(config), options))
            for clients in ours:
                name = f"torchpipe-serve, {counted(workers, 'worker')}, {clients} clients"
                subjects[name] = partial(run_clients, port, folder, clients, seconds)
                ours[clients].append(name)
        peers = mosec_subjects(stack, {}, folder, seconds, report)
        loads = interleave({**subjects, **peers}, rounds)
    report.add(loads)
    if not peers:
        return report
    for clients in ours:
        best = max(loads[name].qps for name in ours[clients])
        one_by_one, batching = (best / loads[name].qps for name in peers if name.endswith(f" {clients} clients"))
        report.require(f"against mosec with batches, {counted(clients, 'client')}", batching, low=2.0)
        report.remarks.append(f"against mosec without batches, {counted(clients, 'client')}: {one_by_one:.2f}")
    limit = next(iter(loads.values())).qps / loads[next(iter(peers))].qps
    report.remarks.append(f"the limit against mosec without batches, {CLIENTS} clients: {limit:.2f}")
    return report


def _work(jpeg: bytes) -> None:
    cv2.mean(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR))
