"""The preprocessing and the two loaders of a training: augmented and shuffled, and as it is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from recipes import augmentation as shared
from recipes.datasets import PARTS, InMemory, agreed_classes, check_memory, gigabytes, open_dataset
from recipes.options import Place
from recipes.tfrecord import refuse_records
from torchpipe_py.training import (
    Augmentation,
    ColorTwist,
    Compose,
    CutOut,
    DistributedEvalSampler,
    GridMask,
    ImageFolder,
    LmdbImages,
    RandomResizedCrop,
    TorchpipeLoader,
    TrainingError,
    wrap_dataloader_torchpipe,
)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalise:
    """A ``transforms_batch``: N×3×H×W of 0..255 to 0..1, minus ``mean``, divided by ``std``."""

    def __init__(self, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> None:
        self._mean, self._std = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))

    def __call__(self, images: Any) -> Any:
        if self._mean.device != images.device:
            self._mean, self._std = self._mean.to(images.device), self._std.to(images.device)
        return images.to(torch.float32, copy=True).div_(255.0).sub_(self._mean).div_(self._std)


class FlipAndNormalise(Augmentation):
    """``Normalise`` after a horizontal flip of every second image on average; a few kernels for the whole batch."""

    draws = 1

    def __init__(self, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> None:
        self._normalise = Normalise(mean, std)

    def apply(self, images: Any, drawn: np.ndarray) -> Any:
        chosen = torch.from_numpy(np.flatnonzero(drawn[:, 0] < 0.5)).to(images.device, non_blocking=True)
        images = self._normalise(images)
        # NOTE: only these, in place: on a CPU each further copy of a batch takes longer than to normalise it.
        return images.index_copy_(0, chosen, images.index_select(0, chosen).flip(-1))


def augmentations(names: Sequence[str], size: int | None = None) -> Compose:
    """A ``transforms_batch``: the chosen ``AUGMENTS`` in their order, then flip and normalise.

    ``size``: both sides of the crop in pixels; ``None``: those of the images.
    """
    steps: dict[str, Callable[[], Augmentation]] = {
        "crop": lambda: RandomResizedCrop(size, scale=shared.AREA, ratio=shared.ASPECT_RATIO, degrees=shared.ROTATION),
        "color": lambda: ColorTwist(shared.BRIGHTNESS, shared.CONTRAST, shared.SATURATION, shared.HUE),
        "cutout": lambda: CutOut(shared.HOLES, shared.HOLE_SIDE),
        "gridmask": lambda: GridMask(shared.TILE, shared.TILE_RATIO),
    }
    return Compose([*(steps[name]() for name in shared.AUGMENTS if name in names), FlipAndNormalise()])


def training_loader(args: argparse.Namespace, place: Place, dataset: Any) -> TorchpipeLoader:
    sampler = DistributedSampler(dataset, seed=args.seed) if place.kind == "ddp" else None
    loader = DataLoader(
        dataset, args.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=args.workers, drop_last=True
    )
    return _wrapped(args, place, loader, args.toml, augmentations(args.augment))


def validation_loader(args: argparse.Namespace, place: Place, dataset: Any) -> TorchpipeLoader:
    sampler = DistributedEvalSampler(dataset) if place.kind == "ddp" else None
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers)
    return _wrapped(args, place, loader, args.val_toml or args.toml, Normalise())


class Loaders:
    """``train`` and ``val``, and the names of the ``classes``; a context that closes both."""

    def __init__(self, args: argparse.Namespace, place: Place) -> None:
        refuse_records(args.data)
        opened = [open_dataset(args.data, part) for part in PARTS]
        with ExitStack() as stack:
            for dataset in opened:
                if isinstance(dataset, LmdbImages):
                    stack.callback(dataset.close)  # a process opens a database only once
            self.classes = agreed_classes(args.data, *opened)
            train, val = _in_memory(args, place, opened) if args.in_memory else opened
            self.train = stack.enter_context(training_loader(args, place, train))
            if not len(self.train):
                share = f", dealt out to {dist.get_world_size()} processes," if place.kind == "ddp" else ""
                raise TrainingError(
                    f"{args.data / 'train'}: {len(train)} images{share} are fewer than --batch-size {args.batch_size}"
                )
            self.val = stack.enter_context(validation_loader(args, place, val))
            self._stack = stack.pop_all()

    def __enter__(self) -> Loaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _in_memory(args: argparse.Namespace, place: Place, datasets: Sequence[ImageFolder | LmdbImages]) -> list[InMemory]:
    check_memory(datasets, args)
    began = perf_counter()
    kept = [InMemory(dataset) for dataset in datasets]
    if place.rank == 0:
        images, size = sum(map(len, kept)), gigabytes(sum(dataset.size for dataset in kept))
        print(f"in memory: {images} encoded images, {size}, read in {perf_counter() - began:.1f} s", flush=True)
    return kept


def _wrapped(args: argparse.Namespace, place: Place, loader: Any, toml: Any, transforms: Any) -> TorchpipeLoader:
    options = {name: getattr(args, name) for name in ("seed", "bad_samples", "workers_decode", "prefetch")}
    where: dict[str, Any] = {"local_rank": place.local_rank, "devices": place.devices}
    return wrap_dataloader_torchpipe(place.kind, loader, toml, transforms_batch=transforms, **where, **options)
