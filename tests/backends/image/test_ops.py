"""Each operation against OpenCV, Pillow and torchvision, on Mats and on Tensors."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from conftest import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.image_backends import NO_MATS, Data, made, noise, refusal, run, to_mat, to_tensor
from kit.image_cases import BACKENDS, CASES, ON_MATS, ON_TENSORS, RESAMPLING, RESIZED, SIZES, Case, Size
from PIL import Image

from torchpipe_py import pipe
from torchpipe_py.backends.image import resampling


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(case: Case, kind: str, mat: np.ndarray, size: Size) -> None:
    """The result is the reference, to the bit or within ``off`` levels, in memory that is its own."""
    before = mat.copy()
    item: Data = {"data": mat if kind == "Mat" else to_tensor(mat), **case.keys(size)}
    with made(case.name + kind, **case.config(size)) as backend:
        backend.forward([item])
    wanted = case.reference(before, size)
    if kind == "Mat":
        assert item["result"].dtype == np.uint8
        assert np.array_equal(item["result"], wanted)
        return
    assert item["result"].dtype == (torch.float32 if case.to_float else torch.uint8)
    result = to_mat(item["result"].clamp(0, 255))
    assert result.shape == wanted.shape
    assert np.abs(result - wanted.astype(np.float64)).max() <= case.off
    item["result"].fill_(77)
    assert np.array_equal(to_mat(item["data"]), before)


@pytest.mark.parametrize(("case", "kind"), BACKENDS, ids=lambda value: str(value))
def test_gives_the_pixels_of_the_reference(case: Case, kind: str) -> None:
    for size, channels in product(SIZES, (1, 3)):
        check(case, kind, case.source(*size[:2], channels), size[2:])


@settings(max_examples=80)
@given(st.sampled_from(BACKENDS), st.tuples(*[st.integers(1, 90)] * 4), st.sampled_from((1, 3)), st.integers(0, 9))
def test_any_size_gives_the_pixels_of_the_reference(backend: Any, size: Any, channels: int, seed: int) -> None:
    case, kind = backend
    check(case, kind, case.source(*size[:2], channels, seed), size[2:])


DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64, torch.int64)


@pytest.mark.parametrize("case", ON_TENSORS, ids=str)
def test_resizes_tensors_of_other_dtypes(case: Case) -> None:
    """The results are those for 8 bits before rounding."""
    data = to_tensor(case.source(20, 30))
    if case.name == "PillowResize":
        for dtype in DTYPES[1:]:
            item: Data = {"data": data.to(dtype)}
            assert f"expected a Tensor of uint8, got {dtype}" in refusal("PillowResizeTensor", item, **RESIZED((7, 11)))
        return
    items = [{"data": data.to(dtype), **case.keys((9, 11))} for dtype in DTYPES]
    with made(f"{case.name}Tensor", **case.config((9, 11))) as backend:
        backend.forward(items)
    plain, *others = (item["result"] for item in items)
    assert [other.dtype for other in others] == [torch.float32 if case.to_float else dtype for dtype in DTYPES[1:]]
    most = case.off + 0.51 if case.name == "ResizeShorter" else 0
    assert all((other.double().clamp(0, 255) - plain.clamp(0, 255)).abs().max() <= most for other in others)


@pytest.mark.parametrize("case", ON_MATS, ids=str)
def test_resizes_mats_of_floats(case: Case) -> None:
    mat = noise(20, 30).astype(np.float32) / 7
    item: Data = {"data": mat, **case.keys((9, 11))}
    if case.name in ("PillowResize", "ResizeShorter"):
        assert "expected a Mat (uint8 array, HxWxC), got float32" in refusal(
            f"{case.name}Mat", item, **case.config((9, 11))
        )
        return
    result = run(f"{case.name}Mat", item, **case.config((9, 11)))["result"]
    assert result.dtype == np.float32
    assert np.abs(result * 7 - case.reference(noise(20, 30), (9, 11))).max() <= 800  # a padding is not divided
    assert not np.array_equal(result, np.round(result))


@pytest.mark.parametrize("case", ON_MATS, ids=str)
def test_mats_in_any_order_of_memory(case: Case) -> None:
    mat = noise(20, 30)
    for view in (mat[::-1], mat[:, :, ::-1], mat.transpose(1, 0, 2), mat[::2, ::3], mat[:, :, 0]):
        view.flags.writeable = False
        result = run(f"{case.name}Mat", {"data": view, **case.keys((5, 6))}, **case.config((5, 6)))["result"]
        assert np.array_equal(result, case.reference(np.ascontiguousarray(np.atleast_3d(view)), (5, 6)))
        assert result.flags.c_contiguous


@pytest.mark.parametrize("case", ON_TENSORS, ids=str)
def test_tensors_in_any_order_of_memory(case: Case) -> None:
    mat = noise(12, 10)
    with made(f"{case.name}Tensor", **case.config((5, 7))) as backend:
        views = [
            to_tensor(mat),
            torch.from_numpy(mat).permute(2, 0, 1)[None],
            to_tensor(np.repeat(np.repeat(mat, 2, 0), 2, 1))[:, :, ::2, ::2],
            to_tensor(mat).to(memory_format=torch.channels_last),
            to_tensor(mat)[0],
        ]
        backend.forward(items := [{"data": view, **case.keys((5, 7))} for view in views])
    for item in items[1:]:
        assert torch.equal(item["result"], items[0]["result"])


def test_a_mat_of_the_wanted_size_is_passed_on() -> None:
    mat = noise(20, 30)
    assert run("ResizeMat", mat, resize_h=20, resize_w=30)["result"] is mat
    assert run("DynamicResizeMat", {"data": mat, "resize_h": 20, "resize_w": 30})["result"] is mat
    assert run("ResizeShorterMat", mat, size=20)["result"] is mat
    assert not np.shares_memory(run("CropMat", {"data": mat, "box": [0, 0, 30, 20]})["result"], mat)
    assert not np.shares_memory(run("CenterCropMat", mat, crop_h=20, crop_w=30)["result"], mat)


# -- inverse_trans ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ResizePad", "LetterBox"])
@pytest.mark.parametrize("size", [(48, 64), (64, 48), (31, 64), (10, 7), (100, 33), (64, 64), (1000, 1)])
def test_inverse_trans_maps_the_corners_back(name: str, size: Size) -> None:
    item = run(f"{name}Mat", np.full((*size, 3), 255, np.uint8), max_h=64, max_w=64, pad_value=0)
    other = run(f"{name}Tensor", torch.full((1, 3, *size), 255, dtype=torch.uint8), max_h=64, max_w=64)
    rows, columns = np.nonzero(item["result"][:, :, 0])
    assert item["inverse_trans"](columns[0], rows[0]) == (0, 0)
    assert item["inverse_trans"](columns[-1] + 1, rows[-1] + 1) == pytest.approx((size[1], size[0]))
    assert other["inverse_trans"](3, 5) == item["inverse_trans"](3, 5)


# -- Pillow's order of passes, OpenCV's nearest -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "versions"),
    [
        ((60, 40), (39, 30), {(13, 0), (14, 1)}),
        ((60, 40), (40, 30), set()),
        ((60, 40), (60, 50), set()),
        ((60, 40), (61, 90), set()),
        ((301, 3), (200, 1), {(12, 2), (12, 3), (13, 0), (14, 1)}),
        ((300, 3), (299, 3), {(13, 0), (14, 1)}),
        ((301, 3), (300, 1), {(12, 2), (12, 3)}),
    ],
)
def test_pillow_resize_takes_the_passes_in_pillows_order(old: Size, new: Size, versions: set[Size]) -> None:
    every = [(10, 0), (11, 3), (12, 1), (12, 2), (12, 3), (13, 0), (14, 1)]
    assert {version for version in every if resampling.shrinks_height_first(old, new, version)} == versions
    check(CASES[5], "Tensor", noise(*old), new)


# -- what is refused --------------------------------------------------------------------------------------------------

NO_IMAGES = [b"bytes", noise(4, 4), torch.zeros(3), torch.zeros(2, 3, 4, 4), torch.zeros(1, 3, 0, 4), [torch.zeros(3)]]


@pytest.mark.parametrize(("case", "kind"), BACKENDS, ids=lambda value: str(value))
def test_rejects_values_that_are_not_images(case: Case, kind: str) -> None:
    with pipe({"backend": case.name + kind, **case.config((2, 2))}) as p:
        for data in NO_MATS if kind == "Mat" else NO_IMAGES:
            p(item := {"data": data, **case.keys((2, 2))})
            assert f"expected a {kind}" in str(item["error"])
            assert "result" not in item


def test_bounds_the_channels_of_a_request() -> None:
    many = 200_000
    for data, kind in ((np.zeros((1, 1, many), np.uint8), "Mat"), (torch.zeros(1, many, 2, 2), "Tensor")):
        for name, config in (("Resize", RESIZED((224, 224))), ("CenterCrop", {"crop_h": 224, "crop_w": 224})):
            assert "200000 channels are too many" in refusal(name + kind, data, **config)


@pytest.mark.parametrize("kind", ["Mat", "Tensor"])
def test_bounds_the_size_that_a_request_names(kind: str) -> None:
    def asked(height: Any, width: Any, channels: int, **config: Any) -> Data:
        mat = noise(2, 2, channels)
        data = mat if kind == "Mat" else to_tensor(mat)
        return run(f"DynamicResize{kind}", {"data": data, **RESIZED((height, width))}, **config)

    assert "result" in asked(10, 10, 1, max_pixels=100)
    assert "result" in asked(np.int64(10), torch.tensor([[10]]), 1), "a number in any array"
    assert str(asked(10, 10, 1, max_pixels=99)["error"]) == "10x10 pixels were asked for, more than max_pixels = 99"
    assert "25000x25000 pixels" in str(asked(25000, 25000, 3)["error"])
    if kind == "Mat":
        assert "4096x4096 pixels of 512 bytes" in str(asked(4096, 4096, 512)["error"])
        assert asked(1, 2**20, 1)["result"].shape == (1, 2**20, 1)
    line = np.zeros((1, 2000, 3), np.uint8)
    message = refusal(f"ResizeShorter{kind}", line if kind == "Mat" else to_tensor(line), size=256)
    assert message == "512000x256 pixels were asked for, more than max_pixels = 67108864"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (-3, "-3"), (2**20 + 1, "1048577"), (4.0, "4.0"), ("4", "'4'"), (None, "None"), (True, "True")),
        *(([4], "[4]"), (np.float32(4), "4.0"), (np.int64(0), "0"), (np.bool_(True), "True")),
        (torch.tensor([4, 4]), "[4, 4]"),
        pytest.param(10**5000, "a int", id="more digits than Python writes"),
    ],
)
def test_rejects_other_sides(value: Any, shown: str) -> None:
    for key in ("resize_h", "resize_w"):
        item = {"data": noise(8, 10), **RESIZED((4, 5)), key: value}
        message = f"{key} in the dict must be an integer from 1 to 1048576 (pixels), got {shown}"
        assert message in refusal("DynamicResizeMat", item)
        del item[key]
        assert f"the dict has no '{key}'" in refusal("DynamicResizeTensor", {**item, "data": to_tensor(noise(8, 10))})


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"top": -1}, "top in the dict must be an integer from 0 to 1048576"),
        ({"left": 1.5}, "left in the dict must be an integer"),
        ({"right": 2**20, "bottom": 2**20}, "more than max_pixels"),
    ],
)
def test_rejects_other_borders(sides: Data, message: str) -> None:
    assert message in refusal("CopyMakeBorderTensor", {"data": to_tensor(noise(8, 10)), **sides})


@pytest.mark.parametrize(
    ("box", "part"),
    [
        ([2, 1, 5, 4], (2, 1, 5, 4)),
        ((2, 1, 5, 4), (2, 1, 5, 4)),
        (np.array([1.6, 0.4, 5.2, 3.9], np.float32), (2, 0, 5, 4)),
        (torch.tensor([2, 1, 5, 4]), (2, 1, 5, 4)),
        ([np.float32(2.2), np.int64(1), 5, 4.0], (2, 1, 5, 4)),
        ([0.5, 1.5, 4.5, 5.5], (0, 2, 4, 6)),
        ([-7, -0.6, 99, 1e9], (0, 0, 10, 8)),
        ([9, 7, 10, 8], (9, 7, 10, 8)),
        (torch.tensor([[2, 1, 5, 4]], dtype=torch.int32), (2, 1, 5, 4)),
        ([np.array([2, 1, 5, 4])], (2, 1, 5, 4)),
    ],
)
def test_crops_to_a_box_of_any_kind(box: Any, part: tuple[int, int, int, int]) -> None:
    mat = noise(8, 10)
    left, top, right, bottom = part
    for item in (run("CropMat", {"data": mat, "box": box}), run("CropTensor", {"data": to_tensor(mat), "box": box})):
        result = item["result"]
        wanted = mat[top:bottom, left:right]
        assert np.array_equal(result if isinstance(result, np.ndarray) else to_mat(result), wanted)
        assert item["box"] is box


@pytest.mark.parametrize(
    "box",
    [
        *(None, [1, 2, 3], [1, 2, 3, 4, 5], "1234", 7, [7], np.zeros((1, 5)), [1, 2, 3, "4"], torch.tensor(3.0)),
        *(
            [0, 0, 5, math.nan],
            [0, 0, math.inf, 5],
            [[1, 2], [3, 4], [5, 6], [7, 8]],
            [[[1, 1, 3, 3]]],
            np.ones((2, 4)),
        ),
        *([5, 1, 5, 4], [5, 1, 2, 4], [2, 4, 5, 1], [10, 0, 12, 8], [0, -9, 10, 0], [1, 1, 1.4, 4]),
        *(pytest.param(box, id="long") for box in ([10**5000] * 4, list(range(10**6)), np.zeros(10**6), "x" * 10**6)),
    ],
    ids=str,
)
def test_rejects_boxes_that_cannot_be_cropped_to(box: Any) -> None:
    mat = noise(8, 10)
    message = refusal("CropMat", {"data": mat, "box": box})
    assert message.count("box") == 1
    assert "an image of 10x8 pixels" in message
    assert len(message) < 1000
    assert refusal("CropTensor", {"data": to_tensor(mat), "box": box}) == message


# -- torchvision ------------------------------------------------------------------------------------------------------


@pytest.fixture
def v2() -> Any:
    """``torchvision.transforms.v2``; one that is there and cannot be loaded is as good as none."""
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision: {error}")
    return v2


@pytest.mark.parametrize("interpolation", RESAMPLING)
@pytest.mark.parametrize("size", [(375, 500), (100, 75), (64, 64), (40, 500), (57, 224), (300, 401), (3, 4), (1, 1)])
def test_equals_torchvision_evaluation(v2: Any, size: Size, interpolation: str) -> None:
    """To the bit: of a PIL image, and of a tensor, which torchvision makes other pixels of."""
    mode = v2.InterpolationMode(interpolation)
    transform = v2.Compose([v2.Resize(256, interpolation=mode, antialias=True), v2.CenterCrop(224)])
    config = {"size": 256, "crop_h": 224, "crop_w": 224, "interpolation": interpolation}
    mat = picture(*size)
    result = run("S[ResizeShorterMat,CenterCropMat]", mat, **config)["result"]
    assert np.array_equal(result, np.asarray(transform(Image.fromarray(mat))))
    result = run("S[ResizeShorterTensor,CenterCropTensor]", to_tensor(mat), **config)["result"]
    assert torch.equal(result, transform(to_tensor(mat)))
