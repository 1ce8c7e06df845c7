"""Inputs of an ONNX file without a batch, as SAM's size of the image: fed whole where items run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import save_model
from kit.models import answer, onnx_node, refused
from onnx import helper

from torchpipe_py import ConfigError, InvalidRequest
from torchpipe_py.plan.build import plan_pipeline


@pytest.fixture
def scaled(tmp_path: Path) -> str:
    """``y`` = ``x`` · the product of ``size`` + ``shift``."""
    nodes = [
        helper.make_node("ReduceProd", ["size"], ["area"], keepdims=0),
        helper.make_node("Mul", ["x", "area"], ["xs"]),
        helper.make_node("Add", ["xs", "shift"], ["y"]),
    ]
    return save_model(tmp_path / "m.onnx", nodes, {"x": [1, 4], "size": [2], "shift": []}, {"y": [1, 4]})


@pytest.mark.parametrize("size", [np.float32([2, 3]), torch.tensor([2.0, 3.0]), [2, 3], np.float32([[2, 3]])])
@pytest.mark.parametrize("shift", [0.5, np.float32(0.5), np.float32([0.5]), torch.tensor(0.5)])
def test_takes_vectors_and_scalars_whole_where_items_run_alone(scaled: str, size: Any, shift: Any) -> None:
    data = {"x": np.ones((1, 4), np.float32), "size": size, "shift": shift}
    assert answer(onnx_node(scaled), data)["result"].tolist() == [[6.5] * 4]


@pytest.mark.parametrize("batch", [1, "n"])
def test_takes_tables_whole_beside_an_input_with_a_batch(tmp_path: Path, batch: Any) -> None:
    nodes = [helper.make_node("MatMul", ["x", "camera"], ["y"])]
    inputs = {"x": [batch, 3], "camera": [3, 3]}
    path = save_model(tmp_path / "m.onnx", nodes, inputs, {"y": [batch, 3]})
    camera = np.arange(9, dtype=np.float32).reshape(3, 3)
    for given in (camera, camera[None], torch.from_numpy(camera), camera.tolist()):
        assert answer(onnx_node(path), {"x": np.float32([[1, 1, 0]]), "camera": given})["result"].tolist() == [
            [3, 5, 7]
        ]
    path = save_model(tmp_path / "fixed.onnx", nodes, {"x": [3, 3], "camera": [3, 3]}, {"y": [3, 3]})
    refused(onnx_node(path), "input 'x' has a fixed batch of 3")


def test_says_that_a_table_may_have_no_batch(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "camera"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, {"x": ["n", 3], "camera": [3, 3]}, {"y": ["n", 3]})
    refused(onnx_node(path, max=8), "input 'camera' has a fixed batch of 3, .*; if it has no batch, .* with max = 1$")


def test_says_that_a_request_has_one_item(tmp_path: Path) -> None:
    """As points P×3 are, whose first dimension would be the batch."""
    path = save_model(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["p", 3]}, {"y": ["p", 3]})
    error = answer(onnx_node(path), np.ones((5, 3), np.float32))["error"]
    assert isinstance(error, InvalidRequest)
    assert "input 'x' takes 1x3, got 5x3; the first dimension counts items, and a request has one" in str(error)


def test_refuses_another_length_and_says_the_inputs(scaled: str) -> None:
    data = {"x": np.ones((1, 4), np.float32), "size": np.float32([1, 2, 3]), "shift": 0.5}
    error = answer(onnx_node(scaled), data)["error"]
    assert isinstance(error, InvalidRequest)
    assert str(error).endswith("input 'size' takes 1x2, got 3")


@pytest.mark.parametrize("keys", [{"max": 2}, {"postprocessor": "SoftmaxMax"}])
def test_refuses_them_in_batches_and_before_postprocessors_of_rows(scaled: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="input 'shift' is a scalar; one without a batch needs max = 1"):
        plan_pipeline(onnx_node(scaled, **keys))
    refused(onnx_node(scaled, **keys), "input 'shift' is a scalar")
