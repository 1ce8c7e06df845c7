"""The tricks of a slow training: options that change how, not what, is trained; and the table that measures them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train
from kit.training_data import FORKS, write_classes, write_toml
from recipes import datasets
from recipes.datasets import InMemory, available_memory
from recipes.datasets import main as lmdb
from recipes.experiments import tricks
from recipes.experiments.plain import PlainLoader, by_opencv, by_pillow
from recipes.experiments.tricks import Bench, Trick, measured
from recipes.experiments.tricks import main as measure

from torchpipe_py.training import ImageFolder, TrainingError, UnreadableFile

pytestmark = FORKS
LOSSES = re.compile(r"loss [\d.]+, accuracy [\d.]+")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_classes(tmp_path / "data", 12, 5)
    return tmp_path / "data"


def trained(capsys: pytest.CaptureFixture[str], data: Path, toml: str, *more: object) -> tuple[list[str], str]:
    """Losses and accuracies of two epochs, and all that is printed."""
    given = ["--data", data, "--toml", toml, "--device", "cpu", "--batch-size", 4, "--workers", 0, "--epochs", 2, *more]
    capsys.readouterr()
    assert train.main(list(map(str, given))) == 0
    printed = capsys.readouterr().out
    return LOSSES.findall(printed), printed


# -- the options ----------------------------------------------------------------------------------------------------


def test_no_option_changes_the_trained_weights(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lmdb")
    toml = write_toml(tmp_path)
    assert lmdb(["--data", str(data), "--out", str(tmp_path / "packed")]) == 0
    assert re.search(r"train.lmdb: 12 images, .*\n.*val.lmdb: 5 images, ", capsys.readouterr().out)
    plain, _ = trained(capsys, data, toml)
    assert len(plain) == 2
    assert trained(capsys, tmp_path / "packed", toml)[0] == plain
    in_memory, printed = trained(capsys, data, toml, "--in-memory")
    assert in_memory == plain
    assert "in memory: 17 encoded images, " in printed
    assert trained(capsys, tmp_path / "packed", toml, "--in-memory", "--prefetch", 0)[0] == plain
    assert trained(capsys, data, toml, "--prefetch", 3, "--workers", 1, "--cudnn-benchmark")[0] == plain
    assert torch.backends.cudnn.benchmark
    trained(capsys, data, toml, "--max-steps", 1)
    assert not torch.backends.cudnn.benchmark


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert train.main(list(map(str, arguments))) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_files_that_do_not_fit_into_memory_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets, "available_memory", lambda: 2_000)
    line = told(capsys, "--data", data, "--toml", write_toml(tmp_path), "--device", "cpu", "--in-memory")
    assert line.startswith("train: --in-memory: the files take 0.0 MB, 0.0 MB of memory are available")


def test_an_unreadable_file_is_reported_when_it_is_asked_for(data: Path) -> None:
    path = data / "train" / "red" / "01.jpg"
    path.write_bytes(b"")
    kept = InMemory(ImageFolder(data / "train"))
    place = [name for name, _ in kept.samples].index(str(path))
    with pytest.raises(UnreadableFile, match=r"01\.jpg: the file is empty"):
        kept[place]
    assert kept.size == sum(len(kept[index][0]) for index in range(len(kept)) if index != place)


def test_available_memory_is_that_of_the_container(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 90 kB\nMemAvailable:     8 kB\n")
    assert available_memory(tmp_path) == 8192
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    for name, content in (("max", "5000\n"), ("current", "4000\n"), ("stat", "file 9\ninactive_file 500\n")):
        (group / f"memory.{name}").write_text(content)
    assert available_memory(tmp_path) == 1500
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 8192


def test_a_set_that_cannot_be_packed_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmdb")
    assert lmdb(["--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "found no train/" in capsys.readouterr().err
    (data / "val" / "red" / "01.jpg").write_bytes(b"")
    assert lmdb(["--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "01.jpg: the file is empty" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "out" / "val.lmdb").mkdir()
    assert lmdb(["--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "val.lmdb: is there already" in capsys.readouterr().err
    (data / "val" / "red").rename(data / "val" / "green")
    assert lmdb(["--data", str(data), "--out", str(tmp_path / "other")]) == 2
    assert "train/ has the classes ['blue', 'red'], val/ has ['blue', 'green']" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


# -- the plain loader -----------------------------------------------------------------------------------------------


def test_images_are_augmented_in_the_workers_or_on_the_device(data: Path) -> None:
    files, device = ImageFolder(data / "train"), torch.device("cpu")
    for how in ({}, {"raw": True}, {"raw": True, "ahead": True, "pinned": False}, {"decode": by_pillow}):
        loader = PlainLoader(files, device, 4, 0, **how)
        batches = loader.batches()
        seen = [next(batches) for _ in range(len(loader) + 1)]  # the next epoch begins on its own
        batches.close()
        assert {tuple(batch.images.shape) for batch in seen} == {(4, 3, 224, 224)}
        assert {batch.images.dtype for batch in seen} == {torch.float32}
        assert all(batch.mask.all() for batch in seen)
        assert float(seen[0].images.abs().max()) < 3


def test_decoders_of_the_plain_loader_give_the_same_pixels(data: Path) -> None:
    encoded, _ = ImageFolder(data / "train")[0]
    assert (by_opencv(encoded) == by_pillow(encoded)).all()


# -- the table ------------------------------------------------------------------------------------------------------


def test_each_row_is_a_figure_or_a_remark(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tricks, "_lacks", lambda module, package: f"needs {package}")
    monkeypatch.setattr(Bench, "workers", [0, 1])
    options = ["--data", data, "--toml", write_toml(tmp_path), "--batch-size", 4, "--workers", 0]
    options += ["--steps", 1, "--warmup", 1, "--rounds", 1, "--json", tmp_path / "rows.json"]
    assert measure(list(map(str, options))) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert {row["section"] for row in rows} == {1, 2, 3, 4, 5, 6, 7, 8}
    assert len(printed) == len(rows) + 3
    for row in rows:
        figures = [row[name] for name in ("without", "by", "ratio")]
        assert all(figures) != bool(row["remark"])
        assert all(figure is None or figure > 0 for figure in figures)
    remarks = {row["option"]: row["remark"] for row in rows}
    assert remarks["scripts/run.py lmdb"] == "needs lmdb"
    assert remarks["configs/preprocess_gpu.toml"] == remarks["--cudnn-benchmark"] == "needs a GPU"
    assert remarks["scripts/run.py profile"].startswith("the training loop waited for data ")
    assert remarks["--in-memory"] == remarks["--workers 1"] == remarks["--amp"] == ""


def test_a_training_that_fails_is_a_remark_and_the_others_go_on(tmp_path: Path) -> None:
    tried: list[str] = []

    def training(name: str, speed: float | Exception) -> Any:
        def run() -> float:
            tried.append(name)
            if isinstance(speed, Exception):
                raise speed
            return speed

        return run

    bench = Bench(argparse.Namespace(toml=tmp_path / "a.toml", workers=0, device="cpu"), tmp_path)
    bench.trainings = {"base": training("base", 10.0), "twice": training("twice", 20.0)}
    bench.trainings["bad"] = training("bad", TrainingError("no such thing\nand more"))
    chosen = [Trick(3, "a", "-a", "base", "twice"), Trick(3, "b", "-b", "base", "bad")]
    chosen.append(Trick(3, "c", "-c", "base", "twice", "needs a GPU"))
    figures, failed, missing = measured(bench, chosen, 2)
    assert (figures.without, figures.by, figures.ratio, figures.remark) == (10.0, 20.0, 2.0, "")
    assert (failed.ratio, failed.remark) == (None, "no such thing")
    assert (missing.ratio, missing.remark) == (None, "needs a GPU")
    assert tried == ["base", "twice", "bad", "base", "twice"]


def test_a_corrupt_file_is_a_remark(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (data / "train").rglob("*.jpg"):
        path.write_bytes(b"no image")
    options = ["--data", data, "--toml", write_toml(tmp_path), "--batch-size", 4, "--workers", 0, "--device", "cpu"]
    options += ["--steps", 1, "--warmup", 1, "--rounds", 1, "--sections", 7]
    assert measure(list(map(str, options))) == 1
    assert "corrupt" in capsys.readouterr().out.splitlines()[-1]


def test_missing_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(["--data", str(tmp_path / "nowhere")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"tricks: --data {tmp_path / 'nowhere'}: expected the folders train/ and val/ in it")
    assert printed.count("\n") == 1
