"""An engine process for the shared nodes of all workers, against workers that have all nodes each."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.bare import measure_nodes
from benchmarks.common import Report, image_folder, labelled, progress
from benchmarks.services import free_port, gpu_mib, observed, pss_mib, run_clients, serving, stats
from torchpipe_py import parse_toml
from torchpipe_py.tools.export.config import to_toml

CLIENTS = (10, 40)  # of the benchmark on a CPU
WORKERS = 2
CHILD_SECONDS = 600.0

Tables = Mapping[str, Mapping[str, Any]]


@dataclass
class Service:
    """A service to measure, and its memory in MiB: on the GPU beside what was in use before."""

    what: str
    config: Tables
    workers: int
    is_shared: bool
    engines: int = 1
    ready_s: list[float] = field(default_factory=list)
    pss_mib: list[float] = field(default_factory=list)
    gpu_mib: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """In the table."""
        processes = f", {self.engines} engine processes" if self.is_shared and self.engines > 1 else ""
        how = f"shared{processes}" if self.is_shared else "separate"
        return f"{self.what}, {self.workers} worker{'s' * (self.workers > 1)}, {how}"

    @property
    def options(self) -> list[str]:
        """Of ``torchpipe-serve``."""
        engines = ["--engines", str(self.engines)] if self.is_shared else []
        return ["--workers", str(self.workers), *engines]

    @contextmanager
    def started(self, *options: str) -> Iterator[int]:
        """Start it; the port it listens on."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "service.toml")
            path.write_text(to_toml(self.config), encoding="utf-8")
            began = monotonic()
            with serving(str(path), [*self.options, *options]) as port:
                self.ready_s.append(monotonic() - began)
                progress(f"{self.name}: ready after {self.ready_s[-1]:.1f} s")
                yield port

    @property
    def memory(self) -> str:
        """The medians as text, with the time until it was ready."""
        ready, pss, gpu = map(statistics.median, (self.ready_s, self.pss_mib, self.gpu_mib))
        on_gpu = f", {gpu:.0f} MiB on the GPU" if gpu else ""
        return f"{self.name}: ready after {ready:.1f} s, {pss:.0f} MiB of memory (PSS of all processes){on_gpu}"


def sharing(config: Tables, node: str) -> Tables:
    """The configuration with this node shared."""
    return {name: {**table, "shared": True} if name == node else dict(table) for name, table in config.items()}


def measure(
    report: Report,
    service: Service,
    folder: Path,
    clients: Sequence[int],
    seconds: float,
    rounds: int,
) -> None:
    """Start the service, load it, and end it. Prints what it measures."""
    http, unused_mib = free_port(), gpu_mib()
    with service.started("--http-port", str(http)) as port:
        run_clients(port, folder, max(clients), 0.5)
        for _ in range(rounds):
            for count in clients:
                report.add(service.name, count, observed(http, port, folder, count, seconds))
                progress(f"{labelled(service.name, count)}: {report.loads[service.name, count][-1]}")
        service.pss_mib.append(pss_mib(stats(http)["pid"]))
        service.gpu_mib.append(gpu_mib() - unused_mib)
        report.remarks.append(service.memory)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a process of its own, so that nothing of it stays on the device."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result(CHILD_SECONDS)


# -- on a CPU -----------------------------------------------------------------------------------------------------


def shared(args: argparse.Namespace) -> Report:
    """The demo in two nodes with two workers; each round has both services, one after the other."""
    config: Tables = parse_toml("configs/demo_nodes.toml")
    services = [Service("demo", config, WORKERS, False), Service("demo", sharing(config, "model"), WORKERS, True)]
    report = Report("shared: demo model over Thrift, client processes on the same cores")
    batch = config["model"]["max"]
    limit = f"limit: the demo's nodes in {{}} bare loops, a process each, {batch} images at a time"
    measure_nodes(report, limit, config, WORKERS, batch, args.seconds, args.rounds)
    with image_folder() as folder:
        for _ in range(args.rounds):
            for service in services:
                measure(report, service, folder, CLIENTS, args.seconds, 1)
    return report
