"""scripts/experiments.py at the smallest size, and the figures it computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import experiments
import numpy as np
import pytest
import torch
from fakes import PROGRAM_WAIT
from recipes.evaluation import Predictions
from recipes.experiments.accuracy import Difference
from recipes.experiments.epochs import LINE
from recipes.experiments.report import report

from torchpipe_py.training import TrainingError

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="these figures are those without a GPU")


def predictions(classes: list[int]) -> Predictions:
    return Predictions(np.array(classes), np.ones(len(classes)))


def test_a_difference_counts_the_images_on_which_two_runs_disagree() -> None:
    labels = np.zeros(100, np.int64)
    first, second = predictions([0] * 90 + [1] * 10), predictions([0] * 84 + [1] * 4 + [0] * 2 + [1] * 10)
    difference = Difference.of(labels, first, second)
    # Of 100 images 4 are right in the first run alone, and none in the second alone.
    assert difference.value == pytest.approx(0.04)
    half = 1.96 * (4 - 4**2 / 100) ** 0.5 / 100
    assert (difference.low, difference.high) == pytest.approx((0.04 - half, 0.04 + half), abs=1e-4)


def test_runs_that_agree_do_not_differ() -> None:
    same = predictions([0, 1, 1])
    assert Difference.of(np.array([0, 1, 0]), same, same) == Difference(0.0, 0.0, 0.0)


def test_the_lines_of_epochs_are_understood() -> None:
    line = (
        "epoch 3: loss 0.1234, accuracy 0.9000 of 80 images, 1.25 s, 3021 images/s, "
        "waited for data 4% of the time, bad samples 0"
    )
    assert LINE.findall(f"other\n{line}\n")[0] == ("3", "80", "1.25", "3021", "4", "")
    assert LINE.findall(f"{line}, GPU memory in use 512 498 MiB\n")[0][-1] == "512 498"


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "experiments.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_WAIT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiments")


SMALL = ["--train", 4, "--val", 3, "--classes", 2, "--arch", "small", "--epochs", 1, "--batch-size", 2, "--workers", 0]


@without_a_gpu
def test_accuracy(folder: Path) -> None:
    printed = run("accuracy", "--work", folder, *SMALL, "--size", 32, "--share", 0.5)
    figures = json.loads((folder / "accuracy.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in figures["rows"]}
    assert figures["images"] == 6
    served = rows["train CPU; serve CPU, Thrift service, onnx fp32"]
    assert served["agreement"]["share"] == 1.0
    assert served["agreement"]["largest"] < 1e-4
    assert "no CUDA device" in rows["train CPU, 50% of the data; serve GPU"]["not_measured"]
    assert printed.count("not measured") == 4
    assert len(list((folder / "textures_0.5" / "train").glob("*/*.jpg"))) == 4


@without_a_gpu
def test_epochs(folder: Path) -> None:
    toml = SCRIPTS.parent / "configs" / "preprocess_cpu.toml"
    run("epochs", "--work", folder, *SMALL, "--toml", toml, "--only", "plain", "bf16")
    rows = json.loads((folder / "epochs.json").read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == ["plain", "bf16"]
    assert all(row["images_per_s"] > 0 and row["memory_mib"] == [] for row in rows)


def test_a_report_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments.main(["report", "--work", str(tmp_path / "nowhere")]) == 2
    assert "no figures there; run accuracy, throughput or epochs first" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


def test_a_file_that_holds_no_figures(tmp_path: Path) -> None:
    (tmp_path / "epochs.json").write_text("{", encoding="utf-8")
    with pytest.raises(TrainingError, match=r"epochs\.json: no figures of an experiment"):
        report(tmp_path)


def test_a_report_without_matplotlib_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    row = {"name": "plain", "seconds": 2.0, "images_per_s": 100.0, "waited_for_data": 0.05, "memory_mib": [5, 6]}
    figures = {"arch": "small", "batch": 4, "devices": 0, "rows": [row]}
    (tmp_path / "epochs.json").write_text(json.dumps(figures), encoding="utf-8")
    (tmp_path / "epochs.png").write_bytes(b"of older figures")
    text = report(tmp_path)
    assert "| plain | 2.00 | 100 |  | 5% | 5 / 6 |" in text
    assert "png" not in text
    assert "No plot: a plot of the report needs matplotlib" in text


def test_the_report_has_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"name": "plain", "seconds": 2.0, "images_per_s": 100.0, "waited_for_data": 0.05, "memory_mib": [5, 6]}
    missing = {"name": "fp16", "not_measured": "no GPU"}
    figures = {"arch": "small", "batch": 4, "devices": 0, "rows": [row, missing]}
    (tmp_path / "epochs.json").write_text(json.dumps(figures), encoding="utf-8")
    text = report(tmp_path)
    assert "| plain | 2.00 | 100 |  | 5% | 5 / 6 |" in text
    assert "not measured: no GPU" in text
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == text
    assert (tmp_path / "epochs.png").stat().st_size > 1000
