"""How a loader is to work, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from torchpipe_py.errors import nearest

BAD_SAMPLES = ("raise", "skip", "mask")


@dataclass(frozen=True)
class LoaderOptions:
    """The options of ``wrap_dataloader_torchpipe`` that say what is done to samples and batches."""

    transforms_gpu: Callable[[Any], Any] | None = None
    transforms_cpu: Callable[[Any], Any] | None = None
    transforms_batch: Callable[[Any], Any] | None = None
    cpu_percentage: float = 0.0
    seed: int = 0
    prefetch: int = 2
    bad_samples: str = "raise"
    ignore_index: int = -100
    gather: bool = True
    workers_decode: bool = False
    collate_labels: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        """``ValueError`` that names the option."""
        if not 0.0 <= self.cpu_percentage <= 1.0:
            raise ValueError(f"cpu_percentage is a share from 0 to 1 (0.1: a tenth), got {self.cpu_percentage}")
        if self.cpu_percentage > 0 and self.transforms_cpu is None:
            raise ValueError(f"cpu_percentage is {self.cpu_percentage}, so transforms_cpu must be given")
        if self.bad_samples not in BAD_SAMPLES:
            hint = nearest(str(self.bad_samples), BAD_SAMPLES)
            raise ValueError(f"bad_samples {self.bad_samples!r} is not known; {hint}")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is a number of batches from 0 up, got {self.prefetch}")
