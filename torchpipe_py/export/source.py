"""A model that is to be exported, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchpipe_py.export.transforms import Transform

PRETRAINED = "pretrained"
UNTRAINED = "random"
"""Words in the place of a file of weights."""


@dataclass(frozen=True)
class Source:
    """``weights`` and ``origin``, whose preprocessing it is, are words for the user."""

    name: str
    model: Any
    weights: str
    transform: Transform
    origin: str
    labels: tuple[str, ...] = ()
