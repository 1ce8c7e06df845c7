"""Every way to train on a TOML or to run it gives the pixels of its served pipe, whatever it says of decoding."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import picture
from kit.heic import HEIC
from kit.training_data import FORKS, wrapped
from PIL import Image

from torchpipe_py import pipe
from torchpipe_py.ray.data import PipeMapper
from torchpipe_py.training import TensorToTensor, cv2Resize

pytestmark = FORKS

SIDES = 21, 34
MOST = 64 * 64
"""Pixels of the largest file here, HEIC before it is cropped."""
SUFFIXES = {"jpeg": ".jpg", "png": ".png", "webp": ".webp", "bmp": ".bmp", "tiff": ".tiff", "pnm": ".ppm"}
RESIZES: dict[str, dict[str, Any]] = {
    "": {},
    "ResizeMat,": {"resize_h": 11, "resize_w": 16},
    "PillowResizeMat,": {"resize_h": 11, "resize_w": 16},
    "ResizeShorterMat,CenterCropMat,": {"size": 12, "crop_h": 10, "crop_w": 10},
    "LetterBoxMat,": {"max_h": 20, "max_w": 20},
}
COLORS = {
    "rgb": {"color": "rgb"},
    "bgr": {"color": "bgr"},
    "gray": {"color": "gray"},
    "bgr to rgb": {"DecodeMat::color": "bgr", "cvtColorMat::color": "rgb"},
    "gray to rgb": {"DecodeMat::color": "gray", "cvtColorMat::color": "rgb"},
}


def encoded(format: str) -> bytes:
    mat = picture(*SIDES, seed=3)
    if format == "heic":
        return HEIC[1]
    if format in SUFFIXES:
        return bytes(cv2.imencode(SUFFIXES[format], mat)[1].tobytes())
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(mat[:, :, ::-1])).save(file, format)
    return file.getvalue()


FILES = {format: encoded(format) for format in (*SUFFIXES, "gif", "avif", "heic")}


class Resized:
    """A ``transforms_cpu`` with the resize of a TOML."""

    def __init__(self, resize: str) -> None:
        keys = RESIZES[resize]
        self._run = pipe({"backend": f"S[{resize}Mat2Tensor]", **keys, "device": "cpu"}) if resize else None

    def __call__(self, image: Image.Image) -> Any:
        mat = np.array(image)
        mat = mat[:, :, None] if mat.ndim == 2 else mat
        if self._run is None:
            return torch.from_numpy(mat.transpose(2, 0, 1).copy())
        self._run(data := {"data": mat, "color": "rgb"})  # so that no backend changes the order
        return data["result"]

    def close(self) -> None:
        if self._run is not None:
            self._run.close()


@pytest.fixture(scope="module")
def resized() -> Iterator[dict[str, Resized]]:
    transforms = {resize: Resized(resize) for resize in RESIZES}
    yield transforms
    for transform in transforms.values():
        transform.close()


def toml_of(format: str, color: str, resize: str, **keys: Any) -> dict[str, Any]:
    backend = f"S[DecodeMat,{resize}cvtColorMat,Mat2Tensor]"
    return {
        "backend": backend,
        **COLORS[color],
        **RESIZES[resize],
        "formats": format,
        "device": "cpu",
        "instance_num": 1,
        **keys,
    }


def differing(toml: dict[str, Any], data: bytes, transform: Any) -> list[str]:
    """The ways in which a TOML gives other pixels than its pipe."""
    dataset = [(data, 0)] * 2
    ways = {}
    with pipe(toml) as run:
        run(request := {"data": data})
        served = request["result"]
    with wrapped(dataset, toml, transforms_gpu=None, prefetch=0) as loader:
        ways["loader"] = next(loader).images[:1]
    share = {"transforms_cpu": transform, "cpu_percentage": 1.0}
    with wrapped(dataset, toml, transforms_gpu=None, prefetch=0, **share) as loader:
        ways["transforms_cpu"] = next(loader).images[:1]
        assert loader.stats()["cpu_batches"] == 1
    with closing(PipeMapper(toml)) as mapper:
        ways["Ray"] = torch.from_numpy(mapper({"bytes": np.array([data], object)})["result"][0])
    return [way for way, image in ways.items() if not torch.equal(image.reshape(served.shape), served)]


def found(cells: Sequence[tuple[str, str, str]], resized: dict[str, Resized]) -> list[str]:
    wrong = []
    for number, (format, color, resize) in enumerate(cells):
        limit = {"max_pixels": MOST} if number % 2 else {}
        toml = toml_of(format, color, resize, **limit)
        try:
            ways = differing(toml, FILES[format], resized[resize])
        except Exception as error:
            ways = [f"{type(error).__name__}: {error}"]
        wrong += [f"{format}, {color}, {resize or 'not resized'} {limit}: {way}" for way in ways]
    return wrong


def test_every_way_gives_the_pixels_of_the_served_pipe(resized: dict[str, Resized]) -> None:
    ways = (itertools.cycle(each) for each in (FILES, COLORS, [*RESIZES][1:]))
    assert found([*itertools.islice(zip(*ways, strict=True), 12)], resized) == []


@pytest.mark.slow
def test_every_way_gives_the_pixels_of_the_served_pipe_for_all_pairs(resized: dict[str, Resized]) -> None:
    resizes = itertools.cycle(RESIZES)
    cells = [(format, color, next(resizes)) for color in COLORS for format in FILES]
    assert found(cells + [("png", *pair) for pair in itertools.product(COLORS, RESIZES)], resized) == []


def test_every_way_refuses_what_the_served_pipe_refuses(resized: dict[str, Resized]) -> None:
    wrong = []
    for format, color, keys, file in (
        ("png", "rgb", {}, "jpeg"),
        ("tiff, webp", "gray", {}, "pnm"),
        ("bmp", "bgr", {"max_pixels": 100}, "bmp"),
        ("gif", "gray to rgb", {"max_pixels": 713}, "gif"),
        ("heic", "bgr to rgb", {"max_pixels": MOST - 1}, "heic"),
    ):
        toml, dataset = toml_of(format, color, "ResizeMat,", **keys), [(FILES[file], 0)]
        with pipe(toml) as run:
            run(request := {"data": FILES[file]})
        reasons = [str(request["error"])]
        for share in (0.0, 1.0):
            options = {"transforms_cpu": resized["ResizeMat,"], "cpu_percentage": share, "bad_samples": "skip"}
            with wrapped(dataset, toml, transforms_gpu=None, prefetch=0, **options) as loader:
                assert list(loader) == []
                reasons += [sample["reason"] for sample in loader.stats()["bad"]["samples"]]
        with closing(PipeMapper(toml)) as mapper:
            outputs = mapper({"bytes": np.array([FILES[file]], object)})
        reasons.append(str(outputs["error"][0]).removeprefix("corrupt: "))
        if len(reasons) != 4 or len(set(reasons)) != 1:
            wrong.append((format, color, file, reasons))
    assert wrong == []


class Shorter:
    """A ``transforms_cpu`` that can be pickled."""

    def __call__(self, image: Image.Image) -> Any:
        return TensorToTensor()(cv2Resize(11, 16)(image))


@pytest.mark.slow
def test_workers_that_decode_give_the_pixels_of_the_served_pipe() -> None:
    toml, dataset = toml_of("png", "gray", "ResizeMat,", max_pixels=MOST), [(FILES["png"], 0)] * 8
    options = {"transforms_cpu": Shorter(), "cpu_percentage": 0.5, "workers": 1, "workers_decode": True}
    with pipe(toml) as run, wrapped(dataset, toml, batch_size=1, **options) as loader:
        run(request := {"data": FILES["png"]})
        served = TensorToTensor()(request["result"])
        assert all(torch.equal(batch.images[0], served) for batch in loader)
        assert 0 < loader.stats()["cpu_batches"] < 8
