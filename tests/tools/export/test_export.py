"""``torchpipe export``: what it writes serves, with PyTorch's results on the same pixels."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tomli
import torch
from conftest import encode, picture
from kit.small_zoo import FILE, MEAN, STD, saved, tiny, use_small_zoo
from PIL import Image
from torch import nn

from torchpipe_py import parse_toml, pipe
from torchpipe_py.cli import main
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.registry import import_code
from torchpipe_py.tools.export.branches import places_that_read_values, unresolved_branch
from torchpipe_py.tools.export.models import count_classes, load_into, read_weights
from torchpipe_py.tools.export.outputs import tensors_of
from torchpipe_py.tools.report import ToolError

Refused = Callable[..., str]
LABELS = ["cat", "dog", "fly", "hen", "owl"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    use_small_zoo(monkeypatch)
    return tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> Refused:
    """What an export that must fail says; it leaves no file."""

    def files() -> list[Path]:
        return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]

    def export(*arguments: str) -> str:
        before = files()
        capsys.readouterr()
        assert main(["export", *arguments]) == 1
        assert files() == before
        return capsys.readouterr().err

    return export


def code(folder: Path, name: str, text: str) -> str:
    """A file of the user's, under a name that no other test has: modules stay imported."""
    path = folder / f"{name}_{os.getpid()}_{abs(hash(str(folder)))}.py"
    path.write_text(f"import torch\nfrom torch import nn\n{text}\n", encoding="utf-8")
    return path.name


def expected(model: nn.Module, mat: np.ndarray) -> torch.Tensor:
    """Resize(40), CenterCrop(32), ToTensor, Normalize as torchvision does them with Pillow, then the model."""
    image = Image.fromarray(mat)
    scale = 40 / min(image.size)
    image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - 32) / 2), round((image.height - 32) / 2)
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + 32, top + 32)))).permute(2, 0, 1) / 255
    with torch.inference_mode():
        return model(((pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None])[None])


def test_from_custom_weights_to_pytorchs_results(folder: Path, capsys: Any, caplog: Any) -> None:
    model = tiny(5, seed=3)
    saved(folder / "mine.pt", {"model": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}})
    (folder / "labels.txt").write_text("\n".join(LABELS), encoding="utf-8")
    assert main(["export", "tiny", "--weights", "mine.pt", "--labels", "labels.txt", "--out", "served/mine.toml"]) == 0
    printed = capsys.readouterr().out
    assert "served/mine.onnx: tiny, 5 classes, weights of mine.pt['model'], input Nx3x32x32" in printed
    assert "in batches of 1, 3, 7" in printed
    assert "Resize(40, bilinear), CenterCrop(32), mean 0.4, 0.5, 0.6, std 0.2, 0.25, 0.3 (Tiny_Weights.V1)" in printed
    assert printed.splitlines()[-1] == "torchpipe-serve served/mine.toml serves it"
    assert sorted(path.name for path in (folder / "served").iterdir()) == ["mine.labels.txt", "mine.onnx", "mine.toml"]

    (folder / "served").rename(folder / "moved")
    jpegs = [encode(picture(60 + 9 * index, 90 - 7 * index, seed=index)) for index in range(5)]
    decoded = [cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB) for jpeg in jpegs]
    logits = [expected(model, mat) for mat in decoded]
    tables = parse_toml("moved/mine.toml")
    del tables["model"]["postprocessor"], tables["model"]["labels"]
    plan_pipeline("moved/mine.toml")
    assert "exported" not in caplog.text
    plan_pipeline({"backend": "OnnxTensor", "model": "moved/mine.onnx"})
    assert caplog.text.count('was exported for mean = "102, 127.5, 153" and std = "51, 63.75, 76.5"') == 1
    with pipe(tables) as run, pipe("moved/mine.toml") as labelled:
        run(items := [{"data": jpeg} for jpeg in jpegs])
        labelled(named := [{"data": jpeg} for jpeg in jpegs])
    for item, name, right in zip(items, named, logits, strict=True):
        torch.testing.assert_close(item["result"], right, atol=1e-3, rtol=0)
        assert name["result"][0] == LABELS[int(right.argmax())]


def test_labels_are_refused_as_existing_only_if_they_would_be_replaced(folder: Path, refused: Refused) -> None:
    labels = folder / "mine.labels.txt"
    labels.write_text("\n".join("abcde") + "\n")
    saved(folder / "mine.pt", tiny(5, seed=3).state_dict())
    command = ["tiny", "--weights", "mine.pt", "--out", "mine"]
    assert "mine.labels.txt: there already" in refused(*command)
    assert main(["export", *command, "--labels", "mine.labels.txt"]) == 0
    assert labels.read_text().split() == list("abcde")
    assert "mine.onnx, mine.toml: there already" in refused(*command, "--postprocessor", "")


def test_files_that_are_there_stay_unless_forced(folder: Path, refused: Refused, caplog: Any) -> None:
    assert main(["export", "tiny", "--weights", "random"]) == 0
    written = (folder / "model.onnx").read_bytes()
    assert "model.onnx, model.toml: there already; --force replaces" in refused("tiny", "--weights", "random")
    saved(folder / "mine.pt", tiny(5, seed=3).state_dict())
    assert main(["export", "tiny", "--weights", "mine.pt", "--force"]) == 0
    assert (folder / "model.onnx").read_bytes() != written
    (folder / "model.onnx").write_bytes(b"another, of the name of what is made")
    assert main(["export", "tiny", "--weights", "random", "--force"]) == 0
    assert "in the working directory and beside" not in caplog.text


def test_a_function_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file or a module of the working directory, with weights or without, in training mode or not."""
    text = "def build():\n return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Dropout(), nn.Linear(48, 3))"
    name = code(folder, "network", text)
    options = ["--resize", "32x32", "--mean", "0,0,0", "--std", "1,1,1"]
    assert main(["export", f"{name}:build", *options]) == 0
    assert "build, 3 classes, its own weights, input Nx3x32x32" in capsys.readouterr().out
    assert tomli.loads((folder / "model.toml").read_text("utf-8"))["decode"]["backend"] == (
        "S[DecodeMat,PillowResizeMat,cvtColorMat]"
    )
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Dropout(), nn.Linear(48, 3))
    saved(folder / "mine.pt", model.state_dict())
    module = name.removesuffix(".py")
    assert main(["export", f"{module}:build", *options, "--weights", "mine.pt", "--out", "mine"]) == 0
    jpeg = encode(picture(32, 32))
    with pipe("mine.toml") as run:
        run(data := {"data": jpeg})
    mat = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
    scores = model.eval().requires_grad_(False)(torch.from_numpy(mat).permute(2, 0, 1)[None] / 255).softmax(1)
    assert data["result"][1] == pytest.approx(float(scores.max()), abs=1e-5)
    assert data["result"][0] == int(scores.argmax())


def test_one_channel_and_several_labels(folder: Path, refused: Refused) -> None:
    text = "def build():\n return nn.Sequential(nn.AvgPool2d(14), nn.Flatten())"
    options = (f"{code(folder, 'gray', text)}:build", "--resize", "28x28", "--color", "gray")
    assert "--mean: 3 numbers" in refused(*options)
    (folder / "labels.txt").write_text("\n".join(LABELS[:4]), encoding="utf-8")
    options += ("--mean", "0.5", "--std", "0.5", "--labels", "labels.txt")
    assert main(["export", *options, "--postprocessor", "Sigmoid"]) == 0
    jpeg = encode(picture(28, 28))
    with pipe("model.toml") as run:
        run(data := {"data": jpeg})
    mat = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_GRAYSCALE)
    quarters = mat.reshape(2, 14, 2, 14).mean((1, 3)).ravel()
    scores = 1 / (1 + np.exp(-(quarters / 255 - 0.5) / 0.5))
    assert dict(data["result"]) == pytest.approx(
        {label: score for label, score in zip(LABELS, scores, strict=False) if score >= 0.5}, abs=1e-5
    )
    assert data["result"]


def test_a_model_that_ends_in_a_softmax(folder: Path, refused: Refused) -> None:
    text = "def build():\n return nn.Sequential(nn.AvgPool2d(14), nn.Flatten(), nn.Softmax(1))"
    gray = ["--resize", "28x28", "--color", "gray", "--mean", "0", "--std", "1"]
    options = (f"{code(folder, 'ends', text)}:build", *gray)
    said = "build ends in a softmax, and SoftmaxMax would apply another one: leave it out of the model"
    assert said in refused(*options)
    assert main(["export", *options, "--postprocessor", "ArgMax"]) == 0
    with pipe("model.toml") as run:
        run(data := {"data": encode(np.full((28, 28, 3), 128, np.uint8))})
    assert data["score"] == pytest.approx(0.25)


def test_unwraps_data_parallel_models(folder: Path) -> None:
    text = "import torch\ndef build():\n return nn.DataParallel(nn.Sequential(nn.AvgPool2d(14), nn.Flatten()))"
    assert main(["export", f"{code(folder, 'wrapped', text)}:build", "--resize", "28x28"]) == 0


def test_the_preprocessing_of_a_training(folder: Path, refused: Refused) -> None:
    text = '[resize]\nbackend = "S[DecodeMat,ResizeMat,Mat2Tensor]"\nresize_h = 20\nresize_w = 32\n'
    text += 'formats = ["png"]\nmax_pixels = 400\n'
    (folder / "train.toml").write_text(text, encoding="utf-8")
    assert main(["export", "tiny", "--weights", "random", "--preprocess", "train.toml"]) == 0
    tables = tomli.loads((folder / "model.toml").read_text("utf-8"))
    assert tables["resize"] == {**tomli.loads(text)["resize"], "next": "model"}
    with pipe("model.toml") as run:
        run(data := {"data": encode(picture(20, 20), ".png")})
    assert data["result"][0] in range(1000)

    more = ("tiny", "--weights", "random", "--out", "served", "--preprocess", "other.toml")
    (folder / "other.toml").write_text('[a]\nbackend = "DecodeMat"\n', encoding="utf-8")
    assert "makes images of several sizes, 3x240x320 and 3x375x250 for two" in refused(*more)
    (folder / "other.toml").write_text('[a]\nbackend = "Identity"\n', encoding="utf-8")
    assert "other.toml: makes bytes from an image; expected a Mat or a Tensor" in refused(*more)
    assert "--resize: --preprocess other.toml decodes and resizes" in refused(*more, "--resize", "8")


MENDABLE = [
    ("tinny", "torchvision has no classifier 'tinny'; did you mean 'tiny'?"),
    ("tiny", "the weights Tiny_Weights.V1 cannot be downloaded (OSError: no way to weights.invalid); download"),
    ("tiny", f"--weights {FILE}"),
    ("tiny --weights no.pt", "--weights no.pt: no such file; tiny has pretrained, random, V1"),
    ("tiny --weights random --transforms V2", "--transforms V2: no such weights in torchvision; did you mean 'V1'?"),
    ("tiny --weights random --labels two.txt", "--labels two.txt: 2 lines, tiny has 1000 classes"),
    ("tiny --weights random --out two.txt/model", "--out two.txt/model: no such folder: two.txt"),
    ("tiny --weights random --postprocessor Sigmoidd", "--postprocessor Sigmoidd: did you mean 'Sigmoid'?"),
    ("tiny --weights random --crop 64", "--crop 64: more than --resize 40 leaves"),
    ("tiny --weights random --mean 123.675,116.28,103.53", "are divided by 255: --mean 0.485,0.456,0.406"),
    ("tiny --weights random --std 0,1,1", "--std: contains a zero"),
    ("no_such_module:build", "no such module, installed or in"),
    ("fixed.py", "fixed.py: name the function in it that returns the model: fixed.py:function; MODEL is"),
    ("whole.pt", "weights need their model: torchpipe export MODEL --weights whole.pt"),
    ("model.onnx", "model.onnx: no such file"),
    ("fixed.Fixed", "fixed.Fixed: perhaps fixed:Fixed is meant; MODEL is file.py:function, package.module:function"),
    ("a/model", "a/model: no such model; MODEL is file.py:function"),
]


@pytest.mark.parametrize(("command", "problem"), MENDABLE)
def test_error_names_the_remedy(folder: Path, refused: Refused, command: str, problem: str) -> None:
    (folder / "two.txt").write_text("cat\ndog\n", encoding="utf-8")
    assert problem in refused(*command.split())


def test_an_operator_that_only_the_newer_exporter_knows(folder: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    name = code(folder, "pool", "def build():\n return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())")
    capfd.readouterr()
    assert main(["export", f"{name}:build", "--resize", "7x7"]) == 1
    printed = capfd.readouterr()
    assert "the newer exporter may support it, but needs onnxscript (pip install onnxscript)" in printed.err
    assert printed.out == ""


OUTPUTS = {
    "view": ("x.view(4, -1)[:, :5]", "build does not take|depends on|is 4x5 for a batch of 3"),
    "mixed": ("x.mean((2, 3)) - x.mean()", "output 0 of an image depends on the others of its batch"),
    "one": ("x.mean()", "output 0 is a scalar for a batch of 3; it must begin with 3"),
    "number": ("{'out': [x, x.shape[0]]}", "forward returns a int, as output out.1; expected Tensors, or dicts"),
    "detections": ("[{'boxes': one} for one in x]", "a dict for each image, as torchvision's detectors do"),
    "branch": ("x + 2 if x.mean() < -1.5 else x", "forward reads values of the picture in Python, which the ONNX"),
    "another": ("nn.functional.dropout(x)", "output 0 is another each time for the same images: dropout"),
    "squeeze": ("x.mean((2, 3)).squeeze()", "is 3x3 for three images, and 3 for one image; squeeze() drops a batch"),
    "black": ("x / x.std((1, 2, 3), keepdim=True)", "output 0 for a black picture of PyTorch holds NaN"),
    "nan": ("x.mean((2, 3)) / 0 * 0", "output 0 holds NaN or infinity for random images"),
    "size": ("x @ torch.zeros(9, 9)", "either it takes another size (--resize HxW; --color gray"),
    "constant": ("torch.stack([one.mean((1, 2)) for one in x])", "does not run at batches of 1, 3, 7"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_refuses_models_with_unsuitable_outputs(folder: Path, refused: Refused, name: str) -> None:
    expression, problem = OUTPUTS[name]
    text = f"class Model(nn.Module):\n def forward(self, x):\n  return {expression}\nnumber = 3\n"
    text += "def needs(path): ...\ndef ends(): raise SystemExit(0)"
    file = code(folder, name, text)
    said = refused(f"{file}:Model", "--resize", "8x8")
    assert any(part in said for part in problem.split("|")), said
    if name == "view":
        assert f"{file} has no 'modell'; did you mean 'Model'?" in refused(f"{file}:modell")
        assert f"{file}:number: TypeError: 'int' object is not callable" in refused(f"{file}:number")
        assert f"{file}:needs: it is called without arguments, and needs path" in refused(f"{file}:needs")
        assert f"{file}:ends: SystemExit: 0" in refused(f"{file}:ends")
        assert f"{file}:Model: returns" not in said


SUITABLE = {
    "dict": ("{'out': x, 'aux': x[:, :1], 'none': None}", ["out", "aux"]),
    "nested": ("(x, (x + 1, {'a': [x * 2]}))", ["output_0", "output_1_0", "output_1_1_a_0"]),
    "alone": ("{'a b': x.mean((2, 3))}", ["a_b"]),
    "writes": ("x.sub_(0.5).mul_(2).mean((2, 3))", ["logits"]),
    "sizes": ("x[:, :, ::2] if x.shape[0] > 0 and x.size(2) % 2 == 0 and len(x) else x", ["logits"]),
    "buffer": ("x.mean((2, 3)) if self.flag > 0 else x", ["logits"]),
}


def test_outputs_of_dicts_and_tuples_are_those_of_pytorch(folder: Path) -> None:
    """Of networks that write into their input or look at sizes and buffers, too."""
    for name, (expression, names) in SUITABLE.items():
        start = "class Model(nn.Module):\n def __init__(self):\n  super().__init__()"
        text = f"{start}\n  self.register_buffer('flag', torch.ones(1))\n def forward(self, x):\n  return {expression}"
        file = code(folder, name, text)
        assert main(["export", f"{file}:Model", "--resize", "8x8", "--out", name]) == 0
        images = torch.randn(2, 3, 8, 8)
        module: Any = import_code(file)
        expected = [tensor for _, tensor in tensors_of(module.Model()(images.clone()))]
        with pipe({"backend": "OnnxTensor", "model": f"{name}.onnx", "max": 2, "mean": 0, "std": 1}) as run:
            assert [spec.name for spec in run.signature().outputs] == names
            run(items := [{"data": image} for image in images])
        for index, item in enumerate(items):
            given = item["result"] if isinstance(item["result"], list) else [item["result"]]
            for served, right in zip(given, expected, strict=True):
                torch.testing.assert_close(served, right[index : index + 1], atol=1e-5, rtol=1e-5)


def test_segmenter_of_a_dict_serves_with_a_chosen_postprocessor(folder: Path) -> None:
    name = code(folder, "segments", "class Model(nn.Module):\n def forward(self, x):\n  return {'out': x * 1}")
    assert main(["export", f"{name}:Model", "--resize", "8x8", "--postprocessor", "ArgMax"]) == 0
    with pipe("model.toml") as run:
        run(data := {"data": encode(picture(8, 8))})
    assert (data["result"].shape, data["result"].dtype) == ((1, 8, 8), torch.uint8)


def test_notes_lines_whose_values_are_fixed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An assertion on the picture, which ONNX files have not."""
    text = "class Model(nn.Module):\n def forward(self, x):\n  assert (x > -9).all()\n  return x.mean((2, 3))"
    name = code(folder, "asserts", text)
    assert main(["export", f"{name}:Model", "--resize", "8x8"]) == 0
    assert f"NOTE: the ONNX file does for all pictures what forward did for the trial at {name}:5: assert" in (
        capsys.readouterr().out
    )


READS = {
    "x * x.mean().item()": True, "x * math.sqrt(x.var())": True, "[x for _ in range(int(x.sum()))]": True,
    "x if torch.equal(x, -x) else -x": True, "x if x.allclose(-x) else -x": True, "x * x[0, 0, 0].tolist()[0]": True,
    "x if 3 in x else -x": True, "x + torch.from_numpy(x.numpy())": True, "x if self.filled(x) > 0 else -x": True,
    "torch.where(x.mean() > 0, x, -x)": False, "x[: len(x) // 2]": False, "x if self.flag > 0 else -x": False,
}  # fmt: skip


def test_finds_every_way_to_read_values_of_a_picture() -> None:
    class Model(nn.Module):
        def __init__(self, expression: str) -> None:
            super().__init__()
            self.expression = expression
            self.register_buffer("flag", torch.ones(1))

        def filled(self, x: torch.Tensor) -> torch.Tensor:
            means = torch.zeros(len(x))
            means[:] = x.mean((1, 2, 3))
            return means.sum()

        def forward(self, x: torch.Tensor) -> Any:
            return eval(self.expression, {"torch": torch, "math": math, "x": x, "self": self})

    images = torch.randn(2, 3, 8, 8).abs()
    assert {text: bool(places_that_read_values(Model(text), images)) for text in READS} == READS


@pytest.mark.slow
def test_branches_on_the_number_of_values_are_found_by_torch_export() -> None:
    class Counts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x[x > 0].numel() > 5 else -x

    images = torch.randn(2, 3, 8, 8)
    found = unresolved_branch(Counts(), images)
    assert found is not None
    assert found.code == "return x if x[x > 0].numel() > 5 else -x"
    assert unresolved_branch(nn.Flatten(), images) is None


def test_function_that_imports_torchvision_without_its_operators(folder: Path) -> None:
    """As a torchvision for CUDA beside a PyTorch for the CPU; a stub registers an operator as torchvision does."""
    stub = folder / "torchvision"
    stub.mkdir()
    text = "import torch\n@torch.library.register_fake('torchvision::missing_here')\ndef fake(x): ...\n"
    (stub / "__init__.py").write_text(text, encoding="utf-8")
    name = code(folder, "inside", "def build():\n import torchvision\n return nn.Flatten()")
    before = {key: module for key, module in sys.modules.items() if key.partition(".")[0] == "torchvision"}
    for key in before:
        del sys.modules[key]
    sys.path.insert(0, str(folder))
    try:
        assert main(["export", f"{name}:build", "--resize", "8x8"]) == 0
    finally:
        for key in [key for key in sys.modules if key.partition(".")[0] == "torchvision"]:
            del sys.modules[key]
        sys.modules.update(before)


# --- files of weights

HINT = "name a function"


def prefixed(prefix: str, model: nn.Module) -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        ("", ""),
        ("state_dict", "module."),
        ("model", "_orig_mod."),
        ("model_state", "module._orig_mod."),
        ("", "model."),
    ],
)
def test_a_state_dict_is_found_wherever_trainings_put_it(tmp_path: Path, key: str, prefix: str) -> None:
    model, other = tiny(5, seed=1), tiny(5, seed=2)
    state: dict[str, Any] = prefixed(prefix, model)
    weights = read_weights(saved(tmp_path / "a.pt", {"epoch": 3, key: state} if key else state))
    assert weights.under == key
    assert count_classes(weights, {name: tensor.shape for name, tensor in tiny().state_dict().items()}, 1000) == 5
    load_into(other, weights, "tiny", HINT)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_all_that_does_not_fit_is_named(tmp_path: Path) -> None:
    model = tiny(5)
    state: dict[str, Any] = {**model.state_dict(), "conv1.weight": torch.zeros(8, 1, 5, 5)}
    del state["fc.weight"], state["fc.bias"]
    state |= {f"fc.{index}.weight": torch.zeros(1) for index in range(5)}
    path = saved(tmp_path / "a.pt", {"model": state})
    with pytest.raises(ToolError) as caught:
        load_into(model, read_weights(path), "tiny", HINT)
    assert str(caught.value).splitlines() == [
        f"{path}['model']: does not fit tiny: missing in the file: fc.weight, fc.bias; "
        "unexpected in it: fc.0.weight, fc.1.weight, fc.2.weight and 2 more; "
        "conv1.weight is 8x1x5x5 in the file and 8x3x5x5 in the model",
        HINT,
    ]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_nothing_is_run_and_every_other_file_is_refused(tmp_path: Path) -> None:
    model = tiny(5)
    whole, script = saved(tmp_path / "whole.pt", model), tmp_path / "script.pt"
    torch.jit.save(torch.jit.trace(model, torch.zeros(1, 3, 32, 32)), script)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(whole.read_bytes()[:1000])
    junk = tmp_path / "junk.pt"
    junk.write_bytes(b"checker\ncircle\n")  # which is a pickle that asks for a class
    alone = "torch.save(model.state_dict(), 'whole.pt')"
    for path, problem in (
        (tmp_path / "none.pt", "no such file"),
        (whole, f"holds more than Tensors: torch.nn.modules.container.Sequential; loading it could run any code; "
         f"save the weights alone: {alone}"),
        (saved(tmp_path / "args.pt", {"args": argparse.Namespace()}), "more than Tensors: argparse.Namespace"),
        (script, "TorchScript or a .pt2 file; the backend TorchTensor serves it as it is"),
        (cut, "not a file of torch.save"),
        (junk, "not a file of torch.save"),
        (saved(tmp_path / "list.pt", [1]), "holds a list; expected a state dict"),
        (saved(tmp_path / "other.pt", {"epoch": 1, "best": 0.5}), "no state dict; it holds epoch, best; expected"),
    ):  # fmt: skip
        with pytest.raises(ToolError) as caught:
            read_weights(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert problem in str(caught.value)


def test_number_of_classes_comes_from_the_checkpoint(folder: Path, refused: Refused, capsys: Any) -> None:
    """For a function that needs it; the checkpoint of ``scripts/train.py`` has their names."""
    text = "def build(classes):\n return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, classes))"
    name = code(folder, "counted", text)
    options = ["--resize", "32x32", "--mean", "0,0,0", "--std", "1,1,1"]
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 3))
    saved(folder / "last.pt", {"model": model.state_dict(), "classes": ["a", "b", "c"]})
    assert main(["export", f"{name}:build", *options, "--weights", "last.pt"]) == 0
    assert "build, 3 classes" in capsys.readouterr().out
    assert (folder / "model.labels.txt").read_text("utf-8").split() == ["a", "b", "c"]
    saved(folder / "bare.pt", model.state_dict())
    for weights in ([], ["--weights", "bare.pt"]):
        problem = refused(f"{name}:build", *options, "--force", *weights)
        assert "needs classes; the number of classes comes from" in problem
