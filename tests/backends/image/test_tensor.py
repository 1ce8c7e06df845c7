"""Tensors: which dimension is which, their colors, their way to Mats and lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from image_kit import noise, refusal, run, to_mat, to_tensor

from torchpipe_py import InvalidRequest
from torchpipe_py.backends.image.tensor import as_image

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


# -- colors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cvtColorTensor", "CvtColorTensor"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("given", [None, "bgr", "rgb"])
@pytest.mark.parametrize("wanted", ["bgr", "RGB", "gray"])
def test_converts_as_opencv_does(name: str, dtype: torch.dtype, channels: int, given: str | None, wanted: str) -> None:
    """One channel is gray, a Tensor without ``color`` is RGB."""
    tensor = to_tensor(noise(40, 50, channels)).to(dtype)
    item = run(name, {"data": tensor} | ({"color": given} if given else {}), color=wanted)
    wanted = wanted.lower()
    source = "gray" if channels == 1 else given or "rgb"
    code = getattr(cv2, f"COLOR_{source.upper()}2{wanted.upper()}", None)
    expected = to_mat(tensor) if source == wanted else cv2.cvtColor(to_mat(tensor), code)
    assert np.allclose(to_mat(item["result"]), np.atleast_3d(expected), rtol=1e-6, atol=0)
    assert (item["result"].dtype, item["color"]) == (dtype, wanted)


@pytest.mark.parametrize("channels", [2, 4])
def test_rejects_channels_without_a_color(channels: int) -> None:
    message = refusal("cvtColorTensor", torch.zeros(1, channels, 6, 5), color="rgb")
    assert message == f"color rgb needs a Tensor of 1 or 3 channels, got {channels}"


@pytest.mark.parametrize(("channels", "is_named"), [(1, False), (2, False), (3, True), (4, True), (6, False)])
def test_an_image_that_becomes_another_kind_has_its_color_named(channels: int, is_named: bool) -> None:
    mat = noise(4, 6, channels)
    for backend, data, color in (("Mat2Tensor", mat, "bgr"), ("Tensor2Mat", to_tensor(mat), "rgb")):
        config = {"data_format": "chw"} if backend == "Tensor2Mat" else {}
        assert run(backend, data, **config).get("color") == (color if is_named else None)
        assert run(backend, {"data": data, "color": "other"}, **config)["color"] == "other"


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
def test_tensor_to_mat(dtype: torch.dtype, values: list[float], kept: list[float] | str, clamped: list[int]) -> None:
    """Floats become float32 and integers 8 bits; those that do not fit are refused, or clamped where asked."""
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
def test_tensor_to_list(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).to(dtype).reshape(shape)
    for given in (tensor, tensor.transpose(0, -1)):
        result = run("Tensor2Vector", given)["result"]
        assert result == given.flatten().tolist()
        assert all(type(value) is float for value in result)


@pytest.mark.parametrize("backend", ["cvtColorTensor", "Tensor2Mat", "Tensor2Vector", "SaveTensor"])
@pytest.mark.parametrize("data", [b"bytes", np.zeros(3), [torch.zeros(3)], None])
def test_rejects_non_tensors(backend: str, data: Any, tmp_path: Path) -> None:
    config = {"SaveTensor": {"save_dir": str(tmp_path)}, "cvtColorTensor": {"color": "rgb"}}
    assert "expected a Tensor" in refusal(backend, data, **config.get(backend, {}))
