"""Samples as the dataset gives them: encoded bytes, or why there are none."""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from torchpipe_py.errors import DecodeError, first_line
from torchpipe_py.training.batches.by_value import pickled
from torchpipe_py.training.data.datasets import decode_rgb
from torchpipe_py.training.data.planner import PlannedBatch
from torchpipe_py.training.data.randomness import SAMPLE, forked, key_of
from torchpipe_py.training.errors import BadSample, TrainingError, UnreadableFile

UNREADABLE, EMPTY, CORRUPT, WRONG = "unreadable", "empty", "corrupt", "wrong"
NO_BYTES = "the dataset gave no bytes"
NOT_SENT = "cannot be sent to the training process"
PLAIN = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True)
class Sample:
    """One sample on its way: ``image`` is encoded bytes, or a Tensor where ``transforms_cpu`` have run.

    Without an image ``kind`` and ``reason`` say why; ``WRONG`` is the program's mistake, and no policy covers it.
    ``repeat``: how often the epoch has had it before.
    """

    index: int
    image: Any = None
    label: Any = None
    kind: str = ""
    reason: str = ""
    repeat: int = 0

    def with_image(self, image: Any) -> Sample:
        """The same sample with another image; ``dataclasses.replace`` takes three times as long, for each image."""
        return Sample(self.index, image, self.label, self.kind, self.reason, self.repeat)

    def with_label(self, label: Any) -> Sample:
        """The same sample with another label."""
        return Sample(self.index, self.image, label, self.kind, self.reason, self.repeat)

    def failed(self, kind: str, reason: str) -> Sample:
        """The same sample without an image."""
        return Sample(self.index, None, self.label, kind, reason, self.repeat)

    def key(self, seed: int, epoch: int) -> int:
        """What its randomness is started from."""
        parts = (SAMPLE, seed, epoch, self.index)
        return key_of(*parts, self.repeat) if self.repeat else key_of(*parts)

    def error(self, name: str) -> TrainingError:
        """What is raised of a sample without an image; messages call it ``name``."""
        if self.kind == WRONG:
            return TrainingError(f"{name}: {self.reason}")
        return BadSample(self.index, name, self.kind, self.reason)


class SampleKey(NamedTuple):
    """What a ``SampleReader`` is asked for: a sample of the dataset, in ``epoch``."""

    epoch: int
    sample: int
    on_cpu: bool
    repeat: int


def keys_of(epoch: int, planned: PlannedBatch) -> list[SampleKey]:
    """What a ``SampleReader`` is asked for, for a batch."""
    pairs = zip(planned.indices, planned.repeats, strict=True)
    return [SampleKey(epoch, index, planned.on_cpu, repeat) for index, repeat in pairs]


class SampleReader:
    """The user's dataset, so that a sample which cannot be read comes back as one that says why."""

    def __init__(self, dataset: Any, transforms_cpu: Callable[[Any], Any] | None, seed: int) -> None:
        self.dataset, self._transforms_cpu, self._seed = dataset, transforms_cpu, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> Sample:
        sample = Sample(key.sample, repeat=key.repeat)
        try:
            item = self.dataset[key.sample]
        except Exception as error:
            is_file = not isinstance(error, TrainingError) or isinstance(error, UnreadableFile)
            return sample.failed(UNREADABLE if is_file else WRONG, f"{type(error).__name__}: {first_line(error)}")
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            return sample.failed(WRONG, f"the dataset yields (encoded bytes, label), got {_type_name(item)}")
        encoded, label = item
        if not isinstance(encoded, (bytes, bytearray, memoryview)):
            return sample.failed(WRONG, _not_bytes(encoded))
        sample = sample.with_label(label).with_image(bytes(encoded))
        if not sample.image:
            return sample.failed(EMPTY, NO_BYTES)
        # NOTE: random transforms need the global generators, which in this process belong to the training loop.
        return self.transformed(sample, key.epoch) if key.on_cpu and get_worker_info() is not None else sample

    def transformed(self, sample: Sample, epoch: int) -> Sample:
        """The sample decoded and through ``transforms_cpu``, under its key. Not from a thread beside the training's."""
        assert self._transforms_cpu is not None
        try:
            picture = decode_rgb(sample.image)
        except DecodeError as error:
            return sample.failed(CORRUPT, str(error))
        try:
            with forked() as fork:
                fork.seed(sample.key(self._seed, epoch))
                image = self._transforms_cpu(picture)
        except Exception as error:
            return sample.failed(WRONG, f"transforms_cpu raised {type(error).__name__}: {error}")
        if not isinstance(image, torch.Tensor):
            problem = f"transforms_cpu must give a Tensor, got {_type_name(image)}; end them with ToTensor"
            return sample.failed(WRONG, problem)
        return sample.with_image(image)


@dataclass(frozen=True)
class PackedLabel:
    """A label on its way from a worker, pickled."""

    content: bytes


def collate(samples: list[Sample]) -> tuple[list[Sample], Any]:
    """The samples, and in one piece what Tensors they hold: each would take a file descriptor to another process.

    In a worker labels are pickled, and one that cannot be is a failed sample.

    NOTE: a queue pickles on a thread of its own, and drops what it cannot, for which the training would wait for ever.
    """
    is_sent = get_worker_info() is not None
    if is_sent:
        samples = [sample if type(sample.label) in PLAIN else _with_packed_label(sample) for sample in samples]
    images = [sample.image for sample in samples if isinstance(sample.image, torch.Tensor)]
    if len({(image.shape, image.dtype) for image in images}) != 1:
        return samples, None
    stacked = torch.stack(images)
    if is_sent:
        try:
            stacked.share_memory_()
        except RuntimeError as error:  # /dev/shm is full
            return [sample.failed(WRONG, f"its batch {NOT_SENT}: {first_line(error)}") for sample in samples], None
    return [sample.with_image(None) if torch.is_tensor(sample.image) else sample for sample in samples], stacked


def uncollated(samples: list[Sample], images: Any) -> list[Sample]:
    """What ``collate`` was given."""
    if images is not None:
        rows = iter(images)
        samples = [sample if sample.image or sample.kind else sample.with_image(next(rows)) for sample in samples]
    return [
        sample.with_label(pickle.loads(sample.label.content)) if isinstance(sample.label, PackedLabel) else sample
        for sample in samples
    ]


def _with_packed_label(sample: Sample) -> Sample:
    try:
        return sample.with_label(PackedLabel(pickled(sample.label)))
    except Exception as error:
        problem = f"its label {NOT_SENT}: {type(error).__name__}: {first_line(error)}"
        return sample.with_label(None).failed(WRONG, problem)


def namer(dataset: Any) -> Callable[[int], str]:
    """From an index to what an error message calls the sample: the path too, where the dataset has ``samples``."""

    def name_of(index: int) -> str:
        path = _path(dataset, index)
        return f"sample {index}" if path is None else f"sample {index} ({path})"

    return name_of


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
