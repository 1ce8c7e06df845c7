"""DALI's readers of files and TFRecords, which output each image with its position and label.

With several ranks all make the same number of training steps: the images are padded by the first ones to a
multiple of the ranks, as ``DistributedSampler`` does. In validation each image is read by one rank, once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from recipes.dali.errors import dali
from recipes.dali.pipeline import READER, DaliOptions, dali_seed
from recipes.tfrecord import IMAGE, LABEL, TfRecordImages, index_text
from torchpipe_py.training import ImageFiles, TrainingError

SHUFFLE_BUFFER = 2048
"""Encoded images of a TFRecord that DALI holds and draws from: it reads them in the order of the file."""


def positions_of(count: int, options: DaliOptions) -> list[int]:
    """Positions in a dataset of ``count`` images: of all ranks, padded, in training; of this one in validation."""
    if options.is_training:
        return [*range(count), *(extra % count for extra in range(-count % options.ranks))]
    if count < options.ranks:
        raise TrainingError(f"there are {count} images to validate with for {options.ranks} ranks")
    return list(range(options.rank, count, options.ranks))


def _utf8(path: Any) -> str:
    name = str(path)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise TrainingError(f"{name!r}: DALI takes only names that are UTF-8; rename the file or its folder") from error
    return name


class FileReader:
    """The image files of a dataset, shuffled as a whole for each epoch of a training."""

    def __init__(self, dataset: ImageFiles, options: DaliOptions) -> None:
        paths, labels = zip(*dataset.samples, strict=True)
        self._paths = list(map(_utf8, paths))
        self._labels = torch.tensor(labels, dtype=torch.int64)
        self._options = options
        self._positions = positions_of(len(paths), options)
        self.outputs = ("indices",)
        """The names of the outputs beside the image."""

    def __len__(self) -> int:
        """Images of this rank in an epoch."""
        return len(self._positions) // (self._options.ranks if self._options.is_training else 1)

    def nodes(self) -> tuple[Any, ...]:
        options = self._options
        shuffled = {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": dali_seed(options.seed)}
        parts = {"shard_id": options.rank, "num_shards": options.ranks}
        # NOTE: the last batch is padded and then cut or dropped; otherwise it would begin the next epoch.
        encoded, indices = dali(".fn").readers.file(
            files=[self._paths[position] for position in self._positions],
            labels=self._positions,
            name=READER,
            pad_last_batch=True,
            **({**shuffled, **parts} if options.is_training else {}),
        )
        return encoded, indices

    def facts(self, outputs: dict[str, Any]) -> tuple[Any, Any]:
        """Positions in the dataset and labels of a batch, int64 N, on the CPU."""
        indices = outputs["indices"].flatten().to(torch.int64)
        return indices, self._labels[indices]

    def encoded(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """The name of each image, and a function that reads it."""
        for path in self._paths:
            yield path, Path(path).read_bytes

    def close(self) -> None:
        pass


class RecordReader:
    """The records of a TFRecord. DALI shuffles them only within ``SHUFFLE_BUFFER``: pack them in a random order."""

    def __init__(self, dataset: TfRecordImages, options: DaliOptions) -> None:
        self._dataset, self._options = dataset, options
        self._positions = positions_of(len(dataset), options)
        self._starts = [start for start, _ in dataset.records]
        self.outputs = ("labels", "places")
        # DALI reads what an index lists, in its order; padding, and a rank's part, need an index of their own.
        self._folder = TemporaryDirectory(prefix="torchpipe-tfrecord-") if options.ranks > 1 else None
        self._index = str(dataset.index)
        if self._folder is not None:
            self._index = f"{self._folder.name}/index"
            chosen = [dataset.records[position] for position in self._positions]
            Path(self._index).write_text(index_text(chosen), encoding="ascii")

    def __len__(self) -> int:
        return len(self._positions) // (self._options.ranks if self._options.is_training else 1)

    def nodes(self) -> tuple[Any, ...]:
        fn, features, options = dali(".fn"), dali(".tfrecord"), self._options
        shuffled = {"random_shuffle": True, "initial_fill": min(SHUFFLE_BUFFER, len(self))}
        parts = {"shard_id": options.rank, "num_shards": options.ranks}
        read = fn.readers.tfrecord(
            path=str(self._dataset.path),
            index_path=self._index,
            name=READER,
            features={
                IMAGE: features.FixedLenFeature((), features.string, ""),
                LABEL: features.FixedLenFeature([1], features.int64, -1),
            },
            pad_last_batch=True,
            **({**shuffled, **parts} if options.is_training else {}),
        )
        places = fn.pad(fn.get_property(read[IMAGE], key="source_info"))  # "<path> at index <first byte>"
        return read[IMAGE], read[LABEL], places

    def facts(self, outputs: dict[str, Any]) -> tuple[Any, Any]:
        texts = [bytes(row).rstrip(b"\0") for row in outputs["places"].numpy()]
        starts = [int(text.rpartition(b" ")[2]) for text in texts]
        labels = outputs["labels"].flatten().to(torch.int64)
        count = len(self._dataset.classes)
        for start, label in zip(starts, labels.tolist(), strict=True):
            if not 0 <= label < count:
                where = f"{self._dataset.path}: the record at byte {start}"
                raise TrainingError(f"{where} has the {LABEL} {label}, expected 0 to {count - 1}, a line of labels.txt")
        return torch.tensor([bisect_left(self._starts, start) for start in starts]), labels.clone()

    def encoded(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        return self._dataset.encoded()

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
