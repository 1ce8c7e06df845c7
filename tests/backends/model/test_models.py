"""``OnnxTensor`` against ONNX Runtime itself, and the postprocessors."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import Register, encode, picture, save_model
from fakes import PROGRAM_WAIT, Gate, outcome
from onnx import TensorProto, helper

from torchpipe_py import BackendError, BackendUnavailable, ConfigError, InvalidRequest, pipe, register_postprocessor
from torchpipe_py.backends.model.postprocess import SoftmaxMax

Data = dict[str, Any]


def tensors(count: int, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, *shape, generator=generator) for _ in range(count)]


def reference(model: str | bytes, **feed: Any) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {name: np.asarray(value) for name, value in feed.items()})


def run_together(register: Register, values: list[Any], dense: bool = True, **config: Any) -> list[Data]:
    """The dicts of ``values`` after a run: the first alone, the others queued meanwhile, ``dense`` in one batch."""
    gate = Gate(blocks=lambda data: data is values[0])
    backend = f"S[{register(gate.backend)},{config.pop('backend', 'OnnxTensor')}]"
    items = [{"data": value} for value in values]
    with pipe({"backend": backend, **config}) as p, gate:
        futures = [p.submit(items[0])]
        gate.wait_entered()
        futures += [p.submit(item) for item in items[1:]]
        gate.open()
        for future in futures:
            outcome(future)
        sizes = p.stats()["nodes"]["node"]["batch_sizes"]
    assert sum(size * count for size, count in sizes.items()) == len(values)
    assert not dense or len(values) == 1 or max(sizes) == min(len(values) - 1, config.get("max", 1))
    return items


@pytest.mark.parametrize("count", range(1, 10))
def test_every_batch_size(register: Register, classifier: str, count: int) -> None:
    values = tensors(count, 3, 8, 8)
    items = run_together(register, values, model=classifier, max=8)
    (wanted,) = reference(classifier, x=torch.cat(values))
    for item, row in zip(items, wanted, strict=True):
        assert item["result"].shape == (1, 5)
        assert item["result"].dtype == torch.float32
        np.testing.assert_allclose(item["result"].numpy()[0], row, rtol=1e-5, atol=1e-6)


def test_results_are_not_overwritten_by_the_next_batch(classifier: str) -> None:
    first, second = ({"data": value} for value in tensors(2, 3, 8, 8))
    with pipe({"backend": "OnnxTensor", "model": classifier}) as p:
        p(first)
        kept = first["result"].clone()
        p(second)
    assert torch.equal(first["result"], kept)
    assert not torch.equal(second["result"], kept)


@pytest.mark.parametrize("form", ["tensor", "CHW", "array", "float64", "float16", "non-contiguous"])
def test_forms_of_an_input(classifier: str, form: str) -> None:
    (value,) = tensors(1, 3, 8, 8)
    value = value.half().float()
    given: Any = {
        "tensor": value,
        "CHW": value[0],
        "array": value.numpy(),
        "float64": value.double(),
        "float16": value.half(),
        "non-contiguous": value.transpose(2, 3).contiguous().transpose(2, 3),
    }[form]
    item = {"data": given}
    with pipe({"backend": "OnnxTensor", "model": classifier}) as p:
        p(item)
    np.testing.assert_allclose(item["result"].numpy(), reference(classifier, x=value)[0], rtol=1e-5, atol=1e-6)


def test_pixels_are_converted_and_normalised_inside_the_model(register: Register, classifier: str) -> None:
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.120, 57.375]
    values = [torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8) for _ in range(4)]
    items = run_together(register, values, model=classifier, max=4, mean=mean, std="58.395, 57.120, 57.375")
    for item, value in zip(items, values, strict=True):
        # torchvision's Normalize
        normal = value.float().sub(torch.tensor(mean).view(-1, 1, 1)).div(torch.tensor(std).view(-1, 1, 1))
        np.testing.assert_allclose(item["result"].numpy(), reference(classifier, x=normal)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("config", "normal"),
    [
        ({"mean": 10}, lambda x: x - 10),
        ({"std": "2"}, lambda x: x / 2),
        ({"mean": [1, 2, 3], "std": 4}, lambda x: (x - torch.tensor([1.0, 2, 3]).view(3, 1, 1)) / 4),
    ],
)
def test_mean_or_std_alone_or_one_for_all_channels(classifier: str, config: dict[str, Any], normal: Any) -> None:
    (value,) = tensors(1, 3, 8, 8)
    item = {"data": value}
    with pipe({"backend": "OnnxTensor", "model": classifier, **config}) as p:
        p(item)
    np.testing.assert_allclose(item["result"].numpy(), reference(classifier, x=normal(value))[0], atol=1e-5)


def test_mean_reaches_a_branch_inside_the_model(models: Path) -> None:
    """The branches of an ``If`` read the input by its name from outside."""
    output = helper.make_tensor_value_info("branch", TensorProto.FLOAT, None)
    branches = {
        name: helper.make_graph([helper.make_node("Identity", ["x"], ["branch"])], name, [], [output])
        for name in ("then_branch", "else_branch")
    }
    model = save_model(
        models / "branch.onnx",
        [helper.make_node("If", ["yes"], ["y"], **branches)],
        {"x": ["N", 3, "H", "W"]},
        {"y": ["N", 3, "H", "W"]},
        {"yes": np.array(True)},
    )
    item = {"data": torch.full((1, 3, 2, 2), 7.0)}
    with pipe({"backend": "OnnxTensor", "model": model, "mean": 5, "std": 2}) as p:
        p(item)
    assert item["result"].unique().tolist() == [1.0]


def test_several_inputs_and_outputs(register: Register, sum_and_difference: str) -> None:
    values = [[torch.tensor([[float(n), 1.0]]), torch.tensor([[10.0, float(n)]])] for n in range(5)]
    for item, (a, b) in zip(run_together(register, values, model=sum_and_difference, max=4), values, strict=True):
        total, difference = item["result"]
        assert torch.equal(total, a + b)
        assert torch.equal(difference, a - b)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (torch.zeros(1, 2), "the model has 2 inputs, data holds 1"),
        ([torch.zeros(1, 2)] * 3, "the model has 2 inputs, data holds 3"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], "input 'b' takes 1x2, got 1x3"),
        ([torch.zeros(2, 2), torch.zeros(1, 2)], "input 'a' takes 1x2, got 2x2"),
        ([torch.zeros(1, 2), "text"], "input 'b' takes a tensor, got str"),
        ([torch.zeros(1, 2), np.array([["text", "words"]])], "input 'b' takes float32, got <U5"),
        ([torch.zeros(1, 2), np.array(1.0)], "input 'b' takes 1x2, got a scalar"),
    ],
)
def test_inputs_that_do_not_fit_are_the_outcome_of_their_item(sum_and_difference: str, data: Any, problem: str) -> None:
    good = {"data": [torch.zeros(1, 2), torch.zeros(1, 2)]}
    with pipe({"backend": "OnnxTensor", "model": sum_and_difference, "max": 2}) as p:
        p([good, bad := {"data": data}])
        assert p.stats()["nodes"]["node"]["failed"] == 0
    assert "result" in good
    assert "result" not in bad
    assert isinstance(bad["error"], InvalidRequest)
    assert problem in str(bad["error"])


@pytest.mark.parametrize("position", range(4))
def test_a_tensor_of_the_wrong_shape_fails_alone(classifier: str, position: int) -> None:
    items: list[Data] = [{"data": value} for value in tensors(3, 3, 8, 8)]
    items.insert(position, {"data": torch.zeros(1, 4, 8, 8)})
    with pipe({"backend": "OnnxTensor", "model": classifier, "max": 8}) as p:
        p(items)
    assert ["result" in item for item in items] == [index != position for index in range(4)]
    assert "input 'x' takes 1x3x?x?, got 1x4x8x8" in str(items[position]["error"])


@pytest.mark.parametrize("form", ["arrays", "images"])
def test_different_sizes_in_one_batch_are_never_stretched(register: Register, models: Path, form: str) -> None:
    """A 1×1 input beside an 8×8 one: 1×1 would broadcast."""
    nodes = [helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)]
    constants = {"axes": np.array([1, 2, 3])}
    path = models / "total.onnx"
    model = save_model(path, nodes, {"x": ["N", 3, "H", "W"]}, {"y": ["N"]}, constants)
    mats = [picture(8, 8), picture(8, 8), picture(8, 8)[:1, :1], picture(8, 8)[:1]]
    if form == "images":
        values: list[Any] = [encode(mat, ".png") for mat in mats]
        backend = "DecodeMat,Mat2Tensor,OnnxTensor"
    else:
        values, backend = [mat.transpose(2, 0, 1)[None].copy() for mat in mats], "OnnxTensor"
    color = {"color": "bgr"} if form == "images" else {}
    items = run_together(register, values, dense=False, backend=backend, model=model, max=8, **color)
    assert [item["result"].item() for item in items] == [float(mat.sum()) for mat in mats]


# -- refusals at setup --------------------------------------------------------------------------------------------


def test_a_provider_that_is_not_there(classifier: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe({"a": {"backend": "OnnxTensor", "model": classifier, "providers": "CPUExecutionProvder"}})
    assert str(caught.value).startswith("config: node 'a': OnnxTensor: ")
    assert "not installed; did you mean 'CPUExecutionProvider'?" in str(caught.value)


def test_normalisation_needs_one_floating_image_input(sum_and_difference: str, models: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    dims: dict[str, list[int | str]] = {"x": ["N", 3, 2, 2]}
    bytes_ = save_model(models / "bytes.onnx", nodes, dims, {"y": dims["x"]}, dtype=TensorProto.UINT8)
    dims = {"x": ["N", "H", "W", 3]}
    last = save_model(models / "last.onnx", nodes, dims, {"y": dims["x"]})
    problems = {
        sum_and_difference: "one input NxCxHxW; of its 2 inputs 0",
        bytes_: "need a floating input",
        last: "looks like NxHxWxC",
    }
    for model, problem in problems.items():
        with pytest.raises(ConfigError, match=problem):
            pipe({"backend": "OnnxTensor", "model": model, "mean": 1})


def test_sizes_beside_the_image_are_not_normalised(models: Path) -> None:
    """Whichever of the two comes first."""
    image: dict[str, list[int | str]] = {"image": ["N", 3, 2, 2]}
    sizes: dict[str, list[int | str]] = {"sizes": ["N", 2]}
    nodes = [helper.make_node("Identity", [name], [f"{name}_told"]) for name in ("image", "sizes")]
    outputs = {"image_told": image["image"], "sizes_told": sizes["sizes"]}
    mat = picture(2, 2)
    for index, inputs in enumerate(({**image, **sizes}, {**sizes, **image})):
        model = save_model(models / f"sizes{index}.onnx", nodes, inputs, outputs)
        config = {"backend": "OnnxTensor", "model": model, "mean": "1, 2, 3", "std": 255, "max": 4}
        with pipe(config) as p:
            p(item := {"data": {"image": mat, "sizes": [480, 640]}})
        pixels = torch.from_numpy((mat - np.array([1.0, 2, 3])) / 255).permute(2, 0, 1)[None]
        torch.testing.assert_close(item["result"][0], pixels.float())
        assert item["result"][1].tolist() == [[480, 640]]


@pytest.mark.parametrize("batch", [{}, {"max": 4}, {"max": 2}, {"min": 1, "max": 2}])
def test_a_fixed_batch_takes_no_other(fixed_batch: str, batch: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"input 'x' has a fixed batch of 2, .* or set min = 2 and max = 2$"):
        pipe({"backend": "OnnxTensor", "model": fixed_batch, **batch})


def test_a_lone_request_to_a_fixed_batch_of_two(fixed_batch: str, classifier: str) -> None:
    """What is built, works: a batch of two is all that this model takes."""
    (value,) = tensors(1, 3, 8, 8)
    item = {"data": value}
    with pipe({"backend": "OnnxTensor", "model": fixed_batch, "min": 2, "max": 2}) as p:
        p(item)
    np.testing.assert_allclose(item["result"].numpy(), reference(classifier, x=value)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [{}, {"mean": 1}])
def test_a_file_that_is_no_model(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "text.onnx"
    path.write_text("no model")
    with pytest.raises(ConfigError, match=f"model {path}: "):
        pipe({"backend": "OnnxTensor", "model": str(path), **config})


@pytest.mark.parametrize("config", [{}, {"mean": 1}])
def test_what_a_file_is_that_is_no_model(tmp_path: Path, classifier: str, config: dict[str, Any]) -> None:
    path = tmp_path / "model.onnx"
    whole = Path(classifier).read_bytes()
    checkpoint = f"torchpipe export MODEL --weights {path} makes an ONNX file of it"
    state = {"weight": torch.zeros(2)}

    def script(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/constants.pkl", b"")

    for write, said in (
        (lambda: torch.save(state, path), f"it is a PyTorch checkpoint: {checkpoint}"),
        (lambda: torch.save(state, path, _use_new_zipfile_serialization=False), f"it is a pickle, .*: {checkpoint}"),
        (lambda: path.write_bytes(b"PK\x03\x04" + bytes(600)), "it is a zip archive, .*cut short or damaged"),
        (lambda: path.write_text("\n<!DOCTYPE html><p>Sign in"), "it is an HTML page"),
        (lambda: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda: path.write_bytes(whole[: len(whole) // 2]), "begins as an ONNX file does; OnnxTensor takes .* whole"),
        (lambda: script(path), r"TorchScript or a \.pt2 file: TorchTensor takes it"),
    ):
        write()
        with pytest.raises(ConfigError, match=f"model {path}: .*{said}"):
            pipe({"backend": "OnnxTensor", "model": str(path), **config})
    if not config:
        path.write_bytes(b"")
        with pytest.raises(ConfigError, match="it is empty"):
            pipe({"backend": "OnnxTensor", "model": str(path)})


def test_one_session_for_all_instances(classifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original = onnxruntime.InferenceSession

    def counted(*args: Any, **options: Any) -> Any:
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", counted)
    with pipe(
        {"backend": "OnnxTensor", "model": classifier, "instance_num": 4, "providers": "CPUExecutionProvider"}
    ) as p:
        p([{"data": value} for value in tensors(8, 3, 8, 8)])
    assert len(made) == 1


def test_the_session_has_run_its_smallest_and_largest_batch_before_the_first_request(monkeypatch):
    sizes: list[int] = []
    made = onnxruntime.InferenceSession

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._session = made(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def run(self, names: Any, feed: Any) -> Any:
            sizes.append(len(next(iter(feed.values()))))
            return self._session.run(names, feed)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Watched)
    model = str(Path(__file__).parents[3] / "configs" / "demo" / "model.onnx")
    with pipe({"backend": "OnnxTensor", "model": model, "max": 8, "instance_num": 3}):
        assert sizes == [1, 1, 1, 1, 1, 8]


def test_the_model_file_is_not_changed(classifier: str) -> None:
    before = Path(classifier).read_bytes()
    with pipe({"backend": "OnnxTensor", "model": classifier, "mean": 1, "std": 2}):
        pass
    assert Path(classifier).read_bytes() == before
    onnx.checker.check_model(classifier)


def test_onnx_runtime_takes_mats_as_tensorrt_does(classifier: str) -> None:
    """So that ``FirstAvailable[TensorrtTensor,OnnxTensor]`` takes the same requests on every machine."""
    mats = [np.random.default_rng(seed).integers(0, 256, (8, 6, 3), np.uint8) for seed in range(3)]
    planes = [torch.from_numpy(mat).permute(2, 0, 1) for mat in mats]
    with pipe({"backend": "OnnxTensor", "model": classifier, "max": 4, "batching_timeout": 20}) as p:
        items: list[Data] = [{"data": value} for value in (*mats, *planes)]
        p(items)
    for mat, tensor in zip(items[:3], items[3:], strict=True):
        torch.testing.assert_close(mat["result"], tensor["result"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tensorrt_says_what_is_missing(classifier: str) -> None:
    with pytest.raises(BackendUnavailable, match="node 'node': TensorrtTensor: "):
        pipe({"backend": "TensorrtTensor", "model": classifier})
    with pytest.raises(ConfigError, match="key 'precision': expected one of fp32, fp16, int8, best, got 'fp8'"):
        pipe({"backend": "TensorrtTensor", "model": classifier, "precision": "fp8"})


# -- postprocessors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
def test_postprocessors(register: Register, classifier: str, count: int) -> None:
    values = tensors(count, 3, 8, 8)
    (logits,) = reference(classifier, x=torch.cat(values))
    softmax = torch.from_numpy(logits).softmax(1)
    results = {
        name: [item["result"] for item in run_together(register, values, model=classifier, max=4, postprocessor=name)]
        for name in ("cpu", "SoftmaxCpu", "SoftmaxMax")
    }
    for index in range(count):
        torch.testing.assert_close(results["cpu"][index], torch.from_numpy(logits[index : index + 1]))
        torch.testing.assert_close(results["SoftmaxCpu"][index], softmax[index : index + 1])
        label, score = results["SoftmaxMax"][index]
        assert (label, type(label), type(score)) == (int(logits[index].argmax()), int, float)
        assert score == pytest.approx(softmax[index].max().item(), abs=1e-6)


def test_cpu_of_several_outputs(sum_and_difference: str) -> None:
    item: Data = {"data": [torch.ones(1, 2), torch.ones(1, 2)]}
    with pipe({"backend": "OnnxTensor", "model": sum_and_difference, "postprocessor": "cpu"}) as p:
        p(item)
    assert [part.tolist() for part in item["result"]] == [[[2.0, 2.0]], [[0.0, 0.0]]]


def test_labels(classifier: str, tmp_path: Path) -> None:
    labels = tmp_path / "labels.txt"
    config = {"backend": "OnnxTensor", "model": classifier, "postprocessor": "SoftmaxMax", "labels": str(labels)}
    (value,) = tensors(1, 3, 8, 8)
    labels.write_text("null\nün\ndeux\ntrois\nquatre\n", encoding="utf-8")
    item = {"data": value}
    with pipe(config) as p:
        p(item)
    assert item["result"][0] == ["null", "ün", "deux", "trois", "quatre"][reference(classifier, x=value)[0].argmax()]
    labels.write_bytes(b"caf\xe9\n")
    with pytest.raises(ConfigError, match=r"labels\.txt is no UTF-8 text: .* can't decode byte 0xe9"):
        pipe(config)
    labels.write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"labels\.txt has 2 lines, the model has 5 classes"):
        pipe(config)
    with pytest.raises(ConfigError, match=r"key 'labels': no such file: none\.txt"):
        pipe({**config, "labels": "none.txt"})


def test_one_logit_is_refused_before_any_request(models: Path) -> None:
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[1])]
    model = save_model(models / "logit.onnx", nodes, {"x": ["N", 3]}, {"y": ["N", 1]})
    with pytest.raises(ConfigError, match="TopK of one class is always that class"):
        pipe({"backend": "OnnxTensor", "model": model, "postprocessor": "TopK"})


def test_softmax_max_takes_one_row_for_each_item(sum_and_difference: str, models: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    dims: dict[str, list[int | str]] = {"x": ["N", 3, 2, 2]}
    model = save_model(models / "image.onnx", nodes, dims, {"y": dims["x"]})
    with pytest.raises(ConfigError, match=r"SoftmaxMax takes an output NxC, got \?x3x2x2"):
        pipe({"backend": "OnnxTensor", "model": model, "postprocessor": "SoftmaxMax"})


@pytest.mark.usefixtures("restored")
def test_one_of_ones_own_may_make_rows_of_an_output_of_another_shape(models: Path) -> None:
    class Pooled(SoftmaxMax):
        def forward(self, outputs: list[Any]) -> list[Any]:
            return super().forward([outputs[0].mean((2, 3))])

    register_postprocessor(Pooled, "pooled")
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    dims: dict[str, list[int | str]] = {"x": ["N", 3, 2, 2]}
    model = save_model(models / "features.onnx", nodes, dims, {"y": dims["x"]})
    with pipe({"backend": "OnnxTensor", "model": model, "postprocessor": "pooled"}) as p:
        assert p({"data": torch.zeros(1, 3, 2, 2)})["result"] == (0, pytest.approx(1 / 3))


@pytest.mark.usefixtures("restored")
def test_a_postprocessor_of_ones_own(classifier: str) -> None:
    class Sizes:
        """No init, and one result too few for a batch of three."""

        def forward(self, outputs: list[Any]) -> list[Any]:
            return [len(outputs[0])] * min(2, len(outputs[0]))

    assert register_postprocessor(Sizes, "sizes") is Sizes
    with pytest.raises(ConfigError, match="'cpu' is registered already"):
        register_postprocessor(Sizes, "cpu")
    item: Data = {"data": torch.zeros(1, 3, 8, 8)}
    with pipe({"backend": "OnnxTensor", "model": classifier, "postprocessor": "sizes"}) as p:
        p(item)
    assert item["result"] == 1


@pytest.mark.usefixtures("restored")
def test_what_a_postprocessor_annotates_are_its_parameters(classifier: str) -> None:
    class Boxes:
        factor: float
        threshold: float = 0.3  # a key of the model too
        names: str = ""

        def init(self, config: dict[str, Any]) -> None:
            assert config == {
                "labels": "",
                "k": 5,
                "max": 1,
                "factor": 2.0,
                "threshold": self.threshold,
                "names": self.names,
            }

        def forward(self, outputs: list[Any]) -> list[Any]:
            return [(self.factor, self.threshold, self.names)] * len(outputs[0])

    register_postprocessor(Boxes, "boxes")
    config = {"backend": "OnnxTensor", "model": classifier, "postprocessor": "boxes"}
    for given, result in [
        ({"factor": 2}, (2.0, 0.3, "")),
        ({"factor": 1, "boxes::factor": 2, "threshold": 0.9, "names": "a,b"}, (2.0, 0.9, "a,b")),
    ]:
        with pipe({**config, **given}) as p:
            assert p({"data": torch.zeros(1, 3, 8, 8)})["result"] == result
    for wrong, why in [
        ({}, "key 'factor': boxes needs it"),
        ({"factor": "x"}, "key 'factor': expected a finite number, got 'x'"),
        ({"factor": 1, "factr": 2}, "key 'factr': unknown key; did you mean 'factor'"),
    ]:
        with pytest.raises(ConfigError, match=why):
            pipe({**config, **wrong})


@pytest.mark.usefixtures("restored")
def test_labels_that_a_postprocessor_annotates_are_found_beside_the_file(classifier: str, tmp_path: Path) -> None:
    class Named:
        labels: str

        def init(self, config: dict[str, Any]) -> None:
            assert config["labels"] == self.labels

        def forward(self, outputs: list[Any]) -> list[Any]:
            return [Path(self.labels).read_text(encoding="utf-8")] * len(outputs[0])

    register_postprocessor(Named, "named")
    (tmp_path / "names.txt").write_text("one", encoding="utf-8")
    toml = f'[a]\nbackend = "OnnxTensor"\nmodel = "{classifier}"\npostprocessor = "named"\nlabels = "names.txt"\n'
    (tmp_path / "a.toml").write_text(toml, encoding="utf-8")
    with pipe(str(tmp_path / "a.toml")) as p:
        assert p({"data": torch.zeros(1, 3, 8, 8)})["result"] == "one"


@pytest.mark.usefixtures("restored")
def test_a_postprocessor_that_annotates_what_no_key_can_have(classifier: str) -> None:
    class Odd:
        table: dict[str, int]

        def forward(self, outputs: list[Any]) -> list[Any]:
            return outputs

    register_postprocessor(Odd, "odd")
    with pytest.raises(ConfigError, match="key 'postprocessor': Odd: parameter 'table' is annotated"):
        pipe({"backend": "OnnxTensor", "model": classifier, "postprocessor": "odd"})


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("gives", "told"), [({"a": 1}, "a dict"), (None, "a NoneType"), ("x", "a str")])
def test_a_postprocessor_that_gives_no_list(gives: Any, told: str, classifier: str) -> None:
    class Wrong:
        def forward(self, outputs: list[Any]) -> Any:
            return gives

    register_postprocessor(Wrong, "wrong")
    why = f"Wrong gave {told}; expected a list of one result for each item"
    config = {"backend": "OnnxTensor", "model": classifier, "postprocessor": "wrong"}
    with pipe(config) as p, pytest.raises(BackendError, match=why):
        p({"data": torch.zeros(1, 3, 8, 8)})


@pytest.mark.parametrize("normalised", [{}, {"mean": 127}])
def test_weights_beside_a_model_are_found_and_missed(normalised: dict[str, Any], tmp_path: Path) -> None:
    """As PyTorch's newer exporter writes them."""
    path, dims = tmp_path / "m.onnx", ["N", 3, 2, 2]
    constants = {"w": np.full((1, 3, 2, 2), 2, np.float32)}
    save_model(path, [helper.make_node("Mul", ["x", "w"], ["y"])], {"x": dims}, {"y": dims}, constants)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    config = {"backend": "OnnxTensor", "model": str(path), **normalised}
    with pipe(config) as p:
        assert p({"data": torch.full((3, 2, 2), 128.0)})["result"].max() == (2 if normalised else 256)
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(ConfigError, match=r"m.onnx.data beside it, which is not there: move both together"):
        pipe(config)


def test_an_empty_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    for normalised in ({}, {"mean": 127}):
        with pytest.raises(ConfigError, match="it is empty"):
            pipe({"backend": "OnnxTensor", "model": str(tmp_path / "m.onnx"), **normalised})


def test_onnx_runtime_reports_nothing(classifier: str, tmp_path: Path) -> None:
    """From 1.29 on it keeps an identifier at home, and tells its maker which models it loads."""
    code = f"from torchpipe_py import pipe; pipe({{'backend': 'OnnxTensor', 'model': {classifier!r}}}).close()"
    hidden = ("CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME", "TF_BUILD", "GITHUB_ACTIONS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "HOME": str(tmp_path)}, timeout=PROGRAM_WAIT, check=False
    )
    assert done.returncode == 0
    assert not [file for file in tmp_path.rglob("*") if "icrosoft" in str(file)]


@pytest.mark.parametrize(
    ("dims", "dtype", "said"),
    [([], TensorProto.FLOAT, "is a scalar; expected a batch dimension"), (["N", 1], TensorProto.STRING, "supported:")],
)
def test_an_input_that_no_tensor_fits_is_told_with_its_model(
    tmp_path: Path, dims: list[int | str], dtype: int, said: str
) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    model = save_model(tmp_path / "odd.onnx", nodes, {"x": dims}, {"y": dims}, dtype=dtype)
    with pytest.raises(ConfigError, match=rf"OnnxTensor: model {model}: input 'x' .*{said}"):
        pipe({"backend": "OnnxTensor", "model": model})
