"""An engine process for the shared nodes of all workers, against workers that have all nodes each."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from torchpipe_client import Client
from torchpipe_server.worker.worker import limit_threads

from benchmarks.bare import nodes_alone
from benchmarks.common import Load, Report, median_load, test_jpeg
from benchmarks.inside import threads
from benchmarks.service.observed import gpu_mib, observed, pss_mib, stats
from benchmarks.service.servers import free_port, run_clients, serving
from torchpipe_py import parse_toml, pipe
from torchpipe_py.tools.export.config import to_toml

CLIENTS = (10, 40)  # of the benchmark on a CPU
WORKERS = 2
CALLERS = 40  # of the comparison of answers
CHILD_SECONDS = 600.0
PROFILE_SECONDS = 1.0

Tables = dict[str, dict[str, Any]]


class Answer(NamedTuple):
    """What a pipe says of an image."""

    label: str
    score: float


@dataclass
class Service:
    """A service to measure, and what was measured of it; memory in MiB, on the GPU beside what was in use before."""

    name: str
    config: Tables
    workers: int
    is_shared: bool
    engines: int = 1
    loads: dict[int, list[Load]] = field(default_factory=lambda: defaultdict(list))
    notes: dict[int, str] = field(default_factory=dict)
    ready_s: list[float] = field(default_factory=list)
    pss_mib: list[float] = field(default_factory=list)
    gpu_mib: list[float] = field(default_factory=list)
    threads: dict[int, list[str]] = field(default_factory=dict)
    profile: list[str] = field(default_factory=list)

    @property
    def options(self) -> list[str]:
        """Of ``torchpipe-serve``."""
        engines = ["--engines", str(self.engines)] if self.is_shared else []
        return ["--workers", str(self.workers), *engines]

    def load(self, clients: int) -> Load | None:
        """The median of its rounds, if there were any."""
        return median_load(self.loads[clients]) if self.loads.get(clients) else None


def named(what: str, workers: int, is_shared: bool, engines: int = 1) -> str:
    """The name of a service in the table."""
    how = "shared" if is_shared else "separate"
    processes = f", {engines} engine processes" if is_shared and engines > 1 else ""
    return f"{what}, {workers} worker{'s' * (workers > 1)}, {how}{processes}"


def sharing(config: Mapping[str, Mapping[str, Any]], nodes: Sequence[str]) -> Tables:
    """The configuration with these nodes shared."""
    return {name: {**table, "shared": True} if name in nodes else dict(table) for name, table in config.items()}


# -- measurement --------------------------------------------------------------------------------------------------


@contextmanager
def images() -> Iterator[Path]:
    """A folder with the benchmarks' image."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "image.jpg").write_bytes(test_jpeg())
        yield Path(folder)


def measure(
    service: Service,
    folder: Path,
    clients: Sequence[int],
    seconds: float,
    rounds: int,
    then: Callable[[int], object] | None = None,
    has_profile: bool = False,
) -> None:
    """Start the service, load it, and end it; ``then(port)`` is called before its end. Prints what it measures."""
    path = folder / "service.toml"
    path.write_text(to_toml(service.config), encoding="utf-8")
    http, unused_mib, began = free_port(), gpu_mib(), monotonic()
    with serving(str(path), [*service.options, "--http-port", str(http)], threads.environment()) as port:
        service.ready_s.append(monotonic() - began)
        run_clients(port, folder, max(clients), 0.5)
        for _ in range(rounds):
            for count in clients:
                before = threads.engines(stats(http))
                load, service.notes[count] = observed(http, port, folder, count, seconds)
                service.threads[count] = list(threads.table(before, threads.engines(stats(http))))
                service.loads[count].append(load)
                told(f"{service.name}, {count} clients: {load} {service.notes[count]}")
        service.pss_mib.append(pss_mib(stats(http)["pid"]))
        service.gpu_mib.append(gpu_mib() - unused_mib)
        told(f"{service.name}: {_memory(service)}")
        if has_profile and service.is_shared:
            service.profile = list(_profile(http, port, folder, max(clients)))
        told("\n".join([*service.threads.get(max(clients), ()), *service.profile]))
        if then is not None:
            then(port)


def _profile(http: int, port: int, folder: Path, clients: int) -> Iterator[str]:
    """What the engine processes are at under load, which no figure is taken from."""

    def requests() -> int:
        return sum(node["requests"] for node in stats(http)["nodes"].values())

    start = requests()
    with ThreadPoolExecutor(1) as executor:
        load = executor.submit(run_clients, port, folder, clients, 4 * PROFILE_SECONDS)
        while not load.done() and requests() < start + 20 * clients:  # past the clients' warm-up
            sleep(0.05)
        for pid in threads.engines(stats(http)).threads:
            yield from threads.profile(pid, PROFILE_SECONDS)
        load.result()


def told(line: str) -> None:
    """Show what is known so far."""
    print(line, file=sys.stderr, flush=True)


def add_rows(report: Report, services: Sequence[Service], clients: Sequence[int]) -> None:
    """A line for each service and number of clients."""
    for count in clients:
        for service in services:
            load = service.load(count)
            if load is not None:
                name = f"{service.name}, {count} clients"
                report.add({name: load}, {name: service.notes[count]})
    report.remarks += [f"{service.name}: {_memory(service)}" for service in services if service.pss_mib]
    for service in services:
        for count, lines in service.threads.items():
            report.remarks += [f"{service.name}, {count} clients: {lines[0]}", *lines[1:]] if lines else []
        report.remarks += (
            [f"{service.name}: what its engine process is at", *service.profile] if service.profile else []
        )


def _memory(service: Service) -> str:
    ready, pss, gpu = map(statistics.median, (service.ready_s, service.pss_mib, service.gpu_mib))
    on_gpu = f", {gpu:.0f} MiB on the GPU" if gpu else ""
    return f"ready after {ready:.1f} s, {pss:.0f} MiB of memory (PSS of all processes){on_gpu}"


# -- answers ------------------------------------------------------------------------------------------------------


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a process of its own, so that nothing of it stays on the device."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_tell, args=(theirs, function, args), daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(CHILD_SECONDS):
            raise TimeoutError(f"{function.__name__} took more than {CHILD_SECONDS:g} s")
        result, problem = ours.recv()
    except EOFError:
        raise RuntimeError(f"{function.__name__}: the process crashed") from None
    finally:
        child.kill()
        child.join()
    if problem:
        raise RuntimeError(problem)
    return result


def _tell(connection: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        connection.send((function(*args), ""))
    except Exception as error:
        connection.send((None, f"{type(error).__name__}: {error}"))


def pictures(count: int) -> list[bytes]:
    """So many different JPEGs of 500×375."""
    import cv2
    import numpy as np

    def picture(seed: int) -> bytes:
        rng = np.random.default_rng(seed)
        small = rng.integers(0, rng.integers(64, 257), (rng.integers(2, 25), rng.integers(2, 33), 3), dtype=np.uint8)
        image = cv2.resize(small, (500, 375), interpolation=cv2.INTER_CUBIC)
        return bytes(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 90])[1])

    with ThreadPoolExecutor() as pool:
        return list(pool.map(picture, range(count)))


def answers_of_pipe(config: Tables, count: int) -> tuple[list[Answer], list[Answer]]:
    """What one pipe says of the pictures, one after the other, and asked by many callers at once."""
    jpegs = pictures(count)
    limit_threads()
    with pipe(config) as run, ThreadPoolExecutor(CALLERS) as callers:

        def ask(jpeg: bytes) -> Answer:
            item: dict[str, Any] = {"data": jpeg}
            label, score = run(item)["result"]
            return Answer(str(label), float(score))

        return list(map(ask, jpegs)), list(callers.map(ask, jpegs))


def answers_of_service(port: int, jpegs: Sequence[bytes], callers: int) -> list[Answer]:
    """What a service says of them, asked by so many callers at once."""
    with Client(f"127.0.0.1:{port}") as client, ThreadPoolExecutor(callers) as pool:
        return [Answer(*result) for result in pool.map(client.infer_batch, jpegs)]


def require_same(report: Report, what: str, config: Tables, count: int, port: int) -> None:
    """The service at the port answers what one pipe of this configuration does.

    Asked for one image at a time, it says the same to the last bit. A batch of another size may change the last
    bits, so under load it may differ from that as much as the pipe under load does.
    """
    alone, busy = in_child(answers_of_pipe, config, count)
    labels, worst = difference(alone, busy)
    kinds = f"{len({answer.label for answer in alone})} labels, {len(set(alone))} answers"
    report.remarks.append(f"{what}, {count} images ({kinds}): a pipe under load against itself: {labels} other labels, "
                          f"scores differ by {worst:.2g}")  # fmt: skip
    jpegs = pictures(count)
    some = max(1, count // 10)
    calm = answers_of_service(port, jpegs[:some], 1)
    others = sum(one != other for one, other in zip(calm, alone[:some], strict=True))
    report.require(f"{what}, {some} images one by one, answers that differ", others, high=1)
    its_labels, its_worst = difference(alone, answers_of_service(port, jpegs, CALLERS))
    report.require(f"{what}, {count} images under load, other labels", its_labels, high=labels + 1 + count // 1000)
    report.require(f"{what}, the same, millionths that scores differ by", 1e6 * its_worst, high=2e6 * worst + 10)


def difference(answers: Sequence[Answer], others: Sequence[Answer]) -> tuple[int, float]:
    """How many labels differ, and by how much the scores do at most."""
    pairs = list(zip(answers, others, strict=True))
    return sum(one.label != other.label for one, other in pairs), max(
        abs(one.score - other.score) for one, other in pairs
    )


# -- on a CPU -----------------------------------------------------------------------------------------------------


def shared(seconds: float, rounds: int) -> Report:
    """The demo with two workers; each round has both services, one after the other."""
    config: Tables = parse_toml("configs/demo.toml")
    services = [
        Service(named("demo", WORKERS, False), config, WORKERS, is_shared=False),
        Service(named("demo", WORKERS, True), sharing(config, ["model"]), WORKERS, is_shared=True),
    ]
    report = Report("shared: demo model over Thrift, client processes, same cores")
    batch = config["model"]["max"]
    limit = f"limit: the demo's nodes in {WORKERS} bare loops, a process each, {batch} images at a time"
    report.add({limit: nodes_alone(config, WORKERS, batch, seconds, rounds)})
    with images() as folder:
        for number in range(rounds):
            for service in services:
                is_last = service.is_shared and number == rounds - 1
                then = partial(require_same, report, "shared", config, 200) if is_last else None
                measure(service, folder, CLIENTS, seconds, 1, then)
    add_rows(report, services, CLIENTS)
    return report
