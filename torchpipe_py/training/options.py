"""What a loader can be told beside its DataLoader, its TOML and its devices: names, defaults, meaning and checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from torchpipe_py.errors import nearest

BAD_SAMPLES = ("raise", "skip", "mask")


@dataclass(frozen=True)
class LoaderOptions:
    """The options of ``wrap_dataloader_torchpipe`` that say what is done to samples and batches.

    ``transforms_gpu`` is called for each sample with what the pipe gave, on its device, and gives a Tensor C×H×W.
    ``transforms_batch`` is called after that with the whole batch, N×C×H×W. A share ``cpu_percentage`` (0..1) of the
    batches takes another way: ``transforms_cpu`` is called for each sample with an RGB ``PIL.Image`` that OpenCV
    decoded, in the DataLoader's workers, and gives a Tensor C×H×W.

    ``seed``: random transforms draw from the global generators of Python, NumPy and PyTorch (and of the CUDA device).
    Those are seeded before each sample from ``seed``, the epoch, the sample's index and how often it came before in the
    epoch, and put back after the batch.
    So batches are the same for any number of workers, ``prefetch`` and instances, and the program's own random numbers
    are left alone. A dataset that draws random numbers itself is not covered.

    ``prefetch``: decoded batches that a background thread keeps ready, beside two on their way; 0: none, and no
    thread.

    ``bad_samples``: "raise" a ``BadSample``; "skip" drops the sample, and a batch of nothing else (in "ddp" that batch
    is masked, since all ranks make equally many steps); "mask" keeps its place, with an image of zeros, the label
    ``ignore_index`` and ``False`` in the batch's ``mask``.

    ``gather``: in "dp" one Tensor on the first device, as ``DataParallel`` takes it; otherwise a list with a Tensor for
    each device that has samples. ``collate_labels`` is called with the list of labels.

    ``workers_decode``: each of the DataLoader's workers has pipes of its own and makes whole batches, bit for bit the
    same, transforms included; the training process copies them out of the worker's GPU memory. For where one process
    decodes less than the GPU could. Each worker takes a CUDA context of GPU memory, and some batches. In "dp" with
    ``gather``, workers take the devices in turn. Workers have copies of dataset and transforms as they are now, and
    what belongs to a process (the default dtype, TF32, the environment) is their own; images carry no gradient. They
    are started by "forkserver", whose process stays until the program ends, or by "spawn" where the DataLoader's
    ``multiprocessing_context`` says so. So dataset and transforms must be what can be pickled, and a script needs
    ``if __name__ == "__main__":``.
    """

    transforms_gpu: Callable[[Any], Any] | None = None
    transforms_cpu: Callable[[Any], Any] | None = None
    cpu_percentage: float = 0.0
    seed: int = 0
    prefetch: int = 2
    bad_samples: str = "raise"
    ignore_index: int = -100
    transforms_batch: Callable[[Any], Any] | None = None
    gather: bool = True
    workers_decode: bool = False
    collate_labels: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        """``ValueError`` that names the option."""
        if not 0.0 <= self.cpu_percentage <= 1.0:
            raise ValueError(f"cpu_percentage is a share from 0 to 1 (0.1: a tenth), got {self.cpu_percentage}")
        if self.cpu_percentage > 0 and self.transforms_cpu is None:
            raise ValueError(f"cpu_percentage is {self.cpu_percentage}, so transforms_cpu must be given")
        check_bad_samples(self.bad_samples)
        if self.prefetch < 0:
            raise ValueError(f"prefetch is a number of batches from 0 up, got {self.prefetch}")


def check_bad_samples(policy: str) -> None:
    """``ValueError`` for a policy that there is not."""
    if policy not in BAD_SAMPLES:
        raise ValueError(f"bad_samples {policy!r} is not known; {nearest(str(policy), BAD_SAMPLES)}")
