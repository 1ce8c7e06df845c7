"""Masks of objects in any of their forms, as arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def mask_iou(a: Any, b: Any) -> float:
    """The IoU of two masks on one image; 1 if both are empty. Outlines have no holes, and are compared without."""
    height, width = np.maximum(_size(a), _size(b)).tolist()
    one, other = (_array(mask, height, width) for mask in (a, b))
    if isinstance(a, list) != isinstance(b, list):
        one, other = (_without_holes(mask) for mask in (one, other))
    either = np.count_nonzero(one | other)
    return np.count_nonzero(one & other) / either if either else 1.0


def _size(mask: Any) -> tuple[int, int]:
    """Height and width of the mask; of polygons, of the area that they reach."""
    if isinstance(mask, np.ndarray):
        return mask.shape[-2], mask.shape[-1]
    if isinstance(mask, dict):
        return int(mask["size"][0]), int(mask["size"][1])
    if isinstance(mask, bytes):
        return _size(_decoded(mask))
    points = [point for polygon in mask for point in polygon] or [[0, 0]]
    x, y = np.array(points, float).max(0)
    return math.ceil(y) + 1, math.ceil(x) + 1


def _array(mask: Any, height: int, width: int) -> np.ndarray:
    """Bool H×W, with False around a smaller mask."""
    import cv2

    whole = np.zeros((height, width), np.uint8)
    if isinstance(mask, list):
        for polygon in filter(len, mask):  # one without points outlines nothing
            cv2.fillPoly(whole, [np.rint(np.array(polygon, float)).astype(np.int32)], 1)  # type: ignore[call-overload]
        return whole > 0
    if isinstance(mask, dict):
        pixels = _from_run_lengths(mask)
    else:
        pixels = _decoded(mask) if isinstance(mask, bytes) else mask.reshape(mask.shape[-2:])
    whole[: pixels.shape[0], : pixels.shape[1]] = pixels > 0
    return whole > 0


def _without_holes(mask: np.ndarray) -> np.ndarray:
    import cv2

    filled = mask.astype(np.uint8)
    outlines, _ = cv2.findContours(filled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    cv2.drawContours(filled, outlines, -1, 1, cv2.FILLED)
    return filled > 0


def _decoded(png: bytes) -> np.ndarray:
    import cv2

    pixels: np.ndarray | None = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_GRAYSCALE)
    if pixels is None:
        raise ValueError(f"a mask of {len(png)} bytes is not a picture")
    return pixels


def _from_run_lengths(mask: dict[str, Any]) -> np.ndarray:
    """COCO's run lengths, as a list or as ``rleFrString`` in its ``maskApi.c`` reads them: uint8 H×W."""
    height, width = mask["size"]
    counts = mask["counts"]
    if isinstance(counts, (str, bytes)):
        counts = _decompressed(counts.encode() if isinstance(counts, str) else counts)
    pixels = np.repeat(np.arange(len(counts)) % 2, counts).astype(np.uint8)
    upright: np.ndarray = pixels.reshape(width, height).T
    return upright


def _decompressed(text: bytes) -> list[int]:
    counts: list[int] = []
    value = shift = 0
    for letter in text:
        bits = letter - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    return counts
