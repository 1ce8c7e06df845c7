"""Engine processes for all workers of a GPU, against a model in each worker: CPU decode and GPU decode."""

from __future__ import annotations

import argparse
import re
from contextlib import closing
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.bare import Measure, Processes, child, measure_nodes
from benchmarks.common import REPOSITORY, Load, Report, Subject, cores, image_folder, picture
from benchmarks.gpu.baseline import LIBRARIES, choose_library
from benchmarks.gpu.engines import BareEngine, Engines, cpu_pipe, gpu_pipe
from benchmarks.gpu.in_process import opencv
from benchmarks.services import run_clients, started
from benchmarks.sharing import Service, measure, sharing

CPU, GPU = "CPU decode", "GPU decode"
RECIPE = "the classic recipe"
REDUCED = f"{CPU} at 1x"  # JPEGs at the smallest scale that the resize needs
CHECKED = {"node": GPU, "inside": f"{GPU} (checked inside)", "none": f"{GPU} (unchecked)"}
FEW, MANY = 20, 100  # clients
MOST = 8  # workers in the comparison with mosec
CONTEXTS = 4  # execution contexts of the bare engine
ALL = [(what, workers, False) for what in (CPU, GPU) for workers in (1, 2, 4, 8)]
ALL += [(what, workers, True) for what in (CPU, GPU) for workers in (2, 4, 8, 12)]


def shared(engines: Engines, args: argparse.Namespace) -> Report:
    """Measure one service after the other: idle ones would still hold memory and contexts."""
    report = Report(f"shared: over Thrift, client processes on the same {cores()} cores")
    report.until = monotonic() + args.most_seconds
    chosen = [service for which in ALL for service in services_of(engines, args, *which)]
    services = [service for service in chosen if re.search(args.only, service.name)]
    with image_folder(picture(*args.image)) as folder:
        limits_alone(report, engines, args)
        if re.search(args.only, RECIPE):
            report.attempt(RECIPE, partial(_classic, report, engines, folder, args))
        for service in services:
            action = partial(measure, report, service, folder, args.clients, args.seconds, args.rounds)
            report.attempt(service.name, action)
    judge(report, services)
    return report


def config_of(engines: Engines, workers: int, most: int, checks: str = "") -> dict[str, Any]:
    """The configuration of each worker: GPU decode with these ``checks``, or CPU decode without any.

    CPU decode has threads for three quarters of the cores together, and a worker 2 to 8 of them. ``most``: images in a
    batch of the model.
    """
    instances = 2 if workers == 1 else 1
    if checks:
        return gpu_pipe(engines, most=most, instances=instances, checks=checks)
    decoders = max(2, min(8, 3 * cores() // 4 // workers))
    return cpu_pipe(engines, decoders=decoders, most=most, instances=instances)


def services_of(engines: Engines, args: argparse.Namespace, what: str, workers: int, is_shared: bool) -> list[Service]:
    """Services with so many workers, not started yet: one for each of ``--checks`` where the GPU decodes.

    Else one that decodes whole images, and one at the scale that is needed. If the model is shared, one for each of
    ``--engines``.
    """
    services = []
    kinds = [(CHECKED[checks], checks) for checks in args.checks] if what == GPU else [(CPU, ""), (REDUCED, "")]
    for name, checks in kinds:
        config = config_of(engines, workers, args.model_max, checks)
        if name == REDUCED:
            config["decode"]["at_least"] = "1x"
        if not is_shared:
            services.append(Service(name, config, workers, False))
            continue
        config["model"]["instance_num"] = args.instances
        services += [Service(name, sharing(config, "model"), workers, True, count) for count in args.engines]
    return services


# -- limits -------------------------------------------------------------------------------------------------------


def limits_alone(report: Report, engines: Engines, args: argparse.Namespace) -> None:
    """The engine with nothing before it, OpenCV with nothing after it, and GPU decode and model without a service."""
    most, processes = args.model_max, max(args.engines)
    nodes = config_of(engines, 1, most, "none")
    name = f"limit: the engine alone, batches of {most}, {{}} contexts"
    decoding = f"limit: GPU decode and the model in {{}} bare loops, a process each, batches of {most}"

    def engine() -> None:
        with closing(Processes(1, engine_alone, engines, most)) as process:
            report.measure([Subject(name, process.load)], (CONTEXTS,), args.seconds, args.rounds)

    report.attempt("the engine alone", engine)
    alone = partial(report.measure, [opencv(picture(*args.image))], (), args.seconds, args.rounds)
    report.attempt("OpenCV alone", alone)
    loops = partial(measure_nodes, report, decoding, nodes, processes, most, args.seconds, args.rounds, args.image)
    report.attempt("GPU decode alone", loops)


def engine_alone(engines: Engines, most: int) -> tuple[Measure, str]:
    """Build the engine if it is missing, and measure it; runs in a separate process."""
    return BareEngine(engines.engine(most), most).load, ""


def _classic(report: Report, engines: Engines, folder: Path, args: argparse.Namespace) -> None:
    with child() as process:
        path = process.submit(engines.engine, 1).result()
    library = choose_library(args.cuda)[0]
    script = str(REPOSITORY / "scripts" / "baseline_server.py")
    with started([script, "--port", "0", "--engine", path, "--cuda", library]) as (port, _):
        name = f"{RECIPE}, copies by {LIBRARIES[library]}"
        classic = Subject(name, lambda clients, seconds: run_clients(port, folder, clients, seconds))
        report.measure([classic], args.clients, args.seconds, args.rounds)


# -- targets ------------------------------------------------------------------------------------------------------


def judge(report: Report, services: list[Service]) -> None:
    """Hold the best shared service against the best separate one."""
    for what, clients, low in ((CPU, FEW, 1.5), (CPU, MANY, 1.15), (GPU, MANY, 1.4)):
        ours, separate = (_best(report, services, what, clients, is_shared) for is_shared in (True, False))
        if ours is None or separate is None:
            continue
        (name, load), (other, its_load) = ours, separate
        report.require(f"{clients} clients: QPS of {name} against {other}", load.qps / its_load.qps, low=low)
        if what == GPU:
            report.require(f"{clients} clients: QPS of {name}", load.qps, low=10_000)
            report.require("its p99, ms", load.p99, high=15)


def _best(report: Report, services: list[Service], what: str, clients: int, is_shared: bool) -> tuple[str, Load] | None:
    names = [service.name for service in services if (service.what, service.is_shared) == (what, is_shared)]
    loads = [(name, report.median(name, clients)) for name in names if (name, clients) in report.loads]
    return max(loads, key=lambda one: one[1].qps, default=None)
