"""How far two versions differ: by the values of an image or an output, and by the classes of all images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import PurePath

import numpy as np

from torchpipe_py.backends.image.files import label_of
from torchpipe_py.tools.statistics import paired_interval, wilson_interval

FIGURES = ("max", "mean", "share", "shift")
"""The fields of ``Difference``, in the order of every table."""


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
    """A predicted class, with its score if the model gives one.

    ``ranking`` has all classes of a model that gives several, the best first; without any, ``label`` is ``None``.
    """

    label: str | int | None
    score: float | None = None
    ranking: tuple[str | int | None, ...] | None = None

    def __str__(self) -> str:
        if self.label is None:
            return "no class"
        return f"{self.label}" if self.score is None else f"{self.label} ({self.score:.4f})"

    def with_labels(self, labels: Sequence[str]) -> Prediction:
        """The same with the label of each class in place of its index."""

        def named(index: str | int | None) -> str | int | None:
            return labels[index] if isinstance(index, int) and 0 <= index < len(labels) else index

        ranking = None if self.ranking is None else tuple(map(named, self.ranking))
        return Prediction(named(self.label), self.score, ranking)


@dataclass(frozen=True)
class Objects:
    """How many objects each side found in an image, and how many of them are the same."""

    a: int
    b: int
    matched: int


@dataclass(frozen=True)
class Compared:
    """An image with comparable results on both sides; with a model, pixels of the same shape and its results.

    ``truth`` is the class from its folder or name, if images are labelled. ``figures`` has those of
    ``measures.MEASURES`` that apply.
    """

    name: str
    difference: Difference | None
    a: Prediction | None = None
    b: Prediction | None = None
    truth: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    objects: Objects | None = None


@dataclass(frozen=True)
class Spread:
    """One figure over all images; ``worst`` is the value farthest from 0, with its sign, found at ``worst_name``."""

    median: float
    mean: float
    worst: float
    worst_name: str


@dataclass(frozen=True)
class Share:
    """``hits`` of ``total``, with Wilson's 95 % interval of the share."""

    hits: int
    total: int
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Agreement(Share):
    """How often both sides give the same class.

    Score differences are absolute, over images with the same label on both sides; ``None`` without scores.
    """

    score_mean: float | None
    score_max: float | None


@dataclass(frozen=True)
class Accuracy:
    """How often each side gives the labelled class, and how many points B loses.

    ``low`` and ``high`` bound ``drop`` by Newcombe's 95 % interval for pairs.
    """

    a: Share
    b: Share
    drop: float
    low: float
    high: float


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


def largest_difference(expected: np.ndarray, actual: np.ndarray) -> tuple[float, float]:
    """The largest absolute difference of two outputs of one shape, and the largest expected magnitude.

    NaN if any value is.
    """
    if not expected.size:
        return 0.0, 0.0
    return float(np.abs(expected - actual).max()), float(np.abs(expected).max())


def changed_classes(expected: np.ndarray, actual: np.ndarray) -> float:
    """The share of rows of logits whose largest one is another."""
    return float(np.mean(expected.argmax(1) != actual.argmax(1)))


def spreads(compared: Sequence[Compared]) -> dict[str, Spread]:
    """A ``Spread`` for each figure of ``Difference``; empty if no pixels were compared."""
    pairs = [(image.name, image.difference) for image in compared if image.difference is not None]
    found = {}
    for figure in FIGURES if pairs else ():
        values = [getattr(each, figure) for _, each in pairs]
        worst = max(range(len(values)), key=lambda index: abs(values[index]))
        found[figure] = Spread(float(np.median(values)), float(np.mean(values)), values[worst], pairs[worst][0])
    return found


def measured(compared: Sequence[Compared], name: str, is_best_high: bool) -> Spread | None:
    """One of ``measures.MEASURES`` over the images that have it; ``None`` without one."""
    pairs = [(image.name, image.figures[name]) for image in compared if name in image.figures]
    if not pairs:
        return None
    values = [value for _, value in pairs]
    worst = (min if is_best_high else max)(range(len(values)), key=values.__getitem__)
    return Spread(float(np.median(values)), float(np.mean(values)), values[worst], pairs[worst][0])


def objects_of(compared: Sequence[Compared]) -> Objects | None:
    """The objects of all images together; ``None`` if no detections were compared."""
    found = [image.objects for image in compared if image.objects is not None]
    return Objects(*(sum(column) for column in zip(*map(astuple, found), strict=True))) if found else None


def _share(hits: int, total: int) -> Share:
    return Share(hits, total, hits / total, *wilson_interval(hits, total))


def _classes(compared: Sequence[Compared]) -> list[tuple[Compared, Prediction, Prediction]]:
    """The images with a class on both sides, and both classes."""
    return [(image, image.a, image.b) for image in compared if image.a is not None and image.b is not None]


def agreement(compared: Sequence[Compared]) -> Agreement | None:
    """Over the images that have a class on both sides; ``None`` without one."""
    pairs = _classes(compared)
    if not pairs:
        return None
    same = [(a, b) for _, a, b in pairs if a.label == b.label]
    gaps = [abs(a.score - b.score) for a, b in same if a.score is not None and b.score is not None]
    mean = sum(gaps) / len(gaps) if gaps else None
    return Agreement(**asdict(_share(len(same), len(pairs))), score_mean=mean, score_max=max(gaps, default=None))


def disagreeing(compared: Sequence[Compared]) -> list[tuple[str, Prediction, Prediction]]:
    """Name and both predictions of each image on which the sides disagree."""
    return [(image.name, a, b) for image, a, b in _classes(compared) if a.label != b.label]


def labelled(compared: Sequence[Compared]) -> list[Compared]:
    """Add the class from each file's folder or name, if these are classes that the sides give.

    If fewer than half of the names are such classes, they are not labels, and nothing changes.
    """
    classes = {str(side.label) for image in compared for side in (image.a, image.b) if side is not None}
    truths = [label_of(PurePath(image.name), PurePath()) for image in compared]
    # 7.jpg is the seventh image, not of class 7.
    has_label = ["/" in image.name or "_" in image.name for image in compared]
    if 2 * sum(has and truth in classes for has, truth in zip(has_label, truths, strict=True)) < len(truths):
        return list(compared)
    return [replace(image, truth=truth) for image, truth in zip(compared, truths, strict=True)]


def accuracy(compared: Sequence[Compared]) -> Accuracy | None:
    """Over the labelled images that have a class on both sides; ``None`` without one."""
    known = [(str(a.label), str(b.label), image.truth) for image, a, b in _classes(compared) if image.truth is not None]
    right = [(a == truth, b == truth) for a, b, truth in known]
    if not right:
        return None
    both, only_a, only_b = (right.count(pair) for pair in ((True, True), (True, False), (False, True)))
    a, b = _share(both + only_a, len(right)), _share(both + only_b, len(right))
    low, high = paired_interval(both, only_a, only_b, len(right) - both - only_a - only_b)
    return Accuracy(a, b, 100 * (a.share - b.share), 100 * low, 100 * high)
