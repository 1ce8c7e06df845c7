"""Parts, sizes and perspective of Mats, against NumPy, OpenCV and the Tensor backends."""

from __future__ import annotations

import math
import re
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import picture

from torchpipe_py import ConfigError, InvalidRequest, pipe

Data = dict[str, Any]

FLAGS = {
    "nearest": cv2.INTER_NEAREST,
    "bilinear": cv2.INTER_LINEAR,
    "bicubic": cv2.INTER_CUBIC,
    "area": cv2.INTER_AREA,
    "lanczos": cv2.INTER_LANCZOS4,
}
CONFIGS: dict[str, Data] = {
    "CropMat": {},
    "AlignMat": {"resize_h": 32, "max_w": 64},
    "CenterCropMat": {"crop_h": 8, "crop_w": 10},
    "DynamicResizeMat": {},
    "PerspectiveTransformMat": {},
}


def run(backend: str, item: Data, **config: Any) -> Data:
    """The dict after one request."""
    with pipe({"backend": backend, **config}) as p:
        p(item)
    return item


def refusal(backend: str, item: Data, **config: Any) -> str:
    """What the ``InvalidRequest`` says that is the item's outcome."""
    item = run(backend, item, **config)
    assert "result" not in item
    assert isinstance(item["error"], InvalidRequest)
    return str(item["error"])


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    rng = np.random.default_rng(height * width * channels)
    return rng.integers(0, 256, (height, width, channels), np.uint8)


def corners(left: float, top: float, right: float, bottom: float) -> list[list[float]]:
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


KEYS: Data = {"resize_h": 4, "resize_w": 5}


# -- all of them --------------------------------------------------------------------------------------------------


def whole(backend: str, mat: np.ndarray) -> Data:
    """A request that is in order for ``backend``, about the whole of a Mat of 8×10 pixels."""
    box = corners(0, 0, 10, 8) if backend == "PerspectiveTransformMat" else [0, 0, 10, 8]
    return {"data": mat, "box": box} | KEYS


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize(
    "data",
    [b"bytes", np.zeros((4, 4, 3), np.float64), np.zeros(4, np.uint8), np.zeros((0, 4, 3), np.uint8), torch.zeros(3)],
)
def test_things_that_are_no_mat(backend: str, data: Any) -> None:
    assert "expected a Mat" in refusal(backend, whole(backend, data), **CONFIGS[backend])


@pytest.mark.parametrize("backend", CONFIGS)
def test_the_preferred_color_is_passed_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = cv2.imencode(".png", noise(8, 10))[1].tobytes()
    config = {"color": "rgb", "DecodeMat::color": "bgr", **CONFIGS[backend]}
    item = whole(backend, noise(8, 10)) | {"data": encoded}
    monkeypatch.setattr(cv2, "cvtColor", None)  # decoded in that order: nothing is left to convert
    assert run(f"S[DecodeMat,{backend},cvtColorMat]", item, **config)["color"] == "rgb"
    plain = run(backend, whole(backend, noise(8, 10)), **CONFIGS[backend])["result"]
    assert np.array_equal(item["result"], plain[:, :, ::-1])


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize(
    "mat",
    [
        noise(8, 10)[::-1],
        noise(8, 10)[:, :, ::-1],
        noise(10, 8).transpose(1, 0, 2),
        noise(16, 30)[::2, ::3],
        noise(8, 10, 1),
        noise(8, 10, 4),
    ],
    ids=["upside down", "other color", "transposed", "every other", "one channel", "four channels"],
)
def test_memory_in_any_order_and_channels(backend: str, mat: np.ndarray) -> None:
    mat.flags.writeable = False
    before = mat.copy()
    result = run(backend, whole(backend, mat), **CONFIGS[backend])["result"]
    assert np.array_equal(result, run(backend, whole(backend, before), **CONFIGS[backend])["result"])
    assert result.dtype == np.uint8
    assert result.shape == ((4, 5) if backend == "DynamicResizeMat" else (8, 10)) + mat.shape[2:]
    assert np.array_equal(mat, before)


# -- CropMat ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "part"),
    [
        ([2, 1, 5, 4], (2, 1, 5, 4)),
        ((2, 1, 5, 4), (2, 1, 5, 4)),
        (np.array([1.6, 0.4, 5.2, 3.9], np.float32), (2, 0, 5, 4)),
        (np.array([2, 1, 5, 4]), (2, 1, 5, 4)),
        (torch.tensor([2, 1, 5, 4]), (2, 1, 5, 4)),
        ([np.float32(2.2), np.int64(1), 5, 4.0], (2, 1, 5, 4)),
        ([0.5, 1.5, 4.5, 5.5], (0, 2, 4, 6)),
        ([-7, -0.6, 99, 1e9], (0, 0, 10, 8)),
        ([9, 7, 10, 8], (9, 7, 10, 8)),
        (torch.tensor([[2, 1, 5, 4]], dtype=torch.int32), (2, 1, 5, 4)),
        (np.array([[2, 1, 5, 4]]), (2, 1, 5, 4)),
        ([[2, 1, 5, 4]], (2, 1, 5, 4)),
        ([np.array([2, 1, 5, 4])], (2, 1, 5, 4)),
    ],
)
def test_crop(box: Any, part: tuple[int, int, int, int]) -> None:
    mat = noise(8, 10)
    left, top, right, bottom = part
    item = run("CropMat", {"data": mat, "box": box})
    assert np.array_equal(item["result"], mat[top:bottom, left:right])
    assert item["result"].flags.c_contiguous
    assert not np.shares_memory(item["result"], mat)
    assert item["box"] is box
    tensor = torch.from_numpy(mat).permute(2, 0, 1)[None]
    same = run("CropTensor", {"data": tensor, "box": box})["result"]
    assert np.array_equal(same.cpu().numpy()[0].transpose(1, 2, 0), item["result"])


def test_a_crop_of_a_gray_mat_without_channels() -> None:
    assert run("CropMat", {"data": noise(8, 10)[:, :, 0], "box": [2, 1, 5, 8]})["result"].shape == (7, 3, 1)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"box": None},
        *({"box": box} for box in ([1, 2, 3], [1, 2, 3, 4, 5], "1234", 7, [7], np.zeros((1, 4)), [1, 2, 3, "4"])),
        *({"box": box} for box in ([0, 0, 5, math.nan], [0, 0, math.inf, 5], [[1, 2], [3, 4], [5, 6], [7, 8]])),
        *({"box": box} for box in ([[[1, 1, 3, 3]]], np.ones((1, 1, 4)), np.ones((2, 4)))),
        *({"box": box} for box in ([5, 1, 5, 4], [5, 1, 2, 4], [2, 4, 5, 1], [10, 0, 12, 8], [1, 1, 1.4, 4])),
    ],
    ids=str,
)
def test_a_box_that_cannot_be_cropped_to_is_refused_as_crop_tensor_does(others: Data) -> None:
    mat = noise(8, 10)
    assert re.search(r"box.* an image of 10x8 pixels", refusal("CropMat", {"data": mat, **others}))
    tensor = torch.from_numpy(mat).permute(2, 0, 1)[None]
    assert refusal("CropTensor", {"data": tensor, **others}) == refusal("CropMat", {"data": mat, **others})


# -- AlignMat and DynamicResizeMat --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "config", "width"),
    [
        ((32, 100), {}, 128),
        ((32, 96), {}, 96),
        ((32, 97), {}, 128),
        ((64, 200), {}, 128),
        ((64, 193), {}, 96),  # 96.5 pixels: the fraction is cut off
        ((32, 10_000), {}, 320),
        ((32, 321), {}, 320),
        ((1000, 1), {}, 32),
        ((32, 32), {}, 32),
        ((31, 47), {"resize_h": 31}, 64),  # the height is no multiple of anything
        ((30, 47), {"resize_h": 30, "align": 1, "max_w": 1000}, 47),
        ((30, 47), {"resize_h": 30, "align": 10, "max_w": 40}, 40),
        ((3, 1), {"resize_h": 7, "align": 1}, 2),
        ((48, 30), {"resize_h": 48, "widths": [40, 100, 250]}, 40),
        ((48, 40), {"resize_h": 48, "widths": "40, 100, 250"}, 40),
        ((48, 41), {"resize_h": 48, "widths": [40, 100, 250]}, 100),
        ((24, 90), {"resize_h": 48, "widths": [40, 100, 250]}, 250),
        ((48, 999), {"resize_h": 48, "widths": [40, 100, 250]}, 250),
    ],
)
def test_align(given: tuple[int, int], config: Data, width: int) -> None:
    config = {"resize_h": 32, **({} if "widths" in config else {"max_w": 320}), **config}
    mat = np.zeros((*given, 3), np.uint8)
    item = run("AlignMat", {"data": mat}, **config)
    assert item["result"] is mat
    assert (item["resize_h"], item["resize_w"]) == (config["resize_h"], width)
    assert type(item["resize_h"]) is type(item["resize_w"]) is int


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"resize_h": 32, "max_w": 65}, "max_w = 65 is no multiple of align = 32"),
        ({"resize_h": 32}, "needs max_w, .* or widths, .* and not both"),
        (
            {"resize_h": 32, "max_w": 64, "widths": "32, 64"},
            "needs max_w, .* or widths, .* and not both",
        ),
        ({"resize_h": 32, "widths": "64, 32"}, r"widths must ascend from 1 to 1048576 \(pixels\), got \[64, 32\]"),
        ({"resize_h": 32, "widths": [32, 32]}, "widths must ascend"),
        ({"resize_h": 32, "widths": [0, 32]}, "widths must ascend"),
        ({"resize_h": 32, "widths": "32, wide"}, "expected an integer, got 'wide'"),
        ({"resize_h": 32, "max_w": 64, "align": 0}, "align.*at least 1"),
        ({"resize_h": 0, "max_w": 64}, "resize_h.*at least 1"),
        ({"resize_h": 32, "max_w": 2**21}, "max_w.*at most"),
    ],
)
def test_widths_that_are_none(config: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe({"backend": "AlignMat", **config})


def test_lines_of_a_few_widths_share_batches() -> None:
    lines = [picture(24, width) for width in (30, 45, 60, 61, 118, 119)]
    config = {"resize_h": 24, "widths": "60, 120", "keep_aspect": True, "pad_value": 9}
    with pipe({"backend": "S[AlignMat,DynamicResizeMat]", **config}) as p:
        p(items := [{"data": line} for line in lines])
    assert [item["result"].shape for item in items] == [(24, 60, 3)] * 3 + [(24, 120, 3)] * 3
    for item, line in zip(items, lines, strict=True):
        assert np.array_equal(item["result"][:, : line.shape[1]], line)  # not stretched
        assert set(item["result"][:, line.shape[1] :].ravel()) <= {9}


@pytest.mark.parametrize("interpolation", FLAGS)
@pytest.mark.parametrize("size", [(8, 8), (1, 1), (40, 33), (20, 30)])
@pytest.mark.parametrize("channels", [1, 3])
def test_dynamic_resize(interpolation: str, size: tuple[int, int], channels: int) -> None:
    mat = noise(20, 30, channels)
    item = {"data": mat, "resize_h": size[0], "resize_w": np.int32(size[1])}
    result = run("DynamicResizeMat", item, interpolation=interpolation)["result"]
    wanted = cv2.resize(mat, size[::-1], interpolation=FLAGS[interpolation]).reshape(*size, channels)
    assert np.array_equal(result, wanted)
    assert result.shape == (*size, channels)
    fixed = {"resize_h": size[0], "resize_w": size[1], "interpolation": interpolation}
    assert np.array_equal(result, run("ResizeMat", {"data": mat}, **fixed)["result"])


def test_dynamic_resize_is_bilinear_unless_said() -> None:
    wanted = cv2.resize(noise(20, 30), (7, 9), interpolation=cv2.INTER_LINEAR)
    item = run("DynamicResizeMat", {"data": noise(20, 30), "resize_h": 9, "resize_w": 7})
    assert np.array_equal(item["result"], wanted)


def test_a_mat_of_the_wanted_size_is_passed_on() -> None:
    mat = noise(4, 5)
    assert run("DynamicResizeMat", {"data": mat} | KEYS)["result"] is mat


def test_each_request_has_its_own_size() -> None:
    with pipe({"backend": "DynamicResizeMat", "instance_num": 2}) as p:
        items = [{"data": noise(20, 30), "resize_h": size, "resize_w": 2 * size} for size in range(1, 20)]
        p(items)
    assert [item["result"].shape for item in items] == [(size, 2 * size, 3) for size in range(1, 20)]


@pytest.mark.parametrize("side", [np.int64(9), np.array(9), np.array([[9]], np.int32), torch.tensor([[9]])], ids=repr)
def test_a_side_is_a_number_in_any_array(side: Any) -> None:
    item = run("DynamicResizeMat", {"data": noise(20, 30), "resize_h": side, "resize_w": side})
    assert item["result"].shape == (9, 9, 3)


@pytest.mark.parametrize("key", ["resize_h", "resize_w"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (-3, "-3"),
        (2**20 + 1, "1048577"),
        (4.0, "4.0"),
        ("4", "'4'"),
        (None, "None"),
        (True, "True"),
        ([4], "[4]"),
        (np.float32(4), "4.0"),
        (np.int64(0), "0"),
        (np.bool_(True), "True"),
        (torch.tensor([4, 4]), "[4, 4]"),
        pytest.param(10**5000, "a int", id="more digits than Python writes"),
    ],
)
def test_a_side_that_is_none(key: str, value: Any, shown: str) -> None:
    message = f"{key} in the dict must be an integer from 1 to 1048576 (pixels), got {shown}"
    assert message in refusal("DynamicResizeMat", {"data": noise(8, 10)} | KEYS | {key: value})


@pytest.mark.parametrize("key", ["resize_h", "resize_w"])
def test_a_dict_without_a_side(key: str) -> None:
    item = {"data": noise(8, 10)} | KEYS
    del item[key]
    assert re.search(f"the dict has no '{key}'", refusal("DynamicResizeMat", item))


def test_the_largest_side() -> None:
    item = run("DynamicResizeMat", {"data": noise(2, 2, 1), "resize_h": 1, "resize_w": 2**20})
    assert item["result"].shape == (1, 2**20, 1)


def test_align_and_resize_in_one_node() -> None:
    mat = picture(50, 170)
    item = run("S[AlignMat,DynamicResizeMat]", {"data": mat}, resize_h=32, max_w=320, interpolation="bicubic")
    assert np.array_equal(item["result"], cv2.resize(mat, (128, 32), interpolation=cv2.INTER_CUBIC))


# -- PerspectiveTransformMat --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", FLAGS)
def test_an_upright_box_is_a_crop(interpolation: str) -> None:
    mat = noise(20, 30)
    part = mat[4:12, 3:13]
    left, top, right, bottom = [3, 4], [13, 4], [13, 12], [3, 12]
    turns = {
        "as it is": ([left, top, right, bottom], part),
        "a quarter": ([top, right, bottom, left], np.rot90(part, 1)),
        "half": ([right, bottom, left, top], np.rot90(part, 2)),
        "three quarters": ([bottom, left, top, right], np.rot90(part, 3)),
        "mirrored": ([top, left, bottom, right], part[:, ::-1]),
    }
    for name, (box, wanted) in turns.items():
        result = run("PerspectiveTransformMat", {"data": mat, "box": box}, interpolation=interpolation)["result"]
        assert np.array_equal(result, wanted), name
        assert result.flags.c_contiguous
        assert not np.shares_memory(result, mat)


def test_the_whole_image_is_itself() -> None:
    mat = noise(20, 30)
    item = run("PerspectiveTransformMat", {"data": mat, "box": corners(0, 0, 30, 20)})
    assert np.array_equal(item["result"], mat)


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
    result = run("PerspectiveTransformMat", {"data": mat, "box": box}, interpolation=interpolation)["result"]
    a, b, c, d = (np.array(point, np.float64) for point in box)
    width = round(max(np.linalg.norm(b - a), np.linalg.norm(c - d)))
    height = round(max(np.linalg.norm(d - a), np.linalg.norm(c - b)))
    source, target = np.float32(box), np.float32(corners(0, 0, width, height))
    matrix = cv2.getPerspectiveTransform(source - np.float32(0.5), target - np.float32(0.5))
    flag, border = FLAGS[interpolation], cv2.BORDER_REPLICATE
    wanted = cv2.warpPerspective(mat, matrix, (width, height), flags=flag, borderMode=border)
    assert result.shape == (height, width, channels)
    assert np.array_equal(result, wanted.reshape(result.shape))


def test_perspective_by_hand() -> None:
    """Nearest pixels, each found by the homography that NumPy solves, in coordinates between pixels."""
    mat, box = noise(40, 50), QUADS[0]
    result = run("PerspectiveTransformMat", {"data": mat, "box": box}, interpolation="nearest")["result"]
    height, width = result.shape[:2]
    rows, values = [], []
    for (u, v), (x, y) in zip(corners(0, 0, width, height), box, strict=True):
        rows += [[u, v, 1, 0, 0, 0, -u * x, -v * x], [0, 0, 0, u, v, 1, -u * y, -v * y]]
        values += [x, y]
    matrix = np.append(np.linalg.solve(np.array(rows), np.array(values)), 1).reshape(3, 3)
    us, vs = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    xs, ys, scale = np.einsum("ij,jhw->ihw", matrix, np.stack([us, vs, np.ones_like(us)]))
    wanted = mat[np.floor(ys / scale).astype(int), np.floor(xs / scale).astype(int)]
    # OpenCV rounds a place to 1/32 of a pixel; a wrong convention would miss most pixels of this noise
    assert (result == wanted).all(axis=2).mean() > 0.95


@pytest.mark.parametrize(
    "wrap",
    [
        *(np.array, np.float32, torch.tensor, tuple, lambda box: [np.array(point) for point in box]),
        *(lambda box: torch.tensor([box]), lambda box: [box]),
    ],
)
def test_a_box_of_any_kind(wrap: Any) -> None:
    mat = noise(40, 50)
    box = wrap(QUADS[1])
    item = run("PerspectiveTransformMat", {"data": mat, "box": box})
    assert np.array_equal(item["result"], run("PerspectiveTransformMat", {"data": mat, "box": QUADS[1]})["result"])
    assert item["box"] is box


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (corners(2, 3, 2.1, 3.2), (1, 1)),
        (corners(2, 3, 3.4, 5.6), (3, 1)),
        ([[0, 0], [9, 0], [5, 7], [2, 7]], (8, 9)),
        ([[2, 0], [5, 0], [9, 7], [0, 7]], (8, 9)),
        (corners(-5, 0, 15, 8), (8, 20)),
    ],
    ids=str,
)
def test_the_size_is_that_of_the_longer_edges(box: list[list[float]], shape: tuple[int, int]) -> None:
    assert run("PerspectiveTransformMat", {"data": noise(8, 10), "box": box})["result"].shape == (*shape, 3)


def test_outside_the_image_its_border_is_repeated() -> None:
    mat = noise(8, 10)
    item = run("PerspectiveTransformMat", {"data": mat, "box": corners(-3, -2, 14, 9)})
    assert np.array_equal(item["result"], np.pad(mat, ((2, 1), (3, 4), (0, 0)), mode="edge"))


@pytest.mark.parametrize(
    "box",
    [
        [1, 2, 3, 4],
        corners(0, 0, 4, 4)[:3],
        [*corners(0, 0, 4, 4), [1, 1]],
        [[0, 0, 0], [4, 0, 0], [4, 4, 0], [0, 4, 0]],
        [[0, 0], [4, 0], [4, 4], [0, "4"]],
        corners(0, 0, 4, math.nan),
        corners(0, 0, math.inf, 4),
        ["ab", "cd", "ef", "gh"],
        "box",
        7,
        np.zeros((2, 4)),
    ],
    ids=str,
)
def test_a_box_that_is_no_four_points(box: Any) -> None:
    assert re.search(
        r"(?s)box must hold \[\[x, y\], .* got .* an image of 10x8 pixels",
        refusal("PerspectiveTransformMat", {"data": noise(8, 10), "box": box}),
    )


@pytest.mark.parametrize(
    "box",
    [
        [[1, 1], [1, 1], [1, 1], [1, 1]],
        [[1, 1], [2, 1], [3, 1], [4, 1]],
        [[0.1, 0.1], [0.2, 0.2], [0.3, 0.3], [0.7, 0.7]],
        [[1, 1], [1, 1], [5, 5], [1, 5]],
        [[1, 1], [5, 1], [1, 1], [1, 5]],
        [[1, 1], [5, 1], [5, 5], [1, 1]],
        [[1, 1], [3, 1], [5, 1], [1, 5]],
        [[1, 1], [5, 1], [3, 3], [1, 5]],
        [[1, 1], [5, 1], [2, 2], [1, 5]],
        [[1, 1], [5, 1], [1, 5], [5, 5]],
        corners(1, 1, 5, 1),
        corners(1, 1, 1 + 1e-9, 5),
        [[0, 0], [5, 0], [10, 0.001], [0, 8]],
    ],
    ids=str,
)
def test_a_box_that_is_no_quadrilateral(box: Any) -> None:
    assert re.search(
        r"box \[.*\] is no quadrilateral for an image of 10x8 pixels",
        refusal("PerspectiveTransformMat", {"data": noise(8, 10), "box": box}),
    )


@pytest.mark.parametrize(
    ("box", "message"),
    [
        (corners(0, 0, 2**20 + 1, 4), "has an edge longer than 1048576 pixels"),
        (corners(0, -(2**20), 4, 1), "has an edge longer than 1048576 pixels"),
        (corners(-1e308, 0, 1e308, 4), "has an edge longer than 1048576 pixels"),
        (corners(10, 0, 14, 8), "lies outside"),
        (corners(-4, 0, 0, 8), "lies outside"),
        (corners(0, 8, 10, 9), "lies outside"),
        (corners(0, -9, 10, 0), "lies outside"),
        (corners(1e300, 0, 1e300, 8), "lies outside"),
    ],
)
def test_a_box_too_large_or_beside_the_image(box: Any, message: str) -> None:
    assert re.search(
        rf"box \[.*\] {message}.* an image of 10x8 pixels",
        refusal("PerspectiveTransformMat", {"data": noise(8, 10), "box": box}),
    )


def test_an_edge_of_the_greatest_length() -> None:
    item = run("PerspectiveTransformMat", {"data": noise(8, 10), "box": corners(0, 0, 2**20, 2)})
    assert item["result"].shape == (2, 2**20, 3)


@pytest.mark.parametrize("others", [{}, {"box": None}])
def test_a_dict_without_a_quadrilateral(others: Data) -> None:
    assert re.search(
        r"the dict has no 'box' = .*top left.* an image of 10x8 pixels",
        refusal("PerspectiveTransformMat", {"data": noise(8, 10), **others}),
    )


@pytest.mark.parametrize("backend", ["DynamicResizeMat", "PerspectiveTransformMat"])
def test_an_interpolation_that_is_none(backend: str) -> None:
    with pytest.raises(ConfigError, match=r"interpolation.*bilinear"):
        pipe({"backend": backend, "interpolation": "linear"})


# -- sizes that a request names -----------------------------------------------------------------------------------


def test_a_size_has_no_more_pixels_than_allowed() -> None:
    item = {"data": noise(2, 2), "resize_h": 10, "resize_w": 10}
    assert run("DynamicResizeMat", dict(item), max_pixels=100)["result"].shape == (10, 10, 3)
    message = "10x10 pixels were asked for, more than max_pixels = 99"
    assert refusal("DynamicResizeMat", dict(item), max_pixels=99) == message
    assert "25000x25000 pixels" in refusal("DynamicResizeMat", item | {"resize_h": 25000, "resize_w": 25000})
    many = {"data": np.zeros((1, 1, 512), np.uint8), "resize_h": 4096, "resize_w": 4096}
    assert "4096x4096 pixels of 512 bytes" in refusal("DynamicResizeMat", many)


def test_a_quadrilateral_has_no_more_pixels_than_allowed() -> None:
    box = corners(0, 0, 10, 10)
    assert run("PerspectiveTransformMat", {"data": noise(8, 10), "box": box}, max_pixels=100)["result"].size == 300
    assert "10x10 pixels" in refusal("PerspectiveTransformMat", {"data": noise(8, 10), "box": box}, max_pixels=99)
    huge = corners(0, 0, 60000, 60000)
    assert "60000x60000 pixels" in refusal("PerspectiveTransformMat", {"data": noise(8, 10), "box": huge})


@pytest.mark.parametrize("backend", ["CropMat", "PerspectiveTransformMat"])
@pytest.mark.parametrize(
    "box",
    [
        [10**400] * 4,
        [10**5000] * 4,
        [[10**5000, 0]] * 4,
        [float("nan")] * 4,
        list(range(10**6)),
        np.zeros(10**6),
        "x" * 10**6,
    ],
)
def test_what_is_said_of_a_box_is_short(backend: str, box: Any) -> None:
    assert len(refusal(backend, {"data": noise(8, 10), "box": box})) < 1000


def test_a_bad_box_costs_its_neighbours_nothing() -> None:
    """The batch is not repeated item by item, as it is after a defect."""
    items = [{"data": noise(8, 10), "box": box} for box in ([0, 0, 4, 4], None, [0, 0, 5, 5])]
    with pipe({"backend": "CropMat"}) as p:
        p(items)
        assert p.stats()["nodes"]["node"]["failed"] == 0
    assert ["result" in item for item in items] == [True, False, True]
