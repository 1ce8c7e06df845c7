"""The way of a batch from a DataLoader's worker into the training process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # so that Tensors are sent by their place in shared memory

from torchpipe_py.errors import Failure
from torchpipe_py.training.batcher import Batch, Figures
from torchpipe_py.training.samples import Sample

ALIGNMENT = 64  # bytes: where a Tensor begins in shared memory
SMALL = 2**16  # bytes: up to which a Tensor is copied out, so that it does not keep the memory of its batch
ON_THEIR_WAY = 4
"""Batches of a worker that the DataLoader has given, and that may not be copied out of its GPU memory yet."""


@dataclass
class Made:
    """What came of a batch where it was read: its samples, or the whole batch, or a failure.

    ``label``: the last that the worker has seen; ``figures``: what it counted. In the training process ``decoded``
    waits for the pipes, and ``stacks`` are the images in one piece, as ``Batcher.stacked`` makes them.
    """

    samples: list[Sample] | None = None
    batch: Batch | None = None
    failure: Failure | None = None
    label: Any = None
    figures: Figures | None = None
    decoded: Callable[[], list[Sample]] | None = None
    stacks: list[Any] | None = None


class Sent(NamedTuple):
    """A ``Made`` on its way: pickled, with bytes and Tensors of a GPU beside it, and other Tensors in shared memory.

    NOTE: a queue pickles on a thread of its own and drops what it cannot pickle, for which the training would wait
    forever: so this is pickled before. multiprocessing also takes a file descriptor for each Tensor.
    """

    content: bytes
    beside: list[Any]
    memory: Any

    @classmethod
    def of(cls, made: Made) -> Sent:
        """Raises what pickling raises, and ``RuntimeError`` where there is no shared memory left."""
        content = BytesIO()
        pickler = _Pickler(content)
        pickler.dump(made)
        memory = None
        if pickler.size:
            memory = torch.empty(pickler.size, dtype=torch.uint8).share_memory_()
            for place, tensor in pickler.tensors:
                _tensor_at(memory, place).copy_(tensor)
        return cls(content.getvalue(), pickler.beside, memory)

    def received(self) -> Made:
        """The ``Made`` again."""
        made: Made = _Unpickler(self).load()
        return made


class _Pickler(pickle.Pickler):
    """Sets aside bytes, Tensors of a GPU and plain Tensors; others (sparse, say) are pickled."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.beside: list[Any] = []
        self.tensors: list[tuple[Any, Any]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        is_tensor = type(value) is torch.Tensor
        if type(value) is bytes or (is_tensor and value.is_cuda):
            self.beside.append(value)
            return len(self.beside) - 1
        if not is_tensor or value.layout is not torch.strided or value.is_quantized:
            return None
        place = (self.size, value.numel() * value.element_size(), value.dtype, tuple(value.shape))
        self.tensors.append((place, value.detach()))
        self.size += -(-place[1] // ALIGNMENT) * ALIGNMENT
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, sent: Sent) -> None:
        super().__init__(BytesIO(sent.content))
        self._sent = sent

    def persistent_load(self, place: Any) -> Any:
        if isinstance(place, int):
            return self._sent.beside[place]
        if not place[1]:
            return torch.empty(place[3], dtype=place[2])
        tensor = _tensor_at(self._sent.memory, place)
        return tensor.clone() if place[1] <= SMALL else tensor


def _tensor_at(memory: Any, place: tuple[int, int, Any, tuple[int, ...]]) -> Any:
    start, size, dtype, shape = place
    return memory[start : start + size].view(dtype).view(shape)


class Slots:
    """In a worker: GPU memory for the last ``count`` Tensors, each written over the one so many before it.

    NOTE: to map another process's memory, and to let it go, waits for all that runs on the GPU. So the training process
    maps each slot once, and keeps it.
    """

    def __init__(self, count: int) -> None:
        self._slots: list[Any] = [torch.empty(0)] * count

    def write(self, tensor: Any) -> Any:
        """Where ``tensor`` is now: the beginning of the oldest slot, which is replaced where it does not fit."""
        slot = self._slots.pop(0)
        kind = (slot.shape[1:], slot.dtype, slot.device)
        if len(tensor) > len(slot) or kind != (tensor.shape[1:], tensor.dtype, tensor.device):
            # A copy: the Tensor can be a part of something larger, or one that a transform keeps for itself.
            slot = tensor.clone()
        else:
            slot[: len(tensor)].copy_(tensor)
        self._slots.append(slot)
        return slot[: len(tensor)]
