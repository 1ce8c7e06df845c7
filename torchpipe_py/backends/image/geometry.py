"""Computes where pixels go: sizes, boxes and corners; checks the values in a request's dict."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.params import Param
from torchpipe_py.errors import InvalidRequest, shown
from torchpipe_py.keys import TASK_BOX_KEY
from torchpipe_py.values import to_int

HEIGHT_KEY = "resize_h"
WIDTH_KEY = "resize_w"

MAX_SIDE = 2**20

MAX_PIXELS = 2**26
"""67 megapixels: the photo of a phone with 50 passes."""

MIN_SINE = 1e-3
"""Smallest sine of a quadrilateral's angle; below it three corners count as lying on one line."""

Size = tuple[int, int]
"""Height and width, pixels."""

InverseTrans = Callable[[float, float], tuple[float, float]]


def side(doc: str) -> Param:
    """A required image side in pixels."""
    return Param(to_int, low=1, high=MAX_SIDE, doc=doc)


def max_pixels() -> Param:
    """The parameter ``max_pixels``."""
    return Param(to_int, MAX_PIXELS, low=1, high=2**30, doc="most pixels of an image; a larger one is refused")


def check_size(size: Size, channels: int, value_bytes: int, max_pixels: int | None = None) -> None:
    """Raise ``InvalidRequest`` for a result of more than ``max_pixels`` of four bytes; larger pixels count by bytes.

    Without ``max_pixels`` the size is set by the configuration, and only channels beyond four count, since a request's
    array may have any number of them: the result must not exceed the largest image that is decoded.
    """
    height, width = size
    if max_pixels is None:
        if channels > 4 and height * width * channels > 4 * MAX_PIXELS:
            raise InvalidRequest(f"{channels} channels are too many to be resized to {width}x{height} pixels")
    elif height * width * max(channels * value_bytes, 4) > 4 * max_pixels:
        many = f" of {channels * value_bytes} bytes" if channels * value_bytes > 4 else ""
        raise InvalidRequest(f"{width}x{height} pixels{many} were asked for, more than max_pixels = {max_pixels}")


# -- placements -------------------------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """A crop, resize and pad: ``crop`` is cut out, resized to ``size`` and placed in an image of size ``canvas``.

    ``crop`` is (top, left, bottom, right) in the input, ``None`` for all of it. Without a ``canvas`` the result has
    ``size``; with one it begins there at ``top``, ``left``. ``inverse_trans`` maps a point of the result to the input.
    """

    size: Size
    crop: tuple[int, int, int, int] | None = None
    canvas: Size | None = None
    top: int = 0
    left: int = 0
    inverse_trans: InverseTrans | None = None


def fit_inside(height: int, width: int, max_h: int, max_w: int, centred: bool = False) -> Placement:
    """The largest size within ``max_h`` × ``max_w`` of the same aspect ratio, at least one pixel each way.

    It lies top left, or ``centred``: then of an odd rest the larger half is below and on the right.
    """
    scale = min(max_h / height, max_w / width)
    new_h = min(max_h, max(1, round(height * scale)))
    new_w = min(max_w, max(1, round(width * scale)))
    top, left = ((max_h - new_h) // 2, (max_w - new_w) // 2) if centred else (0, 0)
    # NOTE: not a local function, which could not be pickled.
    inverse_trans = partial(_to_original, width / new_w, height / new_h, left, top)
    return Placement((new_h, new_w), None, (max_h, max_w), top, left, inverse_trans)


def _to_original(scale_x: float, scale_y: float, left: int, top: int, x: float, y: float) -> tuple[float, float]:
    return (x - left) * scale_x, (y - top) * scale_y


def shorter_side(height: int, width: int, size: int) -> Placement:
    """``size`` as the shorter side; a fraction of the longer one is cut off, as torchvision does."""
    return Placement((size, size * width // height) if height <= width else (size * height // width, size))


def center_crop(height: int, width: int, crop_h: int, crop_w: int) -> Placement:
    """The middle ``crop_h`` × ``crop_w`` as torchvision's ``center_crop``; a smaller image is padded.

    A half pixel is rounded to the even number; of an odd padding the larger half is below and on the right.
    """
    (top, above, part_h), (left, before, part_w) = _middle(height, crop_h), _middle(width, crop_w)
    canvas = None if (part_h, part_w) == (crop_h, crop_w) else (crop_h, crop_w)
    return Placement((part_h, part_w), (top, left, top + part_h, left + part_w), canvas, above, before)


def _middle(size: int, wanted: int) -> tuple[int, int, int]:
    """Start of the middle part, number of padding pixels before it, and its size."""
    return (round((size - wanted) / 2), 0, wanted) if size >= wanted else (0, (wanted - size) // 2, size)


def crop_box(item: Data, height: int, width: int) -> Placement:
    """The part of an image that the dict's ``box`` names, rounded and cut to the image.

    ``InvalidRequest`` for a box that is missing, is not four finite numbers, or leaves no pixel.
    """
    where = _image(height, width)
    purpose = f"[left, top, right, bottom] to crop {where} to"
    numbers = [round(value) for value in _box(item, (4,), purpose, "4 numbers, left, top, right, bottom", where)]
    left, right = (min(max(x, 0), width) for x in numbers[::2])
    top, bottom = (min(max(y, 0), height) for y in numbers[1::2])
    if left >= right or top >= bottom:
        raise InvalidRequest(f"{TASK_BOX_KEY} {numbers} (left, top, right, bottom) leaves no pixel of {where}")
    return Placement((bottom - top, right - left), (top, left, bottom, right))


def wanted_size(item: Data) -> Size:
    """The dict's ``resize_h`` and ``resize_w``; ``InvalidRequest`` if one is missing or is not an image side."""
    for key in (HEIGHT_KEY, WIDTH_KEY):
        if key not in item:
            raise InvalidRequest(f"the dict has no {key!r}, the side to resize to, in pixels")
    return wanted_pixels(item, HEIGHT_KEY, 1), wanted_pixels(item, WIDTH_KEY, 1)


def wanted_pixels(item: Data, key: str, low: int) -> int:
    """The dict's ``key``, a number of pixels from ``low`` to 2**20; ``InvalidRequest`` if it is not one."""
    value = item[key]
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()  # of an array with one element, of any dimensions
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= MAX_SIDE:
        raise InvalidRequest(
            f"{key} in the dict must be an integer from {low} to {MAX_SIDE} (pixels), got {shown(_plain(value))}"
        )
    return int(value)


# -- quadrilaterals ---------------------------------------------------------------------------------------------------


def upright_box(item: Data, height: int, width: int) -> tuple[np.ndarray, int, int]:
    """Corners of the dict's ``box`` as float32, 4×2, and the height and width it has upright, in pixels.

    ``InvalidRequest`` for a box that is missing, or that no image of ``height`` × ``width`` pixels can be warped by.
    """
    where, wanted = _image(height, width), "[[x, y], …], top left, top right, bottom right, bottom left"
    points = _box(item, (4, 2), f"{wanted}, to warp {where} by", wanted, where)
    top, right, bottom, left = (math.dist(points[corner], points[(corner + 1) % 4]) for corner in range(4))
    if max(top, right, bottom, left) > MAX_SIDE:
        raise InvalidRequest(f"{TASK_BOX_KEY} {points} has an edge longer than {MAX_SIDE} pixels, for {where}")
    for axis, size in enumerate((width, height)):
        ends = [point[axis] for point in points]
        if max(ends) <= 0 or min(ends) >= size:
            raise InvalidRequest(f"{TASK_BOX_KEY} {points} lies outside {where}")
    corners = np.array(points, np.float32)
    if not _is_convex(corners.astype(np.float64)):
        raise InvalidRequest(
            f"{TASK_BOX_KEY} {points} is not a quadrilateral for {where}: two corners are equal, three lie on a line, "
            "or the order is not top left, top right, bottom right, bottom left"
        )
    return corners, max(1, round(max(left, right))), max(1, round(max(top, bottom)))


def _is_convex(corners: np.ndarray) -> bool:
    """Whether all corners turn to the same side, by an angle that is neither 0 nor 180°."""
    edges = np.roll(corners, -1, 0) - corners
    following = np.roll(edges, -1, 0)
    products = np.linalg.norm(edges, axis=1) * np.linalg.norm(following, axis=1)
    turns = (edges[:, 0] * following[:, 1] - edges[:, 1] * following[:, 0]) / np.maximum(products, 1e-300)
    return bool(turns.min() > MIN_SINE or turns.max() < -MIN_SINE)


# -- values of a dict -------------------------------------------------------------------------------------------------


def _box(item: Data, shape: tuple[int, ...], purpose: str, wanted: str, where: str) -> Any:
    """The dict's ``box`` as lists of floats; ``InvalidRequest`` unless it holds finite numbers in this ``shape``.

    A leading batch dimension of 1 is ignored: the Open Inference Protocol has no inputs without one.
    """
    value = _plain(item.get(TASK_BOX_KEY))
    if value is None:
        raise InvalidRequest(f"the dict has no {TASK_BOX_KEY!r} = {purpose}")
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # lists of different lengths, a tensor on a GPU
        array = np.empty(0)
    array = array[0] if array.shape[:1] == (1,) else array
    if array.shape != shape or array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise InvalidRequest(f"{TASK_BOX_KEY} must hold {wanted}, got {shown(value)} for {where}")
    return array.astype(np.float64).tolist()


def _plain(value: Any) -> Any:
    # NOTE: a client's array may have millions of numbers, which take ten times the memory in Python.
    if not hasattr(value, "tolist") or math.prod(getattr(value, "shape", ())) > 8:
        return value
    return value.tolist()


def _image(height: int, width: int) -> str:
    return f"an image of {width}x{height} pixels"
