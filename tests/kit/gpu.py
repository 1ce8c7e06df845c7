"""What the tests on a GPU share: when they run, models to run, a backend without a pipe around it."""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from torchpipe_py.backends.base import Backend, BackendConfig
from torchpipe_py.backends.model.engine.api import MODULES
from torchpipe_py.plan.build import plan_pipeline

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
NORMALISE = {"mean": ", ".join(map(str, MEAN)), "std": ", ".join(map(str, STD))}


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")
needs_torchvision = pytest.mark.skipif(not _is_there("torchvision"), reason="torchvision is not installed")
needs_nvimgcodec = pytest.mark.skipif(not _is_there("nvidia.nvimgcodec"), reason="nvImageCodec is not installed")
decoders = pytest.mark.parametrize(
    "decoder",
    [pytest.param("torchvision", marks=needs_torchvision), pytest.param("nvimgcodec", marks=needs_nvimgcodec)],
)
needs_tensorrt = pytest.mark.skipif(
    not torch.cuda.is_available() or not _is_there("tensorrt"),
    reason="TensorRT is not installed" if torch.cuda.is_available() else "no CUDA device",
)
needs_engines = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(map(_is_there, MODULES)),
    reason="neither TensorRT nor its lean runtime is installed" if torch.cuda.is_available() else "no CUDA device",
)


@contextmanager
def backend_of(config: dict[str, Any]) -> Iterator[Backend]:
    """The one backend of a flat configuration, set up on this thread; batches are what the test makes them."""
    backend = plan_pipeline(config).plans["node"].backends[0].create(BackendConfig())
    try:
        backend.setup()
        yield backend
    finally:
        backend.close()


def forward(backend: Backend, values: list[Any]) -> list[dict[str, Any]]:
    """One batch through ``backend``; the dicts as it left them."""
    items = [{"data": value} for value in values]
    backend.forward(items)
    return items


def photo(height: int, width: int, seed: int) -> np.ndarray:
    """A Mat with the smooth and the rough of a photograph, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (8, 8, 3), np.uint8)
    smooth = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    return np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


def jpeg(mat: np.ndarray, **options: Any) -> bytes:
    """An RGB Mat as JPEG bytes, by Pillow's options."""
    file = io.BytesIO()
    image = Image.fromarray(mat)
    mode = options.pop("mode", None)
    (image.convert(mode) if mode else image).save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


def work_dir() -> Path:
    """Where models and engines stay between runs if ``TORCHPIPE_GPU_CACHE`` says so; else for this process."""
    path = Path(os.environ.get("TORCHPIPE_GPU_CACHE") or Path(tempfile.gettempdir()) / f"torchpipe_gpu_{os.getpid()}")
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def resnet(arch: str) -> tuple[torch.nn.Module, str]:
    """A torchvision ResNet with random weights and settled batch statistics, and the ONNX file of it."""
    import torchvision

    from torchpipe_py.tools.export.onnx_file import save_onnx

    torch.manual_seed(0)
    model = torchvision.models.get_model(arch, weights=None).train()
    images = [torch.from_numpy(normalised(photo(224, 224, seed))) for seed in range(16)]
    with torch.no_grad():
        for _ in range(3):
            model(torch.cat(images))
    path = work_dir() / f"{arch}.onnx"
    model.eval()
    if not path.exists():
        save_onnx(model, path, 224)
    return model, str(path)


def normalised(mat: np.ndarray) -> np.ndarray:
    """An RGB Mat as the float32 input 1×3×H×W a torchvision model is trained on."""
    array = (mat.astype(np.float32) - np.float32(MEAN)) / np.float32(STD)
    return np.ascontiguousarray(array.transpose(2, 0, 1)[None])


def gpu_bytes() -> int:
    """Device memory that this process has, in bytes, after PyTorch has given back what it only keeps.

    The test is skipped where the driver does not list this process, as in some containers.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    command = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = [int(mebibytes) << 20 for pid, mebibytes in re.findall(r"(\d+), (\d+)", listed) if int(pid) == os.getpid()]
    if not used:
        pytest.skip("nvidia-smi does not list this process")
    return sum(used)
