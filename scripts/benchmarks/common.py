"""What the benchmarks share: closed-loop load from threads, medians over interleaved rounds, the table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from torchpipe_py.tools.load.measure import cpu_model

REPOSITORY = Path(__file__).resolve().parents[2]

Call = Callable[[], object]


@dataclass(frozen=True)
class Load:
    """What one closed-loop run measured: calls per second, latencies in milliseconds.

    ``cpu_ms``: the server's CPU time for a call, 0 where it was not measured.
    """

    qps: float
    p50: float
    p99: float
    cpu_ms: float = 0.0


@dataclass(frozen=True)
class Row:
    """One line of a benchmark's table: what was measured, the median of each figure, and the bar if it has one."""

    what: str
    qps: float
    p50: float | None = None
    p99: float | None = None
    note: str = ""


@dataclass
class Report:
    """A benchmark's outcome; ``targets`` holds (name, measured, bar, met)."""

    title: str
    rows: list[Row] = field(default_factory=list)
    targets: list[tuple[str, float, str, bool]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add(self, loads: Mapping[str, Load], notes: Mapping[str, str] | None = None) -> None:
        """A row for each load, by its name."""
        self.rows += [
            Row(name, load.qps, load.p50, load.p99, (notes or {}).get(name, "")) for name, load in loads.items()
        ]

    def require(self, name: str, measured: float, low: float | None = None, high: float | None = None) -> None:
        """Record a target: ``measured`` must be at least ``low`` or less than ``high``."""
        met = (low is None or measured >= low) and (high is None or measured < high)
        bar = f">= {low:g}" if low is not None else f"< {high:g}"
        self.targets.append((name, measured, bar, met))


class Attempts:
    """Starts the parts of a benchmark until ``seconds`` are over; a part that fails is a remark of the report."""

    def __init__(self, report: Report, seconds: float) -> None:
        self._report, self._until = report, monotonic() + seconds

    def __call__(self, what: str, action: Callable[[], object]) -> None:
        problem = "no time is left"
        if monotonic() < self._until:
            try:
                action()
                return
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        self._report.remarks.append(f"{what}: not measured: {problem}")
        print(self._report.remarks[-1], file=sys.stderr, flush=True)


def run_threads(call: Call, clients: int, seconds: float) -> Load:
    """``clients`` threads in a closed loop, each calling ``call`` once at least, and again for about ``seconds``."""
    latencies: list[list[float]] = [[] for _ in range(clients)]
    stop = threading.Event()
    barrier = threading.Barrier(clients + 1)

    def client(mine: list[float]) -> None:
        barrier.wait()
        while not (mine and stop.is_set()):
            start = perf_counter()
            call()
            mine.append(perf_counter() - start)

    threads = [threading.Thread(target=client, args=(mine,)) for mine in latencies]
    for thread in threads:
        thread.start()
    barrier.wait()
    start = perf_counter()
    stop.wait(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return load_of([value for mine in latencies for value in mine], perf_counter() - start)


def scaled(call: Call, clients: int, count: int, seconds: float) -> Load:
    """``run_threads`` of a call that is ``count`` images: images per second, latencies of a call."""
    load = run_threads(call, clients, seconds)
    return Load(load.qps * count, load.p50, load.p99)


def load_of(latencies: Sequence[float], wall: float) -> Load:
    """Figures of latencies in seconds, measured within ``wall`` seconds."""
    ordered = sorted(latencies)
    last = len(ordered) - 1
    return Load(len(ordered) / wall, 1000 * ordered[last // 2], 1000 * ordered[min(last, int(0.99 * len(ordered)))])


def interleave(subjects: Mapping[str, Callable[[], Load]], rounds: int) -> dict[str, Load]:
    """The median of each figure over ``rounds``."""
    return medians(in_rounds(subjects, rounds))


def in_rounds(subjects: Mapping[str, Callable[[], Load]], rounds: int) -> dict[str, list[Load]]:
    """A load of each round; each round has all subjects, so a drift of the machine hits all."""
    loads: dict[str, list[Load]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            loads[name].append(subject())
    return loads


def medians(loads: Mapping[str, Sequence[Load]]) -> dict[str, Load]:
    """``median_load`` of each."""
    return {name: median_load(values) for name, values in loads.items()}


def median_load(loads: Sequence[Load]) -> Load:
    """The median of each figure on its own."""
    return Load(*(statistics.median(values) for values in zip(*(asdict(load).values() for load in loads), strict=True)))


def test_jpeg() -> bytes:
    """The image of the figures in the documentation: 500×375, quality 90, about 60 KB; deterministic."""
    return picture(500, 375)


def picture(width: int, height: int, suffix: str = ".jpg", quality: int = 90) -> bytes:
    """A file of another size or kind with the same content."""
    import cv2
    import numpy as np

    rng = np.random.default_rng(7)
    small = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
    image = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.int16)
    image += rng.normal(0, 7.5, image.shape).astype(np.int16)
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if suffix == ".jpg" else []
    encoded: Any = cv2.imencode(suffix, np.clip(image, 0, 255).astype(np.uint8), options)[1]
    return bytes(encoded)


def machine() -> dict[str, Any]:
    """What this ran on."""
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu_model(), "cores": cores, "python": platform.python_version(), "system": platform.platform()}


def python(*args: str, environment: Mapping[str, str] | None = None, **kwargs: Any) -> subprocess.Popen[str]:
    """This interpreter on ``args`` in a process of its own, with the checkout's packages and scripts importable."""
    env = {**os.environ, **(environment or {})}
    paths = [str(REPOSITORY), str(REPOSITORY / "server"), str(REPOSITORY / "scripts"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.Popen([sys.executable, *args], env=env, text=True, **kwargs)


def show(report: Report) -> None:
    """Print the table and whether each target is met."""
    print(f"\n{report.title}")
    width = max((len(row.what) for row in report.rows), default=0)
    print(f"  {'':{width}}  {'QPS':>9}  {'p50 ms':>8}  {'p99 ms':>8}")
    for row in report.rows:
        p50, p99 = (f"{value:8.2f}" if value is not None else " " * 8 for value in (row.p50, row.p99))
        print(f"  {row.what:{width}}  {row.qps:9.0f}  {p50}  {p99}  {row.note}".rstrip())
    for name, measured, bar, met in report.targets:
        print(f"  {'ok    ' if met else 'MISSED'} {name}: {measured:.2f} ({bar})")
    for remark in report.remarks:
        print(f"  {remark}")


def write_json(path: str, reports: Sequence[Report]) -> None:
    """Everything that was measured, with the machine."""
    content = {"machine": machine(), "command": sys.argv, "reports": [asdict(report) for report in reports]}
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
