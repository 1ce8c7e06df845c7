"""Heights, ports and vertical places of the elements of one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from torchpipe_py.drawing.layers import RANK, Layered
from torchpipe_py.drawing.text import SMALL_LINE, Face

BOX_SPACE, BEND_SPACE = 26.0, 16.0
END_SIZE = 22.0
SLOT = 14.0
LABEL_SPACE = 8.0
SWEEPS = 10
# How much an element insists on its place: a chain of next arrows stays straight, whatever runs beside it.
FIRM, LOOSE = 1.0, 0.0005


@dataclass(frozen=True)
class Slot:
    """One arrow's place on a side of a box; ``index`` is the strand's, or the key of the jump."""

    index: int
    order: tuple[int, int, int]
    height: float
    main: bool


@dataclass(frozen=True)
class Sides:
    """Offsets of the arrows from the middle of their element, by element and index, and the height they need."""

    right: Mapping[tuple[int, int], float]
    left: Mapping[tuple[int, int], float]
    height: Mapping[int, float]


def label_height(lines: Sequence[str]) -> float:
    return len(lines) * SMALL_LINE + LABEL_SPACE if lines else SLOT


def sides(
    graph: Layered,
    labels: Sequence[Sequence[str]],
    jumps_out: Mapping[int, Sequence[int]],
    jumps_in: Mapping[int, Sequence[int]],
) -> Sides:
    """Arrows leave at the right and enter at the left, in the order of what they lead to; labels stand at the entry.

    ``labels`` are lines by the strands' index; ``jumps_out`` and ``jumps_in`` the keys of the jumps at an element.
    """
    place = graph.positions()
    out: dict[int, list[Slot]] = {element: [] for element in place}
    into: dict[int, list[Slot]] = {element: [] for element in place}
    for strand in graph.strands:
        main = strand.arrow.kind == "next"
        for a, b in strand.steps:
            order = (RANK[strand.arrow.kind], strand.index)
            last = b == strand.elements[-1]
            height = label_height(labels[strand.index] if last else ())
            out[a].append(Slot(strand.index, (place[b], *order), SLOT, main))
            into[b].append(Slot(strand.index, (place[a], *order), height, main))
    for slots, jumps in ((out, jumps_out), (into, jumps_in)):
        for element, indices in jumps.items():
            slots[element] += [Slot(index, (len(place), RANK["jump"], index), SLOT, False) for index in indices]
    right: dict[tuple[int, int], float] = {}
    left: dict[tuple[int, int], float] = {}
    needed: dict[int, float] = {}
    for element in place:
        if element >= graph.fixed:
            # A bend belongs to one strand and is a point.
            right[element, out[element][0].index] = left[element, into[element][0].index] = needed[element] = 0.0
        else:
            needed[element] = 2 * max(_spread(element, out[element], right), _spread(element, into[element], left))
    return Sides(right, left, needed)


def _spread(element: int, slots: list[Slot], offsets: dict[tuple[int, int], float]) -> float:
    """Stack the slots, the next arrows around the middle; returns half the height that takes."""
    slots = sorted(slots, key=lambda slot: slot.order)
    tops, y = [], 0.0
    for slot in slots:
        tops.append(y)
        y += slot.height
    lines = [top + slot.height - SLOT / 2 for top, slot in zip(tops, slots, strict=True)]
    main = [line for line, slot in zip(lines, slots, strict=True) if slot.main] or lines
    middle = sum(main) / len(main) if main else 0.0
    for slot, line in zip(slots, lines, strict=True):
        offsets[element, slot.index] = line - middle
    return max(middle, y - middle)


def heights(graph: Layered, faces: Sequence[Face], ports: Sides) -> dict[int, float]:
    """Of every element; a bend has none."""
    tall = {element: ports.height[element] for layer in graph.layers for element in layer}
    for index, face in enumerate(faces):
        tall[index] = max(tall[index], face.height)
    if graph.end is not None:
        tall[graph.end] = max(tall[graph.end], END_SIZE)
    return tall


def middles(graph: Layered, tall: Mapping[int, float], ports: Sides) -> dict[int, float]:
    """The y of each element's middle: near its neighbours, in order, and apart from each other."""
    before: dict[int, list[tuple[int, float, float]]] = {element: [] for element in tall}
    after: dict[int, list[tuple[int, float, float]]] = {element: [] for element in tall}
    weight = {element: FIRM if element < len(graph.graph.boxes) else LOOSE for element in tall}
    for strand in graph.strands:
        firm = FIRM if strand.arrow.kind == "next" else LOOSE
        for a, b in strand.steps:
            shift = ports.right[a, strand.index] - ports.left[b, strand.index]
            after[a].append((b, -shift, firm))
            before[b].append((a, shift, firm))
            weight[b] = max(weight[b], firm / 2)
    y = dict.fromkeys(tall, 0.0)
    both = {element: before[element] + after[element] for element in tall}
    passes = [before, after] * SWEEPS + [both, both]
    for neighbours in passes:
        for layer in graph.layers if neighbours is not after else reversed(graph.layers):
            wanted = [_wanted(y, element, neighbours[element]) for element in layer]
            settled = _apart(wanted, [weight[element] for element in layer], _distances(graph, layer, tall))
            y.update(zip(layer, settled, strict=True))
    _straighten(graph, tall, y)
    return y


def _straighten(graph: Layered, tall: Mapping[int, float], y: dict[int, float]) -> None:
    """Give the bends of a strand one height where their layers have room for it, else as few as possible."""
    layer_of, place = graph.depths(), graph.positions()
    spaces = [_distances(graph, layer, tall) for layer in graph.layers]
    for strand in graph.strands:
        run: list[int] = []
        low, high = -inf, inf
        for bend in strand.elements[1:-1]:
            layer, at, space = graph.layers[layer_of[bend]], place[bend], spaces[layer_of[bend]]
            least = y[layer[at - 1]] + space[at - 1] if at else -inf
            most = y[layer[at + 1]] - space[at] if at + 1 < len(layer) else inf
            if max(low, least) > min(high, most):
                _level(run, low, high, y)
                run, low, high = [], -inf, inf
            run.append(bend)
            low, high = max(low, least), min(high, most)
        _level(run, low, high, y)


def _level(run: Sequence[int], low: float, high: float, y: dict[int, float]) -> None:
    if run:
        y.update(dict.fromkeys(run, min(max(sum(y[bend] for bend in run) / len(run), low), high)))


def _wanted(y: Mapping[int, float], element: int, neighbours: Sequence[tuple[int, float, float]]) -> float:
    if not neighbours:
        return y[element]
    return sum((y[one] + shift) * firm for one, shift, firm in neighbours) / sum(firm for _, _, firm in neighbours)


def _distances(graph: Layered, layer: Sequence[int], tall: Mapping[int, float]) -> list[float]:
    """Between the middles of each element and the next."""
    found = []
    for a, b in pairwise(layer):
        space = BOX_SPACE if a < graph.fixed and b < graph.fixed else BEND_SPACE
        found.append(tall[a] / 2 + space + tall[b] / 2)
    return found


def _apart(wanted: Sequence[float], weights: Sequence[float], distances: Sequence[float]) -> list[float]:
    """The places nearest to those wanted, by weighted squares, that keep the distances (pool adjacent violators)."""
    shifts = [0.0]
    for distance in distances:
        shifts.append(shifts[-1] + distance)
    pools: list[tuple[float, float, int]] = []
    for want, weight, shift in zip(wanted, weights, shifts, strict=True):
        mean, total, count = want - shift, weight, 1
        while pools and pools[-1][0] > mean:
            other, heavy, many = pools.pop()
            mean = (mean * total + other * heavy) / (total + heavy)
            total, count = total + heavy, count + many
        pools.append((mean, total, count))
    places = [mean for mean, _, count in pools for _ in range(count)]
    return [place + shift for place, shift in zip(places, shifts, strict=True)]
