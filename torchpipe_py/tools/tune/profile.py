"""What each node takes alone: batches, threads and processes, measured twice in turns."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torchpipe_py.tools.report import ToolError
from torchpipe_py.tools.tune.shapes import Candidate, Shape, knobs_of
from torchpipe_py.tools.tune.simulate import Cost
from torchpipe_py.tools.tune.worker import Captured, Worker, ask_all

LADDER = (1, 2, 4, 8, 16, 32)
GAIN = 0.05
"""Of an item's time: a larger batch that gains less ends the ladder."""

DRIFT = 0.1
"""Between the two measurements of a cell: more is noise."""

_HEAD_START_S = 0.02
_CELL_S = 0.12

Items = list[tuple[tuple[int, int], ...]]
Run = tuple[list[tuple[int, int]], float]


@dataclass(frozen=True)
class Cell:
    """One thing to measure: a unit with so many threads of its model, in batches, instances and processes."""

    unit: str
    threads: int
    size: int = 1
    instances: int = 1
    processes: int = 1


@dataclass
class Figures:
    """A cell's measurements: every batch, and of each round seconds of an item, and how many cores were busy.

    ``delays`` are the shares of the time in which other programs had the core.
    """

    seconds: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Items per second of all instances and processes."""
        return 1 / statistics.median(self.seconds)

    @property
    def drift(self) -> float:
        """How far the rounds are apart, as a share of the fastest."""
        return max(self.seconds) / min(self.seconds) - 1


@dataclass
class Profile:
    """All cells, and what the images did: ``captured`` by shape; ``choices`` by unit and setting what was measured."""

    cores: int
    captured: dict[str, Captured] = field(default_factory=dict)
    cells: dict[Cell, Figures] = field(default_factory=dict)
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def noisy(self) -> list[Cell]:
        """Cells whose rounds differ by more than ``DRIFT``."""
        return [cell for cell, figures in self.cells.items() if figures.drift > DRIFT]

    @property
    def noise(self) -> float:
        """The drift of the middle cell."""
        drifts = [figures.drift for figures in self.cells.values()]
        return statistics.median(drifts) if drifts else 0.0

    @property
    def disturbed(self) -> float:
        """The share of the time in which other programs had the cores."""
        delays = [delay for figures in self.cells.values() for delay in figures.delays]
        return statistics.mean(delays) if delays else 0.0

    def threads_of(self, unit: str) -> list[int]:
        """What was measured of a unit."""
        return sorted({cell.threads for cell in self.cells if cell.unit == unit})

    def sizes_of(self, unit: str, threads: int) -> list[int]:
        """Batches that were measured."""
        single = [cell for cell in self.cells if (cell.unit, cell.threads) == (unit, threads)]
        return sorted({cell.size for cell in single if cell.instances == cell.processes == 1})

    def cost(self, unit: str, threads: float, images: int) -> Cost:
        """What the simulation needs of a unit; ``threads`` is taken as the next number that was measured."""
        known = self.threads_of(unit)
        count = min(known, key=lambda each: abs(each - threads))
        alone: dict[tuple[int, int], list[float]] = defaultdict(list)
        base = self.cells[Cell(unit, count)]
        for (name,), seconds in ((tuple(names), seconds) for names, seconds in base.runs):
            alone[name].append(seconds)
        times: list[list[float]] = [[] for _ in range(images)]
        for (image, _), measured in sorted(alone.items()):
            times[image].append(statistics.median(measured))
        one = base.seconds
        ladder = {
            size: self._each(Cell(unit, count, size)) / statistics.median(one) for size in self.sizes_of(unit, count)
        }
        lock, slowing = self.neighbours(unit)
        cores = statistics.median(base.cores)
        return Cost(times, ladder, max(0.01, cores), lock, slowing, self.limits[unit])

    def _each(self, cell: Cell) -> float:
        return statistics.median(self.cells[cell].seconds)

    def neighbours(self, unit: str) -> tuple[float, float]:
        """How much longer a batch takes for each neighbour in its process by the lock, and for each one anywhere."""
        locks, slowings = [], []
        for cell, figures in self.cells.items():
            if cell.unit != unit or cell.processes == 1:
                continue
            number, alone = cell.processes, self.cells[Cell(unit, cell.threads, cell.size)]
            slowing = max(0.0, (number * alone.rate / figures.rate - 1) / (number - 1))
            together = self.cells.get(Cell(unit, cell.threads, cell.size, instances=number))
            slowings.append(slowing)
            if together:
                locks.append(max(0.0, (figures.rate / together.rate - 1) / (number - 1) * (1 + slowing * (number - 1))))
        return (statistics.mean(locks) if locks else 0.0), (statistics.mean(slowings) if slowings else 0.0)

    def costs(self, candidate: Candidate, images: int) -> dict[str, Cost]:
        """By node of the candidate."""
        costs = {}
        for node, unit in candidate.shape.units.items():
            threads = candidate.value(node, "threads")
            sharing = int(candidate.value(node, "instance_num")) * candidate.workers
            cost = self.cost(unit, threads or max(1, self.cores // sharing), images)
            visits = self.captured[candidate.shape.name].visits[node]
            for image in range(images):
                if not visits[image]:
                    cost.times[image].clear()  # type: ignore[attr-defined]
                elif not cost.times[image]:
                    known = [each for visit in cost.times for each in visit]
                    cost.times[image].extend([statistics.mean(known)] * visits[image])  # type: ignore[attr-defined]
            costs[node] = cost
        return costs


class Profiler:
    """Measures the units of all shapes in processes of its own; ``workers`` has one for each core."""

    def __init__(self, shapes: Sequence[Shape], workers: Sequence[Worker], seconds: float) -> None:
        self.profile = Profile(len(workers))
        self._shapes, self._workers, self._seconds = shapes, workers, seconds

    def capture(self) -> None:
        """Run the images through each shape in each process, and keep what reaches the nodes."""
        for shape in self._shapes:
            captured, *_ = ask_all(self._workers, "capture", shape.config, dict(shape.units))
            self.profile.captured[shape.name] = captured
            for node, unit in shape.units.items():
                self.profile.names.setdefault(unit, node if shape is self._shapes[0] else f"{node} ({shape.name})")

    def prepare(self, has_gpu: bool) -> list[Cell]:
        """Set up instances of each unit alone; the cells to begin with."""
        cells: list[Cell] = []
        cores = len(self._workers)
        for shape in self._shapes:
            for node, unit in shape.units.items():
                if unit in self.profile.limits or not any(self.profile.captured[shape.name].visits[node]):
                    continue
                knobs = knobs_of(shape.pipeline.plans[node], has_gpu)
                settings: dict[str, Any] = {"max": LADDER[-1]} if "max" in knobs else {}
                for threads in (1, cores) if "threads" in knobs else (0,):
                    count = cores if threads < 2 else 1
                    settings["instance_num"] = count
                    config = shape.alone(node, **settings, **({"threads": threads} if threads else {}))
                    limits, *_ = ask_all(self._workers, "prepare", unit, config, threads, count)
                    self.profile.limits[unit] = limits
                    cells.append(Cell(unit, threads))
                    if threads < 2:
                        cells += [Cell(unit, threads, 1, cores, 1), Cell(unit, threads, 1, 1, cores)]
        return cells

    def measure(self, cells: list[Cell], progress: Callable[[str, float], None]) -> None:
        """Two rounds over all cells; the first one climbs each ladder, and the second repeats what it found."""
        began, done = perf_counter(), 0
        for rounds in range(2):
            for cell in cells:
                self._measure(cell)
                done += 1
                progress("profile", done / (2 * len(cells)))
                if not rounds:
                    larger = self._next(cell)
                    late = perf_counter() - began > self._seconds / 2
                    if larger is not None and not late:
                        cells.append(larger)  # NOTE: the loop goes on to it

    def _next(self, cell: Cell) -> Cell | None:
        """The next step of the ladder, where the last one gained enough."""
        if cell.instances > 1 or cell.processes > 1:
            return None
        size = cell.size * 2
        if size > self.profile.limits[cell.unit][1]:
            return None
        if cell.size > 1:
            smaller = Cell(cell.unit, cell.threads, cell.size // 2)
            each, before = (self.profile.cells[one].seconds[0] for one in (cell, smaller))
            if each > before * (1 - GAIN):
                return None
        return Cell(cell.unit, cell.threads, size)

    def _measure(self, cell: Cell) -> None:
        chosen = self._workers[: cell.processes]
        start = perf_counter() + (_HEAD_START_S if len(chosen) > 1 else 0.0)
        what = cell.unit, cell.threads, cell.size, cell.instances
        answers = ask_all(chosen, "measure", *what, _CELL_S, start)
        figures = self.profile.cells.setdefault(cell, Figures())
        rate = cores = delays = 0.0
        for runs, cpu, delay in answers:
            if not runs:
                raise ToolError("a node computed nothing")
            busy = sum(seconds for _, seconds in runs)
            rate += cell.instances * sum(len(names) for names, _ in runs) / busy
            cores += cpu / busy * cell.instances
            delays += delay / (busy + delay)
            figures.runs += runs
        figures.seconds.append(1 / rate)
        figures.cores.append(cores / len(answers))
        figures.delays.append(delays / len(answers))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            with suppress(OSError):
                worker.close()
