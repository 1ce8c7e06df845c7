"""Transfers a batch from a DataLoader's worker to the training process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # so that Tensors are sent through shared memory

from torchpipe_py.errors import Failure
from torchpipe_py.training.batcher import Batch, Figures
from torchpipe_py.training.samples import Sample

ALIGNMENT = 64  # bytes: alignment of a Tensor in shared memory
SMALL = 2**16  # bytes: a Tensor up to this size is copied out, so that it does not keep its batch's memory
ON_THEIR_WAY = 4
"""Received batches of a worker that may not yet be copied out of its GPU memory."""


@dataclass
class ReadResult:
    """The outcome of reading a batch: its samples, or the whole batch, or a failure.

    ``label``: the last one that the worker has seen; ``figures``: the worker's counts. In the training process
    ``decoded`` waits for the pipes, and ``stacks`` are the images as ``Batcher.stacked`` returns them.
    """

    samples: list[Sample] | None = None
    batch: Batch | None = None
    failure: Failure | None = None
    label: Any = None
    figures: Figures | None = None
    decoded: Callable[[], list[Sample]] | None = None
    stacks: list[Any] | None = None


class Sent(NamedTuple):
    """A pickled ``ReadResult``, with bytes and GPU Tensors outside the pickle, other Tensors in shared memory.

    NOTE: a queue pickles on its own thread and drops objects that it cannot pickle, and the training would wait for
    them forever: so this is pickled earlier. multiprocessing would also use a file descriptor for each Tensor.
    """

    content: bytes
    beside: list[Any]
    memory: Any

    @classmethod
    def of(cls, result: ReadResult) -> Sent:
        """Pack a ``ReadResult``; raises the errors of pickling, and ``RuntimeError`` if no shared memory is left."""
        content = BytesIO()
        pickler = _Pickler(content)
        pickler.dump(result)
        memory = None
        if pickler.size:
            memory = torch.empty(pickler.size, dtype=torch.uint8).share_memory_()
            for place, tensor in pickler.tensors:
                _tensor_at(memory, place).copy_(tensor)
        return cls(content.getvalue(), pickler.beside, memory)

    def received(self) -> ReadResult:
        """Unpack the ``ReadResult``."""
        result: ReadResult = _Unpickler(self).load()
        return result


class _Pickler(pickle.Pickler):
    """Keeps bytes, GPU Tensors and plain Tensors outside the pickle; others (sparse ones, for example) are pickled."""

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
    """A worker's ring of GPU memory for its last ``count`` Tensors; each new one overwrites the oldest.

    NOTE: mapping and unmapping another process's memory waits for all work on the GPU. So the training process maps
    each slot once, and keeps it.
    """

    def __init__(self, count: int) -> None:
        self._slots: list[Any] = [torch.empty(0)] * count

    def write(self, tensor: Any) -> Any:
        """Copy ``tensor`` to the start of the oldest slot (replaced if too small); returns the copy."""
        slot = self._slots.pop(0)
        kind = (slot.shape[1:], slot.dtype, slot.device)
        if len(tensor) > len(slot) or kind != (tensor.shape[1:], tensor.dtype, tensor.device):
            # A copy: the Tensor may be part of a larger one, or a transform may keep it.
            slot = tensor.clone()
        else:
            slot[: len(tensor)].copy_(tensor)
        self._slots.append(slot)
        return slot[: len(tensor)]
