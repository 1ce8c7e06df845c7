"""The classic recipe on a GPU machine, against a pipe in one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from benchmarks.common import Report, Subject, cores, in_threads, picture
from benchmarks.gpu.baseline import Baseline, load_model
from benchmarks.gpu.engines import SIDE, BareEngine, Engines, cpu_pipe, gpu_pipe

WARM_UP = 0.5  # seconds of each subject before anything is measured
BASELINE = "baseline: a lock around batch 1"
FIRST = (500, 375)  # pixels of the usual image


@contextmanager
def running(config: dict[str, Any], encoded: bytes) -> Iterator[Callable[[], object]]:
    """A pipe as a call that answers one image."""
    from torchpipe_py import pipe

    with pipe(config) as run:

        def call() -> None:
            item: dict[str, Any] = {"data": encoded}
            run(item)
            if "result" not in item:
                raise RuntimeError(f"no result: {item['error']}")

        in_threads(call)(32, WARM_UP)
        yield call


def opencv(encoded: bytes) -> Subject:
    """Decoding and resizing by OpenCV in threads, without anything else."""
    import cv2
    import numpy as np

    array = np.frombuffer(encoded, np.uint8)
    cv2.setNumThreads(1)
    load = in_threads(lambda: cv2.resize(cv2.imdecode(array, cv2.IMREAD_COLOR_RGB), (SIDE, SIDE)))
    return Subject("limit: OpenCV decodes and resizes in {} threads", load, (cores(),))


def in_process(engines: Engines, args: argparse.Namespace) -> Report:
    """JPEGs from client threads in this process, with CPU and GPU decode, against a locked engine of batch 1."""
    width, height = args.image
    encoded, clients = picture(width, height), (1, 5, 10, 20, 40, 100)
    report = Report(f"in_process: {width}x{height} JPEGs, {cores()} cores, closed-loop client threads")
    decoders = max(1, cores() - 4)
    configs = {
        "CPU decode, max 8": cpu_pipe(engines, decoders=decoders, most=8, instances=2),
        "CPU decode, max 32": cpu_pipe(engines, decoders=decoders, most=32, instances=2),
        "GPU decode, max 8": gpu_pipe(engines, most=8, instances=2),
    }
    with ExitStack() as stack:
        model = load_model(engines.engine(1), library=args.cuda)
        classic = stack.enter_context(closing(Baseline(model)))
        baseline = f"{BASELINE}, {model.description}"
        subjects = [opencv(encoded), Subject(baseline, in_threads(lambda: classic(encoded)))]
        for name, config in configs.items():
            call = stack.enter_context(running(config, encoded))
            subjects.append(Subject(name, in_threads(call)))
        report.measure(subjects, clients, args.seconds, args.rounds)

    def best(start: str, counts: tuple[int, ...] = clients) -> float:
        return max(report.median(*key).qps for key in report.loads if key[0].startswith(start) and key[1] in counts)

    if (width, height) != FIRST:
        for count in clients[:3]:
            gain = best("GPU", (count,)) / best("CPU", (count,))
            report.require(f"GPU decode against CPU decode, {count} clients", gain, low=1.5)
        return report
    report.require("QPS at 40 clients, CPU decode", best("CPU", (40,)), low=10_000)
    report.require("QPS at 100 clients, CPU decode", best("CPU", (100,)), low=12_000)
    for name in ("CPU decode, max 8", "GPU decode, max 8"):
        ratio = report.median(name, 1).p50 / report.median(baseline, 1).p50
        report.require(f"1 client, p50 against the baseline's, {name}", ratio, high=1.0)
    report.require("best against the baseline's best", best("CPU") / best("baseline"), low=8.0)
    return report


def engine(engines: Engines, args: argparse.Namespace) -> Report:
    """Tensors on the GPU in: through a pipe against a bare loop of CUDA graphs."""
    import torch

    from torchpipe_py import pipe

    most = args.model_max
    report = Report(f"engine: the model alone, batches of {most}, float32 tensors on the GPU")
    tensor = torch.rand(1, 3, SIDE, SIDE, device="cuda") * 255
    torch.cuda.synchronize()
    with pipe(engines.node(most, instance_num=4, batching_timeout=2)) as run:
        many = in_threads(lambda: run([{"data": tensor} for _ in range(most)]), most)
        many(4, WARM_UP)
        bare, classic = (BareEngine(engines.engine(most), most, graphs) for graphs in (True, False))
        subjects = [
            Subject("limit: bare loop, {} contexts", bare.load, (1, 2, 4)),
            Subject("baseline: execute_async_v3, {} contexts", classic.load, (1, 2, 4)),
            Subject(f"torchpipe_py, {most} per call", many, (4, 8)),
            Subject("torchpipe_py, 1 per call", in_threads(lambda: run({"data": tensor})), (8 * most,)),
        ]
        report.measure(subjects, (), args.seconds, args.rounds)
    limit, ours = (
        max(report.median(*key).qps for key in report.loads if key[0].startswith(start))
        for start in ("limit", "torchpipe_py")
    )
    report.require("QPS against the bare loop", ours / limit, low=0.95)
    return report
