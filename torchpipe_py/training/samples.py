"""Samples as the dataset gives them, encoded bytes or the reason for none, and their way out of a worker process."""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from torchpipe_py.backends.image.decode import MatDecoder
from torchpipe_py.errors import DecodeError, first_line
from torchpipe_py.proc.process.transport import reduce_tensor
from torchpipe_py.training.errors import BadSample, TrainingError, UnreadableFile
from torchpipe_py.training.plan import SAMPLE, PlannedBatch, forked, key_of

UNREADABLE, EMPTY, CORRUPT, WRONG = "unreadable", "empty", "corrupt", "wrong"
NO_BYTES = "the dataset gave no bytes"
NOT_SENT = "cannot be sent to the training process"


@dataclass
class Sample:
    """One sample on its way: ``image`` is encoded bytes, then a Tensor.

    Without an image ``kind`` and ``reason`` say why; ``WRONG`` is a mistake of the program, which no policy covers.
    ``repeat``: how often the epoch had it before.
    """

    index: int
    image: Any = None
    label: Any = None
    kind: str = ""
    reason: str = ""
    repeat: int = 0

    def fail(self, kind: str, reason: str) -> Sample:
        """The sample has no image."""
        self.image, self.kind, self.reason = None, kind, reason
        return self

    def key(self, seed: int, epoch: int) -> int:
        """What its randomness is started from."""
        parts = (SAMPLE, seed, epoch, self.index)
        return key_of(*parts, self.repeat) if self.repeat else key_of(*parts)

    def error(self, name: str) -> TrainingError:
        """The exception for a sample without an image, which messages call ``name``."""
        if self.kind == WRONG:
            return TrainingError(f"{name}: {self.reason}")
        return BadSample(self.index, name, self.kind, self.reason)


class BatchKey(NamedTuple):
    """The request to a DataLoader's worker: a batch of ``epoch``; ``generation`` is that of the reader of slots."""

    epoch: int
    planned: PlannedBatch
    generation: int


class SampleReader:
    """Reads the user's dataset; a sample that cannot be read comes back with the reason.

    As a DataLoader's dataset it takes one ``BatchKey`` and gives a ``SentSamples``.
    """

    def __init__(self, dataset: Any, transforms_cpu: Callable[[Any], Any] | None, seed: int) -> None:
        self.dataset, self._transforms_cpu, self._seed = dataset, transforms_cpu, seed

    def __getitems__(self, keys: list[BatchKey]) -> SentSamples:
        (key,) = keys
        return SentSamples.of(list(self.read(key.epoch, key.planned)))

    def read(self, epoch: int, planned: PlannedBatch) -> Iterator[Sample]:
        """The samples of a batch; in a worker those of the CPU are transformed."""
        for index, repeat in zip(planned.indices, planned.repeats, strict=True):
            sample = self._read(Sample(index, repeat=repeat))
            # NOTE: random transforms need the global generators, which in this process belong to the training loop.
            if planned.on_cpu and sample.image is not None and get_worker_info() is not None:
                self.transform(sample, epoch)
            yield sample

    def _read(self, sample: Sample) -> Sample:
        try:
            item = self.dataset[sample.index]
        except Exception as error:
            is_file = not isinstance(error, TrainingError) or isinstance(error, UnreadableFile)
            return sample.fail(UNREADABLE if is_file else WRONG, f"{type(error).__name__}: {first_line(error)}")
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            return sample.fail(WRONG, f"the dataset yields (encoded bytes, label), got {_type_name(item)}")
        encoded, label = item
        if not isinstance(encoded, (bytes, bytearray, memoryview)):
            return sample.fail(WRONG, _not_bytes(encoded))
        sample.image, sample.label = bytes(encoded), label
        return sample if sample.image else sample.fail(EMPTY, NO_BYTES)

    def transform(self, sample: Sample, epoch: int) -> None:
        """Decode it and apply ``transforms_cpu`` under its key. Not from a thread beside the training's."""
        assert self._transforms_cpu is not None
        try:
            picture = decode_rgb(sample.image)
        except DecodeError as error:
            sample.fail(CORRUPT, str(error))
            return
        try:
            with forked() as fork:
                fork.seed(sample.key(self._seed, epoch))
                sample.image = self._transforms_cpu(picture)
        except Exception as error:
            sample.fail(WRONG, f"transforms_cpu raised {type(error).__name__}: {error}")
            return
        if not isinstance(sample.image, torch.Tensor):
            problem = f"transforms_cpu must give a Tensor, got {_type_name(sample.image)}; end them with ToTensor"
            sample.fail(WRONG, problem)

    def name(self, index: int) -> str:
        """What an error message calls the sample: with its path, where the dataset has ``samples``."""
        path = _path(self.dataset, index)
        return f"sample {index}" if path is None else f"sample {index} ({path})"


class SentSamples(NamedTuple):
    """The samples of a batch on their way from a worker, where there is one.

    ``labels`` are pickled. ``images``, those of the CPU, are one Tensor in shared memory: each alone would take a file
    descriptor. NOTE: a queue pickles on a thread of its own and drops what it cannot pickle, for which the training
    would wait forever; so labels are pickled, and memory is shared, before.
    """

    samples: list[Sample]
    labels: bytes = b""
    images: Any = None

    @classmethod
    def of(cls, samples: list[Sample]) -> SentSamples:
        """In a worker; elsewhere the samples stay as they are."""
        if get_worker_info() is None:
            return cls(samples)
        labels, images = _pickled_labels(samples), None
        rows = [sample for sample in samples if isinstance(sample.image, torch.Tensor)]
        if len({(sample.image.shape, sample.image.dtype) for sample in rows}) == 1:
            try:
                images = torch.stack([sample.image for sample in rows]).detach().share_memory_()
                for sample in rows:
                    sample.image = None
            except RuntimeError as error:  # /dev/shm is full
                for sample in samples:
                    sample.fail(WRONG, f"its batch {NOT_SENT}: {first_line(error)}")
        return cls(samples, labels, images)

    def received(self) -> list[Sample]:
        """The samples again."""
        if self.labels:
            for sample, label in zip(self.samples, pickle.loads(self.labels), strict=True):
                sample.label = label
        if self.images is not None:
            rows = iter(self.images)
            for sample in self.samples:
                if sample.image is None and not sample.kind:
                    sample.image = next(rows)
        return self.samples


def _pickled_labels(samples: Sequence[Sample]) -> bytes:
    """The labels, which the samples lose; a sample whose label cannot be pickled fails."""
    labels = [sample.label for sample in samples]
    try:
        content = pickled(labels)
    except Exception:
        for place, sample in enumerate(samples):
            try:
                pickled(labels[place])
            except Exception as error:
                labels[place] = None
                sample.fail(WRONG, f"its label {NOT_SENT}: {type(error).__name__}: {first_line(error)}")
        content = pickled(labels)
    for sample in samples:
        sample.label = None
    return content


def pickled(value: Any) -> bytes:
    """``value`` for ``pickle.loads``, with the Tensors in it by value.

    NOTE: multiprocessing's takes a file descriptor for each, and pickle alone all the memory that one is a part of.
    """
    content = BytesIO()
    _Pickler(content).dump(value)
    return content.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        try:
            return reduce_tensor(torch, value)
        except (TypeError, RuntimeError):  # on a GPU, sparse, quantised
            return value.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def decode_rgb(encoded: bytes) -> Any:
    """An RGB ``PIL.Image`` with the pixels of ``DecodeMat``: ``cv2.imdecode``, upright by EXIF, 8 bits.

    ``DecodeError`` for bytes that are not an image.
    """
    from PIL import Image

    return Image.fromarray(MatDecoder("rgb")(encoded))


def _path(dataset: Any, index: int) -> str | None:
    try:
        while not hasattr(dataset, "samples"):
            if hasattr(dataset, "indices"):  # a Subset
                dataset, index = dataset.dataset, dataset.indices[index]
            else:  # a ConcatDataset
                number = bisect_right(dataset.cumulative_sizes, index)
                index -= dataset.cumulative_sizes[number - 1] if number else 0
                dataset = dataset.datasets[number]
        path = dataset.samples[index]
    except Exception:
        return None
    path = path[0] if isinstance(path, (tuple, list)) and path else path
    return str(path) if isinstance(path, str) or hasattr(path, "__fspath__") else None


def _not_bytes(value: Any) -> str:
    if getattr(value, "ndim", None) == 1:
        hint = "end it with .numpy().tobytes()" if isinstance(value, torch.Tensor) else "end it with .tobytes()"
        return f"the dataset yields {_type_name(value)} of one dimension, not bytes; if it is an encoded image, {hint}"
    hint = "leave its transform out and pass loader=cv2_loader"
    return f"the dataset yields decoded images ({_type_name(value)}), not encoded bytes; {hint}"


def _type_name(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__
