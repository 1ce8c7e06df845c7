"""The original image of a request: its size, the way from the current image back to it, and the image itself.

Three keys of the dict hold that. ``image_size`` is (height, width) of the original: the decoded image, or without a
decoder the input of the first backend that changes the geometry. ``to_original`` is (scale_x, scale_y, left, top): a
point (x, y) of the current image is (x * scale_x + left, y * scale_y + top) of the original. Without it both images are
the same; ``None`` says that the way is unknown. A ``Way``, as the backends here write it, does not hold for an image of
another size than the one it was written for. ``original`` is the image, if a backend keeps it.

Coordinates lie between pixels: 0 is the left side of the first pixel, and the width the right side of the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.image.geometry import MAX_SIDE, Placement, Size
from torchpipe_py.errors import BackendError, InvalidRequest, shown
from torchpipe_py.keys import (
    TASK_IMAGE_SIZE_KEY,
    TASK_ORIGINAL_COLOR_KEY,
    TASK_ORIGINAL_KEY,
    TASK_TO_ORIGINAL_KEY,
)

KEYS = (TASK_IMAGE_SIZE_KEY, TASK_TO_ORIGINAL_KEY)
"""The keys that tell the way back."""

REDUCTIONS = (8, 4, 2)
"""Fractions of its size, 1/8, 1/4 and 1/2, at which a JPEG can be decoded fast."""

_SAME = (1.0, 1.0, 0.0, 0.0)


class Way(tuple[float, ...]):
    """The value of ``to_original`` for an image of ``size`` (h, w); any tuple of four numbers equals it."""

    size: Size

    def __new__(cls, numbers: Iterable[float], size: Size) -> Way:
        way = super().__new__(cls, numbers)
        way.size = size
        return way

    def __getnewargs__(self) -> tuple[tuple[float, ...], Size]:
        return tuple(self), self.size


class WayBack(NamedTuple):
    """``scale`` (x, y) and ``offset`` (x, y) from the current image to the original, whose ``size`` is (h, w)."""

    scale: tuple[float, float]
    offset: tuple[float, float]
    size: Size

    def points(self, points: np.ndarray) -> np.ndarray:
        """Points …×2 (x, y) of the current image as points of the original, clipped to it; a copy."""
        moved = points * np.array(self.scale, points.dtype) + np.array(self.offset, points.dtype)
        clipped: np.ndarray = np.clip(moved, 0, np.array(self.size[::-1], points.dtype), out=moved)
        return clipped


def begin(item: Data, height: int, width: int, reduction: int = 1) -> None:
    """Make an image of this size the original: it was decoded, or nothing leads back from it.

    ``reduction``: the current image is the original decoded at that fraction of its size. Each of its pixels covers
    ``reduction`` × ``reduction`` pixels of the original; those of the last column and row may reach beyond its edge.
    """
    item[TASK_IMAGE_SIZE_KEY] = height, width
    item.pop(TASK_TO_ORIGINAL_KEY, None)
    item.pop(TASK_ORIGINAL_KEY, None)
    if reduction > 1:
        way = float(reduction), float(reduction), 0.0, 0.0
        item[TASK_TO_ORIGINAL_KEY] = Way(way, (-(-height // reduction), -(-width // reduction)))


def whole(item: Data, height: int, width: int) -> tuple[Size, int]:
    """The size of the whole image that the current one shows, and its ``reduction``; (its own size, 1) by default.

    After it, the way back leads from that whole image, for an operation that computes its placement there.
    """
    way, own = item.get(TASK_TO_ORIGINAL_KEY), (height, width)
    if way is None or TASK_IMAGE_SIZE_KEY not in item:
        return own, 1
    size, (scale, *others) = _size_of(item), _numbers(item, TASK_TO_ORIGINAL_KEY, 4)
    if scale not in REDUCTIONS or others != [scale, 0, 0] or own != tuple(-(-side // int(scale)) for side in size):
        return own, 1
    del item[TASK_TO_ORIGINAL_KEY]
    return size, int(scale)


def follow(item: Data, height: int, width: int, placement: Placement) -> None:
    """Note that an image of ``height`` × ``width`` was placed so: the way back now leads from the result."""
    known = _way_of(item, height, width)
    if known is None:
        item[TASK_TO_ORIGINAL_KEY] = None
        return
    scale_x, scale_y, left, top = known
    before_y, before_x, below, right = placement.crop or (0, 0, height, width)
    placed_h, placed_w = placement.size
    ratio_x, ratio_y = (right - before_x) / placed_w, (below - before_y) / placed_h
    way = (
        scale_x * ratio_x,
        scale_y * ratio_y,
        left + scale_x * (before_x - placement.left * ratio_x),
        top + scale_y * (before_y - placement.top * ratio_y),
    )
    item[TASK_TO_ORIGINAL_KEY] = Way(way, placement.canvas or placement.size)


def _way_of(item: Data, height: int, width: int) -> tuple[float, ...] | None:
    """The way back from the current image, of this size; ``None`` if it is unknown."""
    if TASK_TO_ORIGINAL_KEY in item:
        way = item[TASK_TO_ORIGINAL_KEY]
        if way is None or (isinstance(way, Way) and way.size != (height, width)):
            return None
        return way if isinstance(way, Way) else _numbers(item, TASK_TO_ORIGINAL_KEY, 4)
    if TASK_IMAGE_SIZE_KEY not in item:
        item[TASK_IMAGE_SIZE_KEY] = height, width
    # An image of another size came from a backend that does not say what it did.
    return _SAME if _size_of(item) == (height, width) else None


def keep(item: Data, image: Any, color: str) -> None:
    """Keep ``image``, of this channel order, as the original, unless one is kept already."""
    if TASK_ORIGINAL_KEY not in item:
        item[TASK_ORIGINAL_KEY], item[TASK_ORIGINAL_COLOR_KEY] = image, color


def way_back(item: Data, height: int, width: int) -> WayBack:
    """The way from the current image, of ``height`` × ``width``, to the original.

    ``InvalidRequest`` if the keys of the dict hold no such numbers, ``BackendError`` if the way is unknown.
    """
    way = _way_of(item, height, width)
    size = _size_of(item)
    if way is None:
        raise BackendError(
            f"the image of {size[1]}x{size[0]} pixels became one of {width}x{height}, and nothing says how: a custom "
            f"backend that changes the geometry writes {TASK_TO_ORIGINAL_KEY!r} = (scale_x, scale_y, left, top), "
            "and each image needs a dict of its own"
        )
    scale_x, scale_y, left, top = way
    if not (scale_x > 0 and scale_y > 0):
        raise InvalidRequest(f"{TASK_TO_ORIGINAL_KEY}: scales must be above 0, got {scale_x:g} and {scale_y:g}")
    return WayBack((scale_x, scale_y), (left, top), size)


def _size_of(item: Data) -> Size:
    height, width = _numbers(item, TASK_IMAGE_SIZE_KEY, 2)
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE and height % 1 == 0 and width % 1 == 0):
        raise InvalidRequest(
            f"{TASK_IMAGE_SIZE_KEY} must be [height, width] of 1 to {MAX_SIDE} pixels, got [{height:g}, {width:g}]"
        )
    return int(height), int(width)


def _numbers(item: Data, key: str, count: int) -> tuple[float, ...]:
    """The finite numbers under a key, which a client may have sent; ``InvalidRequest`` for anything else."""
    value = item.get(key)
    if type(value) is tuple and len(value) == count and all(type(number) in (int, float) for number in value):
        numbers = value
    else:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError):  # lists of different lengths, a tensor on a GPU
            array = np.empty(0)
        array = array[0] if array.shape == (1, count) else array
        numbers = tuple(array.tolist()) if array.shape == (count,) and array.dtype.kind in "iuf" else ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise InvalidRequest(f"{key} must hold {count} finite numbers, got {shown(value)}")
    return numbers
