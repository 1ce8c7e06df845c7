"""Sizes, parts and perspective of Mats, by OpenCV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, Isolation, StatelessBackend
from torchpipe_py.backends.image.geometry import (
    HEIGHT_KEY,
    MAX_SIDE,
    WIDTH_KEY,
    aligned_width,
    central,
    check_channels,
    check_size,
    crop_box,
    fit_inside,
    upright_box,
    wanted_side,
)
from torchpipe_py.backends.image.opencv import as_mat, max_pixels, side
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import MAT
from torchpipe_py.errors import ConfigError
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_bool, to_int, to_ints, to_str

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


def pad_value(default: int) -> Param:
    """The parameter ``pad_value``."""
    return Param(to_int, default, low=0, high=255, doc="value of the padding in every channel")


def keep_aspect() -> Param:
    """The parameter ``keep_aspect``."""
    return Param(to_bool, False, doc="whether to pad instead of stretching")


def cv2_resize(interpolation: str) -> tuple[Callable[..., Any], int]:
    """``cv2.resize``, and the flag for its interpolation."""
    import cv2

    return cv2.resize, getattr(cv2, INTERPOLATIONS[interpolation])


class ResizeMat(StatelessBackend):
    """Mat to Mat of ``resize_h`` × ``resize_w`` by ``cv2.resize``; the aspect ratio is not kept."""

    takes, gives = MAT, MAT
    sides = ("resize_h", "resize_w")
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
            channels = mat.shape[2]
            check_channels(self.resize_h, self.resize_w, channels)
            # NOTE: OpenCV would take the GIL to make the array, and give it up once more.
            resized = np.empty((*self._shape, channels), mat.dtype)
            mat = self._resize(mat, self._size, resized, 0, 0, self._flag)
            if mat.ndim == 2:
                mat = mat[:, :, None]
        item[TASK_RESULT_KEY] = mat


class ResizePadMat(StatelessBackend):
    """Mat to Mat of ``max_h`` × ``max_w``: the largest that fits with its aspect ratio, top left, the rest padded.

    Writes ``inverse_trans(x, y)``, which maps a point of the output to the input, in pixels.
    """

    takes, gives = MAT, MAT
    sides = ("max_h", "max_w")
    keeps_color = True
    centred = False

    interpolation = interpolation()
    max_h = side("output height, pixels")
    max_w = side("output width, pixels")
    pad_value = pad_value(0)

    def setup(self) -> None:
        self._resize, self._flag = cv2_resize(self.interpolation)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        height, width, channels = mat.shape
        check_channels(self.max_h, self.max_w, channels)
        new_h, new_w, top, left, inverse_trans = fit_inside(height, width, self.max_h, self.max_w, self.centred)
        padded = np.full((self.max_h, self.max_w, channels), self.pad_value, mat.dtype)
        resized = as_mat(self._resize(mat, (new_w, new_h), interpolation=self._flag))
        padded[top : top + new_h, left : left + new_w] = resized
        item[TASK_RESULT_KEY] = padded
        item["inverse_trans"] = inverse_trans


class LetterBoxMat(ResizePadMat):
    """As ``ResizePadMat``, but in the middle, as YOLO models take it, by default on gray.

    Of an odd number of rows or columns to pad, the larger half is below or on the right, as in Ultralytics' LetterBox.
    """

    centred = True

    pad_value = pad_value(114)


class CropMat(StatelessBackend):
    """The part of a Mat H×W×C that ``box`` in the dict names: [left, top, right, bottom] in pixels; a contiguous copy.

    ``box`` is a list, tuple or array of four numbers; right and bottom are the first pixels outside. Fractions are
    rounded, and what lies outside the image is cut off, as ``CropTensor`` does it. A box that is missing, is no four
    finite numbers, or leaves no pixel: no ``result``, ``error`` is an ``InvalidRequest``. So it is for what is no Mat.
    """

    takes, gives = MAT, MAT
    keeps_color = True

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        left, top, right, bottom = crop_box(item, mat.shape[0], mat.shape[1])
        item[TASK_RESULT_KEY] = mat[top:bottom, left:right].copy()


class CenterCropMat(StatelessBackend):
    """The middle ``crop_h`` × ``crop_w`` of a Mat, as torchvision's ``CenterCrop``; a smaller Mat is padded with 0.

    A contiguous copy.
    """

    takes, gives = MAT, MAT
    sides = ("crop_h", "crop_w")
    keeps_color = True
    isolation = Isolation.FOLLOWS

    crop_h = side("output height, pixels")
    crop_w = side("output width, pixels")

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        height, width, channels = mat.shape
        (top, above), (left, before) = central(height, self.crop_h), central(width, self.crop_w)
        part = mat[top : top + self.crop_h, left : left + self.crop_w]
        if part.shape[:2] == (self.crop_h, self.crop_w):
            item[TASK_RESULT_KEY] = part.copy()
            return
        check_channels(self.crop_h, self.crop_w, channels)
        padded = np.zeros((self.crop_h, self.crop_w, channels), mat.dtype)
        padded[above : above + part.shape[0], before : before + part.shape[1]] = part
        item[TASK_RESULT_KEY] = padded


class AlignMat(StatelessBackend):
    """Says in the dict to what size a Mat is to be resized: int ``resize_h`` and ``resize_w``; the Mat is unchanged.

    The height is the parameter's. The width is what keeps the aspect ratio (a fraction of a pixel is cut off), rounded
    up to a multiple of ``align``, at most ``max_w``; or rounded up to the next of ``widths``, at most the last.
    ``DynamicResizeMat`` does the resizing. ``ConfigError`` for a ``max_w`` that is no multiple of ``align``, for
    ``widths`` that do not ascend, and for both or neither of them; an ``InvalidRequest`` is the ``error`` of what is no
    Mat.
    """

    takes, gives = MAT, MAT
    keeps_sides = True
    keeps_color = True

    resize_h = side("height to write, pixels")
    max_w = Param(to_int, 0, low=0, high=MAX_SIDE, doc="largest width to write, pixels; a multiple of align")
    align = Param(to_int, 32, low=1, high=MAX_SIDE, doc="what widths are multiples of, pixels")
    widths = Param(to_ints, (), doc="the widths to write instead, ascending, pixels: few, so that images share batches")

    def setup(self) -> None:
        if bool(self.max_w) == bool(self.widths):
            raise ConfigError("AlignMat needs max_w, the largest width, or widths, a list of them, and not both")
        if self.max_w % self.align:
            raise ConfigError(f"max_w = {self.max_w} is no multiple of align = {self.align}")
        if list(self.widths) != sorted({width for width in self.widths if 0 < width <= MAX_SIDE}):
            raise ConfigError(f"widths must ascend from 1 to {MAX_SIDE} (pixels), got {list(self.widths)}")

    def forward_item(self, item: Data) -> None:
        height, width, _ = as_mat(item[TASK_DATA_KEY]).shape
        item[HEIGHT_KEY] = self.resize_h
        item[WIDTH_KEY] = self._round_up(self.resize_h * width // height)
        item[TASK_RESULT_KEY] = item[TASK_DATA_KEY]

    def _round_up(self, width: int) -> int:
        if not self.widths:
            return aligned_width(width, self.align, self.max_w)
        chosen: int = next((wide for wide in self.widths if wide >= width), self.widths[-1])
        return chosen


class DynamicResizeMat(StatelessBackend):
    """Mat to Mat of the dict's ``resize_h`` × ``resize_w`` by ``cv2.resize``; the aspect ratio is kept only if asked.

    With ``keep_aspect`` it becomes as large as fits, top left, and the rest is padded with ``pad_value``. The sides are
    integers from 1 to 2**20, in pixels, their product ``max_pixels`` at most; ``AlignMat`` writes them. One that is
    missing, no integer, or out of these bounds: no ``result``, ``error`` is an ``InvalidRequest``. So it is for what is
    no Mat.
    """

    takes, gives = MAT, MAT
    keeps_color = True

    interpolation = interpolation()
    keep_aspect = keep_aspect()
    pad_value = pad_value(0)
    max_pixels = max_pixels()

    def setup(self) -> None:
        self._resize, self._flag = cv2_resize(self.interpolation)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        height, width = wanted_side(item, HEIGHT_KEY), wanted_side(item, WIDTH_KEY)
        if mat.shape[:2] != (height, width):
            check_size(height, width, mat.shape[2] * mat.itemsize, self.max_pixels)
            if self.keep_aspect:
                mat = self._fitted(mat, height, width)
            else:
                mat = as_mat(self._resize(mat, (width, height), interpolation=self._flag))
        item[TASK_RESULT_KEY] = mat

    def _fitted(self, mat: np.ndarray, height: int, width: int) -> np.ndarray:
        fitted = fit_inside(mat.shape[0], mat.shape[1], height, width)
        padded = np.full((height, width, mat.shape[2]), self.pad_value, mat.dtype)
        resized = self._resize(mat, (fitted.width, fitted.height), interpolation=self._flag)
        padded[: fitted.height, : fitted.width] = as_mat(resized)
        return padded


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

    takes, gives = MAT, MAT
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
