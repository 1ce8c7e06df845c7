"""What int8 saves on this CPU: the file that ``torchpipe quantize`` writes, against the model that it was made of."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import process_time

import cv2
import numpy as np
from examples.textures import draw, encode

from benchmarks.common import Call, Load, Report, interleave, load_of
from torchpipe_py.cli import main as torchpipe
from torchpipe_py.tools.export.models import torchvision_models
from torchpipe_py.tools.export.onnx_file import open_session, save_onnx

SIDE, BATCH, IMAGES = 224, 8, 32
CONFIG = """
[decode]
backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"
resize_h = 224
resize_w = 224
color = "rgb"
next = "model"
[model]
backend = "OnnxTensor"
model = "{model}"
max = 8
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.12, 57.375"
"""


def int8(seconds: float, rounds: int) -> Report:
    """ResNet-18 with one thread, in batches of 8: fp32, int8, and int8 as ONNX Runtime makes it for CPUs alone.

    Weights are random, which the time does not depend on.
    """
    import torch

    cv2.setNumThreads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        save_onnx(torchvision_models().get_model("resnet18", weights=None, num_classes=8), folder / "fp32.onnx", SIDE)
        made = folder / "int8.onnx"
        write_int8(folder / "fp32.onnx", made)
        _for_cpus(folder / "fp32.onnx", folder / "uint8.onnx")
        return _measure(folder, made, seconds, rounds)


def write_int8(model: Path, made: Path) -> None:
    """What ``torchpipe quantize`` makes of a classifier of 224×224 pixels whose weights are random."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(IMAGES):
            (folder / f"{number:02d}.jpg").write_bytes(encode(draw(0, "val", number % 8, number)))
        config = folder / "pipe.toml"
        config.write_text(CONFIG.format(model=model.absolute()), encoding="utf-8")
        # 100: classes of random weights mean nothing.
        if torchpipe(["quantize", str(config), "--img_dir", name, "--out", str(made), "--max-drop", "100"]):
            raise RuntimeError("torchpipe quantize failed")


def _measure(folder: Path, made: Path, seconds: float, rounds: int) -> Report:
    import torch

    from torchpipe_py import pipe

    images = np.random.default_rng(0).standard_normal((BATCH, 3, SIDE, SIDE)).astype(np.float32)
    tensors = torch.from_numpy(images).split(1)

    def by_session(model: Path) -> Call:
        session = open_session(model, 1)
        return lambda: session.run(None, {"input": images})

    with ExitStack() as stack:

        def by_pipe(model: Path) -> Call:
            config = {"backend": "OnnxTensor", "model": str(model), "max": BATCH, "threads": 1, "batching_timeout": 50}
            run = stack.enter_context(pipe(config))
            return lambda: run([{"data": tensor} for tensor in tensors])

        calls = {
            "limit: ONNX Runtime's own uint8, not for TensorRT": by_session(folder / "uint8.onnx"),
            "the int8 file as it is, in a bare session": by_session(made),
            "baseline: fp32, OnnxTensor": by_pipe(folder / "fp32.onnx"),
            "ours: the int8 file, OnnxTensor": by_pipe(made),
        }
        loads = interleave({name: partial(_load, call, seconds) for name, call in calls.items()}, rounds)
    _, _, baseline, ours = loads.values()
    report = Report(f"int8: ResNet-18, {SIDE}x{SIDE}, batches of {BATCH}, images per second of processor time")
    report.add(loads)
    report.require("int8 against fp32", ours.qps / baseline.qps, low=1.3)
    return report


def _load(call: Call, seconds: float) -> Load:
    """Images per second of this process's time, which other processes do not change; latencies of batches, in it."""
    call()
    latencies: list[float] = []
    while sum(latencies) < seconds:
        start = process_time()
        call()
        latencies.append(process_time() - start)
    load = load_of(latencies, sum(latencies))
    return Load(BATCH * load.qps, load.p50, load.p99)


def _for_cpus(model: Path, out: Path) -> None:
    """What ONNX Runtime's quantiser makes for CPUs: zero points wherever they fit best, no Relu left."""
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Noise:
        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            shape = (1, 3, SIDE, SIDE)
            self._rows = iter([{"input": rng.standard_normal(shape).astype(np.float32)} for _ in range(2)])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._rows, None)

    quant_pre_process(str(model), str(out), skip_symbolic_shape=True)
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(str(out), str(out), Noise(), per_channel=True, **kinds)
