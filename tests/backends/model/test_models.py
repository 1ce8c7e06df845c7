"""``OnnxTensor`` against ONNX Runtime itself, custom postprocessors, and headers of ONNX files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import Register, encode, model_of, picture, save_model
from kit.backends import Gate
from kit.models import Data, answer, one_node, onnx_node, reference, refused, tensors
from kit.waits import PROGRAM_WAIT, outcome, wait_queued
from onnx import TensorProto, helper

from torchpipe_py import BackendError, InvalidRequest, pipe, register_postprocessor
from torchpipe_py.backends.model import onnx_graph
from torchpipe_py.backends.model.normalisation import Normalisation
from torchpipe_py.backends.model.onnx_graph import (
    declared_tensors,
    model_bytes,
    note_normalisation,
    noted_normalisation,
    unsigned_model,
)
from torchpipe_py.encryption.model_file import ModelFile


def run_together(register: Register, values: list[Any], dense: bool = True, **config: Any) -> list[Data]:
    """The dicts of ``values`` after a run: the first alone, the others queued meanwhile, ``dense`` in one batch."""
    gate = Gate(blocks=lambda data: data is values[0])
    backend = f"S[{register(gate.backend)},{config.pop('backend', 'OnnxTensor')}]"
    items = [{"data": value} for value in values]
    with pipe({"backend": backend, **config}) as p, gate:
        futures = [p.submit(items[0])]
        gate.wait_entered()
        futures += [p.submit(item) for item in items[1:]]
        if dense:
            wait_queued(p, len(items) - 1)
        gate.open()
        for future in futures:
            outcome(future)
        sizes = p.stats()["nodes"]["node"]["batch_sizes"]
    assert sum(size * count for size, count in sizes.items()) == len(values)
    assert not dense or len(values) == 1 or max(sizes) == min(len(values) - 1, config.get("max", 1))
    return items


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9])
def test_runs_every_batch_size(register: Register, classifier: str, count: int) -> None:
    values = tensors(count, 3, 8, 8)
    (logits,) = reference(classifier, x=torch.cat(values))
    softmax = torch.from_numpy(logits).softmax(1)
    results = {
        name: [item["result"] for item in run_together(register, values, model=classifier, max=8, postprocessor=name)]
        for name in ("", "cpu", "SoftmaxCpu", "SoftmaxMax")
    }
    for name, expected in (("", torch.from_numpy(logits)), ("cpu", torch.from_numpy(logits)), ("SoftmaxCpu", softmax)):
        torch.testing.assert_close(torch.cat(results[name]), expected, rtol=1e-5, atol=1e-6)
    for index, (label, score) in enumerate(results["SoftmaxMax"]):
        assert (label, type(label), type(score)) == (int(logits[index].argmax()), int, float)
        assert score == pytest.approx(softmax[index].max().item(), abs=1e-6)


def test_results_are_not_overwritten_by_the_next_batch(classifier: str) -> None:
    values = tensors(2, 3, 8, 8)
    with pipe(onnx_node(classifier)) as p:
        first = p({"data": values[0]})["result"]
        kept = first.clone()
        second = p({"data": values[1]})["result"]
    assert torch.equal(first, kept)
    assert not torch.equal(second, kept)


@pytest.mark.parametrize(
    ("config", "mean", "std"),
    [
        ({"mean": 10}, 10, 1),
        ({"std": "2"}, 0, 2),
        ({"mean": [1, 2, 3], "std": 4}, [[[1.0]], [[2]], [[3]]], 4),
        ({"mean": "123.675, 116.28, 103.53", "std": 58.395}, [[[123.675]], [[116.28]], [[103.53]]], 58.395),
    ],
)
def test_pixels_are_converted_and_normalised_inside_the_model(
    classifier: str, config: Data, mean: Any, std: Any
) -> None:
    value = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8)
    before = Path(classifier).read_bytes()
    item = answer(onnx_node(classifier, **config), value)
    normal = (value.float() - torch.tensor(mean)) / std
    np.testing.assert_allclose(item["result"].numpy(), reference(classifier, x=normal)[0], atol=1e-5)
    assert Path(classifier).read_bytes() == before


def test_sizes_beside_the_image_are_not_normalised(tmp_path: Path) -> None:
    """Whichever of the two comes first."""
    image: dict[str, Any] = {"image": ["N", 3, 2, 2]}
    sizes: dict[str, Any] = {"sizes": ["N", 2]}
    nodes = [helper.make_node("Identity", [name], [f"{name}_told"]) for name in ("image", "sizes")]
    outputs = {"image_told": image["image"], "sizes_told": sizes["sizes"]}
    mat = picture(2, 2)
    for index, inputs in enumerate(({**image, **sizes}, {**sizes, **image})):
        model = save_model(tmp_path / f"sizes{index}.onnx", nodes, inputs, outputs)
        item = answer(onnx_node(model, mean="1, 2, 3", std=255, max=4), {"image": mat, "sizes": [480, 640]})
        pixels = torch.from_numpy((mat - np.array([1.0, 2, 3])) / 255).permute(2, 0, 1)[None]
        torch.testing.assert_close(item["result"][0], pixels.float())
        assert item["result"][1].tolist() == [[480, 640]]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.zeros(1, 4, 8, 8), "input 'x' takes 1x3x?x?, got 1x4x8x8"),
        (torch.zeros(2, 3, 8, 8), "input 'x' takes 1x3x?x?, got 2x3x8x8"),
        (torch.zeros(1, 8, 9, 3), "got 1x8x9x3; Mat2Tensor makes such a Tensor of H×W×C"),
        (np.full((1, 3, 1, 1), "words"), "input 'x' takes float32, got <U5"),
        (np.array(1.0), "input 'x' takes 1x3x?x?, got a scalar"),
    ],
)
def test_an_input_that_does_not_fit_fails_alone(classifier: str, value: Any, problem: str) -> None:
    items: list[Data] = [{"data": each} for each in (*tensors(2, 3, 8, 8), value, *tensors(1, 3, 8, 8))]
    with pipe(onnx_node(classifier, max=8)) as p:
        p(items)
        assert p.stats()["nodes"]["node"]["failed"] == 0
    assert ["result" in item for item in items] == [True, True, False, True]
    assert isinstance(items[2]["error"], InvalidRequest)
    assert problem in str(items[2]["error"])


@pytest.mark.parametrize("form", ["arrays", "images"])
def test_different_sizes_in_one_batch_are_never_stretched(register: Register, tmp_path: Path, form: str) -> None:
    """A 1×1 input beside an 8×8 one: 1×1 would broadcast."""
    axes = {"axes": [1, 2, 3]}
    model = one_node(tmp_path / "m", ["N", 3, "H", "W"], "ReduceSum", "axes", gives=["N"], constants=axes, keepdims=0)
    mats = [picture(8, 8), picture(8, 8), picture(8, 8)[:1, :1], picture(8, 8)[:1]]
    values: list[Any] = [mat.transpose(2, 0, 1)[None].copy() for mat in mats]
    more = {}
    if form == "images":
        values = [encode(mat, ".png") for mat in mats]
        more = {"backend": "DecodeMat,Mat2Tensor,OnnxTensor", "color": "bgr"}
    items = run_together(register, values, dense=False, model=model, max=8, **more)
    assert [item["result"].item() for item in items] == [float(mat.sum()) for mat in mats]


def test_pads_lone_request_to_fixed_batch(fixed_batch: str, classifier: str) -> None:
    """The model takes only batches of two."""
    (value,) = tensors(1, 3, 8, 8)
    item = answer(onnx_node(fixed_batch, min=2, max=2), value)
    np.testing.assert_allclose(item["result"].numpy(), reference(classifier, x=value)[0], rtol=1e-5, atol=1e-6)
    for batch in ({}, {"max": 4}, {"max": 2}):
        refused(onnx_node(fixed_batch, **batch), r"input 'x' has a fixed batch of 2, .* set min = 2 and max = 2$")


@pytest.mark.slow
def test_onnx_runtime_reports_nothing(classifier: str, tmp_path: Path) -> None:
    """From 1.29 on it stores an identifier in the home folder, and reports loaded models to its maker."""
    code = f"from torchpipe_py import pipe; pipe({{'backend': 'OnnxTensor', 'model': {classifier!r}}}).close()"
    hidden = ("CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME", "TF_BUILD", "GITHUB_ACTIONS")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=PROGRAM_WAIT, check=True)
    assert not [file for file in tmp_path.rglob("*") if "icrosoft" in str(file)]


# -- refusals at setup --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "dtype", "more", "problem"),
    [
        ([], TensorProto.FLOAT, {"max": 2}, "input 'x' is a scalar; one without a batch needs max = 1"),
        (["N", 1], TensorProto.COMPLEX64, {}, "input 'x' has elements of .*; supported:"),
        (["N", 3, 2, 2], TensorProto.UINT8, {"mean": 1}, "takes uint8, and is not just cast to floats: nothing casts"),
        (["N", 1], TensorProto.FLOAT, {"providers": "CPUExecutionProvder"}, "did you mean 'CPUExecutionProvider'"),
    ],
)
def test_refuses_model_that_does_not_fit(tmp_path: Path, dims: Any, dtype: int, more: Data, problem: str) -> None:
    refused({"a": onnx_node(one_node(tmp_path / "m.onnx", dims, dtype=dtype), **more)}, f"node 'a': .*{problem}")


def test_normalisation_needs_one_image(sum_and_difference: str) -> None:
    refused(onnx_node(sum_and_difference, mean=1), 'of its 2 inputs, none have four dimensions .*; write "mean::')


def test_names_kind_of_file_that_is_not_a_model(tmp_path: Path, classifier: str) -> None:
    path = tmp_path / "model.onnx"
    whole = Path(classifier).read_bytes()
    state, checkpoint = {"weight": torch.zeros(2)}, f"torchpipe export MODEL --weights {path} makes an ONNX file of it"
    for write, said in (
        (lambda: torch.save(state, path, _use_new_zipfile_serialization=False), f"it is a pickle, .*: {checkpoint}"),
        (lambda: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda: path.write_bytes(whole[: len(whole) // 2]), "begins as an ONNX file does; OnnxTensor takes .* whole"),
        (lambda: path.write_text("no model"), ""),
    ):
        write()
        for config in ({}, {"mean": 1}):
            refused(onnx_node(str(path), **config), f"model {path}: .*{said}")


@pytest.mark.parametrize("normalised", [{}, {"mean": 127}])
def test_weights_beside_a_model_are_found_and_missed(normalised: Data, tmp_path: Path) -> None:
    """As PyTorch's newer exporter writes them."""
    path = tmp_path / "m.onnx"
    one_node(path, ["N", 3, 2, 2], "Mul", "w", constants={"w": np.full((1, 3, 2, 2), 2, np.float32)})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    config = onnx_node(str(path), **normalised)
    assert answer(config, torch.full((3, 2, 2), 128.0))["result"].max() == (2 if normalised else 256)
    (tmp_path / "m.onnx.data").unlink()
    refused(config, r"m.onnx.data beside it, which is missing: move both together")


def test_weights_beyond_2_gib_stay_beside_a_model_with_mean(tmp_path: Path) -> None:
    path, size = tmp_path / "m.onnx", 192 * 3_000_000
    one_node(path, ["N", 192], "MatMul", "w", constants={"w": np.zeros((192, 1), np.float32)})
    model = onnx.load(path)
    (weights,) = model.graph.initializer
    weights.dims[1] = size // 192
    weights.ClearField("raw_data")
    weights.data_location = weights.EXTERNAL
    for key, value in (("location", "m.data"), ("offset", "0"), ("length", str(4 * size))):
        entry = weights.external_data.add()
        entry.key, entry.value = key, value
    path.write_bytes(model.SerializeToString())
    with (tmp_path / "m.data").open("wb") as file:
        file.truncate(4 * size)  # without taking a place on the disk
    content = model_bytes(ModelFile(str(path)), Normalisation(means=(("x", (1.0,)),)), with_weights=False)
    assert len(content) < 2**12
    assert [node.op_type for node in onnx.load_from_string(content).graph.node] == ["Sub", "Div", "MatMul"]


def test_results_have_labels(classifier: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    config = onnx_node(classifier, postprocessor="SoftmaxMax", labels=str(labels))
    (value,) = tensors(1, 3, 8, 8)
    labels.write_text("null\nün\ndeux\ntrois\nquatre\n", encoding="utf-8")
    best = reference(classifier, x=value)[0].argmax()
    assert answer(config, value)["result"][0] == ["null", "ün", "deux", "trois", "quatre"][best]
    labels.write_bytes(b"caf\xe9\n")
    refused(config, r"labels\.txt is not UTF-8 text: .* can't decode byte 0xe9")
    refused({**config, "labels": "none.txt"}, r"key 'labels': no such file: none\.txt")


# -- custom postprocessors ----------------------------------------------------------------------------------------

ZEROS = torch.zeros(1, 3, 8, 8)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("gives", "problem"),
    [
        ([], "Wrong returned 0 results for 1 item"),
        ({"a": 1}, "Wrong returned a dict; expected a list of one result for each item"),
        (None, "Wrong returned a NoneType; expected a list of one result for each item"),
    ],
)
def test_refuses_invalid_results_of_postprocessor(gives: Any, problem: str, classifier: str) -> None:
    class Wrong:
        def forward(self, outputs: list[Any]) -> Any:
            return gives

    assert register_postprocessor(Wrong, "wrong") is Wrong
    with pipe(onnx_node(classifier, postprocessor="wrong")) as p, pytest.raises(BackendError, match=problem):
        p({"data": ZEROS})


@pytest.mark.usefixtures("restored")
def test_annotations_of_postprocessor_are_parameters(classifier: str) -> None:
    class Boxes:
        factor: float
        threshold: float = 0.3  # a key of the model too
        names: str = ""

        def init(self, config: Data) -> None:
            own = {"factor": 2.0, "threshold": self.threshold, "names": self.names}
            assert config.pop("model").path == classifier
            assert config == {"labels": "", "k": 5, "max": 1, "node": "node", **own}

        def forward(self, outputs: list[Any]) -> list[Any]:
            return [(self.factor, self.threshold, self.names)] * len(outputs[0])

    register_postprocessor(Boxes, "boxes")

    config = onnx_node(classifier, postprocessor="boxes")
    for given, result in [
        ({"factor": 2}, (2.0, 0.3, "")),
        ({"factor": 1, "boxes::factor": 2, "threshold": 0.9, "names": "a,b"}, (2.0, 0.9, "a,b")),
    ]:
        assert answer({**config, **given}, ZEROS)["result"] == result
    refused(config, "key 'factor': boxes needs it")
    refused({**config, "factor": "x"}, "key 'factor': expected a finite number, got 'x'")
    refused({**config, "factor": 1, "factr": 2}, "key 'factr': unknown key; did you mean 'factor'")


# -- what is read of an ONNX file without the library ------------------------------------------------------------------


@pytest.mark.parametrize("dims", [["N", 3, "H", "W"], [2, 300, 8, 8], [-1, 224, 224, 3], ["N", 2**40], []])
def test_reads_declared_inputs_and_outputs(tmp_path: Path, dims: list[int | str]) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT16, dims, doc_string="an input")
    untold = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([], "g", [value], [value, untold])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph, doc_string="a model").SerializeToString())
    inputs, outputs = declared_tensors(str(tmp_path / "m.onnx"))
    known = tuple(dim if isinstance(dim, int) and dim > 0 else None for dim in dims)
    assert [(spec.name, spec.dims) for spec in inputs] == [("x", known)]
    assert [(spec.name, spec.dims) for spec in outputs] == [("x", known), ("y", ())]


def test_omits_weights_listed_as_inputs(tmp_path: Path) -> None:
    """As in files of IR version 3."""
    shape: list[int | str] = [1, 3, 8, 8]
    for constants, names in (({"w": np.zeros((1, 3, 8, 8), np.float32)}, ["x"]), ({}, ["x", "w"])):
        nodes = [helper.make_node("Relu", ["x"], ["y"])]
        path = save_model(tmp_path / "m.onnx", nodes, {"x": shape, "w": shape}, {"y": shape}, constants)
        assert [spec.name for spec in declared_tensors(path)[0]] == names


def test_invalid_onnx_file_declares_nothing(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("mean", "there"),
    [("123.675, 1e-05", True), ("x", False), ("1\n2", False), ("\x1b[2J", False), ("1" * 201, False), ("", False)],
)
def test_reports_only_numbers_of_a_files_normalisation(tmp_path: Path, mean: str, there: bool) -> None:
    path = save_model(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ["N", 3]}, {"y": ["N", 3]})
    note_normalisation(path, mean, "0.5")
    assert noted_normalisation(path) == (f'mean = "{mean}" and std = "0.5"' if there else "")


# -- quantised ONNX models ---------------------------------------------------------------------------------------------


SCALE = 0.05


def quantised(zero: int = 0) -> onnx.ModelProto:
    """Conv, Relu, MaxPool, Conv, Relu, with int8 pairs before each input: N×2×6×6 to N×2×2×2."""
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
    return model_of(nodes, {"x": ["n", 2, 6, 6]}, {"y": ["n", 2, 2, 2]}, constants)


def run(content: bytes, x: np.ndarray) -> np.ndarray:
    """Run the model without fusing nodes."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    y: np.ndarray = session.run(None, {"x": x})[0]
    return y


def zero_types(model: onnx.ModelProto) -> dict[str, int]:
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {node.input[0]: types[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"}


def test_values_after_relu_become_unsigned() -> None:
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


def test_header_of_a_file_that_is_written_anew_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``cp`` does, which cuts the file first. A map of it would end the process."""
    weights = {"w": np.zeros((300, 300), "f4")}
    path = save_model(
        tmp_path / "a.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 300]}, {"y": ["n", 300]},
        constants=weights,
    )  # fmt: skip
    assert [spec.name for spec in onnx_graph.read_header(path).inputs] == ["x"]
    right = onnx_graph.text_of

    def cut(*args: Any) -> str:
        os.truncate(path, 100)
        return right(*args)

    monkeypatch.setattr(onnx_graph, "text_of", cut)
    assert onnx_graph.read_header(path).problem == "its content is not that of one, or is cut off"


@pytest.mark.parametrize("model", [quantised(zero=3), helper.make_model(helper.make_graph([], "empty", [], []))])
def test_keeps_asymmetric_quantisation(model: onnx.ModelProto) -> None:
    assert onnx.load_from_string(unsigned_model(model.SerializeToString())) == model


def test_a_quantised_model_is_served(tmp_path: Path) -> None:
    path = tmp_path / "quantised.onnx"
    onnx.save(quantised(), str(path))
    (tmp_path / "empty").touch()
    assert ModelFile(str(path)).holds(b"QuantizeLinear")
    assert not ModelFile(str(tmp_path / "empty")).holds(b"QuantizeLinear")
    (tmp_path / "large").write_bytes(bytes(2**20 - 5) + b"QuantizeLinear")
    assert ModelFile(str(tmp_path / "large")).holds(b"QuantizeLinear")
    x = np.random.default_rng(1).uniform(-2, 2, (3, 2, 6, 6)).astype(np.float32)
    expected = run(path.read_bytes(), (x - 0.5) / 2)
    # One item at a time, since their order of adding may not be the same in a batch.
    with pipe({"backend": "OnnxTensor", "model": str(path), "max": 4, "mean": "0.5", "std": "2"}) as served:
        served(items := [{"data": torch.from_numpy(row[None])} for row in x])
    results = np.concatenate([item["result"].numpy() for item in items])
    assert np.abs(results - expected).max() <= 2 * SCALE
    assert np.abs(results - expected).mean() < SCALE / 10
