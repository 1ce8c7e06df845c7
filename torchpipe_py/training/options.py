"""The arguments of ``wrap_dataloader_torchpipe``: the options of a loader and its devices, with their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from torchpipe_py.errors import nearest
from torchpipe_py.training.errors import TrainingError

BAD_SAMPLES = ("raise", "skip", "mask")
PARALLEL_TYPES = ("single", "dp", "ddp")


@dataclass(frozen=True)
class LoaderOptions:
    """The options of ``wrap_dataloader_torchpipe`` for processing samples and batches.

    ``transforms_gpu`` is called for each sample with the pipe's output, on its device, and returns a Tensor C×H×W.
    If it has one of torchvision's color transforms (``ColorJitter``, say), which take floats for values of 0..1, then
    floats of 0..255 are rounded to uint8 before it.
    ``transforms_batch`` is called after that with the whole batch, N×C×H×W (in "dp" without ``gather``, with each
    device's share), masked images included. If it has a parameter ``seeds``, as an ``Augmentation`` has, that is a
    Tensor of N int64 on the CPU: the seed of each sample (see ``seed``). A share ``cpu_percentage`` (0..1) of the
    batches is processed differently: in the DataLoader's workers, ``transforms_cpu`` is called for each sample with a
    ``PIL.Image``, and returns a Tensor C×H×W. The image is decoded as the TOML says (``formats``, ``max_pixels``,
    ``color``): mode "L" for gray, otherwise "RGB" with the channels in the order of the pipe's result.

    ``seed``: random transforms draw from the global generators of Python, NumPy and PyTorch (and of the CUDA device).
    Before each sample these are seeded from ``seed``, the epoch, the sample's index and its earlier occurrences in the
    epoch; they are restored after the batch. So batches are the same for any number of workers, ``prefetch`` and
    instances, and the program's own random numbers do not change. Random numbers drawn by a dataset are not covered.

    ``prefetch``: decoded batches that a background thread keeps ready, in addition to two that are being decoded; 0:
    none, and no thread.

    ``bad_samples``: "raise" raises a ``BadSample``; "skip" drops the sample, and a batch with only bad samples (in
    "ddp" that batch is masked, since all ranks make the same number of steps); "mask" keeps its place, with an image of
    zeros (before ``transforms_batch``), the label ``ignore_index`` and ``False`` in the batch's ``mask``.

    ``gather``: in "dp", return one Tensor on the first device, as ``DataParallel`` expects; otherwise a list with a
    Tensor for each device that has samples. ``collate_labels`` is called with the list of labels.

    ``workers_decode``: each of the DataLoader's workers has its own pipes and creates whole batches, bit for bit the
    same, transforms included; the training process copies them out of the worker's GPU memory. Use it if one process
    cannot decode as fast as the GPU could. Each worker needs GPU memory for a CUDA context and some batches. In "dp"
    with ``gather``, workers take the devices in turn. Workers get copies of dataset and transforms when they start, and
    have their own process-wide settings (default dtype, TF32, environment); images carry no gradient. They are started
    by "forkserver", whose process stays until the program ends, or by "spawn" if the DataLoader's
    ``multiprocessing_context`` selects it. So dataset and transforms must be picklable, and a script needs
    ``if __name__ == "__main__":``.
    """

    transforms_gpu: Callable[[Any], Any] | None = None
    transforms_cpu: Callable[[Any], Any] | None = None
    cpu_percentage: float = 0.0
    seed: int = 0
    prefetch: int = 2
    bad_samples: str = "raise"
    ignore_index: int = -100
    transforms_batch: Callable[..., Any] | None = None
    gather: bool = True
    workers_decode: bool = False
    collate_labels: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        """Check the options; raises ``ValueError``, which names the option."""
        if not 0.0 <= self.cpu_percentage <= 1.0:
            raise ValueError(f"cpu_percentage is a share from 0 to 1 (0.1: a tenth), got {self.cpu_percentage}")
        if self.cpu_percentage > 0 and self.transforms_cpu is None:
            raise ValueError(f"cpu_percentage is {self.cpu_percentage}, so transforms_cpu must be given")
        check_bad_samples(self.bad_samples)
        if self.prefetch < 0:
            raise ValueError(f"prefetch is a number of batches from 0 up, got {self.prefetch}")


def check_bad_samples(policy: str) -> None:
    """Raise ``ValueError`` for an unknown policy."""
    if policy not in BAD_SAMPLES:
        raise ValueError(f"bad_samples {policy!r} is not known; {nearest(str(policy), BAD_SAMPLES)}")


def choose_devices(parallel_type: str, local_rank: int | None, devices: Any) -> list[Any]:
    """The ``torch.device`` of each share of a batch; only "dp" may have several.

    ``devices`` is ``None``, a device or a list of devices: numbers, ``"cuda:1"``, ``"cpu"``; ``"0,1"`` is a list too.
    ``None`` means in "single" ``local_rank`` or the current CUDA device, in "dp" all CUDA devices, in "ddp"
    ``local_rank``; on a machine without CUDA it means the CPU, except in "dp". ``ValueError`` for an unknown type,
    ``TrainingError`` for a missing GPU.
    """
    if parallel_type not in PARALLEL_TYPES:
        raise ValueError(f"parallel_type {parallel_type!r} is not known; {nearest(parallel_type, PARALLEL_TYPES)}")
    if parallel_type == "ddp" and local_rank is None:
        raise TrainingError("parallel_type 'ddp' needs local_rank: int(os.environ['LOCAL_RANK']) under torchrun")
    if devices is None and not torch.cuda.is_available():
        devices = ["cpu"] if parallel_type != "dp" else range(1)
    elif devices is None and parallel_type == "dp":
        devices = range(torch.cuda.device_count())
    elif devices is None:
        devices = torch.cuda.current_device() if local_rank is None else local_rank
    if isinstance(devices, str):  # torchpipe's "0,1" too
        devices = [int(name) if name.isdigit() else name for name in devices.replace(" ", "").split(",")]
    given = devices if isinstance(devices, Sequence) else [devices]
    if not given:
        raise TrainingError("devices is empty; leave it out, or name at least one")
    if parallel_type != "dp" and len(given) > 1:
        hint = "leave devices out" if parallel_type == "ddp" else "'dp' takes several"
        raise TrainingError(f"parallel_type {parallel_type!r} has one device, got {len(given)}; {hint}")
    return [_checked(device) for device in given]


def _checked(device: Any) -> Any:
    try:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise TrainingError(f"device {device!r} is not known; expected a number, 'cuda:1' or 'cpu'") from error
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
