"""scripts/run.py consistency at the smallest size, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes.evaluation import Predictions
from recipes.experiments import consistency

from torchpipe_py.training import ImageFiles

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")

TINY = {"classes": 2, "train": 8, "val": 3, "arch": "small", "size": 32, "epochs": 2, "share": 0.5, "batch-size": 4}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def status(work: Path, *more: object, **changed: Any) -> int:
    options = {**TINY, "workers": 0, "part-epochs": 0.5, "work": work, **changed}
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    return consistency.main([*map(str, given), *map(str, more)])


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one run, with ``figures.json``."""
    folder = tmp_path_factory.mktemp("consistency")
    assert status(folder, "--json", folder / "figures.json") == 0
    return folder


def test_without_a_gpu_the_rows_of_the_cpu_are_measured_and_the_others_say_why_not(work: Path) -> None:
    figures = json.loads((work / "figures.json").read_text(encoding="utf-8"))
    rows = {row["index"]: row for row in figures["rows"]}
    unmeasured = {index for index, row in rows.items() if "not_measured" in row}
    assert unmeasured == {index for index, row in rows.items() if "gpu" in row["train"] + row["inference"]}
    assert {rows[index]["not_measured"] for index in unmeasured} == {"PyTorch finds no CUDA device"}
    assert {rows[index]["inference"] for index in rows.keys() - unmeasured} == {
        "cpu decode",
        "cpu decode, PillowResizeMat",
        "cpu decode + torch model",
        "cpu decode + torchpipe fp32",
        "cpu decode + torchpipe fp16",
    }
    assert figures["images"] == 6
    assert figures["settings"]["share"] == 0.5
    for index in rows.keys() - unmeasured:
        row = rows[index]
        assert row["images"] == 6
        assert 0 <= row["recall"] <= 1
        if "against" in row:
            assert row["accuracy_diff_low"] <= row["accuracy_diff"] <= row["accuracy_diff_high"]
            assert row["recall_diff"] == pytest.approx(row["recall"] - rows[row["against"]]["recall"])


def test_pipe_agrees_with_pytorch_and_report_names_the_runtime(work: Path) -> None:
    rows = json.loads((work / "figures.json").read_text(encoding="utf-8"))["rows"]
    served = [row for row in rows if "torchpipe" in row["inference"] and "not_measured" not in row]
    assert [(row["agreement"], row["accuracy_diff"], row["engine"]) for row in served] == [(1.0, 0.0, "OnnxTensor")] * 2


def test_a_second_run_takes_the_checkpoints_and_prints_the_documents_columns(work: Path, capsys: Any) -> None:
    made = {path.name: path.read_bytes() for path in work.glob("*.pt")}
    assert made.keys() == {f"cpu_{part}{best}.pt" for part in ("all", "part") for best in ("", "_best")}
    assert status(work) == 0
    assert {path.name: path.read_bytes() for path in work.glob("*.pt")} == made
    printed = capsys.readouterr().out.splitlines()
    header = next(line for line in printed if line.startswith("| index"))
    columns = ["index", "train type", "model inference method", "recall", "Diff", "precision", "Diff"]
    assert [cell.strip() for cell in header.split("|")[1:8]] == columns
    table = printed[printed.index(header) :]
    assert len(table) == 2 + 14
    assert len({len(line) for line in table}) == 1
    assert sum("not measured: PyTorch finds no CUDA device" in line for line in table) == 7


def test_checkpoints_of_other_settings_are_refused(work: Path, capsys: Any) -> None:
    assert status(work, epochs=3, lr=0.1) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "was made with --epochs 2, --lr 0.001; repeat these, or take another" in error


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("share", "1.5", "more than 0 and less than 1"), ("classes", "9", "valid: 2, 3, 4"), ("train", "1", "at least 2")],
)
def test_wrong_options_are_refused(tmp_path: Path, capsys: Any, option: str, value: str, message: str) -> None:
    with pytest.raises(SystemExit):
        status(tmp_path, **{option: value})
    assert message in capsys.readouterr().err


def test_a_training_that_fails_is_the_reason_of_its_rows(tmp_path: Path, capsys: Any) -> None:
    assert status(tmp_path, arch="unknown") == 1
    printed = capsys.readouterr().out
    assert printed.count("not measured: its training failed: TrainingError: --arch unknown: ") == 7


class Labelled(ImageFiles):
    classes = ("a", "b")


def test_a_row_is_held_against_its_reference_by_pairs_of_predictions(tmp_path: Path) -> None:
    labels = [0] * 50 + [1] * 50
    dataset: Any = Labelled([(tmp_path / str(number), label) for number, label in enumerate(labels)])
    model = consistency.Model("one", consistency.CPU, 1.0, 1)
    rows = consistency.Rows(dataset, {"one": ""}, {consistency.CPU: {}})

    def named(*wrong: int) -> tuple[Predictions, str]:
        predictions = Predictions(100)
        predictions.classes = np.array(labels)
        predictions.classes[list(wrong)] = 1 - predictions.classes[list(wrong)]
        return predictions, ""

    def broken() -> tuple[Predictions, str]:
        raise ValueError("two\nlines")

    first = rows.add(model, consistency.CPU, "first", lambda: named(0, 1))
    rows.add(model, consistency.CPU, "second", lambda: named(1, 2, 3, 4, 5), first)
    rows.add(model, consistency.CPU, "third", broken, first)
    second, third = rows.rows[1:]
    assert second["agreement"] == 0.95
    assert second["accuracy_diff"] == pytest.approx(-0.03)
    assert second["recall_diff"] == pytest.approx(-0.03)
    assert -0.1 < second["accuracy_diff_low"] < -0.03 < second["accuracy_diff_high"] < 0.02
    assert third["not_measured"] == "ValueError: two lines"
