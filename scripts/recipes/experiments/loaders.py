"""Loaders of a training side by side: torchvision's ``DataLoader``, NVIDIA DALI, and ours.

All make the same batches of a folder's JPEGs: float32 N×3×size×size on the device, augmented alike
(``recipes.augmentation``), flipped at random and normalised; for validation resized and normalised. They resample
differently: torchvision antialiases, DALI rotates and crops in two steps, ours in one. ``workers`` are processes,
or the threads of DALI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from recipes import augmentation
from recipes.augmentation import AREA, ASPECT_RATIO, HOLE_SIDE, HOLES, ROTATION, TILE, TILE_RATIO, enlarged
from recipes.dali import DaliLoader, DaliOptions
from recipes.data import MEAN, STD, Normalise, augmentations
from torchpipe_py.cores import usable_cores
from torchpipe_py.training import CutOut, GridMask, ImageFolder, TrainingError, wrap_dataloader_torchpipe
from torchpipe_py.training.errors import library

AHEAD = 4  # batches that each worker of a DataLoader may be ahead: with two they wait for each other


class Setting(NamedTuple):
    """Data and settings of a loader.

    ``data`` has the folders ``train`` and ``val``, each with a folder of JPEGs for each class. ``augments`` are of
    ``augmentation.AUGMENTS``. An epoch has ``least`` images at least, each equally often. No loader checks files first:
    they are known to be intact.
    """

    data: Path
    size: int
    batch_size: int
    workers: int
    device: Any
    augments: Sequence[str] = ()
    least: int = 1


Epoch = Callable[[], Iterable[tuple[Any, Any]]]


class Loaders(NamedTuple):
    """Loaders of a setting; each call of ``train`` or ``val`` begins an epoch of ``(images, labels)`` on the device."""

    train: Epoch
    val: Epoch


@contextmanager
def torchvision(setting: Setting) -> Iterator[Loaders]:
    """The usual loader: Pillow in the workers of a DataLoader, pinned memory, a copy to the device."""
    transforms = library("torchvision.transforms", "torchvision", "this loader")
    datasets = library("torchvision.datasets", "torchvision", "this loader")
    size, large = setting.size, enlarged(setting.size)
    finish = [transforms.ToTensor(), *_erasing(setting), transforms.Normalize(MEAN, STD)]
    augment = [transforms.Resize((size, size))]
    if "crop" in setting.augments:
        crop = transforms.RandomResizedCrop(size, scale=AREA, ratio=ASPECT_RATIO)
        augment = [transforms.Resize((large, large)), transforms.RandomRotation(ROTATION), crop]
    if "color" in setting.augments:
        color = augmentation.BRIGHTNESS, augmentation.CONTRAST, augmentation.SATURATION, augmentation.HUE
        augment.append(transforms.ColorJitter(*color))
    augment.append(transforms.RandomHorizontalFlip())
    plain = [transforms.Resize((size, size)), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    loaders = []
    for split, steps in (("train", [*augment, *finish]), ("val", plain)):
        dataset = _repeated(datasets.ImageFolder(str(setting.data / split), transforms.Compose(steps)), setting)
        pinned = setting.device.type == "cuda"
        persistent = setting.workers > 0
        loaders.append(_dataloader(dataset, setting, split, pin_memory=pinned, persistent_workers=persistent))

    def epoch(loader: Any) -> Iterator[tuple[Any, Any]]:
        for images, labels in loader:
            yield tuple(part.to(setting.device, non_blocking=True) for part in (images, labels))

    try:
        yield Loaders(*(partial(epoch, loader) for loader in loaders))
    finally:
        for loader in loaders:
            loader._iterator = None  # ends the workers, which a persistent iterator keeps


@contextmanager
def dali(setting: Setting, decode: str, hardware_share: float | None = None) -> Iterator[Loaders]:
    """``decode``: "cpu", all but the copy on the CPU, or "gpu". ``hardware_share``: of images for the JPEG engines."""
    with ExitStack() as stack:
        loaders = []
        for split in ("train", "val"):
            dataset = _repeated(ImageFolder(setting.data / split), setting)
            is_training = split == "train"
            options = DaliOptions(
                size=setting.size,
                batch_size=setting.batch_size,
                decode=decode,
                is_training=is_training,
                threads=max(1, setting.workers),
                augments=tuple(setting.augments) if is_training else (),
                hardware_share=hardware_share,
                unchecked=True,
            )
            loaders.append(stack.enter_context(DaliLoader(dataset, setting.device, options)))
        yield Loaders(*(partial(_epoch, loader) for loader in loaders))


@contextmanager
def ours(setting: Setting, decode: str, workers_decode: bool = False) -> Iterator[Loaders]:
    """``decode``: "cpu", or the decoder of ``DecodeTensor``, in the training process or in each worker.

    Augmented and normalised once for a batch, on the device.
    """
    if decode != "cpu" and setting.device.type != "cuda":
        raise TrainingError("PyTorch finds no CUDA device")
    with ExitStack() as stack:
        loaders = []
        for split in ("train", "val"):
            dataset = _repeated(ImageFolder(setting.data / split), setting)
            crops = split == "train" and "crop" in setting.augments
            side = enlarged(setting.size) if crops else setting.size
            toml = {"decode": decoding(decode, side, setting, workers_decode)}
            batch = augmentations(setting.augments, setting.size) if split == "train" else Normalise()
            options: dict[str, Any] = {"transforms_batch": batch, "workers_decode": workers_decode}
            dataloader = _dataloader(dataset, setting, split)
            loader = wrap_dataloader_torchpipe("single", dataloader, toml, devices=setting.device, **options)
            loaders.append(stack.enter_context(loader))
        yield Loaders(*(partial(_epoch, loader) for loader in loaders))


def decoding(decode: str, side: int, setting: Setting, workers_decode: bool) -> dict[str, Any]:
    """The node that makes RGB images of ``side`` × ``side`` pixels."""
    node: dict[str, Any] = {"resize_h": side, "resize_w": side}
    if decode == "cpu":
        instances = 1 if workers_decode else max(1, min(setting.workers, usable_cores()))
        node |= {"backend": "S[DecodeMat,ResizeMat,Mat2Tensor]", "color": "rgb", "device": "cpu"}
        return node | {"instance_num": instances}
    # Of two instances, one prepares while the other decodes.
    node |= {"backend": "S[DecodeTensor,ResizeTensor,SyncTensor]", "decoder": decode, "instance_num": 2}
    return node | {"max": min(64, setting.batch_size), "unchecked": True}


SUBJECTS: dict[str, Callable[[Setting], AbstractContextManager[Loaders]]] = {
    # NOTE: DALI comes last: it keeps memory of the GPU when it is closed.
    "torchvision": torchvision,
    "ours-cpu": partial(ours, decode="cpu"),
    "ours-cpu-workers": partial(ours, decode="cpu", workers_decode=True),
    "ours-gpu": partial(ours, decode="torchvision"),
    "ours-gpu-workers": partial(ours, decode="torchvision", workers_decode=True),
    "ours-gpu-workers-nvimgcodec": partial(ours, decode="nvimgcodec", workers_decode=True),
    "dali-cpu": partial(dali, decode="cpu"),
    "dali-gpu": partial(dali, decode="gpu"),
    "dali-gpu-engines": partial(dali, decode="gpu", hardware_share=1.0),
}


def _epoch(loader: Any) -> Iterator[tuple[Any, Any]]:
    yield from loader
    loader.reset()


def _erasing(setting: Setting) -> list[Any]:
    """CutOut and GridMask for one image at a time."""
    made = {"cutout": CutOut(HOLES, HOLE_SIDE), "gridmask": GridMask(TILE, TILE_RATIO)}
    return [made[name] for name in setting.augments if name in made]


def _repeated(dataset: Any, setting: Setting) -> Any:
    dataset.samples = dataset.samples * -(-setting.least // len(dataset.samples))
    return dataset


def _dataloader(dataset: Any, setting: Setting, split: str, **more: Any) -> Any:
    options: dict[str, Any] = {"num_workers": setting.workers, "shuffle": split == "train", **more}
    if setting.workers:
        options["prefetch_factor"] = AHEAD
    return DataLoader(dataset, setting.batch_size, drop_last=split == "train", **options)


def device_of(name: str | None) -> Any:
    """The device of this name; by default the first GPU, or the CPU without any."""
    return torch.device(name or ("cuda:0" if torch.cuda.is_available() else "cpu"))
