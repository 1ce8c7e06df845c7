"""scripts/loader_throughput.py at the smallest size, on the CPU, and what it computes."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import encode, picture
from loader_throughput import main
from recipes.data import MEAN, STD, FlipAndNormalise
from recipes.experiments import throughput
from recipes.experiments.subjects import SUBJECTS, Setting
from recipes.experiments.throughput import SubjectRow, images_per_second, line_of, measure, ratios
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


def test_each_loader_is_a_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "found.json"
    options = ["--data", str(folder), "--workers", "1", "--batch-sizes", "4", "--seconds", "0.05"]
    assert main([*options, "--only", "ours-cpu,dali-cpu,torchvision", "--json", str(json_file)]) == 0
    printed = capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(json_file.read_text())["rows"]}
    assert list(rows) == ["ours-cpu", "dali-cpu", "torchvision"]
    assert rows["ours-cpu"]["images_per_s"] > 0
    for name, library in (("dali-cpu", "nvidia.dali"), ("torchvision", "torchvision")):
        if is_installed(library):
            assert rows[name]["images_per_s"] > 0
        else:
            assert f"needs {'nvidia-dali-cuda' if name == 'dali-cpu' else name}" in rows[name]["problem"]
    assert len(printed.splitlines()) == 5


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_loader_that_cannot_work_says_why(folder: Path, name: str) -> None:
    row = measure(name, Setting(folder / "nothing", 4, 1, CPU), 0.05)
    assert row.images_per_s is None
    assert row.problem
    assert "not measured: " in line_of(row)


@pytest.mark.parametrize("name", ["torchvision", "ours-cpu", "dali-cpu"])
def test_batches_are_normalised_and_flipped(folder: Path, name: str) -> None:
    if name != "ours-cpu":
        pytest.importorskip("nvidia.dali" if name == "dali-cpu" else "torchvision")
    before = set(multiprocessing.active_children())
    with SUBJECTS[name](Setting(folder / "train", 8, 1, CPU)) as batches:
        seen = [next(batches) for _ in range(3)]  # more than an epoch
    assert set(multiprocessing.active_children()) <= before
    assert all(one.shape == (8, 3, 224, 224) and one.dtype == torch.float32 for one in seen)
    darkest = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)])
    brightest = torch.tensor([(1 - mean) / std for mean, std in zip(MEAN, STD, strict=True)])
    least, most = seen[0].amin((0, 2, 3)), seen[0].amax((0, 2, 3))
    assert bool((least >= darkest - 1e-3).all() and (most <= brightest + 1e-3).all())
    assert bool((most - least > 1).all())


def test_flips_are_of_whole_images() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 4, 6), dtype=torch.uint8)
    found = FlipAndNormalise()(images)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    wanted = (images / 255 - mean) / std
    straight = torch.isclose(found, wanted).flatten(1).all(1)
    turned = torch.isclose(found, wanted.flip(-1)).flatten(1).all(1)
    assert bool((straight ^ turned).all())
    assert 16 <= int(turned.sum()) <= 48


def test_a_loader_is_closed_after_an_error(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    closed = []

    @contextmanager
    def wrong(setting: Setting) -> Iterator[Iterator[torch.Tensor]]:
        try:
            yield iter([torch.zeros(setting.batch_size, 3, 5, 5)])
        finally:
            closed.append(setting)

    monkeypatch.setitem(SUBJECTS, "wrong", wrong)
    row = measure("wrong", Setting(folder, 2, 1, CPU), 0.05)
    assert row.problem == "ValueError: a batch of (2, 3, 5, 5), torch.float32"
    assert len(closed) == 1


def test_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = [0.0]
    monkeypatch.setattr(throughput, "perf_counter", lambda: clock[0])

    def batches() -> Iterator[torch.Tensor]:
        for number in range(1000):
            clock[0] += 10.0 if number < 3 else 0.5
            yield torch.zeros(2, 3, 224, 224)

    assert images_per_second(batches(), Setting(tmp_path, 2, 1, CPU), 4.0) == pytest.approx(4.0)


def test_ratios_take_the_best_of_each() -> None:
    rows = [
        SubjectRow("torchvision", 64, 4, 900.0),
        SubjectRow("torchvision", 64, 8, 500.0),
        SubjectRow("ours-gpu", 64, 2, 1000.0),
        SubjectRow("ours-gpu", 256, 8, 2000.0),
        SubjectRow("dali-gpu", 64, 4, problem="no GPU"),
    ]
    assert list(ratios(rows)) == [
        ("ours-gpu / dali-gpu: not measured", None),
        (
            "ours-gpu / torchvision with 8 workers: 4.00 (batch 256, 8 workers against batch 64, 8)",
            ("ours-gpu / torchvision with 8 workers", 4.0),
        ),
    ]


@pytest.mark.parametrize("options", [["--only", "fast"], ["--workers", "0"], ["--rounds", "0"], ["--workers", "x"]])
def test_options_that_mean_nothing(options: list[str], folder: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(folder.parent), *options])


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(tmp_path)])
    assert f"there is no folder {tmp_path / 'train'}" in capsys.readouterr().err
    (tmp_path / "train").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["--data", str(tmp_path), "--json", str(tmp_path / "none" / "x.json")])
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_nothing_measured_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    measured = [SubjectRow("ours-cpu", 2, 1, 100.0), SubjectRow("ours-gpu", 2, 1, problem="no GPU")]
    monkeypatch.setattr(throughput, "measured", lambda args, device: iter(measured))
    assert main(["--data", str(tmp_path)]) == 0
    del measured[0]
    assert main(["--data", str(tmp_path)]) == 1


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
