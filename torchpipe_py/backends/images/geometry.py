"""Parts, sizes and perspective of Mats, where the dict of the request says which."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, Param, StatelessBackend
from torchpipe_py.backends.images.opencv import (
    INTERPOLATIONS,
    MAX_SIDE,
    as_mat,
    cv2_resize,
    interpolation,
    max_pixels,
    side,
)
from torchpipe_py.errors import ConfigError, InvalidRequest, shown
from torchpipe_py.keys import TASK_BOX_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int

HEIGHT_KEY = "resize_h"
WIDTH_KEY = "resize_w"

MIN_SINE = 1e-3
"""Of the angle at a corner of a quadrilateral; below it three corners are taken to lie on one line."""


class CropMat(StatelessBackend):
    """The part of a Mat H×W×C that ``box`` in the dict names: [left, top, right, bottom] in pixels; a contiguous copy.

    ``box`` is a list, tuple or array of four numbers; right and bottom are the first pixels outside. Fractions are
    rounded, and what lies outside the image is cut off, as ``CropTensor`` does it. A box that is missing, is no four
    finite numbers, or leaves no pixel: no ``result``, ``error`` is an ``InvalidRequest``. So it is for what is no Mat.
    """

    keeps_color = True

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        left, top, right, bottom = crop_box(item, mat.shape[0], mat.shape[1])
        item[TASK_RESULT_KEY] = mat[top:bottom, left:right].copy()


class AlignMat(StatelessBackend):
    """Says in the dict to what size a Mat is to be resized: int ``resize_h`` and ``resize_w``; the Mat is unchanged.

    The height is the parameter's. The width keeps the aspect ratio, but is a multiple of ``align``, the nearest one
    (of two that are equally near, the larger), from ``align`` to ``max_w``. ``DynamicResizeMat`` does the resizing.
    ``ConfigError`` for a ``resize_h`` or ``max_w`` that is no multiple of ``align``; an ``InvalidRequest`` is the
    ``error`` of what is no Mat.
    """

    keeps_color = True

    resize_h = side("height to write, pixels; a multiple of align")
    max_w = side("largest width to write, pixels; a multiple of align")
    align = Param(to_int, 32, low=1, high=MAX_SIDE, doc="what both sides are multiples of, pixels")

    def setup(self) -> None:
        for key, value in (("resize_h", self.resize_h), ("max_w", self.max_w)):
            if value % self.align:
                raise ConfigError(f"{key} = {value} is no multiple of align = {self.align}")

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        item[HEIGHT_KEY] = self.resize_h
        item[WIDTH_KEY] = aligned_width(mat.shape[0], mat.shape[1], self.resize_h, self.max_w, self.align)
        item[TASK_RESULT_KEY] = item[TASK_DATA_KEY]


class DynamicResizeMat(StatelessBackend):
    """Mat to Mat of the dict's ``resize_h`` × ``resize_w`` by ``cv2.resize``; the aspect ratio is not kept.

    Both are integers from 1 to 2**20, in pixels, their product ``max_pixels`` at most; ``AlignMat`` writes them. One
    that is missing, no integer, or out of these bounds: no ``result``, ``error`` is an ``InvalidRequest``.
    So it is for what is no Mat.
    """

    keeps_color = True

    interpolation = interpolation()
    max_pixels = max_pixels()

    def setup(self) -> None:
        self._resize, self._flag = cv2_resize(self.interpolation)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        height, width = _wanted_side(item, HEIGHT_KEY), _wanted_side(item, WIDTH_KEY)
        if mat.shape[:2] != (height, width):
            check_size(height, width, mat.shape[2], self.max_pixels)
            mat = as_mat(self._resize(mat, (width, height), interpolation=self._flag))
        item[TASK_RESULT_KEY] = mat


class PerspectiveTransformMat(StatelessBackend):
    """The quadrilateral ``box`` of a Mat made upright: [[x, y], …], top left, top right, bottom right, bottom left.

    ``box`` is a list, tuple or array of 4×2 numbers, in pixels, fractions kept. As in ``CropMat`` a coordinate lies
    between pixels: 0 is the left side of the first, and the width of the image the right side of the last. The result
    is as wide as the longer of the top and bottom edge and as high as the longer of the left and right one, rounded, at
    least one pixel. What lies outside the image repeats its border. By ``cv2.warpPerspective``, for which the
    interpolation ``area`` is ``bilinear``.

    A box that is missing, is no 4×2 finite numbers, has an edge longer than 2**20 or more than ``max_pixels``, has its
    corners crosswise, three of them on a line or two equal, or lies outside the image: no ``result``, ``error`` is an
    ``InvalidRequest``. So it is for what is no Mat.
    """

    keeps_color = True

    interpolation = interpolation()
    max_pixels = max_pixels()

    def setup(self) -> None:
        import cv2

        self._transform: Callable[..., Any] = cv2.getPerspectiveTransform
        self._warp: Callable[..., Any] = cv2.warpPerspective
        self._flag = getattr(cv2, INTERPOLATIONS[self.interpolation])
        self._border = cv2.BORDER_REPLICATE

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        corners, width, height = upright_box(item, mat.shape[0], mat.shape[1])
        check_size(height, width, mat.shape[2], self.max_pixels)
        upright = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
        # NOTE: OpenCV counts from the middle of the first pixel, a box from its corner.
        matrix = self._transform(corners - np.float32(0.5), upright - np.float32(0.5))
        warped = self._warp(mat, matrix, (width, height), flags=self._flag, borderMode=self._border)
        item[TASK_RESULT_KEY] = as_mat(warped)


def check_size(height: int, width: int, channels: int, max_pixels: int) -> None:
    """``InvalidRequest`` for a size of more than ``max_pixels``, of four channels; with more channels they count."""
    if height * width * max(channels, 4) > 4 * max_pixels:
        many = f" of {channels} channels" if channels > 4 else ""
        raise InvalidRequest(f"{width}x{height} pixels{many} were asked for, more than max_pixels = {max_pixels}")


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


def aligned_width(height: int, width: int, resize_h: int, max_w: int, align: int) -> int:
    """The multiple of ``align`` from ``align`` to ``max_w``, itself one, nearest to the width that keeps the aspect.

    ``height`` × ``width`` is the image's size, ``resize_h`` its new height; all in pixels. Of two equally near, the
    larger.
    """
    # round(width * resize_h / height / align), in integers: exact, and halves go up
    count = (2 * width * resize_h + height * align) // (2 * height * align)
    return min(max(count, 1) * align, max_w)


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
    """The dict's ``box`` without NumPy or PyTorch around it; ``InvalidRequest`` where there is none."""
    if item.get(TASK_BOX_KEY) is None:
        raise InvalidRequest(f"the dict has no {TASK_BOX_KEY!r} = {wanted}")
    return _plain(item[TASK_BOX_KEY])


def _plain(value: Any) -> Any:
    # NOTE: an array of a client's may have millions of numbers, which as Python's take ten times the memory.
    if not hasattr(value, "tolist") or math.prod(getattr(value, "shape", ())) > 8:
        return value
    return value.tolist()


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


def _wanted_side(item: Data, key: str) -> int:
    """The dict's ``key`` as an image side in pixels; ``InvalidRequest`` where it is none."""
    if key not in item:
        raise InvalidRequest(f"the dict has no {key!r}, the side to resize to, in pixels")
    value = item[key]
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= MAX_SIDE:
        raise InvalidRequest(
            f"{key} in the dict must be an integer from 1 to {MAX_SIDE} (pixels), got {shown(_plain(value))}"
        )
    return int(value)
