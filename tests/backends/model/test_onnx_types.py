"""Types of an ONNX model's inputs and outputs, optional inputs, and what cannot be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from kit.models import answer, one_node, onnx_node, refused
from onnx import TensorProto, helper, numpy_helper

from torchpipe_py import InvalidRequest, pipe
from torchpipe_py.backends.model.inputs import from_bfloat16, to_bfloat16
from torchpipe_py.plan.build import plan_pipeline

TEXT = "ä\0b"


def save(path: Path, node: Any, inputs: Any, outputs: Any, constants: Any = ()) -> str:
    graph = helper.make_graph([node], "graph", inputs, outputs, list(constants))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return str(path)


def tensor(name: str, dtype: int, dims: Any) -> Any:
    return helper.make_tensor_value_info(name, dtype, dims)


@pytest.fixture
def optional(tmp_path: Path) -> str:
    """``a + b``, where ``b`` is 10 unless it is given."""
    return save(
        tmp_path / "optional.onnx",
        helper.make_node("Add", ["a", "b"], ["y"]),
        [tensor("a", TensorProto.FLOAT, ["n", 2]), tensor("b", TensorProto.FLOAT, [2])],
        [tensor("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.full(2, 10, np.float32), "b")],
    )


def test_optional_inputs_of_a_batch_stay_with_their_requests(optional: str) -> None:
    a = torch.tensor([[1.0, 2.0]])
    given: list[Any] = [
        a,
        {"a": a, "b": torch.tensor([[1.0, 1.0]])},
        {"a": a},
        {"a": a, "b": np.zeros(2, np.float32)},
        [a],
    ]
    with pipe(onnx_node(optional, max=8)) as run:
        items = run([{"data": value} for value in given])
        results = [item["result"].tolist() for item in items]
        assert results == [[[11, 12]], [[2, 3]], [[11, 12]], [[1, 2]], [[11, 12]]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"b": torch.ones(1, 2)},
            "input 'a' is not in data; the model's inputs: a 1x2 float32, b 1x2 float32 (opt",
        ),
        ({"a": torch.ones(1, 2), "b": torch.ones(1, 3)}, "input 'b' takes 1x2, got 1x3"),
        ({"a": torch.ones(1, 2), "c": 1}, "the model has no input 'c'"),
        ([torch.ones(1, 2), torch.ones(1, 2)], "the model has 1 input, data holds 2"),
    ],
)
def test_refuses_wrong_optional_inputs(optional: str, given: Any, said: str) -> None:
    with pipe(onnx_node(optional)) as run:
        error = run({"data": given})["error"]
        assert isinstance(error, InvalidRequest)
        assert said in str(error)


def test_bfloat16_is_rounded_to_even_and_keeps_the_bits_of_nan() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    assert (to_bfloat16(from_bfloat16(bits)) == bits).all()
    numbers = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    expected = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (to_bfloat16(numbers) == expected).all()
    assert np.isnan(from_bfloat16(to_bfloat16(np.array([0x7F800001], np.uint32).view(np.float32)))).all()


@pytest.fixture
def texts(tmp_path: Path) -> str:
    return one_node(tmp_path / "texts.onnx", ["n", 1], dtype=TensorProto.STRING)


@pytest.mark.parametrize(
    "value", ["ä\0b", "ä\0b".encode(), ["ä\0b"], [["ä\0b".encode()]], np.array([["ä\0b"]], object)]
)
def test_takes_texts_of_every_form(texts: str, value: Any) -> None:
    with pipe(onnx_node(texts, max=4)) as run:
        assert [item["result"].tolist() for item in run([{"data": value}, {"data": "b"}])] == [[[TEXT]], [["b"]]]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"\xff", "input 'x' takes texts, got bytes that are not UTF-8"),
        ("a\ud800", "input 'x' takes texts, got one with half of a surrogate pair"),
        (torch.ones(1, 1), "input 'x' takes texts, got torch.float32"),
        (np.array([[1, "a"]], object), "input 'x' takes texts, got 1"),
        (["b", 2.5], "input 'x' takes texts, got 2.5"),
        (np.array([["a", "b"]], object), "input 'x' takes 1x1, got 1x2"),
    ],
)
def test_refuses_what_is_no_text(texts: str, value: Any, said: str) -> None:
    with pipe(onnx_node(texts)) as run:
        error = run({"data": value})["error"]
        assert isinstance(error, InvalidRequest)
        assert str(error) == said


def test_refuses_postprocessor_of_numbers_for_texts(tmp_path: Path) -> None:
    texts = one_node(tmp_path / "texts.onnx", ["n", 3], dtype=TensorProto.STRING)
    refused(onnx_node(texts, postprocessor="SoftmaxMax"), "SoftmaxMax takes numbers, and output 'y' has texts")


def test_refuses_model_without_inputs(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], ["y"], value_floats=[1.0, 2.0])
    model = save(tmp_path / "constant.onnx", constant, [], [tensor("y", TensorProto.FLOAT, [2])])
    refused(onnx_node(model), "constant.onnx: it has no input for a request's data")


@pytest.mark.parametrize("value", [torch.ones(1, 3).to_sparse(), torch.ones(1, 3, device="meta")])
def test_refuses_tensors_without_an_array(tmp_path: Path, value: torch.Tensor) -> None:
    error = answer(onnx_node(one_node(tmp_path / "m.onnx", ["n", 3])), value)["error"]
    assert isinstance(error, InvalidRequest)
    assert "input 'x': " in str(error)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (tensor("x", TensorProto.COMPLEX64, ["n", 2]), "input 'x' has elements of type complex64; supported: float32,"),
        (tensor("x", TensorProto.FLOAT8E4M3FN, ["n", 2]), "input 'x' has elements of type float8e4m3fn;"),
        (helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None), "input 'x' is a sequence, not a tensor"),
        (tensor("x", TensorProto.FLOAT, []), "input 'x' is a scalar; one without a batch needs max = 1"),
    ],
)
def test_plan_refuses_types_that_cannot_be_served(tmp_path: Path, form: Any, said: str) -> None:
    model = save(tmp_path / "odd.onnx", helper.make_node("Identity", ["x"], ["y"]), [form], [tensor("y", 1, ["n", 2])])
    with pytest.raises(ValueError, match="key 'model'") as raised:
        plan_pipeline(onnx_node(model, max=2))
    assert said in str(raised.value)
