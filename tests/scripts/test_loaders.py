"""``run.py loader_throughput`` at the smallest size, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import encode, picture
from recipes.loaders import main
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


@pytest.mark.parametrize("options", [["--only", "fast"], ["--workers", "0"], ["--workers", "x"], []])
def test_options_that_mean_nothing(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(tmp_path), *options])
