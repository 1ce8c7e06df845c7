"""GPU memory of a worker that the training process reads: mapped once, lent for one batch at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SLOTS = 32  # of a worker; beyond these, memory is mapped for one batch alone


@dataclass(frozen=True)
class Loan:
    """The first ``rows`` of a worker's slot; ``tensor`` is the slot itself where it is lent for the first time."""

    worker: int
    slot: int | None
    rows: int
    tensor: Any = None


class Lender:
    """In a worker: copies Tensors to slots that are free. ``lent``: bool, shared by all, workers × ``SLOTS``.

    NOTE: to map another process's memory, and to give it back, waits for all that runs on the GPU; hence not for each
    batch.
    """

    def __init__(self, worker: int, lent: Any) -> None:
        self._worker, self._lent = worker, lent[worker]
        self._slots: list[Any] = []
        self._reading = 0

    def lend(self, reading: int, tensor: Any) -> Loan:
        """``tensor`` in a slot; in another ``reading`` than before, the borrower has nothing of the slots before."""
        if reading != self._reading:
            self._reading, self._slots = reading, []
            self._lent.zero_()
        for number, slot in enumerate(self._slots):
            if not self._lent[number] and _fits(tensor, slot):
                slot[: len(tensor)].copy_(tensor)
                self._lent[number] = True
                return Loan(self._worker, number, len(tensor))
        number = len(self._slots)
        if number >= len(self._lent):
            return Loan(self._worker, None, len(tensor), tensor)
        self._slots.append(tensor)
        self._lent[number] = True
        return Loan(self._worker, number, len(tensor), tensor)


class Borrower:
    """In the training process: finds what was lent, until ``forget``."""

    def __init__(self, workers: int) -> None:
        self.lent: Any = torch.zeros(workers, SLOTS, dtype=torch.bool).share_memory_()
        self._slots: dict[tuple[int, int], Any] = {}

    def tensor(self, loan: Loan) -> Any:
        """What was lent, to be read before it is given back."""
        if loan.slot is None:
            return loan.tensor
        if loan.tensor is not None:
            self._slots[loan.worker, loan.slot] = loan.tensor
        return self._slots[loan.worker, loan.slot][: loan.rows]

    def give_back(self, loan: Loan) -> None:
        """Nothing reads it any more."""
        if loan.slot is not None:
            self.lent[loan.worker, loan.slot] = False

    def forget(self) -> None:
        """Let all slots go."""
        self._slots.clear()


def _fits(tensor: Any, slot: Any) -> bool:
    return len(tensor) <= len(slot) and (tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.device) == (
        slot.shape[1:],
        slot.stride(),
        slot.dtype,
        slot.device,
    )
