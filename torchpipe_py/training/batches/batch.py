"""What a loader yields."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from torchpipe_py.training.batches.by_value import pickled


class Batch(tuple[Any, Any]):
    """``images, labels = batch``, with more to look at.

    ``images``: a Tensor N×C×H×W on the device. ``labels``: what the labels' collation made, on the device. ``mask``:
    bool N on the CPU; ``False`` where there is no sample: its image is zeros and its label ``ignore_index``.
    ``indices``: int64 N on the CPU, in the dataset; -1 where no sample was planned. ``number``: of the batch in its
    epoch. ``on_cpu``: it went through ``transforms_cpu``. In "dp" with ``gather=False`` images and labels are lists,
    by device.
    """

    number: int
    epoch: int
    on_cpu: bool
    mask: Any
    indices: Any

    def __new__(
        cls, images: Any, labels: Any, *, mask: Any, indices: Any, epoch: int, number: int, on_cpu: bool
    ) -> Batch:
        batch = super().__new__(cls, (images, labels))
        batch.mask, batch.indices = mask, indices
        batch.epoch, batch.number, batch.on_cpu = epoch, number, on_cpu
        return batch

    def with_parts(self, images: Any, labels: Any) -> Batch:
        """The same batch with other images and labels."""
        return _batch(images, labels, self.mask, self.indices, self.epoch, self.number, self.on_cpu)

    def __reduce__(self) -> tuple[Any, ...]:
        # NOTE: a Tensor goes to another process by its place in memory, which takes a file descriptor.
        labels, others = (self[1], None) if isinstance(self[1], torch.Tensor) else (None, self[1])
        by_value = pickled((others, self.mask, self.indices, self.epoch, self.number, self.on_cpu))
        return _unpickled, (self[0], labels, by_value)

    @property
    def images(self) -> Any:
        return self[0]

    @property
    def labels(self) -> Any:
        return self[1]


def _batch(images: Any, labels: Any, mask: Any, indices: Any, epoch: int, number: int, on_cpu: bool) -> Batch:
    return Batch(images, labels, mask=mask, indices=indices, epoch=epoch, number=number, on_cpu=on_cpu)


def _unpickled(images: Any, labels: Any, by_value: bytes) -> Batch:
    others, *more = pickle.loads(by_value)
    return _batch(images, others if labels is None else labels, *more)


def ignored_label(example: Any, ignore_index: int) -> Any:
    """A label of ``example``'s kind that stands for none; ``TypeError`` where there can be none."""
    if example is None or (isinstance(example, (int, np.integer)) and not isinstance(example, bool)):
        return ignore_index
    if isinstance(example, torch.Tensor) and example.dtype != torch.bool:
        return torch.full_like(example, ignore_index)
    if isinstance(example, np.ndarray) and example.dtype != np.bool_:
        return np.full_like(example, ignore_index)
    if isinstance(example, (float, np.floating)):
        return float(ignore_index)
    kind = type(example).__name__
    raise TypeError(f"a label of type {kind} cannot be ignored; masks need integers, floats, arrays or Tensors")
