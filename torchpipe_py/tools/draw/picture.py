"""Boxes and arrows of a planned pipeline as plain data, with their texts measured without a font."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from html import escape
from typing import Literal

from torchpipe_py.filters import ALIASES, BUILT_IN, serial_skip, subgraph_skip
from torchpipe_py.plan.build import Pipeline
from torchpipe_py.plan.graph import Graph, Hidden

Kind = Literal["next", "map", "jump", "skip"]


@dataclass(frozen=True)
class Box:
    """A node, with its texts as they are shown."""

    name: str
    backend: str
    """The expression as written."""
    instances: str
    """``"2"``, or ``"2&1"`` for a composition."""
    range: str
    """``"1..8"``; empty if unknown."""
    filter: str = ""
    """Empty if it is the default one."""
    alias_of: str = ""
    """The physical node of a logical one."""
    is_root: bool = False
    live: bool = False
    """Whether to keep room at the bottom for figures that a page fills in."""
    shared: bool = False
    """Whether an engine process runs it for all workers of a service."""


@dataclass(frozen=True)
class Arrow:
    """``next``, ``map`` and ``skip`` lead forward in one graph, ``jump`` leads to the root of any.

    A ``skip`` starts at the node with the filter and ends where the request goes on, ``""`` for the end of the graph.
    """

    start: str
    end: str
    kind: Kind
    label: str = ""

    @property
    def to_end(self) -> bool:
        return self.kind == "skip" and not self.end


@dataclass(frozen=True)
class Picture:
    """``boxes`` have unique names, in file order; apart from jumps, arrows form no cycle."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


@dataclass(frozen=True)
class Component:
    """The boxes that ``next``, ``map`` and ``skip`` connect, with the arrows among them."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]

    @property
    def heading(self) -> str:
        """The names of its roots."""
        entered = {arrow.end for arrow in self.arrows}
        roots = [box.name for box in self.boxes if box.is_root]
        roots = roots or [box.name for box in self.boxes if box.name not in entered]
        shown = ", ".join(roots[:4]) + (", …" if len(roots) > 4 else "")
        return f"{'root' if len(roots) == 1 else 'roots'} {shown}"

    @property
    def has_end(self) -> bool:
        """Whether a skip leads to the end of the graph, which is then drawn."""
        return any(arrow.to_end for arrow in self.arrows)


def split(picture: Picture) -> tuple[Component, ...]:
    """The connected graphs, in the order of their first boxes; jumps do not connect and are left out."""
    arrows = [arrow for arrow in picture.arrows if arrow.kind != "jump"]
    group = {box.name: index for index, box in enumerate(picture.boxes)}
    for arrow in arrows:
        first, second = sorted((group[arrow.start], group[arrow.start if arrow.to_end else arrow.end]))
        if first != second:
            group = {name: first if old == second else old for name, old in group.items()}
    return tuple(
        Component(
            tuple(box for box in picture.boxes if group[box.name] == index),
            tuple(arrow for arrow in arrows if group[arrow.start] == index),
        )
        for index in sorted(set(group.values()))
    )


def depict(pipeline: Pipeline, live: bool = False) -> Picture:
    """Nodes in file order; edges, maps, jumps, and where a node's filter may skip to.

    ``live`` keeps room for figures in the boxes of physical nodes.
    """
    graph = pipeline.graph
    boxes, arrows = [], []
    for name, plan in pipeline.plans.items():
        spec, limits = plan.spec, plan.batch_range()
        boxes.append(
            Box(
                name=spec.name,
                backend=plan.label,
                instances="&".join(map(str, spec.instance_num)),
                range="" if limits is None else f"{limits[0]}..{limits[1]}",
                filter=spec.filter or "",
                alias_of=spec.owner if spec.owner != spec.name else "",
                is_root=spec.name in graph.roots,
                live=live and spec.owner == spec.name,
                shared=spec.shared,
            )
        )
        arrows += [Arrow(name, after, "next") for after in graph.successors[name]]
        for source in spec.map:
            pairs = ", ".join(f"{key}:{new}" for key, new in source.pairs)
            sources = (source.node,) if source.node else graph.predecessors[name]
            arrows += [Arrow(before, name, "map", pairs) for before in sources]
        for target, labels in plan.jumps().items():
            arrows.append(Arrow(name, target, "jump", "; ".join(dict.fromkeys(filter(None, labels)))))
        filter_name = (spec.filter or "").lower()
        for hidden in _hidden(name, graph, filter_name):
            ends = [way_out.node for way_out in hidden.exits] + [""] * hidden.is_end
            arrows += [Arrow(name, end, "skip", filter_name) for end in ends]
    return Picture(pipeline.spec.place.source, tuple(boxes), tuple(arrows))


def _hidden(name: str, graph: Graph, filter_name: str) -> list[Hidden]:
    """The nodes that the filter may skip; for a custom filter both kinds, as far as they hide a node."""
    word = ALIASES.get(filter_name, filter_name)
    built_in = BUILT_IN.get(word)
    if not word or built_in not in (None, serial_skip, subgraph_skip):
        return []
    kinds = [] if built_in is subgraph_skip else [graph.serial_chain(name)]
    kinds += [] if built_in is serial_skip else [graph.subgraph(name)]
    return list({hidden.members: hidden for hidden in kinds if len(hidden.members) > 1}.values())


SMALL_SIZE, SMALL_LINE = 12.0, 16.0
LINES = {"name": 18.0, "soft": SMALL_LINE, "code": 15.0, "filter": SMALL_LINE}
"""Heights of the kinds of text in a box."""
LINE_COLUMNS = 28
PAD_X, PAD_Y = 12.0, 9.0
LEAST_WIDTH = 110.0
LIVE_WIDTH, LIVE_HEIGHT = 156.0, 42.0

# Characters that XML forbids, even escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_BREAKS = frozenset(",[&|;/ ")
_NARROW, _WIDE = frozenset("ijlft.,:;|!'`()[]{}/\\ I"), frozenset("mwMW@%#")


def clean(text: str) -> str:
    """One line without control characters."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))


def markup(text: str) -> str:
    """Escape text for content and attributes of HTML and XML."""
    return escape(clean(text), quote=True)


def columns(text: str) -> int:
    """Widths of one letter of a fixed-width font; ideographs take two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def wrap(text: str, limit: int = LINE_COLUMNS) -> tuple[str, ...]:
    """Lines of at most ``limit`` columns, broken after a comma or bracket if possible; never empty."""
    rest, lines = clean(text), []
    while columns(rest) > limit:
        fits = 1
        while columns(rest[: fits + 1]) <= limit:
            fits += 1
        good = max((at + 1 for at in range(fits) if rest[at] in _BREAKS), default=0)
        at = good if good > fits // 3 else fits
        lines.append(rest[:at].rstrip())
        rest = rest[at:].lstrip()
    return (*lines, rest) if rest or not lines else tuple(lines)


def text_width(text: str, size: float) -> float:
    """The width in a proportional font in pixels, estimated generously."""
    return size * sum(map(_em, text))


def _em(char: str) -> float:
    if char in _NARROW:
        return 0.4
    if char in _WIDE:
        return 0.95
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.72 if char.isupper() else 0.63


@dataclass(frozen=True)
class Face:
    """The lines of text in a box with their kinds, from top to bottom, and their size in pixels."""

    texts: tuple[tuple[str, str], ...]
    width: float
    height: float


def face(box: Box) -> Face:
    """Name, owner of an alias, expression, instances and range, filter; below is room for live figures."""
    texts = [
        ("name", box.name),
        ("soft", f"= {box.alias_of}" if box.alias_of else ""),
        ("code", box.backend),
        ("soft", f"x{box.instances} {box.range}"),
        ("soft", "shared" if box.shared else ""),
        ("filter", f"filter {box.filter}" if box.filter else ""),
    ]
    lines = tuple((kind, line) for kind, text in texts if text or kind in ("name", "code") for line in wrap(text))
    widths = [LIVE_WIDTH if box.live else LEAST_WIDTH]
    for kind, line in lines:
        width = 0.61 * 11.5 * columns(line) if kind == "code" else text_width(line, SMALL_SIZE)
        widths.append(2 * PAD_X + (width if kind != "name" else text_width(line, 14.0) * 1.06))
    height = sum(LINES[kind] for kind, _ in lines) + 2 * PAD_Y + (LIVE_HEIGHT if box.live else 0.0)
    return Face(lines, max(widths), height)
