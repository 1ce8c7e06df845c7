"""Communication between the ranks of a training, so that no rank waits for one that has stopped."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from torchpipe_py.errors import first_line
from torchpipe_py.training.errors import PeerFailed, TrainingError


class Step(IntEnum):
    """The outcome of a step on a rank; the largest of all ranks counts."""

    END = 0
    BATCH = 1
    FAILED = 2


class RankGroup:
    """A separate gloo group on the CPU, in addition to the model's group.

    Every method is a collective call: all ranks make the same calls in the same order, on the training thread. A step
    costs one small all-reduce. If a rank's process is gone, the others' calls fail within the group's timeout.
    """

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise TrainingError("parallel_type 'ddp' needs a process group: call torch.distributed.init_process_group")
        self._group = dist.new_group(backend="gloo")
        self.rank: int = dist.get_rank()
        self.count: int = dist.get_world_size()

    def settle(self, error: Exception | None, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``facts``; if any rank has an ``error``, all raise."""
        problem = None if error is None else f"{type(error).__name__}: {error}"
        gathered: list[Any] = [None] * self.count
        dist.all_gather_object(gathered, (problem, facts), group=self._group)
        if error is not None:
            raise error
        for rank, (message, _) in enumerate(gathered):
            if message is not None:
                raise PeerFailed(f"rank {rank} stopped with {message}")
        return [facts for _, facts in gathered]

    def step(self, step: Step, error: BaseException | None = None) -> Step:
        """``BATCH`` while any rank has a batch, then ``END``; an error of any rank is raised on all."""
        largest = torch.tensor([step], dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        if int(largest) == Step.FAILED:
            shown = None if error is None else TrainingError(f"{type(error).__name__}: {first_line(error)}")
            try:
                self.settle(shown, {})
            except TrainingError:
                if error is not None:
                    raise error from error.__cause__
                raise
        return Step(int(largest))

    def close(self) -> None:
        """Leave the group; ranks that still wait for this one get an error."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
