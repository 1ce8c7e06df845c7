"""Samples of the dataset: encoded bytes, or the reason why they are missing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.errors import DecodeError, first_line
from torchpipe_py.training.errors import BadSample, TrainingError, UnreadableFile
from torchpipe_py.training.plan import SAMPLE, PlannedBatch, forked, key_of

UNREADABLE, EMPTY, CORRUPT, WRONG = "unreadable", "empty", "corrupt", "wrong"
NO_BYTES = "the dataset gave no bytes"


@dataclass
class Sample:
    """One sample in processing: ``image`` is encoded bytes, then a Tensor.

    Without an image, ``kind`` and ``reason`` explain why; ``WRONG`` is a program error, which no policy covers.
    ``repeat``: how often it occurred earlier in the epoch.
    """

    index: int
    image: Any = None
    label: Any = None
    kind: str = ""
    reason: str = ""
    repeat: int = 0

    def fail(self, kind: str, reason: str) -> Sample:
        """Mark the sample as one without an image."""
        self.image, self.kind, self.reason = None, kind, reason
        return self

    def key(self, seed: int, epoch: int) -> int:
        """The seed of its random transforms."""
        parts = (SAMPLE, seed, epoch, self.index)
        return key_of(*parts, self.repeat) if self.repeat else key_of(*parts)

    def error(self, name: str) -> TrainingError:
        """The exception for a sample without an image, which messages call ``name``."""
        if self.kind == WRONG:
            return TrainingError(f"{name}: {self.reason}")
        return BadSample(self.index, name, self.kind, self.reason)


class SampleReader:
    """Reads the user's dataset; a sample that cannot be read comes back with the reason.

    ``transforms_cpu`` gets images that ``decoders`` decode.
    """

    def __init__(
        self, dataset: Any, transforms_cpu: Callable[[Any], Any] | None, seed: int, decoders: Decoders
    ) -> None:
        self.dataset, self._transforms_cpu, self._seed, self._decoders = dataset, transforms_cpu, seed, decoders

    def read(self, epoch: int, planned: PlannedBatch) -> Iterator[Sample]:
        """The samples of a batch; in a worker, samples of CPU batches are transformed."""
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
        """Decode it and apply ``transforms_cpu``, seeded by its key. Not for a thread that runs beside the training."""
        assert self._transforms_cpu is not None
        try:
            picture = pil_image(self._decoders.decode(sample.image))
        except DecodeError as error:
            sample.fail(CORRUPT, str(error))
            return
        try:
            with forked() as seed:
                seed(sample.key(self._seed, epoch))
                sample.image = self._transforms_cpu(picture)
        except Exception as error:
            raised = f"raised {type(error).__name__}: {error}"
            sample.fail(WRONG, f"transforms_cpu, for a PIL.Image of mode {picture.mode}, {raised}")
            return
        if not isinstance(sample.image, torch.Tensor):
            problem = f"transforms_cpu must give a Tensor, got {_type_name(sample.image)}; end them with ToTensor"
            sample.fail(WRONG, problem)

    def name(self, index: int) -> str:
        """The sample's name in error messages, with its path if the dataset has ``samples``."""
        path = _path(self.dataset, index)
        return f"sample {index}" if path is None else f"sample {index} ({path})"


def pil_image(mat: Any) -> Any:
    """A Mat as a ``PIL.Image`` of mode "RGB", in which the order of the channels stays, or "L" for one channel."""
    from PIL import Image

    return Image.fromarray(mat[:, :, 0] if mat.shape[2] == 1 else mat)


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
