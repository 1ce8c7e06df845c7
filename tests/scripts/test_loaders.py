"""``run.py loader_throughput`` at the smallest size, on the CPU."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from conftest import encode, picture
from recipes.data import FlipAndNormalise
from recipes.loaders import SUBJECTS, Setting, images_per_second, main
from training_data import FORKS

pytestmark = FORKS

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(8):
        place = tmp_path / "data" / "train" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.jpg").write_bytes(encode(picture(60, 80, seed=number)))
    return tmp_path / "data"


def test_each_loader_is_a_row_or_a_remark(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    options = ["--data", str(folder), "--workers", "1", "--batch-sizes", "4", "--seconds", "0.05", "--rounds", "1"]
    assert main([*options, "--only", "ours-cpu", "ours-gpu", "--json", str(file)]) == 0
    (report,) = json.loads(file.read_text(encoding="utf-8"))["reports"]
    assert [(row["name"], row["qps"] > 0) for row in report["rows"]] == [("ours-cpu, batches of 4, {} workers", True)]
    (remark,) = report["remarks"]
    assert remark.startswith("ours-gpu, batches of 4: not measured: ")
    assert main([*options, "--only", "ours-gpu"]) == 1


@pytest.mark.parametrize("name", ["torchvision", "ours-cpu"])
def test_batches_are_normalised(folder: Path, name: str) -> None:
    if name == "torchvision":
        pytest.importorskip("torchvision")
    before = set(multiprocessing.active_children())
    with SUBJECTS[name](Setting(folder / "train", 8, 1, CPU)) as batches:
        seen = [next(batches) for _ in range(3)]  # more than an epoch
    assert set(multiprocessing.active_children()) <= before
    assert all(one.shape == (8, 3, 224, 224) and one.dtype == torch.float32 for one in seen)
    assert -2.2 < float(seen[0].min()) < 0 < float(seen[0].max()) < 2.7


def test_flips_are_of_whole_images() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 4, 6), dtype=torch.uint8)
    found = FlipAndNormalise()(images)
    wanted = FlipAndNormalise.__bases__[0]()(images)
    straight = torch.isclose(found, wanted).flatten(1).all(1)
    turned = torch.isclose(found, wanted.flip(-1)).flatten(1).all(1)
    assert bool((straight ^ turned).all())
    assert 16 <= int(turned.sum()) <= 48


def test_batches_of_another_shape_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a batch of \(2, 3, 5, 5\), torch\.float32"):
        images_per_second(iter([torch.zeros(2, 3, 5, 5)]), Setting(tmp_path, 2, 1, CPU), 0.05)


@pytest.mark.parametrize("options", [["--only", "fast"], ["--workers", "0"], ["--workers", "x"], []])
def test_options_that_mean_nothing(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(tmp_path), *options])
