"""Images through NVIDIA DALI: pipelines to train and validate with, behind the interface that the session uses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from recipes.data import MEAN, STD, Loaders
from recipes.place import Place
from torchpipe_py.training import Batch, ImageFiles, TrainingError
from torchpipe_py.training.batches.statistics import LoaderStatistics
from torchpipe_py.training.devices import choose_devices
from torchpipe_py.training.errors import library

STATE_VERSION = 1
SHARE_ERASED = 0.5  # side of CutOut's square over the image's
TILES = 4  # of GridMask, side by side in an image
AUGMENTS = {"none": (), "cutout": ("cutout",), "gridmask": ("gridmask",), "both": ("cutout", "gridmask")}
READER = "files"


@dataclass(frozen=True)
class CutOut:
    """For images ``size`` × ``size``, H×W×C: a square of ``side`` pixels, wholly inside and anywhere, becomes black."""

    side: int
    size: int

    def __call__(self, images: Any) -> Any:
        fn = _dali("fn")
        # NOTE: drawn from a list, since a range of integers is rounded: squares would leave the image.
        anchors = [float(anchor) for anchor in range(self.size - self.side + 1)]
        return fn.erase(
            images,
            anchor=fn.random.uniform(values=anchors, shape=2),
            shape=[float(self.side), float(self.side)],
            axis_names="HW",
            fill_value=0,
        )


@dataclass(frozen=True)
class GridMask:
    """Black squares in a grid, one in each ``tile`` × ``tile`` pixels, with ``ratio`` of its side; for H×W×C.

    The grid is shifted at random, and turned by at most ``turn`` radians either way. arXiv:2001.04086
    """

    tile: int
    ratio: float = 0.5
    turn: float = 3.14

    def __call__(self, images: Any) -> Any:
        fn = _dali("fn")
        return fn.grid_mask(
            images,
            tile=self.tile,
            ratio=self.ratio,
            angle=fn.random.uniform(range=[-self.turn, self.turn]) if self.turn else 0.0,
            shift_x=fn.random.uniform(range=[0.0, float(self.tile)]),
            shift_y=fn.random.uniform(range=[0.0, float(self.tile)]),
        )


@dataclass(frozen=True)
class DaliOptions:
    """What a pipeline does. ``decode``: "cpu", all but the last copy on the CPU, or "gpu", all but reading on the GPU.

    ``is_training``: shuffled, flipped at random, ``augments`` applied, an incomplete last batch left out; otherwise
    images in their order, each once. ``size`` is both sides in pixels. ``hardware_share``: of a batch's images, decoded
    by the GPU's JPEG engines; DALI's own choice is 0.65, and the CPU's threads and the GPU's cores take the others.
    """

    size: int
    batch_size: int
    decode: str
    is_training: bool
    threads: int = 2
    seed: int = 0
    hardware_share: float | None = None
    augments: Sequence[Callable[[Any], Any]] = ()


class DaliLoader:
    """``for images, labels in loader``, one epoch of ``Batch``es: float32 N×3×size×size, normalised, int64 N.

    Labels are those of ``dataset``. ``reset()`` begins the next epoch, once the last batch was given. A checkpoint of
    it is one between two epochs: ``state_dict`` in the middle of one raises ``TrainingError``, and so does a state of
    other data or options. Epochs after ``load_state_dict`` are those that a training without a break has. A file that
    is no image ends the training, with DALI's ``RuntimeError``. Without a CUDA device all works on the CPU.
    """

    def __init__(self, dataset: ImageFiles, device: Any, options: DaliOptions) -> None:
        _dali("fn")
        if options.decode == "gpu" and device.type != "cuda":
            raise TrainingError(f"--decode gpu needs a CUDA device, and this is {device}; --decode cpu works")
        self._files, labels = zip(*dataset.samples, strict=True)
        self._labels = torch.tensor(labels, dtype=torch.int64)
        self._device, self._options = device, options
        self._statistics = LoaderStatistics()
        self._epoch = self._position = 0
        self._is_over = False
        self._iterator: Any = self._opened(None)

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def devices(self) -> list[Any]:
        return [self._device]

    def __len__(self) -> int:
        whole, left = divmod(len(self._files), self._options.batch_size)
        return whole + bool(left and not self._options.is_training)

    def __iter__(self) -> DaliLoader:
        if self._is_over:
            raise TrainingError(f"epoch {self._epoch} is over: call reset() before the next one")
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise TrainingError("the loader is closed")
        if self._is_over or self._position == len(self):
            self._is_over = True
            raise StopIteration
        with self._statistics.consumer_waits():
            (outputs,) = next(self._iterator)
            indices = outputs["indices"].flatten().to(torch.int64)
            labels = self._labels[indices].to(self._device)
        batch = Batch(
            outputs["images"],
            labels,
            mask=torch.ones(len(indices), dtype=torch.bool),
            indices=indices,
            epoch=self._epoch,
            number=self._position,
            on_cpu=self._options.decode == "cpu",
        )
        self._position += 1
        self._statistics.count(samples=len(indices), batches=1)
        return batch

    def reset(self) -> None:
        """Begin the next epoch; ``TrainingError`` in the middle of one, which DALI cannot leave."""
        if 0 < self._position < len(self):
            raise TrainingError(f"a DALI pipeline is reset after its last batch, not after {self._position}")
        if self._position:
            self._iterator.reset()
        self._epoch, self._position, self._is_over = self._epoch + 1, 0, False
        self._statistics.pause()

    def stats(self) -> dict[str, Any]:
        """As ``TorchpipeLoader.stats``; there are no bad samples, and no stages."""
        return {"epoch": self._epoch, **self._statistics.snapshot()}

    def state_dict(self) -> dict[str, Any]:
        if self._position:
            raise TrainingError(f"a DALI loader is saved between epochs, and this one gave {self._position} batches")
        pipeline = torch.frombuffer(bytearray(self._iterator.checkpoints()[0]), dtype=torch.uint8)
        return {**self._identity(), "epoch": self._epoch, "position": 0, "pipeline": pipeline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise TrainingError(f"the state was saved with {key} = {state.get(key)}, here it is {here}")
        self.close()
        self._iterator = self._opened(bytes(state["pipeline"].numpy()))
        self._epoch, self._position, self._is_over = int(state["epoch"]), 0, False

    def close(self) -> None:
        """End DALI's threads. Idempotent."""
        self._iterator = None  # which has the only reference to the pipeline

    def __enter__(self) -> DaliLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        options = self._options
        return {
            "loader": "dali",
            "version": STATE_VERSION,
            "samples": len(self._files),
            "batch_size": options.batch_size,
            "seed": options.seed,
            "size": options.size,
            "decode": options.decode,
            "augments": [repr(augment) for augment in options.augments],
        }

    def _opened(self, checkpoint: bytes | None) -> Any:
        """An iterator of DALI over a new pipeline, which goes on from ``checkpoint``."""
        plugin, policies = _dali("plugin.pytorch"), _dali("plugin.base_iterator").LastBatchPolicy
        pipeline = _dali("pipeline").Pipeline(
            batch_size=self._options.batch_size,
            num_threads=self._options.threads,
            device_id=self._device.index if self._device.type == "cuda" else None,
            seed=self._options.seed,
            enable_checkpointing=True,
            checkpoint=checkpoint,
        )
        with pipeline:
            pipeline.set_outputs(*_graph(self._files, self._options, self._device.type == "cuda"))
        pipeline.build()
        return plugin.DALIGenericIterator(
            [pipeline],
            ["images", "indices"],
            reader_name=READER,
            last_batch_policy=policies.DROP if self._options.is_training else policies.PARTIAL,
            prepare_first_batch=False,
        )


def dali_loaders(args: argparse.Namespace, place: Place) -> Loaders:
    """As ``Loaders``, with DALI. ``TrainingError`` without it, and for ``--decode gpu`` without a CUDA device."""
    return Loaders(args, place, partial(_loader, is_training=True), partial(_loader, is_training=False))


def _loader(args: argparse.Namespace, place: Place, dataset: Any, is_training: bool) -> DaliLoader:
    (device,) = choose_devices(place.parallel_type, place.local_rank, place.devices)
    made: dict[str, Callable[[Any], Any]] = {
        "cutout": CutOut(max(1, int(args.size * SHARE_ERASED)), args.size),
        "gridmask": GridMask(max(2, args.size // TILES)),
    }
    options = DaliOptions(
        size=args.size,
        batch_size=args.batch_size,
        decode=args.decode or ("gpu" if device.type == "cuda" else "cpu"),
        is_training=is_training,
        threads=max(1, args.workers),
        seed=args.seed,
        augments=[made[name] for name in AUGMENTS[args.augment]] if is_training else (),
    )
    return DaliLoader(dataset, device, options)


def _graph(files: Sequence[str], options: DaliOptions, to_gpu: bool) -> tuple[Any, Any]:
    """The pipeline's outputs: images, and their indices in ``files`` on the CPU."""
    fn, types = _dali("fn"), _dali("types")
    # NOTE: the last batch is padded and then cut or dropped; otherwise it would begin the next epoch.
    encoded, indices = fn.readers.file(
        files=list(files),
        labels=list(range(len(files))),
        name=READER,
        shuffle_after_epoch=options.is_training,
        shuffle_after_epoch_seed=options.seed if options.is_training else None,
        pad_last_batch=True,
    )
    how = {} if options.hardware_share is None else {"hw_decoder_load": options.hardware_share}
    where = "mixed" if options.decode == "gpu" else "cpu"
    images = fn.decoders.image(encoded, device=where, output_type=types.RGB, **how)
    images = fn.resize(
        images, resize_x=options.size, resize_y=options.size, interp_type=types.INTERP_LINEAR, antialias=False
    )
    for augment in options.augments:
        images = augment(images)
    images = fn.crop_mirror_normalize(
        images,
        dtype=types.FLOAT,
        output_layout="CHW",
        mean=[255.0 * value for value in MEAN],
        std=[255.0 * value for value in STD],
        mirror=fn.random.coin_flip() if options.is_training else 0,
    )
    return (images.gpu() if to_gpu and options.decode == "cpu" else images), indices


def _dali(name: str) -> Any:
    """A module of DALI; ``TrainingError`` that says what to install where there is none."""
    cuda = str(torch.version.cuda or "13").split(".")[0]
    return library(f"nvidia.dali.{name}", f"nvidia-dali-cuda{cuda}0", "training through DALI")
