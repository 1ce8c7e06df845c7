"""GPU memory of a worker that the training process reads: mapped once, lent for one batch at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

SLOTS = 32  # of a worker; beyond these, memory is mapped for one batch alone


@dataclass(frozen=True)
class Loan:
    """The first ``rows`` of slot ``slot`` of a worker, or with ``None`` all of ``tensor``, which is no slot.

    ``tensor`` is the slot itself where it is new. ``reading``: the borrower's, when it was lent.
    """

    reading: int
    worker: int
    slot: int | None
    rows: int
    tensor: Any = None


class Lender:
    """In a worker: copies Tensors to slots that are not lent. ``lent``: bool, shared by all, workers × ``SLOTS``.

    NOTE: to map another process's memory, and to let it go, waits for all that runs on the GPU; hence not for each
    batch.
    """

    def __init__(self, worker: int, lent: Any) -> None:
        self._worker, self._lent = worker, lent[worker]
        self._slots: list[Any] = []
        self._reading = 0

    def lend(self, reading: int, tensor: Any) -> Loan:
        """What is in ``tensor``; in another ``reading`` all slots are new: the borrower has forgotten the others."""
        if reading != self._reading:
            self._reading, self._slots = reading, []
            self._lent.zero_()
        free = [number for number in range(len(self._slots)) if not self._lent[number]]
        fitting = next((number for number in free if _fits(tensor, self._slots[number])), None)
        if fitting is not None:
            self._slots[fitting][: len(tensor)].copy_(tensor)
            self._lent[fitting] = True
            return Loan(reading, self._worker, fitting, len(tensor))
        # A copy: the Tensor can be a part of something larger, or one that a transform keeps for itself.
        slot = tensor.clone()
        number = free[0] if free else len(self._slots)
        if number == len(self._lent):
            return Loan(reading, self._worker, None, len(tensor), slot)
        self._slots[number : number + 1] = [slot]
        self._lent[number] = True
        return Loan(reading, self._worker, number, len(tensor), slot)


class Borrower:
    """In the training process: finds what was lent since ``begin``."""

    def __init__(self, workers: int) -> None:
        self.lent: Any = torch.zeros(workers, SLOTS, dtype=torch.bool).share_memory_()
        self._slots: dict[tuple[int, int], Any] = {}
        self._reading = 0

    def begin(self) -> int:
        """Forget all slots; the number of the reading that begins."""
        self.forget()
        self._reading += 1
        return self._reading

    def tensor(self, loan: Any) -> Any:
        """What was lent, to be read before it is given back."""
        if not isinstance(loan, Loan):
            return loan
        if loan.slot is None:
            return loan.tensor
        if loan.tensor is not None:
            self._slots[loan.worker, loan.slot] = loan.tensor
        return self._slots[loan.worker, loan.slot][: loan.rows]

    def give_back(self, loan: Any) -> None:
        """Nothing reads it any more."""
        if isinstance(loan, Loan) and loan.slot is not None and loan.reading == self._reading:
            self.lent[loan.worker, loan.slot] = False

    def forget(self) -> None:
        """Let all slots go."""
        self._slots.clear()


def _fits(tensor: Any, slot: Any) -> bool:
    return len(tensor) <= len(slot) and (tensor.shape[1:], tensor.dtype, tensor.device) == (
        slot.shape[1:],
        slot.dtype,
        slot.device,
    )
