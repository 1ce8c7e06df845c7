"""Arrays of other libraries as ``data``: the same results as of NumPy and PyTorch, and no copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Register
from onnx import TensorProto, helper

from torchpipe_py import InvalidRequest, pipe
from torchpipe_py.backends.arrays import is_foreign, to_host_array, to_tensor


class Foreign:
    """An array that speaks DLPack alone, as JAX's and CuPy's do."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._array, self._device = array, device
        self.dtype, self.shape = array.dtype, array.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class Stubborn(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no way")


def picture(dtype: Any = np.uint8) -> np.ndarray:
    return (np.arange(4 * 6 * 3).reshape(4, 6, 3) * 3).astype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float32, np.float64])
def test_memory_is_shared(dtype: Any) -> None:
    array = picture(dtype)
    for adopted in (to_tensor(Foreign(array)).numpy(), to_host_array(Foreign(array))):
        assert adopted is not None
        assert np.shares_memory(adopted, array)
        assert np.array_equal(adopted, array)


def test_numbers_and_images_are_not_foreign() -> None:
    assert is_foreign(Foreign(picture()))
    assert not any(map(is_foreign, (b"", "", 1, [1], (1, 2), {"data": 1}, None)))
    assert not any(map(is_foreign, (np.zeros(1), np.float32(1), torch.zeros(1))))


def identity(path: Path, *names: str) -> str:
    """A model that gives its inputs N×3 back."""
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", [name], [f"{name}_out"]) for name in names],
            "identity",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in names],
            [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, ["n", 3]) for name in names],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path.write_bytes(model.SerializeToString())
    return str(path)


def results(config: dict[str, Any], values: list[Any]) -> list[Any]:
    with pipe(config) as run:
        items = [{"data": value} for value in values]
        run(items)
    return [item.get("result", item.get("error")) for item in items]


@pytest.mark.parametrize(
    ("backend", "keys"),
    [
        ("ResizeMat", {"resize_h": 3, "resize_w": 5}),
        ("S[ResizeMat,Mat2Tensor]", {"resize_h": 3, "resize_w": 5, "device": "cpu"}),
        ("ResizePadMat", {"max_h": 9, "max_w": 9}),
        ("CenterCropMat", {"crop_h": 2, "crop_w": 2}),
        ("cvtColorMat", {"color": "rgb"}),
    ],
)
def test_mat_backends_give_what_they_give_of_numpy(backend: str, keys: dict[str, Any]) -> None:
    one, other = results({"backend": backend, **keys}, [picture(), Foreign(picture())])
    assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("backend", ["ResizeTensor", "cvtColorTensor", "CenterCropTensor"])
def test_tensor_backends_give_what_they_give_of_tensors(backend: str) -> None:
    sides = {"ResizeTensor": {"resize_h": 3, "resize_w": 5}, "cvtColorTensor": {"color": "bgr"}}
    tensor = torch.from_numpy(picture().transpose(2, 0, 1).copy())[None]
    config = {"backend": backend, **sides.get(backend, {"crop_h": 2, "crop_w": 2})}
    one, other = results(config, [tensor, Foreign(tensor.numpy())])
    assert torch.equal(one, other)


def test_models_take_them_alone_in_lists_and_by_name(tmp_path: Path) -> None:
    model = identity(tmp_path / "pair.onnx", "left", "right")
    left, right = np.array([[1, 2, 3]], np.float32), np.array([[4, 5, 6]], np.float32)
    given = [[left, right], [Foreign(left), Foreign(right)], {"left": Foreign(left), "right": right}]
    for result in results({"backend": "OnnxTensor", "model": model}, given):
        assert [output.tolist() for output in result] == [left.tolist(), right.tolist()]
    only = identity(tmp_path / "one.onnx", "x")
    one, other, stacked = results({"backend": "OnnxTensor", "model": only}, [left, Foreign(left), [Foreign(left[0])]])
    assert torch.equal(one, other)
    assert torch.equal(one, stacked)


@pytest.mark.parametrize("backend", ["ResizeMat", "ResizeTensor"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Stubborn(picture(), (8, 0)), "on a device of DLPack's type 8; expected the host or CUDA"),
        (Stubborn(picture()), r"that PyTorch cannot take: no way$"),
        (Foreign(picture(np.complex64)), r"\(Foreign\) of torch.complex64; expected real numbers"),
        (Foreign(picture()[:, ::-1]), "with a negative stride: pass a copy of it"),
    ],
)
def test_names_what_pytorch_cannot_take(backend: str, value: Any, problem: str) -> None:
    (error,) = results({"backend": backend, "resize_h": 2, "resize_w": 2}, [value])
    assert isinstance(error, InvalidRequest)
    with pytest.raises(InvalidRequest, match=problem):
        raise error


def test_nodes_pass_them_on(register: Register) -> None:
    """A kernel of one's own between two nodes may leave an array of its library."""

    class Invert:
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                item["result"] = Foreign(255 - item["data"])

    name = register(Invert)
    sequence, nodes = {"backend": f"S[{name},ResizeMat]"}, {"backend": name, "next": "resize"}
    sides = {"resize_h": 4, "resize_w": 6}
    for config in ({**sequence, **sides}, {"invert": nodes, "resize": {"backend": "ResizeMat", **sides}}):
        (result,) = results(config, [picture()])
        assert np.array_equal(result, 255 - picture())
