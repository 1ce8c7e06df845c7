"""Non-maximum suppression by NumPy: only pairs of one class are compared, the best boxes first, until enough are kept.

OpenCV's and torchvision's compare each box with all kept ones, of every class, and go on to the last box. The
arithmetic is torchvision's, in ``float32``.
"""

from __future__ import annotations

import numpy as np

FIRST, NEXT = 64, 4096
"""Boxes that are looked at together: the best ones, which drop most of the others where many crowd, and then."""

MOST_PAIRS = 2**15
"""Pairs of these that are compared with each other at once, at least those of one box."""

MOST_WITH_KEPT = 2**21
"""Pairs of these and kept ones that are compared at once."""

DENSE = 1 / 4
"""Where at least this part of all pairs is of one class, all are compared: that takes no list of pairs."""

NO_BOXES = np.empty(0, np.int64)

Sides = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Left, top, right, bottom and area of each box."""


def suppress(
    boxes: np.ndarray, classes: np.ndarray, iou: float, most: int, kept: np.ndarray = NO_BOXES, start: int = 0
) -> np.ndarray:
    """Indices of the boxes to keep, in order, ``most`` at most; those of ``torchvision.ops.batched_nms``.

    ``boxes``: float32 K×4, [left, top, right, bottom], the best first. ``classes``: K integers. A box is dropped if its
    intersection over union with a kept one of its class is more than ``iou``. ``kept`` is the result for the first
    ``start`` boxes, if they were looked at before.
    """
    left, top, right, bottom = np.ascontiguousarray(boxes.T)
    sides = left, top, right, bottom, (right - left) * (bottom - top)
    while start < len(boxes) and len(kept) < most:
        count = min(NEXT, max(FIRST, MOST_WITH_KEPT // len(kept))) if len(kept) else FIRST
        end = min(start + count, len(boxes))
        chunk = np.arange(start, end)
        if len(kept):
            chunk = chunk[~_dropped_by(kept, chunk, sides, classes, iou)]
        better, worse, taken = _overlapping(chunk, sides, classes, iou)
        start = end if taken == len(chunk) else int(chunk[taken])
        kept = np.concatenate([kept, chunk[:taken][_greedy(taken, better, worse)]])
    return kept[:most]


def _dropped_by(kept: np.ndarray, chunk: np.ndarray, sides: Sides, classes: np.ndarray, iou: float) -> np.ndarray:
    """Whether a kept box of its class drops it, for each of the chunk."""
    order = kept[np.argsort(classes[kept], kind="stable")]
    starts, ends = (np.searchsorted(classes[order], classes[chunk], side) for side in ("left", "right"))
    counts = ends - starts
    if counts.sum() > DENSE * kept.size * chunk.size:
        is_over = _overlap(sides, kept[:, None], chunk[None], iou)
        dropped: np.ndarray = (is_over & (classes[kept][:, None] == classes[chunk])).any(0)
        return dropped
    places = np.repeat(np.arange(len(chunk)), counts)
    is_over = _overlap(sides, order[_ranges(starts, counts)], chunk[places], iou)
    dropped = np.zeros(len(chunk), bool)
    dropped[places[is_over]] = True
    return dropped


def _overlapping(
    chunk: np.ndarray, sides: Sides, classes: np.ndarray, iou: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """Pairs of one class that overlap, as places in the chunk, the better one first, and how many of it are covered."""
    own = classes[chunk]
    order = np.argsort(own, kind="stable")
    ordered = own[order]
    ranks = np.arange(len(order)) - np.searchsorted(ordered, ordered, "left")  # better ones of its class
    counts = np.empty_like(ranks)
    counts[order] = ranks
    covered = np.cumsum(counts)
    taken = max(int(np.searchsorted(covered, MOST_PAIRS, "right")), min(1, len(chunk)))
    if not taken or not covered[taken - 1]:
        return order[:0], order[:0], taken
    if covered[taken - 1] > DENSE * taken * taken / 2:
        part = chunk[:taken]
        is_over = np.triu(_overlap(sides, part[:, None], part[None], iou), 1)
        better, worse = np.nonzero(is_over & (own[:taken, None] == own[None, :taken]))
        return better, worse, taken
    inside = order < taken
    order, ranks = order[inside], ranks[inside]
    firsts = np.arange(len(order)) - ranks  # where the class begins; those that are taken are its best
    better, worse = order[_ranges(firsts, ranks)], np.repeat(order, ranks)
    overlaps = _overlap(sides, chunk[better], chunk[worse], iou)
    return better[overlaps], worse[overlaps], taken


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``counts`` integers from each start on, one range after the other."""
    before = np.cumsum(counts) - counts
    indices: np.ndarray = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return indices


def _overlap(sides: Sides, first: np.ndarray, second: np.ndarray, iou: float) -> np.ndarray:
    """Whether the intersection over union of each pair is more than ``iou``."""
    left, top, right, bottom, area = sides
    width = np.minimum(right[first], right[second]) - np.maximum(left[first], left[second])
    height = np.minimum(bottom[first], bottom[second]) - np.maximum(top[first], top[second])
    common = np.maximum(width, 0, out=width)
    common *= np.maximum(height, 0, out=height)
    union = area[first] + area[second]
    union -= common
    with np.errstate(invalid="ignore", divide="ignore"):  # boxes without an area
        over: np.ndarray = np.divide(common, union, out=common) > np.float64(iou)
    return over


def _greedy(count: int, better: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Which of the boxes remain if, best first, each that remains drops those that it overlaps."""
    remains = np.ones(count, bool)
    while better.size:  # after n rounds, a box is right if it depends on a row of n others at most
        after = np.ones(count, bool)
        after[worse[remains[better]]] = False
        if np.array_equal(after, remains):
            break
        remains = after
    return remains
