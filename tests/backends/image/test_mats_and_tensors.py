"""Mats and Tensors: colors, dimensions, the way from one to the other, the sizes of lines, and quadrilaterals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from kit.image_backends import FLAGS, NO_MATS, Data, noise, refusal, run, to_mat, to_tensor

from torchpipe_py import ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.image.tensor import as_image
from torchpipe_py.backends.signature import MAT
from torchpipe_py.registry import default

PNG = encode(picture(20, 30), ".png")


# -- colors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cvtColor", "CvtColor"])
@pytest.mark.parametrize(
    ("kind", "channels"), [("Mat", 1), ("Mat", 3), ("Mat", 4), ("Tensor", 1), ("Tensor", 3)], ids=str
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("given", [None, "bgr", "rgb"])
@pytest.mark.parametrize("wanted", ["bgr", "RGB", "gray"])
def test_converts_as_opencv_does(
    name: str, kind: str, channels: int, dtype: type, given: str | None, wanted: str
) -> None:
    """One channel is gray; without ``color`` a Mat is BGR, a Tensor RGB; of four channels the last is dropped."""
    mat = noise(4, 6, channels).astype(dtype)
    data: Any = mat if kind == "Mat" else to_tensor(mat)
    item = run(f"{name}{kind}", {"data": data} | ({"color": given} if given else {}), color=wanted)
    source = "gray" if channels == 1 else given or ("bgr" if kind == "Mat" else "rgb")
    wanted = wanted.lower()
    three = np.ascontiguousarray(mat[:, :, :3])
    code = getattr(cv2, f"COLOR_{source.upper()}2{wanted.upper()}", None)
    expected = three if source == wanted else cv2.cvtColor(three, code)
    result = item["result"] if kind == "Mat" else to_mat(item["result"])
    assert np.allclose(result, np.atleast_3d(expected), rtol=1e-6, atol=0)
    assert result.dtype == dtype
    assert item["color"] == wanted
    assert (item["result"] is data) is (source == wanted and channels != 4), "converted only if it differs"


@pytest.mark.parametrize(
    ("kind", "taken", "channels"), [("Mat", "1, 3 or 4", 2), ("Mat", "1, 3 or 4", 5), ("Tensor", "1 or 3", 4)]
)
def test_rejects_channels_without_a_color(kind: str, taken: str, channels: int) -> None:
    mat = noise(4, 6, channels)
    message = refusal(f"cvtColor{kind}", mat if kind == "Mat" else to_tensor(mat), color="rgb")
    assert message == f"color rgb needs a {kind} of {taken} channels, got {channels}"


@pytest.mark.parametrize("backend", ["cvtColorMat", "cvtColorTensor", "SaveMat"])
@pytest.mark.parametrize(
    ("color", "shown"),
    [
        *(("gray", "'gray'"), ("RGB", "'RGB'"), (None, "None"), (np.array(["rgb", "bgr"]), "a ndarray")),
        *((b"\xff" * 10**7, "a bytes"), (10**5000, "a int"), ("r" * 10**7, "'rrrr")),
    ],
    ids=["gray", "RGB", "None", "array", "bytes", "number", "text"],
)
def test_rejects_invalid_channel_orders(backend: str, color: Any, shown: str, tmp_path: Path) -> None:
    config = {"save_dir": str(tmp_path)} if backend == "SaveMat" else {"color": "rgb"}
    data: Any = torch.zeros(1, 3, 4, 6) if backend == "cvtColorTensor" else noise(4, 6)
    message = refusal(backend, {"data": data, "color": color}, **config)
    assert message.startswith(f"color {shown}")
    assert message.endswith("of an image of 3 channels; expected bgr or rgb")
    assert len(message) < 200


@pytest.mark.parametrize(("channels", "is_named"), [(1, False), (2, False), (3, True), (4, True), (6, False)])
def test_an_image_that_becomes_another_kind_has_its_color_named(channels: int, is_named: bool) -> None:
    mat = noise(4, 6, channels)
    for backend, data, color in (("Mat2Tensor", mat, "bgr"), ("Tensor2Mat", to_tensor(mat), "rgb")):
        config = {"data_format": "chw"} if backend == "Tensor2Mat" else {}
        assert run(backend, data, **config).get("color") == (color if is_named else None)
        assert run(backend, {"data": data, "color": "other"}, **config)["color"] == "other"


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
def test_preferred_color_gives_same_result_as_steps(backend: str, colors: str) -> None:
    """Twice the same size, so that nothing but the channels can change."""
    sizes = {"resize_h": 20, "resize_w": 30} if "ResizeMat" in backend else {}
    sizes |= {"max_h": 20, "max_w": 30} if "PadMat" in backend else {}
    item = run(backend, PNG, **sizes, **{"cvtColorMat::color": colors})
    last = "bgr" if "(skip)" in backend else colors.split("|")[-1]
    assert item["color"] == last
    assert np.array_equal(item["result"], picture(20, 30) if last == "bgr" else picture(20, 30)[:, :, ::-1])


@pytest.mark.parametrize("interpolation", FLAGS)
@pytest.mark.parametrize("size", [(100, 37), (750, 1000)])
def test_decoding_in_the_wanted_color_changes_no_bit(jpeg: bytes, interpolation: str, size: tuple[int, int]) -> None:
    sizes = {"resize_h": size[0], "resize_w": size[1], "interpolation": interpolation, "color": "rgb"}
    item = run("S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]", jpeg, **sizes, **{"DecodeMat::color": "bgr"})
    decoded = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    resized = cv2.resize(decoded, size[::-1], interpolation=FLAGS[interpolation])
    assert np.array_equal(item["result"].cpu().numpy()[0], resized[:, :, ::-1].transpose(2, 0, 1))
    assert item["color"] == "rgb"


# -- to Tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mat",
    [
        *(picture(20, 30), picture(20, 30)[::-1], picture(20, 30)[:, ::-1], picture(20, 30)[:, :, ::-1]),
        *(picture(20, 30)[::2, ::3], picture(20, 30).transpose(1, 0, 2), np.asfortranarray(picture(20, 30))),
        *(picture(20, 30)[:, :, 0], picture(20, 30)[:, :, 1:2], picture(20, 30)[:1, :1], noise(20, 30, 6)),
        *(noise(3, 4, 600), noise(3, 4).astype(np.float32)),
    ],
)
def test_converts_mat_to_tensor(mat: np.ndarray) -> None:
    before = mat.copy()
    mat.flags.writeable = False
    tensor = run("Mat2Tensor", mat, device="cpu")["result"]
    wanted = before.reshape(*before.shape[:2], -1).transpose(2, 0, 1)[None]
    assert np.array_equal(tensor.numpy(), wanted)
    assert tensor.numpy().dtype == wanted.dtype
    tensor.zero_()
    assert np.array_equal(mat, before), "not a copy"


# -- lines of text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "config", "width"),
    [
        *(((32, 100), {}, 128), ((32, 96), {}, 96), ((32, 97), {}, 128), ((64, 200), {}, 128)),
        ((64, 193), {}, 96),  # 96.5 pixels: the fraction is cut off
        *(((32, 10_000), {}, 320), ((32, 321), {}, 320), ((1000, 1), {}, 32)),
        ((31, 47), {"resize_h": 31}, 64),  # the height is not a multiple of anything
        ((30, 47), {"resize_h": 30, "align": 1, "max_w": 1000}, 47),
        ((30, 47), {"resize_h": 30, "align": 10, "max_w": 40}, 40),
        ((3, 1), {"resize_h": 7, "align": 1}, 2),
        ((48, 30), {"resize_h": 48, "widths": [40, 100, 250]}, 40),
        ((48, 40), {"resize_h": 48, "widths": "40, 100, 250"}, 40),
        ((48, 41), {"resize_h": 48, "widths": [40, 100, 250]}, 100),
        ((48, 999), {"resize_h": 48, "widths": [40, 100, 250]}, 250),
    ],
)
def test_align_writes_height_and_width(given: tuple[int, int], config: Data, width: int) -> None:
    config = {"resize_h": 32, **({} if "widths" in config else {"max_w": 320}), **config}
    item = run("AlignMat", mat := np.zeros((*given, 3), np.uint8), **config)
    assert item["result"] is mat
    assert (item["resize_h"], item["resize_w"]) == (config["resize_h"], width)
    assert type(item["resize_h"]) is type(item["resize_w"]) is int


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_w": 65}, "max_w = 65 is not a multiple of align = 32"),
        ({}, "needs max_w, .* or widths, .* and not both"),
        ({"max_w": 64, "widths": "32, 64"}, "needs max_w, .* or widths, .* and not both"),
        ({"widths": "64, 32"}, r"widths must ascend from 1 to 1048576 \(pixels\), got \[64, 32\]"),
        *(({"widths": widths}, "widths must ascend") for widths in ([32, 32], [0, 32])),
        ({"widths": "32, wide"}, "expected an integer, got 'wide'"),
        ({"max_w": 64, "align": 0}, "align.*at least 1"),
        ({"max_w": 2**21}, "max_w.*at most"),
    ],
)
def test_align_rejects_wrong_widths(config: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe({"backend": "AlignMat", "resize_h": 32, **config})


# -- quadrilaterals ---------------------------------------------------------------------------------------------------


def corners(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def warped(mat: np.ndarray, box: Any, **config: Any) -> np.ndarray:
    item = run("PerspectiveTransformMat", {"data": mat, "box": box}, **config)
    assert item["box"] is box
    result: np.ndarray = item["result"]
    assert result.flags.c_contiguous
    assert not np.shares_memory(result, mat)
    return result


QUADS = [
    [[5, 3], [40, 8], [44, 30], [2, 26]],
    [[20.5, 2.25], [45.5, 20], [25, 34.75], [3, 18]],
    [[-6, -4], [60, 2], [52, 50], [1, 44]],
    [[10, 10], [12.4, 10.2], [13, 30], [9, 29]],
]


@pytest.mark.parametrize("interpolation", FLAGS)
@pytest.mark.parametrize("box", QUADS, ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_perspective_equals_opencv(interpolation: str, box: list[list[float]], channels: int) -> None:
    mat = noise(40, 50, channels)
    a, b, c, d = (np.array(point, np.float64) for point in box)
    width = round(max(np.linalg.norm(b - a), np.linalg.norm(c - d)))
    height = round(max(np.linalg.norm(d - a), np.linalg.norm(c - b)))
    source, target = np.float32(box), np.float32(corners(0, 0, width, height))
    matrix = cv2.getPerspectiveTransform(source - np.float32(0.5), target - np.float32(0.5))
    flag, border = FLAGS[interpolation], cv2.BORDER_REPLICATE
    wanted = cv2.warpPerspective(mat, matrix, (width, height), flags=flag, borderMode=border)
    assert np.array_equal(warped(mat, box, interpolation=interpolation), np.atleast_3d(wanted))


@pytest.mark.parametrize(
    "wrap",
    [
        *(np.array, np.float32, torch.tensor, tuple, lambda box: [np.array(point) for point in box]),
        *(lambda box: torch.tensor([box]), lambda box: [box]),
    ],
)
def test_takes_a_quadrilateral_of_any_kind(wrap: Any) -> None:
    assert np.array_equal(warped(noise(40, 50), wrap(QUADS[1])), warped(noise(40, 50), QUADS[1]))


@pytest.mark.parametrize(
    ("message", "boxes"),
    [
        ("the dict has no 'box' = [[x, y], …], top left", [None]),
        (
            "box must hold [[x, y], …], top left, top right, bottom right, bottom left, got",
            [
                *([1, 2, 3, 4], corners(0, 0, 4, 4)[:3], [*corners(0, 0, 4, 4), [1, 1]], "box", 7, np.zeros((2, 4))),
                *([[0, 0, 0], [4, 0, 0], [4, 4, 0], [0, 4, 0]], [[0, 0], [4, 0], [4, 4], [0, "4"]]),
                *(corners(0, 0, 4, math.nan), corners(0, 0, math.inf, 4), ["ab", "cd", "ef", "gh"]),
                *([[10**5000, 0]] * 4, list(range(10**6)), np.zeros(10**6), "x" * 10**6),
            ],
        ),
        (
            "is not a quadrilateral for",
            [
                *([[1, 1]] * 4, [[1, 1], [2, 1], [3, 1], [4, 1]], [[0.1, 0.1], [0.2, 0.2], [0.3, 0.3], [0.7, 0.7]]),
                *([[1, 1], [1, 1], [5, 5], [1, 5]], [[1, 1], [5, 1], [1, 1], [1, 5]], [[1, 1], [5, 1], [5, 5], [1, 1]]),
                *([[1, 1], [3, 1], [5, 1], [1, 5]], [[1, 1], [5, 1], [3, 3], [1, 5]], [[1, 1], [5, 1], [2, 2], [1, 5]]),
                *([[1, 1], [5, 1], [1, 5], [5, 5]], corners(1, 1, 5, 1), corners(1, 1, 1 + 1e-9, 5)),
                [[0, 0], [5, 0], [10, 0.001], [0, 8]],
            ],
        ),
        (
            "has an edge longer than 1048576 pixels",
            [corners(0, 0, 2**20 + 1, 4), corners(0, -(2**20), 4, 1), corners(-1e308, 0, 1e308, 4)],
        ),
        (
            "lies outside",
            [
                *(corners(10, 0, 14, 8), corners(-4, 0, 0, 8), corners(0, 8, 10, 9), corners(0, -9, 10, 0)),
                corners(1e300, 0, 1e300, 8),
            ],
        ),
        ("60000x60000 pixels were asked for, more than max_pixels", [corners(0, 0, 60000, 60000)]),
    ],
    ids=["missing", "not points", "not convex", "long", "outside", "large"],
)
def test_rejects_other_quadrilaterals(message: str, boxes: list[Any]) -> None:
    with pipe({"backend": "PerspectiveTransformMat"}) as p:
        for box in boxes:
            p(item := {"data": noise(8, 10), "box": box})
            assert message in str(item["error"])
            assert "result" not in item
            assert len(str(item["error"])) < 1000
            assert "max_pixels" in message or "an image of 10x8 pixels" in str(item["error"])


HWC = torch.from_numpy(noise(24, 32))
CHW = HWC.permute(2, 0, 1)
RESIZED, FITTED = {"resize_h": 5, "resize_w": 7}, {"max_h": 5, "max_w": 7}
CONFIGS: dict[str, Any] = {
    "cvtColorTensor": {"color": "bgr"},
    "ResizeTensor": RESIZED,
    "PillowResizeTensor": RESIZED,
    "ResizePadTensor": FITTED,
    "LetterBoxTensor": FITTED,
    "DynamicResizeTensor": {},
    "ResizeShorterTensor": {"size": 9},
    "CenterCropTensor": {"crop_h": 30, "crop_w": 9},
    "CopyMakeBorderTensor": {"top": 1, "right": 2},
    "CropTensor": {},
    "Tensor2Mat": {},
}


# -- dimensions -------------------------------------------------------------------------------------------------------


def keyed(data: Any) -> dict[str, Any]:
    return {"data": data, "box": [2, 3, 20, 16], **RESIZED}


@pytest.mark.parametrize("backend", CONFIGS)
def test_channels_may_come_first_or_last(backend: str) -> None:
    wanted = run(backend, keyed(CHW[None]), **CONFIGS[backend])["result"]
    for data in (CHW, HWC, HWC.clone(memory_format=torch.contiguous_format), CHW.contiguous()):
        assert np.array_equal(run(backend, keyed(data), **CONFIGS[backend])["result"], wanted)
    for data, data_format in ((HWC, "hwc"), (CHW, "chw")):
        result = run(backend, keyed(data), data_format=data_format, **CONFIGS[backend])["result"]
        assert np.array_equal(result, wanted)
    message = refusal(backend, keyed(torch.zeros(3, 20, 3, dtype=torch.uint8)), **CONFIGS[backend])
    assert 'got shape 3x20x3, which may be either; set data_format = "chw" or "hwc"' in message


@pytest.mark.parametrize(
    ("shape", "data_format", "first"),
    [
        *(((3, 5, 7), "auto", (3, 5, 7)), ((1, 5, 7), "auto", (1, 5, 7)), ((4, 5, 7), "auto", (4, 5, 7))),
        *(((5, 7, 3), "auto", (3, 5, 7)), ((5, 7, 1), "auto", (1, 5, 7)), ((5, 3, 4), "auto", (4, 5, 3))),
        *(((3, 5, 3), "chw", (3, 5, 3)), ((3, 5, 4), "hwc", (4, 3, 5)), ((6, 5, 7), "chw", (6, 5, 7))),
        *(((5, 7, 2), "hwc", (2, 5, 7)), ((1, 3, 5, 3), "auto", (3, 5, 3)), ((1, 3, 5, 3), "hwc", (3, 5, 3))),
        *(((1, 6, 5, 7), "auto", (6, 5, 7)), ((1, 256, 1, 1), "chw", (256, 1, 1))),
    ],
)
def test_takes_these_shapes(shape: tuple[int, ...], data_format: str, first: tuple[int, ...]) -> None:
    assert as_image(torch.zeros(shape), data_format).shape == (1, *first)


@pytest.mark.parametrize(
    ("shape", "data_format", "message"),
    [
        *((shape, "auto", "which may be either") for shape in ((3, 5, 3), (1, 5, 4), (6, 5, 7), (5, 7, 2))),
        ((1, 576, 768, 3), "auto", '1x576x768x3; leave out the 1 .* and set data_format = "chw" where it is not'),
        ((1, 576, 768, 3), "hwc", "1x576x768x3; leave out the 1 where it is 1xHxWxC"),
        ((5, 7), "auto", "HxWxC, got shape 5x7$"),
        ((2, 3, 5, 7), "hwc", "got shape 2x3x5x7$"),
        ((3, 0, 7), "chw", "got shape 3x0x7$"),
        ((), "auto", "got a scalar$"),
    ],
)
def test_rejects_other_shapes(shape: tuple[int, ...], data_format: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        as_image(torch.zeros(shape), data_format)


# -- to Mats and lists ------------------------------------------------------------------------------------------------


INF = float("inf")


@pytest.mark.parametrize(
    ("dtype", "values", "kept", "clamped"),
    [
        *(
            (
                dtype,
                [-300.0, -0.375, 0.5, 1.5, 254.5, INF],
                [-300.0, -0.375, 0.5, 1.5, 254.5, INF],
                [0, 0, 0, 2, 254, 255],
            )
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        ),
        *((dtype, [0, 17, 255], [0, 17, 255], [0, 17, 255]) for dtype in (torch.uint8, torch.int16, torch.int64)),
        (torch.bool, [0, 1, 1], [0, 1, 1], [0, 1, 1]),
        (torch.int8, [-5, 127], "-5..127", [0, 127]),
        (torch.int64, [0, 256], "0..256", [0, 255]),
    ],
)
def test_converts_tensor_to_mat(
    dtype: torch.dtype, values: list[float], kept: list[float] | str, clamped: list[int]
) -> None:
    """Floats become float32 and integers 8 bits; other values are refused, or clamped on request."""
    tensor = torch.tensor(values, dtype=dtype)[None, None, None]
    given = [tensor, tensor.clone().requires_grad_()] if dtype.is_floating_point else [tensor]
    for data in given:
        if isinstance(kept, str):
            message = f'a Mat holds 0..255 or floats, the Tensor of {dtype} {kept}; dtype = "uint8" clamps them'
            assert refusal("Tensor2Mat", data) == message
        else:
            result = run("Tensor2Mat", data)["result"]
            assert result.dtype == (np.float32 if dtype.is_floating_point else np.uint8)
            assert result.ravel().tolist() == torch.tensor(kept, dtype=dtype).tolist()
        result = run("Tensor2Mat", data, dtype="uint8")["result"]
        assert (result.dtype, result.ravel().tolist()) == (np.uint8, torch.tensor(clamped, dtype=dtype).tolist())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64])
@pytest.mark.parametrize("shape", [(6,), (1, 1, 2, 3), (3, 2)])
def test_converts_tensor_to_list(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).to(dtype).reshape(shape)
    for given in (tensor, tensor.transpose(0, -1)):
        result = run("Tensor2Vector", given)["result"]
        assert result == given.flatten().tolist()
        assert all(type(value) is float for value in result)


@pytest.mark.parametrize(
    "backend",
    [
        *("cvtColorMat", "AlignMat", "PerspectiveTransformMat", "Mat2Tensor", "SaveMat"),
        *("cvtColorTensor", "Tensor2Mat", "Tensor2Vector", "SaveTensor"),
    ],
)
def test_rejects_values_of_another_kind(backend: str, tmp_path: Path) -> None:
    config: Data = {"color": "rgb"} if "Color" in backend else {}
    config |= {"save_dir": str(tmp_path)} if "Save" in backend else {}
    config |= {"resize_h": 4, "max_w": 32} if backend == "AlignMat" else {}
    cls = default.find_backend(backend)
    assert cls is not None
    for data in NO_MATS if cls.takes == MAT else [b"bytes", np.zeros(3), [torch.zeros(3)], None]:
        assert f"expected {cls.takes}" in refusal(backend, data, **config)
