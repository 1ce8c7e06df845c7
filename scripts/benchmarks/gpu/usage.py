"""Samples of a GPU's use and memory."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any, NamedTuple

import torch

INTERVAL = 0.05  # seconds between two samples; the driver renews its figure about six times a second


class GpuSample(NamedTuple):
    """``seconds`` since the start; ``busy``: percent of the sampling period in which a kernel ran; MiB in use."""

    seconds: float
    busy: float
    memory: float


class GpuUsage:
    """A context that samples a GPU by NVML on a separate thread: work and memory of all processes together.

    Without NVML (package ``nvidia-ml-py``) or a GPU, ``samples`` is empty and ``missing`` is the reason.
    """

    def __init__(self, device: torch.device) -> None:
        self.samples: list[GpuSample] = []
        self.missing = ""
        self._nvml: Any = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-usage", daemon=True)
        try:
            import pynvml

            pynvml.nvmlInit()
            # NOTE: not by its number, which CUDA_VISIBLE_DEVICES changes.
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._nvml = pynvml
        except Exception as error:  # pynvml has a separate exception for each reason
            self.missing = f"the GPU's use is not measured (pip install nvidia-ml-py): {error}"

    @property
    def busy(self) -> float:
        """The mean over the samples, percent; NaN without any."""
        return sum(sample.busy for sample in self.samples) / len(self.samples) if self.samples else float("nan")

    @property
    def memory(self) -> float:
        """The most MiB in use; NaN without any sample."""
        return max((sample.memory for sample in self.samples), default=float("nan"))

    def __enter__(self) -> GpuUsage:
        if self._nvml is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        began = perf_counter()
        try:
            while not self._over.wait(INTERVAL):
                busy = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
                memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / 2**20
                self.samples.append(GpuSample(perf_counter() - began, busy, memory))
        except self._nvml.NVMLError as error:
            self.missing = f"the GPU's use is not measured: {error}"
