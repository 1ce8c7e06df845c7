"""Sizes, parts and perspective of Mats, by OpenCV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, Isolation, Param, StatelessBackend
from torchpipe_py.backends.images.geometry import (
    HEIGHT_KEY,
    MAX_SIDE,
    WIDTH_KEY,
    aligned_width,
    check_channels,
    check_size,
    crop_box,
    fit_inside,
    upright_box,
    wanted_side,
)
from torchpipe_py.backends.images.opencv import as_mat, max_pixels, side
from torchpipe_py.errors import ConfigError
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int, to_str

INTERPOLATIONS = {
    "nearest": "INTER_NEAREST",
    "bilinear": "INTER_LINEAR",
    "bicubic": "INTER_CUBIC",
    "area": "INTER_AREA",
    "lanczos": "INTER_LANCZOS4",
}


def interpolation() -> Param:
    """The parameter ``interpolation``."""
    return Param(to_str, "bilinear", choices=tuple(INTERPOLATIONS), doc="as OpenCV's INTER_ flag of that name")


def cv2_resize(interpolation: str) -> tuple[Callable[..., Any], int]:
    """``cv2.resize``, and the flag for its interpolation."""
    import cv2

    return cv2.resize, getattr(cv2, INTERPOLATIONS[interpolation])


class ResizeMat(StatelessBackend):
    """Mat to Mat of ``resize_h`` × ``resize_w`` by ``cv2.resize``; the aspect ratio is not kept."""

    keeps_color = True
    isolation = Isolation.FOLLOWS

    interpolation = interpolation()
    resize_h = side("output height, pixels")
    resize_w = side("output width, pixels")

    def setup(self) -> None:
        self._resize, self._flag = cv2_resize(self.interpolation)
        self._shape, self._size = (self.resize_h, self.resize_w), (self.resize_w, self.resize_h)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        if mat.shape[:2] != self._shape:
            check_channels(self.resize_h, self.resize_w, mat.shape[2])
            mat = self._resize(mat, self._size, None, 0, 0, self._flag)
            if mat.ndim == 2:
                mat = mat[:, :, None]
        item[TASK_RESULT_KEY] = mat


class ResizePadMat(StatelessBackend):
    """Mat to Mat of ``max_h`` × ``max_w``: the largest that fits with its aspect ratio, top left, the rest padded.

    Writes ``inverse_trans(x, y)``, which maps a point of the output to the input, in pixels.
    """

    keeps_color = True

    interpolation = interpolation()
    max_h = side("output height, pixels")
    max_w = side("output width, pixels")
    pad_value = Param(to_int, 0, low=0, high=255, doc="value of the padding in every channel")

    def setup(self) -> None:
        self._resize, self._flag = cv2_resize(self.interpolation)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        height, width, channels = mat.shape
        check_channels(self.max_h, self.max_w, channels)
        new_h, new_w, inverse_trans = fit_inside(height, width, self.max_h, self.max_w)
        padded = np.full((self.max_h, self.max_w, channels), self.pad_value, mat.dtype)
        padded[:new_h, :new_w] = as_mat(self._resize(mat, (new_w, new_h), interpolation=self._flag))
        item[TASK_RESULT_KEY] = padded
        item["inverse_trans"] = inverse_trans


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
        height, width = wanted_side(item, HEIGHT_KEY), wanted_side(item, WIDTH_KEY)
        if mat.shape[:2] != (height, width):
            check_size(height, width, mat.shape[2] * mat.itemsize, self.max_pixels)
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
        check_size(height, width, mat.shape[2] * mat.itemsize, self.max_pixels)
        upright = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
        # NOTE: OpenCV counts from the middle of the first pixel, a box from its corner.
        matrix = self._transform(corners - np.float32(0.5), upright - np.float32(0.5))
        warped = self._warp(mat, matrix, (width, height), flags=self._flag, borderMode=self._border)
        item[TASK_RESULT_KEY] = as_mat(warped)
