"""``mean`` and ``std`` for every layout, type and number of inputs, inside the model and before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import picture, save_model
from kit.model_kinds import Graph
from kit.models import Data, answer, batched, one_node, onnx_node, refused, torch_model
from kit.refusals import refusal
from onnx import TensorProto, helper

from torchpipe_py import pipe
from torchpipe_py.plan.build import plan_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

HEIGHT, WIDTH = 8, 6
MAT = picture(HEIGHT, WIDTH)
NUMBERS: list[Data] = [
    {"mean": 127.5, "std": 127.5},  # Keras' pixels of -1..1
    {"mean": "123.675, 116.28, 103.53", "std": "58.395, 57.12, 57.375"},
    {"mean": "123.675, 116.28, 103.53"},
    {"std": "58.395, 57.12, 57.375"},
]
DIMS = {"NxCxHxW": ["N", 3, HEIGHT, WIDTH], "NxHxWxC": ["N", HEIGHT, WIDTH, 3], "open": ["N", "H", "W", 3]}


def normal(mean: Any = 0.0, std: Any = 1.0) -> np.ndarray:
    """The image H×W×C, normalised."""
    numbers = [np.array(str(each).split(","), np.float64) for each in (mean, std)]
    return (MAT - numbers[0]) / numbers[1]


def sizes(dims: list[Any]) -> tuple[int, ...]:
    """The shape of the image for a model of these dimensions, without the batch."""
    return (3, HEIGHT, WIDTH) if dims[1] == 3 else (HEIGHT, WIDTH, 3)


def as_hwc(result: Any) -> np.ndarray:
    array: np.ndarray = result.float().numpy()[0]
    return array if array.shape[-1] == 3 else array.transpose(1, 2, 0)


def cast(path: Path, dims: Any, dtype: int, moves: bool = False) -> str:
    """A model that casts its input to float32, perhaps after it is moved about, with the types of values declared."""
    nodes = [helper.make_node("Cast", ["m" if moves else "x"], ["y"], to=TensorProto.FLOAT)]
    declared = []
    if moves:
        nodes[:0] = [
            helper.make_node("Transpose", ["x"], ["t"], perm=[0, 2, 1, 3]),
            helper.make_node("Transpose", ["t"], ["m"], perm=[0, 2, 1, 3]),
        ]
        declared = [helper.make_tensor_value_info("m", dtype, dims)]
    given, made = helper.make_tensor_value_info("x", dtype, dims), helper.make_tensor_value_info("y", 1, dims)
    graph = helper.make_graph(nodes, "casts", [given], [made], value_info=declared)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


@pytest.mark.parametrize("numbers", NUMBERS, ids=["one", "each", "mean", "std"])
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_normalises_alike_inside_the_model_and_before_it(tmp_path: Path, dims: Any, numbers: Data) -> None:
    model = one_node(tmp_path / "m.onnx", dims, "Mul", "one", constants={"one": np.float32(1)})
    results = [answer(onnx_node(model, max=4, **numbers), MAT)["result"]]
    before = {f"NormalizeMat::{key}": numbers.get(key, default) for key, default in (("mean", 0), ("std", 1))}
    results += [answer({"backend": "S[NormalizeMat,OnnxTensor]", "model": model, **before}, MAT)["result"]]
    if dims[1] == 3:
        before = {key.replace("Mat", "Tensor"): value for key, value in before.items()}
        tensor = torch.from_numpy(MAT).permute(2, 0, 1)[None]
        results += [answer({"backend": "S[NormalizeTensor,OnnxTensor]", "model": model, **before}, tensor)["result"]]
    for result in results:
        assert list(result.shape[1:]) == [
            size if isinstance(size, int) else own for size, own in zip(dims[1:], MAT.shape, strict=True)
        ]
        np.testing.assert_allclose(as_hwc(result), normal(**numbers), atol=1e-5)


@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
@pytest.mark.parametrize("is_exported", [True, False], ids=["export", "script"])
def test_torch_normalises_as_onnx(tmp_path: Path, dims: Any, is_exported: bool) -> None:
    if not is_exported and dims[1] != 3:
        pytest.skip("without declared shapes, a Mat is given as C×H×W")
    example = [
        torch.zeros(2, *[size if isinstance(size, int) else own for size, own in zip(dims[1:], MAT.shape, strict=True)])
    ]
    config = torch_model(tmp_path / "m.pt2", Once(), *example * is_exported, shapes=batched())
    result = answer(config | NUMBERS[1] | {"max": 4}, MAT)["result"]
    np.testing.assert_allclose(as_hwc(result), normal(**NUMBERS[1]), atol=1e-5)


class Once(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1


class Pair(torch.nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return left * 1, right * 1


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (TensorProto.UINT8, 1e-5),
        (TensorProto.INT64, 1e-5),
        (TensorProto.DOUBLE, 1e-5),
        (TensorProto.FLOAT16, 2e-3),
        (TensorProto.BFLOAT16, 2e-2),
    ],
)
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_normalises_input_of_every_type_that_is_cast(tmp_path: Path, dims: Any, dtype: int, tolerance: float) -> None:
    for moves in (False, True):
        model = cast(tmp_path / "m.onnx", dims, dtype, moves)
        result = answer(onnx_node(model, max=4, **NUMBERS[1]), MAT)["result"]
        np.testing.assert_allclose(as_hwc(result), normal(**NUMBERS[1]), atol=tolerance, rtol=tolerance)


def test_check_says_where_input_of_integers_is_normalised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan_pipeline(onnx_node(cast(tmp_path / "m.onnx", DIMS["NxHxWxC"], TensorProto.UINT8), mean=127.5))
    (line,) = caplog.messages
    assert line.endswith("input 'x' takes uint8: normalised inside the model, after a cast to float32")


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.UINT8])
@pytest.mark.parametrize(("operator", "number", "std", "is_twice"), [
    ("Div", 255, "255", True), ("Mul", 1 / 255, "58.4,57.1,57.4", True), ("Div", 255, "1", False),
    ("Div", 0.225, "255", False), ("Mul", 1.0, "255", False), ("MatMul", 255, "255", False),
])  # fmt: skip
def test_check_warns_of_pixels_that_are_scaled_twice(
    dtype: int, operator: str, number: float, std: str, is_twice: bool, tmp_path: Path, caplog: Any
) -> None:
    graph = Graph()
    pixels = graph.add("Cast", graph.add("Transpose", "x", perm=[0, 1, 3, 2]), to=TensorProto.FLOAT)
    value = np.full((8, 8) if operator == "MatMul" else (), number, np.float32)
    graph.add(operator, pixels, graph.constant(value), output="y")
    dims: list[int | str] = ["n", 3, 8, 8]
    path = graph.save(tmp_path / "m.onnx", {"x": (dtype, dims)}, {"y": (TensorProto.FLOAT, dims)})
    plan_pipeline({"backend": "OnnxTensor", "model": str(path), "std": std})
    assert ("the model begins by normalising pixels 0..255 of input 'x' itself" in caplog.text) == is_twice


def test_names_of_nodes_made_do_not_collide(tmp_path: Path) -> None:
    constants = {"x_mean": np.float32(1), "x_std": np.float32(2)}
    nodes = [
        helper.make_node("Add", ["x", "x_mean"], ["x_normalized"]),
        helper.make_node("Mul", ["x_normalized", "x_std"], ["y"]),
    ]
    model = save_model(tmp_path / "m.onnx", nodes, {"x": DIMS["NxHxWxC"]}, {"y": DIMS["NxHxWxC"]}, constants)
    result = answer(onnx_node(model, mean=100, std=50), MAT)["result"]
    np.testing.assert_allclose(as_hwc(result), (normal(100, 50) + 1) * 2, atol=1e-5)


# -- several inputs ---------------------------------------------------------------------------------------------------


def pair(path: Path, left: Any, right: Any) -> str:
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in ("left", "right")]
    return save_model(path / "pair.onnx", nodes, {"left": left, "right": right}, {"left_out": left, "right_out": right})


NAMED = {"mean::left": "1, 2, 3", "mean::right": 100, "std::right": "10, 20, 30"}


@pytest.mark.parametrize("backend", ["OnnxTensor", "TorchTensor"])
def test_normalises_each_input_by_its_name(tmp_path: Path, backend: str) -> None:
    config = onnx_node(pair(tmp_path, DIMS["NxCxHxW"], DIMS["NxHxWxC"]))
    if backend == "TorchTensor":
        examples = torch.zeros(2, 3, HEIGHT, WIDTH), torch.zeros(2, HEIGHT, WIDTH, 3)
        config = torch_model(tmp_path / "pair.pt2", Pair(), *examples, shapes=batched(2))
    left, right = answer(config | NAMED | {"max": 2}, {"left": MAT, "right": MAT})["result"]
    np.testing.assert_allclose(as_hwc(left), normal("1, 2, 3"), atol=1e-5)
    np.testing.assert_allclose(as_hwc(right), normal(100, "10, 20, 30"), atol=1e-5)


def test_name_of_an_input_may_be_scoped_and_set_at_the_top(tmp_path: Path) -> None:
    node = onnx_node(pair(tmp_path, DIMS["NxCxHxW"], DIMS["NxCxHxW"]))
    config = {"global": {"mean::left": 1, "OnnxTensor::mean::right": 2, "std::left": 9}, "a": {**node, "mean::left": 3}}
    plan = plan_pipeline(config).plans["a"].backends[0]
    assert plan.params["means"] == (("left", (3.0,)), ("right", (2.0,)))
    assert plan.params["stds"] == (("left", (9.0,)),)


def test_one_mean_is_for_images_declared_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = onnx_node(pair(tmp_path, DIMS["NxHxWxC"], DIMS["NxHxWxC"]), **NUMBERS[1])
    with pipe(config) as run:
        for result in run({"data": [MAT, MAT]})["result"]:
            np.testing.assert_allclose(as_hwc(result), normal(**NUMBERS[1]), atol=1e-5)
    assert "applied to inputs 'left' and 'right' alike" in caplog.text


@pytest.mark.parametrize(
    ("right", "keys", "told"),
    [
        (["N", 1, HEIGHT, WIDTH], {"std": 3}, "key 'std': .* 2 have four dimensions .*; write \"std::left\" and so on"),
        (["N", 3, HEIGHT, WIDTH], {"mean::lft": 3}, "key 'mean::lft': .* no input 'lft'; did you mean 'left'"),
        (
            ["N", 3, HEIGHT, WIDTH],
            {"mean::left": "1, 2"},
            "key 'mean::left': .*: 2 numbers, and input 'left' has 3",
        ),
        (["N", 7], {"mean::right": "1, 2"}, "key 'mean::right': .*: one number for each channel needs an input NxCxHx"),
        (["N", 7], {"std::left": "1, 0, 1"}, "key 'std::left': expected numbers above 0"),
    ],
)
def test_refuses_numbers_that_fit_no_input(tmp_path: Path, right: Any, keys: Data, told: str) -> None:
    refused(onnx_node(pair(tmp_path, DIMS["NxCxHxW"], right), **keys), told)


def test_refuses_one_mean_for_inputs_without_shapes(tmp_path: Path) -> None:
    config = torch_model(tmp_path / "m.pt", Pair())
    refused(config | {"mean": 100}, r'2 inputs of undeclared shapes \(left, right\); write "mean::left" and so on')
    refused(config | {"mean::lft": 100}, "no input 'lft'; did you mean 'left'")


# -- before the model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "more", "told"),
    [
        (
            "NormalizeMat,OnnxTensor",
            {"mean": 100, "std": 50},
            'normalised already: write its keys as "NormalizeMat::mea',
        ),
        ("NormalizeMat", {"mean": 100}, "key 'std': NormalizeMat needs it"),
        ("NormalizeMat", {"mean": "", "std": 1}, "key 'mean': expected a number, or one for each channel"),
        ("NormalizeTensor", {"mean": "1, 2", "std": "1, 2, 3"}, "key 'mean': 2 numbers, and std has 3"),
        ("NormalizeMat", {"mean": 100, "std": 0}, "key 'std': expected numbers above 0"),
    ],
)
def test_refuses_to_normalise_twice_or_by_nothing(tmp_path: Path, backend: str, more: Data, told: str) -> None:
    model = {"model": one_node(tmp_path / "m.onnx", DIMS["NxHxWxC"])} if "Onnx" in backend else {}
    assert told in refusal({"backend": f"S[{backend},Identity]", **model, **more})


@pytest.mark.parametrize("value", [MAT, MAT.astype(np.float32), torch.from_numpy(MAT).permute(2, 0, 1)])
def test_refuses_image_of_other_channels(value: Any) -> None:
    backend = "NormalizeMat" if isinstance(value, np.ndarray) else "NormalizeTensor"
    wide = np.concatenate([value] * 2, -1) if backend == "NormalizeMat" else torch.cat([value[:1]] * 4)
    item = answer({"backend": backend, "mean": "1, 2, 3", "std": 2}, wide)
    assert "mean and std have 3 numbers, the image has" in str(item["error"])
    assert answer({"backend": backend, "mean": "1, 2, 3", "std": 2}, value)["result"].shape[-1] in (3, WIDTH)
