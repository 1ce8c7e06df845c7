"""The pictures of a pair of images and of their difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torchpipe_py.tools.compare_models.figures import Compared

AMPLIFICATION = 16
"""Factor by which shown differences are amplified."""

VIEW_SIDE = 320
"""Longer side in pixels above which a picture is shrunk for the page."""


class WorstViews:
    """The ``pictures`` of the images with the largest mean difference, by name: of A, of B and of the difference."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._worst: list[tuple[float, str]] = []
        self.pictures: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def keep(self, image: Compared, a: np.ndarray, b: np.ndarray) -> None:
        """Keep the pictures of a pair if it is among the worst so far; earlier ones win ties."""
        if image.difference is None or image.difference.mean == 0:
            return
        ranked = sorted([*self._worst, (image.difference.mean, image.name)], key=lambda each: -each[0])
        self._worst = ranked[: self._most]
        names = [name for _, name in self._worst]
        if image.name in names:
            self.pictures[image.name] = pictures(a, b)
        self.pictures = {name: self.pictures[name] for name in names}


def shrink(pixels: np.ndarray, reduce: Callable[..., Any], side: int = VIEW_SIDE) -> np.ndarray:
    """H×W×C with each k×k block reduced to one value, with the least k so that no side exceeds ``side``."""
    height, width, channels = pixels.shape
    k = -(-max(height, width) // side)
    if k == 1:
        return pixels
    padded = np.pad(pixels, ((0, -height % k), (0, -width % k), (0, 0)), mode="edge")
    blocks = padded.reshape(padded.shape[0] // k, k, padded.shape[1] // k, k, channels)
    shrunk: np.ndarray = reduce(blocks, axis=(1, 3))
    return shrunk


def pictures(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and their amplified difference as uint8; only the first channel unless there are one or three.

    A shrunk difference keeps the largest value of each block.
    """
    shown = shrink(a, np.mean), shrink(b, np.mean), shrink(np.abs(b - a), np.max) * AMPLIFICATION
    some = (each if each.shape[2] in (1, 3) else each[:, :, :1] for each in shown)
    first, second, third = (np.clip(np.rint(each), 0, 255).astype(np.uint8) for each in some)
    return first, second, third
