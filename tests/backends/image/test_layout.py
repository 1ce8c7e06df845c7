"""Which dimension of a Tensor is which, for every backend that works on images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchpipe_py import ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.image.tensor import as_image
from torchpipe_py.registry import BUILT_IN_BACKENDS, default

Data = dict[str, Any]

IMAGE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
HWC = torch.from_numpy(IMAGE)
CHW = HWC.permute(2, 0, 1)

CONFIGS: dict[str, Data] = {
    "cvtColorTensor": {"color": "bgr"},
    "ResizeTensor": {"resize_h": 5, "resize_w": 7},
    "PillowResizeTensor": {"resize_h": 5, "resize_w": 7},
    "ResizePadTensor": {"max_h": 5, "max_w": 7},
    "LetterBoxTensor": {"max_h": 5, "max_w": 7},
    "DynamicResizeTensor": {},
    "ResizeShorterTensor": {"size": 9},
    "CenterCropTensor": {"crop_h": 30, "crop_w": 9},
    "CopyMakeBorderTensor": {"top": 1, "right": 2},
    "CropTensor": {},
    "Tensor2Mat": {},
}


def run(backend: str, data: Any, **config: Any) -> Data:
    item = {"data": data, "box": [2, 3, 20, 16], "resize_h": 5, "resize_w": 7}
    with pipe({"backend": backend, **config}) as p:
        p(item)
    return item


def same(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def test_every_backend_on_images_is_among_these() -> None:
    found = {name: default.find_backend(name) for name in BUILT_IN_BACKENDS}
    assert {name for name, cls in found.items() if cls and "data_format" in cls.parameters()} == CONFIGS.keys()


@pytest.mark.parametrize("backend", CONFIGS)
def test_channels_that_come_last_give_the_same_as_channels_that_come_first(backend: str) -> None:
    wanted = run(backend, CHW[None], **CONFIGS[backend])["result"]
    for data in (CHW, HWC, HWC.clone(memory_format=torch.contiguous_format), CHW.contiguous()):
        assert same(run(backend, data, **CONFIGS[backend])["result"], wanted)
    assert same(run(backend, HWC, data_format="hwc", **CONFIGS[backend])["result"], wanted)
    assert same(run(backend, CHW, data_format="chw", **CONFIGS[backend])["result"], wanted)


@pytest.mark.parametrize("backend", CONFIGS)
def test_a_shape_that_may_be_either_is_refused(backend: str) -> None:
    error = run(backend, torch.zeros(3, 20, 3, dtype=torch.uint8), **CONFIGS[backend])["error"]
    assert isinstance(error, InvalidRequest)
    assert "got shape 3x20x3, which may be either" in str(error)
    assert 'set data_format = "chw" or "hwc"' in str(error)


def test_in_a_sequence_the_format_is_that_of_what_comes_in() -> None:
    """What a backend gives is 1×C×H×W, and is taken so by the next one, whatever the format."""
    sequence = "S[ResizeTensor,CropTensor,cvtColorTensor,Tensor2Mat]"
    config = {"resize_h": 24, "resize_w": 32, "color": "bgr"}
    wanted = IMAGE[3:16, 2:20, ::-1]
    for data_format in ("hwc", "auto"):
        assert same(run(sequence, HWC, data_format=data_format, **config)["result"], wanted)
    thin = run("S[CropTensor,Tensor2Mat]", HWC[:, :3], data_format="hwc")
    assert same(thin["result"], IMAGE[3:16, 2:3])


@pytest.mark.parametrize(
    ("shape", "data_format", "first"),
    [
        ((3, 5, 7), "auto", (3, 5, 7)),
        ((1, 5, 7), "auto", (1, 5, 7)),
        ((4, 5, 7), "auto", (4, 5, 7)),
        ((5, 7, 3), "auto", (3, 5, 7)),
        ((5, 7, 1), "auto", (1, 5, 7)),
        ((5, 3, 4), "auto", (4, 5, 3)),
        ((3, 5, 3), "chw", (3, 5, 3)),
        ((3, 5, 4), "hwc", (4, 3, 5)),
        ((6, 5, 7), "chw", (6, 5, 7)),
        ((5, 7, 2), "hwc", (2, 5, 7)),
        ((1, 3, 5, 3), "auto", (3, 5, 3)),
        ((1, 3, 5, 3), "hwc", (3, 5, 3)),
        ((1, 6, 5, 7), "auto", (6, 5, 7)),
        ((1, 256, 1, 1), "chw", (256, 1, 1)),
    ],
)
def test_what_is_taken(shape: tuple[int, ...], data_format: str, first: tuple[int, ...]) -> None:
    assert as_image(torch.zeros(shape), data_format).shape == (1, *first)


@pytest.mark.parametrize(
    ("shape", "data_format", "message"),
    [
        ((3, 5, 3), "auto", "3x5x3, which may be either"),
        ((1, 5, 4), "auto", "1x5x4, which may be either"),
        ((6, 5, 7), "auto", "6x5x7, which may be either"),
        ((5, 7, 2), "auto", "5x7x2, which may be either"),
        ((1, 576, 768, 3), "auto", '1x576x768x3; leave out the 1 .* and set data_format = "chw" where it is not'),
        ((1, 576, 768, 3), "hwc", "1x576x768x3; leave out the 1 where it is 1xHxWxC"),
        ((5, 7), "auto", "HxWxC, got shape 5x7$"),
        ((2, 3, 5, 7), "hwc", "got shape 2x3x5x7$"),
        ((3, 0, 7), "chw", "got shape 3x0x7$"),
        ((), "auto", "got a scalar$"),
    ],
)
def test_what_is_refused(shape: tuple[int, ...], data_format: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        as_image(torch.zeros(shape), data_format)


def test_a_format_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"data_format.*expected one of auto, chw, hwc"):
        pipe({"backend": "Tensor2Mat", "data_format": "nhwc"})
