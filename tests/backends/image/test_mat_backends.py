"""Backends for images, against OpenCV and Pillow themselves."""

from __future__ import annotations

import io
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from PIL import Image

from torchpipe_py import BackendUnavailable, DecodeError, InvalidRequest, pipe
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.plan.build import plan_pipeline

Data = dict[str, Any]


def run(backend: str, data: Any, **config: Any) -> Data:
    """The dict after one request."""
    item = {"data": data} if not isinstance(data, dict) else data
    with pipe({"backend": backend, **config}) as p:
        p(item)
    return item


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


RGB = Image.fromarray(picture(20, 30))


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter
    return saved(RGB, "JPEG", exif=exif)


IMAGES = {
    "jpeg": saved(RGB, "JPEG"),
    "progressive": saved(RGB, "JPEG", progressive=True),
    "png": saved(RGB, "PNG"),
    "bmp": saved(RGB, "BMP"),
    "webp": saved(RGB, "WEBP", lossless=True),
    "gray jpeg": saved(RGB.convert("L"), "JPEG"),
    "gray png": saved(RGB.convert("L"), "PNG"),
    "cmyk jpeg": saved(RGB.convert("CMYK"), "JPEG"),
    "alpha png": saved(RGB.convert("RGBA"), "PNG"),
    "palette png": saved(RGB.convert("P"), "PNG"),
    "16 bit png": encode(picture(20, 30).astype(np.uint16) * 257, ".png"),
    "16 bit gray png": encode(picture(20, 30)[:, :, 0].astype(np.uint16) * 257, ".png"),
    "one pixel": encode(picture(20, 30)[:1, :1], ".png"),
    "one column": encode(picture(10000, 30)[:, :1].copy()),
    "turned": turned(),
}


@pytest.mark.parametrize("name", IMAGES)
def test_decode(name: str) -> None:
    wanted = cv2.imdecode(np.frombuffer(IMAGES[name], np.uint8), cv2.IMREAD_COLOR)
    for color, mat in (("bgr", wanted), ("rgb", wanted[:, :, ::-1])):
        item = run("DecodeMat", IMAGES[name], color=color)
        assert np.array_equal(item["result"], mat)
        assert item["result"].dtype == np.uint8
        assert item["color"] == color
        assert item["data"] is IMAGES[name]


@pytest.mark.parametrize(
    ("name", "shape"), [("one pixel", (1, 1, 3)), ("one column", (10000, 1, 3)), ("turned", (30, 20, 3))]
)
def test_decoded_shape(name: str, shape: tuple[int, ...]) -> None:
    assert run("DecodeMat", IMAGES[name])["result"].shape == shape


def test_sixteen_bits_become_eight_and_alpha_is_dropped() -> None:
    for name in ("16 bit png", "alpha png"):
        difference = run("DecodeMat", IMAGES[name])["result"].astype(int)
        difference -= picture(20, 30) if name == "16 bit png" else picture(20, 30)[:, :, ::-1]
        assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_bytes_of_any_kind(wrap: Any) -> None:
    assert run("DecodeMat", wrap(IMAGES["png"]))["result"].shape == (20, 30, 3)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def huge_png() -> bytes:
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize(
    "data",
    [b"", b"no image", b"\xff\xd8\xff\xe0", IMAGES["jpeg"][:40], b"\0" * 1000, huge_png(), np.zeros(0, np.uint8)],
    ids=["empty", "text", "start only", "header only", "zeros", "huge", "empty array"],
)
def test_bytes_that_are_no_image(data: Any) -> None:
    item = run("DecodeMat", data)
    assert item.keys() == {"data", "error"}
    assert isinstance(item["error"], DecodeError)
    assert str(item["error"]).startswith(f"{len(data)} bytes")


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "progressive"])
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_half_an_image_has_one_outcome(kind: str, part: float) -> None:
    """Some versions of OpenCV show the part that came, others refuse; never both, never a raise."""
    item = run("DecodeMat", IMAGES[kind][: int(len(IMAGES[kind]) * part)])
    assert ("result" in item) != ("error" in item)
    assert item["result"].shape == (20, 30, 3) if "result" in item else isinstance(item["error"], DecodeError)


@pytest.mark.parametrize(
    "data", ["a.jpg", Path("a.jpg"), 3, None, np.zeros((4, 4), np.uint8), np.zeros(4, np.float32), [1, 2]]
)
def test_things_that_are_no_bytes(data: Any) -> None:
    item = run("DecodeMat", data)
    assert "result" not in item
    assert isinstance(item["error"], InvalidRequest)
    assert "expected encoded bytes, got" in str(item["error"])
    assert ("Path(...).read_bytes()" in str(item["error"])) is isinstance(data, (str, Path))


# -- colors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cvtColorMat", "CvtColorMat"])
def test_color_is_converted_only_if_it_differs(backend: str) -> None:
    mat = picture(4, 6)
    same = run(backend, {"data": mat, "color": "rgb"}, color="rgb")
    assert same["result"] is mat
    for given in ({"data": mat}, {"data": mat, "color": "bgr"}):
        other = run(backend, given, color="rgb")
        assert np.array_equal(other["result"], mat[:, :, ::-1])
        assert other["color"] == "rgb"
    assert np.array_equal(run(backend, {"data": mat, "color": "rgb"}, color="bgr")["result"], mat[:, :, ::-1])


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "area", "lanczos"])
@pytest.mark.parametrize("size", [(224, 224), (100, 37), (750, 1000)])
def test_decoding_in_the_wanted_color_changes_no_bit(jpeg: bytes, interpolation: str, size: tuple[int, int]) -> None:
    height, width = size
    sizes = {"resize_h": height, "resize_w": width, "interpolation": interpolation, "color": "rgb"}
    item = run("S[DecodeMat,ResizeMat,cvtColorMat]", jpeg, **sizes, **{"DecodeMat::color": "bgr"})
    decoded = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    flag = {"bilinear": "LINEAR", "bicubic": "CUBIC", "lanczos": "LANCZOS4"}.get(interpolation, interpolation.upper())
    resized = cv2.resize(decoded, (width, height), interpolation=getattr(cv2, f"INTER_{flag}"))
    assert np.array_equal(item["result"], cv2.cvtColor(resized, cv2.COLOR_BGR2RGB))
    assert item["color"] == "rgb"


@pytest.mark.parametrize(
    ("backend", "colors"),
    [
        ("S[DecodeMat,cvtColorMat,cvtColorMat]", "bgr|rgb"),
        ("S[DecodeMat,cvtColorMat,cvtColorMat,ResizeMat]", "rgb|bgr"),
        ("S[DecodeMat,(swap)cvtColorMat]", "rgb"),
        ("S[S[DecodeMat],cvtColorMat]", "rgb"),
        ("S[Identity,DecodeMat,SyncTensor[ResizeMat],PillowResizeMat,ResizePadMat,cvtColorMat]", "rgb"),
        ("S[FirstAvailable[DecodeMat],Identity,cvtColorMat]", "rgb"),
        ("S[DecodeMat,(skip)cvtColorMat]", "rgb"),
    ],
)
def test_the_preferred_color_gives_what_the_steps_say(backend: str, colors: str) -> None:
    """Twice the same size, so that nothing but the channels can change."""
    sizes = {"resize_h": 20, "resize_w": 30} if "ResizeMat" in backend else {}
    sizes |= {"max_h": 20, "max_w": 30} if "PadMat" in backend else {}
    item = run(backend, IMAGES["png"], **sizes, **{"cvtColorMat::color": colors})
    bgr = cv2.imdecode(np.frombuffer(IMAGES["png"], np.uint8), cv2.IMREAD_COLOR)
    last = "bgr" if "(skip)" in backend else colors.split("|")[-1]
    assert item["color"] == last
    assert np.array_equal(item["result"], bgr if last == "bgr" else bgr[:, :, ::-1])


@pytest.mark.parametrize("name", IMAGES)
def test_decode_gray(name: str) -> None:
    wanted = cv2.imdecode(np.frombuffer(IMAGES[name], np.uint8), cv2.IMREAD_GRAYSCALE)[:, :, None]
    for backend in ("DecodeMat", "S[DecodeMat,cvtColorMat]"):
        item = run(backend, IMAGES[name], color="gray")
        assert np.array_equal(item["result"], wanted)
        assert item["color"] == "gray"


def test_a_mat_becomes_gray_and_three_channels_again() -> None:
    mat = picture(4, 6)
    for color, flag in (("bgr", cv2.COLOR_BGR2GRAY), ("rgb", cv2.COLOR_RGB2GRAY)):
        item = run("cvtColorMat", {"data": mat, "color": color}, color="gray")
        assert np.array_equal(item["result"], cv2.cvtColor(mat, flag)[:, :, None])
        assert item["color"] == "gray"
        back = run("cvtColorMat", {"data": item["result"]}, color="rgb")
        assert np.array_equal(back["result"], np.repeat(item["result"], 3, axis=2))
        assert back["color"] == "rgb"
    gray = np.zeros((4, 6, 1), np.uint8)
    assert run("cvtColorMat", gray, color="gray")["result"] is gray


def test_gray_is_converted_where_the_steps_say_it(jpeg: bytes) -> None:
    """A decoder's gray is not a converter's: neither takes the other's place."""
    decoded = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    config = {"DecodeMat::color": "bgr", "cvtColorMat::color": "gray"}
    item = run("S[DecodeMat,cvtColorMat]", jpeg, **config)
    assert np.array_equal(item["result"][:, :, 0], cv2.cvtColor(decoded, cv2.COLOR_BGR2GRAY))
    item = run("S[DecodeMat,cvtColorMat]", jpeg, **{"DecodeMat::color": "gray", "cvtColorMat::color": "rgb"})
    gray = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_GRAYSCALE)
    assert np.array_equal(item["result"], np.dstack([gray] * 3))


@pytest.mark.parametrize("wanted", ["bgr", "rgb", "gray"])
def test_the_color_is_named_where_nothing_is_converted_too(wanted: str) -> None:
    mat = picture(4, 6)[:, :, : 1 if wanted == "gray" else 3]
    given = {} if wanted != "rgb" else {"color": "rgb"}
    item = run("cvtColorMat", {"data": mat, **given}, color=wanted)
    assert np.shares_memory(item["result"], mat)
    assert item["color"] == wanted


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("wanted", ["bgr", "rgb", "gray"])
@pytest.mark.parametrize("given", [{}, {"color": "bgr"}, {"color": "rgb"}])
def test_of_four_channels_the_last_is_dropped(given: Data, wanted: str, dtype: type) -> None:
    mat = np.dstack([picture(4, 6), picture(4, 6, 1)[:, :, 0]]).astype(dtype)
    item = run("cvtColorMat", {"data": mat, **given}, color=wanted)
    three = run("cvtColorMat", {"data": np.ascontiguousarray(mat[:, :, :3]), **given}, color=wanted)
    assert item["result"].shape == (4, 6, 1 if wanted == "gray" else 3)
    assert np.allclose(item["result"], three["result"], rtol=1e-6, atol=0)  # OpenCV adds floats in another order
    assert item["color"] == wanted


@pytest.mark.parametrize("color", ["bgr", "rgb", "gray"])
@pytest.mark.parametrize("channels", [2, 5])
def test_a_mat_that_has_no_color(channels: int, color: str) -> None:
    item = run("cvtColorMat", {"data": np.zeros((4, 6, channels), np.uint8)}, color=color)
    message = f"color {color} needs a Mat of 1, 3 or 4 channels, got {channels}"
    assert (str(item["error"]), isinstance(item["error"], InvalidRequest)) == (message, True)


# -- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (1, 1), (375, 500), (400, 10)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_resize(size: tuple[int, int], channels: int) -> None:
    mat = np.dstack([picture(375, 500, seed)[:, :, :1] for seed in range(channels)])
    item = run("ResizeMat", mat, resize_h=size[0], resize_w=size[1])
    wanted = cv2.resize(mat, size[::-1], interpolation=cv2.INTER_LINEAR).reshape(*size, channels)
    assert np.array_equal(item["result"], wanted)
    assert item["result"].shape == (*size, channels)


def test_a_gray_mat_without_channels() -> None:
    mat = picture(20, 30)[:, :, 0]
    for backend in ("ResizeMat", "PillowResizeMat"):
        assert run(backend, mat, resize_h=5, resize_w=6)["result"].shape == (5, 6, 1)
    assert run("ResizePadMat", mat, max_h=5, max_w=6)["result"].shape == (5, 6, 1)


@pytest.mark.parametrize("size", [(8, 8), (1, 1), (375, 500), (400, 10), (750, 1000)])
@pytest.mark.parametrize("gray", [False, True])
def test_pillow_resize_is_pillows(size: tuple[int, int], gray: bool) -> None:
    mat = picture(375, 500)[:, :, :1] if gray else picture(375, 500)
    item = run("PillowResizeMat", mat, resize_h=size[0], resize_w=size[1])
    image = Image.fromarray(mat[:, :, 0] if gray else mat).resize(size[::-1], Image.Resampling.BILINEAR)
    assert np.array_equal(item["result"], np.asarray(image).reshape(*size, -1))
    assert item["result"].shape == (*size, 1 if gray else 3)
    assert item["result"].flags.writeable


@pytest.mark.parametrize(
    ("given", "limits", "inside"),
    [
        ((10, 20), (40, 40), (20, 40)),
        ((20, 10), (40, 40), (40, 20)),
        ((100, 50), (10, 10), (10, 5)),
        ((10, 10), (10, 30), (10, 10)),
        ((1000, 1), (10, 10), (10, 1)),
        ((7, 5), (7, 5), (7, 5)),
    ],
)
def test_resize_pad(given: tuple[int, int], limits: tuple[int, int], inside: tuple[int, int]) -> None:
    mat = np.maximum(picture(*given), 1)
    item = run("ResizePadMat", mat, max_h=limits[0], max_w=limits[1], pad_value=0)
    result, (height, width) = item["result"], inside
    assert result.shape == (*limits, 3)
    assert np.array_equal(result[:height, :width], cv2.resize(mat, (width, height), interpolation=cv2.INTER_LINEAR))
    assert not result[height:].any()
    assert not result[:, width:].any()
    assert item["inverse_trans"](0, 0) == (0, 0)
    assert item["inverse_trans"](width, height) == pytest.approx((given[1], given[0]))


def test_pad_value() -> None:
    result = run("ResizePadMat", np.zeros((4, 2, 3), np.uint8), max_h=4, max_w=4, pad_value=114)["result"]
    assert result[:, 2:].min() == 114
    assert result[:, :2].max() == 0


def letter_box(mat: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """By the formulas of Ultralytics' LetterBox."""
    height, width = mat.shape[:2]
    scale = min(size[0] / height, size[1] / width)
    new_w, new_h = round(width * scale), round(height * scale)
    dw, dh = (size[1] - new_w) / 2, (size[0] - new_h) / 2
    top, bottom, left, right = round(dh - 0.1), round(dh + 0.1), round(dw - 0.1), round(dw + 0.1)
    resized = cv2.resize(mat, (new_w, new_h), interpolation=cv2.INTER_LINEAR)
    return cv2.copyMakeBorder(resized, top, bottom, left, right, cv2.BORDER_CONSTANT, value=(114, 114, 114))


@pytest.mark.parametrize("given", [(48, 64), (64, 48), (31, 64), (10, 7), (100, 33), (64, 64)])
def test_letter_box(given: tuple[int, int]) -> None:
    mat = picture(*given)
    item = run("LetterBoxMat", mat, max_h=64, max_w=64)
    assert np.array_equal(item["result"], letter_box(mat, (64, 64)))
    scale = min(64 / given[0], 64 / given[1])
    for x, y in ((0.0, 0.0), (given[1] / 2, given[0] / 3), (given[1], given[0])):
        place = x * scale + (64 - given[1] * scale) // 2, y * scale + (64 - given[0] * scale) // 2
        assert item["inverse_trans"](*place) == pytest.approx((x, y), abs=1.5)
    left, top = (64 - round(given[1] * scale)) // 2, (64 - round(given[0] * scale)) // 2
    assert item["inverse_trans"](left, top) == (0, 0)
    assert set(run("LetterBoxMat", mat, max_h=4, max_w=99, pad_value=3)["result"][:, 0].ravel()) == {3}


@pytest.mark.parametrize(
    "backend", ["cvtColorMat", "ResizeMat", "PillowResizeMat", "ResizePadMat", "Mat2Tensor", "S[Identity,ResizeMat]"]
)
@pytest.mark.parametrize(
    "data",
    [b"bytes", np.zeros((4, 4, 3), np.float64), np.zeros(4, np.uint8), np.zeros((0, 4, 3), np.uint8), torch.zeros(3)],
)
def test_things_that_are_no_mat(backend: str, data: Any) -> None:
    keys = {"cvtColorMat": {"color": "rgb"}, "ResizePadMat": {"max_h": 2, "max_w": 2}, "Mat2Tensor": {}}
    item = run(backend, data, **keys.get(backend, {"resize_h": 2, "resize_w": 2}))
    assert "result" not in item
    assert isinstance(item["error"], InvalidRequest)
    assert "expected a Mat" in str(item["error"])


# -- tensors ------------------------------------------------------------------------------------------------------


def mats() -> Iterator[Any]:
    mat = picture(20, 30)
    yield pytest.param(mat, id="contiguous")
    yield pytest.param(mat[::-1], id="upside down")
    yield pytest.param(mat[:, ::-1], id="mirrored")
    yield pytest.param(mat[:, :, ::-1], id="other color")
    yield pytest.param(mat[::2, ::3], id="every other")
    yield pytest.param(mat.transpose(1, 0, 2), id="transposed")
    yield pytest.param(np.asfortranarray(mat), id="column major")
    yield pytest.param(mat[:, :, 0], id="gray")
    yield pytest.param(mat[:, :, 1:2], id="one channel")
    yield pytest.param(np.dstack([mat, mat]), id="six channels")
    yield pytest.param(mat[:1, :1], id="one pixel")
    yield pytest.param(mat[:, 3:4], id="one column")
    yield pytest.param(np.arange(3 * 4 * 600).astype(np.uint8).reshape(3, 4, 600), id="600 channels")


@pytest.mark.parametrize("mat", list(mats()))
def test_mat_to_tensor(mat: np.ndarray) -> None:
    before = mat.copy()
    tensor = run("Mat2Tensor", mat, device="cpu")["result"]
    wanted = before.reshape(*before.shape[:2], -1).transpose(2, 0, 1)[None]
    assert (tuple(tensor.shape), tensor.dtype) == (wanted.shape, torch.uint8)
    assert np.array_equal(tensor.numpy(), wanted)
    tensor.zero_()
    assert np.array_equal(mat, before), "not a copy"


def test_a_read_only_mat_becomes_a_tensor_without_a_warning() -> None:
    mat = picture(4, 6)
    mat.flags.writeable = False
    assert run("Mat2Tensor", mat)["result"].shape == (1, 3, 4, 6)


@pytest.mark.parametrize("name", ["SyncTensor", "StreamGuard", "TensorSync", "Torch"])
def test_sync_tensor(name: str) -> None:
    mat = picture(4, 6)
    alone = run(f"S[Mat2Tensor,{name}]", mat)["result"]
    around = run(f"{name}[Mat2Tensor]", mat)["result"]
    assert torch.equal(alone.cpu(), around.cpu())
    assert alone.shape == (1, 3, 4, 6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(BackendUnavailable, match=r"node 'node': Mat2Tensor: .*no CUDA device"):
        run("Mat2Tensor", picture(4, 6), device="cuda")


def test_the_whole_way_of_a_picture(jpeg: bytes) -> None:
    item = run(
        "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]", jpeg, resize_h=224, resize_w=224, color="rgb"
    )
    mat = cv2.resize(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), (224, 224))
    assert np.array_equal(item["result"].cpu().numpy()[0], mat[:, :, ::-1].transpose(2, 0, 1))


def test_what_was_read_to_tell_how_large_an_image_is_belongs_to_that_image() -> None:
    plan = plan_pipeline({"backend": "DecodeMat", "max_pixels": 2400}).plans["node"]
    decode = plan.backends[0].create(BackendConfig())
    small, other = {"data": IMAGES["png"]}, {"data": IMAGES["one pixel"]}
    decode.setup()
    assert not decode.is_large(small)  # 600 pixels, a quarter
    decode.forward([other])
    assert other["result"].shape == (1, 1, 3)
    assert not decode.is_large(small)
    decode.forward([small])
    assert (small["result"] == cv2.imdecode(np.frombuffer(small["data"], np.uint8), cv2.IMREAD_COLOR)).all()


def test_a_large_image_that_is_put_aside_is_kept_by_no_instance() -> None:
    decode = plan_pipeline({"backend": "DecodeMat", "max_pixels": 2399}).plans["node"].backends[0]
    instance = decode.create(BackendConfig())
    instance.setup()
    data = bytes(bytearray(IMAGES["png"]))
    references = sys.getrefcount(data)
    assert instance.is_large({"data": data})  # 600 pixels, more than a quarter
    assert sys.getrefcount(data) == references
