"""Backends on Tensors, against OpenCV, Pillow and their sisters on Mats; on the CPU."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import Register, picture
from fakes import Gate, outcome
from PIL import Image

from torchpipe_py import Backend, BackendError, ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.backends.image import files, resampling
from torchpipe_py.registry import default

Data = dict[str, Any]

FLAGS = {
    "nearest": cv2.INTER_NEAREST,
    "bilinear": cv2.INTER_LINEAR,
    "bicubic": cv2.INTER_CUBIC,
    "area": cv2.INTER_AREA,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(backend: str, data: Any, **config: Any) -> Data:
    """The dict after one request; data or a whole dict in, on the CPU even where there is a GPU."""
    item = data if isinstance(data, dict) else {"data": data}
    with pipe({"backend": backend, **config}) as p:
        p(item)
    return item


def refusal(backend: str, item: Data, **config: Any) -> str:
    """What the ``InvalidRequest`` says that is the item's outcome."""
    item = run(backend, item, **config)
    assert "result" not in item
    assert isinstance(item["error"], InvalidRequest)
    return str(item["error"])


@contextmanager
def made(name: str, **params: Any) -> Iterator[Backend]:
    """An instance of the class of that name, set up without a pipe."""
    cls = default.find_backend(name)
    assert cls is not None
    assert issubclass(cls, Backend)
    defaults = {key: param.default for key, param in cls.parameters().items()}
    backend: Backend = cls(BackendConfig(params={**defaults, **params}))
    backend.setup()
    try:
        yield backend
    finally:
        backend.close()


def direct(name: str, data: Any, **params: Any) -> Data:
    """The dict after one request, or the dict that is ``data``, to an instance without a pipe."""
    item = data if isinstance(data, dict) else {"data": data}
    with made(name, **params) as backend:
        backend.forward([item])
    return item


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """A Mat without anything smooth in it."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def to_tensor(mat: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mat.transpose(2, 0, 1)[None].copy())


def to_mat(tensor: torch.Tensor) -> np.ndarray:
    return tensor[0].permute(1, 2, 0).numpy()


def sizes(count: int, seed: int, most: int = 90) -> list[tuple[int, int, int, int]]:
    """Height and width before and after: up, down, mixed, one pixel wide, one side unchanged."""
    rng = np.random.default_rng(seed)
    sizes = [tuple(int(side) for side in rng.integers(1, most, 4)) for _ in range(count)]
    sizes += [(1, 1, 7, 5), (1, 40, 9, 3), (40, 1, 3, 9), (30, 50, 1, 1), (20, 30, 20, 7), (20, 30, 7, 30)]
    return [*sizes, (20, 30, 40, 60), (40, 60, 20, 30), (20, 30, 20, 30), (2, 300, 300, 2)]


# -- colors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cvtColorTensor", "CvtColorTensor"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_color_is_converted_only_if_it_differs(name: str, dtype: torch.dtype) -> None:
    tensor = to_tensor(noise(4, 6)).to(dtype)
    for given in ({"data": tensor}, {"data": tensor, "color": "rgb"}):
        other = run(name, dict(given), color="bgr")
        assert torch.equal(other["result"], tensor[:, [2, 1, 0]])
        assert other["color"] == "bgr"
        same = run(name, dict(given), color="RGB")
        assert torch.equal(same["result"], tensor)
        assert same["color"] == "rgb"
    assert torch.equal(run(name, {"data": tensor, "color": "bgr"}, color="bgr")["result"], tensor)


@pytest.mark.parametrize("channels", [2, 4])
def test_only_one_channel_and_three_have_a_color(channels: int) -> None:
    item = {"data": to_tensor(noise(4, 6, channels))}
    assert f"needs a Tensor of 1 or 3 channels, got {channels}" in refusal("cvtColorTensor", item, color="rgb")


RED = np.full((4, 6, 3), (255, 0, 0), np.uint8)  # in RGB


@pytest.mark.parametrize("backend", ["S[cvtColorMat,Mat2Tensor,cvtColorTensor]", "S[Mat2Tensor,cvtColorTensor]"])
def test_a_mat_without_color_is_bgr_as_a_tensor_too(backend: str) -> None:
    config = {"cvtColorMat::color": "bgr"} if "cvtColorMat" in backend else {}
    item = run(backend, RED[:, :, ::-1].copy(), **config, **{"cvtColorTensor::color": "rgb"})
    assert np.array_equal(to_mat(item["result"].cpu()), RED)
    assert item["color"] == "rgb"


def test_a_tensor_without_color_is_rgb_as_a_mat_too(tmp_path: Path) -> None:
    item = run("S[Tensor2Mat,SaveMat]", to_tensor(RED), save_dir=str(tmp_path))
    with Image.open(item["saved"]) as image:
        assert np.array_equal(np.asarray(image), RED)
    item = run("S[Tensor2Mat,cvtColorMat]", to_tensor(RED), color="bgr")
    assert np.array_equal(item["result"], RED[:, :, ::-1])
    assert item["color"] == "bgr"


@pytest.mark.parametrize(("channels", "named"), [(1, False), (2, False), (3, True), (4, True), (6, False)])
def test_an_image_that_becomes_another_kind_says_what_it_holds(channels: int, named: bool) -> None:
    mat = noise(4, 6, channels)
    for backend, data, color in (("Mat2Tensor", mat, "bgr"), ("Tensor2Mat", to_tensor(mat), "rgb")):
        config = {"data_format": "chw"} if backend == "Tensor2Mat" else {}
        assert run(backend, data, **config).get("color") == (color if named else None)
        other = "rgb" if color == "bgr" else "bgr"
        assert run(backend, {"data": data, "color": other}, **config)["color"] == other


@pytest.mark.parametrize("color", ["gray", "RGB", "hsv", None])
@pytest.mark.parametrize("backend", ["cvtColorMat", "cvtColorTensor", "SaveMat"])
def test_a_color_that_is_no_channel_order(backend: str, color: str | None, tmp_path: Path) -> None:
    config = {"save_dir": str(tmp_path)} if backend == "SaveMat" else {"color": "rgb"}
    data = to_tensor(RED) if backend == "cvtColorTensor" else RED
    message = refusal(backend, {"data": data, "color": color}, **config)
    assert message == f"color {color!r} of an image of 3 channels; expected bgr or rgb"


@pytest.mark.parametrize(
    ("color", "shown"),
    [(np.array(["rgb", "bgr"]), "a ndarray"), (bytes(10**7), "a bytes"), (10**5000, "a int"), ("r" * 10**7, "'rrrr")],
    ids=["an array", "bytes", "a number", "a text"],
)
def test_a_color_is_shown_in_few_words(color: Any, shown: str) -> None:
    message = refusal("cvtColorMat", {"data": RED, "color": color}, color="rgb")
    assert message.startswith(f"color {shown}")
    assert len(message) < 200


@pytest.mark.parametrize("color", ["bgr", "rgb"])
def test_gray_is_opencvs_to_the_bit(color: str) -> None:
    mat = noise(40, 50)
    item = run("cvtColorTensor", {"data": to_tensor(mat), "color": color}, color="gray")
    flag = cv2.COLOR_BGR2GRAY if color == "bgr" else cv2.COLOR_RGB2GRAY
    assert (item["result"].dtype, item["color"]) == (torch.uint8, "gray")
    assert np.array_equal(to_mat(item["result"])[:, :, 0], cv2.cvtColor(mat, flag))
    floats = run("cvtColorTensor", {"data": to_tensor(mat).float() / 255, "color": color}, color="gray")["result"]
    assert np.allclose(to_mat(floats)[:, :, 0], cv2.cvtColor(mat.astype(np.float32) / 255, flag), atol=1e-6)
    back = run("cvtColorTensor", {"data": item["result"]}, color="rgb")["result"]
    assert torch.equal(back, item["result"].expand(1, 3, 40, 50))


# -- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", FLAGS)
@pytest.mark.parametrize("size", sizes(25, seed=1))
def test_resize_is_opencvs(interpolation: str, size: tuple[int, int, int, int]) -> None:
    height, width, new_h, new_w = size
    mat = noise(height, width)
    config = {"resize_h": new_h, "resize_w": new_w, "interpolation": interpolation}
    result = direct("ResizeTensor", to_tensor(mat), **config)["result"]
    assert (result.dtype, tuple(result.shape)) == (torch.float32, (1, 3, new_h, new_w))
    wanted = cv2.resize(mat, (new_w, new_h), interpolation=FLAGS[interpolation]).reshape(new_h, new_w, 3)
    difference = np.abs(to_mat(result.clamp(0, 255)) - wanted).max()
    assert difference == 0 if interpolation == "nearest" else difference <= 1


def test_nearest_misses_no_pixel() -> None:
    """PyTorch's own differs from OpenCV at sizes such as 49 to 7 times as much."""
    for width in range(1, 130, 3):
        row = np.arange(width, dtype=np.uint8)[None, :, None]
        for wanted in range(1, 130, 2):
            config = {"resize_h": 1, "resize_w": wanted, "interpolation": "nearest"}
            result = direct("ResizeTensor", to_tensor(row), **config)["result"]
            expected = cv2.resize(row, (wanted, 1), interpolation=cv2.INTER_NEAREST)
            assert np.array_equal(result.numpy().ravel(), expected.ravel()), (width, wanted)


@pytest.mark.parametrize("interpolation", FLAGS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.int64])
def test_resize_takes_any_real_dtype(interpolation: str, dtype: torch.dtype) -> None:
    tensor = to_tensor(noise(9, 14, 2))
    config = {"resize_h": 5, "resize_w": 20, "interpolation": interpolation}
    result = run("ResizeTensor", tensor.to(dtype), **config)["result"]
    assert result.dtype == torch.float32
    assert torch.equal(result, run("ResizeTensor", tensor, **config)["result"])


@pytest.mark.parametrize("interpolation", FLAGS)
def test_images_of_one_size_are_resized_by_one_call_inside_a_sequence_too(
    interpolation: str, monkeypatch: pytest.MonkeyPatch, register: Register
) -> None:
    held = to_tensor(noise(5, 5, 3))
    gate = Gate(8, blocks=lambda data: data is held)

    class Eight(gate.backend):  # type: ignore[misc,name-defined]
        def batch_key(self, item: Data) -> Hashable:
            return None

    calls: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: calls.append(len(tensors)) or cat(tensors))
    monkeypatch.setattr(
        "torchpipe_py.backends.image.ops.TOGETHER", 3 * 3 * 20 * 30
    )  # values: three of the larger images
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # as on a GPU
    images = [to_tensor(noise(*((20, 30), (9, 14))[number % 2], 3)) for number in range(8)]
    config = {"resize_h": 7, "resize_w": 11, "interpolation": interpolation}
    items = [{"data": image} for image in images]
    with pipe({"backend": f"S[{register(Eight)},ResizeTensor]", **config}) as p, gate:
        gate.hold(p, {"data": held})  # the others make one batch behind it
        futures = [p.submit(item) for item in items]
        gate.open()
        for future in futures:
            outcome(future)
    assert sorted(calls) == [3, 4]
    monkeypatch.setattr("torchpipe_py.backends.image.ops.TOGETHER", 3)  # none fits
    calls.clear()
    with made("ResizeTensor", **config) as backend:
        backend.forward([{"data": image} for image in images])
    assert calls == []
    monkeypatch.undo()
    for item, image in zip(items, images, strict=True):
        assert torch.equal(item["result"], direct("ResizeTensor", image, **config)["result"])


def test_on_the_cpu_each_image_is_resized_alone_and_has_its_own_memory() -> None:
    items = [{"data": to_tensor(noise(20, 30, 3))} for _ in range(4)]
    with made("ResizeTensor", resize_h=7, resize_w=11) as backend:
        backend.forward(items)
    assert all(item["result"].untyped_storage().nbytes() == 4 * 3 * 7 * 11 for item in items)


def test_resize_keeps_what_is_between_the_levels() -> None:
    tensor = torch.tensor([[[[0.0, 0.25]]]])
    result = run("ResizeTensor", tensor, resize_h=1, resize_w=4)["result"]
    assert result.flatten().tolist() == [0.0, 0.0625, 0.1875, 0.25]


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("ResizeShorterTensor", {"size": 4}),
        ("CenterCropTensor", {"crop_h": 4, "crop_w": 6}),
        ("CopyMakeBorderTensor", {}),
        ("ResizeTensor", {"resize_h": 4, "resize_w": 6}),
        ("PillowResizeTensor", {"resize_h": 4, "resize_w": 6}),
        ("ResizePadTensor", {"max_h": 4, "max_w": 6}),
        ("CropTensor", {}),
        ("Tensor2Mat", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_result_never_shares_memory(backend: str, config: Data, dtype: torch.dtype, channels: int) -> None:
    if backend == "PillowResizeTensor" and dtype != torch.uint8:
        return
    tensor = to_tensor(noise(4, 6, channels)).to(dtype)
    before = tensor.clone()
    result = run(backend, {"data": tensor, "box": [0, 0, 6, 4]}, **config)["result"]
    assert np.array_equal(to_mat(before), result if backend == "Tensor2Mat" else to_mat(result))
    result[...] = 77
    assert torch.equal(tensor, before)


def test_an_image_without_its_batch_dimension() -> None:
    tensor = to_tensor(noise(9, 14))
    assert run("ResizeTensor", tensor[0], resize_h=3, resize_w=4)["result"].shape == (1, 3, 3, 4)
    assert run("PillowResizeTensor", tensor[0], resize_h=3, resize_w=4)["result"].shape == (1, 3, 3, 4)


def strided(mat: np.ndarray) -> Iterator[torch.Tensor]:
    yield torch.from_numpy(mat).permute(2, 0, 1)[None]
    yield to_tensor(np.repeat(np.repeat(mat, 2, 0), 2, 1))[:, :, ::2, ::2]
    yield to_tensor(mat).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("backend", ["ResizeTensor", "PillowResizeTensor", "CropTensor", "Tensor2Mat"])
def test_memory_in_any_order(backend: str) -> None:
    mat = noise(12, 10)
    config = {"resize_h": 5, "resize_w": 7} if "Resize" in backend else {}
    wanted = run(backend, {"data": to_tensor(mat), "box": [1, 2, 7, 9]}, **config)["result"]
    for tensor in strided(mat):
        result = run(backend, {"data": tensor, "box": [1, 2, 7, 9]}, **config)["result"]
        assert np.array_equal(np.asarray(result), np.asarray(wanted))
        assert backend != "Tensor2Mat" or result.flags.c_contiguous
        assert backend != "CropTensor" or result.is_contiguous()


@pytest.mark.parametrize("size", sizes(60, seed=2))
def test_pillow_resize_is_pillows_to_the_bit(size: tuple[int, int, int, int]) -> None:
    height, width, new_h, new_w = size
    for mat in (noise(height, width), noise(height, width, 1) // 128 * 255):
        result = direct("PillowResizeTensor", to_tensor(mat), resize_h=new_h, resize_w=new_w)["result"]
        image = Image.fromarray(mat if mat.shape[2] == 3 else mat[:, :, 0])
        wanted = np.asarray(image.resize((new_w, new_h), Image.Resampling.BILINEAR)).reshape(new_h, new_w, -1)
        assert result.dtype == torch.uint8
        assert np.array_equal(to_mat(result), wanted)


@pytest.mark.parametrize(
    "size",
    # 13.0 shrinks the height first where it loses more than twice what the width loses, 12.2 above 100 to 1.
    [
        *((60, 40, 40, 30), (60, 40, 39, 30), (60, 40, 41, 30), (60, 40, 59, 41), (20, 30, 21, 60)),
        *((201, 2, 50, 3), (200, 2, 50, 1), (301, 3, 200, 1), (301, 3, 224, 224)),
    ],
)
def test_pillow_resize_takes_the_passes_in_pillows_order(size: tuple[int, int, int, int]) -> None:
    for seed in range(4):
        mat = noise(*size[:2], 3, seed)
        result = direct("PillowResizeTensor", to_tensor(mat), resize_h=size[2], resize_w=size[3])["result"]
        wanted = np.asarray(Image.fromarray(mat).resize(size[:1:-1], Image.Resampling.BILINEAR))
        assert np.array_equal(to_mat(result), wanted)


@pytest.mark.parametrize(
    ("old", "new", "versions"),
    [
        ((60, 40), (39, 30), {(13, 0), (14, 1)}),
        ((60, 40), (40, 30), set()),
        ((60, 40), (59, 40), {(13, 0), (14, 1)}),
        ((60, 40), (60, 50), set()),
        ((60, 40), (61, 90), set()),
        ((301, 3), (200, 1), {(12, 2), (12, 3), (13, 0), (14, 1)}),
        ((300, 3), (299, 3), {(13, 0), (14, 1)}),
        ((301, 3), (300, 1), {(12, 2), (12, 3)}),
    ],
)
def test_the_order_of_passes_by_version(
    old: tuple[int, int], new: tuple[int, int], versions: set[tuple[int, int]]
) -> None:
    every = [(10, 0), (11, 3), (12, 1), (12, 2), (12, 3), (13, 0), (14, 1)]
    assert {version for version in every if resampling.shrinks_height_first(old, new, version)} == versions


@pytest.mark.parametrize("size", [(375, 500, 224, 224), (1200, 1600, 256, 341), (100, 75, 999, 1001)])
def test_pillow_resize_of_pictures(size: tuple[int, int, int, int]) -> None:
    mat = noise(*size[:2])
    config = {"resize_h": size[2], "resize_w": size[3]}
    result = run("S[Mat2Tensor,PillowResizeTensor,Tensor2Mat]", mat, **config)["result"]
    assert np.array_equal(result, run("PillowResizeMat", mat, **config)["result"])


def test_pillow_resize_of_many_sizes_in_one_instance() -> None:
    """More than are kept, and each twice."""
    with made("PillowResizeTensor", resize_h=8, resize_w=9) as resize:
        for width in (*range(2, 90), *range(89, 1, -1)):
            mat = noise(5, width, 3, seed=width)
            item: Data = {"data": to_tensor(mat)}
            resize.forward([item])
            wanted = np.asarray(Image.fromarray(mat).resize((9, 8), Image.Resampling.BILINEAR))
            assert np.array_equal(to_mat(item["result"]), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
def test_pillow_resize_takes_8_bits_only(dtype: torch.dtype) -> None:
    item: Data = {"data": torch.zeros(1, 3, 4, 4, dtype=dtype)}
    assert f"expected a Tensor of uint8, got {dtype}" in refusal("PillowResizeTensor", item, resize_h=2, resize_w=2)


@pytest.mark.parametrize("interpolation", FLAGS)
@pytest.mark.parametrize("size", [*sizes(8, seed=3), (1000, 1, 10, 10), (7, 5, 7, 5), (10, 10, 10, 30)])
def test_resize_pad_is_that_of_mats(interpolation: str, size: tuple[int, int, int, int]) -> None:
    mat = noise(*size[:2])
    config = {"max_h": size[2], "max_w": size[3], "pad_value": 114, "interpolation": interpolation}
    item, other = run("ResizePadTensor", to_tensor(mat), **config), run("ResizePadMat", mat, **config)
    result = item["result"]
    assert (result.dtype, tuple(result.shape)) == (torch.float32, (1, 3, *size[2:]))
    assert np.abs(to_mat(result.clamp(0, 255)) - other["result"]).max() <= 1
    for point in ((0, 0), (3, 5), (0.5, 100)):
        assert item["inverse_trans"](*point) == other["inverse_trans"](*point)


@pytest.mark.parametrize("size", [*sizes(8, seed=4), (10, 10, 10, 13), (7, 5, 7, 5)])
def test_letter_box_is_that_of_mats(size: tuple[int, int, int, int]) -> None:
    mat = noise(*size[:2])
    config = {"max_h": size[2], "max_w": size[3]}
    item, other = run("LetterBoxTensor", to_tensor(mat), **config), run("LetterBoxMat", mat, **config)
    assert (item["result"].dtype, tuple(item["result"].shape)) == (torch.float32, (1, 3, *size[2:]))
    assert np.abs(to_mat(item["result"].clamp(0, 255)) - other["result"]).max() <= 1
    assert item["inverse_trans"](3, 5) == other["inverse_trans"](3, 5)


@pytest.mark.parametrize("keep_aspect", [False, True])
@pytest.mark.parametrize("size", [(12, 40), (40, 12), (20, 30)])
def test_dynamic_resize_is_that_of_mats(size: tuple[int, int], keep_aspect: bool) -> None:
    mat = noise(20, 30)
    config = {"keep_aspect": keep_aspect, "pad_value": 7}
    sides = {"resize_h": size[0], "resize_w": size[1]}
    result = run("DynamicResizeTensor", {"data": to_tensor(mat), **sides}, **config)["result"]
    assert (result.dtype, tuple(result.shape)) == (torch.float32, (1, 3, *size))
    wanted = run("DynamicResizeMat", {"data": mat, **sides}, **config)["result"]
    assert np.abs(to_mat(result) - wanted).max() <= 1


def test_a_dynamic_resize_is_bounded() -> None:
    item: Data = {"data": to_tensor(noise(4, 4, 1)), "resize_h": 10, "resize_w": 10}
    assert run("DynamicResizeTensor", dict(item), max_pixels=100)["result"].shape == (1, 1, 10, 10)
    assert "more than max_pixels = 99" in refusal("DynamicResizeTensor", dict(item), max_pixels=99)
    assert "the dict has no 'resize_h'" in refusal("DynamicResizeTensor", {"data": item["data"]})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_border_by_parameters_and_by_the_dict(dtype: torch.dtype) -> None:
    mat = noise(8, 10)
    sides: Data = {"top": 5, "bottom": 15, "left": 25, "right": 35}
    wanted = cv2.copyMakeBorder(mat, 5, 15, 25, 35, cv2.BORDER_CONSTANT, value=[0, 0, 0])
    tensor = to_tensor(mat).to(dtype)
    for item, config in (({}, sides), (sides, {}), (sides, {"top": 1, "right": 2})):
        result = run("CopyMakeBorderTensor", {"data": tensor, **item}, **config)["result"]
        assert result.dtype == dtype
        assert np.array_equal(to_mat(result), wanted)
    filled = run("CopyMakeBorderTensor", tensor, left=1, pad_value=114)["result"]
    assert set(filled[:, :, :, 0].flatten().tolist()) == {114}
    assert torch.equal(filled[:, :, :, 1:], tensor)


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ({"top": -1}, "top in the dict must be an integer from 0 to 1048576"),
        ({"left": 1.5}, "left in the dict must be an integer"),
        ({"right": 2**20, "bottom": 2**20}, "more than max_pixels"),
    ],
)
def test_a_border_that_is_none(sides: Data, message: str) -> None:
    assert message in refusal("CopyMakeBorderTensor", {"data": to_tensor(noise(8, 10)), **sides})


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        ("ResizeTensor", {"resize_h": 0, "resize_w": 3}, "resize_h.*at least 1"),
        ("ResizeTensor", {"resize_h": 3}, "resize_w.*needs it"),
        ("ResizeTensor", {"resize_h": 3, "resize_w": 3, "interpolation": "lanczos"}, "expected one of nearest"),
        ("PillowResizeTensor", {"resize_h": 3, "resize_w": "wide"}, "expected an integer"),
        ("ResizePadTensor", {"max_h": 3, "max_w": 3, "pad_value": 256}, "pad_value.*at most 255"),
        ("cvtColorTensor", {"color": "hsv"}, "expected one of bgr, rgb, gray"),
        ("SaveTensor", {}, "save_dir.*needs it"),
        ("SaveMat", {}, "save_dir.*needs it"),
        ("LoadTensor", {"tensor_name": "nowhere.pt"}, "no such file: nowhere.pt"),
    ],
)
def test_a_wrong_parameter_is_refused(backend: str, config: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe({"backend": backend, **config})


IMAGE_BACKENDS: dict[str, Data] = {
    "cvtColorTensor": {"color": "rgb"},
    "ResizeTensor": {"resize_h": 2, "resize_w": 2},
    "PillowResizeTensor": {"resize_h": 2, "resize_w": 2},
    "ResizePadTensor": {"max_h": 2, "max_w": 2},
    "CropTensor": {},
    "Tensor2Mat": {},
}


@pytest.mark.parametrize("backend", IMAGE_BACKENDS)
@pytest.mark.parametrize(
    "data",
    [
        b"bytes",
        noise(4, 4),
        torch.zeros(3),
        torch.zeros(2, 3, 4, 4),
        torch.zeros(1, 3, 0, 4),
        [torch.zeros(1, 3, 4, 4)],
    ],
    ids=["bytes", "mat", "vector", "batch", "empty", "list"],
)
def test_things_that_are_no_image(backend: str, data: Any) -> None:
    item = {"data": data, "box": [0, 0, 1, 1]}
    assert "expected a Tensor" in refusal(backend, item, **IMAGE_BACKENDS[backend])


# -- crops --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "part"),
    [
        ([2, 1, 5, 4], (2, 1, 5, 4)),
        ((0, 0, 10, 8), (0, 0, 10, 8)),
        (np.array([2, 1, 5, 4]), (2, 1, 5, 4)),
        (np.array([1.6, 0.4, 5.2, 3.9], np.float32), (2, 0, 5, 4)),
        (torch.tensor([2, 1, 5, 4]), (2, 1, 5, 4)),
        (torch.tensor([1.6, 0.4, 5.2, 3.9]), (2, 0, 5, 4)),
        ([np.float32(2.2), np.int64(1), 5, 4.0], (2, 1, 5, 4)),
        ([-7, -0.6, 99, 1e9], (0, 0, 10, 8)),
        ([9, 7, 10, 8], (9, 7, 10, 8)),
    ],
)
def test_crop(box: Any, part: tuple[int, int, int, int]) -> None:
    tensor = to_tensor(noise(8, 10))
    left, top, right, bottom = part
    for through in (run, direct):
        item = through("CropTensor", {"data": tensor, "box": box})
        assert torch.equal(item["result"], tensor[:, :, top:bottom, left:right])
        assert item["result"].dtype == torch.uint8
        assert item["box"] is box


@pytest.mark.parametrize(
    "box", [[5, 1, 5, 4], [5, 1, 2, 4], [2, 4, 5, 1], [10, 0, 12, 8], [0, -9, 10, 0], [1, 1, 1.4, 4]]
)
def test_a_box_that_leaves_nothing(box: list[float]) -> None:
    assert re.search(
        r"box \[.*\] \(left, .*leaves no pixel of an image of 10x8 pixels",
        refusal("CropTensor", {"data": to_tensor(noise(8, 10)), "box": box}),
    )


@pytest.mark.parametrize(
    "box",
    [[1, 2, 3], [1, 2, 3, 4, 5], "1234", 7, torch.zeros(2, 4), torch.tensor(3.0), [1, 2, 3, "4"], [0, 0, 5, np.nan]],
)
def test_a_box_that_is_no_box(box: Any) -> None:
    assert re.search(
        r"box must hold 4 numbers, left, .* got .* 10x8 pixels",
        refusal("CropTensor", {"data": to_tensor(noise(8, 10)), "box": box}),
    )


@pytest.mark.parametrize("others", [{}, {"box": None}])
def test_a_dict_without_a_box(others: Data) -> None:
    assert re.search(
        r"no 'box' = .* an image of 10x8 pixels", refusal("CropTensor", {"data": to_tensor(noise(8, 10)), **others})
    )


# -- to Mats and lists --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 6])
def test_a_mat_there_and_back(channels: int) -> None:
    mat = noise(7, 9, channels)
    item = run("S[Mat2Tensor,Tensor2Mat]", {"data": mat, "color": "rgb"})
    assert np.array_equal(item["result"], mat)
    assert (item["result"].dtype, item["result"].flags.c_contiguous) == (np.uint8, True)
    assert item["result"].flags.writeable
    assert item["color"] == "rgb"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floats_keep_their_values(dtype: torch.dtype) -> None:
    values = [-300.0, -0.375, 0.0078125, 0.5, 254.5, 1000.0]
    tensor = torch.tensor(values, dtype=dtype)
    result = run("Tensor2Mat", tensor.reshape(1, 1, 2, 3))["result"]
    assert (result.dtype, result.shape) == (np.float32, (2, 3, 1))
    assert result.ravel().tolist() == tensor.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_floats_are_rounded_and_clamped_where_asked(dtype: torch.dtype) -> None:
    tensor = torch.tensor([-300.0, -0.4, 0.5, 1.5, 1.6, 254.4, 255.6, 1000.0, float("inf")], dtype=dtype)
    result = run("Tensor2Mat", tensor.reshape(1, 1, 3, 3), dtype="uint8")["result"]
    assert result.dtype == np.uint8
    assert result.ravel().tolist() == [0, 0, 0, 2, 2, 254, 255, 255, 255]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64])
def test_integers_that_fit_are_eight_bits(dtype: torch.dtype) -> None:
    values = [0, 1, 1] if dtype == torch.bool else [0, 17, 255]
    result = run("Tensor2Mat", torch.tensor([[[values]]], dtype=dtype))["result"]
    assert (result.dtype, result.ravel().tolist()) == (np.uint8, values)


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.int8, [-5, 127]), (torch.int64, [0, 256]), (torch.int32, [-1, 3])]
)
def test_integers_that_do_not_fit_are_refused_or_clamped(dtype: torch.dtype, values: list[int]) -> None:
    tensor = torch.tensor([[[values]]], dtype=dtype)
    low, high = values
    message = refusal("Tensor2Mat", {"data": tensor})
    assert message == f'a Mat holds 0..255 or floats, the Tensor of {dtype} {low}..{high}; dtype = "uint8" clamps them'
    clamped = run("Tensor2Mat", tensor, dtype="uint8")["result"]
    assert clamped.ravel().tolist() == [min(max(value, 0), 255) for value in values]


def test_a_result_with_a_gradient_becomes_a_mat() -> None:
    tensor = torch.full((1, 3, 2, 2), 7.0, requires_grad=True)
    assert run("Tensor2Mat", tensor)["result"].tolist() == [[[7] * 3] * 2] * 2


def scores(channels: int = 3) -> np.ndarray:
    """A Mat of values that 8 bits would lose."""
    return np.random.default_rng(1).random((8, 10, channels), np.float32) - np.float32(0.5)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_float_mat_there_and_back(channels: int) -> None:
    mat = scores(channels)
    item = run("S[Mat2Tensor,Tensor2Mat]", mat)
    assert item["result"].dtype == np.float32
    assert np.array_equal(item["result"], mat)


@pytest.mark.parametrize(
    ("backend", "config", "wanted"),
    [
        ("ResizeMat", {"resize_h": 5, "resize_w": 7}, lambda mat: cv2.resize(mat, (7, 5))),
        ("DynamicResizeMat", {}, lambda mat: cv2.resize(mat, (7, 5))),
        ("CropMat", {}, lambda mat: mat[2:6, 1:9]),
        ("ResizePadMat", {"max_h": 8, "max_w": 12}, lambda mat: np.pad(mat, ((0, 0), (0, 2), (0, 0)))),
        ("AlignMat", {"resize_h": 32, "max_w": 64}, lambda mat: mat),
        ("cvtColorMat", {"color": "rgb"}, lambda mat: mat[:, :, ::-1]),
    ],
)
def test_backends_on_mats_keep_floats(backend: str, config: Data, wanted: Any) -> None:
    mat = scores()
    item = run(backend, {"data": mat, "box": [1, 2, 9, 6], "resize_h": 5, "resize_w": 7}, **config)
    assert item["result"].dtype == np.float32
    assert np.array_equal(item["result"], wanted(mat))


def test_a_perspective_of_floats() -> None:
    mat = scores()
    result = run("PerspectiveTransformMat", {"data": mat, "box": [[1, 2], [9, 2], [9, 6], [1, 6]]})["result"]
    assert result.dtype == np.float32
    assert np.allclose(result, mat[2:6, 1:9], atol=1e-6)


@pytest.mark.parametrize("backend", ["SaveMat", "PillowResizeMat"])
def test_what_needs_eight_bits_says_so(backend: str, tmp_path: Path) -> None:
    config = {"save_dir": str(tmp_path)} if backend == "SaveMat" else {"resize_h": 5, "resize_w": 7}
    message = refusal(backend, {"data": scores()}, **config)
    assert message == "expected a Mat (uint8 array, HxWxC), got float32 array of shape (8, 10, 3)"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (1, 1, 2, 3), (3, 2)])
def test_vector(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    result = run("Tensor2Vector", torch.arange(6).to(dtype).reshape(shape))["result"]
    assert result == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(type(value) is float for value in result)


def test_a_vector_keeps_float32_and_row_major_order() -> None:
    tensor = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)).T
    assert run("Tensor2Vector", tensor)["result"] == [float(value) for value in tensor.contiguous().numpy().ravel()]
    assert run("Tensor2Vector", torch.zeros(0))["result"] == []


@pytest.mark.parametrize("backend", ["Tensor2Vector", "SaveTensor"])
@pytest.mark.parametrize("data", [b"bytes", np.zeros(3), [torch.zeros(3)], None])
def test_things_that_are_no_tensor(backend: str, data: Any, tmp_path: Path) -> None:
    config = {"save_dir": str(tmp_path)} if backend == "SaveTensor" else {}
    assert "expected a Tensor" in refusal(backend, {"data": data}, **config)


# -- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (1, 3, 4, 6), ()])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_a_tensor_saved_and_loaded(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.rand(shape).mul(200).to(dtype)
    item = run("SaveTensor", tensor, save_dir=str(tmp_path / "new" / "folder"))
    assert item["result"] is tensor
    assert Path(item["saved"]).parent == tmp_path / "new" / "folder"
    loaded = run("LoadTensor", None, tensor_name=item["saved"])["result"].cpu()
    assert torch.equal(loaded, tensor)
    assert loaded.dtype == dtype


def test_each_loaded_tensor_is_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    torch.save(torch.nn.Parameter(torch.ones(3)), path)
    with pipe({"backend": "LoadTensor", "tensor_name": str(path), "instance_num": 2}) as p:
        items: list[Data] = [{"data": number} for number in range(4)]
        for item in items:
            p(item)
            item["result"] += 1
    assert all(item["result"].tolist() == [2.0] * 3 for item in items)
    assert not items[0]["result"].requires_grad


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": torch.zeros(1)}, "no tensor but a dict"),
        ([1, 2], "no tensor but a list"),
        (None, "no tensor but a NoneType"),
    ],
)
def test_a_file_without_a_tensor(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "other.pt"
    torch.save(value, path)
    with pytest.raises(ConfigError, match=rf"LoadTensor.*other\.pt: .*{message}"):
        pipe({"backend": "LoadTensor", "tensor_name": str(path)})


class Runs:
    """Would run when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("/nowhere/at/all",)


@pytest.mark.parametrize("content", [b"", b"no tensor", None], ids=["empty", "text", "code"])
def test_a_file_that_is_no_tensors(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.pt"
    if content is None:
        torch.save(Runs(), path)
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.pt: PyTorch cannot load it: "):
        pipe({"backend": "LoadTensor", "tensor_name": str(path)})


def test_a_saved_view_takes_no_more_than_its_part(tmp_path: Path) -> None:
    batch = torch.zeros(1000, 1000)
    item = run("SaveTensor", batch[3:4], save_dir=str(tmp_path))
    assert os.path.getsize(item["saved"]) < 10_000


@pytest.mark.parametrize("backend", ["SaveTensor", "SaveMat"])
def test_every_file_has_a_name_of_its_own(tmp_path: Path, backend: str) -> None:
    data = torch.zeros(3) if backend == "SaveTensor" else noise(2, 2)
    items: list[Data] = []
    for _ in range(2):
        with pipe({"backend": backend, "save_dir": str(tmp_path), "instance_num": 3}) as p:
            batch = [{"data": data} for _ in range(20)]
            p(batch)
            items += batch
    extension = ".pt" if backend == "SaveTensor" else ".png"
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(item["saved"]) for item in items)
    assert len({item["saved"] for item in items}) == 40
    assert all(item["saved"].endswith(extension) for item in items)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("color", [None, "bgr", "rgb"])
def test_a_mat_saved(tmp_path: Path, channels: int, color: str | None) -> None:
    mat = noise(6, 5, channels)
    item = run("SaveMat", {"data": mat} | ({"color": color} if color else {}), save_dir=str(tmp_path))
    assert item["result"] is mat
    shown = mat[:, :, [2, 1, 0, 3][:channels]] if color == "rgb" and channels > 1 else mat
    assert np.array_equal(cv2.imread(item["saved"], cv2.IMREAD_UNCHANGED).reshape(shown.shape), shown)
    assert os.listdir(tmp_path) == [os.path.basename(item["saved"])]


def test_a_decoded_picture_looks_the_same_in_its_file(tmp_path: Path, jpeg: bytes) -> None:
    wanted = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    for color in ("bgr", "rgb"):
        item = run("S[DecodeMat,SaveMat]", jpeg, color=color, save_dir=str(tmp_path))
        assert np.array_equal(cv2.imread(item["saved"]), wanted)


@pytest.mark.parametrize("channels", [2, 5])
def test_a_mat_that_is_no_png(tmp_path: Path, channels: int) -> None:
    message = refusal("SaveMat", {"data": noise(4, 4, channels)}, save_dir=str(tmp_path))
    assert message == f"a PNG has 1, 3 or 4 channels, the Mat has {channels}"
    assert os.listdir(tmp_path) == []


def test_a_tensor_is_no_mat(tmp_path: Path) -> None:
    assert "expected a Mat" in refusal("SaveMat", {"data": torch.zeros(1, 3, 4, 4)}, save_dir=str(tmp_path))


@pytest.mark.parametrize("backend", ["SaveTensor", "SaveMat"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, backend: str) -> None:
    (tmp_path / "file").write_text("here")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"{backend}.*save_dir '.*file.*' cannot be made"):
            pipe({"backend": backend, "save_dir": str(path)})


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's answer is a stand-in: whoever runs this may be root."""
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"save_dir .* cannot be written"):
        pipe({"backend": "SaveMat", "save_dir": str(tmp_path)})


@pytest.mark.parametrize("step", ["open", "replace"])
def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = tmp_path / "folder"
    with pipe({"backend": "SaveTensor", "save_dir": str(folder)}) as p:
        if step == "open":
            folder.rmdir()
        else:
            monkeypatch.setattr(files.os, "replace", fail)
        with pytest.raises(BackendError) as caught:
            p({"data": torch.zeros(3)})
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.rglob("*")) == ([] if step == "open" else [folder])
    del caught
    gc.collect()  # From Python 3.13 on this fails where the unfinished file is collected before a view of it.


def fail(*args: Any) -> None:
    raise OSError("no space left")


def test_a_file_has_its_name_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], int]] = []
    replace = os.replace

    def watched(unfinished: str, path: str) -> None:
        seen.append(([file.name for file in tmp_path.glob("*.pt")], os.path.getsize(unfinished)))
        replace(unfinished, path)

    monkeypatch.setattr(files.os, "replace", watched)
    item = run("SaveTensor", torch.zeros(300), save_dir=str(tmp_path))
    assert seen == [([], os.path.getsize(item["saved"]))]


# -- together -----------------------------------------------------------------------------------------------------


def test_the_whole_way_of_a_picture(jpeg: bytes) -> None:
    config = {"resize_h": 60, "resize_w": 80, "color": "rgb"}
    tensors = "S[DecodeMat,Mat2Tensor,cvtColorTensor,ResizeTensor,Tensor2Mat,SyncTensor]"
    item = run(tensors, jpeg, **config, **{"DecodeMat::color": "bgr", "dtype": "uint8"})
    other = run("S[DecodeMat,ResizeMat,cvtColorMat]", jpeg, **config)
    assert np.abs(item["result"].astype(int) - other["result"]).max() <= 1
    assert item["color"] == other["color"] == "rgb"


def test_the_same_in_a_pipe_and_without() -> None:
    result = run("SyncTensor[ResizeTensor]", to_tensor(picture(20, 30)), resize_h=40, resize_w=60)["result"]
    assert torch.equal(result, direct("ResizeTensor", to_tensor(picture(20, 30)), resize_h=40, resize_w=60)["result"])


@pytest.mark.parametrize("interpolation", list(FLAGS))
def test_images_resized_together_have_the_bits_of_each_alone(interpolation: str) -> None:
    """Sizes and dtypes mixed, two of a kind and single ones; results are memory of their own."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(30, 41), (17, 9), (30, 41), (24, 24), (30, 41), (17, 9)]
    images = [torch.randint(0, 256, (1, 3, *shape), generator=generator, dtype=torch.uint8) for shape in shapes]
    images.append(images[0].float())
    with made("ResizeTensor", resize_h=24, resize_w=24, interpolation=interpolation) as backend:
        items = [{"data": image} for image in images]
        backend.forward(items)
        for item, image in zip(items, images, strict=True):
            backend.forward([alone := {"data": image}])
            assert torch.equal(item["result"], alone["result"])
            item["result"].zero_()
            assert image.any()


def test_what_is_no_tensor_is_refused_alone() -> None:
    items: list[Data] = [{"data": b"bytes"}, {"data": torch.zeros(1, 3, 4, 4)}]
    with made("ResizeTensor", resize_h=2, resize_w=2) as backend:
        backend.forward(items)  # one call, in which nothing is raised
    assert isinstance(items[0]["error"], InvalidRequest)
    assert items[1]["result"].shape == (1, 3, 2, 2)


@pytest.mark.parametrize(
    "backend", ["ResizeTensor", "PillowResizeTensor", "ResizePadTensor", "ResizeMat", "ResizePadMat"]
)
def test_channels_of_a_request_are_bounded_where_they_grow(backend: str) -> None:
    channels = 200_000
    data: Any = torch.zeros((1, channels, 2, 2), dtype=torch.uint8)
    if backend.endswith("Mat"):
        data = np.zeros((1, 1, channels), np.uint8)
    sizes = {"max_h": 224, "max_w": 224} if "Pad" in backend else {"resize_h": 224, "resize_w": 224}
    assert "200000 channels are too many" in refusal(backend, {"data": data}, **sizes)
