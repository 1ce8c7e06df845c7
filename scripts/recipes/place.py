"""Where a process of a training runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def as_it_is(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True)
class Place:
    """``parallel_type``, ``local_rank`` and ``devices`` are the loader's; ``wrap`` makes the model a parallel one."""

    parallel_type: str = "single"
    local_rank: int | None = None
    devices: Any = None
    rank: int = 0
    wrap: Callable[[nn.Module], nn.Module] = field(default=as_it_is)

    @property
    def is_distributed(self) -> bool:
        return self.parallel_type == "ddp"

    def wait(self, device: Any) -> None:
        """Until what was started on ``device``, and in "dp" on the others, is done."""
        if device.type == "cuda":
            for gpu in self._own(device):
                torch.cuda.synchronize(gpu)

    def memory(self, device: Any) -> list[int]:
        """MiB in use on each process's GPU, in "dp" on each GPU, by anyone; empty on the CPU."""
        if device.type != "cuda":
            return []
        if self.parallel_type == "dp":
            return [_used(gpu) for gpu in self._own(device)]
        if not self.is_distributed:
            return [_used(device)]
        used: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(used, _used(device))
        return used

    def _own(self, device: Any) -> Sequence[Any]:
        """The GPUs of this process; in "dp" several."""
        if self.parallel_type != "dp":
            return [device]
        return self.devices or range(torch.cuda.device_count())

    def summed(self, values: list[float], device: Any) -> list[float]:
        """Each value, summed over the processes."""
        if not self.is_distributed:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums


def torchrun_place(device: str | None, synchronise_norms: bool = True) -> Place:
    """This process's place among those that torchrun started; joins the process group: NCCL, or gloo on the CPU.

    ``synchronise_norms``: on GPUs, batch norms see the batches of all processes.
    """
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start it with torchrun: torchrun --nproc_per_node 2 scripts/train_ddp.py …")
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available() and device != "cpu"
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")

    def wrap(model: nn.Module) -> nn.Module:
        if not on_gpu:
            return nn.parallel.DistributedDataParallel(model)
        if synchronise_norms:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])

    return Place("ddp", local_rank, None if on_gpu else "cpu", dist.get_rank(), wrap)


def _used(device: Any) -> int:
    free, whole = torch.cuda.mem_get_info(device)
    return int(whole - free) >> 20
