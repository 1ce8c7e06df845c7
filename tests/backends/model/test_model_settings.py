"""Errors in a model's parameters are reported at planning, by ``pipe`` and by ``torchpipe check``."""

from __future__ import annotations

import logging
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tomli
from conftest import Register
from kit.detectors import constant_model
from kit.models import one_node, onnx_node
from kit.refusals import refusal

from torchpipe_py import Backend, ConfigError, ItemBackend, Param, Registry, pipe, registry
from torchpipe_py.backends.params import REQUIRED
from torchpipe_py.cli import main, signature
from torchpipe_py.plan.build import plan_pipeline


@pytest.fixture
def config(classifier: str) -> dict[str, Any]:
    return {"backend": "OnnxTensor", "model": classifier}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"std": "1, 0, 3"}, "key 'std': expected numbers above 0, since channels are divided by them, got 0"),
        ({"std": [1, -2.5, 3]}, "key 'std': expected numbers above 0, since channels are divided by them, got -2.5"),
        (
            {"mean": "1, 2"},
            "key 'mean': model .*: 2 numbers, and input .* has 3 channels; give one for each channel, or",
        ),
        ({"mean": 9, "std": "1, 2, 3, 4"}, "key 'std': model .*: 4 numbers, and input .* has 3 channels; give one for"),
        ({"min": 8, "max": 4}, "key 'min': min = 8 is larger than max = 4"),
        ({"min": 4}, "key 'min': min = 4 is larger than max = 1, its default"),
        ({"min": "1x3x64x64", "max": "4x3x32x64"}, "key 'min': min = 1x3x64x64 is larger than max = 4x3x32x64"),
        ({"max": "4;8"}, "key 'min': min has 1 profile, max has 2"),
        ({"max": 1.5}, "key 'max': expected a batch size or shapes .*, got 1.5"),
        ({"instance_num": 100_000}, "key 'instance_num': expected at most 1024, got 100000: each instance is a thread"),
        ({"k": 3}, "key 'k': nothing uses it without a postprocessor that does: TopK"),
        ({"labels": __file__}, r"'labels': nothing uses it .* SoftmaxMax, ArgMax, SoftmaxArgMax, TopK, Sigmoid"),
        ({"labels": __file__, "postprocessor": "cpu"}, r"'labels': .*\.py has \d+ lines, the model has 5 classes"),
        ({"threshold": 0.1, "postprocessor": "TopK"}, r"key 'threshold': nothing uses it without a .* does: Sigmoid"),
        ({"postprocessor": "TopK", "k": 0}, "key 'k': expected at least 1, got 0"),
        ({"postprocessor": "cpu", "post_processor": ""}, "'post_processor': another name of 'postprocessor', which is"),
        ({"postprocessor": "Softmax"}, "no postprocessor 'Softmax'; did you mean"),
        ({"precison": "fp16"}, "key 'precison': unknown key"),
        ({"providers": "CPUExecutionProvder"}, "key 'providers': no provider .*; did you mean 'CPUExecutionProvider'"),
    ],
)
def test_refuses_contradictory_settings(config: dict[str, Any], settings: dict[str, Any], problem: str) -> None:
    refused_or_not({**config, **settings}, problem)


def test_accepts_key_of_another_backend_of_the_node(config: dict[str, Any], register: Register) -> None:
    class Keep(ItemBackend):
        threshold = Param(float, 0.5)

    both = {**config, "backend": f"Sequential[{config['backend']},{register(Keep)}]"}
    plan_pipeline({**both, "threshold": 0.3})
    refused_or_not({**both, "k": 3}, "'k': nothing uses it")


def refused_or_not(config: dict[str, Any], problem: str) -> None:
    if not problem:
        plan_pipeline(config)
        return
    with pytest.raises(ConfigError, match=problem):
        plan_pipeline(config)


@pytest.mark.parametrize(
    ("shape", "more", "problem"),
    [
        (["N", 1], {"postprocessor": "SoftmaxMax"}, "key 'postprocessor': SoftmaxMax of one class is always that"),
        (["N", 3, 8, 8], {"postprocessor": "TopK"}, "key 'postprocessor': TopK takes an output NxC, got "),
        (["N", 1], {"postprocessor": "Sigmoid"}, ""),
        (["N", "C"], {"postprocessor": "SoftmaxMax"}, ""),
        (["N", 3, 8, 8], {"postprocessor": "ArgMax"}, ""),
        (["N", 3, 8, 8], {"postprocessor": "cpu"}, ""),
        (["N", 5], {"postprocessor": "TopK", "labels": 5}, ""),
        (["N", 5], {"postprocessor": "SoftmaxMax", "labels": 4}, r"key 'labels': \S+ has 4 lines, the model has 5 cl"),
        (["N", 5], {"postprocessor": "Sigmoid", "labels": 1}, r"key 'labels': \S+ has 1 line, the model has 5 classes"),
        ([1, 3, 8, 8], {"max": 4}, "key 'model': .* input 'x' has a fixed batch of 1, .* or set max = 1"),
        ([-1, 3, 8, 8], {"max": 4}, ""),  # as some exporters write any
        (
            ["N", "C", 8, 8],
            {"mean": "1, 2", "std": "1, 2, 3"},
            "key 'mean': model .*: 2 numbers, and std has 3; give one for",
        ),
        (["N", "C", 8, 8], {"mean": 100, "std": "1, 2, 3"}, ""),
        (["N", 3, 8, 8], {"backend": "TensorrtTensor", "max_workspace_size": "512"}, ""),
    ],
)
def test_checks_settings_against_model_before_loading(
    tmp_path: Path, shape: Any, more: dict[str, Any], problem: str
) -> None:
    if "labels" in more:
        (tmp_path / "labels.txt").write_text("name\n" * more["labels"], encoding="utf-8")
        more = {**more, "labels": str(tmp_path / "labels.txt")}
    refused_or_not({**onnx_node(one_node(tmp_path / "m.onnx", shape)), **more}, problem)


@pytest.mark.parametrize(
    ("backend", "name", "problem"),
    [
        ("OnnxTensor", "torch.onnx", "not an ONNX file: it is TorchScript or a .pt2 file: TorchTensor takes it"),
        ("OnnxTensor", "e.trt", "not an ONNX file: it is an engine: TensorrtTensor takes it"),
        ("OnnxTensor", "empty", "not an ONNX file: it is empty"),
        ("TorchTensor", "o.onnx", "neither TorchScript nor .pt2: it begins as an ONNX file does; OnnxTensor takes on"),
        ("TensorrtTensor", "t.pt", "not an engine, and its name is not *.onnx: it is TorchScript or a .pt2 file: To"),
        ("TensorrtTensor", "torch.onnx", "not an ONNX file, as its name says: it is TorchScript or a .pt2 file: Tor"),
    ],
)
def test_refuses_file_of_another_backend_before_loading(
    classifier: str, tmp_path: Path, backend: str, name: str, problem: str
) -> None:
    (tmp_path / "e.trt").write_bytes(b"ftrt and so on")
    (tmp_path / "empty").touch()
    shutil.copy(classifier, tmp_path / "o.onnx")
    for each in ("t.pt", "torch.onnx"):
        with zipfile.ZipFile(tmp_path / each, "w") as archive:
            archive.writestr("m/constants.pkl", b"")  # what is TorchScript by the names in it
    model = str(tmp_path / name)
    assert f"key 'model': model {model}: {problem}" in refusal({"backend": backend, "model": model})


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        (
            {"mean": "0.485, 0.456, 0.406", "std": "0.229, 0.224, 0.225"},
            ["probably 123.675, 116.28, 103.53 is meant", "probably 58.395, 57.12, 57.375 is meant"],
        ),
        ({"mean": 0.5, "std": 0.5}, ["probably 127.5 is meant", "probably 127.5 is meant"]),
        ({"mean": 127.5, "std": 0.5}, ["probably 127.5 is meant"]),
        ({"std": "0.00392157, 0.0078431, 0.00392157"}, ["pixels are divided by std: 255, 127.5, 255?"]),
        ({"mean": "0, 0, 0", "std": 1}, []),
        ({"mean": "123.675, 116.28, 103.53", "std": "58.395, 57.120, 57.375"}, []),
    ],
)
def test_warns_of_mean_and_std_for_other_pixel_range(
    config: dict[str, Any], settings: dict[str, Any], meant: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan_pipeline({"a": {**config, **settings}})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(meant)
    for line, words in zip(lines, meant, strict=True):
        assert line.startswith("config: node 'a': key ")
        assert words in line


@pytest.mark.parametrize("name", ["SoftmaxMax", "L2Normalize", "ArgMax"])
def test_warns_of_outputs_that_a_postprocessor_does_not_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = {"logits": np.zeros((1, 3), np.float32), "embedding": np.zeros((1, 8), np.float32)}
    node = onnx_node(constant_model(tmp_path / "two.onnx", outputs))
    plan_pipeline({"a": {**node, "postprocessor": "cpu"}})
    assert caplog.messages == []
    plan_pipeline({"a": {**node, "postprocessor": name}})
    assert f"{name} reads the first output, 'logits'; nothing uses 'embedding' (cpu gives all)" in caplog.text


def test_names_the_postprocessors_that_read_a_key(config: dict[str, Any]) -> None:
    text = "key 'original_size': unknown key; postprocessors read it that this node does not have: ArgMax"
    assert text in refusal({**config, "postprocessor": "cpu", "original_size": True})


def test_check_command_warns_too(classifier: str, tmp_path: Path, capsys: Any, caplog: Any) -> None:
    path, node = tmp_path / "model.toml", f'[a]\nbackend = "OnnxTensor"\nmodel = "{classifier}"\n'
    path.write_text(f'{node}mean = 0.5\nprecision = "fp16"\n')
    assert main(["check", str(path)]) == 0
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "key 'mean': 0.5 looks like the mean of pixels 0..1" in caplog.text
    path.write_text(f'{node}mean = "123.675, 116.28"\n')
    assert main(["check", str(path)]) == 1
    said = f"model {classifier}: 2 numbers, and input 'x' has 3 channels; give one for each channel, or one for all"
    assert capsys.readouterr().err == f"torchpipe: {path}: node 'a': key 'mean': {said}\n"


# -- keys of other backends, and other names ------------------------------------------------------------------------


def test_warns_of_ignored_engine_keys(config: dict[str, Any], caplog: Any) -> None:
    given = {"model::cache": "x.trt", "precision": "fp16", "precision::fp32": "a", "max_workspace_size": 512}
    # Here they mean something to the first of the two.
    plan_pipeline({**config, **given, "backend": "FirstAvailable[TensorrtTensor,OnnxTensor]"})
    assert caplog.messages == []
    plan_pipeline({"global": given, "a": {**config, "next": "b"}, "b": config})
    assert len(caplog.messages) == len(given)
    assert all("ignored: ONNX Runtime keeps no engine" in line for line in caplog.messages)


@pytest.mark.usefixtures("restored")
def test_accepts_alternative_names_of_keys(register: Register) -> None:
    class Renamed(Backend):
        size = Param(int, 1, also=("length", "len"), doc="a number")

    name = register(Renamed)
    for given in ({"length": 7}, {f"{name}::len": 7}, {"size": 7}):
        assert plan_pipeline({"backend": name, **given}).plans["node"].backends[0].params["size"] == 7
    both = plan_pipeline({"global": {"length": 3}, "node": {"backend": name, "size": 7}})
    assert both.plans["node"].backends[0].params["size"] == 7
    with pytest.raises(ConfigError, match="key 'length': another name of 'size', which is set, too"):
        plan_pipeline({"backend": name, "size": 7, "length": 7})


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN_BACKENDS))
def test_documented_defaults_may_be_written_out(name: str) -> None:
    cls = registry.default.find_backend(name)
    assert cls is not None
    for param in cls.parameters().values():
        if param.default is not REQUIRED:
            key, _, value = signature(param).partition("=")
            text = {"True": "true", "False": "false"}.get(value, value)
            assert param.read(tomli.loads(f'"{key}" = {text}')[key], Registry()) == param.default


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
