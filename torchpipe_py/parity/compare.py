"""Numbers about arrays and about lists of numbers; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.parity.record import Bar, Compared, Difference, Parity, Prediction

AMPLIFICATION = 16
"""How much stronger than it is a difference is shown."""

VIEW_SIDE = 320
"""Pixels of the longer side, above which a picture is shrunk for the page."""

Z_95 = 1.959963984540054
"""Standard deviations that hold 95 % of a normal distribution."""

FIGURES = ("max", "mean", "share", "shift")
"""The fields of ``Difference``, in the order of every table."""


@dataclass(frozen=True)
class Spread:
    """One figure over all images; ``worst`` is the value farthest from 0, with its sign, found at ``worst_name``."""

    median: float
    mean: float
    worst: float
    worst_name: str


@dataclass(frozen=True)
class Agreement:
    """How often two sides name the same class: ``low`` and ``high`` bound the share by Wilson's 95 % interval.

    Score differences are absolute, over images with the same label on both sides; ``None`` without scores.
    """

    same: int
    total: int
    share: float
    low: float
    high: float
    score_mean: float | None
    score_max: float | None


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """B minus A; both float32 of the same shape, not empty."""
    delta = b - a
    distance = np.abs(delta)
    return Difference(
        max=float(distance.max()),
        mean=float(distance.mean(dtype=np.float64)),
        share=float(np.count_nonzero(distance > 1) / distance.size),
        shift=float(delta.mean(dtype=np.float64)),
    )


def spread(values: Sequence[float], names: Sequence[str]) -> Spread:
    """Of at least one value; ``names`` says which image each belongs to."""
    worst = max(range(len(values)), key=lambda index: abs(values[index]))
    return Spread(float(np.median(values)), float(np.mean(values)), values[worst], names[worst])


def spreads(compared: Sequence[Compared]) -> dict[str, Spread]:
    """A ``Spread`` for each figure of ``Difference``; empty where nothing was compared."""
    if not compared:
        return {}
    names = [image.name for image in compared]
    return {figure: spread([getattr(image.difference, figure) for image in compared], names) for figure in FIGURES}


def wilson(hits: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share, which stays within 0..1 and has a width even at ``hits == total``."""
    share, ratio = hits / total, z * z / total
    middle = (share + ratio / 2) / (1 + ratio)
    half = z / (1 + ratio) * math.sqrt(share * (1 - share) / total + ratio / (4 * total))
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    high = 1.0 if hits == total else min(1.0, middle + half)
    return low, high


def agreement(compared: Sequence[Compared]) -> Agreement | None:
    """Over the images that have a class on both sides; ``None`` without one."""
    pairs = [(image.a, image.b) for image in compared if image.a is not None and image.b is not None]
    if not pairs:
        return None
    same = [(a, b) for a, b in pairs if a.label == b.label]
    low, high = wilson(len(same), len(pairs))
    gaps = [abs(a.score - b.score) for a, b in same if a.score is not None and b.score is not None]
    return Agreement(
        same=len(same),
        total=len(pairs),
        share=len(same) / len(pairs),
        low=low,
        high=high,
        score_mean=sum(gaps) / len(gaps) if gaps else None,
        score_max=max(gaps, default=None),
    )


def disagreeing(compared: Sequence[Compared]) -> list[tuple[str, Prediction, Prediction]]:
    """Name and both predictions of each image the sides disagree about."""
    pairs = [(image.name, image.a, image.b) for image in compared]
    return [(name, a, b) for name, a, b in pairs if a is not None and b is not None and a.label != b.label]


def judge(parity: Parity, max_mean: float | None, min_agreement: float | None) -> list[Bar]:
    """The bars that were asked for; one without anything to hold against it is missed."""
    bars = []
    if max_mean is not None:
        mean = spreads(parity.compared)["mean"].mean if parity.compared else None
        ok = mean is not None and mean <= max_mean
        bars.append(Bar("--max-mean", max_mean, mean, len(parity.compared), ok))
    if min_agreement is not None:
        agreed = agreement(parity.compared)
        share, total = (agreed.share, agreed.total) if agreed else (None, 0)
        ok = share is not None and share >= min_agreement
        bars.append(Bar("--min-agreement", min_agreement, share, total, ok))
    return bars


def to_uint8(pixels: np.ndarray) -> np.ndarray:
    """Rounded and clipped to 0..255; of other than one or three channels only the first."""
    shown = pixels if pixels.shape[2] in (1, 3) else pixels[:, :, :1]
    rounded: np.ndarray = np.clip(np.rint(shown), 0, 255).astype(np.uint8)
    return rounded


def shrink(pixels: np.ndarray, reduce: Callable[..., Any], side: int = VIEW_SIDE) -> np.ndarray:
    """H×W×C with each k×k block made one value by ``reduce``, so that no side exceeds ``side``; k is the least."""
    height, width, channels = pixels.shape
    k = -(-max(height, width) // side)
    if k == 1:
        return pixels
    padded = np.pad(pixels, ((0, -height % k), (0, -width % k), (0, 0)), mode="edge")
    blocks = padded.reshape(padded.shape[0] // k, k, padded.shape[1] // k, k, channels)
    shrunk: np.ndarray = reduce(blocks, axis=(1, 3))
    return shrunk


def pictures(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and their amplified difference as uint8. A shrunk difference keeps the largest of each block."""
    amplified = shrink(np.abs(b - a), np.max) * AMPLIFICATION
    return to_uint8(shrink(a, np.mean)), to_uint8(shrink(b, np.mean)), to_uint8(amplified)


def histogram(values: Sequence[float], bins: int = 24) -> tuple[list[int], float]:
    """Counts in ``bins`` equal steps from 0 to the largest value, and that value; it lies in the last step."""
    top = max(values, default=0.0)
    if top == 0:
        return [len(values)] + [0] * (bins - 1), 0.0
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int(value / top * bins))] += 1
    return counts, top
