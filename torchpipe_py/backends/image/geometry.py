"""Where pixels go: sizes, boxes and corners as numbers, checked where the dict of the request says them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import InvalidRequest, shown
from torchpipe_py.images.header import MAX_PIXELS
from torchpipe_py.keys import TASK_BOX_KEY

HEIGHT_KEY = "resize_h"
WIDTH_KEY = "resize_w"

MAX_SIDE = 2**20

MIN_SINE = 1e-3
"""Of the angle at a corner of a quadrilateral; below it three corners are taken to lie on one line."""


def check_channels(height: int, width: int, channels: int) -> None:
    """``InvalidRequest`` where the channels beyond four make more of this size than of the largest image decoded.

    The size is the configuration's, but an array of the request's own may have any number of channels.
    """
    if channels > 4 and height * width * channels > 4 * MAX_PIXELS:
        raise InvalidRequest(f"{channels} channels are too many to be resized to {width}x{height} pixels")


def check_size(height: int, width: int, pixel_bytes: int, max_pixels: int) -> None:
    """``InvalidRequest`` for a size of more than ``max_pixels`` of four bytes; where they have more, these count."""
    if height * width * max(pixel_bytes, 4) > 4 * max_pixels:
        many = f" of {pixel_bytes} bytes" if pixel_bytes > 4 else ""
        raise InvalidRequest(f"{width}x{height} pixels{many} were asked for, more than max_pixels = {max_pixels}")


InverseTrans = Callable[[float, float], tuple[float, float]]


class Placed(NamedTuple):
    """The size of a resized image, its place in a larger one, and the way of a point of that back to the original."""

    height: int
    width: int
    top: int
    left: int
    inverse_trans: InverseTrans


def fit_inside(height: int, width: int, max_h: int, max_w: int, centred: bool = False) -> Placed:
    """The largest size within ``max_h`` × ``max_w`` of the same aspect ratio, at least one pixel each way.

    It lies top left, or ``centred``: then of an odd rest the larger half is below and on the right.
    """
    scale = min(max_h / height, max_w / width)
    new_h = min(max_h, max(1, round(height * scale)))
    new_w = min(max_w, max(1, round(width * scale)))
    top, left = ((max_h - new_h) // 2, (max_w - new_w) // 2) if centred else (0, 0)
    # NOTE: not a function inside this one, which could not come back from another process.
    return Placed(new_h, new_w, top, left, partial(_to_original, width / new_w, height / new_h, left, top))


def _to_original(scale_x: float, scale_y: float, left: int, top: int, x: float, y: float) -> tuple[float, float]:
    return (x - left) * scale_x, (y - top) * scale_y


def shorter_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width with ``size`` as the shorter side; a fraction of the longer is cut off, as torchvision does."""
    if height <= width:
        return size, size * width // height
    return size * height // width, size


def central(size: int, wanted: int) -> tuple[int, int]:
    """Of a side of ``size`` pixels, where the middle ``wanted`` begin, and how many are missing before them.

    As torchvision's ``center_crop``: halves go to the even number, and of an odd rest the larger half is missing after.
    """
    return (round((size - wanted) / 2), 0) if size >= wanted else (0, (wanted - size) // 2)


def crop_box(item: Data, height: int, width: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of the dict's ``box``, rounded and cut to an image of ``height`` × ``width`` pixels.

    ``InvalidRequest`` for a box that is missing, is no four finite numbers, or leaves no pixel.
    """
    where = _image(height, width)
    values = _box_values(item, f"[left, top, right, bottom] to crop {where} to")
    if not _are_numbers(values, 4):
        raise InvalidRequest(
            f"{TASK_BOX_KEY} must hold 4 numbers, left, top, right, bottom, got {shown(values)} for {where}"
        )
    numbers = [round(float(value)) for value in values]
    left, right = (min(max(x, 0), width) for x in numbers[::2])
    top, bottom = (min(max(y, 0), height) for y in numbers[1::2])
    if left >= right or top >= bottom:
        raise InvalidRequest(f"{TASK_BOX_KEY} {numbers} (left, top, right, bottom) leaves no pixel of {where}")
    return left, top, right, bottom


def aligned_width(width: int, align: int, max_w: int) -> int:
    """``width`` rounded up to a multiple of ``align``, from ``align`` to ``max_w``, itself one."""
    return min(max(-(-width // align), 1) * align, max_w)


def upright_box(item: Data, height: int, width: int) -> tuple[np.ndarray, int, int]:
    """Corners of the dict's ``box`` as float32, 4×2, and the width and height it has upright, in pixels.

    ``InvalidRequest`` for a box that is none, or that no image of ``height`` × ``width`` pixels can be warped by.
    """
    where = _image(height, width)
    points = _corner_points(item, where)
    top, right, bottom, left = (math.dist(points[corner], points[(corner + 1) % 4]) for corner in range(4))
    if max(top, right, bottom, left) > MAX_SIDE:
        raise InvalidRequest(f"{TASK_BOX_KEY} {points} has an edge longer than {MAX_SIDE} pixels, for {where}")
    for axis, size in enumerate((width, height)):
        ends = [point[axis] for point in points]
        if max(ends) <= 0 or min(ends) >= size:
            raise InvalidRequest(f"{TASK_BOX_KEY} {points} lies outside {where}")
    corners = np.array(points, np.float32)
    if not _is_convex(corners.tolist()):
        raise InvalidRequest(
            f"{TASK_BOX_KEY} {points} is no quadrilateral for {where}: two corners are equal, three lie on a line, or"
            " the order is not top left, top right, bottom right, bottom left"
        )
    return corners, max(1, round(max(top, bottom))), max(1, round(max(left, right)))


def _is_convex(points: list[list[float]]) -> bool:
    """Whether the way around four points turns to the same side at each, by an angle that is neither 0 nor 180°."""
    sines = []
    for corner in range(4):
        (x0, y0), (x1, y1), (x2, y2) = points[corner - 2], points[corner - 1], points[corner]
        product = math.hypot(x1 - x0, y1 - y0) * math.hypot(x2 - x1, y2 - y1)
        sines.append(((x1 - x0) * (y2 - y1) - (y1 - y0) * (x2 - x1)) / product if product else 0.0)
    return min(sines) > MIN_SINE or max(sines) < -MIN_SINE


def _corner_points(item: Data, where: str) -> list[list[float]]:
    wanted = "[[x, y], …], top left, top right, bottom right, bottom left"
    values = _box_values(item, f"{wanted}, to warp {where} by")
    good = isinstance(values, (list, tuple)) and len(values) == 4
    points = [_plain(value) for value in values] if good else []
    if not good or not all(_are_numbers(point, 2) for point in points):
        raise InvalidRequest(f"{TASK_BOX_KEY} must hold {wanted}, got {shown(values)} for {where}")
    return [[float(number) for number in point] for point in points]


def _box_values(item: Data, wanted: str) -> Any:
    """The dict's ``box`` without NumPy or PyTorch around it; ``InvalidRequest`` where there is none.

    A leading dimension of 1, that of a batch, is left out: the Open Inference Protocol has no inputs without one.
    """
    if item.get(TASK_BOX_KEY) is None:
        raise InvalidRequest(f"the dict has no {TASK_BOX_KEY!r} = {wanted}")
    values = _plain(item[TASK_BOX_KEY])
    if isinstance(values, (list, tuple)) and len(values) == 1:
        first = _plain(values[0])
        return first if isinstance(first, (list, tuple)) else values
    return values


def _plain(value: Any) -> Any:
    # NOTE: an array of a client's may have millions of numbers, which as Python's take ten times the memory.
    if not hasattr(value, "tolist") or math.prod(getattr(value, "shape", ())) > 8:
        return value
    return value.tolist()


def _number(value: Any) -> Any:
    """The number of an array that has one, whatever its dimensions; anything else as it is."""
    return value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1 else value


def _are_numbers(values: Any, count: int) -> bool:
    """Whether it is a list of ``count`` numbers that are finite as floats."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        return False
    return all(map(_is_finite, values))


def _is_finite(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max  # isfinite raises for a larger one
    return isinstance(value, (float, np.number)) and math.isfinite(value)


def _image(height: int, width: int) -> str:
    return f"an image of {width}x{height} pixels"


def wanted_side(item: Data, key: str) -> int:
    """The dict's ``key`` as an image side in pixels; ``InvalidRequest`` where it is none."""
    if key not in item:
        raise InvalidRequest(f"the dict has no {key!r}, the side to resize to, in pixels")
    return wanted_pixels(item, key, 1)


def wanted_pixels(item: Data, key: str, low: int) -> int:
    """The dict's ``key``, a number of pixels from ``low`` to 2**20; ``InvalidRequest`` where it is none."""
    value = _number(item[key])
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= MAX_SIDE:
        raise InvalidRequest(
            f"{key} in the dict must be an integer from {low} to {MAX_SIDE} (pixels), got {shown(_plain(value))}"
        )
    return int(value)
