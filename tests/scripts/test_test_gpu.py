"""scripts/test_gpu.py on the CPU, with a model trained for some steps on images of two classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_gpu
import torch
from recipes.data import Normalise
from recipes.evaluation import Agreement, Predictions, Scores
from recipes.options import make_parser
from recipes.place import Place
from recipes.serving import load_model, serving_config
from recipes.session import run as train
from training_data import write_classes

from torchpipe_py import pipe
from torchpipe_py.tools.report import ToolError
from torchpipe_py.training import TrainingError

SIZE = 24
CLASSES = ["blue", "red"]
TOML = f"""
resize_h = {SIZE}
resize_w = {SIZE}
color = "rgb"
[decode]
backend = "DecodeMat"
next = "resize"
[resize]
backend = "S[ResizeMat,cvtColorMat,Mat2Tensor]"
device = "cpu"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``data``, ``cpu.toml`` and ``last.pt`` of nine steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_classes(folder / "data", 12, 7)
    (folder / "cpu.toml").write_text(TOML, encoding="utf-8")
    options = ["--data", folder / "data", "--toml", folder / "cpu.toml", "--checkpoint", folder / "last.pt"]
    options += ["--device", "cpu", "--batch-size", 4, "--workers", 0, "--epochs", 3]
    train(make_parser("Train.").parse_args(list(map(str, options))), Place("single", devices="cpu"))
    return folder


def options(folder: Path, **changed: Any) -> list[str]:
    given = {"checkpoint": folder / "last.pt", "data": folder / "data" / "val", "toml": folder / "cpu.toml"}
    given |= {"size": SIZE, "engine": "onnx", "workers": 0, "clients": 3, "batch-size": 4}
    return [str(part) for name, value in (given | changed).items() for part in (f"--{name}", value)]


def config_in(folder: Path, trained: Path, precision: str = "fp32", engine: str | None = "onnx") -> dict[str, Any]:
    return serving_config(
        trained / "last.pt", trained / "cpu.toml", "small", SIZE, precision, engine, folder / "served", CLASSES
    )


def images(trained: Path) -> list[Path]:
    return sorted((trained / "data" / "val").rglob("*.jpg"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_both_solutions_agree(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    file = tmp_path / "figures.json"
    assert test_gpu.main([*options(trained, json=file), "--solution", "both", "--precision", precision]) == 0
    printed = capsys.readouterr().out
    assert "top-1 agreement 1.0000" in printed
    report = json.loads(file.read_text(encoding="utf-8"))
    by_pipe, by_torch = report["solutions"]["pipe"], report["solutions"]["torch"]
    assert by_pipe["images"] == 7
    del by_pipe["images_per_s"], by_torch["images_per_s"]
    assert by_pipe == by_torch
    assert report["agreement"]["share"] == 1.0
    assert report["agreement"]["largest"] < (1e-5 if precision == "fp32" else 1e-2)


def test_one_solution_and_an_image_that_cannot_be_read(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classes(tmp_path, 0, 4)
    (tmp_path / "val" / "red" / "01.jpg").write_bytes(b"no image")
    (tmp_path / "val" / "red" / "03.jpg").write_bytes(b"")
    for solution in ("pipe", "torch"):
        assert test_gpu.main([*options(trained, data=tmp_path / "val"), "--solution", solution]) == 0
        assert f"{solution}: 4 images, 2 could not be read" in capsys.readouterr().out


def test_logits_of_the_served_model_are_those_of_pytorch(trained: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path, trained)
    for key in ("postprocessor", "labels"):
        del config["model"][key]
    model = load_model(trained / "last.pt", "small", CLASSES)
    with pipe(config) as served, pipe(trained / "cpu.toml") as preprocessing:
        for path in images(trained):
            served(request := {"data": path.read_bytes()})
            preprocessing(other := {"data": path.read_bytes()})
            with torch.inference_mode():
                expected = model(Normalise()(other["result"]))
            torch.testing.assert_close(request["result"], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("precision", "engine"), [("fp32", "onnx"), ("fp16", None)])
def test_the_configuration_as_a_file_is_the_same(
    trained: Path, tmp_path: Path, precision: str, engine: str | None
) -> None:
    """With no engine named, ONNX Runtime runs where there is no TensorRT."""
    config = config_in(tmp_path, trained, precision, engine)
    file = tmp_path / "served" / "served.toml"
    assert str(tmp_path) not in file.read_text(encoding="utf-8")
    data = images(trained)[0].read_bytes()
    with pipe(config) as built, pipe(str(file)) as loaded:
        built(first := {"data": data})
        loaded(second := {"data": data})
    assert first["result"] == second["result"]
    assert first["result"][0] in CLASSES


def test_the_pipe_that_was_tested_can_be_moved_and_served(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert test_gpu.main([*options(trained), "--folder", "kept \x7f 😀", "--solution", "pipe"]) == 0
    assert "torchpipe-serve 'kept \x7f 😀/served.toml' serves that pipe" in capsys.readouterr().out
    monkeypatch.chdir(trained)  # from anywhere
    (tmp_path / "kept \x7f 😀").rename(tmp_path / "moved")
    with pipe(str(tmp_path / "moved" / "served.toml")) as served, pipe(config_in(tmp_path, trained)) as tested:
        data = images(trained)[0].read_bytes()
        served(first := {"data": data})
        tested(second := {"data": data})
    assert first["result"] == second["result"]


def test_the_checkpoint_knows_its_network(trained: Path, tmp_path: Path) -> None:
    state = torch.load(trained / "last.pt", weights_only=True)
    assert state["arch"] == "small"
    state["arch"] = "unknown"
    torch.save(state, tmp_path / "other.pt")
    load_model(trained / "last.pt", None, CLASSES)
    with pytest.raises(TrainingError, match="unknown"):
        load_model(tmp_path / "other.pt", None, CLASSES)


def test_a_node_of_the_toml_may_be_called_model(trained: Path, tmp_path: Path) -> None:
    toml = {"model": {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": SIZE, "resize_w": SIZE}}
    config = serving_config(trained / "last.pt", toml, "small", SIZE, "fp32", "onnx", tmp_path, CLASSES)
    assert config["model"]["next"] == "model_"
    assert "next" not in toml["model"]


def test_scores_against_figures_known_from_elsewhere() -> None:
    scores = Scores.of([0, 0, 0, 1, 1, 2], [0, 0, 1, 1, -1, 0], 4)
    assert (scores.images, scores.unread, scores.accuracy) == (6, 1, 0.5)
    assert scores.recall == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert scores.precision == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    # Wilson's intervals: 81 of 263 from Newcombe (1998), Table I; 0 of 10 and 10 of 10 are 0 and 1 at one end.
    known = Scores.of([0] * 263, [0] * 81 + [1] * 182, 2)
    assert (round(known.low, 4), round(known.high, 4)) == (0.2553, 0.3662)
    none, all_ = Scores.of([0] * 10, [1] * 10, 2), Scores.of([0] * 10, [0] * 10, 2)
    assert (none.low, all_.high) == (0.0, 1.0)
    assert (round(none.high, 4), round(all_.low, 4)) == (0.2775, 0.7225)


@pytest.mark.parametrize(
    ("labels", "named"), [([], []), ([0], [0, 1]), ([2], [0]), ([0], [2]), ([-1], [0]), ([0], [-2])]
)
def test_scores_of_what_does_not_fit(labels: list[int], named: list[int]) -> None:
    with pytest.raises(ValueError, match=r"class|equally"):
        Scores.of(labels, named, 2)


def test_agreement() -> None:
    first = Predictions(np.array([0, 1, -1]), np.array([0.9, 0.6, 0.0]))
    second = Predictions(np.array([0, 0, 1]), np.array([0.8, 0.55, 0.7]))
    agreement = Agreement.of(first, second)
    assert agreement.share == pytest.approx(1 / 3)
    assert agreement.largest == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoint", None, "no such file"),
        ("checkpoint", b"nothing of PyTorch's", "cannot be read as a checkpoint"),
        ("toml", None, "no such file"),
        ("toml", b'[a]\nbackend = "DecodeMat"', "ndarray, not a Tensor"),
        ("toml", b'[a]\nbackend = "S[DecodeMat,Mat2Tensor]"', "gives images of 3x64x64, the model takes 3x24x24"),
        ("data", None, "no such folder"),
    ],
)
@pytest.mark.parametrize("solution", ["pipe", "torch"])
def test_errors(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    solution: str,
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    path = tmp_path / "given.toml"
    if content is not None:
        path.write_bytes(content)
    assert test_gpu.main([*options(trained, **{name: path}), "--solution", solution]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_other_classes_or_another_network(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"only trained: red; only in the folder: green, white"):
        load_model(trained / "last.pt", "small", ["blue", "green", "white"])
    with pytest.raises(TrainingError, match="another order"):
        load_model(trained / "last.pt", "small", CLASSES[::-1])
    state = torch.load(trained / "last.pt", weights_only=True)
    state["model"].popitem()
    torch.save(state, tmp_path / "less.pt")
    with pytest.raises(TrainingError, match="no weights of --arch small"):
        load_model(tmp_path / "less.pt", "small", CLASSES)
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(TrainingError, match=r"no checkpoint of scripts/train\.py"):
        load_model(tmp_path / "other.pt", "small", CLASSES)


def test_a_toml_with_several_ends(trained: Path, tmp_path: Path) -> None:
    decode = {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "resize_h": SIZE, "resize_w": SIZE}
    toml = {"one": {"backend": "Identity", "next": "two,three"}, "two": decode, "three": decode}
    with pytest.raises(ToolError, match=r"ends in 2 nodes \(two, three\)"):
        serving_config(trained / "last.pt", toml, "small", SIZE, "fp32", "onnx", tmp_path, CLASSES)
