"""Measures each node alone with several batch sizes, threads and processes, twice in turns."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from torchpipe_py.tools.report import ToolError, printable
from torchpipe_py.tools.tune.shapes import Candidate, Shape, knobs_of
from torchpipe_py.tools.tune.simulate import Cost
from torchpipe_py.tools.tune.worker import CAPTURED, Captured, Team

LADDER = (1, 2, 4, 8, 16, 32)
GAIN = 0.05
"""Share of an item's time: larger batches are tried until a fourfold one gains less."""

DRIFT = 0.1
"""Relative difference between early and late measurements of a cell; more is noise."""

MOST_ROUNDS = 8
MOST_ON_GPU = 4
"""Instances and processes of a node alone where there is a GPU: to start more takes minutes."""

_HEAD_START_S = 0.02
_CELL_S = 0.06
_LONGEST = 2.0  # factor by which one run of all images may exceed the time to profile

Run = tuple[list[tuple[int, int]], float]


@dataclass(frozen=True)
class Cell:
    """One combination to measure: a unit with threads of its model, batch size, instances and processes."""

    unit: str
    threads: int
    size: int = 1
    instances: int = 1
    processes: int = 1


@dataclass
class Figures:
    """A cell's measurements: every batch, and per round the seconds of an item and the number of busy cores."""

    seconds: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def times(self, other: Figures) -> float:
        """How many times as long an item takes as in ``other``, in the same rounds: a machine varies between them."""
        return statistics.median(one / two for one, two in zip(self.seconds, other.seconds, strict=False))

    @property
    def drift(self) -> float:
        """The relative difference of later to earlier rounds."""
        half = len(self.seconds) // 2
        return abs(statistics.median(self.seconds[half:]) / statistics.median(self.seconds[:half]) - 1)


@dataclass
class Profile:
    """All cells, and the captured images by shape; ``limits`` and ``names`` are by unit."""

    cores: int
    captured: dict[str, Captured] = field(default_factory=dict)
    cells: dict[Cell, Figures] = field(default_factory=dict)
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def threads_of(self, unit: str) -> list[int]:
        """The measured numbers of threads of a unit."""
        return sorted({cell.threads for cell in self.cells if cell.unit == unit})

    def sizes_of(self, unit: str, threads: int) -> list[int]:
        """The measured batch sizes."""
        return sorted({cell.size for cell in self.cells if cell == Cell(unit, threads, cell.size)})

    def cost(self, unit: str, threads: float, visits: Sequence[int]) -> Cost:
        """The costs of a unit for the simulation; ``threads`` is rounded to the next measured number.

        Visits that were not measured take the mean of the others.
        """
        count = min(self.threads_of(unit), key=lambda each: abs(each - threads))
        alone: dict[tuple[int, int], list[float]] = defaultdict(list)
        base = self.cells[Cell(unit, count)]
        for names, seconds in base.runs:
            alone[names[0]].append(seconds)
        each = {item: statistics.median(measured) for item, measured in alone.items()}
        mean = statistics.mean(each.values())
        times = [[each.get((image, visit), mean) for visit in range(number)] for image, number in enumerate(visits)]
        cores = max(0.01, statistics.median(base.cores))
        return Cost(times, self.ladder(unit, count), cores, *self.neighbours(unit), self.limits[unit])

    def ladder(self, unit: str, threads: int) -> tuple[float, float]:
        """The share of its time alone that an item takes, and the fixed part per batch: a fit over all measurements.

        A single cell may be off by more than batches gain.
        """
        sizes = self.sizes_of(unit, threads)
        if len(sizes) == 1:
            return 1.0, 0.0
        each = [statistics.median(self.cells[Cell(unit, threads, size)].seconds) for size in sizes]
        batch, item = statistics.linear_regression([1 / size for size in sizes], each)
        batch = max(0.0, batch)
        return item / (item + batch), batch / (item + batch)

    def neighbours(self, unit: str) -> tuple[float, float]:
        """How much longer a batch takes for each neighbour in its process (the GIL), and for each one anywhere."""
        locks, slowings = [], []
        for cell, figures in self.cells.items():
            if cell.unit != unit or cell.processes == 1:
                continue
            number, alone = cell.processes, self.cells[Cell(unit, cell.threads, cell.size)]
            slowing = max(0.0, (number * figures.times(alone) - 1) / (number - 1))
            together = self.cells.get(Cell(unit, cell.threads, cell.size, instances=number))
            slowings.append(slowing)
            if together:
                locks.append(max(0.0, (together.times(figures) - 1) / (number - 1) * (1 + slowing * (number - 1))))
        return (statistics.mean(locks) if locks else 0.0), (statistics.mean(slowings) if slowings else 0.0)

    def costs(self, candidate: Candidate) -> dict[str, Cost]:
        """The costs of each node of the candidate."""
        costs = {}
        for node, unit in candidate.shape.units.items():
            visits = self.captured[candidate.shape.twin].visits[node]
            if unit not in self.limits:  # no image reaches it
                costs[node] = Cost([[] for _ in visits])
                continue
            threads = candidate.value(node, "threads")
            is_shared = candidate.engines and candidate.shape.pipeline.plans[node].spec.shared
            sharing = int(candidate.value(node, "instance_num")) * (
                candidate.engines if is_shared else candidate.workers
            )
            costs[node] = self.cost(unit, threads or max(1, self.cores // sharing), visits)
        return costs


class Profiler:
    """Measures the units of all shapes, in about the given seconds."""

    def __init__(self, shapes: list[Shape], team: Team, seconds: float, images: Sequence[str]) -> None:
        self.profile = Profile(len(team))
        self._shapes, self._team, self._seconds, self._images = shapes, team, seconds, images
        self._most = min(len(team), MOST_ON_GPU) if team.has_gpu else len(team)

    def capture(self) -> dict[str, str]:
        """Run the images through each shape in all processes that measure, and keep the inputs of the nodes.

        Removes alternatives from the shapes that cannot run here; returns the reasons by name. Raises ``ToolError`` if
        an image has no result otherwise.
        """
        failed: dict[str, str] = {}
        for shape in [each for each in self._shapes if each.twin == each.name]:
            try:
                longest = _LONGEST * self._seconds
                free = self._team.gpu_free()
                self._team.all("start", shape.config, dict(shape.units), longest, most=self._most)
                used = max(0, free - self._team.gpu_free()) // self._most
                captured = self._team.all("capture", longest, most=1)[0]  # alone: how long a single request takes
                self._team.each("capture", [(longest,)] * (self._most - 1), 1)
                if captured.failed is not None:
                    number, why = captured.failed
                    raise ToolError(f"{printable(self._images[number])} has no result: {why}")
            except ToolError as error:
                if not shape.alternative:
                    raise
                self._team.all("drop", CAPTURED, most=self._most)
                failed[shape.name] = str(error)
                continue
            self.profile.captured[shape.name] = replace(captured, gpu_bytes=used)
            for node, unit in shape.units.items():
                self.profile.names.setdefault(unit, node if shape is self._shapes[0] else f"{node} ({shape.name})")
        self._shapes[:] = [shape for shape in self._shapes if shape.twin not in failed]
        return failed

    def prepare(self, has_gpu: bool) -> list[Cell]:
        """Set up instances of each unit alone; returns the first cells."""
        cells: list[Cell] = []
        cores, most = self.profile.cores, self._most
        for shape in self._shapes:
            for node, unit in shape.units.items():
                if unit in self.profile.limits or not any(self.profile.captured[shape.twin].visits[node]):
                    continue
                knobs = knobs_of(shape.pipeline.plans[node], has_gpu)
                for threads in (1, cores) if "threads" in knobs else (0,):
                    settings = {"threads": threads} if threads else {}
                    counts = [most if threads < 2 else 1] + [1] * (most - 1)
                    larger = {"max": LADDER[-1]} if "max" in knobs else {}
                    try:
                        self._set_up(shape, node, counts, settings | larger)
                    except ToolError:  # its batches are fixed, or take too much memory
                        if not larger:
                            raise
                        self._set_up(shape, node, counts, settings)
                    cells.append(Cell(unit, threads))
                    if threads < 2:
                        cells += [Cell(unit, threads, 1, most, 1), Cell(unit, threads, 1, 1, most)]
        return cells

    def _set_up(self, shape: Shape, node: str, counts: Sequence[int], settings: dict[str, int]) -> None:
        """Set up so many instances of a node alone in the processes."""
        unit, threads = shape.units[node], settings.get("threads", 0)
        asked = [(unit, shape.alone(node, instance_num=count, **settings), threads, count) for count in counts]
        self.profile.limits[unit] = self._team.each("prepare", asked)[0]

    def measure(self, cells: list[Cell], progress: Callable[[str, float], None]) -> None:
        """Measure all cells in at least two rounds, after a warm-up; the first round adds larger batches.

        A shared machine varies in speed, so each cell should meet it slow and fast.
        """
        for cell in cells:
            if cell.processes > 1:
                self._run(cell)
        began = perf_counter()
        for done, cell in enumerate(cells):
            is_measured = self._measure(cell)
            progress("profile", done / (2 * len(cells)))
            larger = self._next(cell) if is_measured else None
            if larger is not None and perf_counter() - began < self._seconds / 2:
                cells.append(larger)  # NOTE: this loop continues with it
        first = perf_counter() - began
        for _ in range(1, MOST_ROUNDS):
            for cell in list(self.profile.cells):
                self._measure(cell)
            passed = perf_counter() - began
            progress("profile", passed / self._seconds)
            if passed + first > self._seconds:
                break

    def _next(self, cell: Cell) -> Cell | None:
        """The cell with the next larger batch, if the last step gained enough."""
        size = cell.size * 2
        if cell.instances > 1 or cell.processes > 1 or size > self.profile.limits[cell.unit][1]:
            return None
        smaller = self.profile.cells.get(Cell(cell.unit, cell.threads, cell.size // 4))
        if smaller and self.profile.cells[cell].seconds[0] > smaller.seconds[0] * (1 - GAIN):
            return None
        return Cell(cell.unit, cell.threads, size)

    def _run(self, cell: Cell) -> list[tuple[list[Run], float]]:
        start = perf_counter() + (_HEAD_START_S if cell.processes > 1 else 0.0)
        what = cell.unit, cell.threads, cell.size, cell.instances
        try:
            return self._team.all("measure", *what, _CELL_S, start, most=cell.processes)
        except ToolError as error:
            raise ToolError(f"node {self.profile.names[cell.unit]} alone: {error}") from None

    def _measure(self, cell: Cell) -> bool:
        """Whether it can be measured: larger batches may take too much memory."""
        try:
            measured = self._run(cell)
        except ToolError:
            if cell.size == 1:
                raise
            self.profile.cells.pop(cell, None)
            return False
        rate = cores = 0.0
        figures = self.profile.cells.setdefault(cell, Figures())
        for runs, cpu in measured:
            busy = sum(seconds for _, seconds in runs)
            rate += cell.instances * sum(len(names) for names, _ in runs) / busy
            cores += cpu / busy * cell.instances / cell.processes
            figures.runs += runs
        figures.seconds.append(1 / rate)
        figures.cores.append(cores)
        return True
