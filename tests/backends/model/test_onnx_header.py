"""What is read of an ONNX file without the library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import save_model
from onnx import TensorProto, helper

from torchpipe_py.backends.model.onnx_header import first_output, input_channels


def model(path: Path, inputs: dict[str, list[int | str]], constants: dict[str, np.ndarray] | None = None) -> str:
    name = next(iter(inputs), "w")
    return save_model(
        path, [helper.make_node("Relu", [name], ["y"])], inputs, {"y": list(inputs.get(name, []))}, constants
    )


@pytest.mark.parametrize(
    ("dims", "channels"),
    [
        (["N", 3, "H", "W"], 3),
        ([1, 1, 28, 28], 1),
        ([2, 300, 8, 8], 300),
        (["N", 3, 4, 3], 3),
        (["N", "C", 8, 8], None),
        ([-1, -1, 8, 8], None),  # as some exporters write what is open
        (["N", 224, 224, 3], None),  # N×H×W×C
        (["N", 3], None),
    ],
)
def test_the_channels_of_the_input(tmp_path: Path, dims: list[int | str], channels: int | None) -> None:
    assert input_channels(model(tmp_path / "m.onnx", {"x": dims})) == channels


def test_weights_among_the_inputs_are_none(tmp_path: Path) -> None:
    """As in files of IR version 3."""
    shape: list[int | str] = [1, 3, 8, 8]
    path = tmp_path / "m.onnx"
    model(path, {"x": shape, "w": shape}, {"w": np.zeros((1, 3, 8, 8), np.float32)})
    assert input_channels(str(path)) == 3
    assert input_channels(model(path, {"x": shape, "w": shape})) is None


def test_what_is_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    whole = Path(model(path, {"x": ["N", 3, 8, 8]})).read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert input_channels(str(path)) in (None, 3)  # 3 where what is missing comes after the graph
    for content in (b"text", bytes(range(256)), b"\xff" * 100, b"PK\x03\x04", onnx.ModelProto().SerializeToString()):
        path.write_bytes(content)
        assert input_channels(str(path)) is None
    assert input_channels(str(tmp_path / "none.onnx")) is None


def test_any_dimension_that_onnx_writes(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [None, 2**40, None, None], doc_string="an input")
    graph = helper.make_graph([], "g", [value], [value])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph, doc_string="a model").SerializeToString())
    assert input_channels(str(tmp_path / "m.onnx")) == 2**40


def test_the_sizes_of_the_first_output(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    nodes = [helper.make_node("Relu", ["x"], [name]) for name in ("y", "z")]
    save_model(path, nodes, {"x": ["N", 5]}, {"y": ["N", 5], "z": [1, 2, 3]})
    assert first_output(str(path)) == [0, 5]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert first_output(str(path)) in ([], [0, 5])
    graph = helper.make_graph([], "g", [], [helper.make_empty_tensor_value_info("y")])
    path.write_bytes(helper.make_model(graph).SerializeToString())
    assert first_output(str(path)) == []
    assert first_output(str(tmp_path / "none.onnx")) == []
