"""``scripts/run.py loaders`` at the smallest size, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from conftest import encode, picture
from examples.shapes import LABELS, write_set
from kit.training_data import write_classes
from recipes.experiments.comparison import main
from recipes.experiments.loaders import SUBJECTS, Setting


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_classes(tmp_path / "data", 8, 5)
    return tmp_path / "data"


def options(folder: Path, *more: object) -> list[str]:
    small = ["--workers", 1, "--batch-sizes", 4, "--size", 32, "--seconds", 0.01, "--rounds", 1, "--device", "cpu"]
    return list(map(str, ["--data", folder, *small, *more]))


def test_each_loader_is_a_row_with_its_figures_or_a_remark(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    file, only = tmp_path / "found.json", ["--only", "dali-cpu", "ours-cpu", "ours-gpu"]
    assert main(["all", *options(folder, "--json", file, "--plots", tmp_path / "plots", *only)]) == 0
    epochs, throughput = json.loads(file.read_text(encoding="utf-8"))["reports"]
    for report in (epochs, throughput):
        names = [row["name"] for row in report["rows"]]
        assert names == [f"{name}, batches of 4, {{}} workers" for name in ("dali-cpu", "ours-cpu")]
        assert all(row["qps"] > 0 for row in report["rows"])
    missing = "ours-gpu, batches of 4, 1 workers: not measured: "
    assert any(remark.startswith(missing) for remark in epochs["remarks"])
    assert not any(remark.startswith("ours-gpu") for remark in throughput["remarks"])  # it is not tried again
    assert all(set(row["more"]) == {"train s", "val s", "accuracy"} for row in epochs["rows"])
    assert any(remark.startswith("ours over dali, each at its best, in 1 rounds: ") for remark in throughput["remarks"])
    plots = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "plots").iterdir()}
    assert set(plots) == {"time.svg", "validation.svg", "throughput.svg"}
    assert all(text.rstrip().endswith("</svg>") for text in plots.values())


def test_data_may_have_any_number_of_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for number in range(9):
            place = tmp_path / split / f"class{number}"
            place.mkdir(parents=True)
            (place / "0.jpg").write_bytes(encode(picture(40, 40, seed=number)))
    assert main(["epochs", *options(tmp_path, "--only", "ours-cpu")]) == 0


def test_no_loader_that_works_is_a_failure(folder: Path) -> None:
    assert main(["epochs", *options(folder, "--only", "ours-gpu")]) == 1


def test_refuses_a_folder_without_images_to_validate_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((folder / "val").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "val").rmdir()
    with pytest.raises(SystemExit):
        main(["all", *options(folder)])
    assert f"there is no folder {folder / 'val'}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["torchvision", "dali-cpu"])
def test_loaders_give_the_same_kind_of_batches(folder: Path, name: str) -> None:
    """And for validation the same images, to the differences of their resizes."""
    pytest.importorskip("torchvision" if name == "torchvision" else "nvidia.dali")
    augments = ("crop", "color", "cutout", "gridmask")
    setting = Setting(folder, 32, 4, 1, torch.device("cpu"), augments, least=16)
    with SUBJECTS[name](setting) as loaders, SUBJECTS["ours-cpu"](setting) as ours:
        for _ in range(2):  # epochs
            batches = list(loaders.train())
            assert [tuple(images.shape) for images, _ in batches] == [(4, 3, 32, 32)] * 4  # 16 images, of 8
            assert all(images.dtype == torch.float32 and labels.dtype == torch.int64 for images, labels in batches)
        pairs: list[Any] = list(zip(loaders.val(), ours.val(), strict=True))
        assert sum(len(images) for (images, _), _ in pairs) == 20  # each of 5 four times
        for (images, labels), (expected, their_labels) in pairs:
            assert torch.equal(labels, their_labels)
            assert (images - expected).abs().mean() < 0.1


def test_drawn_set_has_every_class_in_the_size(tmp_path: Path) -> None:
    write_set(tmp_path, 2, 1, (30, 40))
    for split, count in (("train", 2), ("val", 1)):
        assert sorted(path.name for path in (tmp_path / split).iterdir()) == sorted(LABELS)
        files = list((tmp_path / split).rglob("*.jpg"))
        assert len(files) == count * len(LABELS)
        assert {cv2.imread(str(path)).shape for path in files} == {(30, 40, 3)}
