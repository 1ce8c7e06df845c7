"""Data loaders that all do one thing: a folder's JPEGs as normalised batches on the device, flipped at random.

Each subject is a context, whose value gives batches without end: float32 N×3×224×224. Closing it ends its threads and
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from recipes.dali import DaliLoader, DaliOptions
from recipes.data import MEAN, STD, Config, FlipAndNormalise, pipe_on_cpu, pipe_on_gpu
from torchpipe_py.training import ImageFolder, TorchpipeLoader, wrap_dataloader_torchpipe
from torchpipe_py.training.errors import library

SIZE = 224
EPOCH, LEAST_BATCHES = 50_000, 4
"""Images of an epoch, and batches, at least: with short ones it would count how loaders end and begin an epoch."""

AHEAD = 4  # batches that each worker of a DataLoader may be ahead: with two they wait for each other

Batches = Iterator[Any]


@dataclass(frozen=True)
class Setting:
    """``folder`` has a folder of JPEGs for each class; ``workers`` are processes, or the threads of DALI."""

    folder: Path
    batch_size: int
    workers: int
    device: Any


@contextmanager
def torchvision_cpu(setting: Setting) -> Iterator[Batches]:
    """What most trainings have: Pillow in the workers of a DataLoader, pinned memory, a copy to the device."""
    transforms = library("torchvision.transforms", "torchvision", "this loader")
    datasets = library("torchvision.datasets", "torchvision", "this loader")
    steps = [
        transforms.Resize((SIZE, SIZE)),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    loader = DataLoader(
        _long(datasets.ImageFolder(str(setting.folder), transforms.Compose(steps)), setting),
        **_options(setting),
        pin_memory=setting.device.type == "cuda",
        persistent_workers=setting.workers > 0,
    )

    def endless() -> Generator[Any, None, None]:
        while True:
            for images, _ in loader:
                yield images.to(setting.device, non_blocking=True)

    with closing(endless()) as batches:
        try:
            yield batches
        finally:
            loader._iterator = None  # ends the workers, which a persistent iterator keeps


def ours(config: Any, workers_decode: bool = False) -> Callable[[Setting], AbstractContextManager[Batches]]:
    """Read by worker processes, decoded by a pipe here or in each of them, flipped and normalised once for a batch."""

    @contextmanager
    def opened(setting: Setting) -> Iterator[Batches]:
        dataset = _long(ImageFolder(setting.folder), setting)
        dataloader = DataLoader(dataset, **_options(setting))
        with wrap_dataloader_torchpipe(
            "single",
            dataloader,
            config(setting),
            devices=setting.device,
            transforms_batch=FlipAndNormalise(),
            workers_decode=workers_decode,
        ) as loader:
            yield _endless(loader)

    return opened


def dali(decode: str, hardware_share: float | None = None) -> Callable[[Setting], AbstractContextManager[Batches]]:
    """``decode``: where DALI decodes, resizes, flips and normalises, "cpu" or "gpu"."""

    @contextmanager
    def opened(setting: Setting) -> Iterator[Batches]:
        options = DaliOptions(
            SIZE,
            setting.batch_size,
            decode,
            is_training=True,
            threads=max(1, setting.workers),
            hardware_share=hardware_share,
        )
        with DaliLoader(_long(ImageFolder(setting.folder), setting), setting.device, options) as loader:
            yield _endless(loader)

    return opened


def _on_gpu(setting: Setting, decoder: str = "torchvision") -> Config:
    return pipe_on_gpu(SIZE, min(64, setting.batch_size), instances=2, decoder=decoder)


_by_nvimgcodec = partial(_on_gpu, decoder="nvimgcodec")


SUBJECTS: dict[str, Callable[[Setting], AbstractContextManager[Batches]]] = {
    # NOTE: DALI comes last, since it keeps its GPU memory when it is closed.
    "torchvision": torchvision_cpu,
    "ours-cpu": ours(lambda setting: pipe_on_cpu(SIZE, setting.workers)),
    "ours-cpu-workers": ours(lambda setting: pipe_on_cpu(SIZE, 1), workers_decode=True),
    "ours-gpu": ours(_on_gpu),
    "ours-workers": ours(_on_gpu, workers_decode=True),
    "ours-nvimgcodec": ours(_by_nvimgcodec),  # by nvImageCodec, which DALI decodes with as well
    "ours-nvimgcodec-workers": ours(_by_nvimgcodec, workers_decode=True),
    "dali-cpu": dali("cpu"),
    "dali-gpu": dali("gpu"),
    "dali-engines": dali("gpu", hardware_share=1.0),  # all images by the GPU's JPEG engines, as ours
}


def _options(setting: Setting) -> dict[str, Any]:
    """Of every ``DataLoader`` here."""
    return {
        "batch_size": setting.batch_size,
        "shuffle": True,
        "num_workers": setting.workers,
        "drop_last": True,
        "prefetch_factor": AHEAD if setting.workers else None,
    }


def _long(dataset: Any, setting: Setting) -> Any:
    """An epoch has every image as often as it takes."""
    least = max(EPOCH, LEAST_BATCHES * setting.batch_size)
    dataset.samples = dataset.samples * -(-least // len(dataset.samples))
    return dataset


def _endless(loader: TorchpipeLoader | DaliLoader) -> Batches:
    while True:
        for batch in loader:
            yield batch.images
        loader.reset()
