"""scripts/train.py --dali, and its loader on the CPU; what needs DALI is skipped without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import train
from conftest import encode, picture
from kit.services import reserved_port
from kit.training_data import write_classes
from kit.waits import PROGRAM_WAIT
from recipes import augmentation, tfrecord
from recipes.dali import DaliLoader, DaliOptions
from recipes.data import MEAN, STD
from recipes.tfrecord import TfRecordImages
from test_training_scripts import accuracies, ran

from torchpipe_py.training import ImageFiles, ImageFolder, TrainingError

SIZE = 32
CPU = torch.device("cpu")
LARGER = np.array((150, 60, 40), np.uint8)  # added to one image, which is larger and smooth


@pytest.fixture
def dali() -> Any:
    return pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")


needs_dali = pytest.mark.usefixtures("dali")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that differ in color: eleven images to train on, five to validate with, one of those larger."""
    write_classes(tmp_path / "data", 11, 5)
    (tmp_path / "data" / "val" / "blue" / "00.jpg").write_bytes(encode(picture(50, 70) // 3 + LARGER))
    return tmp_path / "data"


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> ImageFiles:
    """2,048 times the same image, 128 everywhere."""
    path = tmp_path_factory.mktemp("uniform") / "gray.png"
    path.write_bytes(encode(np.full((SIZE, SIZE, 3), 128, np.uint8), ".png"))
    return ImageFiles([(path, 0)] * 2048)


def loader_of(dataset: Any, is_training: bool = True, **options: Any) -> DaliLoader:
    dataset = ImageFolder(dataset) if isinstance(dataset, Path) else dataset
    made = {"size": SIZE, "batch_size": 2, "decode": "cpu", "is_training": is_training, **options}
    return DaliLoader(dataset, CPU, DaliOptions(**made))


def pixels(images: Any) -> np.ndarray:
    """uint8 N×H×W×3, from normalised N×3×H×W."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    restored: np.ndarray = ((images * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return restored


Taken = tuple[int, int, list[int], list[int], Any]


def steps(loader: DaliLoader, epochs: int) -> Iterator[Taken]:
    """The remaining steps of the epochs up to that one, with all properties to compare."""
    while loader.epoch < epochs:
        for batch in loader:
            yield batch.epoch, batch.number, batch.indices.tolist(), batch.labels.tolist(), batch.images.clone()
        loader.reset()


def taken_from(loader: DaliLoader) -> Taken:
    """The next batch."""
    batch = next(loader)
    return batch.epoch, batch.number, batch.indices.tolist(), batch.labels.tolist(), batch.images.clone()


def same(batches: list[Taken], others: list[Taken]) -> bool:
    """Bit for bit."""
    return len(batches) == len(others) and all(
        left[:-1] == right[:-1] and torch.equal(left[-1], right[-1])
        for left, right in zip(batches, others, strict=True)
    )


# -- what it gives ----------------------------------------------------------------------------------------------------


@needs_dali
def test_gives_each_validation_image_once_as_opencv_resizes_it(folder: Path) -> None:
    dataset = ImageFolder(folder / "val")
    with loader_of(dataset, False, batch_size=4) as loader:
        assert len(loader) == 2
        taken = list(steps(loader, 2))
        assert loader.stats()["samples"] == 10
    labels = [label for _, label in dataset.samples]
    assert [(epoch, number) for epoch, number, *_ in taken] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [indices for _, _, indices, *_ in taken] == [[0, 1, 2, 3], [4]] * 2
    assert [found for *_, found, _ in taken] == [labels[:4], labels[4:]] * 2
    images = torch.cat([images for *_, images in taken[:2]])
    assert images.dtype == torch.float32
    assert images.shape == (5, 3, SIZE, SIZE)
    for shown, (path, _) in zip(pixels(images), dataset.samples, strict=True):
        wanted = cv2.cvtColor(cv2.resize(cv2.imread(path), (SIZE, SIZE)), cv2.COLOR_BGR2RGB)
        assert np.abs(shown.astype(int) - wanted.astype(int)).max() <= 3


@needs_dali
def test_without_augments_training_is_shuffled_flipped_and_drops_the_last(folder: Path) -> None:
    with loader_of(folder / "val", False, batch_size=5) as straight:
        plain = next(straight).images
    orders, flips = set(), 0
    with loader_of(folder / "val") as loader:
        taken = list(steps(loader, 8))
    for epoch in range(8):
        batches = [batch for batch in taken if batch[0] == epoch]
        assert [len(indices) for _, _, indices, *_ in batches] == [2, 2]
        order = [index for _, _, indices, *_ in batches for index in indices]
        assert len(set(order)) == 4
        orders.add(tuple(order))
        for index, image in zip(order, torch.cat([images for *_, images in batches]), strict=True):
            is_flipped = not torch.allclose(image, plain[index], atol=1e-4)
            assert torch.allclose(image, plain[index].flip(-1) if is_flipped else plain[index], atol=1e-4)
            flips += is_flipped
    assert len(orders) > 4
    assert 4 <= flips <= 28


@needs_dali
def test_an_epoch_of_whole_batches_has_each_image_once_in_an_order_of_its_seed(folder: Path) -> None:
    orders = set()
    for seed in (-1, 0, 1):
        with loader_of(folder / "train", batch_size=11, seed=seed) as loader:
            for _, _, order, *_ in steps(loader, 3):
                assert sorted(order) == list(range(11))
                orders.add(tuple(order))
    assert len(orders) == 9


@needs_dali
@pytest.mark.parametrize("is_training", [True, False])
def test_ranks_share_an_epoch_and_make_equal_steps_in_training(folder: Path, is_training: bool) -> None:
    counts, seen = [], []
    for rank in range(3):
        options = {"batch_size": 1 if is_training else 2, "rank": rank, "ranks": 3}
        with loader_of(folder / "train", is_training, **options) as loader:
            counts.append(len(loader))
            for epoch, _, indices, *_ in steps(loader, 2):
                seen += [(epoch, index) for index in indices]
    once = [(epoch, index) for epoch in range(2) for index in range(11)]
    if is_training:
        assert counts == [4, 4, 4]
        assert sorted(seen) == sorted([*once, (0, 0), (1, 0)])  # the first is there twice
    else:
        assert counts == [2, 2, 2]
        assert sorted(seen) == once


@needs_dali
def test_a_reset_within_an_epoch_begins_the_next(folder: Path) -> None:
    with loader_of(folder / "train") as loader:
        whole = list(steps(loader, 2))
        with pytest.raises(TrainingError, match="epoch 2 is over"):
            iter([list(loader), list(loader)])
    with loader_of(folder / "train") as loader:
        next(loader)
        loader.reset()
        assert same(list(steps(loader, 2)), whole[5:])


@needs_dali
def test_accepts_pngs(tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.png").write_bytes(encode(picture(SIZE, SIZE), ".png"))
    with loader_of(tmp_path, False) as loader:
        (shown,) = pixels(next(loader).images)
    assert (shown[..., ::-1] == picture(SIZE, SIZE)).all()


# -- augmentation -----------------------------------------------------------------------------------------------------


def augmented(dataset: ImageFiles, *augments: str) -> np.ndarray:
    """One epoch, uint8 N×H×W×3."""
    with loader_of(dataset, batch_size=256, augments=augments) as loader:
        return np.concatenate([pixels(batch.images) for batch in loader])


@needs_dali
def test_cutout_erases_squares_with_centres_anywhere(uniform: ImageFiles) -> None:
    erased = (augmented(uniform, "cutout") == 0).all(axis=3)
    half = int(SIZE * augmentation.HOLE_SIDE) // 2
    centres = np.arange(SIZE)
    covers = (centres[:, None] >= centres - half) & (centres[:, None] < centres + half)  # pixel × centre
    along = covers.mean(axis=1)  # the share of centres that reach a pixel: half of it at the border
    assert augmentation.HOLES == 1
    assert erased.mean() == pytest.approx(along.mean() ** 2, abs=0.006)
    assert np.abs(erased.mean(axis=0) - np.outer(along, along)).max() < 0.06
    for mask in erased[:100]:
        rows, columns = mask.any(axis=1), mask.any(axis=0)
        assert (mask == rows[:, None] & columns).all()
        assert np.ptp(np.nonzero(rows)[0]) == rows.sum() - 1
        assert half <= rows.sum() <= 2 * half


@needs_dali
def test_gridmask_erases_the_mean_square_of_its_ratios_everywhere_alike(uniform: ImageFiles) -> None:
    erased = (augmented(uniform, "gridmask") == 0).all(axis=3)
    low, high = augmentation.TILE_RATIO
    share = (high**3 - low**3) / (3 * (high - low))
    tile = int(SIZE * augmentation.TILE)
    assert erased.mean() == pytest.approx(share, abs=0.006)
    assert np.abs(erased.mean(axis=0) - share).max() < 0.05
    for mask in erased[:100]:
        assert (mask[tile:] == mask[:-tile]).all()
        assert (mask[:, tile:] == mask[:, :-tile]).all()
    assert len({mask.tobytes() for mask in erased}) > 100


@needs_dali
def test_rotation_leaves_black_corners_and_the_middle(uniform: ImageFiles) -> None:
    images = augmented(uniform, "crop")
    black = (images == 0).all(axis=3)
    assert 0.005 < black.mean() < 0.1
    middle = slice(SIZE // 2 - 2, SIZE // 2 + 2)
    assert not black[:, middle, middle].any()


@needs_dali
def test_brightness_is_drawn_from_its_range(uniform: ImageFiles) -> None:
    values = augmented(uniform, "color").reshape(-1, SIZE * SIZE * 3)
    assert np.ptp(values, axis=1).max() <= 3  # gray stays gray under saturation and hue
    factors = values[:, 0] / 128
    reach = augmentation.BRIGHTNESS
    assert factors.min() == pytest.approx(1 - reach, abs=0.02)
    assert factors.max() == pytest.approx(1 + reach, abs=0.02)
    assert factors.std() == pytest.approx(reach / np.sqrt(3), abs=0.02)


# -- resuming ---------------------------------------------------------------------------------------------------------

ALL = {"augments": augmentation.AUGMENTS, "seed": 3}


@needs_dali
def test_a_state_goes_on_with_the_next_batch_at_each_position(folder: Path) -> None:
    states, whole = [], []
    with loader_of(folder / "train", **ALL) as loader:
        for step in steps(loader, 2):
            whole.append(step)
            states.append(loader.state_dict())  # of the last of an epoch: before its reset
        assert loader.state_dict()["position"] == 0
        states.append(loader.state_dict())
        whole += steps(loader, 3)
    assert [(state["epoch"], state["position"]) for state in states[3:7]] == [(0, 4), (0, 5), (1, 1), (1, 2)]
    with loader_of(folder / "train", **ALL) as other:
        for position, state in enumerate(states[:-1], 1):
            other.load_state_dict(state)
            assert same(list(steps(other, 3)), whole[position:]), position
        other.load_state_dict(states[-1])
        assert same(list(steps(other, 3)), whole[10:])


@needs_dali
def test_a_state_of_other_data_or_options_is_refused(folder: Path) -> None:
    with loader_of(folder / "train", **ALL) as loader:
        state = loader.state_dict()
    with (
        loader_of(folder / "train", **{**ALL, "seed": 4}) as loader,
        pytest.raises(TrainingError, match="saved with seed = 3, here it is 4"),
    ):
        loader.load_state_dict(state)
    with (
        loader_of(folder / "val", **ALL) as loader,
        pytest.raises(TrainingError, match="saved with samples = 11, here it is 5"),
    ):
        loader.load_state_dict(state)


# -- the script -------------------------------------------------------------------------------------------------------


def options(folder: Path, *more: object) -> list[object]:
    return ["--dali", "--data", folder, "--device", "cpu", "--size", SIZE, "--batch-size", 4, "--workers", 1, *more]


@needs_dali
def test_the_script_learns_and_goes_on_where_it_stopped(folder: Path, tmp_path: Path, capsys: Any) -> None:
    more = ("--augment", "crop", "cutout", "--epochs", 8)
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    printed = ran(capsys, *options(folder, *more, "--checkpoint", whole))
    assert accuracies(printed)[-1] == (1.0, 5)
    ran(capsys, *options(folder, *more, "--checkpoint", parts, "--max-steps", 3))
    assert torch.load(parts, weights_only=True)["loader"]["position"] == 1  # of the second epoch's two batches
    ran(capsys, *options(folder, *more, "--checkpoint", parts, "--save-every", 2))
    unbroken, resumed = (torch.load(path, weights_only=True)["model"] for path in (whole, parts))
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


@pytest.mark.slow
@needs_dali
@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("kind", ["files", "records"])
@pytest.mark.parametrize("batch_size", [2, 4])
def test_a_state_of_an_epochs_end_may_be_saved_again_before_a_batch(
    folder: Path, tmp_path: Path, kind: str, prefetch: int, batch_size: int
) -> None:
    dataset: Any = ImageFolder(folder / "train")
    if kind == "records":
        tfrecord.pack(folder, tmp_path / "packed", 0)
        dataset = TfRecordImages(tmp_path / "packed", "train")
    options = {"augments": augmentation.AUGMENTS, "prefetch": prefetch, "batch_size": batch_size}
    with loader_of(dataset, **options) as loader:
        whole, count = list(steps(loader, 3)), len(loader)
    with loader_of(dataset, **options) as loader:
        assert same([taken_from(loader) for _ in range(count)], whole[:count])
        state = loader.state_dict()  # stopped at the epoch's end
    for _ in range(2):  # finished, and then gone on with, but without a step
        with loader_of(dataset, **options) as loader:
            loader.load_state_dict(state)
            if loader.epoch == 0:
                loader.reset()
            state = loader.state_dict()
            assert same(list(steps(loader, 3)), whole[count:])
    with loader_of(dataset, **options) as loader:
        loader.load_state_dict(state)
        one = taken_from(loader)
        assert same([one, *steps(loader, 3)], whole[count:])


@needs_dali
def test_a_reader_that_ends_early_is_one_line(folder: Path) -> None:
    with loader_of(folder / "train") as loader:
        for _ in range(len(loader)):
            next(loader)
        state = loader.state_dict()
    with loader_of(folder / "train") as loader:
        loader.load_state_dict({**state, "epoch": 1, "position": 0})
        with pytest.raises(TrainingError, match="ended before batch 0 of 5 of epoch 1"):
            next(loader)


@needs_dali
@pytest.mark.slow
def test_the_script_finishes_an_epoch_that_was_stopped_at_its_end(folder: Path, tmp_path: Path, capsys: Any) -> None:
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    ran(capsys, *options(folder, "--epochs", 2, "--checkpoint", whole))
    steps_of_epoch = torch.load(whole, weights_only=True)["steps"] // 2
    ran(capsys, *options(folder, "--epochs", 2, "--checkpoint", parts, "--max-steps", steps_of_epoch))
    state = torch.load(parts, weights_only=True)
    for more in (("--max-steps", 1), ()):
        ran(capsys, *options(folder, "--epochs", 2, "--checkpoint", parts, *more))
    assert state["loader"]["position"] == steps_of_epoch
    unbroken, resumed = (torch.load(path, weights_only=True)["model"] for path in (whole, parts))
    assert all(torch.equal(unbroken[name], resumed[name]) for name in unbroken)


@needs_dali
def test_the_script_takes_mixed_precision(folder: Path, capsys: Any) -> None:
    printed = ran(capsys, *options(folder, "--epochs", 1, "--amp"))
    assert [seen for _, seen in accuracies(printed)] == [5]


@needs_dali
@pytest.mark.slow
def test_two_processes_go_on_where_they_stopped(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one, and another of rank 1."""

    def both(*more: object) -> str:
        arguments = options(
            folder, "--ddp", "--batch-size", 2, "--epochs", 2, "--augment", *augmentation.AUGMENTS, *more
        )
        with reserved_port() as port:
            ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
            for name, value in {**ranks, "RANK": "0", "LOCAL_RANK": "0"}.items():
                monkeypatch.setenv(name, value)
            command = [sys.executable, train.__file__, *map(str, arguments)]
            other = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            with subprocess.Popen(command, env=other) as process:
                printed = ran(capsys, *arguments)
                assert process.wait(PROGRAM_WAIT) == 0
        return printed

    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    printed = both("--checkpoint", whole)
    assert [seen for _, seen in accuracies(printed)] == [5, 5]
    both("--checkpoint", parts, "--max-steps", 4)  # of three in an epoch
    both("--checkpoint", parts)
    unbroken, resumed = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert all(torch.equal(unbroken["model"][name], resumed["model"][name]) for name in unbroken["model"])
    first, second = unbroken["loader"]["pipelines"]
    assert not torch.equal(first, second)


# -- what a user can mend ---------------------------------------------------------------------------------------------


def told(capsys: Any, *arguments: object) -> str:
    """The one line on stderr of a training that cannot be, after what DALI's decoders may write."""
    capsys.readouterr()
    assert train.main(list(map(str, arguments))) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("train: ")
    return line


@needs_dali
def test_an_image_that_cannot_be_read_or_decoded_is_named(folder: Path, capsys: Any) -> None:
    bad = folder / "val" / "red" / "01.jpg"
    whole = bad.read_bytes()
    for content, reason in ((b"no image", "not an image"), (whole[:100], "")):
        bad.write_bytes(content)
        assert f"{bad}: cannot be decoded: {reason}" in told(capsys, *options(folder, "--epochs", 1))
    bad.write_bytes(b"")
    assert str(bad) in told(capsys, *options(folder, "--epochs", 1))
    bad.write_bytes(whole)
    bad = folder / "train" / "red" / "01.jpg"
    bad.write_bytes(b"no image")
    assert f"{bad}: cannot be decoded: not an image" in told(capsys, *options(folder, "--epochs", 1))


BESIDE_LARGE_IMAGES = """
import sys, torch
from recipes.dali import DaliLoader, DaliOptions
from torchpipe_py.training import ImageFiles, TrainingError
samples = [(path, 0) for path in sys.argv[1:] * 16]
for decoder in range(8):
    with DaliLoader(ImageFiles(samples), torch.device("cpu"), DaliOptions(224, 32, "cpu", False)) as loader:
        try:
            list(loader)
        except TrainingError as error:
            print(error)
"""


@pytest.mark.slow
@needs_dali
def test_invalid_file_beside_large_images_does_not_crash(tmp_path: Path, jpeg: bytes) -> None:
    """In a separate process: DALI's decoder alone would crash it with a segmentation fault every second time."""
    (tmp_path / "good.jpg").write_bytes(jpeg)
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    command = [sys.executable, "-c", BESIDE_LARGE_IMAGES, tmp_path / "good.jpg", tmp_path / "bad.jpg"]
    scripts = str(Path(train.__file__).parent)
    paths = os.pathsep.join([scripts, str(Path(scripts).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        list(map(str, command)), env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{tmp_path / 'bad.jpg'}: cannot be decoded: not an image") == 8


@needs_dali
def test_refuses_data_or_devices_that_do_not_fit(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert "--decode gpu needs a CUDA device" in told(capsys, *options(folder, "--decode", "gpu"))
    assert "11 images are fewer than --batch-size 100" in told(capsys, *options(folder, "--batch-size", 100))
    line = told(capsys, *options(tmp_path / "nowhere"))
    assert "nowhere: expected the folders train/ and val/ in it, or train.tfrecord and val.tfrecord" in line
    with pytest.raises(TrainingError, match="5 images to validate with for 6 ranks"):
        loader_of(folder / "val", False, ranks=6)


@needs_dali
def test_a_name_that_is_not_utf8_is_refused(folder: Path, capsys: Any) -> None:
    (folder / "train" / "red").rename(folder / "train" / "\udcff")
    (folder / "val" / "red").rename(folder / "val" / "\udcff")
    assert "/\\udcff/01.jpg': DALI takes only names that are UTF-8" in told(capsys, *options(folder))


def test_missing_dali_error_names_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name in ("nvidia.dali", "nvidia.dali.fn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "NVIDIA DALI is not installed: pip install -e '.[dali]'" in told(capsys, *options(folder))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dali", "--toml", "pipe.toml"], "--toml does not go with --dali: its pipeline is code"),
        (["--dali", "--val-toml", "pipe.toml"], "--val-toml does not go with --dali"),
        (["--dali", "--workers-decode"], "--workers-decode does not go with --dali: its threads decode"),
        (["--dali", "--bad-samples", "skip"], "--bad-samples does not go with --dali: it stops"),
        (["--dali", "--dp"], "--dp does not go with --dali: a pipeline of DALI runs on one GPU; --ddp"),
        (["--dali", "--workers", "0"], "--workers 0 does not go with --dali: it needs a thread"),
        (["--dali", "--size", "0"], "expected a whole number from 1 to 32768"),
        (["--dali", "--workers", "1000000"], "expected a whole number from 0 to 256"),
        (["--dali", "--batch-size", "1000000000000"], "expected a whole number from 1 to 65536"),
        (["--dali", "--seed", str(2**63)], "expected a whole number of 64 bits"),
        (["--dali", "--lr", "nan"], "expected a learning rate from 0 to 1000"),
        (["--dali", "--lr", "-1"], "expected a learning rate from 0 to 1000"),
        (["--dali", "--lr", "inf"], "expected a learning rate from 0 to 1000"),
        ([], "or --dali to train without a pipe"),
        (["--toml", "pipe.toml", "--size", "64"], "--size is an option of --dali"),
        (["--toml", "pipe.toml", "--decode", "cpu"], "--decode is an option of --dali"),
    ],
)
def test_refuses_contradictory_options(arguments: list[str], reason: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        train.main(["--data", "nowhere", *arguments])
    assert reason in capsys.readouterr().err
