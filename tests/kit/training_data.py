"""Small datasets, and a loader over them, for the tests of the training side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import encode, picture
from torch.utils.data import DataLoader

from torchpipe_py.training import ImageFiles, TensorToTensor, TorchpipeLoader, cv2Resize, wrap_dataloader_torchpipe

FORKS = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)
"""Python 3.12 and newer warn of every fork of a process with threads, which PyTorch has; PyTorch of too few cores."""

TOML = """
[decode]
backend = "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"
resize_h = 24
resize_w = 20
color = "rgb"
device = "cpu"
instance_num = {instances}
"""


def write_toml(folder: Path, instances: int = 2) -> str:
    path = folder / f"pipe_{instances}.toml"
    path.write_text(TOML.format(instances=instances), encoding="utf-8")
    return str(path)


def write_images(folder: Path, count: int, corrupt: Sequence[int] = (), missing: Sequence[int] = ()) -> ImageFiles:
    """Write ``count`` JPEGs of three classes; ``corrupt`` ones are not images, ``missing`` ones are not written."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    for number in range(count):
        path = folder / f"image_{number:03d}.jpg"
        if number not in missing:
            jpeg = encode(picture(30 + number % 5, 40 + number % 7, seed=number))
            path.write_bytes(b"no image" if number in corrupt else jpeg)
        samples.append((str(path), number % 3))
    return ImageFiles(samples)


def write_classes(folder: Path, train: int, val: int) -> None:
    """JPEGs in ``train/`` and ``val/``, so many in each, of two classes that differ in color."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for number in range(count):
            name, color = (("blue", (220, 60, 40)), ("red", (40, 60, 220)))[number % 2]
            mat = np.clip(np.array(color) + rng.normal(0, 15, (26, 22, 3)), 0, 255).astype(np.uint8)
            place = folder / part / name
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:02d}.jpg").write_bytes(encode(mat))


class RandomOffset:
    """Adds a number drawn from each of the three global generators."""

    def __call__(self, image: Any) -> Any:
        drawn = float(torch.rand(1)) + random.random() + float(np.random.random())
        return TensorToTensor()(image) + drawn


class OnTheCpu:
    """A ``transforms_cpu`` with the geometry of the TOML, and randomness."""

    def __call__(self, image: Any) -> Any:
        return RandomOffset()(cv2Resize(24, 20)(image))


def wrapped(
    dataset: Any, toml: Any, *, batch_size: int = 4, workers: int = 0, shuffle: bool = False, **options: Any
) -> TorchpipeLoader:
    # The tests' lambdas cannot be pickled, which Python 3.14's default needs.
    how = "fork" if workers and not options.get("workers_decode") else None
    loader = DataLoader(
        dataset, batch_size=batch_size, shuffle=shuffle, num_workers=workers, multiprocessing_context=how
    )
    return wrap_dataloader_torchpipe("single", loader, toml, **{"transforms_gpu": TensorToTensor(), **options})


def taken(loader: TorchpipeLoader) -> list[tuple[Any, ...]]:
    """The rest of the epoch, with all properties to compare."""
    return [
        (batch.images.cpu().clone(), batch.labels.tolist(), batch.indices.tolist(), batch.mask.tolist(), batch.on_cpu)
        for batch in loader
    ]


def same(batches: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]]) -> bool:
    """Bit for bit."""
    return len(batches) == len(others) and all(
        torch.equal(left[0], right[0]) and left[0].dtype == right[0].dtype and left[1:] == right[1:]
        for left, right in zip(batches, others, strict=True)
    )
