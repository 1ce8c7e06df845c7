"""The documents' tables on a GPU: TensorRT behind a lock against the pipe's service, CPU decode against GPU decode.

Speed is that of ResNet-50 with random weights, accuracy that of the demo's trained model, or both of ``--model``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from time import monotonic

from benchmarks.bare import child
from benchmarks.common import Report, cores, image_folder, picture
from benchmarks.comparison import (
    DEMO,
    DEMO_SIDE,
    Comparison,
    Service,
    Table,
    add_folder_options,
    as_documented,
    compare_answers,
    labelled_images,
    locked,
    measure,
    on_cores,
    start,
)
from benchmarks.gpu.baseline import LIBRARIES, choose_library
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.sharing import CPU, GPU, config_of
from benchmarks.services import serving_process
from benchmarks.sharing import sharing

CLIENTS, DECODE_CLIENTS = (10, 20), (1, 5, 10)
DOCUMENTED_SIDE = 1080  # pixels of the images in the comparison of decoders
SERVICE_CORES = 3  # of the service in that comparison
WORKERS = 4
AS_DOCUMENTED = "torchpipe_py, configs/resnet50.toml"


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of this benchmark."""
    model = "ONNX model without mean and std (default: ResNet-50 with random weights; for accuracy, the demo's)"
    parser.add_argument("--model", metavar="FILE", help=model)
    add_folder_options(parser)


def against_baseline(engines: Engines, args: argparse.Namespace) -> Comparison:
    """Compare the services; a part that fails becomes a remark."""
    report = Comparison(f"baseline: over Thrift, client processes on the same machine, {cores()} cores")
    report.until = monotonic() + args.most_seconds
    library, problem = choose_library(args.cuda)
    report.remarks.append(
        f"the baseline copies to and from the GPU by {LIBRARIES[library]}{problem and f': {problem}'}"
    )
    if args.model:
        engines = Engines(args.work, args.version_compatible, args.model, args.size)
    report.attempt("the services", partial(_services, report, engines, args, library))
    report.attempt("CPU decode against GPU decode", partial(_decoders, report, engines, args))
    report.attempt("accuracy", partial(_accuracy, report, engines, args, library))
    report.is_open = not (report.loads and report.accuracies)
    return report


def _baseline(report: Report, engines: Engines, library: str) -> dict[str, Service]:
    """Build the locked engine; ``None`` if that fails."""
    services: dict[str, Service] = {}
    name = f"TensorRT, locked, {LIBRARIES[library]}"

    def build() -> None:
        with child() as process:  # which frees the device's memory after the build
            path = process.submit(engines.engine, 1).result()
        services[name] = locked(["--engine", path, "--cuda", library], engines.side)

    report.attempt(name, build)
    return services


def _services(report: Comparison, engines: Engines, args: argparse.Namespace, library: str) -> None:
    """Compare the locked engine, the documents' three nodes, and this project's recommendation for a GPU."""
    most = args.model_max
    several = sharing(config_of(engines, WORKERS, most), "model")
    services = {
        **_baseline(report, engines, library),
        AS_DOCUMENTED: serving_process(as_documented(engines.side, **engines.node(most, instance_num=4))),
        f"torchpipe_py, {CPU}, {WORKERS} workers": serving_process(several, ["--workers", str(WORKERS)]),
        f"torchpipe_py, {GPU}": serving_process(config_of(engines, 1, most, "node")),
    }
    with ExitStack() as stack:
        images = args.img_dir or stack.enter_context(image_folder(picture(*args.image)))
        running = start(report, stack, services)
        measure(report, running, images, CLIENTS, args.seconds, args.rounds)
        what = f"images of {args.img_dir}" if args.img_dir else "{}x{} JPEGs".format(*args.image)
        report.add_methods(f"{engines.name}, {what}", list(services), CLIENTS)


# -- CPU decode against GPU decode --------------------------------------------------------------------------------


def _decoders(report: Comparison, engines: Engines, args: argparse.Namespace) -> None:
    """Compare decoders; services have ``SERVICE_CORES`` cores, clients the rest."""
    usable = sorted(os.sched_getaffinity(0))
    limited, rest = usable[:SERVICE_CORES], usable[SERVICE_CORES:]
    if not rest:
        report.remarks.append(f"there are {len(usable)} cores: services and clients share them")
    names = [f"{what}, {len(limited)} cores" for what in (CPU, GPU)]
    with ExitStack() as stack:
        images = stack.enter_context(image_folder(picture(DOCUMENTED_SIDE, DOCUMENTED_SIDE)))
        with on_cores(limited):  # so that numbers of instances follow from these
            configs = [config_of(engines, 1, args.model_max, checks) for checks in ("", "node")]
            services = {name: serving_process(config) for name, config in zip(names, configs, strict=True)}
            running = start(report, stack, services)
        with on_cores(rest) if rest else nullcontext():
            measure(report, running, images, DECODE_CLIENTS, args.seconds, args.rounds)
    title = f"{engines.name}, {DOCUMENTED_SIDE}x{DOCUMENTED_SIDE} JPEGs, service limited to {100 * len(limited)}% CPU"
    report.tables.append(decoder_table(report, title, names, DECODE_CLIENTS))


def decoder_table(report: Report, title: str, names: Sequence[str], clients: Sequence[int]) -> Table:
    """A row for each that was measured; the improvement is over the first of ``names``."""
    head = ("decode type", "client", "CPU utilization", "QPS", "avg ms", "TP50 ms", "TP99 ms", "QPS improvement")
    rows = []
    for count in clients:
        first = (names[0], count)
        for key in [(name, count) for name in names if (name, count) in report.loads]:
            load = report.median(*key)
            is_pair = key != first and len(report.loads.get(first, ())) == len(report.loads[key])
            gain = f"{100 * (report.ratio(key, first) - 1):+.2f}%" if is_pair else ""
            times = (f"{load.more['avg ms']:.2f}", f"{load.p50:.2f}", f"{load.p99:.2f}")
            rows.append((key[0], str(count), f"{100 * load.more['CPU cores']:.0f}%", f"{load.qps:.1f}", *times, gain))
    return Table(title, head, rows)


# -- accuracy -----------------------------------------------------------------------------------------------------


def _accuracy(report: Comparison, engines: Engines, args: argparse.Namespace, library: str) -> None:
    """The labels of the same model behind the lock and in the pipe, with CPU decode and with GPU decode."""
    if not args.model:
        engines = Engines(args.work, args.version_compatible, str(DEMO), DEMO_SIDE)
    labelled = labelled_images(args.img_dir, args.labels, is_demo=not args.model)
    services = {
        **_baseline(report, engines, library),
        AS_DOCUMENTED: serving_process(as_documented(engines.side, **engines.node(args.model_max))),
        f"torchpipe_py, {GPU}": serving_process(config_of(engines, 1, args.model_max, "node")),
    }
    with ExitStack() as stack:
        compare_answers(report, start(report, stack, services), labelled)
