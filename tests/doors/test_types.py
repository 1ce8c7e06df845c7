"""Numbers beyond the type of a model's input are refused at every door; they would become infinity."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import save_model
from kit import doors
from kit.cells import check_each
from kit.doors import DOORS, Asked, House
from kit.models import torch_model
from onnx import TensorProto, helper

TYPES = {
    "float16": (TensorProto.FLOAT16, torch.float16),
    "bfloat16": (TensorProto.BFLOAT16, torch.bfloat16),
    "float32": (TensorProto.FLOAT, torch.float32),
}
BEYOND = {
    "float16": (
        np.array([[1, 1e6]], "f4"), np.array([[-65520, 1]], "f8"), np.array([[np.nan, 65520]], "f4"),
        np.array([[70000, 1]], "i4"), np.array([[65535, 1]], "u2"),
    ),
    "bfloat16": (np.array([[1, 3.4e38]], "f4"), np.array([[-1e300, 1]], "f8")),
    "float32": (np.array([[3.4028235678e38, 1]], "f8"), np.array([[np.inf, -1e300]], "f8")),
}  # fmt: skip
WITHIN = {
    "float16": (np.array([[65519, -65519]], "f4"), np.array([[np.inf, np.nan]], "f8"), np.array([[65519, 1]], "i4")),
    "bfloat16": (np.array([[3.39e38, 1]], "f4"), np.array([[-np.inf, 1]], "f8"), np.array([[2**31 - 1, 1]], "i4")),
    "float32": (np.array([[3.4028235677e38, 1]], "f8"), np.array([[2**63 - 1, -(2**63)]], "i8")),
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A root for each type and each library, which gives its input back."""
    folder = tmp_path_factory.mktemp("typed")
    nodes = {}
    for name, (kind, dtype) in TYPES.items():
        same = [helper.make_node("Identity", ["x"], ["y"])]
        path = save_model(folder / f"{name}.onnx", same, {"x": ["n", 2]}, {"y": ["n", 2]}, dtype=kind)
        nodes[f"onnx_{name}"] = {"backend": "OnnxTensor", "model": path}
        module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Flatten())
        example = torch.zeros(2, 2, dtype=dtype)
        shapes = ({0: torch.export.Dim("batch")},)
        nodes[f"torch_{name}"] = torch_model(folder / f"{name}.pt2", module, example, shapes=shapes)
    with doors.house(nodes) as house:
        yield house


def asked(model: str, value: np.ndarray) -> Asked:
    is_onnx = model.startswith("onnx")
    return Asked(model, {"x" if is_onnx else "input": value}, ["y"] if is_onnx else ["result"])


@pytest.mark.parametrize("library", ["onnx", "torch"])
def test_numbers_beyond_the_type_are_refused(house: House, library: str) -> None:
    def check(cell: tuple[str, str, int]) -> None:
        door, name, index = cell
        value = BEYOND[name][index]
        answer = DOORS[door](house, asked(f"{library}_{name}", value))
        assert answer.code == "invalid_request", answer
        is_not_finite = "NaN or infinity" in answer.message and not np.isfinite(value).all()  # in JSON
        assert is_not_finite or f"takes {name}, got {value.dtype} of " in answer.message

    check_each([(door, name, index) for door in DOORS for name in BEYOND for index in range(len(BEYOND[name]))], check)


@pytest.mark.parametrize("library", ["onnx", "torch"])
def test_numbers_that_round_to_finite_ones_are_taken(house: House, library: str) -> None:
    def check(cell: tuple[str, int]) -> None:
        name, index = cell
        value = WITHIN[name][index]
        answer = DOORS["oip_binary"](house, asked(f"{library}_{name}", value))
        assert answer.code == "ok", answer
        expected = value.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        (found,) = answer.values.values()
        assert doors.same(found, expected)

    check_each([(name, index) for name in WITHIN for index in range(len(WITHIN[name]))], check)
