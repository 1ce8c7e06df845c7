"""Where a loader works: one device, several, or the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchpipe_py.errors import nearest
from torchpipe_py.training.errors import TrainingError

PARALLEL_TYPES = ("single", "dp", "ddp")


def checked_parallel_type(parallel_type: Any) -> str:
    """One of ``PARALLEL_TYPES``, in lower case; ``ValueError`` with the nearest otherwise."""
    name = str(parallel_type).lower()
    if name not in PARALLEL_TYPES:
        raise ValueError(f"parallel_type {parallel_type!r} is not known; {nearest(name, PARALLEL_TYPES)}")
    return name


def choose_devices(parallel_type: str, local_rank: int | None, devices: Any) -> list[Any]:
    """The ``torch.device`` of each share of a batch; one of them but in ``"dp"``.

    ``devices`` is ``None``, a device or a list of them: numbers, ``"cuda:1"``, ``"cpu"``. ``None`` means in "single"
    ``local_rank`` or the current CUDA device, in "dp" all CUDA devices, in "ddp" ``local_rank``; on a machine without
    CUDA it is the CPU, but not in "dp". ``TrainingError`` for a GPU that is not there.
    """
    given = _as_list(devices)
    if parallel_type == "ddp":
        if local_rank is None:
            raise TrainingError("parallel_type 'ddp' needs local_rank: int(os.environ['LOCAL_RANK']) under torchrun")
        if len(given) > 1:
            raise TrainingError(f"in 'ddp' a rank has one device, got {len(given)}; leave devices out")
        return given or [_own(local_rank)]
    if parallel_type == "dp":
        return given or _all()
    if len(given) > 1:
        raise TrainingError(f"parallel_type 'single' has one device, got {len(given)}; 'dp' takes several")
    return given or [_own(local_rank)]


def _as_list(devices: Any) -> list[Any]:
    if devices is None:
        return []
    several = devices if isinstance(devices, Sequence) and not isinstance(devices, str) else [devices]
    if not several:
        raise TrainingError("devices is empty; leave it out, or name at least one")
    return [_checked(device) for device in several]


def _checked(device: Any) -> Any:
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type != "cuda":
        raise TrainingError(f"device {device!r}: a pipe works on CUDA devices and on the CPU")
    if not torch.cuda.is_available():
        raise TrainingError(f"device {device!r}: PyTorch finds no CUDA device here; 'cpu' is the CPU")
    index = torch.cuda.current_device() if named.index is None else named.index
    if index >= torch.cuda.device_count():
        raise TrainingError(f"device {device!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return torch.device("cuda", index)


def _own(local_rank: int | None) -> Any:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return _checked(torch.cuda.current_device() if local_rank is None else local_rank)


def _all() -> list[Any]:
    if not torch.cuda.is_available():
        raise TrainingError("parallel_type 'dp' without devices takes all GPUs, and PyTorch finds no CUDA device here")
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
