"""An engine process for the shared nodes of all workers, against workers that have all nodes each."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

from benchmarks.bare import measure_nodes
from benchmarks.common import Report, Subject, image_folder, progress
from benchmarks.services import Tables, free_port, gpu_mib, observed, pss_mib, run_clients, serving, stats
from torchpipe_py import parse_toml

CLIENTS = (10, 40)  # numbers of clients on a CPU
WORKERS = 2


@dataclass
class Service:
    """A service to measure, and its memory in MiB, on the GPU in addition to the use before."""

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
        """Its name in the table."""
        processes = f", {self.engines} engine processes" if self.is_shared and self.engines > 1 else ""
        how = f"shared{processes}" if self.is_shared else "separate"
        return f"{self.what}, {self.workers} worker{'s' * (self.workers > 1)}, {how}"

    @contextmanager
    def started(self, *options: str) -> Iterator[int]:
        """Start it; the port it listens on."""
        began = monotonic()
        engines = ["--engines", str(self.engines)] if self.is_shared else []
        # NOTE: clients that send without a pause queue for as long as they are many, and none is to be refused.
        fixed = ["--workers", str(self.workers), "--queue-target-ms", "0"]
        with serving(self.config, [*fixed, *engines, *options]) as port:
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
    """Start the service, load it, and end it; print the results."""
    http, unused_mib = free_port(), gpu_mib()
    with service.started("--http-port", str(http)) as port:
        run_clients(port, folder, max(clients), 0.5)
        report.measure([Subject(service.name, partial(observed, http, port, folder))], clients, seconds, rounds)
        service.pss_mib.append(pss_mib(stats(http)["pid"]))
        service.gpu_mib.append(gpu_mib() - unused_mib)
        report.remarks.append(service.memory)


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
