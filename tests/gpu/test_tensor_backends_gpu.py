"""Backends on Tensors of a GPU give what they give on the CPU, and give it there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.gpu import needs_gpu, two_devices
from kit.image_backends import Data, noise, run, to_tensor
from kit.image_cases import ON_TENSORS, SIZES, Case

from torchpipe_py import pipe

pytestmark = needs_gpu

CLOSE = 0.255  # a thousandth of 255


def check_same(backend: str, tensor: torch.Tensor, tolerance: float, keys: Data | None = None, **config: Any) -> None:
    """``backend`` on the CPU and on the GPU: the same values, each result where its input is, in memory of its own."""
    wanted = run(backend, {"data": tensor, **(keys or {})}, **config)
    given = tensor.to("cuda:0")
    item = run(backend, {"data": given, **(keys or {})}, **config)
    assert wanted["result"].device == torch.device("cpu")
    assert item["result"].device == torch.device("cuda", 0)
    torch.testing.assert_close(item["result"].cpu(), wanted["result"], rtol=0, atol=tolerance)
    assert item.get("color") == wanted.get("color")
    if "inverse_trans" in wanted:
        assert item["inverse_trans"](3, 5) == wanted["inverse_trans"](3, 5)
    if backend != "cvtColorTensor":
        item["result"].zero_()
        assert torch.equal(given.cpu(), tensor)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", ON_TENSORS, ids=str)
def test_each_operation_equals_its_result_on_the_cpu(case: Case, size: tuple[int, int, int, int]) -> None:
    tensor = to_tensor(case.source(*size[:2]))
    exact = case.off == 0
    if case.name == "ResizeShorter":  # 8 bits are resized as such on the CPU, and as float32 on the GPU
        check_same(f"{case.name}Tensor", tensor, case.off, **case.config(size[2:]))
        tensor = tensor.float()
    check_same(f"{case.name}Tensor", tensor, 0 if exact else CLOSE, case.keys(size[2:]), **case.config(size[2:]))
    if case.to_float:
        keys, config = case.keys(size[2:]), case.config(size[2:])
        check_same(f"{case.name}Tensor", tensor.float(), 0 if exact else CLOSE, keys, **config)


@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_color(color: str, dtype: torch.dtype) -> None:
    tolerance = CLOSE if color == "gray" and dtype == torch.float16 else 0
    check_same("cvtColorTensor", to_tensor(noise(20, 30)).to(dtype), tolerance, color=color)


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


def test_a_box_on_the_gpu() -> None:
    tensor = to_tensor(noise(20, 30))
    box = torch.tensor([2.4, 1.0, 11.6, 99.0], device="cuda")
    assert torch.equal(run("CropTensor", {"data": tensor.cuda(), "box": box})["result"].cpu(), tensor[:, :, 1:, 2:12])


# -- to the host ------------------------------------------------------------------------------------------------------


def test_a_tensor_saved_and_loaded(tmp_path: Path) -> None:
    tensor = torch.rand(1, 3, 4, 6, device="cuda")
    item = run("SaveTensor", tensor, save_dir=str(tmp_path))
    assert item["result"] is tensor
    assert torch.load(item["saved"], weights_only=True).device == torch.device("cpu")
    with pipe({"backend": "LoadTensor", "tensor_name": item["saved"], "instance_num": 2}) as p:
        for _ in range(4):
            p(loaded := {"data": None})
            assert loaded["result"].device == torch.device("cuda", 0)
            assert torch.equal(loaded["result"], tensor)
            loaded["result"].zero_()


# -- streams and devices ----------------------------------------------------------------------------------------------


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


@two_devices
@pytest.mark.parametrize("case", ON_TENSORS, ids=str)
def test_a_tensor_of_another_gpu_is_brought_to_the_nodes(case: Case) -> None:
    tensor, keys, config = to_tensor(case.source(20, 30)), case.keys((9, 14)), case.config((9, 14))
    wanted = run(f"{case.name}Tensor", {"data": tensor, **keys}, **config)["result"]
    for node, other in ((0, 1), (1, 0)):
        for backend in (f"{case.name}Tensor", f"SyncTensor[{case.name}Tensor]"):
            item = run(backend, {"data": tensor.to(f"cuda:{other}"), **keys}, device_id=node, **config)
            assert item["result"].device == torch.device("cuda", node)
            difference = (item["result"].cpu().double() - wanted.double()).abs().max()
            assert difference <= (case.off if case.name == "ResizeShorter" else CLOSE)


@two_devices
def test_a_loaded_tensor_is_on_the_nodes_gpu(tmp_path: Path) -> None:
    torch.save(torch.ones(3, device="cuda:0"), path := tmp_path / "one.pt")
    assert run("LoadTensor", None, tensor_name=str(path), device_id=1)["result"].device == torch.device("cuda", 1)
