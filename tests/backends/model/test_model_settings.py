"""What is wrong with a model's parameters is told when they are planned: by ``pipe`` and by ``torchpipe check``."""

from __future__ import annotations

import logging
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import tomli
import torch
from conftest import Register, save_model
from onnx import helper

from torchpipe_py import Backend, ConfigError, Param, Registry, pipe, registry
from torchpipe_py.backends.params import REQUIRED
from torchpipe_py.cli import main, signature
from torchpipe_py.plan.build import plan_pipeline


@pytest.fixture
def config(classifier: str) -> dict[str, Any]:
    return {"backend": "OnnxTensor", "model": classifier}


@pytest.fixture
def labels(tmp_path: Path) -> str:
    path = tmp_path / "labels.txt"
    path.write_text("a\nb\nc\nd\ne\n")
    return str(path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"std": "1, 0, 3"}, "key 'std': expected numbers above 0, since channels are divided by them, got 0"),
        ({"std": [1, -2.5, 3]}, "key 'std': expected numbers above 0, since channels are divided by them, got -2.5"),
        ({"mean": "1, 2"}, "key 'mean': 2 numbers, and the input of .* has 3 channels; give one for each channel, or"),
        ({"mean": 9, "std": "1, 2, 3, 4"}, "key 'std': 4 numbers, and the input of .* has 3 channels; give one for"),
        ({"min": 8, "max": 4}, "key 'min': min = 8 is larger than max = 4"),
        ({"min": 4}, "key 'min': min = 4 is larger than max = 1, its default"),
        ({"min": "1x3x64x64", "max": "4x3x32x64"}, "key 'min': min = 1x3x64x64 is larger than max = 4x3x32x64"),
        ({"max": "4;8"}, "key 'min': min has 1 profile, max has 2"),
        ({"instance_num": 100_000}, "key 'instance_num': expected at most 1024, got 100000: each instance is a thread"),
        ({"k": 3}, "key 'k': nothing uses it without a postprocessor that does: TopK"),
        ({"threshold": 0.1, "postprocessor": "TopK"}, r"key 'threshold': nothing uses it without a .* does: Sigmoid"),
        ({"postprocessor": "TopK", "k": 0}, "key 'k': expected at least 1, got 0"),
        ({"postprocessor": "cpu", "post_processor": ""}, "'post_processor': another name of 'postprocessor', which is"),
        ({"postprocessor": "Softmax"}, "no postprocessor 'Softmax'; did you mean"),
        ({"precison": "fp16"}, "key 'precison': unknown key"),
    ],
)
def test_what_is_surely_wrong_is_refused(config: dict[str, Any], settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_pipeline({**config, **settings})


@pytest.mark.parametrize("postprocessor", [None, "", "cpu", "SoftmaxCpu"])
def test_labels_that_nothing_uses(config: dict[str, Any], labels: str, postprocessor: str | None) -> None:
    given = {} if postprocessor is None else {"postprocessor": postprocessor}
    with pytest.raises(
        ConfigError, match=r"'labels': nothing uses it .* SoftmaxMax, ArgMax, SoftmaxArgMax, TopK, Sigmoid"
    ):
        plan_pipeline({**config, "labels": labels, **given})
    # A default of the whole file is for those nodes that use it.
    plan_pipeline({"global": {"labels": labels}, "node": {**config, **given}})


def test_numbers_for_each_channel_of_a_model_that_does_not_say_how_many(tmp_path: Path) -> None:
    model = torch_file(tmp_path / "m.pt2")
    config = {"backend": "TorchTensor", "trusted": True, "model": model, "std": "50, 60, 70"}
    plan_pipeline({**config, "mean": 100})
    plan_pipeline({**config, "mean": "100, 110, 120"})
    with pytest.raises(
        ConfigError, match="key 'mean': 2 numbers, and std has 3; give one for each channel, or one for"
    ):
        plan_pipeline({**config, "mean": "100, 110"})


def test_a_fixed_batch_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    model = save_model(tmp_path / "one.onnx", nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 3, 8, 8]})
    config = {"backend": "OnnxTensor", "model": model}
    plan_pipeline(config)
    with pytest.raises(ConfigError, match=r"key 'model': .* input 'x' has a fixed batch of 1, .* or set max = 1"):
        plan_pipeline({**config, "max": 4})
    save_model(tmp_path / "one.onnx", nodes, {"x": [-1, 3, 8, 8]}, {"y": [-1, 3, 8, 8]})  # as some exporters write any
    with pipe({**config, "max": 4}) as p:
        assert p({"data": torch.zeros(3, 8, 8)})["result"].shape == (1, 3, 8, 8)


@pytest.mark.parametrize(
    ("lines", "postprocessor", "problem"),
    [
        (4, "SoftmaxMax", r"key 'labels': \S+labels\.txt has 4 lines, the model has 5 classes"),
        (6, "TopK", r"key 'labels': \S+labels\.txt has 6 lines, the model has 5 classes"),
        (1, "Sigmoid", r"key 'labels': \S+labels\.txt has 1 line, the model has 5 classes"),
    ],
)
def test_labels_of_another_model_are_told_before_it_is_loaded(
    classifier: str, tmp_path: Path, lines: int, postprocessor: str, problem: str
) -> None:
    labels = tmp_path / "labels.txt"
    labels.write_text("name\n" * lines, encoding="utf-8")
    config = {"backend": "OnnxTensor", "model": classifier, "labels": str(labels), "postprocessor": postprocessor}
    with pytest.raises(ConfigError, match=problem):
        plan_pipeline(config)
    labels.write_text("name\n" * 5, encoding="utf-8")
    plan_pipeline(config)


@pytest.mark.parametrize(
    ("shape", "postprocessor", "problem"),
    [
        (["N", 1], "SoftmaxMax", "key 'postprocessor': SoftmaxMax of one class is always that class; Sigmoid gives"),
        (["N", 3, 8, 8], "TopK", "key 'postprocessor': TopK takes an output NxC, got "),
        (["N", 1], "Sigmoid", ""),
        (["N", "C"], "SoftmaxMax", ""),
        (["N", 3, 8, 8], "ArgMax", ""),
        (["N", 3, 8, 8], "cpu", ""),
    ],
)
def test_a_postprocessor_of_another_output_is_told_before_the_model_is_loaded(
    tmp_path: Path, shape: list[int | str], postprocessor: str, problem: str
) -> None:
    model = save_model(tmp_path / "m.onnx", [helper.make_node("Identity", ["x"], ["y"])], {"x": shape}, {"y": shape})
    config = {"backend": "OnnxTensor", "model": model, "postprocessor": postprocessor}
    if not problem:
        plan_pipeline(config)
        return
    with pytest.raises(ConfigError, match=problem):
        plan_pipeline(config)


def torch_file(path: Path) -> str:
    """What is TorchScript by the names in it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/constants.pkl", b"")
    return str(path)


@pytest.mark.parametrize(
    ("backend", "name", "problem"),
    [
        ("OnnxTensor", "torch.onnx", "not an ONNX file: it is TorchScript or a .pt2 file: TorchTensor takes it"),
        ("OnnxTensor", "e.trt", "not an ONNX file: it is an engine: TensorrtTensor takes it"),
        ("OnnxTensor", "empty", "not an ONNX file: it is empty"),
        ("TorchTensor", "e.trt", "neither TorchScript nor .pt2: it is an engine: TensorrtTensor takes it"),
        ("TorchTensor", "o.onnx", "neither TorchScript nor .pt2: it begins as an ONNX file does; OnnxTensor takes on"),
        (
            "TensorrtTensor",
            "t.pt",
            "not an engine, and its name is not *.onnx: it is TorchScript or a .pt2 file: Tor",
        ),
        ("TensorrtTensor", "onnx.trt", "not an engine, and its name is not *.onnx: it begins as an ONNX file does"),
        ("TensorrtTensor", "torch.onnx", "not an ONNX file, as its name says: it is TorchScript or a .pt2 file: Tor"),
    ],
)
def test_a_file_of_another_backend_is_told_before_it_is_loaded(
    classifier: str, tmp_path: Path, backend: str, name: str, problem: str
) -> None:
    (tmp_path / "e.trt").write_bytes(b"ftrt and so on")
    (tmp_path / "empty").touch()
    for onnx in ("o.onnx", "onnx.trt"):
        shutil.copy(classifier, tmp_path / onnx)
    for each in ("t.pt", "torch.onnx"):
        torch_file(tmp_path / each)
    model = str(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        plan_pipeline({"backend": backend, "model": model})
    assert f"key 'model': model {model}: {problem}" in str(caught.value)


def test_files_of_a_backends_own_are_taken(classifier: str, tmp_path: Path) -> None:
    (tmp_path / "e.trt").write_bytes(b"ftrt and so on")
    (tmp_path / "unknown").write_bytes(b"what may be a newer one")
    for backend, model in (
        ("OnnxTensor", classifier),
        ("TensorrtTensor", classifier),
        ("TensorrtTensor", str(tmp_path / "e.trt")),
        ("TensorrtTensor", str(tmp_path / "unknown")),
        ("OnnxTensor", str(tmp_path / "unknown")),
    ):
        plan_pipeline({"backend": backend, "model": model})
    plan_pipeline({"backend": "TorchTensor", "model": torch_file(tmp_path / "t.onnx"), "trusted": True})


@pytest.mark.parametrize("wrong", [True, 1.5])
def test_a_batch_that_is_no_number_of_items(config: dict[str, Any], wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"key 'max': expected a batch size or shapes .*, got {wrong}"):
        plan_pipeline({**config, "max": wrong})


@pytest.mark.usefixtures("restored")
def test_a_postprocessor_of_ones_own_may_use_labels(config: dict[str, Any], labels: str) -> None:
    class Mine:
        def forward(self, outputs: list[Any]) -> list[Any]:
            return [0] * len(outputs[0])

    registry.register_postprocessor(Mine, "Mine")
    plan_pipeline({**config, "labels": labels, "postprocessor": "Mine"})


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        (
            {"mean": "0.485, 0.456, 0.406", "std": "0.229, 0.224, 0.225"},
            ["probably 123.675, 116.28, 103.53 is meant", "probably 58.395, 57.12, 57.375 is meant"],
        ),
        ({"mean": 0.5, "std": 0.5}, ["probably 127.5 is meant", "probably 127.5 is meant"]),
        ({"mean": 127.5, "std": 0.5}, ["probably 127.5 is meant"]),
        ({"mean": "0, 0, 0", "std": 1}, []),
        ({"mean": "123.675, 116.28, 103.53", "std": "58.395, 57.120, 57.375"}, []),
    ],
)
def test_numbers_of_other_pixels_are_doubted_with_what_was_meant(
    config: dict[str, Any], settings: dict[str, Any], meant: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan_pipeline({"a": {**config, **settings}})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(meant)
    for line, words in zip(lines, meant, strict=True):
        assert line.startswith("config: node 'a': key ")
        assert words in line


def test_check_tells_it_too(
    classifier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.toml"
    path.write_text(f'[a]\nbackend = "OnnxTensor"\nmodel = "{classifier}"\nmean = 0.5\nprecision = "fp16"\n')
    assert main(["check", str(path)]) == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "key 'mean': 0.5 looks like the mean of pixels 0..1" in caplog.text
    assert "key 'precision': ignored: ONNX Runtime keeps no engine" in caplog.text
    path.write_text(f'[a]\nbackend = "OnnxTensor"\nmodel = "{classifier}"\nmean = "123.675, 116.28"\n')
    assert main(["check", str(path)]) == 1
    said = f"2 numbers, and the input of {classifier} has 3 channels; give one for each channel, or one for all"
    assert capsys.readouterr().err == f"torchpipe: {path}: node 'a': key 'mean': {said}\n"
    path.write_text(f'[a]\nbackend = "OnnxTensor"\nmodel = "{classifier}"\nstd = 0\n')
    assert main(["check", str(path)]) == 1
    assert "key 'std': expected numbers above 0" in capsys.readouterr().err


# -- keys of other backends, and other names ------------------------------------------------------------------------


def test_what_belongs_to_an_engine_is_ignored_with_a_line(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    given = {"model::cache": "x.trt", "precision": "fp16", "precision::fp32": "a", "max_workspace_size": 512}
    tables = [
        {**config, **given},
        {**config, **{f"OnnxTensor::{key}": value for key, value in given.items()}},
        {"global": given, "a": {**config, "next": "b"}, "b": config},
    ]
    for table in tables:
        caplog.clear()
        plan_pipeline(table)
        assert len(caplog.records) == len(given)
        assert all("ignored: ONNX Runtime keeps no engine" in line for line in caplog.messages)
    # Here they mean something to the first of the two.
    caplog.clear()
    plan_pipeline({**config, **given, "backend": "FirstAvailable[TensorrtTensor,OnnxTensor]"})
    assert caplog.messages == []


@pytest.mark.usefixtures("restored")
def test_other_names_of_keys(config: dict[str, Any], register: Register) -> None:
    class Renamed(Backend):
        size = Param(int, 1, also=("length", "len"), doc="a number")

    name = register(Renamed)
    for given in ({"length": 7}, {f"{name}::len": 7}, {"size": 7}):
        assert plan_pipeline({"backend": name, **given}).plans["node"].backends[0].params["size"] == 7
    both = plan_pipeline({"global": {"length": 3}, "node": {"backend": name, "size": 7}})
    assert both.plans["node"].backends[0].params["size"] == 7
    with pytest.raises(ConfigError, match="key 'length': another name of 'size', which is there too"):
        plan_pipeline({"backend": name, "size": 7, "length": 7})
    item = {"data": torch.zeros(1, 3, 8, 8)}
    with pipe({**config, "post_processor": "cpu"}) as run:
        run(item)
    assert item["result"].shape == (1, 5)
    plan = plan_pipeline({**config, "backend": "TensorrtTensor", "max_workspace_size": "512"}).plans["node"]
    assert plan.backends[0].params["workspace"] == 512


def documented_defaults() -> Iterator[tuple[str, str]]:
    for name in sorted(registry.BUILT_IN_BACKENDS):
        cls = registry.default.find_backend(name)
        assert cls is not None
        for attribute, param in cls.parameters().items():
            if param.default is not REQUIRED:
                yield name, attribute


@pytest.mark.parametrize(("name", "attribute"), [*documented_defaults()])
def test_a_documented_default_means_the_same_written_out(name: str, attribute: str) -> None:
    cls = registry.default.find_backend(name)
    assert cls is not None
    param = cls.parameters()[attribute]
    key, _, value = signature(param).partition("=")
    text = {"True": "true", "False": "false"}.get(value, value)
    assert param.read(tomli.loads(f'"{key}" = {text}')[key], Registry()) == param.default


def test_an_empty_postprocessor_is_none(config: dict[str, Any]) -> None:
    item = {"data": torch.zeros(1, 3, 8, 8)}
    with pipe({**config, "postprocessor": "", "labels": "", "mean": "", "std": "", "providers": "", "k": 5}) as run:
        run(item)
    assert item["result"].shape == (1, 5)


@pytest.mark.parametrize(
    ("keys", "processes", "threads"),
    [({}, 1, 8), ({"instance_num": 2}, 1, 4), ({"instance_num": 2}, 4, 1), ({}, 16, 1), ({"threads": 3}, 4, 3)],
)
def test_the_threads_of_all_processes_are_no_more_than_the_cores(
    config: dict[str, Any], keys: dict[str, Any], processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchpipe_py.backends.model.onnx.usable_cores", lambda: 8)
    asked = []
    session = onnxruntime.InferenceSession

    def load(source: Any, options: Any, providers: Any) -> Any:
        asked.append(options.intra_op_num_threads)
        options.intra_op_num_threads = 1
        return session(source, options, providers=providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", load)
    with pipe(plan_pipeline({**config, **keys}, processes=processes)):
        assert asked == [threads]
