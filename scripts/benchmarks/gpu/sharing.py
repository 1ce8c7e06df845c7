"""Engine processes for all workers of a GPU, against a model in each worker: CPU decode and GPU decode."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bare import nodes_alone
from benchmarks.common import REPOSITORY, Attempts, Load, Report, interleave, run_threads, test_jpeg
from benchmarks.gpu.engines import SIDE, BareEngine, Engines
from benchmarks.gpu.in_process import cores
from benchmarks.gpu.service import FEW, MANY, configs
from benchmarks.service.servers import run_clients, started
from benchmarks.service.sharing import Service, add_rows, images, in_child, measure, named, require_same, sharing, told

CPU, GPU = "CPU decode", "GPU decode"
MOST = 8  # workers of the comparisons of memory and of answers
CONTEXTS = 4  # of the bare engine
ALL = [(what, workers, False) for what in (CPU, GPU) for workers in (1, 2, 4, 8)]
ALL += [(what, workers, True) for what in (CPU, GPU) for workers in (2, 4, 8, 12)]
QUICK = [
    (GPU, 1, False), (GPU, 8, True), (GPU, 4, False), (CPU, 8, True), (CPU, 4, False), (GPU, 8, False),
    (CPU, 8, False), (CPU, 1, False), (CPU, 4, True), (GPU, 4, True), (GPU, 12, True), (CPU, 12, True),
]  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """What is measured: ``ALL``, or in a quick run ``QUICK``, in this order until ``most_seconds`` are over.

    ``only`` is part of the names of the services that are measured. Each with a shared node is measured with each
    number of engine processes in ``engines``; ``sizes`` takes the first. ``instances`` is what a shared node has,
    ``model_most`` the most images in a batch of the model, shared or not. ``images`` is how many answers are compared.
    ``decode``, ``separate`` and ``shared`` are of ``sizes``: where images are decoded, and the workers of each service.
    """

    clients: tuple[int, ...]
    is_quick: bool
    most_seconds: float
    instances: int
    model_most: int
    images: int
    has_profile: bool
    decode: str
    separate: int
    shared: int
    only: str
    engines: tuple[int, ...]


READ_BY = {
    **dict.fromkeys(("quick", "only", "images", "profile"), ("shared",)),
    "clients": ("shared", "mosec"),
    **dict.fromkeys(("most_seconds", "instances", "engines", "model_max"), ("shared", "mosec", "sizes")),
    **dict.fromkeys(("decode", "separate", "shared"), ("sizes",)),
}
"""Which benchmarks take what ``add_choice`` adds."""


def add_choice(parser: argparse.ArgumentParser) -> None:
    """The options of ``shared``, ``mosec`` and ``sizes``."""
    group = parser.add_argument_group("shared, mosec, sizes")
    group.add_argument("--quick", action="store_true", help="of shared: only what decides the targets")
    group.add_argument("--only", default="", metavar="TEXT", help="of shared: services whose name has it")
    group.add_argument("--most-seconds", type=float, default=3600.0, metavar="S", help="start nothing after so many")
    group.add_argument(
        "--clients",
        default=f"{FEW},{MANY}",
        metavar="N,N",
        help="of shared and mosec: client processes (default: %(default)s)",
    )
    group.add_argument("--instances", type=int, default=2, help="instances of a shared node (default: 2)")
    group.add_argument(
        "--engines", default="1,2", metavar="N,N", help="engine processes with shared nodes (default: %(default)s)"
    )
    group.add_argument("--model-max", type=int, default=8, help="images in a batch of any model (default: 8)")
    group.add_argument("--images", type=int, default=2000, help="of shared: answers that are compared (default: 2000)")
    group.add_argument("--profile", action="store_true", help="of shared: what threads of engine processes do")
    group = parser.add_argument_group("sizes")
    group.add_argument("--decode", choices=("cpu", "gpu"), default="cpu", help="where (default: %(default)s)")
    group.add_argument("--separate", type=int, default=4, metavar="N", help="workers without sharing (default: 4)")
    group.add_argument("--shared", type=int, default=MOST, metavar="N", help="workers with it (default: %(default)s)")


def check_choice(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse an option that the benchmark ``args.name`` does not take."""
    for option, names in READ_BY.items():
        if args.name not in (*names, "all") and getattr(args, option) != parser.get_default(option):
            parser.error(f"--{option.replace('_', '-')} is an option of {', '.join(names)}, not of {args.name}")


def choice_of(args: argparse.Namespace) -> Choice:
    """What the options say."""
    return Choice(
        clients=tuple(map(int, args.clients.split(","))),
        is_quick=args.quick,
        most_seconds=args.most_seconds,
        instances=args.instances,
        model_most=args.model_max,
        engines=tuple(map(int, args.engines.split(","))),
        images=args.images,
        only=args.only,
        has_profile=args.profile,
        decode=args.decode.upper(),
        separate=args.separate,
        shared=args.shared,
    )


def shared(engines: Engines, choice: Choice, seconds: float, rounds: int) -> Report:
    """One service after the other: idle ones would still hold memory and contexts."""
    report = Report(f"shared: over Thrift, client processes on the same {cores()} cores")
    attempt = Attempts(report, choice.most_seconds)
    chosen = [which for which in (QUICK if choice.is_quick else ALL) if choice.only in named(*which)]
    services = [service for which in chosen for service in services_of(engines, choice, *which)]
    with images() as folder:
        limits = limits_alone(engines, choice, attempt, seconds, rounds)
        if importlib.util.find_spec("pycuda") is None:
            report.remarks.append("the classic recipe: not measured: pycuda is not installed")
        else:
            attempt("the classic recipe", lambda: limits.update(_classic(engines, folder, choice, seconds, rounds)))
        for service in services:
            what = CPU if service.name.startswith(CPU) else GPU
            has_check = service.is_shared and service.workers == MOST and service.engines == 1 and choice.images
            check = partial(require_same, report, what, configs(engines, 1, choice.model_most)[what], choice.images)
            then = check if has_check else None
            attempt(
                service.name,
                partial(measure, service, folder, choice.clients, seconds, rounds, then, choice.has_profile),
            )
    report.add(limits)
    add_rows(report, services, choice.clients)
    judge(report, services)
    return report


def services_of(engines: Engines, choice: Choice, what: str, workers: int, is_shared: bool) -> list[Service]:
    """Services with so many workers, not started yet: one, or where nodes are shared one for each number of engines."""
    config = configs(engines, workers, choice.model_most)[what]
    if not is_shared:
        return [Service(named(what, workers, False), config, workers, False)]
    config["model"]["instance_num"] = choice.instances
    config = sharing(config, ["model"])
    return [Service(named(what, workers, True, count), config, workers, True, count) for count in choice.engines]


# -- limits -------------------------------------------------------------------------------------------------------


def limits_alone(engines: Engines, choice: Choice, attempt: Attempts, seconds: float, rounds: int) -> dict[str, Load]:
    """The engine without anything before it, OpenCV without anything behind it, and GPU decode without a service."""
    loads: dict[str, Load] = {}
    most, processes = choice.model_most, max(choice.engines)
    child = partial(in_child, engine_alone, engines, most, seconds, rounds)
    nodes = partial(nodes_alone, configs(engines, 1, most)[GPU], processes, most, seconds, rounds)
    decoding = f"limit: GPU decode and the model in {processes} bare loops, a process each, batches of {most}"
    attempt("the engine alone", lambda: loads.update(child()))
    attempt("OpenCV alone", lambda: loads.update(_opencv_alone(seconds, rounds)))
    attempt("GPU decode alone", lambda: loads.update({decoding: nodes()}))
    told("\n".join(f"{name}: {load}" for name, load in loads.items()))
    return loads


def engine_alone(engines: Engines, most: int, seconds: float, rounds: int) -> dict[str, Load]:
    """Builds the engine where it is not there yet; for a process of its own."""
    bare = BareEngine(engines.engine(most), most, CONTEXTS, True)
    name = f"limit: the engine alone, batches of {most}, {CONTEXTS} contexts"
    return interleave({name: partial(bare.load, seconds)}, rounds)


def _opencv_alone(seconds: float, rounds: int) -> dict[str, Load]:
    import cv2
    import numpy as np

    array = np.frombuffer(test_jpeg(), np.uint8)

    def decode() -> None:
        cv2.resize(cv2.imdecode(array, cv2.IMREAD_COLOR_RGB), (SIDE, SIDE))

    name = f"limit: OpenCV decodes and resizes in {cores()} threads"
    return interleave({name: partial(run_threads, decode, cores(), seconds)}, rounds)


def _classic(engines: Engines, folder: Path, choice: Choice, seconds: float, rounds: int) -> dict[str, Load]:
    engine = in_child(Engines.engine, engines, 1)
    script = str(REPOSITORY / "scripts" / "baseline_server.py")
    with started([script, "--port", "0", "--engine", engine, "--size", str(SIDE)], {}) as port:
        subjects = {
            f"the classic recipe, {clients} clients": partial(run_clients, port, folder, clients, seconds)
            for clients in choice.clients
        }
        return interleave(subjects, rounds)


# -- targets ------------------------------------------------------------------------------------------------------


def judge(report: Report, services: Iterable[Service]) -> None:
    """Hold the best shared service against the best separate one, and the memory of many workers against one's."""
    services = list(services)
    for what, clients, low in ((CPU, FEW, 1.5), (CPU, MANY, 1.15), (GPU, MANY, 1.4)):
        ours, separate = (_best(services, what, clients, is_shared) for is_shared in (True, False))
        if ours is None or separate is None:
            continue
        (name, load), (other, its_load) = ours, separate
        report.require(f"{clients} clients: QPS of {name} against {other}", load.qps / its_load.qps, low=low)
        if what == GPU:
            report.require(f"{clients} clients: QPS of {name}", load.qps, low=10_000)
            report.require("its p99, ms", load.p99, high=15)
    for what in (CPU, GPU):
        memory: dict[tuple[int, bool], Any] = {
            (service.workers, service.is_shared): service.gpu_mib[-1]
            for service in services
            if service.name.startswith(what) and service.engines == 1 and service.gpu_mib and service.gpu_mib[-1]
        }
        if {(1, False), (MOST, True)} <= memory.keys():
            ratio = memory[MOST, True] / memory[1, False]
            report.require(f"{what}: GPU memory of {MOST} workers, shared, against one", ratio, high=1.3)


def _best(services: Iterable[Service], what: str, clients: int, is_shared: bool) -> tuple[str, Load] | None:
    loads = [
        (service.name, load)
        for service in services
        if service.name.startswith(what) and service.is_shared == is_shared and (load := service.load(clients))
    ]
    return max(loads, key=lambda one: one[1].qps, default=None)
