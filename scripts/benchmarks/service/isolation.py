"""What decoders cost in processes of their own, in a pipe and over Thrift."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Load, Report, interleave, run_threads, test_jpeg
from benchmarks.service.servers import run_clients, serving
from torchpipe_py import pipe

CLIENTS, INSTANCES = 10, 2
_WAYS = {
    "in the worker": ("S[DecodeMat,ResizeMat,cvtColorMat]", "none"),
    "isolated, with what follows": ("S[DecodeMat,ResizeMat,cvtColorMat]", "process"),
    "isolated, the decoder alone": ("S[Isolated[DecodeMat],ResizeMat,cvtColorMat]", "none"),
    "Process[...]": ("Process[S[DecodeMat,ResizeMat,cvtColorMat]]", "none"),
}


def isolation(seconds: float, rounds: int) -> list[Report]:
    """A report for each size of image, and one for the demo over Thrift."""
    small = test_jpeg()
    return [_in_process(small, seconds, rounds), _in_process(_large(small), seconds, rounds), _served(seconds, rounds)]


def _in_process(jpeg: bytes, seconds: float, rounds: int) -> Report:
    report = Report(
        f"isolation: {len(jpeg) / 1000:.0f} KB JPEG to 224x224 RGB, {INSTANCES} instances, {CLIENTS} clients"
    )
    params: dict[str, Any] = {"resize_h": 224, "resize_w": 224, "color": "rgb", "instance_num": INSTANCES}
    with ExitStack() as stack:
        subjects: dict[str, Callable[[], Load]] = {}
        for name, (backend, where) in _WAYS.items():
            run = stack.enter_context(pipe({"backend": backend, "decode_isolation": where, **params}))
            subjects[name] = partial(run_threads, partial(_call, run, jpeg), CLIENTS, seconds)
        loads = interleave(subjects, rounds)
    report.add(loads)
    return report


def _call(run: pipe, jpeg: bytes) -> None:
    run({"data": jpeg})


def _served(seconds: float, rounds: int) -> Report:
    report = Report(f"isolation: the demo over Thrift, {CLIENTS} clients")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "image.jpg").write_bytes(test_jpeg())
        subjects: dict[str, Callable[[], Load]] = {}
        for where in ("none", "process"):
            port = stack.enter_context(serving("configs/demo.toml", ["--decode-isolation", where]))
            name = f"--decode-isolation {where}"
            subjects[name] = partial(run_clients, port, folder, CLIENTS, seconds)
        report.add(interleave(subjects, rounds))
    return report


def _large(jpeg: bytes) -> bytes:
    """The same picture of 1920×1080 pixels."""
    import cv2
    import numpy as np

    image = cv2.resize(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), (1920, 1080))
    return bytes(cv2.imencode(".jpg", image)[1].tobytes())
