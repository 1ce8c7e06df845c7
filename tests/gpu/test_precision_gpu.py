"""What engines compute in on a GPU, and engines that another version of TensorRT has built."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_model
from kit.gpu import NORMALISE, backend_of, forward, needs_engines, needs_tensorrt, photo, resnet, work_dir
from onnx import helper
from test_tensorrt import resnet_config, small_model

from torchpipe_py import parse_toml, pipe
from torchpipe_py.backends.base import Backend
from torchpipe_py.backends.model.engine.api import is_lean, load_tensorrt, profile_range
from torchpipe_py.backends.model.engine.precision import Layer, multiplying_layers
from torchpipe_py.cli import main

pytestmark = pytest.mark.timeout(400)


def quantised_model(path: Path, channels: int = 32) -> str:
    """A convolution of a quantised input with int8 weights."""
    arrays = {
        "weight": np.random.default_rng(0).integers(-127, 128, (channels, 3, 3, 3), dtype=np.int8),
        "scale": np.float32(0.05),
        "weight_scale": np.full(channels, 0.01, np.float32),
        "zero": np.int8(0),
        "weight_zero": np.zeros(channels, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["steps"]),
        helper.make_node("DequantizeLinear", ["steps", "scale", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["weight", "weight_scale", "weight_zero"], ["real"], axis=0),
        helper.make_node("Conv", ["rounded", "real"], ["y"], name="conv", kernel_shape=[3, 3], pads=[1] * 4),
    ]
    constants = {name: np.asarray(array) for name, array in arrays.items()}
    return save_model(path, nodes, {"x": ["n", 3, 16, 16]}, {"y": ["n", channels, 16, 16]}, constants)


def layers_of(backend: Backend) -> list[Layer]:
    used: Any = backend
    shapes = {name: profile_range(used._engine, name, 0)[1] for name in used._inputs}
    layers = multiplying_layers(load_tensorrt(), used._engine, shapes)
    print([(layer.name, layer.precision) for layer in layers])
    return layers


@needs_tensorrt
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_small_model_runs_in_the_requested_precision(tmp_path: Path, precision: str) -> None:
    model = small_model(tmp_path / "small.onnx", channels=8)
    with backend_of({"backend": "TensorrtTensor", "model": model, "max": 4, "precision": precision}) as backend:
        assert {layer.precision for layer in layers_of(backend)} == {precision}


@needs_tensorrt
def test_a_resnet_tells_its_layers_and_they_are_fp16(caplog: pytest.LogCaptureFixture) -> None:
    config = resnet_config("resnet18", resnet("resnet18")[1], backend="TensorrtTensor")
    with caplog.at_level(logging.WARNING), backend_of(config) as backend:
        layers = layers_of(backend)
    assert len(layers) >= 20
    others = [layer for layer in layers if layer.precision != "fp16"]
    if "building it from" in caplog.text:  # else it comes from the cache, and the log says nothing
        assert bool(others) == ("layers run otherwise" in caplog.text)
    assert len(others) <= 2


@needs_tensorrt
@pytest.mark.parametrize("precision", ["fp16", "fp32", "int8", "best"])
def test_a_quantised_model_runs_in_int8(tmp_path: Path, precision: str) -> None:
    model = quantised_model(tmp_path / "quantised.onnx")
    with backend_of({"backend": "TensorrtTensor", "model": model, "max": 4, "precision": precision}) as backend:
        assert {layer.precision for layer in layers_of(backend)} == {"int8"}
        assert forward(backend, [photo(16, 16, 0)])[0]["result"].shape == (1, 32, 16, 16)


@needs_engines
def test_an_engine_runs_on_the_version_that_built_it_and_on_newer_ones() -> None:
    """The first run builds it and keeps what it gives; later ones, of any version, are compared with that."""
    arch = "resnet18"
    model, kept = work_dir() / f"{arch}.onnx", work_dir() / f"{arch}_compatible.pt"
    trt = load_tensorrt()
    if not kept.exists():
        if is_lean(trt):
            pytest.skip("the lean runtime builds no engines, and there is none in TORCHPIPE_GPU_CACHE")
        resnet(arch)
    config = {
        "backend": "SyncTensor[TensorrtTensor]",
        "model": str(model),
        "max": 8,
        "model::cache": str(work_dir() / f"{arch}_compatible.trt"),
        "version_compatible": True,
        **NORMALISE,
    }
    mats = [photo(224, 224, 100 + seed) for seed in range(8)]
    if kept.exists():
        mats = list(torch.load(kept)["mats"].numpy())
    with backend_of(config) as backend:
        alone = forward(backend, mats[:1])[0]["result"]
        for count in range(1, 9):  # each size twice: captured, and replayed
            for _ in range(2):
                results = torch.cat([item["result"] for item in forward(backend, mats[:count])]).cpu()
        assert torch.equal(results[:1], alone.cpu())
    if kept.exists():
        wanted = torch.load(kept)["results"]
        worst = float(((results - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
        print(f"{arch}: TensorRT {trt.__version__}, relative difference at most {worst:.2e}")
        assert worst < 1e-2
    else:
        torch.save({"mats": torch.from_numpy(np.stack(mats)), "results": results}, kept)


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


@needs_tensorrt
@pytest.mark.parametrize("precision", ["fp16", "int8", "best", "fp32"])
def test_tensorrt_agrees_with_onnx_runtime(config: Path, quantised: str, precision: str) -> None:
    expected = answers(config, model=quantised, backend="OnnxTensor", providers="CPUExecutionProvider")
    given = answers(config, model=quantised, precision=precision)
    assert sum(a[0] == b[0] for a, b in zip(expected, given, strict=True)) >= 47
    gaps = [abs(a[1] - b[1]) for a, b in zip(expected, given, strict=True) if a[0] == b[0]]
    print(f"{precision}: scores differ by {max(gaps):.4f} at most, {sum(gaps) / len(gaps):.5f} in the mean")
    assert sum(gaps) / len(gaps) < 0.01


@needs_tensorrt
def test_int8_is_not_fp16(config: Path, quantised: str) -> None:
    """Else the engine left the pairs of Q and DQ unused."""
    half, given = answers(config), answers(config, model=quantised)
    assert sum(a[0] == b[0] for a, b in zip(half, given, strict=True)) >= 46
    assert half != given
