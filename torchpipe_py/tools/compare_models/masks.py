"""The overlap of masks of objects in any of their forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchpipe_py.streams.boxes import to_array


def mask_iou(a: Any, b: Any) -> float:
    """The IoU of two masks on one image; 1 if both are empty. Outlines have no holes, and are compared without."""
    given = [mask if isinstance(mask, list) else _pixels(mask) for mask in (a, b)]
    height, width = (max(sides) for sides in zip(*map(_size, given), strict=True))
    one, other = (_on_image(mask, height, width) for mask in given)
    if isinstance(a, list) != isinstance(b, list):
        one, other = (_without_holes(mask) for mask in (one, other))
    either = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / either if either else 1.0


def _pixels(mask: Any) -> np.ndarray:
    """Bool H×W of a mask that has a size of its own."""
    pixels: np.ndarray = mask.reshape(mask.shape[-2:]) if isinstance(mask, np.ndarray) else to_array(mask, 0, 0)
    return np.asarray(pixels > 0)


def _size(mask: Any) -> tuple[int, int]:
    """Height and width of the mask; of polygons, of the area that they reach."""
    if isinstance(mask, np.ndarray):
        return mask.shape[0], mask.shape[1]
    points = [point for polygon in mask for point in polygon] or [[0, 0]]
    x, y = np.array(points, float).max(0)
    return math.ceil(y) + 1, math.ceil(x) + 1


def _on_image(mask: Any, height: int, width: int) -> np.ndarray:
    """Bool H×W, with False around a smaller mask. Of polygons, each place that is inside any of them."""
    import cv2

    whole = np.zeros((height, width), np.uint8)
    if isinstance(mask, np.ndarray):
        whole[: mask.shape[0], : mask.shape[1]] = mask
        return whole > 0
    for polygon in filter(len, mask):  # one without points outlines nothing
        cv2.fillPoly(whole, [np.rint(np.array(polygon, float)).astype(np.int32)], 1)  # type: ignore[call-overload]
    return whole > 0


def _without_holes(mask: np.ndarray) -> np.ndarray:
    import cv2

    filled = mask.astype(np.uint8)
    outlines, _ = cv2.findContours(filled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    cv2.drawContours(filled, outlines, -1, 1, cv2.FILLED)
    return filled > 0
