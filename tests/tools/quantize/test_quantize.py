"""``torchpipe quantize``: an int8 model that serves as well, or no file and one line that says why."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import Register, save_model
from kit.backends import returns
from onnx import TensorProto, helper, numpy_helper

from torchpipe_py import ItemBackend, Registry, parse_toml, pipe
from torchpipe_py.cli import main
from torchpipe_py.files import ENCRYPTED
from torchpipe_py.plan.config import Tables
from torchpipe_py.tools.quantize.quantiser import Quantiser, search
from torchpipe_py.tools.quantize.target import Target, find_target

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "configs" / "demo" / "images"
MODEL = ROOT / "configs" / "demo" / "model.onnx"
LABELS = ROOT / "configs" / "demo" / "labels.txt"
NORMALISE = 'mean = "123.675, 116.28, 103.53"\nstd = "58.395, 57.12, 57.375"\n'
DECODE = '[decode]\nbackend = "S[DecodeMat,ResizeMat,cvtColorMat]"\nresize_h = 64\nresize_w = 64\ncolor = "rgb"\n'
LABELLED = f'postprocessor = "SoftmaxMax"\nlabels = "{LABELS}"\n'
DEMO = f'{DECODE}next = "model"\n[model]\nbackend = "OnnxTensor"\nmodel = "{MODEL}"\nmax = 8\nthreads = 1\n{NORMALISE}'

Refused = Callable[..., str]
Write = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; temporary files are made in ``temporary`` beside it."""
    (tmp_path / "temporary").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def write(folder: Path) -> Write:
    """Writes a configuration; returns its path."""

    def write_config(text: str, name: str = "pipe") -> str:
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
        return f"{name}.toml"

    return write_config


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> Refused:
    """The line of an attempt that must fail; it leaves no file."""

    def quantize(*arguments: str) -> str:
        before = sorted(folder.rglob("*"))
        assert main(["quantize", *arguments]) == 1
        assert sorted(folder.rglob("*")) == before
        assert list(Path(tempfile.gettempdir()).iterdir()) == []
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return quantize


def zero_points(model: onnx.ModelProto) -> list[np.ndarray]:
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return [constants[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"]


# -- the demo -----------------------------------------------------------------------------------------------------


def test_warning_of_the_configuration_is_given_once(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    config = write(f"{DEMO}{LABELLED}".replace("58.395, 57.12, 57.375", "0.5"))
    main(["quantize", config, "--img_dir", str(IMAGES), "--out", "small.onnx", "--max-drop", "100"])
    assert sum("key 'std'" in record.getMessage() for record in caplog.records) == 1


def test_the_demo_is_quantised_and_served(folder: Path, write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(f'{DEMO}{LABELLED}"precision::fp32" = "/0/Conv"\n')
    assert main(["quantize", config, "--img_dir", str(IMAGES), "--out", "small.onnx"]) == 0
    printed = capsys.readouterr().out
    assert "calibrated with   24 images" in printed
    assert "in int8           6 of 7 layers" in printed
    assert "in fp32           /0/Conv" in printed
    assert "top-1 agreement   1.0000 (24 of 24; 95 % interval 0.8620 to 1.0000)" in printed
    assert "accuracy of B     " in printed
    assert "bar               --max-drop 0.5: 0.0000 over 24 images, ok" in printed
    assert "one image is 4.17 points: 200 images would show a loss of 0.5" in printed
    assert sorted(path.name for path in folder.iterdir()) == ["pipe.toml", "small.onnx"]
    assert list(Path(tempfile.gettempdir()).iterdir()) == []

    model = onnx.load("small.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [opset.domain for opset in model.opset_import] == [""]
    assert {(zero.dtype, bool(zero.any())) for zero in zero_points(model)} == {(np.dtype(np.int8), False)}
    scales = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    channels = [scales[node.input[1]].size for node in model.graph.node if node.op_type == "QuantizeLinear"]
    assert max(channels) > 1  # of weights
    by_output = {node.output[0]: node for node in model.graph.node}
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    assert not any(name in by_output for name in convs[0].input)
    for conv in convs[1:]:
        assert [by_output[name].op_type for name in conv.input[:2]] == ["DequantizeLinear"] * 2
        assert conv.input[2] not in by_output  # TensorRT 8.6 has no int32 for a bias

    tables = parse_toml(config)
    served: dict[str, Any] = {**tables, "model": {**tables["model"], "model": "small.onnx"}}
    items = [{"data": path.read_bytes()} for path in sorted(IMAGES.iterdir())]
    with pipe(served) as run:
        run(items)
    names = [path.stem[:-3] for path in sorted(IMAGES.iterdir())]
    assert sum(item["result"][0] == name for item, name in zip(items, names, strict=True)) > 44


def test_a_bad_calibration_is_caught(write: Write, refused: Refused, monkeypatch: Any, capsys: Any) -> None:
    """Calibrated with pixels of another scale, as a mean and a standard deviation of 0..1 make them."""
    right = Target.up_to_model

    def wrong(target: Target, model: Path) -> Tables:
        tables = right(target, model)
        tables["model"] |= {"mean": "0.485, 0.456, 0.406", "std": "0.229, 0.224, 0.225"}
        return tables

    monkeypatch.setattr(Target, "up_to_model", wrong)
    line = refused(write(DEMO + LABELLED), "--img_dir", str(IMAGES))
    assert line.startswith("torchpipe: model.int8.onnx: not written: it loses ")
    assert "points of accuracy, --max-drop 0.5 allows less; " in line


def test_without_labels_classes_must_stay(folder: Path, write: Write, refused: Refused, capsys: Any) -> None:
    (folder / "photos").mkdir()
    for index, path in enumerate(sorted(IMAGES.iterdir())[::2]):
        shutil.copy(path, folder / "photos" / f"IMG_{index:02d}.jpg")
    (folder / "photos" / "A.jpg").write_bytes(b"no image")
    (folder / "photos" / "B.jpg").symlink_to("nowhere")
    config = write(DEMO)
    assert main(["quantize", config, "--img_dir", "photos", "--max-drop", "1"]) == 0
    printed = capsys.readouterr().out
    assert "left out          A.jpg: DecodeError: 8 bytes: not a JPEG" in printed
    assert "images            13 found, 12 compared, 1 refused" in printed
    assert "no accuracy: the images are not labelled; 'IMG' of IMG_01.jpg is not a class" in printed
    assert "bar               --min-agreement 0.99: 1.0000 over 12 images, ok" in printed
    assert refused(config, "--img_dir", "photos") == (
        "torchpipe: model.int8.onnx: there already; --force replaces, --out FILE.onnx gives another name"
    )


# -- what goes in -------------------------------------------------------------------------------------------------


def test_leaves_out_nodes_after_the_model(write: Write, register: Register) -> None:
    after = register(ItemBackend)
    text = f"""
precision = "fp16"
[decode]
backend = "DecodeMat"
next = "model,other"
[model]
backend = "S[ResizeMat,SyncTensor,{after}]"
"SyncTensor::backend" = "TensorrtTensor"
"TensorrtTensor::max" = 4
"TensorrtTensor::model" = "{MODEL}"
"model::cache" = "kept.trt"
postprocessor = "SoftmaxMax"
resize_h = 64
resize_w = 64
next = "join"
[other]
next = "join"
[join]
map = "model[result:data],other[result:x]"
"""
    target = find_target(write(text), None)
    tables = target.up_to_model(Path("/probe.onnx"))
    assert set(tables) == {"global", "decode", "model"}
    assert tables["decode"]["next"] == "model"
    assert tables["model"] == {
        "backend": "S[ResizeMat,SyncTensor[OnnxTensor]]",
        "OnnxTensor::max": 4,
        "model": "/probe.onnx",
        "postprocessor": "",
        "providers": "CPUExecutionProvider",
        "resize_h": 64,
        "resize_w": 64,
    }
    whole = target.with_model(Path("/other.onnx"))
    assert set(whole) == {"global", "decode", "model", "other", "join"}
    assert whole["model"]["model"] == "/other.onnx"


# -- layers in fp32 -----------------------------------------------------------------------------------------------


def two_layers(path: Path) -> list[list[np.ndarray]]:
    """A model whose classes hang on what int8 leaves of its first input: 1 beside 1000. And inputs for it."""
    path.parent.mkdir(exist_ok=True)
    weights = {"first.w": [[0, 0], [1, -1]], "second.w": [[1, 0], [0, 1]]}
    nodes = [
        helper.make_node("MatMul", ["x", "first.w"], ["h"], name="first"),
        helper.make_node("MatMul", ["h", "second.w"], ["y"], name="second"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    tensors = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "two", values[:1], values[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return [[np.array([[1000, sign * (1 + index)]], np.float32)] for index in range(4) for sign in (1, -1)]


def test_the_layer_that_int8_harms_is_found(folder: Path) -> None:
    inputs = two_layers(folder / "two.onnx")
    quantiser = Quantiser(str(folder / "two.onnx"), folder)
    quantiser.inputs = inputs
    assert quantiser.layers == ["first", "second"]
    assert search(quantiser, (), 2, 0) == ["first"]
    assert search(quantiser, (), 2, 100) == []
    assert search(quantiser, ["first"], 2, 0) == []
    assert search(quantiser, (), 0, 0) == []


# -- mistakes -----------------------------------------------------------------------------------------------------

NODE = f'backend = "OnnxTensor"\nmodel = "{MODEL}"\n'
TWO = f'{DECODE}next = "a"\n[a]\n{NODE}next = "b"\n[b]\n{NODE}'
COMPOSED = f'{DECODE}next = "a"\n[a]\nbackend = "OnnxTensor&OnnxTensor"\nmodel = "{MODEL}"\n'
JUMPED = f'{DECODE}next = "go"\n[go]\nbackend = "Jump"\njump = "model"\n[model]\n{NODE}'
OTHER = DEMO.replace(str(MODEL), "{}")
TORCH = f'{DECODE}next="net"\n[net]\nbackend = "TorchTensor"\nmodel = "net.pt2"\ntrusted = true\n'


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (DECODE, [], "pipe.toml: no node runs a model; expected OnnxTensor or TensorrtTensor in one of them"),
        (TWO, [], "pipe.toml: several nodes run a model; choose one with --node: a, b"),
        (TWO, ["--node", "c"], "--node c: it is not in the file; "),
        (DEMO, ["--node", "decode"], "--node decode: it runs no model; valid: model"),
        (TORCH, [], "node 'net' runs TorchTensor, not an ONNX model: torchpipe export writes one, for OnnxTensor"),
        (COMPOSED, [], "node 'a' is composed of several by '&'"),
        (JUMPED, [], "node 'model' is reached by a jump only"),
        (OTHER.format("net.pt2"), [], "net.pt2: not an ONNX file: it is TorchScript or a .pt2 file: TorchTensor"),
        (OTHER.format("secret.onnx") + 'key_env = "KEY"\n', [], "node 'model' has key_env: its model is encrypted; "),
        (DEMO, ["--out", "folder.onnx"], "--out folder.onnx: is a directory; for example folder.onnx/model.int8.onnx"),
        (DEMO, ["--out", "no/such.onnx"], "--out no/such.onnx: no such folder: no"),
        (DEMO, ["--out", "model.onnx"], "model.onnx: there already; --force replaces, --out"),
        (OTHER.format("model.onnx"), ["--out", "model.onnx", "--force"], "this is the model to quantise"),
        (DEMO, ["--img_dir", "none"], "--img_dir none: no such directory"),
        (DEMO, ["--img_dir", "few"], "3 images to calibrate with and 4 to check with are too few: at least 8 of each"),
        (DEMO, ["--calibrate", "7"], "7 images to calibrate with and 41 to check with are too few: at least 8 of eac"),
        (DEMO, ["--img_dir", "broken"], "0 of 8 images can be calibrated with, at least 8 are needed; 0.jpg: Decode"),
        (f'{DEMO}"precision::fp32" = "/3/Konv"\n', [], "precision::fp32: no layer '/3/Konv'; did you mean '/3/Conv'?"),
        (f'{DEMO}next = "boxes"\n[boxes]\nbackend = "Boxes"\n', [], "its result cannot be compared: expected "),
        (DEMO.replace("max", "maxx"), [], "node 'model': key 'maxx': unknown key; did you mean 'max'?"),
    ],
)
def test_mistakes(
    folder: Path, write: Write, refused: Refused, restored: Registry, text: str, options: list[str], said: str
) -> None:
    restored.register_backend(returns([1, 2, 3]), "Boxes")
    with zipfile.ZipFile(folder / "net.pt2", "w") as archive:
        archive.writestr("net/constants.pkl", b"")
    (folder / "secret.onnx").write_bytes(ENCRYPTED)
    shutil.copy(MODEL, folder / "model.onnx")
    (folder / "folder.onnx").mkdir()
    for name, count in (("few", 7), ("broken", 16)):
        (folder / name).mkdir()
        for index in range(count):
            (folder / name / f"{index}.jpg").write_bytes(b"no image")
    assert said in refused(write(text), "--img_dir", str(IMAGES), *options)


def test_refuses_models_that_cannot_be_quantised(folder: Path) -> None:
    path, inputs = folder / "odd.onnx", {"x": ["n", 2]}

    def refuses(why: str) -> None:
        with pytest.raises(RuntimeError, match=why):
            Quantiser(str(path), folder)

    save_model(path, [helper.make_node("Relu", ["x"], ["y"])], inputs, {"y": ["n", 2]})
    refuses("no layer of it can be in int8; those are Conv, ")
    twice = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    save_model(path, twice, inputs, {"y": ["n", 2]})
    refuses("it is quantised already: it has DequantizeLinear, DynamicQuantizeLinear nodes")
    two_layers(path)
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    onnx.save(model, str(path))
    refuses(r"odd\.onnx: its weights are in half precision; quantise .* float32")


def test_too_few_classes_to_check_with(write: Write, refused: Refused, register: Register) -> None:
    class FewOfInt8(ItemBackend):
        """Of the first pipe, whose model is in float32, all images have a class; of the second three."""

        pipes = 0

        def setup(self) -> None:
            FewOfInt8.pipes += 1
            self.left = 1000 if FewOfInt8.pipes == 1 else 3

        def forward_item(self, item: dict[str, Any]) -> None:
            self.left -= 1
            item |= {"result": ("cat", 0.5)} if self.left >= 0 else {"error": ValueError("it is no cat")}

    few = f'instance_num = 1\n{DEMO}next = "few"\n[few]\nbackend = "{register(FewOfInt8)}"\n'
    said = "3 of 24 images have a class, at least 8 are needed to check with; circle_01.jpg: ValueError: it is no cat"
    assert said in refused(write(few), "--img_dir", str(IMAGES))
