"""HTTP against Thrift on one port of the service, and against mosec and LitServe: the same work, images and clients.

All have the same workers, each of which decodes a batch and runs the model on it in one thread. Beside them there is
the demo as it is served without options: one worker, and two nodes.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Load, Report, in_rounds, medians, run_threads, test_jpeg
from benchmarks.service.peer import SAME_BATCH, WORKERS, is_installed, litserve, mosec
from benchmarks.service.servers import run_clients, serving
from torchpipe_py import parse_toml, pipe
from torchpipe_py.tools.export.config import to_toml

CLIENTS = (1, 10, 40)
CONFIG = "configs/demo.toml"
DEMO = "the demo"
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
        port = stack.enter_context(serving_one_node(WORKERS))
        demo = stack.enter_context(serving(CONFIG))
        ours = f"torchpipe-serve, {WORKERS} workers, batch {SAME_BATCH}"
        services: dict[str, tuple[int, list[str]]] = {}
        for name, at in ((ours, port), (DEMO, demo)):
            services |= {f"{name}, Thrift": (at, []), f"{name}, HTTP": (at, ["--transport", "http"])}
        peers: list[str] = []
        for name, start in (("mosec", mosec), ("litserve", litserve)):
            if is_installed(name, report):
                peer = stack.enter_context(start(WORK, SAME_BATCH))
                peers.append(f"{name}, {WORKERS} workers, batch {SAME_BATCH}")
                services[peers[-1]] = peer.port, peer.options
        for clients in CLIENTS:
            for name, (at, options) in services.items():
                subjects[f"{name}, {clients} clients"] = partial(run_clients, at, folder, clients, seconds, options)
        rows = in_rounds(subjects, rounds)
    loads = medians(rows)
    report.add(loads, {name: f"{load.cpu_ms:.2f} ms CPU" for name, load in loads.items() if load.cpu_ms})
    for clients in CLIENTS:
        of = {name: rows[f"{name}, {clients} clients"] for name in services}
        for name in (ours, DEMO):
            ratio = _ratio(of[f"{name}, HTTP"], of[f"{name}, Thrift"])
            report.require(f"{name}, HTTP against Thrift, {clients} clients", ratio, low=0.85)
        for name in peers:
            ratio = _ratio(of[f"{ours}, HTTP"], of[name])
            report.require(f"HTTP against {name}, {clients} clients", ratio, low=1.0)
    report.remarks.append("ms CPU: of all processes of the service, for a request")
    return report


@contextmanager
def serving_one_node(workers: int) -> Iterator[int]:
    """The service on the demo's configuration with both nodes in one; the port it listens on."""
    tables = parse_toml(CONFIG)
    decode, model = tables.pop("decode"), tables["model"]
    both = {key: value for key, value in {**decode, **model}.items() if key not in ("next", "instance_num")}
    both["backend"] = f"{decode['backend'].removesuffix(']')},{model['backend']}]"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one_node.toml"
        path.write_text(to_toml({**tables, "model": both}), encoding="utf-8")
        with serving(str(path), ["--workers", str(workers)]) as port:
            yield port


def _ratio(ours: list[Load], theirs: list[Load]) -> float:
    """Of the rates: the median of the rounds' ratios, since a machine that is busy changes from round to round."""
    return statistics.median(one.qps / other.qps for one, other in zip(ours, theirs, strict=True))


def _call(run: pipe, jpeg: bytes) -> None:
    data: dict[str, Any] = {"data": jpeg}
    run(data)
