"""The way from an image that was resized, cut and padded back to the original, and the original itself."""

from __future__ import annotations

import pickle
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.image_backends import Data, made, run
from PIL import Image

from torchpipe_py import BackendError, InvalidRequest, Registry, pipe
from torchpipe_py.backends.image import original


def ramp(height: int, width: int) -> torch.Tensor:
    """An image 1×2×H×W whose values are the coordinates of each pixel's middle, and with a third channel of 0."""
    ys, xs = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.stack([xs, ys, torch.zeros_like(xs)])[None]


sides = st.integers(40, 90)
STEPS = st.one_of(
    st.builds(lambda h, w: ("Resize", {"resize_h": h, "resize_w": w}, {}), sides, sides),
    st.builds(lambda size: ("ResizeShorter", {"size": size}, {}), sides),
    st.builds(lambda h, w: ("ResizePad", {"max_h": h, "max_w": w, "pad_value": 0}, {}), sides, sides),
    st.builds(lambda h, w: ("LetterBox", {"max_h": h, "max_w": w, "pad_value": 0}, {}), sides, sides),
    st.builds(lambda h, w: ("CenterCrop", {"crop_h": h, "crop_w": w}, {}), sides, sides),
    st.builds(lambda x, y: ("Crop", {}, {"box": [x, y, x + 18, y + 17]}), st.integers(0, 2), st.integers(0, 3)),
    st.builds(lambda h, w: ("DynamicResize", {"keep_aspect": True}, {"resize_h": h, "resize_w": w}), sides, sides),
)


def check_way(item: Data, mat: np.ndarray, size: tuple[int, int], coarsest: Any = 0) -> None:
    """Pixels of ``mat`` hold the coordinates that the way back gives for them, but where edges spread into them.

    A resize changes a ramp by a part of its pixels; ``coarsest`` is the largest scale that the image had on its way.
    """
    back = original.way_back(item, *mat.shape[:2])
    assert back.size == size
    inside = cv2.erode((mat[:, :, 0] > 0).astype(np.uint8), np.ones((7, 7), np.uint8), borderValue=0)
    ys, xs = np.nonzero(inside)
    found = back.points(np.stack([xs, ys], 1) + 0.5)
    off = np.abs(found - mat[ys, xs, :2])
    assert not len(off) or (np.quantile(off, 0.25, 0) <= 0.06 * np.maximum(back.scale, coarsest)).all()


@settings(max_examples=150, deadline=None)
@given(st.tuples(sides, sides), st.lists(STEPS, min_size=1, max_size=4), st.booleans())
def test_any_chain_of_operations_leads_back(size: tuple[int, int], steps: Any, on_mats: bool) -> None:
    tensor = ramp(*size)
    data: Any = tensor[0].permute(1, 2, 0).numpy().copy() if on_mats else tensor
    item: Data = {"data": data}
    coarsest = np.zeros(2)
    for name, params, keys in steps:
        if on_mats and name == "ResizeShorter":
            continue  # takes only uint8
        item.update(keys)
        with made(name + ("Mat" if on_mats else "Tensor"), **params) as backend:
            backend.forward([item])
        assert "error" not in item
        item["data"] = item.pop("result")
        mat = item["data"] if on_mats else item["data"][0].permute(1, 2, 0).numpy()
        coarsest = np.maximum(coarsest, original.way_back(item, *mat.shape[:2]).scale)
    if "image_size" in item:
        check_way(item, mat, size, coarsest)


def by_ultralytics(shape: tuple[int, int], boxes: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The formulas of ``scale_boxes`` in Ultralytics 8.4."""
    gain = min(shape[0] / size[0], shape[1] / size[1])
    new_h, new_w = (max(round(side * gain), 1) for side in size)
    pad_x, pad_y = round((shape[1] - new_w) / 2 - 0.1), round((shape[0] - new_h) / 2 - 0.1)
    scaled = (boxes - [pad_x, pad_y]) / [new_w / size[1], new_h / size[0]]
    return np.clip(scaled, 0, [size[1], size[0]])


@pytest.mark.parametrize("kind", ["Mat", "Tensor"])
def test_letterbox_leads_back_as_ultralytics_does(kind: str) -> None:
    rng = np.random.default_rng(0)
    for height, width in [(480, 640), (1, 700), (333, 500), *rng.integers(3, 900, (20, 2)).tolist()]:
        data: Any = np.zeros((height, width, 3), np.uint8)
        data = torch.from_numpy(data).permute(2, 0, 1)[None] if kind == "Tensor" else data
        item: Data = {"data": data}
        with made(f"LetterBox{kind}", max_h=320, max_w=352) as backend:
            backend.forward([item])
        points = rng.uniform(-20, 380, (50, 2))
        found = original.way_back(item, 320, 352).points(points)
        assert np.abs(found - by_ultralytics((320, 352), points, (height, width))).max() < 1e-6
        assert (
            np.abs([item["inverse_trans"](*point) for point in points[:3]] - back_unclipped(item, points[:3])).max()
            < 1e-6
        )


def back_unclipped(item: Data, points: np.ndarray) -> np.ndarray:
    scale_x, scale_y, left, top = item["to_original"]
    return points * [scale_x, scale_y] + [left, top]


# -- decoders ---------------------------------------------------------------------------------------------------------

TURNS = [1, 2, 3, 4, 5, 6, 7, 8]


def turned_jpeg(height: int, width: int, orientation: int) -> bytes:
    """A JPEG that a viewer shows with ``height`` × ``width`` pixels, stored turned by EXIF."""
    import io

    stored = (width, height) if orientation >= 5 else (height, width)
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(picture(*stored)).save(file, "jpeg", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_decoder_leaves_the_size_that_a_viewer_shows(isolation: str) -> None:
    with pipe({"backend": "DecodeMat", "decode_isolation": isolation}) as p:
        for turn in TURNS:
            item: Data = {"data": turned_jpeg(30, 47, turn), "to_original": (1.0, 1.0, 3.0, 4.0), "original": 1}
            p(item)
            assert item["image_size"] == (30, 47)
            assert "to_original" not in item
            assert "original" not in item


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_way_back_begins_at_the_decoded_image(isolation: str) -> None:
    config = {"backend": "S[DecodeMat,ResizeShorterMat,CenterCropMat,LetterBoxMat]", "decode_isolation": isolation}
    config |= {"size": 50, "crop_h": 40, "crop_w": 60, "max_h": 64, "max_w": 64}
    with pipe(config) as p:
        item: Data = {"data": turned_jpeg(100, 200, 6)}
        p(item)
    assert item["image_size"] == (100, 200)
    scale = 60 / 64 * 2
    assert item["to_original"] == pytest.approx((scale, 40 / 43 * 2, 2 * 20, 2 * 5 - 10 * 40 / 43 * 2))


def test_frame_of_a_video_is_the_original() -> None:
    item = run("S[DecodeMat,ResizeMat]", np.zeros((30, 40, 3), np.uint8), resize_h=15, resize_w=10)
    assert (item["image_size"], item["to_original"]) == ((30, 40), (4.0, 2.0, 0.0, 0.0))


def test_perspective_transform_makes_its_result_the_original() -> None:
    corners = [[1, 1], [21, 1], [21, 11], [1, 11]]
    item: Data = {"data": encode(picture(30, 40)), "box": corners}
    run("S[DecodeMat,PerspectiveTransformMat,ResizeMat]", item, resize_h=5, resize_w=5)
    assert (item["image_size"], item["to_original"]) == ((10, 20), (4.0, 2.0, 0.0, 0.0))


# -- unknown and invalid ways -----------------------------------------------------------------------------------------


def test_unknown_change_of_geometry_is_named_rather_than_ignored() -> None:
    item: Data = {"data": np.zeros((64, 64, 3), np.uint8), "image_size": (30, 40)}
    with pytest.raises(BackendError, match=r"of 40x30 pixels became one of 64x64, and nothing says how.*'to_original'"):
        original.way_back(item, 64, 64)
    with made("ResizeMat", resize_h=8, resize_w=8) as backend:
        backend.forward([item])
    assert item["to_original"] is None
    with pytest.raises(BackendError, match="nothing says how"):
        original.way_back(item, 8, 8)


class Parts:
    """Crops of a Tensor under ``result``."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = [item["data"][:, :, :9, :9], item["data"][:, :, 9:20, :30]]


class Halved:
    """Halves the sides of a Tensor, and does not say so."""

    def forward(self, items: list[Data]) -> None:
        for item in items:
            item["result"] = item["data"][:, :, ::2, ::2].contiguous()


def test_way_back_does_not_hold_for_an_image_of_another_size() -> None:
    registry = Registry()
    registry.register_backend(Halved, "Halved")
    letterbox = {"backend": "LetterBoxTensor", "max_h": 64, "max_w": 64}
    image = torch.zeros(1, 3, 240, 320)
    with pipe(letterbox) as p:
        p(used := {"data": image})
        assert original.way_back(used, 64, 64).scale == (5, 5)
        assert original.way_back(pickle.loads(pickle.dumps(used)), 64, 64).scale == (5, 5)
        again: Data = used | {"data": image}
        p(again)
    with pipe(letterbox | {"backend": "S[LetterBoxTensor,Python[Halved]]"}, registry=registry) as p:
        p(changed := {"data": image})
    graph: Any = {
        "letterbox": {**letterbox, "backend": "S[LetterBoxTensor,Python[Parts]]", "next": "each"},
        "each": {"backend": "MapReduce", "jump": "part", "merge": "result,to_original"},
        "part": {"backend": "ResizeTensor", "resize_h": 8, "resize_w": 8},
    }
    registry.register_backend(Parts, "Parts")
    with pipe(graph, registry=registry) as p:
        p(parts := {"data": image, "node_name": "letterbox"})
    assert parts["to_original"] == [None, None]
    for item, size in ((again, (64, 64)), (changed, (32, 32)), (used, (240, 320))):
        with pytest.raises(BackendError, match=r"nothing says how.*each image needs a dict of its own"):
            original.way_back(item, *size)
    changed["to_original"] = (10.0, 10.0, 0.0, -40.0)  # the backend says so
    assert original.way_back(changed, 32, 32).scale == (10, 10)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"image_size": [30]}, r"image_size must hold 2 finite numbers, got \[30\]"),
        ({"image_size": (30, 2**21)}, "image_size must be .height, width. of 1 to 1048576 pixels"),
        ({"image_size": [0, 4]}, "image_size must be"),
        ({"image_size": "x"}, "image_size must hold"),
        ({"image_size": [1.5, 4]}, "image_size must be"),
        ({"to_original": (1, 1, 0, 0)}, "image_size must hold 2 finite numbers, got None"),
        ({"image_size": (8, 8), "to_original": [1, 2, 3]}, "to_original must hold 4 finite numbers"),
        ({"image_size": (8, 8), "to_original": (1, 1, 0, float("nan"))}, "to_original must hold 4 finite numbers"),
        ({"image_size": (8, 8), "to_original": (1, -1, 0, 0)}, "scales must be above 0, got 1 and -1"),
    ],
)
def test_refuses_invalid_keys_of_a_client(keys: Data, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        original.way_back({"data": 1, **keys}, 8, 8)


def test_takes_the_way_back_of_a_client_that_made_the_letterbox_itself() -> None:
    for array in (np.array, torch.tensor, list):
        keys = {"image_size": array([100, 200]), "to_original": array([[2.0, 2.0, 0.0, -28.0]])}
        back = original.way_back(keys, 128, 100)
        assert (back.scale, back.offset, back.size) == ((2, 2), (0, -28), (100, 200))


# -- the original image -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Resize", "PillowResize", "ResizeShorter", "ResizePad", "LetterBox", "DynamicResize"])
@pytest.mark.parametrize("kind", ["Mat", "Tensor"])
def test_keeps_the_original_without_a_copy(name: str, kind: str) -> None:
    params = {"Resize": {"resize_h": 8, "resize_w": 9}, "ResizeShorter": {"size": 8}, "DynamicResize": {}}
    params["PillowResize"] = params["Resize"]
    mat = picture(20, 30)
    data: Any = mat if kind == "Mat" else torch.from_numpy(mat).permute(2, 0, 1)[None]
    item: Data = {"data": data, "resize_h": 8, "resize_w": 9}
    with made(name + kind, keep_original=True, **params.get(name, {"max_h": 8, "max_w": 9})) as backend:
        backend.forward([item])
        assert item["original"] is data
        assert item["original_color"] == ("bgr" if kind == "Mat" else "rgb")
        item["data"] = item["result"]
        backend.forward([item])
        assert item["original"] is data  # that before the first step


def test_keeps_no_original_unless_asked() -> None:
    assert "original" not in run("ResizeMat", picture(20, 30), resize_h=8, resize_w=9)


@pytest.mark.parametrize("isolation", ["none", "process"])
@pytest.mark.parametrize("color", ["bgr", "rgb"])
def test_map_of_the_original_has_its_colour(color: str, isolation: str) -> None:
    mat = picture(40, 50)
    png = encode(mat, ".png")
    tables: dict[str, Any] = {
        "first": {"backend": "S[DecodeMat,ResizeMat,cvtColorMat]", "resize_h": 8, "resize_w": 8, "color": color},
        "crop": {"backend": "S[CropMat,cvtColorMat]", "color": "bgr", "map": "first[original:data,box:box]"},
    }
    tables["first"] |= {"keep_original": True, "decode_isolation": isolation, "next": "crop"}
    with pipe(tables) as p:
        item: Data = {"data": png, "box": [10, 5, 30, 35]}
        p(item)
    assert np.array_equal(item["result"], mat[5:35, 10:30])
    assert (item["image_size"], item["to_original"]) == ((40, 50), (1.0, 1.0, 10.0, 5.0))
