"""HTTP on all cores: the service, mosec and LitServe, each with the number of workers that suits it best."""

from __future__ import annotations

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.common import Report, interleave, machine, test_jpeg
from benchmarks.service.over_http import WORK, serving_one_node
from benchmarks.service.peer import SAME_BATCH, Peer, is_installed, litserve, mosec
from benchmarks.service.servers import run_clients

CLIENTS = (10, 40)

Start = Callable[[int], AbstractContextManager[tuple[int, list[str]]]]
"""A service with so many workers; its port and what tells the load tester how to ask."""


def workers(seconds: float, rounds: int) -> Report:
    """QPS and CPU time for a request. One service runs at a time, since LitServe's workers are busy when idle."""
    jpeg = test_jpeg()
    report = Report(f"workers: demo model over HTTP, {len(jpeg) / 1000:.0f} KB JPEG, client processes, same cores")
    services: dict[str, Start] = {"torchpipe-serve": _ours}
    for name, start in (("mosec", mosec), ("litserve", litserve)):
        if is_installed(name, report):
            services[name] = partial(_peer, start)
    counts = [2**power for power in range(machine()["cores"].bit_length())][-4:]
    measured: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder)
        (images / "image.jpg").write_bytes(jpeg)
        for (name, begin), count in itertools.product(services.items(), counts):
            with begin(count) as (port, options):
                subjects = {
                    f"{name}, {count} workers, {clients} clients": partial(
                        run_clients, port, images, clients, seconds, options
                    )
                    for clients in CLIENTS
                }
                loads = interleave(subjects, rounds)
            report.add(loads, {what: f"{load.cpu_ms:.2f} ms CPU" for what, load in loads.items()})
            for clients, load in zip(CLIENTS, loads.values(), strict=True):
                measured[name, clients].append((load.qps, count))
    ours, *others = services
    for clients, other in itertools.product(CLIENTS, others):
        (qps, count), (its_qps, its_count) = max(measured[ours, clients]), max(measured[other, clients])
        what = f"{clients} clients, {count} workers against the best of {other}, {its_count} workers"
        report.require(what, qps / its_qps, low=1.0)
    return report


@contextmanager
def _ours(workers: int) -> Iterator[tuple[int, list[str]]]:
    with serving_one_node(workers) as port:
        yield port, ["--transport", "http"]


@contextmanager
def _peer(start: Callable[..., AbstractContextManager[Peer]], workers: int) -> Iterator[tuple[int, list[str]]]:
    with start(WORK, SAME_BATCH, workers) as peer:
        yield peer.port, peer.options
