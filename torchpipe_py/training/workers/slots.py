"""GPU memory of a worker that the training process reads: mapped once, used for one batch at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SLOTS = 32  # of a worker; beyond these, memory is mapped for one batch alone


@dataclass(frozen=True)
class SlotTensor:
    """The first ``rows`` of slot ``slot`` of a worker, or with ``None`` all of ``tensor``, which is no slot.

    ``tensor`` is the slot itself where it is new. ``generation``: the reader's, when it was written.
    """

    generation: int
    worker: int
    slot: int | None
    rows: int
    tensor: Any = None


class SlotWriter:
    """In a worker: copies Tensors to slots that are not in use. ``in_use``: bool, shared by all, workers × ``SLOTS``.

    NOTE: to map another process's memory, and to let it go, waits for all that runs on the GPU; hence not for each
    batch.
    """

    def __init__(self, worker: int, in_use: Any) -> None:
        self._worker, self._in_use = worker, in_use[worker]
        self._slots: list[Any] = []
        self._generation = 0

    def write(self, generation: int, tensor: Any) -> SlotTensor:
        """Where ``tensor`` is now; in another ``generation`` all slots are new: the reader has forgotten the others."""
        if generation != self._generation:
            self._generation, self._slots = generation, []
            self._in_use.zero_()
        free = [number for number in range(len(self._slots)) if not self._in_use[number]]
        fitting = next((number for number in free if _fits(tensor, self._slots[number])), None)
        if fitting is not None:
            self._slots[fitting][: len(tensor)].copy_(tensor)
            self._in_use[fitting] = True
            return SlotTensor(generation, self._worker, fitting, len(tensor))
        # A copy: the Tensor can be a part of something larger, or one that a transform keeps for itself.
        slot = tensor.clone()
        number = free[0] if free else len(self._slots)
        if number == len(self._in_use):
            return SlotTensor(generation, self._worker, None, len(tensor), slot)
        self._slots[number : number + 1] = [slot]
        self._in_use[number] = True
        return SlotTensor(generation, self._worker, number, len(tensor), slot)


class SlotReader:
    """In the training process: finds what was written since ``begin``. What is no ``SlotTensor`` stays as it is."""

    def __init__(self, workers: int) -> None:
        self.in_use: Any = torch.zeros(workers, SLOTS, dtype=torch.bool).share_memory_()
        self._slots: dict[tuple[int, int], Any] = {}
        self._generation = 0

    def begin(self) -> int:
        """Forget all slots; the number of the generation that begins."""
        self.forget()
        self._generation += 1
        return self._generation

    def read(self, written: Any) -> Any:
        """The Tensor in the worker's memory, to be copied before it is released."""
        if not isinstance(written, SlotTensor):
            return written
        if written.slot is None:
            return written.tensor
        if written.tensor is not None:
            self._slots[written.worker, written.slot] = written.tensor
        return self._slots[written.worker, written.slot][: written.rows]

    def release(self, written: Any) -> None:
        """Nothing reads it any more: the worker may write there again."""
        if isinstance(written, SlotTensor) and written.slot is not None and written.generation == self._generation:
            self.in_use[written.worker, written.slot] = False

    def forget(self) -> None:
        """Let all slots go."""
        self._slots.clear()


def _fits(tensor: Any, slot: Any) -> bool:
    return len(tensor) <= len(slot) and (tensor.shape[1:], tensor.dtype, tensor.device) == (
        slot.shape[1:],
        slot.dtype,
        slot.device,
    )
