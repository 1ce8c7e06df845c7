"""HTTP against Thrift on one port of the service, and against mosec and LitServe: the same work, images and clients.

All have the same workers, each of which decodes a batch and runs the model on it in one thread. Beside them there is
the demo as it is served without options: one worker, and two nodes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Load, Report, in_rounds, medians, run_threads, test_jpeg
from benchmarks.service.peer import SAME_BATCH, WORKERS, is_installed, litserve, mosec
from benchmarks.service.servers import run_clients, serving
from torchpipe_py import pipe

CLIENTS = (1, 10, 40)
CONFIG = "configs/demo.toml"
ONE_NODE = "scripts/benchmarks/service/one_node.toml"
WORK = {"BENCH_MODEL": str(REPOSITORY / "configs" / "demo" / "model.onnx"), "BENCH_SIZE": "64"}


def over_http(seconds: float, rounds: int) -> Report:
    """QPS, latency and the CPU time that all processes of a service take for a request."""
    jpeg = test_jpeg()
    report = Report(f"over_http: demo model, {len(jpeg) / 1000:.0f} KB JPEG, client processes, same cores")
    subjects: dict[str, Callable[[], Load]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "image.jpg").write_bytes(jpeg)
        alone = stack.enter_context(pipe(CONFIG))
        subjects["limit: the pipe alone, 10 threads"] = partial(run_threads, partial(_call, alone, jpeg), 10, seconds)
        port = stack.enter_context(serving(ONE_NODE, ["--workers", str(WORKERS)]))
        ours = f"torchpipe-serve, {WORKERS} workers, batch {SAME_BATCH}"
        services: dict[str, tuple[int, list[str]]] = {
            f"{ours}, Thrift": (port, []),
            f"{ours}, HTTP": (port, ["--transport", "http"]),
        }
        for name, start in (("mosec", mosec), ("litserve", litserve)):
            if is_installed(name, report):
                peer = stack.enter_context(start(WORK, SAME_BATCH))
                services[f"{name}, {WORKERS} workers, batch {SAME_BATCH}"] = peer.port, peer.options
        peers = list(services)[2:]
        demo = stack.enter_context(serving(CONFIG))
        services |= {"the demo, Thrift": (demo, []), "the demo, HTTP": (demo, ["--transport", "http"])}
        for clients in CLIENTS:
            for name, (at, options) in services.items():
                subjects[f"{name}, {clients} clients"] = partial(run_clients, at, folder, clients, seconds, options)
        rows = in_rounds(subjects, rounds)
    loads = medians(rows)
    report.add(loads, {name: f"{load.cpu_ms:.2f} ms CPU" for name, load in loads.items() if load.cpu_ms})
    for clients in CLIENTS:
        of = {name: rows[f"{name}, {clients} clients"] for name in services}
        thrift, http = of[f"{ours}, Thrift"], of[f"{ours}, HTTP"]
        report.require(f"HTTP against Thrift, {clients} clients", _ratio(http, thrift), low=0.85)
        report.require(
            f"the demo, HTTP against Thrift, {clients} clients",
            _ratio(of["the demo, HTTP"], of["the demo, Thrift"]),
            low=0.85,
        )
        for name in peers:
            report.require(f"HTTP against {name}, {clients} clients", _ratio(http, of[name]), low=1.0)
    report.remarks.append("ms CPU: of all processes of the service, for a request")
    return report


def _ratio(ours: list[Load], theirs: list[Load]) -> float:
    """Of the rates: the median of the rounds' ratios, since a machine that is busy changes from round to round."""
    return statistics.median(one.qps / other.qps for one, other in zip(ours, theirs, strict=True))


def _call(run: pipe, jpeg: bytes) -> None:
    data: dict[str, Any] = {"data": jpeg}
    run(data)
