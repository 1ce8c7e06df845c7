"""``scripts/bench.py`` and ``scripts/bench_gpu.py``: which benchmarks there are, and how they are run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torchpipe_server.worker.worker import limit_threads

from benchmarks.common import Report, machine, show, write_json
from benchmarks.gpu import in_process as gpu
from benchmarks.gpu.against_mosec import against_mosec
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.int8 import int8 as int8_on_gpu
from benchmarks.gpu.processes import processes_on_gpu
from benchmarks.gpu.service import served
from benchmarks.gpu.sharing import add_choice, check_choice, choice_of
from benchmarks.gpu.sharing import shared as shared_on_gpu
from benchmarks.gpu.sizes import sizes
from benchmarks.in_process import nodes
from benchmarks.in_process.detector import detector
from benchmarks.in_process.int8 import int8
from benchmarks.in_process.processes import processes
from benchmarks.ray.data import ray_data
from benchmarks.ray.faults import ray_faults
from benchmarks.ray.overhead import ray_serve
from benchmarks.service.io_cost import io_cost
from benchmarks.service.isolation import isolation
from benchmarks.service.mean import mean
from benchmarks.service.models import service
from benchmarks.service.over_http import over_http
from benchmarks.service.sharing import shared
from benchmarks.service.tracing import tracing
from benchmarks.service.workers import workers
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.models.engine.api import is_lean, load_tensorrt
from torchpipe_py.errors import BackendUnavailable

Benchmark = Callable[[float, int], Report | list[Report]]
"""Takes the seconds of each measurement and the rounds whose median is shown."""

ON_CPU: dict[str, Benchmark] = {
    "schedule": nodes.schedule,
    "graphs": nodes.graphs,
    "batching": nodes.batching,
    "decode": nodes.decode,
    "processes": processes,
    "detector": detector,
    "int8": int8,
    "service": service,
    "over_http": over_http,
    "workers": workers,
    "shared": shared,
    "tracing": tracing,
    "io_cost": io_cost,
    "mean": mean,
    "isolation": isolation,
    "ray_data": ray_data,
    "ray_serve": ray_serve,
    "ray_faults": ray_faults,
}
ON_GPU: dict[str, Callable[[Engines, float, int], Report | list[Report]]] = {
    "limits": gpu.limits,
    "g1g2": gpu.in_process,
    "processes": processes_on_gpu,
    "g5": gpu.large_images,
    "g6": gpu.engine_alone,
    "int8": int8_on_gpu,
    "g3g4": served,
}
NEEDED_ON_GPU = ("torch", "torchvision", "cv2")
CHOSEN_ON_GPU = {"shared": shared_on_gpu, "mosec": against_mosec, "sizes": sizes}
WITHOUT_BASELINE = ("limits", "processes", "g5", "g6", "int8", *CHOSEN_ON_GPU)  # need no pycuda


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every target is met, 1 when one is missed."""
    args = _parser("Limit, baselines and the pipe in one run.", ON_CPU).parse_args(argv)
    here = machine()
    return _run(ON_CPU, args, f"{here['cpu']}, {here['cores']} cores, Python {here['python']}")


def main_gpu(argv: Sequence[str] | None = None) -> int:
    """0 when every target is met, 1 when one is missed, 2 where it cannot run."""
    parser = _parser("Limit, baseline and the pipe on a GPU, in one run.", [*ON_GPU, *CHOSEN_ON_GPU])
    parser.add_argument("--work", default="build/bench_gpu", help="folder for model and engines")
    parser.add_argument("--cores", type=int, help="use only so many cores")
    parser.add_argument(
        "--version-compatible",
        action="store_true",
        help="with engines that the lean runtime takes too; it builds none, so run once under TensorRT before",
    )
    add_choice(parser)
    args = parser.parse_args(argv)
    check_choice(parser, args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that services are ended
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])  # before any thread is started
    needed = [*NEEDED_ON_GPU, *(["pycuda"] if args.name not in WITHOUT_BASELINE else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing or missing[0] != "torch":
        import torch

        if not torch.cuda.is_available():
            print("bench_gpu.py: no CUDA device", file=sys.stderr)
            return 2
    if missing:
        print(f"bench_gpu.py: {', '.join(missing)}: not installed", file=sys.stderr)
        return 2
    try:
        tensorrt = load_tensorrt()
    except BackendUnavailable as error:
        print(f"bench_gpu.py: {error}", file=sys.stderr)
        return 2
    limit_threads()
    here, engines = machine(), Engines(args.work, args.version_compatible)
    what = f"{torch.cuda.get_device_name()}, {here['cores']} cores {here['cpu']}, Python {here['python']}"
    benchmarks: dict[str, Benchmark] = {name: partial(benchmark, engines) for name, benchmark in ON_GPU.items()}
    benchmarks |= {name: partial(benchmark, engines, choice_of(args)) for name, benchmark in CHOSEN_ON_GPU.items()}
    runtime = f"{'the lean runtime of ' if is_lean(tensorrt) else ''}TensorRT {tensorrt.__version__}"
    return _run(benchmarks, args, f"{what}, PyTorch {torch.__version__}, {runtime}")


def _parser(description: str, names: Iterable[str]) -> ArgumentParser:
    parser = ArgumentParser(description=description)
    parser.add_argument("name", choices=[*names, "all"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements whose median is shown (default: 5)")
    parser.add_argument("--json", metavar="FILE", help="write everything there as well")
    return parser


def _run(benchmarks: Mapping[str, Benchmark], args: argparse.Namespace, where: str) -> int:
    print(f"{where}; medians of {args.rounds} x {args.seconds:g} s", flush=True)
    reports: list[Report] = []
    for name in benchmarks if args.name == "all" else [args.name]:
        outcome = benchmarks[name](args.seconds, args.rounds)
        for report in outcome if isinstance(outcome, list) else [outcome]:
            show(report)
            sys.stdout.flush()
            reports.append(report)
    if args.json:
        write_json(args.json, reports)
    return 0 if all(met for report in reports for *_, met in report.targets) else 1
