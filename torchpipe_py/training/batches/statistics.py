"""What a loader counts and measures."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

REMEMBERED = 1000  # bad samples named in stats(); all are counted

STAGES = ("read", "decode", "transform", "agree")


@dataclass(frozen=True)
class Counted:
    """What was counted in a worker since it was last asked."""

    counts: dict[str, int]
    seconds: dict[str, float]
    kinds: dict[str, int]
    bad: list[dict[str, Any]]


class LoaderStatistics:
    """Counts and seconds since the loader was made; several threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._seconds = dict.fromkeys(("wait", "busy", *STAGES), 0.0)
        self._bad_kinds: Counter[str] = Counter()
        self._bad: list[dict[str, Any]] = []
        self._returned: float | None = None

    def count(self, **numbers: int) -> None:
        """Add to counts by name."""
        with self._lock:
            self._counts.update(numbers)

    def bad_sample(self, epoch: int, index: int, name: str, kind: str, reason: str) -> None:
        """One more sample without an image."""
        with self._lock:
            self._bad_kinds[kind] += 1
            if len(self._bad) < REMEMBERED:
                self._bad.append({"epoch": epoch, "index": index, "name": name, "kind": kind, "reason": reason})

    def taken(self) -> Counted:
        """All of it but the loop's seconds, which begin anew."""
        with self._lock:
            seconds = {name: self._seconds[name] for name in STAGES}
            counted = Counted(dict(self._counts), seconds, dict(self._bad_kinds), self._bad)
            self._counts, self._bad_kinds, self._bad = Counter(), Counter(), []
            self._seconds.update(dict.fromkeys(STAGES, 0.0))
        return counted

    def add(self, counted: Counted) -> None:
        """What a worker counted."""
        with self._lock:
            self._counts.update(counted.counts)
            self._bad_kinds.update(counted.kinds)
            self._bad += counted.bad[: REMEMBERED - len(self._bad)]
            for name, seconds in counted.seconds.items():
                self._seconds[name] += seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Seconds spent inside go to ``name``."""
        began = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[name] += perf_counter() - began

    @contextmanager
    def consumer_waits(self) -> Iterator[None]:
        """The training loop is inside the loader; what lies between two of these is its own work."""
        began = perf_counter()
        if self._returned is not None:
            self._seconds["busy"] += began - self._returned
        try:
            yield
        finally:
            self._returned = perf_counter()
            self._seconds["wait"] += self._returned - began

    def pause(self) -> None:
        """What the training program does until the next batch is no step: validation, say."""
        self._returned = None

    def snapshot(self) -> dict[str, Any]:
        """See ``TorchpipeLoader.stats``."""
        with self._lock:
            counts, seconds = self._counts, self._seconds
            loop = seconds["wait"] + seconds["busy"]
            return {
                "samples": counts["samples"],
                "batches": counts["batches"],
                "cpu_batches": counts["cpu_batches"],
                "skipped": counts["skipped"],
                "masked": counts["masked"],
                "filler_batches": counts["filler_batches"],
                "wait_s": seconds["wait"],
                "busy_s": seconds["busy"],
                "stall_share": seconds["wait"] / loop if loop else 0.0,
                "samples_per_s": counts["samples"] / loop if loop else 0.0,
                "stages_s": {name: seconds[name] for name in STAGES},
                "bad": {"count": self._bad_kinds.total(), "kinds": dict(self._bad_kinds), "samples": list(self._bad)},
            }
