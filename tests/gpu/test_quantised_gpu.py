"""A file of ``torchpipe quantize`` by TensorRT, beside ONNX Runtime's int8 and TensorRT's fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device import MEAN, STD, needs_tensorrt

from torchpipe_py import pipe
from torchpipe_py.cli import main

pytestmark = [needs_tensorrt, pytest.mark.timeout(400)]

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
NODE = {
    "max": 8,
    "mean": ", ".join(map(str, MEAN)),
    "std": ", ".join(map(str, STD)),
    "postprocessor": "SoftmaxMax",
    "labels": str(DEMO / "labels.txt"),
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo's model in int8; checked as it is made, by TensorRT: of 24 images one may be lost."""
    folder = tmp_path_factory.mktemp("quantised")
    node = "\n".join(f'{key} = "{value}"' for key, value in NODE.items())
    config = folder / "demo.toml"
    config.write_text(
        f"""[decode]
backend = "S[DecodeMat,ResizeMat,cvtColorMat]"
resize_h = 64
resize_w = 64
color = "rgb"
next = "model"
[model]
backend = "SyncTensor[TensorrtTensor]"
model = "{DEMO / "model.onnx"}"
{node}
"""
    )
    made = folder / "model.int8.onnx"
    arguments = ["--img_dir", str(DEMO / "images"), "--out", str(made), "--max-drop", "5"]
    assert main(["quantize", str(config), *arguments]) == 0
    return str(made)


def answers(backend: str, model: str, **more: Any) -> list[tuple[str, float]]:
    decode = {"backend": "S[DecodeMat,ResizeMat,cvtColorMat]", "resize_h": 64, "resize_w": 64, "color": "rgb"}
    items = [{"data": path.read_bytes()} for path in sorted((DEMO / "images").glob("*.jpg"))]
    node = {"backend": backend, "model": model, **NODE, **more}
    with pipe({"decode": {**decode, "next": "model"}, "model": node}) as run:
        run(items)
    return [item["result"] for item in items]


@pytest.mark.parametrize("precision", ["fp16", "int8", "best", "fp32"])
def test_tensorrt_computes_what_onnx_runtime_does(quantised: str, precision: str) -> None:
    expected = answers("OnnxTensor", quantised, providers="CPUExecutionProvider")
    given = answers("SyncTensor[TensorrtTensor]", quantised, precision=precision)
    assert sum(a[0] == b[0] for a, b in zip(expected, given, strict=True)) >= 47
    gaps = [abs(a[1] - b[1]) for a, b in zip(expected, given, strict=True) if a[0] == b[0]]
    print(f"{precision}: scores differ by {max(gaps):.4f} at most, {sum(gaps) / len(gaps):.5f} in the mean")
    assert sum(gaps) / len(gaps) < 0.01


def test_int8_is_not_fp16(quantised: str) -> None:
    """Else the engine left the pairs of Q and DQ unused."""
    half = answers("SyncTensor[TensorrtTensor]", str(DEMO / "model.onnx"))
    given = answers("SyncTensor[TensorrtTensor]", quantised)
    assert sum(a[0] == b[0] for a, b in zip(half, given, strict=True)) >= 46
    assert half != given
