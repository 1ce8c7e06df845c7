"""What a GPU machine can do, what the classic recipe makes of it, and what a pipe does: ResNet-50 by TensorRT, fp16.

The model has random weights, which is nothing to speed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Load, Report, Row, interleave, python, run_threads, scaled, test_jpeg
from benchmarks.gpu.engines import SIDE, BareEngine, Engines

CORES_OF_G5 = 3
WARM_UP = 0.5  # seconds of each subject before anything is measured


def cpu_pipe(engines: Engines, *, decoders: int, most: int, instances: int) -> dict[str, Any]:
    """JPEG bytes in, decoded and resized by OpenCV, ``(label, score)`` out."""
    return {
        "global": {"batching_timeout": 2, "resize_h": SIDE, "resize_w": SIDE, "color": "rgb"},
        "decode": {"backend": "S[DecodeMat,ResizeMat,cvtColorMat]", "instance_num": decoders, "next": "model"},
        "model": engines.node(most, instance_num=instances, postprocessor="SoftmaxMax"),
    }


def gpu_pipe(engines: Engines, *, most: int, instances: int) -> dict[str, Any]:
    """JPEG bytes in, decoded by nvJPEG and resized on the GPU, ``(label, score)`` out; all in one node."""
    node = engines.node(most, instance_num=instances, postprocessor="SoftmaxMax")
    backend = "SyncTensor[S[DecodeTensor,ResizeTensor,TensorrtTensor]]"
    return {
        "global": {"batching_timeout": 2, "resize_h": SIDE, "resize_w": SIDE},
        "model": {**node, "backend": backend, "DecodeTensor::max": most},
    }


@contextlib.contextmanager
def running(config: dict[str, Any], encoded: bytes) -> Iterator[Callable[[], object]]:
    """A pipe as a call that answers one image."""
    from torchpipe_py import pipe

    with pipe(config) as run:

        def call() -> None:
            item: dict[str, Any] = {"data": encoded}
            run(item)
            if "result" not in item:
                raise RuntimeError(f"no result: {item['error']}")

        run_threads(call, 32, WARM_UP)
        yield call


def baseline(engines: Engines) -> Callable[[bytes], object]:
    """The classic recipe, in process."""
    from benchmarks.gpu.baseline import Baseline, LockedEngine

    return Baseline(LockedEngine(engines.engine(1), SIDE), SIDE)


def big_jpeg() -> bytes:
    """1080×1080, quality 90."""
    import cv2
    import numpy as np

    small = cv2.imdecode(np.frombuffer(test_jpeg(), np.uint8), cv2.IMREAD_COLOR)
    big = cv2.resize(small, (1080, 1080), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    big += np.random.default_rng(7).normal(0, 7.5, big.shape).astype(np.int16)
    return bytes(cv2.imencode(".jpg", np.clip(big, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])[1])


# -- limits -------------------------------------------------------------------------------------------------------


def limits(engines: Engines, seconds: float, rounds: int) -> Report:
    """What the machine does without any pipeline: OpenCV threads, nvJPEG, the engine with and without graphs."""
    import cv2
    import numpy as np
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    cv2.setNumThreads(1)
    subjects: dict[str, Callable[[], Load]] = {}
    for name, encoded in (("500x375", test_jpeg()), ("1080x1080", big_jpeg())):
        array = np.frombuffer(encoded, np.uint8)

        def by_opencv(array: Any = array) -> None:
            cv2.resize(cv2.imdecode(array, cv2.IMREAD_COLOR_RGB), (SIDE, SIDE))

        for threads in (1, 8, cores()):
            subjects[f"OpenCV decode+resize {name}, {threads} threads"] = partial(
                run_threads, by_opencv, threads, seconds
            )
        tensor = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        for count in (1, 8, 32):
            images = [tensor] * count

            def by_nvjpeg(images: Any = images) -> None:
                decode_jpeg(images, mode=ImageReadMode.RGB, device="cuda")
                torch.cuda.current_stream().synchronize()

            subjects[f"nvJPEG {name}, calls of {count}"] = partial(scaled, by_nvjpeg, 1, count, seconds)
    runs = ((1, 4, False), (1, 4, True), (8, 1, True), (8, 2, False), (8, 2, True), (8, 4, True))
    for batch, threads, graphs in runs:
        loop = BareEngine(engines.engine(8), batch, threads, graphs)
        how = "CUDA graphs" if graphs else "execute_async_v3"
        subjects[f"engine, batch {batch}, {threads} contexts, {how}"] = partial(loop.load, seconds)
    report = Report("limits: no pipeline at all")
    report.add(interleave(subjects, rounds))
    return report


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


# -- g1g2 ---------------------------------------------------------------------------------------------------------


def in_process(engines: Engines, seconds: float, rounds: int) -> list[Report]:
    """500×375 JPEGs from client threads in this process, against a locked engine of batch 1."""
    encoded, classic = test_jpeg(), baseline(engines)
    classic(encoded)
    wide_name, wide = best_cpu_pipe(engines, encoded, 32)
    name, narrow = best_cpu_pipe(engines, encoded, 8)
    single = Report("g1g2: one client, in process")
    many = Report("g1g2: many clients, in process")
    with (
        running(narrow, encoded) as cpu,
        running(gpu_pipe(engines, most=8, instances=2), encoded) as gpu,
    ):
        loads = interleave(
            {
                "baseline: a lock around batch 1, preprocessing in the caller": partial(
                    run_threads, lambda: classic(encoded), 1, seconds
                ),
                f"CPU decode, {name}": partial(run_threads, cpu, 1, seconds),
                "GPU decode": partial(run_threads, gpu, 1, seconds),
            },
            rounds,
        )
        single.add(loads)
        slow, by_cpu, by_gpu = loads.values()
        single.require("p50 against the baseline's, CPU decode", by_cpu.p50 / slow.p50, high=1.0)
        single.require("p50 against the baseline's, GPU decode", by_gpu.p50 / slow.p50, high=1.0)
        subjects = {
            f"baseline, {count} clients": partial(run_threads, lambda: classic(encoded), count, seconds)
            for count in (1, 5, 20, 40)
        }
        for count in (20, 40, 100):
            subjects[f"CPU decode, {name}, {count} clients"] = partial(run_threads, cpu, count, seconds)
            subjects[f"GPU decode, max 8, {count} clients"] = partial(run_threads, gpu, count, seconds)
        loads = interleave(subjects, rounds)
    with running(wide, encoded) as cpu:
        loads |= interleave(
            {
                f"CPU decode, {wide_name}, {count} clients": partial(run_threads, cpu, count, seconds)
                for count in (20, 40, 100)
            },
            rounds,
        )
    many.add(loads)

    def best(start: str, end: str = "") -> float:
        return max(load.qps for name, load in loads.items() if name.startswith(start) and name.endswith(end))

    many.require("QPS at 40 clients", best("CPU", " 40 clients"), low=10000)
    many.require("QPS at 100 clients", best("CPU", "100 clients"), low=12000)
    many.require("best against the baseline's best", best("CPU") / best("baseline"), low=8.0)
    return [single, many]


def best_cpu_pipe(engines: Engines, encoded: bytes, most: int) -> tuple[str, dict[str, Any]]:
    """The number of decoding threads and model instances that serves 40 clients best here, tried for a second each."""
    tried: list[tuple[float, str, dict[str, Any]]] = []
    for spare, instances in ((2, 2), (4, 2), (4, 3), (6, 2)):
        decoders = max(1, cores() - spare)
        config = cpu_pipe(engines, decoders=decoders, most=most, instances=instances)
        with running(config, encoded) as call:
            qps = run_threads(call, 40, 1.0).qps
        tried.append((qps, f"{decoders} decoders, {instances} x max {most}", config))
    _, name, config = max(tried, key=itemgetter(0))
    return name, config


# -- g5 -----------------------------------------------------------------------------------------------------------


def large_images(engines: Engines, seconds: float, rounds: int) -> Report:
    """1080×1080 JPEGs on three cores, GPU decode against CPU decode; in a process of its own."""
    if cores() > CORES_OF_G5:
        return _on_fewer_cores(engines, seconds, rounds)
    encoded = big_jpeg()
    report = Report(f"g5: 1080x1080 on {cores()} cores, in process")
    clients = (1, 5, 10)
    with (
        running(cpu_pipe(engines, decoders=cores(), most=8, instances=1), encoded) as cpu,
        running(gpu_pipe(engines, most=8, instances=1), encoded) as gpu,
    ):
        loads = interleave(
            {
                f"{name} decode, {count} clients": partial(run_threads, call, count, seconds)
                for count in clients
                for name, call in (("CPU", cpu), ("GPU", gpu))
            },
            rounds,
        )
    report.add(loads)
    for count in clients:
        gain = loads[f"GPU decode, {count} clients"].qps / loads[f"CPU decode, {count} clients"].qps - 1
        report.require(f"gain in QPS at {count} clients", gain, low=0.5)
    return report


def _on_fewer_cores(engines: Engines, seconds: float, rounds: int) -> Report:
    for most in (1, 8):
        engines.engine(most)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        options = ["--work", str(engines.folder), "--seconds", str(seconds), "--rounds", str(rounds)]
        options += ["--version-compatible"] if engines.version_compatible else []
        child = python(
            str(REPOSITORY / "scripts" / "bench_gpu.py"),
            *("g5", "--cores", str(CORES_OF_G5), "--json", str(path), *options),
            stdout=subprocess.DEVNULL,
        )
        child.wait()
        if not path.exists():
            raise RuntimeError(f"the benchmark on {CORES_OF_G5} cores exited with status {child.returncode}")
        (content,) = json.loads(path.read_text(encoding="utf-8"))["reports"]
    rows = [Row(**row) for row in content["rows"]]
    targets = [tuple(target) for target in content["targets"]]
    return Report(content["title"], rows, targets, content["remarks"])  # type: ignore[arg-type]


# -- g6 -----------------------------------------------------------------------------------------------------------


def engine_alone(engines: Engines, seconds: float, rounds: int) -> Report:
    """Tensors on the GPU in, batch 8: through a pipe against a bare loop of CUDA graphs."""
    import torch

    from torchpipe_py import pipe

    report = Report("g6: the engine alone, batch 8, float32 tensors on the GPU")
    tensor = torch.rand(1, 3, SIDE, SIDE, device="cuda") * 255
    torch.cuda.synchronize()
    node = engines.node(8, instance_num=4, batching_timeout=2)
    with pipe(node) as run:

        def eight() -> None:
            run([{"data": tensor} for _ in range(8)])

        def single() -> None:
            run({"data": tensor})

        run_threads(eight, 4, WARM_UP)
        subjects: dict[str, Callable[[], Load]] = {
            f"bare loop, {threads} contexts": partial(BareEngine(engines.engine(8), 8, threads, True).load, seconds)
            for threads in (1, 2, 4)
        }
        for clients in (4, 8):
            subjects[f"torchpipe_py, {clients} clients, 8 per call"] = partial(scaled, eight, clients, 8, seconds)
        subjects["torchpipe_py, 64 clients, 1 per call"] = partial(run_threads, single, 64, seconds)
        loads = interleave(subjects, rounds)
    report.add(loads)
    limit = max(load.qps for name, load in loads.items() if name.startswith("bare"))
    best = max(load.qps for name, load in loads.items() if not name.startswith("bare"))
    report.require("QPS against the bare loop", best / limit, low=0.95)
    return report
