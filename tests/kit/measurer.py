"""Runs of the tuner that measure nothing: made-up speeds, on a clock that loops move on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from torchpipe_py.tools.load.measure import CpuMeter, CpuUse
from torchpipe_py.tools.tune.candidates import Candidate
from torchpipe_py.tools.tune.measure import Point, Profile
from torchpipe_py.tools.tune.search import Budget


class FakeMeasurer:
    """``speed`` gives the answers per second of a candidate, on a machine that becomes slower with each loop.

    Each loop takes a second of the fake clock. In open loops the p99 is that of a queue with so many answers.
    """

    def __init__(self, speed: Callable[[Candidate], float], budget_s: float = 1e6, slowing: float = 1.0) -> None:
        self._speed, self._slowing, self.now = speed, slowing, 0.0
        self.asked: list[str] = []
        self.budget = Budget(budget_s, None, lambda: self.now)

    def figure(self, candidate: Candidate, number: int) -> float:
        self.now += 1.0
        self.asked.append(str(candidate))
        return self._speed(candidate) * self._slowing**self.now

    def busy(self, candidate: Candidate) -> dict[str, float]:
        return {"n": 1.0}

    def point(self, candidate: Candidate, rate: float, number: int) -> Point:
        self.now += 1.0
        load = rate / self._speed(candidate)
        return Point(rate, 0.001, 0.002 / (1 - load) if load < 1 else math.inf)


def others_take(cores: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs keep so many cores busy, whatever runs beside this test."""
    use = CpuUse(wall=10.0, parent=1.0, server=2.0, machine=3.0 + 10.0 * cores)
    monkeypatch.setattr(CpuMeter, "stop", lambda self: use)


def use_measurer(
    measurer: FakeMeasurer, known: Callable[[Candidate], Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let runs of the tuner measure by ``measurer``; ``known`` is the profile of the file."""

    class NoService:
        pids, has_gpu = (), False

        def __init__(self, *_: Any) -> None:
            """Starts nothing."""

        def close(self) -> None:
            """Nothing was started."""

    others_take(0.0, monkeypatch)
    engine = "torchpipe_py.tools.tune.engine"
    monkeypatch.setattr(f"{engine}.Service", NoService)
    monkeypatch.setattr(f"{engine}.profile", lambda service, written, *_: known(written))
    monkeypatch.setattr(f"{engine}.Loops", lambda *_: measurer)
    monkeypatch.setattr(f"{engine}.Budget", lambda seconds, progress: Budget(seconds, progress, lambda: measurer.now))
