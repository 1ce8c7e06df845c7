"""ONNX files: what is read of them without the library, and quantised ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import save_model
from onnx import TensorProto, helper, numpy_helper

from torchpipe_py import pipe
from torchpipe_py.backends.model.onnx_graph import declared_tensors, unsigned_model
from torchpipe_py.encryption.model_file import ModelFile

# -- what is read of an ONNX file without the library ------------------------------------------------------------------


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


# -- quantised ONNX models ---------------------------------------------------------------------------------------------


SCALE = 0.05


def quantised(zero: int = 0) -> onnx.ModelProto:
    """Conv, Relu, MaxPool, Conv, Relu, each with what it reads through a pair of int8: N×2×6×6 to N×2×2×2."""
    constants = {"scale": np.float32(SCALE), "zero": np.int8(zero)}
    nodes: list[Any] = []

    def paired(name: str) -> str:
        nodes.append(helper.make_node("QuantizeLinear", [name, "scale", "zero"], [f"{name}_q"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", "scale", "zero"], [f"{name}_dq"]))
        return f"{name}_dq"

    rng = np.random.default_rng(0)
    data = "x"
    for index, kernel in enumerate((3, 1)):
        constants[f"w{index}"] = rng.uniform(-1, 1, (2, 2, kernel, kernel)).astype(np.float32)
        nodes.append(helper.make_node("Conv", [paired(data), paired(f"w{index}")], [f"conv{index}"]))
        data = f"relu{index}" if index == 0 else "y"
        nodes.append(helper.make_node("Relu", [f"conv{index}"], [data]))
        if index == 0:
            nodes.append(helper.make_node("MaxPool", [paired(data)], ["pool"], kernel_shape=[2, 2], strides=[2, 2]))
            data = "pool"
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2, 2, 2])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def run(content: bytes, x: np.ndarray) -> np.ndarray:
    """As it is written: nothing is merged."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    y: np.ndarray = session.run(None, {"x": x})[0]
    return y


def zero_types(model: onnx.ModelProto) -> dict[str, int]:
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {node.input[0]: types[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"}


def test_what_relu_leaves_becomes_unsigned() -> None:
    model = quantised()
    changed = onnx.load_from_string(unsigned_model(model.SerializeToString()))
    onnx.checker.check_model(changed, full_check=True)
    int8, uint8 = TensorProto.INT8, TensorProto.UINT8
    assert zero_types(changed) == {"x": int8, "w0": int8, "conv0": uint8, "pool": uint8, "w1": int8}
    assert [node.op_type for node in changed.graph.node].count("Relu") == 1  # the last one gives the output
    x = np.random.default_rng(1).uniform(-2, 2, (3, 2, 6, 6)).astype(np.float32)
    before, after = (run(each.SerializeToString(), x) for each in (model, changed))
    assert before.any()
    assert np.array_equal(before, after)


@pytest.mark.parametrize("model", [quantised(zero=3), helper.make_model(helper.make_graph([], "empty", [], []))])
def test_what_is_not_symmetric_stays(model: onnx.ModelProto) -> None:
    assert onnx.load_from_string(unsigned_model(model.SerializeToString())) == model


def test_a_quantised_model_is_served(tmp_path: Path) -> None:
    path = tmp_path / "quantised.onnx"
    onnx.save(quantised(), str(path))
    (tmp_path / "empty").touch()
    assert ModelFile(str(path)).holds(b"QuantizeLinear")
    assert not ModelFile(str(tmp_path / "empty")).holds(b"QuantizeLinear")
    x = np.random.default_rng(1).uniform(-2, 2, (3, 2, 6, 6)).astype(np.float32)
    expected = run(path.read_bytes(), (x - 0.5) / 2)
    # One item at a time, since their order of adding may not be the same in a batch.
    with pipe({"backend": "OnnxTensor", "model": str(path), "max": 4, "mean": "0.5", "std": "2"}) as served:
        served(items := [{"data": torch.from_numpy(row[None])} for row in x])
    results = np.concatenate([item["result"].numpy() for item in items])
    assert np.abs(results - expected).max() <= 2 * SCALE
    assert np.abs(results - expected).mean() < SCALE / 10
