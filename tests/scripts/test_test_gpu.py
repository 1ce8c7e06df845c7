"""scripts/test_gpu.py on the CPU, with a model trained for some steps on images of two classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_gpu
import torch
from kit.training_data import write_classes
from recipes.serving import load_model, serving_config
from train import main as train

from torchpipe_py import pipe
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
    assert train(list(map(str, options))) == 0
    return folder


def options(folder: Path, **changed: Any) -> list[str]:
    given = {"checkpoint": folder / "last.pt", "data": folder / "data" / "val", "toml": folder / "cpu.toml"}
    given |= {"size": SIZE, "workers": 0, "clients": 3, "batch-size": 4}
    return [str(part) for name, value in (given | changed).items() for part in (f"--{name}", value)]


def config_in(folder: Path, trained: Path, precision: str = "fp32") -> dict[str, Any]:
    return serving_config(
        trained / "last.pt", trained / "cpu.toml", "small", SIZE, precision, folder / "served", CLASSES
    )


def images(trained: Path) -> list[Path]:
    return sorted((trained / "data" / "val").rglob("*.jpg"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_both_solutions_agree(trained: Path, tmp_path: Path, capsys: Any, precision: str) -> None:
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_checkpoint_knows_its_network_and_its_classes(trained: Path, tmp_path: Path) -> None:
    load_model(trained / "last.pt", None, CLASSES)
    state = torch.load(trained / "last.pt", weights_only=True)
    for change, reason in (
        ({"arch": "unknown"}, "unknown"),
        ({"classes": CLASSES[::-1]}, "another order"),
        ({"classes": ["blue", "green", "white"]}, "only trained: green, white; only in the folder: red"),
        ({"model": {}}, "no weights of --arch small"),
    ):
        torch.save({**state, **change}, tmp_path / "other.pt")
        with pytest.raises(TrainingError, match=reason):
            load_model(tmp_path / "other.pt", None, CLASSES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoint", None, "no such file"),
        ("checkpoint", b"nothing of PyTorch's", "cannot be read as a checkpoint"),
        ("toml", b'[a]\nbackend = "DecodeMat"', "ndarray, not a Tensor"),
        ("toml", b'[a]\nbackend = "S[DecodeMat,Mat2Tensor]"', "gives images of 3x64x64, the model takes 3x24x24"),
        ("data", None, "no such folder"),
    ],
)
def test_reports_errors_in_one_line(
    trained: Path, tmp_path: Path, capsys: Any, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / "given.toml"
    if content is not None:
        path.write_bytes(content)
    for solution in ("pipe", "torch"):
        assert test_gpu.main([*options(trained, **{name: path}), "--solution", solution]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.err.count("\n") == 1
