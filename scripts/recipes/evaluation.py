"""How good predictions are, and how far two runs agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.parity.compare import wilson

NO_PREDICTION = -1


@dataclass(frozen=True)
class Predictions:
    """``classes``: int64 N, -1 for an image that could not be read; ``scores``: float64 N, of the class named."""

    classes: Any
    scores: Any

    @classmethod
    def none(cls, count: int) -> Predictions:
        """To be filled in."""
        return cls(np.full(count, NO_PREDICTION, np.int64), np.zeros(count))


@dataclass(frozen=True)
class Scores:
    """Shares in 0..1: top-1 ``accuracy``, Wilson's 95 % interval ``low`` to ``high``, macro ``recall``, ``precision``.

    Recall and precision are means over the classes that have images; one that is never named has precision 0.
    ``unread`` images have no prediction, and count as wrong.
    """

    images: int
    unread: int
    accuracy: float
    low: float
    high: float
    recall: float
    precision: float

    @classmethod
    def of(cls, labels: Sequence[int], predictions: Sequence[int], classes: int) -> Scores:
        """Of N labels in 0..``classes`` - 1 and N predictions, -1 for none; ``ValueError`` where these do not fit."""
        true, named = np.asarray(labels, np.int64), np.asarray(predictions, np.int64)
        if true.shape != named.shape or not len(true):
            raise ValueError(f"{len(true)} labels and {len(named)} predictions; expected equally many, at least one")
        if min(true.min(), named.min() + 1) < 0 or max(true.max(), named.max()) >= classes:
            raise ValueError(f"a label or prediction is none of the {classes} classes")
        right = np.bincount(true[true == named], minlength=classes)
        images, times_named = np.bincount(true, minlength=classes), np.bincount(named + 1, minlength=classes + 1)[1:]
        there = images > 0
        hits, count = int(right.sum()), len(true)
        low, high = wilson(hits, count)
        return cls(
            images=count,
            unread=int((named == NO_PREDICTION).sum()),
            accuracy=hits / count,
            low=low,
            high=high,
            recall=float((right[there] / images[there]).mean()),
            precision=float((right[there] / np.maximum(1, times_named[there])).mean()),
        )

    def __str__(self) -> str:
        interval = f"95 % interval {self.low:.4f} to {self.high:.4f}"
        unread = f", {self.unread} could not be read" if self.unread else ""
        return (
            f"{self.images} images{unread}, top-1 accuracy {self.accuracy:.4f} ({interval}), "
            f"macro recall {self.recall:.4f}, macro precision {self.precision:.4f}"
        )


@dataclass(frozen=True)
class Agreement:
    """``share`` of the images that get the same class; ``largest`` difference of scores, of images both could read."""

    share: float
    largest: float

    @classmethod
    def of(cls, one: Predictions, other: Predictions) -> Agreement:
        """Of two runs over the same images, at least one."""
        both = (one.classes != NO_PREDICTION) & (other.classes != NO_PREDICTION)
        gaps = np.abs(one.scores - other.scores)[both]
        return cls(float((one.classes == other.classes).mean()), float(gaps.max(initial=0.0)))
