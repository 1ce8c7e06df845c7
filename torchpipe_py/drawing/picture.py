"""What is drawn: boxes and arrows as plain data, ready to be laid out."""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

Kind = Literal["next", "map", "jump", "skip"]


@dataclass(frozen=True)
class Box:
    """A node; every text as it should be read."""

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
    """Whether to keep room at its foot for figures that a page fills in."""
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
    """``boxes`` in file order. ``ValueError`` for two boxes of one name, an arrow to nowhere, or a cycle."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]

    def __post_init__(self) -> None:
        names = {box.name for box in self.boxes}
        if len(names) < len(self.boxes):
            raise ValueError("two boxes have the same name")
        before: dict[str, list[str]] = {box.name: [] for box in self.boxes}
        for arrow in self.arrows:
            missing = {arrow.start, arrow.start if arrow.to_end else arrow.end} - names
            if missing:
                raise ValueError(f"no box {min(missing)!r}, but an arrow of kind {arrow.kind}")
            if arrow.kind != "jump" and not arrow.to_end:
                before[arrow.end].append(arrow.start)
        try:
            TopologicalSorter(before).prepare()
        except CycleError as error:
            raise ValueError(f"a cycle: {' -> '.join(error.args[1])}") from None


@dataclass(frozen=True)
class Component:
    """The boxes that ``next``, ``map`` and ``skip`` connect, with the arrows among them."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]

    @property
    def heading(self) -> str:
        """Its roots by name."""
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
    """The connected graphs, in the order of their first boxes; jumps connect nothing and are in none."""
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
