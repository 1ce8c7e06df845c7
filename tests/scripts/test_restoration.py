"""scripts/run.py restoration: pairs of images by DALI, cropped and flipped alike, and the training on them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encode, picture
from recipes import restoration
from recipes.dali import PairLoader, PairOptions
from recipes.dali.pairs import check_pairs, find_pairs
from test_training_dali import dali, needs_dali

from torchpipe_py.training import TrainingError

__all__ = ["dali"]

CROP = 24
COUNT = 7


def write_pairs(folder: Path, count: int = COUNT) -> Path:
    """PNGs of several sizes, and as their targets the same pictures inverted."""
    for number in range(count):
        mat = picture(CROP + number, CROP + 2 + number % 3, seed=number)
        for name, image in (("blurry", mat), ("sharp", 255 - mat)):
            path = folder / name / f"scene_{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(image, ".png"))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pairs(tmp_path / "data" / "train")
    return tmp_path / "data"


def loader_of(folder: Path, is_training: bool = True, **options: Any) -> PairLoader:
    made = {"crop": CROP, "batch_size": 3, "is_training": is_training, **options}
    return PairLoader(find_pairs(folder, "blurry", "sharp"), torch.device("cpu"), PairOptions(**made))


Epoch = list[tuple[Any, Any]]


def epoch_of(loader: PairLoader) -> Epoch:
    return [(inputs.clone(), targets.clone()) for inputs, targets in loader]


def same(batches: Epoch, others: Epoch) -> bool:
    """Bit for bit."""
    return len(batches) == len(others) and all(
        torch.equal(left, right)
        for pair, other in zip(batches, others, strict=True)
        for left, right in zip(pair, other, strict=True)
    )


def levels(images: Any) -> np.ndarray:
    """uint8 N×H×W×3, from -1 to 1 N×3×H×W."""
    restored: np.ndarray = ((images + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return restored


@needs_dali
def test_both_images_of_a_pair_are_cropped_and_flipped_alike(folder: Path) -> None:
    with loader_of(folder / "train") as loader:
        batches = [batch for _ in range(4) for batch in epoch_of(loader)]
    assert [len(inputs) for inputs, _ in batches] == [3, 3, 1] * 4
    for inputs, targets in batches:
        assert inputs.dtype == torch.float32
        assert inputs.shape[1:] == (3, CROP, CROP)
        assert (levels(inputs) == 255 - levels(targets)).all()


@needs_dali
def test_crops_and_flips_are_anywhere(folder: Path) -> None:
    """Each crop is a part of the picture, unchanged, mirrored, upside down or both."""
    path = folder / "one" / "train"
    mat = np.random.default_rng(0).integers(0, 256, (CROP + 2, CROP + 2, 3), np.uint8)
    for name in ("blurry", "sharp"):
        (path / name).mkdir(parents=True)
        (path / name / "0.png").write_bytes(encode(mat, ".png"))
    image = mat[..., ::-1]
    parts = {}
    for down in range(3):
        for right in range(3):
            part = image[down : down + CROP, right : right + CROP]
            for rows in (1, -1):
                for columns in (1, -1):
                    parts[part[::rows, ::columns].tobytes()] = (down, right, rows, columns)
    found = set()
    with loader_of(path) as loader:
        for _ in range(60):
            ((inputs, _),) = epoch_of(loader)
            found.add(parts[levels(inputs)[0].tobytes()])
    assert {place[:2] for place in found} >= {(0, 0), (0, 2), (2, 0), (2, 2)}
    assert {place[2:] for place in found} == {(1, 1), (1, -1), (-1, 1), (-1, -1)}


@needs_dali
def test_validation_pairs_come_in_their_order_cropped_in_the_middle(folder: Path) -> None:
    pairs = find_pairs(folder / "train", "blurry", "sharp")
    assert len(pairs) == COUNT
    with loader_of(folder / "train", False) as loader:
        first, second = epoch_of(loader), epoch_of(loader)
    assert same(first, second)
    shown = levels(torch.cat([inputs for inputs, _ in first]))
    # In the order of their names: all of scene_0 and then all of scene_1.
    for image, number in zip(shown, [0, 2, 4, 6, 1, 3, 5], strict=True):
        mat = picture(CROP + number, CROP + 2 + number % 3, seed=number)[..., ::-1]
        rows, columns = (side - CROP for side in mat.shape[:2])
        top, left = rows // 2, columns // 2
        around = [mat[y : y + CROP, x : x + CROP] for y in (top, top + rows % 2) for x in (left, left + columns % 2)]
        assert any((image == part).all() for part in around)


@needs_dali
def test_each_epoch_has_each_pair_once_in_an_order_of_its_seed(tmp_path: Path) -> None:
    for name in ("blurry", "sharp"):
        (tmp_path / name).mkdir()
        for number in range(COUNT):
            mat = np.full((CROP, CROP, 3), number, np.uint8)
            (tmp_path / name / f"{number}.png").write_bytes(encode(mat, ".png"))
    orders = set()
    for seed in range(2):
        with loader_of(tmp_path, seed=seed) as loader:
            for _ in range(3):
                order = [int(image.flat[0]) for inputs, _ in epoch_of(loader) for image in levels(inputs)]
                assert sorted(order) == list(range(COUNT))
                orders.add(tuple(order))
    assert len(orders) == 6


@needs_dali
def test_a_state_goes_on_with_the_next_epoch_or_batch(folder: Path) -> None:
    with loader_of(folder / "train", seed=5) as loader:
        first = epoch_of(loader)
        state = loader.state_dict()
        second, third = epoch_of(loader), epoch_of(loader)
    assert not same(first, second)
    with loader_of(folder / "train", seed=5) as again:
        assert same(epoch_of(again), first)
        again.load_state_dict(state)
        batches = iter(again)
        one = [tuple(images.clone() for images in next(batches))]
        within = again.state_dict()
        again.load_state_dict(within)
        assert same([*one, *epoch_of(again)], second)
        assert same(epoch_of(again), third)
    with loader_of(folder / "train", seed=6) as other:
        assert not same(epoch_of(other), first)
        with pytest.raises(TrainingError, match="saved with seed = 5, here it is 6"):
            other.load_state_dict(state)


@needs_dali
def test_resized_images_keep_their_shape(folder: Path) -> None:
    with loader_of(folder / "train", resize=CROP + 4) as loader:
        for inputs, targets in epoch_of(loader):
            assert inputs.shape[1:] == (3, CROP, CROP)
            assert (inputs + targets).abs().max() < 0.02


# -- the command ------------------------------------------------------------------------------------------------------


def options(folder: Path, *more: object) -> list[str]:
    given = ["--data_source", folder, "--device", "cpu", "--workers", 1, "--crop", CROP, "--batch-size", 4]
    return list(map(str, [*given, *more]))


def ran(capsys: Any, *arguments: str) -> list[str]:
    capsys.readouterr()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert restoration.main(list(arguments)) == 0
    finally:
        torch.set_num_threads(threads)
    return list(capsys.readouterr().out.splitlines())


def figures(lines: list[str]) -> list[str]:
    """Loss and PSNR, without the speed."""
    return [line.rpartition(",")[0] for line in lines if line.startswith("epoch ")]


@pytest.mark.slow
@needs_dali
def test_it_learns_and_goes_on_with_the_next_epoch(folder: Path, tmp_path: Path, capsys: Any) -> None:
    whole = figures(ran(capsys, *options(folder, "--epochs", 4)))
    psnrs = [float(line.split("PSNR ")[1].split()[0]) for line in whole]
    inputs = {line.split("of the inputs ")[1] for line in whole}
    assert len(inputs) == 1
    assert psnrs[-1] > psnrs[0] > float(inputs.pop().split()[0]) - 1
    last = ["--checkpoint", tmp_path / "last.pt"]
    parts = figures(ran(capsys, *options(folder, "--epochs", 2, *last)))
    again = ran(capsys, *options(folder, "--epochs", 4, *last))
    assert again[0].endswith("last.pt: goes on with epoch 2")
    assert parts + figures(again) == whole
    assert ran(capsys, *options(folder, "--epochs", 4, *last))[0].endswith("has all 4 epochs")


@needs_dali
@pytest.mark.slow
def test_it_makes_pairs_of_the_pictures_here(tmp_path: Path, capsys: Any) -> None:
    lines = ran(capsys, *options(tmp_path / "made", "--make", "--epochs", 1, "--resize", 48))
    assert lines[0].endswith("made: 47 pairs to train on, 9 to validate with")
    assert "of 9 pairs" in lines[1]
    assert restoration.main(options(tmp_path / "made", "--make")) == 2
    assert "is there already; leave --make out" in capsys.readouterr().err


def test_psnr_is_that_of_its_definition() -> None:
    targets = torch.zeros(2, 3, 4, 4)
    images = targets + torch.tensor([0.2, 0.02]).view(2, 1, 1, 1)
    assert restoration.psnr(images, targets).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)  # of a range of 2


def told(capsys: Any, *arguments: str) -> str:
    capsys.readouterr()
    assert restoration.main(list(arguments)) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("restoration: ")
    return str(line)


@needs_dali
def test_pairs_that_do_not_fit_are_named(folder: Path, tmp_path: Path, capsys: Any) -> None:
    path = folder / "train" / "blurry" / "scene_1" / "1.png"
    assert f"{path.parents[1] / 'scene_0' / '0.png'}: 26x24 is smaller than --crop 25" in told(
        capsys, *options(folder, "--crop", CROP + 1)
    )
    assert "after --resize is smaller than --crop 24" in told(capsys, *options(folder, "--resize", CROP - 1))
    whole = path.read_bytes()
    path.write_bytes(encode(picture(CROP, CROP), ".png"))
    assert f"{path}: 24x24, its target {folder / 'train' / 'sharp' / 'scene_1' / '1.png'} is 27x25" in told(
        capsys, *options(folder)
    )
    path.write_bytes(b"no image")
    assert f"{path}: not an image that can be read" in told(capsys, *options(folder))
    path.write_bytes(whole[:-200])
    assert f"{path}: cannot be decoded: " in told(capsys, *options(folder, "--epochs", 1))
    path.unlink()
    line = told(capsys, *options(folder))
    assert "6 in blurry/, 7 in sharp/; 1 without another, first scene_1/1, in sharp/" in line
    assert "no such directory" in told(capsys, *options(tmp_path / "nowhere"))
    assert "lowres: no such directory" in told(capsys, *options(folder, "--img", "lowres"))


@needs_dali
def test_refuses_decoding_on_a_gpu_without_one(folder: Path, capsys: Any) -> None:
    line = told(capsys, *options(folder, "--decode", "gpu"))
    assert "--decode gpu needs a CUDA device, and this is cpu; --decode cpu works" in line


def test_two_images_of_one_name_are_refused(folder: Path) -> None:
    path = folder / "train" / "blurry" / "scene_1" / "1.png"
    path.with_suffix(".jpg").write_bytes(path.read_bytes())
    with pytest.raises(TrainingError, match=r"scene_1/1\.jpg and 1\.png: a pair has one image of a name"):
        find_pairs(folder / "train", "blurry", "sharp")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("side", "reason"), [(10_000, r"10000x10000, its target .* is 27x25"), (30_000, r"too large an image \(")]
)
def test_names_too_large_image(folder: Path, side: int, reason: str) -> None:
    path = folder / "train" / "blurry" / "scene_1" / "1.png"
    head = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    head = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + struct.pack(">I", 100) + b"IDAT" + bytes(100))
    with pytest.raises(TrainingError, match=rf"scene_1/1\.png: {reason}"):
        check_pairs(find_pairs(folder / "train", "blurry", "sharp"), PairOptions(CROP, 4, is_training=True))


@needs_dali
@pytest.mark.slow
def test_refuses_checkpoint_of_another_kind(folder: Path, tmp_path: Path, capsys: Any) -> None:
    last = tmp_path / "last.pt"
    last.write_bytes(b"junk")
    assert "cannot be read as a checkpoint" in told(capsys, *options(folder, "--checkpoint", last))
    torch.save({"model": {}}, last)
    assert "not a checkpoint of scripts/run.py restoration" in told(capsys, *options(folder, "--checkpoint", last))
    torch.save({"restoration": 1}, last)
    assert "is incomplete: it lacks model, optimiser, loader" in told(capsys, *options(folder, "--checkpoint", last))
    last.unlink()
    ran(capsys, *options(folder, "--checkpoint", last, "--epochs", 1))
    line = told(capsys, *options(folder, "--checkpoint", last, "--batch-size", 2))
    assert "saved with batch_size = 4, here it is 2; go on with the options" in line


@pytest.mark.parametrize(
    ("name", "value"), [("--lr", "nan"), ("--seed", str(2**63)), ("--workers", "257"), ("--batch-size", "65537")]
)
def test_numbers_out_of_range_are_refused(name: str, value: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        restoration.main(options(tmp_path, name, value))
    assert f"argument {name}: expected a " in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").touch()
    for place, reason in (
        (tmp_path / "file" / "last.pt", "file is not a folder"),
        (tmp_path, "is a directory"),
        ("", "empty"),
    ):
        with pytest.raises(SystemExit, match="2"):
            restoration.main(options(tmp_path, "--checkpoint", place))
        assert reason in capsys.readouterr().err
