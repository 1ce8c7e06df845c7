"""Which layer a box stands in, and in which order from top to bottom, with few crossings."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

from torchpipe_py.drawing.picture import Arrow, Graph

SWEEPS = 24
# Where nothing else decides, skips run above the boxes and maps below.
SKIP, NEXT, MAP = 0, 1, 2
RANK = {"skip": SKIP, "next": NEXT, "map": MAP, "jump": 3}


@dataclass(frozen=True)
class Strand:
    """An arrow as the elements it passes, one in each layer: its start, bends, its end."""

    index: int
    arrow: Arrow
    elements: tuple[int, ...]

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """From and to of each step between two layers."""
        return tuple(pairwise(self.elements))


@dataclass(frozen=True)
class Layered:
    """Elements are numbers: ``range(len(graph.boxes))`` the boxes, then the end if there is one, then bends."""

    graph: Graph
    layers: tuple[tuple[int, ...], ...]
    strands: tuple[Strand, ...]

    @property
    def end(self) -> int | None:
        return len(self.graph.boxes) if self.graph.has_end else None

    @property
    def fixed(self) -> int:
        """How many elements are boxes or the end; from here on they are bends."""
        return len(self.graph.boxes) + self.graph.has_end

    def depths(self) -> dict[int, int]:
        """The layer of each element."""
        return {element: index for index, layer in enumerate(self.layers) for element in layer}

    def positions(self) -> dict[int, int]:
        """The place of each element in its layer."""
        return {element: index for layer in self.layers for index, element in enumerate(layer)}


def layered(graph: Graph) -> Layered:
    """Layers by the longest path; an arrow over several layers gets a bend in each, so that no box is in its way."""
    number = {box.name: index for index, box in enumerate(graph.boxes)}
    end_number = len(graph.boxes)
    edges = [(number[arrow.start], end_number if arrow.to_end else number[arrow.end]) for arrow in graph.arrows]
    depth = _depths(len(graph.boxes), edges)
    if graph.has_end:
        depth[end_number] = max(depth.values()) + 1
    strands: list[Strand] = []
    rank = dict.fromkeys(depth, NEXT)
    for index, (arrow, (start, end)) in enumerate(zip(graph.arrows, edges, strict=True)):
        bends = range(len(rank), len(rank) + depth[end] - depth[start] - 1)
        for step, bend in enumerate(bends, start=1):
            rank[bend] = SKIP if arrow.kind == "skip" else MAP
            depth[bend] = depth[start] + step
        strands.append(Strand(index, arrow, (start, *bends, end)))
    rows: list[list[int]] = [[] for _ in range(max(depth.values()) + 1)]
    for element in sorted(depth, key=lambda one: (rank[one], one)):
        rows[depth[element]].append(element)
    return Layered(graph, _ordered(rows, strands), tuple(strands))


def _depths(boxes: int, edges: Sequence[tuple[int, int]]) -> dict[int, int]:
    before: dict[int, set[int]] = {index: set() for index in range(boxes)}
    for start, end in edges:
        if end < boxes:
            before[end].add(start)
    depth: dict[int, int] = {}
    for element in TopologicalSorter(before).static_order():
        depth[element] = max((depth[one] + 1 for one in before[element]), default=0)
    return {index: depth[index] for index in range(boxes)}


def _ordered(rows: list[list[int]], strands: Sequence[Strand]) -> tuple[tuple[int, ...], ...]:
    """Barycentre sweeps, forth and back; the order with the fewest crossings seen."""
    before: dict[int, list[int]] = {element: [] for row in rows for element in row}
    after: dict[int, list[int]] = {element: [] for row in rows for element in row}
    for a, b in (step for strand in strands for step in strand.steps):
        after[a].append(b)
        before[b].append(a)
    best, fewest = [list(row) for row in rows], _crossings(rows, after)
    for sweep in range(SWEEPS):
        if fewest == 0:
            break
        if sweep % 2 == 0:
            for index in range(1, len(rows)):
                _sort_by_centre(rows[index], rows[index - 1], before)
        else:
            for index in range(len(rows) - 2, -1, -1):
                _sort_by_centre(rows[index], rows[index + 1], after)
        crossings = _crossings(rows, after)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return tuple(map(tuple, best))


def _sort_by_centre(row: list[int], beside: Sequence[int], neighbours: Mapping[int, Sequence[int]]) -> None:
    place = {element: index for index, element in enumerate(beside)}
    share = max(len(beside) - 1, 1) / max(len(row) - 1, 1)
    centres = {
        element: sum(place[n] for n in neighbours[element]) / len(neighbours[element])
        if neighbours[element]
        else index * share
        for index, element in enumerate(row)
    }
    row.sort(key=centres.__getitem__)


def _crossings(rows: Sequence[Sequence[int]], after: Mapping[int, Sequence[int]]) -> int:
    total = 0
    for row, following in pairwise(rows):
        place = {element: index for index, element in enumerate(following)}
        seen: list[int] = []
        for element in row:
            ends = [place[one] for one in after[element]]
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total
