"""scripts/train_dali.py, and its loader on the CPU; what needs DALI is skipped without it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import train_dali
from conftest import encode, picture
from recipes.dali import CutOut, DaliLoader, DaliOptions, GridMask
from recipes.data import MEAN, STD
from test_training_scripts import accuracies
from training_data import write_classes

from torchpipe_py.training import ImageFolder, TrainingError

SIZE = 32
CPU = torch.device("cpu")
LARGER = np.array((150, 60, 40), np.uint8)  # the color of that image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that differ in color: ten images to train on, five to validate with, one of those larger."""
    write_classes(tmp_path / "data", 10, 5)
    (tmp_path / "data" / "val" / "blue" / "00.jpg").write_bytes(encode(picture(50, 70) // 3 + LARGER))
    return tmp_path / "data"


@pytest.fixture
def dali() -> Any:
    return pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")


def loader_of(folder: Path, is_training: bool, **options: Any) -> DaliLoader:
    made = DaliOptions(**{"size": SIZE, "batch_size": 4, "decode": "cpu", "is_training": is_training, **options})
    return DaliLoader(ImageFolder(folder), CPU, made)


def pixels(images: Any) -> Any:
    """uint8 N×H×W×3, from normalised N×3×H×W."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return ((images * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def epoch_of(loader: DaliLoader) -> list[tuple[Any, ...]]:
    batches = [(batch.indices.tolist(), batch.labels.tolist(), batch.images.clone()) for batch in loader]
    loader.reset()
    return batches


def same(batches: list[tuple[Any, ...]], others: list[tuple[Any, ...]]) -> bool:
    return len(batches) == len(others) and all(
        left[:2] == right[:2] and torch.equal(left[2], right[2]) for left, right in zip(batches, others, strict=True)
    )


# -- with DALI --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("dali")
def test_each_validation_image_comes_once_as_opencv_resizes_it(folder: Path) -> None:
    dataset = ImageFolder(folder / "val")
    with loader_of(folder / "val", False) as loader:
        assert len(loader) == 2
        for epoch in range(2):
            batches = list(loader)
            assert [len(batch.images) for batch in batches] == [4, 1]
            assert [int(value) for batch in batches for value in batch.indices] == list(range(5))
            assert [int(value) for batch in batches for value in batch.labels] == [
                label for _, label in dataset.samples
            ]
            assert [(batch.epoch, batch.number) for batch in batches] == [(epoch, 0), (epoch, 1)]
            loader.reset()
        images = torch.cat([batch.images for batch in batches])
        assert loader.stats()["samples"] == 10
    assert images.dtype == torch.float32
    assert images.shape == (5, 3, SIZE, SIZE)
    for shown, (path, _) in zip(pixels(images), dataset.samples, strict=True):
        wanted = cv2.cvtColor(cv2.resize(cv2.imread(path), (SIZE, SIZE)), cv2.COLOR_BGR2RGB)
        assert np.abs(shown.astype(int) - wanted.astype(int)).max() <= 3


@pytest.mark.usefixtures("dali")
def test_training_is_shuffled_flipped_and_drops_the_last(folder: Path) -> None:
    with loader_of(folder / "val", False, batch_size=5) as straight:
        plain = next(straight).images
    orders, flips = set(), 0
    with loader_of(folder / "val", True, batch_size=2) as loader:
        for _ in range(8):
            batches = epoch_of(loader)
            assert [len(indices) for indices, *_ in batches] == [2, 2]
            taken = [index for indices, *_ in batches for index in indices]
            assert len(set(taken)) == 4
            orders.add(tuple(taken))
            for index, image in zip(taken, torch.cat([images for *_, images in batches]), strict=True):
                is_flipped = not torch.allclose(image, plain[index], atol=1e-4)
                assert torch.allclose(image, plain[index].flip(-1) if is_flipped else plain[index], atol=1e-4)
                flips += is_flipped
    assert len(orders) > 1
    assert 4 <= flips <= 28


@pytest.mark.usefixtures("dali")
def test_an_epoch_of_whole_batches_has_each_image_once(folder: Path) -> None:
    orders = set()
    for seed in range(3):
        with loader_of(folder / "train", True, batch_size=5, seed=seed) as loader:
            for _ in range(3):
                taken = [index for indices, *_ in epoch_of(loader) for index in indices]
                assert sorted(taken) == list(range(10))
                orders.add(tuple(taken))
    assert len(orders) == 9


@pytest.mark.usefixtures("dali")
def test_a_file_that_is_no_image_ends_it(folder: Path) -> None:
    (folder / "val" / "red" / "01.jpg").write_bytes(b"no image")
    with loader_of(folder / "val", False) as loader, pytest.raises(RuntimeError, match="decoders"):
        list(loader)


@pytest.mark.usefixtures("dali")
def test_one_seed_gives_one_training_and_a_state_goes_on(folder: Path) -> None:
    augments = (CutOut(8, SIZE), GridMask(8))
    with loader_of(folder / "train", True, seed=3, augments=augments) as loader:
        first = epoch_of(loader)
        state = loader.state_dict()
        second, third = epoch_of(loader), epoch_of(loader)
        next(loader)
        with pytest.raises(TrainingError, match="between epochs"):
            loader.state_dict()
        with pytest.raises(TrainingError, match="after its last batch"):
            loader.reset()
    assert not same(first, second)
    with loader_of(folder / "train", True, seed=3, augments=augments) as again:
        assert same(epoch_of(again), first)
        again.load_state_dict(state)
        assert again.epoch == 1
        assert same(epoch_of(again), second)
        assert same(epoch_of(again), third)
    with loader_of(folder / "train", True, seed=4, augments=augments) as other:
        assert not same(epoch_of(other), first)
        with pytest.raises(TrainingError, match="seed = 3, here it is 4"):
            other.load_state_dict(state)


@pytest.mark.usefixtures("dali")
def test_cutout_erases_a_square(folder: Path) -> None:
    corners = set()
    with loader_of(folder / "train", True, augments=[CutOut(12, SIZE)]) as loader:
        for *_, images in epoch_of(loader) + epoch_of(loader):
            for image in pixels(images):
                rows, columns = np.nonzero((image == 0).all(axis=2))
                assert len(rows) == 144
                assert np.ptp(rows) == np.ptp(columns) == 11
                corners.add((int(rows.min()), int(columns.min())))
    assert len(corners) > 5


@pytest.mark.usefixtures("dali")
def test_gridmask_erases_a_grid(folder: Path) -> None:
    with loader_of(folder / "train", True, augments=[GridMask(8, 0.5, turn=0.0)]) as loader:
        masks = [(image == 0).all(axis=2) for *_, images in epoch_of(loader) for image in pixels(images)]
    for mask in masks:
        rows, columns = mask.any(axis=1), mask.any(axis=0)
        assert (mask == rows[:, None] & columns).all()
        assert (rows[8:] == rows[:-8]).all()
        assert (columns[8:] == columns[:-8]).all()
        assert 9 <= int(rows.sum()) <= 23
    assert len({mask.tobytes() for mask in masks}) > 1


@pytest.mark.usefixtures("dali")
def test_the_script_goes_on_with_the_next_epoch(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A rate of 0, since the schedule depends on --epochs: what differs is the batch norms' statistics of the images.
    def trained(name: str, epochs: int) -> str:
        options = ["--data", folder, "--device", "cpu", "--size", SIZE, "--batch-size", 4, "--augment", "both"]
        more = ["--epochs", epochs, "--checkpoint", tmp_path / name, "--lr", 0]
        assert train_dali.main([*map(str, options), *map(str, more)]) == 0
        return capsys.readouterr().out

    printed = trained("whole.pt", 2)
    assert [seen for _, seen in accuracies(printed)] == [5, 5]
    assert accuracies(trained("parts.pt", 1)) + accuracies(trained("parts.pt", 2)) == accuracies(printed)
    whole, parts = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "parts.pt"))
    assert torch.equal(whole["loader"]["pipeline"], parts["loader"]["pipeline"])
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])


@pytest.mark.usefixtures("dali")
def test_the_script_learns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", folder, "--device", "cpu", "--size", SIZE, "--batch-size", 5, "--epochs", 12]
    assert train_dali.main([*map(str, options), "--augment", "cutout"]) == 0
    assert accuracies(capsys.readouterr().out)[-1] == (1.0, 5)


@pytest.mark.usefixtures("dali")
def test_the_decoder_of_the_gpu_needs_one(folder: Path) -> None:
    with pytest.raises(TrainingError, match="--decode gpu needs a CUDA device, and this is cpu"):
        loader_of(folder / "val", False, decode="gpu")


# -- without ----------------------------------------------------------------------------------------------------------


def test_without_dali_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setitem(sys.modules, "nvidia.dali.fn", None)
    assert train_dali.main(["--data", str(folder), "--device", "cpu", "--size", str(SIZE)]) == 2
    told = capsys.readouterr().err
    assert re.search(r"DALI needs nvidia-dali-cuda1\d0 \(pip install nvidia-dali-cuda1\d0\)", told)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--save-every", "5"], "--save-every: a DALI pipeline is saved between epochs only"),
        (["--max-steps", "5", "--checkpoint", "last.pt"], "--max-steps: a DALI pipeline is saved between epochs only"),
        (["--bad-samples", "skip"], "--bad-samples skip: DALI stops at a file that is no image"),
        (["--size", "0"], "--size: at least 1 pixel"),
        (["--augment", "mixup"], "invalid choice: 'mixup'"),
        (["--toml", "pipe.toml"], "unrecognized arguments: --toml"),
    ],
)
def test_options_that_do_not_go_with_dali(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_dali.main(["--data", "nowhere", *options])
    assert reason in capsys.readouterr().err
