"""Compares what the installed libraries make of made pictures with what they should: ``torchpipe doctor --pixels``.

References are formulas, the picture itself where a file loses nothing, and Pillow where it does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.image.resampling import COEFFICIENT_BITS, area_coefficients, pillow_coefficients
from torchpipe_py.runtime.pipe import pipe

HEIGHT, WIDTH = 123, 166
SMALL = 40, 57
"""Height and width that pictures are resized to."""


class Finding(NamedTuple):
    """The largest and the mean difference, in levels of 255, of pixels and their reference.

    ``most``: how large both may be; ``None`` if the difference is only shown.
    """

    part: str
    what: str
    reference: str
    largest: float
    mean: float
    most: tuple[float, float] | None

    @property
    def verdict(self) -> str:
        """In one word: ``ok``, ``differs``, or ``shown``."""
        if self.most is None:
            return "shown"
        return "ok" if self.largest <= self.most[0] and self.mean <= self.most[1] else "differs"


def check_pixels() -> list[Finding]:
    """Compare decoders, turns, scales, colours and resizes with references; takes a second or two."""
    mat = made_picture()
    return [*_decoding(mat), *_turning(mat), *_reducing(), *_colours(), *_resizing(mat), *_on_gpu(mat)]


def made_picture(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Gradients, edges of saturated colours, and stripes, BGR."""
    ys, xs = np.mgrid[:height, :width]
    mat = np.stack([xs * 255 // width, ys * 255 // height, (xs + ys) * 255 // (height + width)], 2).astype(np.uint8)
    for number in range(8):
        top, left = 10 + number % 4 * height // 5, 12 + number // 4 * width // 2
        mat[top : top + 17, left : left + 31] = [255 * (number >> bit & 1) for bit in range(3)]
    mat[height - 20 :, : width // 2 : 2] = 255
    return mat


def _finding(
    part: str, what: str, reference: str, pixels: Any, expected: np.ndarray, most: tuple[float, float] | None = (0, 0)
) -> Finding:
    if getattr(pixels, "shape", None) != expected.shape:
        return Finding(part, what, reference, 255.0, 255.0, most)
    off = np.abs(np.asarray(pixels, np.float64) - expected)
    return Finding(part, what, reference, float(off.max()), float(off.mean()), most)


def _named(*distributions: str) -> str:
    return ", ".join(f"{name.removesuffix('-python-headless')} {_version(name)}" for name in distributions)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _run(backend: str, *data: Any, **keys: Any) -> list[Any]:
    """The result for each of ``data``, ``None`` for an error."""
    items = [{"data": each} for each in data]
    with pipe({"backend": backend, "instance_num": 1, **keys}) as run:
        for item in items:
            run(item)
    return [item.get("result") for item in items]


def _encoded(mat: np.ndarray, suffix: str, *options: int) -> bytes:
    import cv2

    return bytes(cv2.imencode(suffix, mat, options)[1])


def _by_pillow(data: bytes) -> np.ndarray:
    """BGR."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))[:, :, ::-1]


def _jpegs(mat: np.ndarray) -> Iterator[tuple[str, bytes]]:
    import cv2

    for name in (444, 422, 420):
        factor = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}")
        yield f"JPEG {':'.join(str(name))}", _encoded(mat, ".jpg", cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factor)
    yield "JPEG progressive", _encoded(mat, ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    yield "JPEG gray", _encoded(mat[:, :, 0], ".jpg")


def _decoding(mat: np.ndarray) -> Iterator[Finding]:
    png, bmp = _run("DecodeMat", _encoded(mat, ".png"), _encoded(mat, ".bmp"))
    yield _finding("decode", "PNG", "the picture", png, mat)
    yield _finding("decode", "BMP", "the picture", bmp, mat)
    by = _named("opencv-python-headless", *(["simplejpeg"] if _has("simplejpeg") else []))
    jpegs = dict(_jpegs(mat))
    for (name, data), pixels in zip(jpegs.items(), _run("DecodeMat", *jpegs.values()), strict=True):
        part = "chroma" if ":" in name else "decode"
        yield _finding(part, f"{name}: {by}", _named("pillow"), pixels, _by_pillow(data))
    if _has("torchvision"):
        import torch
        from torchvision.io import decode_jpeg

        data = jpegs["JPEG 4:2:0"]
        pixels = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy()[::-1].transpose(1, 2, 0)
        yield _finding(
            "chroma", f"JPEG 4:2:0: {_named('torchvision')}", _named("pillow"), pixels, _by_pillow(data), None
        )


def _turning(mat: np.ndarray) -> Iterator[Finding]:
    from PIL import Image

    across = mat.transpose(1, 0, 2)
    turned = [mat, np.fliplr(mat), np.rot90(mat, 2), np.flipud(mat)]
    turned += [across, np.fliplr(across), np.rot90(across, 2), np.flipud(across)]
    files = []
    for orientation in range(1, 9):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.fromarray(mat[:, :, ::-1]).save(file, "png", exif=exif)
        files.append(file.getvalue())
    for number, (pixels, expected) in enumerate(zip(_run("DecodeMat", *files), turned, strict=True), 1):
        yield _finding("EXIF", f"orientation {number}", "the picture, turned", pixels, expected)


def _reducing() -> Iterator[Finding]:
    import cv2

    from torchpipe_py.backends.image.decode import MatDecoder

    mat = cv2.GaussianBlur(made_picture(321, 482), (0, 0), 2)
    data = _encoded(mat, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 95)
    decode = MatDecoder("bgr").decode
    whole = decode(data).mat[:320, :480]
    for reduction in (2, 4, 8):
        size = 320 // reduction, 480 // reduction
        reduced = decode(data, partial(_same, size))
        expected = cv2.resize(whole, size[::-1], interpolation=cv2.INTER_AREA)
        pixels = reduced.mat[: size[0], : size[1]] if reduced.reduction == reduction else None
        yield _finding("scale", f"JPEG at 1/{reduction}", "means of the whole picture", pixels, expected, (32, 1.5))


def _same(size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
    return size


def _colours() -> Iterator[Finding]:
    mat = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 100, 200]]], np.uint8)
    blue, green, red = (mat[:, :, channel].astype(int) for channel in range(3))
    gray = ((9798 * red + 19235 * green + 3735 * blue + 2**14) >> 15)[:, :, None]
    for color, expected in (("bgr", mat), ("rgb", mat[:, :, ::-1]), ("gray", gray)):
        [pixels] = _run("DecodeMat", _encoded(mat, ".png"), color=color)
        yield _finding("colour", f"DecodeMat, {color}", "the picture", pixels, expected)


def _resizing(mat: np.ndarray) -> Iterator[Finding]:
    keys: dict[str, Any] = {"resize_h": SMALL[0], "resize_w": SMALL[1]}
    by = _named("opencv-python-headless")
    linear = _resized(mat, _linear_coefficients)
    [pixels] = _run("ResizeMat", mat, **keys)
    yield _finding("resize", f"ResizeMat: {by}", "distances of centres", pixels, linear, (1, 0.6))
    area = _resized(mat, partial(area_coefficients, shrinks=True))
    [pixels] = _run("ResizeMat", mat, interpolation="area", **keys)
    yield _finding("resize", f"ResizeMat, area: {by}", "means", pixels, area, (1, 0.6))
    [pixels] = _run("PillowResizeMat", mat, **keys)
    reference = "Pillow's formula, in whole numbers"
    yield _finding("resize", f"PillowResizeMat: {_named('pillow')}", reference, pixels, _by_whole_numbers(mat))
    [tensor] = _run("S[Mat2Tensor,ResizeTensor]", mat, device="cpu", **keys)
    pixels = tensor[0].permute(1, 2, 0).numpy()
    yield _finding("resize", f"ResizeTensor: {_named('torch')}", "distances of centres", pixels, linear, (0.1, 0.1))
    height, width = round(HEIGHT / 2), WIDTH // 2
    [box] = _run("LetterBoxMat", mat, max_h=height + 41, max_w=width, pad_value=7)
    [inside] = _run("ResizeMat", mat, resize_h=height, resize_w=width)
    expected = np.full((height + 41, width, 3), 7, np.uint8)
    expected[20 : 20 + height] = inside
    yield _finding("resize", "LetterBoxMat", "ResizeMat, in the middle", box, expected)


def _linear_coefficients(size: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """Of two pixels for each of the result, by the distance of the centres."""
    at = np.clip((np.arange(wanted) + 0.5) * size / wanted - 0.5, 0, size - 1)
    first = np.minimum(at.astype(int), size - 2)
    return np.stack([first, first + 1], 1), np.stack([1 - (at - first), at - first], 1)


def _resized(mat: np.ndarray, coefficients: Any) -> np.ndarray:
    pixels: np.ndarray = mat.astype(np.float64)
    for axis, wanted in enumerate(SMALL):
        pixels = np.moveaxis(_weighted(np.moveaxis(pixels, axis, 0), *coefficients(mat.shape[axis], wanted)), 0, axis)
    return pixels


def _by_whole_numbers(mat: np.ndarray) -> np.ndarray:
    """By Pillow's coefficients, rounded after each of the two directions."""
    pixels = mat.astype(np.float64)
    for axis in (1, 0):
        weighted = _weighted(np.moveaxis(pixels, axis, 0), *pillow_coefficients(mat.shape[axis], SMALL[axis]))
        rounded = np.floor((weighted + 2 ** (COEFFICIENT_BITS - 1)) / 2**COEFFICIENT_BITS)
        pixels = np.moveaxis(np.clip(rounded, 0, 255), 0, axis)
    return pixels


def _weighted(rows: np.ndarray, columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    shaped = weights.reshape(*weights.shape, *[1] * (rows.ndim - 1))
    summed: np.ndarray = (rows[columns] * shaped).sum(1)
    return summed


def _on_gpu(mat: np.ndarray) -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        return
    for decoder, module, most in _GPU_DECODERS:
        if not _has(module):
            continue
        jpegs = {name: data for name, data in _jpegs(mat) if name != "JPEG progressive"}  # which its check refuses
        tensors = _run("SyncTensor[DecodeTensor]", *jpegs.values(), decoder=decoder, color="bgr")
        for (name, data), tensor in zip(jpegs.items(), tensors, strict=True):
            pixels = None if tensor is None else tensor[0].permute(1, 2, 0).cpu().numpy()
            yield _finding("GPU", f"{name}: {decoder}", _named("pillow"), pixels, _by_pillow(data), most)


_GPU_DECODERS: Sequence[tuple[str, str, tuple[float, float] | None]] = (
    ("nvimgcodec", "nvidia.nvimgcodec", (1, 0.01)),
    ("torchvision", "torchvision", None),
)
