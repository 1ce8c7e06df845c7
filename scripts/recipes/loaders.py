"""Images per second of data loaders that all make the same batches: torchvision and ours.

    python scripts/run.py loader_throughput --data DIR --workers 1,2,4,8,16 --batch-sizes 64,256

``DIR/train/<class>/*.jpg`` become float32 N×3×224×224 on the GPU (on the CPU where there is none), flipped at random
and normalised. A loader that fails, or whose library is missing, is a remark.
Each subject is a context whose value gives batches without end; closing it ends its threads and processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from benchmarks.common import Load, Report, Subject, add_options, numbers, run
from torch.utils.data import DataLoader

from recipes.data import MEAN, STD, FlipAndNormalise
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.training import ImageFolder, wrap_dataloader_torchpipe
from torchpipe_py.training.errors import library

SIZE = 224
EPOCH, LEAST_BATCHES = 50_000, 4
"""Images of an epoch, and batches, at least: with short ones it would count how loaders end and begin an epoch."""

AHEAD = 4  # batches that each worker of a DataLoader may be ahead: with two they wait for each other
LEAST = 3  # batches to warm up with, and to measure

Batches = Iterator[Any]


class Setting(NamedTuple):
    """``folder`` has a folder of JPEGs for each class; ``workers`` are processes."""

    folder: Path
    batch_size: int
    workers: int
    device: Any


@contextmanager
def by_torchvision(setting: Setting) -> Iterator[Batches]:
    """What most trainings have: Pillow in the workers of a DataLoader, pinned memory, a copy to the device."""
    transforms = library("torchvision.transforms", "torchvision", "this loader")
    datasets = library("torchvision.datasets", "torchvision", "this loader")
    steps = [transforms.Resize((SIZE, SIZE)), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    composed = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
    loader = _dataloader(datasets.ImageFolder(str(setting.folder), composed), setting, setting.device.type == "cuda")
    endless = (images.to(setting.device, non_blocking=True) for _ in count() for images, _ in loader)
    with closing(endless) as batches:
        yield batches


@contextmanager
def by_pipe(setting: Setting, decode: str, workers_decode: bool = False) -> Iterator[Batches]:
    """Read by worker processes, decoded by a pipe here or in each of them, flipped and normalised once for a batch."""
    node: dict[str, Any] = {"resize_h": SIZE, "resize_w": SIZE, "color": "rgb", "device": "cpu"}
    node |= {"backend": "S[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor]"}
    node["instance_num"] = 1 if workers_decode else setting.workers
    if decode != "cpu":  # of two instances, one prepares while the other decodes
        node = {"resize_h": SIZE, "resize_w": SIZE, "decoder": decode, "instance_num": 2}
        node |= {"backend": "S[DecodeTensor,ResizeTensor,SyncTensor]", "max": min(64, setting.batch_size)}
    dataloader = _dataloader(ImageFolder(setting.folder), setting)
    wrap = partial(wrap_dataloader_torchpipe, transforms_batch=FlipAndNormalise(), workers_decode=workers_decode)
    with wrap("single", dataloader, {"preprocess": node}, devices=setting.device) as loader:

        def endless() -> Batches:
            while True:
                for batch in loader:
                    yield batch.images
                loader.reset()

        yield endless()


SUBJECTS: dict[str, Callable[[Setting], AbstractContextManager[Batches]]] = {
    "torchvision": by_torchvision,
    "ours-cpu": partial(by_pipe, decode="cpu"),
    "ours-cpu-workers": partial(by_pipe, decode="cpu", workers_decode=True),
    "ours-gpu": partial(by_pipe, decode="torchvision"),
    "ours-workers": partial(by_pipe, decode="torchvision", workers_decode=True),
    "ours-nvimgcodec-workers": partial(by_pipe, decode="nvimgcodec", workers_decode=True),
}


def _dataloader(dataset: Any, setting: Setting, pinned: bool = False) -> DataLoader[Any]:
    """Shuffled; an epoch has every image as often as it takes."""
    least = max(EPOCH, LEAST_BATCHES * setting.batch_size)
    dataset.samples = dataset.samples * -(-least // len(dataset.samples))
    options: dict[str, Any] = {"num_workers": setting.workers, "prefetch_factor": AHEAD, "pin_memory": pinned}
    return DataLoader(dataset, setting.batch_size, shuffle=True, drop_last=True, **options)


def images_per_second(batches: Batches, setting: Setting, seconds: float) -> float:
    """From the end of one batch to that of another, once the loader flows.

    Workers finish batches of theirs at about the same time, so warm-up and measurement have a batch of each at least.
    """
    enough = max(LEAST, setting.workers + 1)
    synchronise = torch.cuda.synchronize if setting.device.type == "cuda" else int
    for _, batch in zip(range(enough), batches, strict=False):
        if tuple(batch.shape) != (setting.batch_size, 3, SIZE, SIZE) or batch.dtype != torch.float32:
            raise ValueError(f"a batch of {tuple(batch.shape)}, {batch.dtype}")
    synchronise()
    images = 0
    began = perf_counter()
    for made, batch in enumerate(batches, 1):
        images += len(batch)
        if perf_counter() - began >= seconds and made >= enough:
            break
    synchronise()
    return images / (perf_counter() - began)


def throughput(args: argparse.Namespace) -> Report:
    """Each loader with each batch size and number of workers, which stand in the place of clients."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report = Report(
        f"loader_throughput: images/s on {torch.cuda.get_device_name() if device.index == 0 else 'the CPU'}"
    )

    def load(name: str, batch_size: int, workers: int, seconds: float) -> Load:
        setting = Setting(args.data / "train", batch_size, workers, device)
        with SUBJECTS[name](setting) as batches:
            return Load(images_per_second(batches, setting, seconds))

    for name in args.only or SUBJECTS:
        for batch_size in args.batch_sizes:
            what = f"{name}, batches of {batch_size}"
            subject = Subject(f"{what}, {{}} workers", partial(load, name, batch_size))
            report.attempt(what, partial(report.measure, [subject], args.workers, args.seconds, args.rounds))
    if not report.loads:
        report.require("loaders that were measured", 0, low=1)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """0 when measured, 1 when no loader works."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--data", type=Path, required=True, help="a folder with train/, of class folders with JPEGs")
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4, 8, 16], help="(default: 1,2,4,8,16)")
    parser.add_argument("--batch-sizes", type=numbers, default=[64, 256], help="(default: 64,256)")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, help="loaders to measure (default: all)")
    args = parser.parse_args(argv)
    if not (args.data / "train").is_dir():
        parser.error(f"--data {args.data}: there is no folder {args.data / 'train'}")
    args.name = "loader_throughput"
    return run({args.name: partial(throughput, args)}, args)
