"""CPU time of the server, of this process and of the machine over a run. Without psutil, only of this process."""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

try:
    psutil: ModuleType | None = importlib.import_module("psutil")
except ImportError:
    psutil = None

JUDGED_FROM_S = 0.5  # the machine's clock ticks 100 times a second: shorter runs say nothing

_BUSY = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds between ``start`` and ``stop``, a span of ``wall`` seconds; None where it is not known.

    ``parent`` is this process with all its threads, ``machine`` all there is.
    """

    wall: float
    parent: float
    server: float | None
    machine: float | None

    @property
    def machine_busy(self) -> float | None:
        """The share of all cores that was in use."""
        return self.machine / self.wall / (os.cpu_count() or 1) if self.machine else None

    def others(self, ours: float) -> float | None:
        """What was not ``ours``, in seconds, of one core."""
        return None if self.machine is None else max(0.0, self.machine - ours) / self.wall


class CpuMeter:
    """Reads the CPU clocks twice.

    ``server`` counts with its descendants, but for this process and those ``not_server``, whoever their ancestors are.
    """

    def __init__(self, server: list[int], not_server: list[int]) -> None:
        self._server = server
        self._not_server = {os.getpid(), *not_server}

    def start(self) -> None:
        """The span begins."""
        self._server_before = self._server_clocks()
        self._machine_before = _machine_clock()
        self._parent_before = time.process_time()
        self._started = time.perf_counter()

    def stop(self) -> CpuUse:
        """The span ends. Of a server process that ended in it, nothing is counted."""
        wall = time.perf_counter() - self._started
        parent = time.process_time() - self._parent_before
        machine, before = _machine_clock(), self._machine_before
        spent = None if machine is None or before is None or wall < JUDGED_FROM_S else machine - before
        return CpuUse(wall, parent, self._server_spent(), spent)

    def _server_spent(self) -> float | None:
        after = self._server_clocks()
        if not after:
            return None
        return sum(seconds - self._server_before.get(pid, 0.0) for pid, seconds in after.items())

    def _server_clocks(self) -> dict[int, float]:
        """CPU seconds of each process of the server, descendants included."""
        clocks: dict[int, float] = {}
        for root in self._server:
            for process in _family(root):
                if process.pid not in self._not_server:
                    _read_clock(process, clocks)
        return clocks


def _family(pid: int) -> list[Any]:
    if psutil is None:
        return []
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _read_clock(process: Any, clocks: dict[int, float]) -> None:
    assert psutil is not None
    try:
        times = process.cpu_times()
    except psutil.Error:
        return
    clocks[process.pid] = times.user + times.system


def _machine_clock() -> float | None:
    """CPU seconds that all cores together have been busy since boot."""
    if psutil is None:
        return None
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in _BUSY)


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"
