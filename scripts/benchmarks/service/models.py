"""The service over Thrift against the same work in bare threads, and against mosec over HTTP."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Load, Report, Row, interleave, python, test_jpeg
from benchmarks.service.peer import CLIENTS, SAME_BATCH, mosec_subjects
from benchmarks.service.servers import run_clients, serving

SATURATING = 20  # the load tester's usual number of clients; fewer leave the cores idle now and then


@dataclass(frozen=True)
class Work:
    """A model, the side of its input in pixels, and the configuration that serves it."""

    name: str
    model: str
    size: int
    config: str
    bar: float


def service(seconds: float, rounds: int) -> list[Report]:
    """A report for the demo model, and one for ResNet-18 where torchvision can export it."""
    with tempfile.TemporaryDirectory() as folder:
        jpeg = Path(folder, "image.jpg")
        jpeg.write_bytes(test_jpeg())
        reports = [_measure(work, jpeg, seconds, rounds) for work in _works(Path(folder))]
        return reports


def _works(folder: Path) -> Iterator[Work]:
    demo = REPOSITORY / "configs" / "demo"
    yield Work("demo model", str(demo / "model.onnx"), 64, "configs/demo.toml", 0.75)
    resnet = folder / "resnet18.onnx"
    if importlib.util.find_spec("torchvision") is not None:
        command = [sys.executable, "-c", "import sys; from torchpipe_py.cli import main; sys.exit(main())"]
        subprocess.run(
            [*command, "export", "resnet18", "--weights", "random", "--out", str(resnet)],
            check=True,
            capture_output=True,
        )
        config = folder / "resized.toml"
        config.write_text(_RESNET_TOML.format(model=resnet), encoding="utf-8")
        yield Work("ResNet-18", str(resnet), 224, str(config), 0.95)
    else:
        print("ResNet-18 skipped: torchvision is not installed (extra 'bench')")


_RESNET_TOML = """
batching_timeout = 5

[decode]
backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"
resize_h = 224
resize_w = 224
color = "rgb"
next = "model"

[model]
backend = "OnnxTensor"
model = "{model}"
max = 4
instance_num = 2
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
postprocessor = "SoftmaxMax"
"""


def _measure(work: Work, jpeg: Path, seconds: float, rounds: int) -> Report:
    report = Report(f"service: {work.name}, {jpeg.stat().st_size / 1000:.0f} KB JPEG, client processes, same cores")
    combination = _bare(work, jpeg, 1.0, None)["combination"]
    subjects: dict[str, Callable[[], Load]] = {
        f"limit: bare threads ({combination})": lambda: Load(_bare(work, jpeg, seconds, combination)["qps"], 0, 0)
    }
    with ExitStack() as stack:
        port = stack.enter_context(serving(work.config))
        ours = {count: f"torchpipe-serve, {count} clients" for count in (SATURATING, CLIENTS, 1)}
        for count, name in ours.items():
            subjects[name] = partial(run_clients, port, jpeg.parent, count, seconds)
        settings = {"BENCH_MODEL": work.model, "BENCH_SIZE": str(work.size)}
        peers = mosec_subjects(stack, settings, jpeg.parent, seconds, report)
        loads = interleave({**subjects, **peers}, rounds)
    limit = next(iter(loads.values()))
    report.rows = [Row(name, load.qps, load.p50 or None, load.p99 or None) for name, load in loads.items()]
    report.require(
        f"{work.name}, {SATURATING} clients, QPS against bare threads",
        loads[ours[SATURATING]].qps / limit.qps,
        low=work.bar,
    )
    report.remarks.append("bare threads: threads, batch and threads inside a run that measured best")
    if peers and work.name == "demo model":
        best = max(loads[name].qps for name in peers if f" {CLIENTS} client" in name)
        report.require(f"against mosec's best, {CLIENTS} clients", loads[ours[CLIENTS]].qps / best, low=1.5)
        same = next(loads[name].qps for name in peers if f"batch {SAME_BATCH}, 1 client" in name)
        report.require("against mosec with the same batching, 1 client", loads[ours[1]].qps / same, low=3.0)
    return report


def _bare(work: Work, jpeg: Path, seconds: float, combination: str | None) -> dict[str, Any]:
    args = ["--model", work.model, "--size", str(work.size), "--jpeg", str(jpeg), "--seconds", str(seconds)]
    only = ["--only", combination] if combination else []
    with python("-m", "benchmarks.service.bare_threads", *args, *only, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate()
    best: dict[str, Any] = json.loads(out.splitlines()[-1])
    return best
