"""The image decoders to compare, each with its requirements.

A function of a ``Setting`` makes each decoder; it raises ``NotMeasured`` if a library or a GPU is missing.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import cv2
import numpy as np

from torchpipe_py.backends.image.nvimgcodec import package


class NotMeasured(Exception):
    """A decoder whose library or device is missing; the message says what to install."""


class Setting(NamedTuple):
    """``threads`` decode at once; a decoder of several images gets ``batch`` in a call."""

    threads: int
    batch: int


class Decoder(NamedTuple):
    """``decode`` takes ``batch`` encoded images and returns when all are decoded, in the library's own format.

    ``callers`` threads call it at once; a library with threads of its own has one caller. It raises for an image that
    it cannot decode. ``pixels`` makes one result uint8 H×W×3, RGB, on the host.
    """

    decode: Callable[[Sequence[bytes]], Sequence[Any]]
    callers: int
    batch: int = 1
    pixels: Callable[[Any], np.ndarray] = np.asarray
    close: Callable[[], object] = lambda: None


def by_opencv(encoded: bytes, upright: bool = True) -> np.ndarray:
    """uint8 H×W×3 RGB, turned by its EXIF orientation if ``upright``; ``ValueError`` for invalid bytes."""
    flags = cv2.IMREAD_COLOR_RGB if upright else cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        mat = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    except cv2.error as error:
        raise ValueError(f"OpenCV: {str(error).strip()}") from None
    if mat is None:
        raise ValueError(f"{len(encoded)} bytes are not an image that OpenCV can read")
    return np.asarray(mat)


# -- on the CPU ---------------------------------------------------------------------------------------------------


def opencv(setting: Setting) -> Decoder:
    return Decoder(lambda batch: [by_opencv(encoded) for encoded in batch], setting.threads)


def pillow(setting: Setting) -> Decoder:
    image = library("PIL.Image", "pillow")

    def decode(batch: Sequence[bytes]) -> list[Any]:
        images = []
        for encoded in batch:
            with image.open(io.BytesIO(encoded)) as opened:
                images.append(opened.convert("RGB"))
        return images

    return Decoder(decode, setting.threads)


def simplejpeg(setting: Setting) -> Decoder:
    decode_jpeg = library("simplejpeg", "simplejpeg").decode_jpeg
    return Decoder(lambda batch: [decode_jpeg(encoded, colorspace="RGB") for encoded in batch], setting.threads)


def torchvision_cpu(setting: Setting) -> Decoder:
    io_module, torch = library("torchvision.io", "torchvision"), library("torch", "torch")
    rgb = io_module.ImageReadMode.RGB

    def decode(batch: Sequence[bytes]) -> list[Any]:
        return [io_module.decode_image(as_tensor(torch, encoded), mode=rgb) for encoded in batch]

    return Decoder(decode, setting.threads, pixels=from_planes)


def pipe_cpu(setting: Setting) -> Decoder:
    """An instance for each thread that calls."""
    return pipe({"backend": "DecodeMat", "color": "rgb", "instance_num": setting.threads}, setting.threads)


# -- nvImageCodec and DALI: on the CPU or a GPU -------------------------------------------------------------------


def nvimagecodec(kinds: Sequence[str], setting: Setting) -> Decoder:
    """``kinds`` are names of ``BackendKind``; a GPU is used unless they are ``CPU_ONLY``."""
    on_cpu = list(kinds) == ["CPU_ONLY"]
    torch = library("torch", "torch") if on_cpu else gpu()
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # no warnings of the formats that it cannot load here
    codec = library("nvidia.nvimgcodec", package(torch))
    params = codec.DecodeParams(color_spec=codec.ColorSpec.SRGB, apply_exif_orientation=True)
    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY if on_cpu else 0,
        max_num_cpu_threads=setting.threads,
        backends=[codec.Backend(getattr(codec.BackendKind, kind)) for kind in kinds],
        options=":fancy_upsampling=1",
    )

    def decode(batch: Sequence[bytes]) -> list[Any]:
        images = decoder.decode(list(batch), params=params)
        if not on_cpu:
            torch.cuda.synchronize()
        if any(image is None for image in images):
            raise ValueError(f"nvImageCodec ({', '.join(kinds)}) cannot decode it")
        return list(images)

    return Decoder(decode, 1, setting.batch, lambda image: np.asarray(image.cpu()))


def dali(device: str, engines: float, setting: Setting) -> Decoder:
    """``device`` is DALI's: "cpu" or "mixed"; ``engines``: the share of images for the JPEG engines of a GPU."""
    if device != "cpu":
        gpu()
    name = "nvidia-dali-cuda130"
    dali, fn, types = (library(f"nvidia.dali{part}", name) for part in ("", ".fn", ".types"))
    more = {} if device == "cpu" else {"hw_decoder_load": engines}
    pipeline = dali.Pipeline(
        batch_size=setting.batch,
        num_threads=setting.threads,
        device_id=None if device == "cpu" else 0,
        prefetch_queue_depth=1,
    )
    with pipeline:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        images = fn.decoders.image(encoded, device=device, output_type=types.RGB, **more)
        pipeline.set_outputs(images)
    pipeline.build()

    def decode(batch: Sequence[bytes]) -> Any:
        (images,) = pipeline.run(encoded=[np.frombuffer(encoded, np.uint8) for encoded in batch])
        return images

    return Decoder(decode, 1, setting.batch, lambda image: np.array(image.as_cpu()))


# -- on a GPU -----------------------------------------------------------------------------------------------------


def torchvision_gpu(setting: Setting) -> Decoder:
    torch = gpu()
    io_module = library("torchvision.io", "torchvision")
    rgb = io_module.ImageReadMode.RGB

    def decode(batch: Sequence[bytes]) -> list[Any]:
        tensors = [as_tensor(torch, encoded) for encoded in batch]
        images: list[Any] = io_module.decode_jpeg(tensors, mode=rgb, device="cuda")
        torch.cuda.synchronize()
        return images

    return Decoder(decode, setting.threads, setting.batch, from_planes)


def pipe_gpu(decoder: str, setting: Setting) -> Decoder:
    """An instance for each thread that calls with a whole batch; SyncTensor waits for the GPU."""
    torch = gpu()
    if decoder == "torchvision":
        library("torchvision.io", "torchvision")
    else:
        library("nvidia.nvimgcodec", package(torch))
    node = {"backend": "S[DecodeTensor,SyncTensor]", "decoder": decoder, "max": setting.batch}
    node["instance_num"] = min(setting.threads, GPU_INSTANCES)
    return pipe(node, setting.threads, setting.batch, lambda tensor: from_planes(tensor[0]))


GPU_INSTANCES = 4
"""Maximum instances of a pipe's decoder on a GPU: more would share the same engines."""

DECODERS: Mapping[str, Callable[[Setting], Decoder]] = {
    "OpenCV": opencv,
    "Pillow": pillow,
    "TurboJPEG (simplejpeg)": simplejpeg,
    "torchvision, CPU": torchvision_cpu,
    "nvImageCodec, CPU": partial(nvimagecodec, ["CPU_ONLY"]),
    "DALI, CPU": partial(dali, "cpu", 0.0),
    "pipe, DecodeMat": pipe_cpu,
    "torchvision, nvJPEG": torchvision_gpu,
    "nvImageCodec, JPEG engines": partial(nvimagecodec, ["HW_GPU_ONLY"]),
    "nvImageCodec, CUDA": partial(nvimagecodec, ["GPU_ONLY", "HYBRID_CPU_GPU"]),
    "DALI, mixed, JPEG engines": partial(dali, "mixed", 1.0),
    "DALI, mixed, CUDA": partial(dali, "mixed", 0.0),
    "pipe, DecodeTensor, torchvision": partial(pipe_gpu, "torchvision"),
    "pipe, DecodeTensor, nvImageCodec": partial(pipe_gpu, "nvimgcodec"),
}
"""Functions that make each decoder, by the name of its row."""


# -- helpers --------------------------------------------------------------------------------------------


def pipe(
    node: dict[str, Any], callers: int, batch: int = 1, pixels: Callable[[Any], np.ndarray] = np.asarray
) -> Decoder:
    from torchpipe_py import pipe

    run = pipe({"decode": node})

    def decode(batch: Sequence[bytes]) -> list[Any]:
        items: list[dict[str, Any]] = [{"data": encoded} for encoded in batch]
        run(items if len(items) > 1 else items[0])
        for item in items:
            if "result" not in item:
                raise item["error"]
        return [item["result"] for item in items]

    return Decoder(decode, callers, batch, pixels, run.close)


def library(name: str, package: str) -> Any:
    """Import a module; ``NotMeasured`` says what to install if it is missing."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # the latter two: installed, but not for this machine
        reason = str(error).strip().partition("\n")[0]
        raise NotMeasured(f"needs {package} (pip install '{package}'): {reason}") from None


def gpu() -> Any:
    """PyTorch, if it sees a GPU; else ``NotMeasured``."""
    torch = library("torch", "torch")
    if not torch.cuda.is_available():
        raise NotMeasured("needs a CUDA GPU that PyTorch can use")
    return torch


def as_tensor(torch: Any, encoded: bytes) -> Any:
    """A copy: PyTorch wants writable memory."""
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def from_planes(tensor: Any) -> np.ndarray:
    """A tensor C×H×W on any device as an array H×W×C."""
    return np.ascontiguousarray(tensor.permute(1, 2, 0).cpu().numpy())
