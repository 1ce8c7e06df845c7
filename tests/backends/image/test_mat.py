"""Mats: their colors, their way to Tensors, the sizes of lines, and quadrilaterals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from image_kit import FLAGS, Data, noise, refusal, run

from torchpipe_py import ConfigError, pipe

PNG = encode(picture(20, 30), ".png")


# -- colors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cvtColorMat", "CvtColorMat"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("given", [None, "bgr", "rgb"])
@pytest.mark.parametrize("wanted", ["bgr", "rgb", "gray"])
def test_converts_as_opencv_does(backend: str, dtype: type, channels: int, given: str | None, wanted: str) -> None:
    """One channel is gray, a Mat without ``color`` is BGR, of four channels the last is dropped."""
    mat = noise(4, 6, channels).astype(dtype)
    item = run(backend, {"data": mat} | ({"color": given} if given else {}), color=wanted)
    source = "gray" if channels == 1 else given or "bgr"
    three = mat[:, :, :3]
    expected = three if source == wanted else cv2.cvtColor(
        np.ascontiguousarray(three), getattr(cv2, f"COLOR_{source.upper()}2{wanted.upper()}")
    )  # fmt: skip
    assert np.allclose(item["result"], np.atleast_3d(expected), rtol=1e-6, atol=0)
    assert item["result"].dtype == dtype
    assert item["color"] == wanted
    assert (item["result"] is mat) is (source == wanted and channels != 4), "converted only if it differs"


@pytest.mark.parametrize("channels", [2, 5])
def test_rejects_channels_without_a_color(channels: int) -> None:
    message = f"color rgb needs a Mat of 1, 3 or 4 channels, got {channels}"
    assert refusal("cvtColorMat", noise(4, 6, channels), color="rgb") == message


@pytest.mark.parametrize("backend", ["cvtColorMat", "cvtColorTensor", "SaveMat"])
@pytest.mark.parametrize(
    ("color", "shown"),
    [
        *(("gray", "'gray'"), ("RGB", "'RGB'"), (None, "None"), (np.array(["rgb", "bgr"]), "a ndarray")),
        *((bytes(10**7), "a bytes"), (10**5000, "a int"), ("r" * 10**7, "'rrrr")),
    ],
    ids=["gray", "RGB", "None", "array", "bytes", "number", "text"],
)
def test_rejects_what_is_not_a_channel_order(backend: str, color: Any, shown: str, tmp_path: Path) -> None:
    config = {"save_dir": str(tmp_path)} if backend == "SaveMat" else {"color": "rgb"}
    data: Any = torch.zeros(1, 3, 4, 6) if backend == "cvtColorTensor" else noise(4, 6)
    message = refusal(backend, {"data": data, "color": color}, **config)
    assert message.startswith(f"color {shown}")
    assert message.endswith("of an image of 3 channels; expected bgr or rgb")
    assert len(message) < 200


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
def test_mat_to_tensor(mat: np.ndarray) -> None:
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
def test_perspective_is_opencvs(interpolation: str, box: list[list[float]], channels: int) -> None:
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


@pytest.mark.parametrize("backend", ["cvtColorMat", "AlignMat", "PerspectiveTransformMat", "Mat2Tensor", "SaveMat"])
@pytest.mark.parametrize(
    "data",
    [b"bytes", np.zeros((4, 4, 3), np.float64), np.zeros(4, np.uint8), np.zeros((0, 4, 3), np.uint8), torch.zeros(3)],
)
def test_rejects_non_mats(backend: str, data: Any, tmp_path: Path) -> None:
    config = {"cvtColorMat": {"color": "rgb"}, "AlignMat": {"resize_h": 4, "max_w": 32}}
    saving = {"save_dir": str(tmp_path)} if backend == "SaveMat" else {}
    assert "expected a Mat" in refusal(backend, data, **config.get(backend, {}), **saving)
