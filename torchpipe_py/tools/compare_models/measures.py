"""Measures of a pair of results, by their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.results import Detections
from torchpipe_py.tools.compare_models.figures import Difference, Objects, Prediction
from torchpipe_py.tools.compare_models.masks import mask_iou

MATCHED = 0.5
"""The least IoU of two boxes that show the same object."""

VISIBLE = 0.5
"""The least score of a keypoint whose place is compared."""


@dataclass(frozen=True)
class Measure:
    """A figure of one image, and what a tolerance of it limits.

    A limit of a share is one of its mean over all images; any other limit is one of each image, which most images have
    to keep.
    """

    name: str
    kinds: tuple[str, ...]
    doc: str
    is_best_high: bool = False
    is_share: bool = False

    def is_beyond(self, value: float, limit: float) -> bool:
        """Whether the figure of an image does not keep the limit."""
        return value < limit if self.is_best_high else value > limit


KINDS = ("detections", "embeddings", "masks", "classes", "pixels")
"""Of results, in the order of preference where several fit."""

MEASURES = {
    measure.name: measure
    for measure in (
        Measure("top1", ("classes",), "same class, share of images", is_best_high=True, is_share=True),
        Measure("labels", ("classes",), "same set of classes, share of images", True, True),
        Measure("missing", ("detections",), "objects that only A has, share of A's", is_share=True),
        Measure("additional", ("detections",), "objects that only B has, share of B's", is_share=True),
        Measure("score", ("classes", "detections"), "largest difference of scores"),
        Measure("box", ("detections",), "largest distance of sides of boxes, pixels"),
        Measure("keypoint", ("detections",), "largest distance of keypoints, pixels"),
        Measure("iou", ("masks", "detections"), "IoU of masks, mean of classes or least of objects", True),
        Measure("changed", ("masks",), "pixels with another class, share", is_share=True),
        Measure("cosine", ("embeddings",), "cosine of both vectors", is_best_high=True),
        Measure("mean", ("pixels",), "mean absolute difference of pixels, 0..255"),
        Measure("max", ("pixels",), "largest difference of pixels, 0..255"),
    )
}

UNMATCHED = {
    "score": ("top1", "missing", "additional"),
    **dict.fromkeys(("box", "keypoint", "iou"), ("missing", "additional")),
}
"""Measures of what both sides have in common, and those that say whether there is anything that they do not."""


def of_classes(a: Prediction, b: Prediction) -> dict[str, float]:
    """The score is compared where the class is the same."""
    figures = {"top1": float(a.label == b.label)}
    if a.label == b.label and a.score is not None and b.score is not None:
        figures["score"] = abs(a.score - b.score)
    if a.ranking is not None and b.ranking is not None:
        figures["labels"] = float(set(a.ranking) == set(b.ranking))
    return figures


def of_detections(a: Detections, b: Detections) -> tuple[dict[str, float], Objects]:
    """Objects of one class are matched by IoU, the best first."""
    pairs = _matched(a, b)
    figures = {
        "missing": 1 - len(pairs) / len(a) if len(a) else 0.0,
        "additional": 1 - len(pairs) / len(b) if len(b) else 0.0,
    }
    objects = Objects(len(a), len(b), len(pairs))
    if not len(pairs):
        return figures, objects
    of_a, of_b = pairs.T
    figures["score"] = float(np.abs(a.scores[of_a] - b.scores[of_b]).max())
    figures["box"] = float(np.abs(a.boxes[of_a] - b.boxes[of_b]).max())
    if a.keypoints is not None and b.keypoints is not None and a.keypoints.shape[1:] == b.keypoints.shape[1:]:
        points = a.keypoints[of_a]
        distances = np.hypot(*np.moveaxis(points - b.keypoints[of_b], 2, 0)[:2])[points[:, :, 2] >= VISIBLE]
        if distances.size:
            figures["keypoint"] = float(distances.max())
    if (a.masks is None) != (b.masks is None):
        figures["iou"] = 0.0
    if a.masks is not None and b.masks is not None:
        figures["iou"] = min(mask_iou(a.masks[one], b.masks[other]) for one, other in pairs.tolist())
    return figures, objects


def _matched(a: Detections, b: Detections) -> np.ndarray:
    """Pairs of indices, K×2, of objects of one class whose boxes overlap most; each is in at most one pair."""
    overlap = _box_iou(a.boxes, b.boxes)
    # Labels decide where both sides have names: an index may mean another class in another file.
    labels: Sequence[list[Any]] = (
        (a.labels, b.labels) if a.names and b.names else (a.classes.tolist(), b.classes.tolist())
    )
    numbers = {label: number for number, label in enumerate({*labels[0], *labels[1]})}
    one, other = (np.array([numbers[label] for label in each], np.int64) for each in labels)
    overlap[one[:, None] != other] = 0
    # Of boxes that overlap equally, as at the sides of an image, those with the nearest scores.
    likeness = overlap - 1e-6 * np.abs(a.scores[:, None] - b.scores)
    rows, columns = np.nonzero(overlap >= MATCHED)
    pairs: dict[int, int] = {}
    for index in np.argsort(-likeness[rows, columns], kind="stable").tolist():
        if rows[index] not in pairs and columns[index] not in pairs.values():
            pairs[int(rows[index])] = int(columns[index])
    return np.array(sorted(pairs.items()), np.int64).reshape(-1, 2)


def _box_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of K×4 and L×4 boxes [left, top, right, bottom]: K×L."""
    a, b = a[:, None].astype(np.float64), b[None].astype(np.float64)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    common = np.prod(np.maximum(sides, 0), -1)
    areas = [np.prod(each[..., 2:] - each[..., :2], -1) for each in (a, b)]
    with np.errstate(invalid="ignore", divide="ignore"):
        overlap: np.ndarray = np.nan_to_num(common / (areas[0] + areas[1] - common))
    overlap[(a == b).all(-1)] = 1  # boxes without an area, too
    return overlap


def of_maps(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Two maps H×W of class indices: the mean IoU of the classes in either."""
    present, places = np.unique(np.concatenate([a.ravel(), b.ravel()]), return_inverse=True)
    one, other = np.split(places.ravel(), 2)
    counts = [np.bincount(each, minlength=len(present)) for each in (one, other, one[one == other])]
    iou = counts[2] / (counts[0] + counts[1] - counts[2])
    return {"iou": float(iou.mean()), "changed": float(np.mean(one != other))}


def of_vectors(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Two vectors of one length."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    if lengths == 0:
        return {"cosine": float(np.array_equal(a, b))}
    return {"cosine": min(1.0, float(a @ b) / lengths)}


def of_pixels(difference: Difference) -> dict[str, float]:
    return {"mean": difference.mean, "max": difference.max}


def severity(figures: Mapping[str, float]) -> tuple[float, ...]:
    """A key by which the images that differ most come last."""
    parts: list[Any] = []
    for name, measure in MEASURES.items():
        value = figures.get(name)
        parts.append(0.0 if value is None else 1 - value if measure.is_best_high else value)
    return tuple(parts)
