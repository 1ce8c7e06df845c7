"""Backends on Tensors of a GPU give what they give on the CPU, and give it there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device import needs_gpu
from PIL import Image

from torchpipe_py import pipe

pytestmark = needs_gpu

Data = dict[str, Any]

CLOSE = 0.255  # a thousandth of 255
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "area")
SIZES = [(375, 500, 224, 224), (60, 40, 39, 30), (7, 5, 40, 61), (40, 60, 20, 90), (20, 30, 20, 7), (1, 1, 5, 4)]
SIZES += [(20, 30, 20, 30), (301, 3, 200, 1), (2, 300, 1, 1)]

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices")


def run(backend: str, data: Any, **config: Any) -> Data:
    """The dict after one request."""
    item = dict(data) if isinstance(data, dict) else {"data": data}
    with pipe({"backend": backend, **config}) as p:
        p(item)
    return item


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """A Mat without anything smooth in it."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def to_tensor(mat: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mat.transpose(2, 0, 1)[None].copy())


def check_same(backend: str, tensor: torch.Tensor, tolerance: float, **config: Any) -> None:
    """``backend`` on the CPU and on the GPU: the same values, each result where its input is."""
    given = {"box": [1, 0, 500, 500]}
    wanted = run(backend, {"data": tensor, **given}, **config)
    item = run(backend, {"data": tensor.to("cuda:0"), **given}, **config)
    assert wanted["result"].device == torch.device("cpu")
    assert item["result"].device == torch.device("cuda", 0)
    torch.testing.assert_close(item["result"].cpu(), wanted["result"], rtol=0, atol=tolerance)
    assert item.get("color") == wanted.get("color")
    if "inverse_trans" in wanted:
        assert item["inverse_trans"](3, 5) == wanted["inverse_trans"](3, 5)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_resize(interpolation: str, size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tensor = to_tensor(noise(*size[:2])).to(dtype)
    tolerance = 0 if interpolation == "nearest" else CLOSE
    check_same("ResizeTensor", tensor, tolerance, resize_h=size[2], resize_w=size[3], interpolation=interpolation)


def test_nearest_takes_the_same_pixel_at_every_size() -> None:
    for width in range(1, 130, 9):
        tensor = torch.arange(width, dtype=torch.float32).reshape(1, 1, 1, width)
        for wanted in range(1, 130, 8):
            check_same("ResizeTensor", tensor, 0, resize_h=1, resize_w=wanted, interpolation="nearest")


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_resize_pad(interpolation: str, size: tuple[int, int, int, int]) -> None:
    config = {"max_h": size[2], "max_w": size[3], "pad_value": 114, "interpolation": interpolation}
    check_same("ResizePadTensor", to_tensor(noise(*size[:2])), CLOSE, **config)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
def test_the_shorter_side(interpolation: str, size: tuple[int, int, int, int]) -> None:
    """8 bits are resized as such on the CPU, and as float32 on the GPU."""
    config = {"size": size[2], "interpolation": interpolation}
    tensor = to_tensor(noise(*size[:2]))
    check_same("ResizeShorterTensor", tensor, 1 if interpolation == "bilinear" else 2, **config)
    check_same("ResizeShorterTensor", tensor.float(), CLOSE, **config)


@pytest.mark.parametrize("size", SIZES)
def test_places_and_borders(size: tuple[int, int, int, int]) -> None:
    tensor = to_tensor(noise(*size[:2]))
    check_same("LetterBoxTensor", tensor, CLOSE, max_h=size[2], max_w=size[3])
    check_same("CenterCropTensor", tensor, 0, crop_h=size[2], crop_w=size[3])
    check_same("CopyMakeBorderTensor", tensor, 0, top=1, right=2, pad_value=7)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pillow_resize(size: tuple[int, int, int, int], channels: int) -> None:
    check_same("PillowResizeTensor", to_tensor(noise(*size[:2], channels)), 0, resize_h=size[2], resize_w=size[3])


def test_pillow_resize_is_pillows_to_the_bit() -> None:
    rng = np.random.default_rng(1)
    with pipe({"backend": "PillowResizeTensor", "resize_h": 33, "resize_w": 47, "instance_num": 2}) as p:
        for height, width in rng.integers(1, 300, (60, 2)).tolist():
            mat = noise(height, width, seed=height)
            item: Data = {"data": to_tensor(mat).cuda()}
            p(item)
            wanted = np.asarray(Image.fromarray(mat).resize((47, 33), Image.Resampling.BILINEAR))
            assert np.array_equal(item["result"][0].permute(1, 2, 0).cpu().numpy(), wanted), (height, width)


@pytest.fixture
def reduced_precision() -> Iterator[None]:
    """PyTorch may compute float32 matrix products with 10 bits, as training scripts like to allow."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("reduced_precision")
def test_reduced_precision_of_products_changes_nothing() -> None:
    tensor = to_tensor(noise(300, 400))
    check_same("PillowResizeTensor", tensor, 0, resize_h=100, resize_w=90)
    check_same("ResizeTensor", tensor, CLOSE, resize_h=100, resize_w=90, interpolation="area")


@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_color(color: str, dtype: torch.dtype) -> None:
    tolerance = CLOSE if color == "gray" and dtype == torch.float16 else 0
    check_same("cvtColorTensor", to_tensor(noise(20, 30)).to(dtype), tolerance, color=color)


def test_crop() -> None:
    tensor = to_tensor(noise(20, 30))
    check_same("CropTensor", tensor, 0)
    box = torch.tensor([2.4, 1.0, 11.6, 99.0], device="cuda")
    item = run("CropTensor", {"data": tensor.cuda(), "box": box})
    assert torch.equal(item["result"].cpu(), tensor[:, :, 1:, 2:12])
    item["result"].zero_()
    assert torch.equal(item["data"].cpu(), tensor)


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("ResizeTensor", {"resize_h": 4, "resize_w": 6}),
        ("PillowResizeTensor", {"resize_h": 4, "resize_w": 6}),
        ("ResizePadTensor", {"max_h": 4, "max_w": 6}),
        ("CropTensor", {}),
    ],
)
def test_a_result_never_shares_memory(backend: str, config: Data) -> None:
    tensor = to_tensor(noise(4, 6))
    for dtype in (torch.uint8, torch.float32):
        if backend == "PillowResizeTensor" and dtype != torch.uint8:
            continue
        item = run(backend, {"data": tensor.to("cuda", dtype), "box": [0, 0, 6, 4]}, **config)
        item["result"].zero_()
        assert torch.equal(item["data"].cpu(), tensor.to(dtype))


# -- to the host --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_a_mat_there_and_back(channels: int) -> None:
    mat = noise(7, 9, channels)
    for backend in ("S[Mat2Tensor,Tensor2Mat]", "S[SyncTensor[Mat2Tensor],SyncTensor[Tensor2Mat]]"):
        result = run(backend, mat)["result"]
        assert np.array_equal(result, mat)
        assert result.flags.c_contiguous


def test_floats_are_rounded_and_clamped() -> None:
    tensor = torch.tensor([-300.0, 0.5, 1.5, 254.4, 255.6, 1000.0], device="cuda").reshape(1, 1, 2, 3)
    assert run("Tensor2Mat", tensor, dtype="uint8")["result"].ravel().tolist() == [0, 0, 2, 254, 255, 255]
    assert run("Tensor2Mat", tensor)["result"].ravel().tolist() == tensor.ravel().tolist()


def test_vector() -> None:
    assert run("Tensor2Vector", torch.arange(6, device="cuda").reshape(2, 3).T)["result"] == [0, 3, 1, 4, 2, 5]


def test_a_tensor_saved_and_loaded(tmp_path: Path) -> None:
    tensor = torch.rand(1, 3, 4, 6, device="cuda")
    item = run("SaveTensor", tensor, save_dir=str(tmp_path))
    assert item["result"] is tensor
    assert torch.load(item["saved"], weights_only=True).device == torch.device("cpu")
    with pipe({"backend": "LoadTensor", "tensor_name": item["saved"], "instance_num": 2}) as p:
        for _ in range(4):
            loaded: Data = {"data": None}
            p(loaded)
            assert loaded["result"].device == torch.device("cuda", 0)
            assert torch.equal(loaded["result"], tensor)
            loaded["result"].zero_()


# -- streams and devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    [
        "S[Mat2Tensor,cvtColorTensor,ResizeTensor,Tensor2Mat]",
        "S[Mat2Tensor,cvtColorTensor,ResizeTensor,Tensor2Mat,SyncTensor]",
        "S[SyncTensor[Mat2Tensor],cvtColorTensor,SyncTensor[ResizeTensor],Tensor2Mat]",
        "SyncTensor[S[Mat2Tensor,SyncTensor[S[cvtColorTensor,SyncTensor[ResizeTensor]]],Tensor2Mat]]",
    ],
)
def test_however_the_streams_are_nested(backend: str) -> None:
    config = {"resize_h": 60, "resize_w": 80, "color": "rgb"}
    mats = [noise(90 + number, 120, seed=number) for number in range(40)]
    items: list[Data] = [{"data": mat, "color": "bgr"} for mat in mats]
    with pipe({"backend": backend, **config, "dtype": "uint8", "instance_num": 4}) as p:
        p(items)
    for mat, item in zip(mats, items, strict=True):
        wanted = run("S[cvtColorMat,ResizeMat]", {"data": mat, "color": "bgr"}, **config)
        assert np.abs(item["result"].astype(int) - wanted["result"]).max() <= 1
        assert item["color"] == "rgb"


def test_a_result_is_complete_when_the_call_returns() -> None:
    """Read at once, on the default stream, which does not wait for the instances' streams."""
    tensors = [to_tensor(noise(600, 800, seed=seed)) for seed in range(4)]
    config = {"resize_h": 1200, "resize_w": 1600, "interpolation": "nearest"}
    with pipe({"backend": "SyncTensor[ResizeTensor]", **config, "instance_num": 2}) as p:
        for tensor in tensors * 5:
            item: Data = {"data": tensor.cuda()}
            p(item)
            assert torch.equal(item["result"][:, :, ::2, ::2].cpu(), tensor.float())


def test_a_tensor_made_on_the_callers_stream_is_waited_for() -> None:
    with pipe({"backend": "PillowResizeTensor", "resize_h": 2000, "resize_w": 2000}) as p:
        for value in range(1, 20):
            made = torch.zeros(1, 3, 2000, 2000, device="cuda")
            for _ in range(value):
                made += 1
            item: Data = {"data": made.to(torch.uint8)}
            p(item)
            assert int(item["result"].min()) == int(item["result"].max()) == value


@two_devices
@pytest.mark.parametrize(
    ("backend", "config"),
    [
        ("cvtColorTensor", {"color": "bgr"}),
        ("ResizeTensor", {"resize_h": 9, "resize_w": 14}),
        ("ResizeTensor", {"resize_h": 9, "resize_w": 14, "interpolation": "area"}),
        ("PillowResizeTensor", {"resize_h": 9, "resize_w": 14}),
        ("ResizePadTensor", {"max_h": 9, "max_w": 14}),
        ("CropTensor", {}),
        ("SyncTensor[ResizeTensor]", {"resize_h": 9, "resize_w": 14}),
    ],
)
def test_a_tensor_of_another_gpu_is_brought_to_the_nodes(backend: str, config: Data) -> None:
    tensor, box = to_tensor(noise(20, 30)), {"box": [2, 3, 20, 15]}
    wanted = run(backend, {"data": tensor, **box}, **config)["result"]
    for node, other in ((0, 1), (1, 0)):
        given = {"data": tensor.to(f"cuda:{other}"), **box}
        result = run(backend, given, device_id=node, **config)["result"]
        assert result.device == torch.device("cuda", node)
        torch.testing.assert_close(result.cpu(), wanted, rtol=0, atol=CLOSE if wanted.is_floating_point() else 0)


@two_devices
def test_a_loaded_tensor_is_on_the_nodes_gpu(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    torch.save(torch.ones(3, device="cuda:0"), path)
    assert run("LoadTensor", None, tensor_name=str(path), device_id=1)["result"].device == torch.device("cuda", 1)
