"""Labelled images from DALI, with the interface that a training's session uses."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from recipes.dali.errors import dali, explained
from recipes.dali.pipeline import READER, DaliOptions, make_pipeline
from recipes.dali.readers import FileReader, RecordReader
from recipes.datasets import PARTS, agreed_classes
from recipes.options import Place
from recipes.tfrecord import TfRecordImages, has_records
from torchpipe_py.training import Batch, ImageFiles, ImageFolder, TrainingError
from torchpipe_py.training.batcher import LoaderStatistics
from torchpipe_py.training.options import choose_devices

STATE_VERSION = 1


class DaliLoader:
    """``for images, labels in loader``: one epoch of ``Batch``es, float32 N×3×size×size, normalised, and int64 N.

    Both are on ``device``; labels are those of ``dataset``. ``reset()`` begins the next epoch. A state continues with
    exactly the next batch, anywhere in an epoch: it is DALI's own checkpoint of the pipeline, with the positions of its
    reader and random numbers, and decodes nothing again. With several ranks ``state_dict`` is a collective call,
    and has the checkpoint of each. ``TrainingError`` for a state of other data or options, for an image that cannot be
    read or decoded, without DALI, and for ``decode="gpu"`` without a CUDA device.
    """

    def __init__(self, dataset: ImageFiles | TfRecordImages, device: torch.device, options: DaliOptions) -> None:
        dali(".fn")
        if options.decode == "gpu" and device.type != "cuda":
            raise TrainingError(f"--decode gpu needs a CUDA device, and this is {device}; --decode cpu works")
        self.dataset, self.devices, self.epoch = dataset, [device], 0
        self._options = options
        self._reader = (
            RecordReader(dataset, options) if isinstance(dataset, TfRecordImages) else FileReader(dataset, options)
        )
        self._statistics = LoaderStatistics()
        self._position = 0
        self._is_over = False
        self._needs_reset = False  # the checkpoint is that of the previous epoch's end
        self._has_made = False  # whether the iterator has made a batch since it was opened
        self._iterator: Any = self._open(None)

    def __len__(self) -> int:
        """Batches of an epoch; in training the same on all ranks."""
        whole, left = divmod(len(self._reader), self._options.batch_size)
        return whole + bool(left and not self._options.is_training)

    def __iter__(self) -> DaliLoader:
        if self._is_over:
            raise TrainingError(f"epoch {self.epoch} is over: call reset() before the next one")
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            raise TrainingError("the loader is closed")
        with self._statistics.consumer_waits():
            if self._position == len(self):
                self._is_over = True
                raise StopIteration
            outputs = self._outputs()
            indices, labels = self._reader.facts(outputs)
            batch = Batch(
                outputs["images"],
                labels.to(self.devices[0]),
                mask=torch.ones(len(indices), dtype=torch.bool),
                indices=indices,
                epoch=self.epoch,
                number=self._position,
                on_cpu=self._options.decode == "cpu",
            )
        self._position += 1
        self._statistics.count(samples=len(indices), batches=1)
        return batch

    def reset(self) -> None:
        """Begin the next epoch. What is left of this one is made and dropped: DALI cannot leave an epoch early."""
        while self._position < len(self):
            self._outputs()
            self._position += 1
        self._iterator.reset()
        # NOTE: until it makes a batch DALI's iterator gives the checkpoint that it was opened from, reset or not.
        self._needs_reset = not self._has_made
        self.epoch, self._position, self._is_over = self.epoch + 1, 0, False
        self._statistics.pause()

    def stats(self) -> dict[str, Any]:
        """Statistics as of ``TorchpipeLoader``, without stages and bad samples, which end a training."""
        return {"epoch": self.epoch, **self._statistics.snapshot()}

    def state_dict(self) -> dict[str, Any]:
        """The position after the last returned batch, and a checkpoint of DALI for each rank, a kB or so."""
        checkpoints: list[Any] = [self._iterator.checkpoints()[0]]
        if self._options.ranks > 1:
            (own,), checkpoints = checkpoints, [None] * self._options.ranks
            dist.all_gather_object(checkpoints, own)
        pipelines = [torch.frombuffer(bytearray(checkpoint), dtype=torch.uint8) for checkpoint in checkpoints]
        place = {"epoch": self.epoch, "position": self._position, "needs_reset": self._needs_reset}
        return {**self._identity(), **place, "pipelines": pipelines}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, here in self._identity().items():
            if state.get(key) != here:
                raise TrainingError(f"the state was saved with {key} = {state.get(key)}, here it is {here}")
        self._iterator = None  # and its threads, before there are others
        self._iterator = self._open(state["pipelines"][self._options.rank].numpy().tobytes())
        self._needs_reset = bool(state.get("needs_reset"))  # older states lack it
        if self._needs_reset:
            self._iterator.reset()
        self.epoch, self._position, self._is_over = int(state["epoch"]), int(state["position"]), False

    def close(self) -> None:
        """End DALI's threads. Idempotent."""
        self._iterator = None  # which has the only reference to the pipeline
        self._reader.close()

    def __enter__(self) -> DaliLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- DALI ---------------------------------------------------------------------------------------------------------

    def _open(self, checkpoint: bytes | None) -> Any:
        """DALI's iterator over a new pipeline, which continues from ``checkpoint``."""
        policies = dali(".plugin.base_iterator").LastBatchPolicy
        self._has_made = False
        try:
            return dali(".plugin.pytorch").DALIGenericIterator(
                [make_pipeline(self._reader, self._options, self.devices[0], checkpoint)],
                ["images", *self._reader.outputs],
                reader_name=READER,
                last_batch_policy=policies.DROP if self._options.is_training else policies.PARTIAL,
                prepare_first_batch=False,
            )
        except RuntimeError as error:
            raise explained(error, ()) from error

    def _outputs(self) -> dict[str, Any]:
        try:
            outputs: dict[str, Any]
            (outputs,) = next(self._iterator)
        except RuntimeError as error:
            raise explained(error, self._reader.encoded()) from error
        except StopIteration as error:
            where = f"batch {self._position} of {len(self)} of epoch {self.epoch}"
            raise TrainingError(f"DALI's reader ended before {where}; start again without the checkpoint") from error
        self._has_made, self._needs_reset = True, False
        return outputs

    def _identity(self) -> dict[str, Any]:
        options = self._options
        same = ("batch_size", "seed", "size", "decode", "ranks")
        return {
            "version": STATE_VERSION,
            "loader": f"DALI {dali().__version__}",  # another one may not read the checkpoint
            "reader": type(self._reader).__name__,
            "samples": len(self.dataset),
            "augments": sorted(options.augments),
            **{name: getattr(options, name) for name in same},
        }


class DaliLoaders:
    """``train`` and ``val`` by DALI, and the names of the ``classes``; a context that closes both.

    ``--data`` has ``train/`` and ``val/`` of class folders, or ``train.tfrecord`` and ``val.tfrecord``.
    """

    def __init__(self, args: argparse.Namespace, place: Place) -> None:
        (device,) = choose_devices(place.kind, place.local_rank, place.devices)
        train, val = _datasets(args)
        self.classes = agreed_classes(args.data, train, val)
        ranks = dist.get_world_size() if place.kind == "ddp" else 1

        def loader(dataset: Any, is_training: bool) -> DaliLoader:
            options = DaliOptions(
                size=args.size,
                batch_size=args.batch_size,
                decode=args.decode or ("gpu" if device.type == "cuda" else "cpu"),
                is_training=is_training,
                threads=args.workers,
                prefetch=args.prefetch,
                seed=args.seed,
                augments=tuple(args.augment) if is_training else (),
                rank=place.rank,
                ranks=ranks,
            )
            return DaliLoader(dataset, device, options)

        with ExitStack() as stack:
            self.train = stack.enter_context(loader(train, is_training=True))
            if not len(self.train):
                raise TrainingError(f"{args.data}: {len(train)} images are fewer than --batch-size {args.batch_size}")
            self.val = stack.enter_context(loader(val, is_training=False))
            self._stack = stack.pop_all()

    def __enter__(self) -> DaliLoaders:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _datasets(args: argparse.Namespace) -> Any:
    if has_records(args.data):
        return [TfRecordImages(args.data, part) for part in PARTS]
    if not (args.data / "train").is_dir():
        expected = "the folders train/ and val/ in it, or train.tfrecord and val.tfrecord"
        raise TrainingError(f"--data {args.data}: expected {expected}")
    return [ImageFolder(args.data / part) for part in PARTS]
