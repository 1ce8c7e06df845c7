"""JPEG decoders behind one face, for ``scripts/compare_decoders.py``: each takes a batch of encoded images."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cv2
import numpy as np

from torchpipe_py.backends.images.nvimgcodec import package

GPU_BATCHES = (1, 16, 64)


class NotMeasuredError(Exception):
    """A subject whose library or device is not there; the message says why."""


@dataclass(frozen=True)
class Decoder:
    """``decode`` takes as many encoded images as ``batch`` and returns when all are decoded, in its own format;
    it raises for what it cannot decode, and any number of threads may call it. ``pixels`` makes one of its images
    uint8 H×W×3 RGB, on the host.
    """

    decode: Callable[[Sequence[bytes]], Sequence[Any]]
    pixels: Callable[[Any], np.ndarray] = np.asarray
    batch: int = 1
    close: Callable[[], object] = lambda: None


def subjects(threads: int) -> dict[str, Callable[[], Decoder]]:
    """What makes each decoder, by name; it raises ``NotMeasuredError``. ``threads`` call them at most."""
    return {
        "Pillow": pillow,
        "OpenCV": opencv,
        "TurboJPEG (simplejpeg)": simplejpeg,
        "torchvision, CPU": torchvision_cpu,
        **{f"torchvision, GPU, batch {batch}": partial(torchvision_gpu, batch) for batch in GPU_BATCHES},
        "pipe, DecodeMat": partial(pipe_cpu, threads),
        **{f"pipe, DecodeTensor, batch {batch}": partial(pipe_gpu, batch) for batch in GPU_BATCHES},
        **{
            f"pipe, DecodeTensor, nvImageCodec, batch {batch}": partial(pipe_gpu, batch, "nvimgcodec")
            for batch in GPU_BATCHES
        },
    }


def by_opencv(encoded: bytes, upright: bool = True) -> np.ndarray:
    """uint8 H×W×3 RGB, turned by its EXIF orientation where ``upright``; ``ValueError`` for what is no image."""
    flags = cv2.IMREAD_COLOR_RGB if upright else cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        mat = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    except cv2.error as error:
        raise ValueError(f"OpenCV: {str(error).strip()}") from None
    if mat is None:
        raise ValueError(f"{len(encoded)} bytes are no image OpenCV can read")
    return np.asarray(mat)


# --- on the CPU ----------------------------------------------------------------------------------------------------


def pillow() -> Decoder:
    image = _library("PIL.Image", "pillow")

    def decode(batch: Sequence[bytes]) -> list[Any]:
        images = []
        for encoded in batch:
            with image.open(io.BytesIO(encoded)) as opened:
                images.append(opened.convert("RGB"))
        return images

    return Decoder(decode)


def opencv() -> Decoder:
    return Decoder(lambda batch: [by_opencv(encoded) for encoded in batch])


def simplejpeg() -> Decoder:
    decode_jpeg = _library("simplejpeg", "simplejpeg").decode_jpeg
    return Decoder(lambda batch: [decode_jpeg(encoded, colorspace="RGB") for encoded in batch])


def torchvision_cpu() -> Decoder:
    io_module, torch = _library("torchvision.io", "torchvision"), _library("torch", "torch")
    rgb = io_module.ImageReadMode.RGB

    def decode(batch: Sequence[bytes]) -> list[Any]:
        return [io_module.decode_jpeg(_as_tensor(torch, encoded), mode=rgb) for encoded in batch]

    return Decoder(decode, _from_tensor)


def pipe_cpu(threads: int) -> Decoder:
    """An instance for each thread that calls."""
    return _pipe({"decode": {"backend": "DecodeMat", "color": "rgb", "instance_num": threads}}, np.asarray, 1)


# --- on the GPU ----------------------------------------------------------------------------------------------------


def torchvision_gpu(batch: int) -> Decoder:
    torch = _gpu()
    io_module = _library("torchvision.io", "torchvision")
    rgb = io_module.ImageReadMode.RGB

    def decode(batch: Sequence[bytes]) -> list[Any]:
        tensors = [_as_tensor(torch, encoded) for encoded in batch]
        images: list[Any] = io_module.decode_jpeg(tensors, mode=rgb, device="cuda")
        torch.cuda.synchronize()
        return images

    return Decoder(decode, _from_tensor, batch)


def pipe_gpu(batch: int, decoder: str = "torchvision") -> Decoder:
    torch = _gpu()
    if decoder == "nvimgcodec":
        _library("nvidia.nvimgcodec", package(torch))
    else:
        _library("torchvision.io", "torchvision")
    # SyncTensor waits for the GPU before a request is done.
    config = {"decode": {"backend": "S[DecodeTensor,SyncTensor]", "decoder": decoder, "max": batch}}
    return _pipe(config, lambda tensor: _from_tensor(tensor[0]), batch)


# --- what they share -----------------------------------------------------------------------------------------------


def _pipe(config: dict[str, Any], pixels: Callable[[Any], np.ndarray], batch: int) -> Decoder:
    from torchpipe_py import pipe

    run = pipe(config)

    def decode(batch: Sequence[bytes]) -> list[Any]:
        items: list[dict[str, Any]] = [{"data": encoded} for encoded in batch]
        run(items if len(items) > 1 else items[0])
        for item in items:
            if "result" not in item:
                raise item["error"]
        return [item["result"] for item in items]

    return Decoder(decode, pixels, batch, run.close)


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # the latter two: installed, but not for this machine
        reason = str(error).strip().partition("\n")[0]
        raise NotMeasuredError(f"needs {package} (pip install {package}): {reason}") from None


def _gpu() -> Any:
    """PyTorch, where it sees a GPU."""
    torch = _library("torch", "torch")
    if not torch.cuda.is_available():
        raise NotMeasuredError("there is no CUDA GPU that PyTorch can use")
    return torch


def _as_tensor(torch: Any, encoded: bytes) -> Any:
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)  # a copy: PyTorch wants writable memory


def _from_tensor(tensor: Any) -> np.ndarray:
    """From C×H×W on any device."""
    return np.ascontiguousarray(tensor.permute(1, 2, 0).cpu().numpy())
