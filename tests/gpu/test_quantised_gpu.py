"""A file of ``torchpipe quantize`` by TensorRT, beside ONNX Runtime's int8 and TensorRT's fp16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from device import NORMALISE, needs_tensorrt

from torchpipe_py import parse_toml, pipe
from torchpipe_py.cli import main

pytestmark = [needs_tensorrt, pytest.mark.timeout(400)]

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
TOML = f"""
[decode]
backend = "S[DecodeMat,ResizeMat,cvtColorMat]"
resize_h = 64
resize_w = 64
color = "rgb"
next = "model"

[model]
backend = "SyncTensor[TensorrtTensor]"
model = "{DEMO / "model.onnx"}"
max = 8
mean = "{NORMALISE["mean"]}"
std = "{NORMALISE["std"]}"
postprocessor = "SoftmaxMax"
labels = "{DEMO / "labels.txt"}"
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "demo.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def quantised(config: Path) -> str:
    """The demo's model in int8; checked as it is made, by TensorRT: of 24 images one may be lost."""
    made = config.with_name("model.int8.onnx")
    arguments = ["--img_dir", str(DEMO / "images"), "--out", str(made), "--max-drop", "5"]
    assert main(["quantize", str(config), *arguments]) == 0
    return str(made)


def answers(config: Path, **more: Any) -> list[tuple[str, float]]:
    """Of the demo's images, in their order, with these keys of the model's node."""
    tables = parse_toml(config)
    tables["model"].update(more)
    items = [{"data": path.read_bytes()} for path in sorted((DEMO / "images").glob("*.jpg"))]
    with pipe(tables) as run:
        run(items)
    return [item["result"] for item in items]


@pytest.mark.parametrize("precision", ["fp16", "int8", "best", "fp32"])
def test_tensorrt_computes_what_onnx_runtime_does(config: Path, quantised: str, precision: str) -> None:
    expected = answers(config, model=quantised, backend="OnnxTensor", providers="CPUExecutionProvider")
    given = answers(config, model=quantised, precision=precision)
    assert sum(a[0] == b[0] for a, b in zip(expected, given, strict=True)) >= 47
    gaps = [abs(a[1] - b[1]) for a, b in zip(expected, given, strict=True) if a[0] == b[0]]
    print(f"{precision}: scores differ by {max(gaps):.4f} at most, {sum(gaps) / len(gaps):.5f} in the mean")
    assert sum(gaps) / len(gaps) < 0.01


def test_int8_is_not_fp16(config: Path, quantised: str) -> None:
    """Else the engine left the pairs of Q and DQ unused."""
    half, given = answers(config), answers(config, model=quantised)
    assert sum(a[0] == b[0] for a, b in zip(half, given, strict=True)) >= 46
    assert half != given
