"""What is read of an ONNX file without the library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import save_model
from onnx import TensorProto, helper

from torchpipe_py.backends.model.onnx_graph import declared_tensors


@pytest.mark.parametrize("dims", [["N", 3, "H", "W"], [2, 300, 8, 8], [-1, 224, 224, 3], ["N", 2**40], []])
def test_the_sizes_of_inputs_and_outputs(tmp_path: Path, dims: list[int | str]) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT16, dims, doc_string="an input")
    untold = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([], "g", [value], [value, untold])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph, doc_string="a model").SerializeToString())
    inputs, outputs = declared_tensors(str(tmp_path / "m.onnx"))
    known = tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in dims)
    assert [(spec.name, spec.dims) for spec in inputs] == [("x", known)]
    assert [(spec.name, spec.dims) for spec in outputs] == [("x", known), ("y", ())]


def test_weights_among_the_inputs_are_left_out(tmp_path: Path) -> None:
    """As in files of IR version 3."""
    shape: list[int | str] = [1, 3, 8, 8]
    for constants, names in (({"w": np.zeros((1, 3, 8, 8), np.float32)}, ["x"]), ({}, ["x", "w"])):
        nodes = [helper.make_node("Relu", ["x"], ["y"])]
        path = save_model(tmp_path / "m.onnx", nodes, {"x": shape, "w": shape}, {"y": shape}, constants)
        assert [spec.name for spec in declared_tensors(path)[0]] == names


def test_another_file_and_a_part_of_one_have_none(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_model(path, [helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", 3]}, {"y": ["N", 3]})
    whole = path.read_bytes()
    told = declared_tensors(str(path))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert declared_tensors(str(path)) in (([], []), told)  # told where what is missing comes after the graph
    for content in (b"text", bytes(range(256)), b"\xff" * 100, b"PK\x03\x04", onnx.ModelProto().SerializeToString()):
        path.write_bytes(content)
        assert declared_tensors(str(path)) == ([], [])
    assert declared_tensors(str(tmp_path / "none.onnx")) == ([], [])
