"""What a comparison finds: data only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from torchpipe_py.errors import TorchpipeError

ACCEPTED = ""
"""In the place of a reason: this side gave a result."""


class ParityError(TorchpipeError):
    """A comparison that cannot be made; the message names the directory, file or configuration at fault."""


@dataclass(frozen=True)
class Difference:
    """B minus A over all values of one image, on the 0..255 scale.

    ``max`` and ``mean`` are absolute, ``share`` is that of values more than 1 apart, ``shift`` the signed mean:
    positive where B is brighter.
    """

    max: float
    mean: float
    share: float
    shift: float


@dataclass(frozen=True)
class Prediction:
    """The class a model says, and its score where the model gives one."""

    label: str | int
    score: float | None = None

    def __str__(self) -> str:
        return f"{self.label}" if self.score is None else f"{self.label} ({self.score:.4f})"


@dataclass(frozen=True)
class Compared:
    """An image both sides gave a result of the same shape for, or a class; predictions too where a model read both.

    ``truth`` is the class that its folder or name says, where images are labelled.
    """

    name: str
    difference: Difference | None
    a: Prediction | None = None
    b: Prediction | None = None
    truth: str | None = None


@dataclass(frozen=True)
class Refused:
    """An image without a result on one side or both, and why; ``ACCEPTED`` on a side that gave one."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class ShapesDiffer:
    """An image whose results have different shapes, H×W×C."""

    name: str
    a: tuple[int, ...]
    b: tuple[int, ...]


@dataclass(frozen=True)
class View:
    """Pictures of one pair: uint8, RGB or gray, shrunk to what a page shows; ``amplified`` is the difference."""

    name: str
    a: np.ndarray
    b: np.ndarray
    amplified: np.ndarray


@dataclass(frozen=True)
class Bar:
    """A limit asked for on the command line, and ``value`` over so many ``images``; ``None`` over none."""

    option: str
    limit: float
    value: float | None
    images: int
    ok: bool


@dataclass
class Parity:
    """Everything found out about one directory; ``worst`` and ``views`` have the largest mean difference first."""

    img_dir: str
    a: str
    b: str
    model: str | None
    found: int
    compared: list[Compared] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    shapes_differ: list[ShapesDiffer] = field(default_factory=list)
    unclassified: list[Refused] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    worst: list[Compared] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
