"""What a request costs on Ray Serve, against the service and against the pipe alone, and how batches form there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import Load, Report, Row, load_of
from benchmarks.ray.cluster import (
    DEMO,
    IMAGE,
    PORT,
    SLEEP,
    SLEEP_TOML,
    cluster,
    cpu_seconds,
    deployed,
    http_load,
    is_missing,
    mean_batch,
)
from benchmarks.service.servers import free_port, run_clients, serving
from torchpipe_py import pipe

CLIENTS = (1, 10, 40)
RATE = 120


class Subject:
    """Something under load: how to load it, its processes, its batches so far."""

    def __init__(
        self, name: str, load: Callable[..., Load], processes: Callable[[], list[psutil.Process]],
        batches: Callable[[], dict[int, int]],
    ) -> None:  # fmt: skip
        self.name, self.load, self._processes, self._batches = name, load, processes, batches

    def measure(self, clients: int, seconds: float) -> tuple[Row, float]:
        """The row, and the mean batch."""
        self.load(clients, min(1.0, seconds))
        processes, before = self._processes(), self._batches()
        used = cpu_seconds(processes)
        began = time.perf_counter()
        load = self.load(clients, seconds)
        wall = time.perf_counter() - began
        after = self._batches()
        requests = _requests(after) - _requests(before)
        cpu_ms = 1000 * (cpu_seconds(processes) - used) / max(1, requests)
        batch = mean_batch(before, after)
        note = f"{cpu_ms:.2f} CPU ms a request, mean batch {batch:.2f} ({requests / wall:.0f}/s)"
        return Row(f"{self.name}, {clients} clients", load.qps, load.p50, load.p99, note), batch


def ray_serve(seconds: float, rounds: int) -> list[Report]:
    """The demo, and batches that take 20 ms and no core: Ray Serve against the service, one replica and one worker."""
    demo = Report("Ray Serve: the demo, one replica against one worker, clients on the same cores")
    slow = Report("Ray Serve: batches of eight that take 20 ms and no core, two instances, one replica")
    if is_missing(demo):
        return [demo]
    with tempfile.TemporaryDirectory() as folder:
        code, config = Path(folder, "sleep_backend.py"), Path(folder, "sleep.toml")
        code.write_text(SLEEP, encoding="utf-8")
        config.write_text(SLEEP_TOML, encoding="utf-8")
        for report, path, node, imported in ((demo, DEMO, "model", ""), (slow, str(config), "sleep", str(code))):
            with cluster():
                handle = deployed(config=path, **({"import": imported} if imported else {}))
                if report is demo:
                    _labels(handle, report)
                ours = {subject.name: subject for subject in _serve_subjects(handle, node)}
                with _service(path, node, imported) as theirs:
                    subjects = [*ours.values(), *theirs, *([_direct(path)] if report is demo else [])]
                    for clients in CLIENTS:
                        report.rows += [subject.measure(clients, seconds)[0] for subject in subjects]
        same = _same_load(str(config), str(code), seconds)
    return [demo, slow, same]


def _same_load(config: str, imported: str, seconds: float) -> Report:
    """Requests at one rate, which both take easily: how do they come together in batches?"""
    report = Report(f"Ray Serve: {RATE} requests a second over HTTP, one instance, batches of 40 ms: the same load")
    slow: dict[str, Any] = {"sleep.milliseconds": 40, "sleep.instance_num": 1}
    with tempfile.TemporaryDirectory() as folder, cluster():
        text = SLEEP_TOML.replace("instance_num = 2", "instance_num = 1\nmilliseconds = 40")
        Path(folder, "slow.toml").write_text(text, encoding="utf-8")
        ours = next(iter(_serve_subjects(deployed(**{"config": config, "import": imported}, **slow), "sleep")))
        with _service(str(Path(folder, "slow.toml")), "sleep", imported) as (theirs, _):
            batches = []
            for subject in (ours, theirs):
                subject.load = partial(subject.load, rate=RATE)
                row, batch = subject.measure(0, 4 * seconds)
                report.rows.append(replace(row, what=f"{subject.name}, {RATE}/s"))
                batches.append(batch)
    report.require("mean batch of Ray Serve against the service's", batches[0] / batches[1], low=0.9)
    return report


def _labels(handle: Any, report: Report) -> None:
    images = sorted(IMAGE.parent.glob("*.jpg"))
    wrong = 0
    with pipe(DEMO) as run:
        for image in images:
            data = {"data": image.read_bytes()}
            label, score = run(dict(data))["result"]
            by_handle = handle.remote(data["data"]).result()
            url = f"http://127.0.0.1:{PORT}/infer"
            with urllib.request.urlopen(urllib.request.Request(url, data["data"])) as answer:
                by_http = json.loads(answer.read())
            wrong += by_handle != (label, score) or by_http != {"label": label, "score": score}
    report.require(f"labels and scores of {len(images)} images that differ from the pipe's", wrong, high=1)


def _serve_subjects(handle: Any, node: str) -> Iterator[Subject]:
    def batches() -> dict[int, int]:
        sizes: dict[int, int] = handle.stats.remote().result()["nodes"][node]["batch_sizes"]
        return sizes

    def cluster_processes() -> list[psutil.Process]:
        return list(psutil.Process().children(recursive=True))

    def by_handle(clients: int, seconds: float) -> Load:
        return asyncio.run(_closed_loop(handle.remote, clients, seconds))

    yield Subject("Ray Serve, HTTP", partial(_http, PORT), cluster_processes, batches)
    yield Subject("Ray Serve, handle", by_handle, lambda: [psutil.Process(), *cluster_processes()], batches)


@contextmanager
def _service(config: str, node: str, imported: str) -> Iterator[list[Subject]]:
    status = free_port()
    options = ["--http-port", str(status), *(["--import", imported] if imported else [])]
    before = {process.pid for process in psutil.Process().children()}
    with serving(config, options) as port:
        (server,) = [process for process in psutil.Process().children() if process.pid not in before]

        def batches() -> dict[int, int]:
            time.sleep(1.1)  # the supervisor asks its workers once in a second
            with urllib.request.urlopen(f"http://127.0.0.1:{status}/stats") as answer:
                sizes = json.loads(answer.read())["nodes"][node]["batch_sizes"]
            return {int(size): count for size, count in sizes.items()}

        def processes() -> list[psutil.Process]:
            return [server, *server.children(recursive=True)]

        def by_thrift(clients: int, seconds: float) -> Load:
            return run_clients(port, IMAGE.parent, clients, seconds)

        yield [
            Subject("torchpipe-serve, HTTP", partial(_http, port), processes, batches),
            Subject("torchpipe-serve, Thrift", by_thrift, processes, batches),
        ]


def _direct(config: str) -> Subject:
    run = pipe(config)
    image = IMAGE.read_bytes()

    async def call(data: bytes) -> object:
        return await run.acall({"data": data})

    def load(clients: int, seconds: float) -> Load:
        return asyncio.run(_closed_loop(call, clients, seconds, image))

    def batches() -> dict[int, int]:
        return dict(run.stats()["nodes"]["model"]["batch_sizes"])

    return Subject("pipe.acall", load, lambda: [psutil.Process()], batches)


def _requests(batches: Mapping[int, int]) -> int:
    return sum(size * count for size, count in batches.items())


async def _closed_loop(call: Callable[[bytes], Any], clients: int, seconds: float, image: bytes = b"") -> Load:
    image = image or IMAGE.read_bytes()
    latencies: list[float] = []
    began = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            await call(image)
            latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(client() for _ in range(clients)))
    return load_of(latencies, time.perf_counter() - began)


def _http(port: int, clients: int, seconds: float, rate: float = 0) -> Load:
    with http_load(port, clients, seconds, rate) as outcome:
        found = outcome()
    if set(found["statuses"]) != {"200"}:
        raise subprocess.SubprocessError(f"answers: {found['statuses']}")
    return load_of(found["latencies"], seconds)
