"""Loaders of DALI on a GPU: what they give, CutOut there, resuming, a training in mixed precision, pairs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train
from conftest import encode, picture
from kit.gpu import jpeg, needs_gpu, photo
from recipes import augmentation, restoration
from recipes.dali import DaliLoader, DaliOptions, PairLoader, PairOptions
from recipes.dali.pairs import find_pairs
from recipes.data import MEAN, STD

from torchpipe_py.training import ImageFiles

pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
pytestmark = needs_gpu

SIZE = 64
GPU = torch.device("cuda", 0)
PLACES = pytest.mark.parametrize("decode", ["cpu", "gpu"])


@pytest.fixture
def dataset(tmp_path: Path) -> ImageFiles:
    """23 JPEGs of several sizes, and a PNG, which the GPU leaves to the CPU; three classes."""
    samples = []
    for number in range(23):
        path = tmp_path / f"{number:02d}.jpg"
        path.write_bytes(jpeg(photo(90 + number % 4, 120 - number % 5, number)))
        samples.append((path, number % 3))
    (tmp_path / "23.png").write_bytes(encode(picture(80, 70), ".png"))
    return ImageFiles([*samples, (tmp_path / "23.png", 2)])


def loader_of(dataset: ImageFiles, decode: str, is_training: bool = True, **options: Any) -> DaliLoader:
    made = {"size": SIZE, "batch_size": 5, "is_training": is_training, **options}
    return DaliLoader(dataset, GPU, DaliOptions(decode=decode, **made))


def steps(loader: DaliLoader, epochs: int) -> list[tuple[Any, ...]]:
    """What is left of the epochs up to that one."""
    taken = []
    while loader.epoch < epochs:
        taken += [(batch.epoch, batch.indices.tolist(), batch.labels.cpu(), batch.images.cpu()) for batch in loader]
        loader.reset()
    return taken


def levels(images: Any) -> np.ndarray:
    """0 to 255, N×H×W×3, from normalised N×3×H×W."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    restored: np.ndarray = ((images.cpu() * std + mean) * 255).permute(0, 2, 3, 1).numpy()
    return restored


@PLACES
@pytest.mark.parametrize("is_training", [True, False])
def test_batches_are_float32_on_the_gpu(dataset: ImageFiles, decode: str, is_training: bool) -> None:
    with loader_of(dataset, decode, is_training) as loader:
        batches = list(loader)
        assert [len(batch.images) for batch in batches] == ([5] * 4 if is_training else [5] * 4 + [4])
        for images, labels in batches:
            assert (images.device, images.dtype, images.shape[1:]) == (GPU, torch.float32, (3, SIZE, SIZE))
            assert (labels.device, labels.dtype) == (GPU, torch.int64)
        indices = torch.cat([batch.indices for batch in batches])
        wanted = [dataset.samples[index][1] for index in indices.tolist()]
        assert torch.cat([batch.labels for batch in batches]).tolist() == wanted
        assert len(set(indices.tolist())) == len(indices)


def test_the_gpu_decodes_as_the_cpu_does(dataset: ImageFiles) -> None:
    with loader_of(dataset, "cpu", False) as one, loader_of(dataset, "gpu", False) as other:
        for left, right in zip(one, other, strict=True):
            assert left.indices.tolist() == right.indices.tolist()
            difference = np.abs(levels(left.images) - levels(right.images))
            assert (
                difference.mean() < 3
            )  # of noise, 2.15 on an H200: their JPEG decoders need not smooth halved chrominance alike


@PLACES
def test_cutout_erases_squares_with_centres_anywhere(tmp_path: Path, decode: str) -> None:
    path = tmp_path / "gray.jpg"
    path.write_bytes(jpeg(np.full((SIZE, SIZE, 3), 128, np.uint8)))
    with loader_of(ImageFiles([(path, 0)] * 2048), decode, batch_size=256, augments=("cutout",)) as loader:
        shown = [levels(batch.images) for batch in loader]
    erased = (np.concatenate(shown) < 1).all(axis=3)
    half = int(SIZE * augmentation.HOLE_SIDE) // 2
    centres = np.arange(SIZE)
    covers = (centres[:, None] >= centres - half) & (centres[:, None] < centres + half)  # pixel × centre
    along = covers.mean(axis=1)
    assert erased.mean() == pytest.approx(along.mean() ** 2, abs=0.006)
    assert np.abs(erased.mean(axis=0) - np.outer(along, along)).max() < 0.06


def test_gridmask_erases_the_mean_square_of_its_ratios(tmp_path: Path) -> None:
    path = tmp_path / "gray.jpg"
    path.write_bytes(jpeg(np.full((SIZE, SIZE, 3), 128, np.uint8)))
    with loader_of(ImageFiles([(path, 0)] * 2048), "gpu", batch_size=256, augments=("gridmask",)) as loader:
        erased = np.concatenate([(levels(batch.images) < 1).all(axis=3) for batch in loader])
    low, high = augmentation.TILE_RATIO
    assert erased.mean() == pytest.approx((high**3 - low**3) / (3 * (high - low)), abs=0.006)


@PLACES
@pytest.mark.parametrize("hardware_share", [None, 0.0])
def test_a_state_goes_on_with_the_next_batch(dataset: ImageFiles, decode: str, hardware_share: float | None) -> None:
    options = {"augments": augmentation.AUGMENTS, "seed": 3, "hardware_share": hardware_share}
    with loader_of(dataset, decode, **options) as loader:
        next(loader)
        state = loader.state_dict()
        whole = steps(loader, 2)
    with loader_of(dataset, decode, **options) as again:
        again.load_state_dict(state)
        resumed = steps(again, 2)
    assert len(whole) == 7
    assert [batch[:2] for batch in resumed] == [batch[:2] for batch in whole]
    assert all(torch.equal(left[2], right[2]) for left, right in zip(resumed, whole, strict=True))
    assert all(torch.equal(left[3], right[3]) for left, right in zip(resumed, whole, strict=True))


@PLACES
def test_a_training_in_mixed_precision(dataset: ImageFiles, tmp_path: Path, decode: str, capsys: Any) -> None:
    for part in ("train", "val"):
        for path, label in dataset.samples:
            place = tmp_path / "data" / part / f"class_{label}"
            place.mkdir(parents=True, exist_ok=True)
            (place / Path(path).name).write_bytes(Path(path).read_bytes())
    options = ["--data", tmp_path / "data", "--size", SIZE, "--batch-size", 8, "--epochs", 2, "--decode", decode]
    more = ["--amp", "--dali", "--augment", *augmentation.AUGMENTS, "--checkpoint", tmp_path / "last.pt"]
    assert train.main(list(map(str, [*options, *more]))) == 0
    assert capsys.readouterr().out.count("of 24 images") == 2


BESIDE_LARGE_IMAGES = """
import sys, torch
from recipes.dali import DaliLoader, DaliOptions
from torchpipe_py.training import ImageFiles, TrainingError
samples = [(path, 0) for path in sys.argv[2:] * 16]
for decoder in range(4):
    with DaliLoader(ImageFiles(samples), torch.device("cuda", 0), DaliOptions(224, 32, sys.argv[1], False)) as loader:
        try:
            list(loader)
        except TrainingError as error:
            print(error)
"""


@PLACES
def test_a_file_that_is_no_image_is_named_and_does_not_crash(tmp_path: Path, decode: str) -> None:
    good, bad = tmp_path / "good.jpg", tmp_path / "bad.jpg"
    good.write_bytes(jpeg(photo(375, 500, 0)))
    bad.write_bytes(b"no image")
    scripts = Path(train.__file__).parent
    paths = os.pathsep.join(map(str, [scripts, scripts.parent, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-c", BESIDE_LARGE_IMAGES, decode, str(good), str(bad)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{bad}: cannot be decoded: not an image") == 4


@PLACES
@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_pairs_are_cropped_and_flipped_alike(tmp_path: Path, capsys: Any, decode: str, suffix: str) -> None:
    allowed = 1e-4 if suffix == ".png" else 0.1  # a JPEG of the negative picture has other rounding
    for part in ("train", "val"):
        for number in range(7):
            mat = picture(40 + number, 50, seed=number)
            for name, image in (("blurry", mat), ("sharp", 255 - mat)):
                path = tmp_path / part / name / f"{number}{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode(image, suffix))
    options = PairOptions(crop=32, batch_size=3, is_training=True, decode=decode)
    with PairLoader(find_pairs(tmp_path / "train", "blurry", "sharp"), GPU, options) as loader:
        for _ in range(2):
            sizes = []
            for inputs, targets in loader:
                assert inputs.device == targets.device == GPU
                assert float((inputs + targets).abs().max()) < allowed
                sizes.append(len(inputs))
            assert sizes == [3, 3, 1]
    arguments = ["--data_source", str(tmp_path), "--crop", "32", "--epochs", "3", "--decode", decode]
    assert restoration.main(arguments) == 0
    assert "PSNR" in capsys.readouterr().out
