"""The service with engine processes against mosec with its own split: the same host, engine, images and clients."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from benchmarks.common import Report, image_folder, progress
from benchmarks.gpu.engines import SIDE, Engines, cores
from benchmarks.gpu.sharing import CPU, GPU, MOST, limits_alone, services_of
from benchmarks.peers import is_installed, serving_module
from benchmarks.sharing import Service, measure

BAR = 1.5
TRY_SECONDS = 1.0  # of each setting, before the best is measured


class Setting(NamedTuple):
    """Of mosec: processes that decode, processes with the engine, images of a batch at most, milliseconds it waits."""

    decoders: int
    owners: int
    most: int
    wait_ms: int

    def __str__(self) -> str:
        return "mosec, {} decode, {} with batches of {} in {} ms".format(*self)


def settings(most: int) -> list[Setting]:
    """Those that are tried: a quarter of the cores is left to the rest of the work, and others beside the likeliest."""
    usual = max(2, 6 * cores() // 8)
    tried = [(usual, 1, 8, 1), (usual, 1, 16, 1), (usual, 1, 32, 2), (usual, 2, 16, 1), (usual, 1, 32, 5)]
    tried += [(max(2, cores() // 2), 1, 16, 1), (cores(), 1, 16, 1)]
    return list(dict.fromkeys(Setting(first, owners, min(batch, most), wait) for first, owners, batch, wait in tried))


def against_mosec(engines: Engines, args: argparse.Namespace) -> Report:
    """The limits, ours, then each setting of mosec for a moment and the best of them for as long as ours."""
    report = Report(f"mosec: processes that decode, others with the engine; clients on the same {cores()} cores")
    report.until = monotonic() + args.most_seconds
    services = [service for what in (CPU, GPU) for service in services_of(engines, args, what, MOST, True)]
    best: dict[int, Setting] = {}
    limits_alone(report, engines, args)
    with image_folder() as folder:
        for service in services:
            action = partial(measure, report, service, folder, args.clients, args.seconds, args.rounds)
            report.attempt(service.name, action)
        if is_installed("mosec", report):
            best = _fastest(report, engines, args, folder)
    judge(report, services, best)
    return report


def _fastest(report: Report, engines: Engines, args: argparse.Namespace, folder: Path) -> dict[int, Setting]:
    """The fastest setting for each number of clients, measured for ``--seconds``."""
    tried: dict[int, dict[Setting, float]] = {clients: {} for clients in args.clients}
    node = engines.node(args.model_max, postprocessor="SoftmaxMax")

    def run(setting: Setting, counts: Iterable[int], seconds: float, rounds: int, is_final: bool) -> None:
        environment = {"BENCH_NODE": json.dumps(node), "BENCH_SETTING": json.dumps(setting), "BENCH_SIDE": str(SIDE)}
        with serving_module("mosec", "benchmarks.gpu.mosec_service", environment) as peer:
            for clients in counts:
                for _ in range(rounds):
                    load = peer.load(folder, clients, seconds)
                    progress(f"{setting}, {clients} clients: {load}")
                    tried[clients][setting] = load.qps
                    if is_final:
                        report.add(str(setting), clients, load)

    for setting in settings(args.model_max):
        seconds = min(args.seconds, TRY_SECONDS)
        report.attempt(str(setting), partial(run, setting, args.clients, seconds, 1, False))
    best = {clients: max(rates, key=lambda one: rates[one]) for clients, rates in tried.items() if rates}
    for clients, setting in best.items():
        report.attempt(str(setting), partial(run, setting, [clients], args.seconds, args.rounds, True))
    return best


def judge(report: Report, services: Iterable[Service], best: dict[int, Setting]) -> None:
    """Hold each of ours against the best of mosec, with as many clients."""
    for clients, setting in best.items():
        for service in services:
            if {(service.name, clients), (str(setting), clients)} <= report.loads.keys():
                ratio = report.median(service.name, clients).qps / report.median(str(setting), clients).qps
                report.require(f"{clients} clients: QPS of {service.name} against the best of mosec", ratio, low=BAR)
