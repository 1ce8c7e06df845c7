"""The files that a plan reads: which weights a model has beside it, and who notices that they change."""

from __future__ import annotations

import argparse
import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from torchpipe_py.certificate import described
from torchpipe_py.encryption.model_file import outside_files
from torchpipe_py.plan import files
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.plan.config import Tables, parse_toml
from torchpipe_py.plan.files import file_hash, weights_of
from torchpipe_py.plan.sharing import shared_files
from torchpipe_py.tools.run.identity import identity_of

NODE = (
    '[n]\nbackend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,OnnxTensor]"\nresize_h = 64\nresize_w = 64\n'
    'color = "rgb"\nmodel = "m.onnx"\nshared = true\n'
)
DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model.onnx"


def elsewhere(name: str, location: str) -> TensorProto:
    """A tensor whose numbers are in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("offset", "0"), ("location", location), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def branch(name: str) -> onnx.GraphProto:
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
    return helper.make_graph([], name, [], [output], [elsewhere(name, f"{name}.bin")])


def everywhere() -> onnx.ModelProto:
    """A model with tensors in other files wherever there may be some."""
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=branch("then"), else_branch=branch("else")),
        helper.make_node("Constant", [], ["z"], value=elsewhere("z", "constant.bin")),
        helper.make_node("Own", [], ["w"], tensors=[elsewhere("w", "list.bin")], graphs=[branch("graphs")]),
    ]
    graph = helper.make_graph(nodes, "g", [], [], [elsewhere("a", "first.bin"), elsewhere("b", "first.bin")])
    graph.initializer.add(name="inside", data_type=TensorProto.FLOAT, dims=[2], float_data=[1, 2])
    graph.sparse_initializer.add(values=elsewhere("s", "values.bin"), indices=elsewhere("i", "indices.bin"))
    constant = helper.make_node("Constant", [], ["f"], value=elsewhere("f", "function.bin"))
    function = helper.make_function("own", "F", [], ["f"], [constant], [helper.make_opsetid("", 17)])
    model = helper.make_model(graph, functions=[function])
    model.training_info.add().algorithm.CopyFrom(branch("training"))
    return model


def test_weights_are_those_that_the_onnx_package_finds(tmp_path: Path) -> None:
    path, model = tmp_path / "m.onnx", everywhere()
    path.write_bytes(model.SerializeToString())
    found = weights_of(str(path))
    assert list(found) == outside_files(model)
    assert {"first.bin", "then.bin", "list.bin", "values.bin", "function.bin", "training.bin"} < {*found}


@pytest.mark.parametrize("content", [b"", b"\x08\x07\x3a\xff", b"\x89TPENC\r\n" + b"x" * 99, b"\xff\xff\xff"])
def test_other_files_have_no_weights_beside_them(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert weights_of(str(path)) == weights_of(str(tmp_path)) == weights_of("no\0name.onnx") == ()
    (tmp_path / "m.pt").write_bytes(everywhere().SerializeToString())
    assert weights_of(str(tmp_path / "m.pt")) == ()


def test_named_pipe_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the supervisor, which looks for weights, would wait for its other end."""
    path, opened = str(tmp_path / "m.onnx"), list[str]()
    os.mkfifo(path)
    monkeypatch.setattr(files, "open", lambda path, mode: opened.append(path) or io.BytesIO(), raising=False)
    assert (weights_of(path), opened) == ((), [])


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tables:
    """Those of a file whose model has its weights in ``weights.bin``, with other files beside it."""
    monkeypatch.chdir(tmp_path)
    model = onnx.load(DEMO)
    onnx.save(model, "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    shutil.copy("m.onnx", "m.onnx.bak")
    Path("p.toml").write_text(NODE, encoding="utf-8")
    return parse_toml("p.toml")


def replace(name: str) -> None:
    """Another file of this name, as ``mv`` leaves it."""
    content = np.frombuffer(Path(name).read_bytes(), np.uint8)
    Path("other").write_bytes((content ^ 1).tobytes())
    os.replace("other", name)


@pytest.mark.parametrize("model", ["m.onnx", "other.onnx & m.onnx", "m.onnx | other.onnx"])
def test_shared_nodes_have_other_files_once_their_weights_are_replaced(tables: Tables, model: str) -> None:
    shutil.copy(DEMO, "other.onnx")
    tables["n"]["model"] = model
    before = shared_files(tables)
    replace("m.onnx.bak")
    assert shared_files(tables) == before
    replace("weights.bin")
    assert shared_files(tables) != before


def test_value_that_no_path_has_names_no_file(tables: Tables) -> None:
    before = shared_files(tables)
    tables["n"] |= {"one": "", "other": "a\0b"}
    assert shared_files(tables) == before


def identity(tables: Tables) -> dict[str, Any]:
    args = argparse.Namespace(config="p.toml", imports=[], source="files", by="", ordered=False, node_name=None)
    args.outputs, args.param = [], None
    return identity_of(args, tables, plan_pipeline("p.toml"), "ndjson")["file"]


def test_run_and_certificate_name_the_same_files(tables: Tables) -> None:
    names = {os.path.abspath(name): file_hash(name) for name in ("m.onnx", "weights.bin")}
    assert identity(tables) == names
    certified = described(plan_pipeline("p.toml"), "p.toml", "", [])["files"]
    assert {os.path.abspath(each["path"]): each["sha256"] for each in certified} == names
    assert {(each["node"], each["key"]) for each in certified} == {("n", "model")}
