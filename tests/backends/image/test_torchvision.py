"""torchvision's evaluation transform as backends: against Pillow, and against torchvision where it is installed."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import picture
from PIL import Image

from torchpipe_py import ConfigError, InvalidRequest, pipe
from torchpipe_py.backends.image.geometry import center_crop, shorter_side

Data = dict[str, Any]

LEVELS = {"bilinear": 1, "bicubic": 2}
"""How far a resized tensor may be from Pillow's image, which is rounded in between."""

RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
SIZES = [(375, 500), (500, 375), (100, 75), (333, 201), (64, 64), (40, 500), (57, 224)]
EVALUATION = {"size": 256, "crop_h": 224, "crop_w": 224}


def run(backend: str, data: Any, **config: Any) -> Any:
    with pipe({"backend": backend, **config}) as p:
        p(item := {"data": data})
    assert "result" in item, item.get("error")
    return item["result"]


def to_tensor(mat: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mat.transpose(2, 0, 1)[None].copy())


def to_mat(tensor: torch.Tensor) -> np.ndarray:
    return tensor[0].permute(1, 2, 0).numpy()


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest one; shapes and dtypes are the same."""
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return float(np.abs(one.astype(np.float64) - other).max())


# -- by themselves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "size", "wanted"),
    [
        ((375, 500), 256, (256, 341)),  # 341.33
        ((500, 375), 256, (341, 256)),
        ((300, 401), 256, (256, 342)),  # 342.19
        ((3, 4), 224, (224, 298)),  # 298.67: cut off, not rounded
        ((64, 64), 10, (10, 10)),
        ((256, 400), 256, (256, 400)),
    ],
)
def test_the_longer_side_is_cut_off_to_whole_pixels(given: tuple[int, int], size: int, wanted: tuple[int, int]) -> None:
    assert shorter_side(*given, size).size == wanted


@pytest.mark.parametrize(
    ("size", "wanted", "start", "missing"),
    [(256, 224, 16, 0), (229, 224, 2, 0), (227, 224, 2, 0), (225, 224, 0, 0), (224, 224, 0, 0), (5, 8, 0, 1)],
)
def test_the_middle_begins_where_torchvisions_does(size: int, wanted: int, start: int, missing: int) -> None:
    """2.5 becomes 2, 1.5 becomes 2 and 0.5 becomes 0."""
    placement = center_crop(size, 9, wanted, 9)
    assert (placement.crop[0], placement.top) == (start, missing)


@pytest.mark.parametrize("interpolation", RESAMPLING)
@pytest.mark.parametrize("given", SIZES)
def test_the_shorter_side_is_resized_as_pillow_does(given: tuple[int, int], interpolation: str) -> None:
    mat = picture(*given)
    height, width = shorter_side(*given, 64).size
    wanted = np.asarray(Image.fromarray(mat).resize((width, height), RESAMPLING[interpolation]))
    config = {"size": 64, "interpolation": interpolation}
    assert difference(run("ResizeShorterMat", mat, **config), wanted) == 0
    assert difference(to_mat(run("ResizeShorterTensor", to_tensor(mat), **config)), wanted) <= LEVELS[interpolation]
    floats = run("ResizeShorterTensor", to_tensor(mat).float(), **config)
    assert floats.dtype == torch.float32
    assert np.abs(to_mat(floats).clip(0, 255) - wanted).max() <= LEVELS[interpolation] + 0.5
    for dtype in (torch.float16, torch.int16):
        other = run("ResizeShorterTensor", to_tensor(mat).to(dtype), **config)
        assert other.dtype == dtype
        assert (other.float() - floats).abs().max() <= 0.51
    gray = np.ascontiguousarray(mat[:, :, :1])
    wanted = np.asarray(Image.fromarray(gray[:, :, 0]).resize((width, height), RESAMPLING[interpolation]))
    assert difference(run("ResizeShorterMat", gray, **config)[:, :, 0], wanted) == 0


@pytest.mark.parametrize("given", [(10, 12), (11, 13), (4, 12), (12, 5), (3, 3), (8, 9)])
def test_the_middle_of_an_image_or_an_image_in_the_middle(given: tuple[int, int]) -> None:
    mat = np.maximum(picture(*given), 1)
    crop = {"crop_h": 8, "crop_w": 9}
    result = run("CenterCropMat", mat, **crop)
    placed = center_crop(*given, 8, 9)
    (top, left, _, _), above, before = placed.crop, placed.top, placed.left
    wanted = np.zeros((8, 9, 3), np.uint8)
    part = mat[top : top + 8, left : left + 9]
    wanted[above : above + part.shape[0], before : before + part.shape[1]] = part
    assert difference(result, wanted) == 0
    assert result.flags.c_contiguous
    assert not np.shares_memory(result, mat)
    for dtype in (torch.uint8, torch.float32):
        cropped = run("CenterCropTensor", to_tensor(mat).to(dtype), **crop)
        assert cropped.is_contiguous()
        assert torch.equal(cropped, to_tensor(wanted).to(dtype))
    assert difference(run("CenterCropMat", mat.astype(np.float32), **crop), wanted.astype(np.float32)) == 0


@pytest.mark.parametrize("backend", ["ResizeShorterMat", "ResizeShorterTensor"])
def test_a_line_of_pixels_cannot_grow_without_bound(backend: str) -> None:
    mat = np.zeros((1, 2000, 3), np.uint8)
    item = {"data": mat if backend.endswith("Mat") else to_tensor(mat)}
    with pipe({"backend": backend, "size": 256}) as p:
        p(item)
    assert isinstance(item["error"], InvalidRequest)
    assert str(item["error"]) == "512000x256 pixels were asked for, more than max_pixels = 67108864"


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        ("ResizeShorterMat", {}, "size.*needs it"),
        ("ResizeShorterTensor", {"size": 0}, "size.*at least 1"),
        ("ResizeShorterMat", {"size": 9, "interpolation": "area"}, "expected one of bilinear, bicubic"),
        ("CenterCropMat", {"crop_h": 3}, "crop_w.*needs it"),
        ("CenterCropTensor", {"crop_h": 3, "crop_w": 2**21}, "crop_w.*at most"),
    ],
)
def test_a_wrong_parameter_is_refused(backend: str, config: Data, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipe({"backend": backend, **config})


# -- against torchvision ------------------------------------------------------------------------------------------


@pytest.fixture
def v2() -> Any:
    """``torchvision.transforms.v2``; one that is there and cannot be loaded is as good as none."""
    try:
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision: {error}")
    return v2


def evaluation(v2: Any, interpolation: str) -> Any:
    mode = {"bilinear": v2.InterpolationMode.BILINEAR, "bicubic": v2.InterpolationMode.BICUBIC}[interpolation]
    return v2.Compose([v2.Resize(256, interpolation=mode, antialias=True), v2.CenterCrop(224)])


@pytest.mark.parametrize("interpolation", RESAMPLING)
@pytest.mark.parametrize("given", [*SIZES, (300, 401), (3, 4)])
def test_it_is_torchvisions_evaluation(v2: Any, given: tuple[int, int], interpolation: str) -> None:
    """Of a PIL image to the bit, and of a tensor as well, which torchvision makes other pixels of."""
    mat, transform = picture(*given), evaluation(v2, interpolation)
    config = {**EVALUATION, "interpolation": interpolation}
    wanted = np.asarray(transform(Image.fromarray(mat)))
    assert difference(run("S[ResizeShorterMat,CenterCropMat]", mat, **config), wanted) == 0
    tensor = to_tensor(mat)
    result = run("S[ResizeShorterTensor,CenterCropTensor]", tensor, **config)
    assert difference(result.numpy(), transform(tensor).numpy()) == 0
    assert difference(to_mat(result), wanted) <= LEVELS[interpolation]


@pytest.mark.parametrize("given", [(100, 75), (230, 300), (223, 225), (1, 1)])
def test_the_middle_is_torchvisions(v2: Any, given: tuple[int, int]) -> None:
    mat, crop = picture(*given), {"crop_h": 224, "crop_w": 225}
    wanted = np.asarray(v2.CenterCrop((224, 225))(Image.fromarray(mat)))
    assert difference(run("CenterCropMat", mat, **crop), wanted) == 0
    assert difference(to_mat(run("CenterCropTensor", to_tensor(mat), **crop)), wanted) == 0


def test_logits_of_a_resnet(v2: Any) -> None:
    """Encoded images in, through a pipe and through torchvision; what ResizeMat gives is far off."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18().eval()
    after = v2.Compose(
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )
    images = [np.random.default_rng(seed).integers(0, 256, (300, 401, 3), np.uint8) for seed in range(2)]
    encoded = [cv2.imencode(".png", image)[1].tobytes() for image in images]

    def logits(backend: str, **config: Any) -> torch.Tensor:
        pixels = [run(f"S[DecodeMat,{backend},Mat2Tensor]", image, device="cpu", **config) for image in encoded]
        with torch.inference_mode():
            return model(after(torch.cat(pixels)))

    transform = v2.Compose([evaluation(v2, "bilinear"), v2.PILToTensor(), after])
    with torch.inference_mode():
        wanted = model(torch.stack([transform(Image.fromarray(image[:, :, ::-1])) for image in images]))
    ours = logits("ResizeShorterMat,CenterCropMat,cvtColorMat", color="rgb", **EVALUATION)
    assert torch.allclose(ours, wanted, atol=1e-4)
    stretched = logits("ResizeMat,cvtColorMat", color="rgb", resize_h=224, resize_w=224)
    assert (stretched - wanted).abs().max() > 0.1
