"""The service with engine processes against mosec with its own split: the same host, engine, images and clients."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from functools import partial
from time import monotonic
from typing import NamedTuple

from benchmarks.common import Report, Subject, cores, image_folder
from benchmarks.gpu.engines import SIDE, Engines
from benchmarks.gpu.sharing import CPU, GPU, MOST, limits_alone, services_of
from benchmarks.peers import is_installed, serving_module
from benchmarks.sharing import Service, measure

BAR = 1.5


class Setting(NamedTuple):
    """A setting of mosec: decoding processes, engine processes, largest batch, and its timeout in milliseconds."""

    decoders: int
    owners: int
    most: int
    wait_ms: int

    def __str__(self) -> str:
        return "mosec, {} decode, {} with batches of {} in {} ms".format(*self)


def settings(most: int) -> list[Setting]:
    """The settings to try: three quarters of the cores decode, and variations of this."""
    usual, most = max(2, 6 * cores() // 8), min(most, 32)
    tried = [(usual, 1, most, 1), (usual, 1, most, 2), (usual, 1, most, 5), (usual, 2, most, 1), (usual, 1, 8, 1)]
    return [Setting(*each) for each in dict.fromkeys([*tried, (cores(), 1, most, 1)])]


def against_mosec(engines: Engines, args: argparse.Namespace) -> Report:
    """The limits, ours, then each setting of mosec."""
    report = Report(f"mosec: processes that decode, others with the engine; clients on the same {cores()} cores")
    report.until = monotonic() + args.most_seconds
    services = [service for what in (CPU, GPU) for service in services_of(engines, args, what, MOST, True)]
    node = engines.node(args.model_max, postprocessor="SoftmaxMax")
    limits_alone(report, engines, args)
    with image_folder() as folder:

        def mosec(setting: Setting) -> None:
            how = {"NODE": json.dumps(node), "SETTING": json.dumps(setting), "SIDE": SIDE}
            with serving_module("mosec", "benchmarks.gpu.mosec_service", how) as peer:
                subject = Subject(str(setting), partial(peer.load, folder))
                report.measure([subject], args.clients, args.seconds, args.rounds)

        for service in services:
            action = partial(measure, report, service, folder, args.clients, args.seconds, args.rounds)
            report.attempt(service.name, action)
        for setting in settings(args.model_max) if is_installed("mosec", report) else []:
            report.attempt(str(setting), partial(mosec, setting))
    judge(report, services)
    return report


def judge(report: Report, services: Iterable[Service]) -> None:
    """Hold each of ours against the best of mosec, with as many clients."""
    best: dict[int, float] = {}
    for name, clients in report.loads:
        if name.startswith("mosec"):
            best[clients] = max(best.get(clients, 0.0), report.median(name, clients).qps)
    for clients, qps in best.items():
        for service in services:
            if (service.name, clients) in report.loads:
                ratio = report.median(service.name, clients).qps / qps
                report.require(f"{clients} clients: QPS of {service.name} against the best of mosec", ratio, low=BAR)
