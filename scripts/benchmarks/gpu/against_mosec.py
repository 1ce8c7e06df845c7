"""The service with engine processes against mosec with its own split: the same host, engine, images and clients."""

from __future__ import annotations

import http.client
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torchpipe_client import Client

from benchmarks.common import Attempts, Load, Report, median_load, test_jpeg
from benchmarks.gpu.engines import SIDE, Engines
from benchmarks.gpu.in_process import cores
from benchmarks.gpu.mosec_split import Batching, Decoders, Split, route
from benchmarks.gpu.sharing import CPU, GPU, MOST, Choice, limits_alone, services_of
from benchmarks.service.peer import Peer, is_installed, mosec_options, started
from benchmarks.service.servers import free_port, run_clients
from benchmarks.service.sharing import Service, add_rows, images, measure, told

BAR = 1.5
TRY_SECONDS = 1.0  # of a setting of mosec, before the best is measured
BATCHINGS = [(8, 1, 1), (16, 1, 1), (32, 2, 1), (16, 1, 2), (32, 5, 1)]
"""Images of a batch at most, the milliseconds it waits for them, processes with the engine; the likeliest first."""


@dataclass
class Tried:
    """The rounds of mosec with one setting and so many clients."""

    decoders: Decoders
    batching: Batching
    loads: list[Load] = field(default_factory=list)

    @property
    def load(self) -> Load:
        """Their median."""
        return median_load(self.loads)

    def __str__(self) -> str:
        first, how = self.decoders.processes, "a pickle" if self.decoders.is_pickled else "bytes"
        most, wait, second = self.batching
        return f"mosec, {first} decode to {how}, {second} with batches of {most} in {wait} ms"


def against_mosec(engines: Engines, choice: Choice, seconds: float, rounds: int) -> Report:
    """The limits, ours, then the best of mosec's settings."""
    report = Report(f"mosec: processes that decode, others with the engine; clients on the same {cores()} cores")
    attempt = Attempts(report, choice.most_seconds)
    services = [service for what in (CPU, GPU) for service in services_of(engines, choice, what, MOST, True)]
    answers: list[tuple[str, float]] = []
    best: dict[int, Tried] = {}
    with images() as folder:
        limits = limits_alone(engines, choice, attempt, seconds, rounds)
        for service in services:
            then = partial(_answer_of_ours, answers)
            attempt(service.name, partial(measure, service, folder, choice.clients, seconds, rounds, then))
        if is_installed("mosec", report):
            attempt("mosec", partial(_mosec, engines, choice, folder, seconds, rounds, best, answers))
    report.add(limits)
    for clients, tried in best.items():
        report.add({f"{tried}, {clients} clients": tried.load})
    add_rows(report, services, choice.clients)
    judge(report, services, best)
    if len(answers) > 1:
        labels, worst = {label for label, _ in answers}, max(abs(score - answers[0][1]) for _, score in answers)
        report.require("labels of the image among all services", len(labels), high=2)
        report.remarks.append(f"scores of the image differ by {worst:.2g}")
    return report


def judge(report: Report, services: Sequence[Service], best: dict[int, Tried]) -> None:
    """Hold each of ours against the best of mosec, with as many clients."""
    for clients, tried in best.items():
        for service in services:
            load = service.load(clients)
            if load is not None:
                name = f"{clients} clients: QPS of {service.name} against the best of mosec"
                report.require(name, load.qps / tried.load.qps, low=BAR)


def split_of(engines: Engines, choice: Choice) -> Split:
    """Every setting that is tried. The first decoders leave a quarter of the cores to the rest of the work."""
    counts = dict.fromkeys(max(2, share * cores() // 8) for share in (6, 4, 8))
    decoders = [*map(Decoders, counts), Decoders(next(iter(counts)), True)]
    batchings = dict.fromkeys(Batching(min(most, choice.model_most), *rest) for most, *rest in BATCHINGS)
    return Split(engines.node(choice.model_most, postprocessor="SoftmaxMax"), SIDE, decoders, list(batchings))


def _mosec(
    engines: Engines,
    choice: Choice,
    folder: Path,
    seconds: float,
    rounds: int,
    best: dict[int, Tried],
    answers: list[tuple[str, float]],
) -> None:
    split = split_of(engines, choice)
    usual, *others = split.decoders
    trials: dict[int, list[Tried]] = defaultdict(list)

    def run(tried: Tried, clients: int, length: float) -> Load:
        path = route(tried.decoders, tried.batching)
        load = run_clients(peer.port, folder, clients, length, peer._replace(path=path).options)
        told(f"{tried}, {clients} clients: {load}")
        return load

    def attempt(decoders: Decoders, batching: Batching, clients: int) -> None:
        tried = Tried(decoders, batching)
        tried.loads.append(run(tried, clients, min(seconds, TRY_SECONDS)))
        trials[clients].append(tried)

    with _serving(split) as peer:
        answers.append(_answer_of_mosec(peer))
        for batching in split.batchings:
            for clients in choice.clients:
                attempt(usual, batching, clients)
        for clients in choice.clients:
            batching = max(trials[clients], key=lambda tried: tried.load.qps).batching
            for decoders in others:
                attempt(decoders, batching, clients)
            quickest = max(trials[clients], key=lambda tried: tried.load.qps)
            best[clients] = Tried(quickest.decoders, quickest.batching)
            for _ in range(rounds):
                best[clients].loads.append(run(best[clients], clients, seconds))


@contextmanager
def _serving(split: Split) -> Iterator[Peer]:
    port = free_port()
    paths = [route(decoders, batching) for decoders in split.decoders for batching in split.batchings]
    command = ["benchmarks.gpu.mosec_service", *mosec_options(port), "--timeout", "30000"]
    with started(command, {"BENCH_SPLIT": json.dumps(split)}, port, paths) as peer:
        yield peer


def _answer_of_ours(answers: list[tuple[str, float]], port: int) -> None:
    with Client(f"127.0.0.1:{port}") as client:
        label, score = client.infer_batch(test_jpeg())
    answers.append((str(label), score))


def _answer_of_mosec(peer: Peer) -> tuple[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", peer.port, timeout=30)
    connection.request("POST", peer.path, test_jpeg())
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer["label"], answer["score"]
