"""Mats and their colors, by OpenCV and Pillow.

A Mat is a ``numpy.ndarray`` of shape H×W×C, ``uint8`` or ``float32``; its ``color`` travels in the dict.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from torchpipe_py.backends.arrays import is_foreign, to_host_array
from torchpipe_py.backends.base import Data, Isolation, ItemBackend
from torchpipe_py.backends.image import geometry, original
from torchpipe_py.backends.image.geometry import Placement
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import MAT
from torchpipe_py.errors import ConfigError, InvalidRequest, shown
from torchpipe_py.keys import TASK_BOX_KEY, TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int, to_ints, to_str
from torchpipe_py.wire.values import single

COLORS = ("bgr", "rgb")
"""Channel orders."""

MAT_COLORS = (*COLORS, "gray")

OF_MATS, OF_TENSORS = "bgr", "rgb"
"""The default channel order, of an image whose dict has no ``color``."""

UINT8, FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
EIGHT_BITS = (UINT8,)


# -- inputs --------------------------------------------------------------------------------------------------


def color_of(item: Data, channels: int, default: str) -> str:
    """The color of an image with so many channels: gray for one, otherwise the dict's ``color``, or ``default``.

    ``InvalidRequest`` for a ``color`` that is not a channel order.
    """
    if channels == 1:
        return "gray"
    color: str = item.get(TASK_COLOR_KEY, default)
    if not isinstance(color, str):
        color = single(color)
    if not (isinstance(color, str) and color in COLORS):
        raise InvalidRequest(f"color {shown(color)} of an image of {channels} channels; expected bgr or rgb")
    return color


def name_color(item: Data, channels: int, default: str) -> None:
    """Name the color in the dict before a Mat becomes a Tensor, or a Tensor a Mat, since its default changes then."""
    if channels in (3, 4):
        item.setdefault(TASK_COLOR_KEY, default)


def to_color(value: Any) -> str:
    """A color name in lower case."""
    return to_str(value).lower()


def as_mat(value: Any, dtypes: tuple[np.dtype, ...] = (UINT8, FLOAT32)) -> np.ndarray:
    """``value`` as an H×W×C array of one of ``dtypes``; H×W becomes H×W×1; ``InvalidRequest`` for anything else.

    An array of another library on the host is taken, too (see ``arrays``).
    """
    # NOTE: on the path of every request: compare dtypes by identity, since comparing one with a type is slow.
    if isinstance(value, np.ndarray) and (value.dtype is UINT8 or value.dtype in dtypes) and value.size:
        if value.ndim == 3:
            return value
        if value.ndim == 2:
            return value[:, :, None]
    elif is_foreign(value):
        array = to_host_array(value)
        if array is not None:
            return as_mat(array, dtypes)
    kind = f"{value.dtype} array of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    raise InvalidRequest(f"expected a Mat ({' or '.join(map(str, dtypes))} array, HxWxC), got {kind}")


class Recolor:
    """The Mat under ``data`` in the channel order ``wanted``; ``InvalidRequest`` if its own is unknown."""

    def __init__(self, wanted: str) -> None:
        import cv2

        self._wanted = wanted
        self._convert: Callable[..., Any] = cv2.cvtColor
        self._codes = {
            color: getattr(cv2, f"COLOR_{color.upper()}2{wanted.upper()}") for color in MAT_COLORS if color != wanted
        }
        self._codes[wanted] = cv2.COLOR_BGRA2BGR  # for either order

    def __call__(self, item: Data) -> np.ndarray:
        mat = as_mat(item[TASK_DATA_KEY])
        channels = mat.shape[2]
        if channels not in (1, 3, 4):
            raise InvalidRequest(f"color {self._wanted} needs a Mat of 1, 3 or 4 channels, got {channels}")
        color = color_of(item, channels, OF_MATS)
        if color != self._wanted or channels == 4:
            mat = as_mat(self._convert(mat, self._codes[color]))
        return mat


def encoded_bytes(value: Any) -> np.ndarray:
    """Encoded image bytes as a contiguous 1-D ``uint8`` array, mostly no copy; ``InvalidRequest`` for others."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 1:
            return np.ascontiguousarray(value)
        raise InvalidRequest(f"expected encoded bytes, got {value.dtype} array of shape {value.shape}")
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"expected encoded bytes, got {type(value).__name__}{_instead_of(value)}")
    if isinstance(value, memoryview):
        try:
            value = value if value.c_contiguous else value.tobytes()
        except ValueError as error:  # it was released
            raise InvalidRequest(f"expected encoded bytes: {error}") from None
    return np.frombuffer(value, UINT8)


def _instead_of(value: Any) -> str:
    """A hint at the value to pass in place of one that is not an encoded image; empty if nothing is known."""
    if isinstance(value, str):
        return '; of a file they are Path(...).read_bytes(), in JSON {"b64": "…"}'
    if isinstance(value, os.PathLike):
        return "; of a file they are Path(...).read_bytes()"
    if type(value).__module__.partition(".")[0] == "PIL":
        return "; pass the file's bytes, or a Mat: np.asarray(image.convert('RGB'))[:, :, ::-1]"
    if hasattr(value, "read") and hasattr(value, "readable"):
        return "; pass what its read() returns"
    if hasattr(value, "detach"):
        shape = "x".join(map(str, value.shape))
        if value.ndim == 4:
            return f" of {shape}; send the bytes of the file; {_USED}"
        return f" of {shape}; send the bytes of the file; in Python pass a Mat, as of tensor.numpy(): HxWxC, uint8, BGR"
    return f"; {_USED}" if isinstance(value, tuple) else ""


_USED = "in Python, is the dict one of an earlier call? Each request needs a dict of its own"


# -- resizing and placing ---------------------------------------------------------------------------------------------


class Resize(Protocol):
    """``resize(mat, height, width)``: a new Mat of that size.

    ``part``: height and width of the part of ``mat`` to resize, from its top left corner on, less than a pixel smaller
    than ``mat``.
    """

    def __call__(
        self, mat: np.ndarray, height: int, width: int, part: tuple[float, float] | None = None
    ) -> np.ndarray: ...


INTERPOLATIONS = {
    "nearest": "INTER_NEAREST",
    "bilinear": "INTER_LINEAR",
    "bicubic": "INTER_CUBIC",
    "area": "INTER_AREA",
    "lanczos": "INTER_LANCZOS4",
}


def interpolation() -> Param:
    """The parameter ``interpolation`` of a backend that resizes by OpenCV."""
    return Param(to_str, "bilinear", choices=tuple(INTERPOLATIONS), doc="as OpenCV's INTER_ flag of that name")


def opencv_resize(interpolation: str) -> Resize:
    """A resize by ``cv2.resize``."""
    import cv2

    resize, flag = cv2.resize, getattr(cv2, INTERPOLATIONS[interpolation])

    def resized(mat: np.ndarray, height: int, width: int, part: tuple[float, float] | None = None) -> np.ndarray:
        if part is not None:
            # NOTE: OpenCV takes no fraction of a pixel, but any scale: the result is up to a pixel too large.
            scaled = resize(mat, None, fx=width / part[1], fy=height / part[0], interpolation=flag)
            return as_mat(np.ascontiguousarray(scaled[:height, :width]))
        # NOTE: without `dst`, OpenCV takes the GIL once more, to allocate the array.
        result: np.ndarray = resize(
            mat, (width, height), np.empty((height, width, mat.shape[2]), mat.dtype), 0, 0, flag
        )
        return result if result.ndim == 3 else result[:, :, None]

    return resized


def pillow_resize(interpolation: str) -> Resize:
    """A resize by Pillow's ``Image.resize``, of ``uint8`` and up to 4 channels."""
    from PIL import Image

    resampling = Image.Resampling[interpolation.upper()]

    def resized(mat: np.ndarray, height: int, width: int, part: tuple[float, float] | None = None) -> np.ndarray:
        if mat.shape[2] > 4:
            raise InvalidRequest(f"Pillow resizes up to 4 channels, the Mat has {mat.shape[2]}")
        image = Image.fromarray(mat[:, :, 0] if mat.shape[2] == 1 else mat)
        box = None if part is None else (0, 0, part[1], part[0])
        return as_mat(np.array(image.resize((width, height), resampling, box)))

    return resized


def place_mat(
    mat: np.ndarray,
    placement: Placement,
    resize: Resize | None,
    value: int,
    part: tuple[float, float] | None = None,
) -> np.ndarray:
    """``mat`` cropped, resized and padded with ``value``; the Mat itself if that changes nothing.

    ``part`` is that of ``resize``, for a placement that does not crop.
    """
    size, crop, canvas, top, left, _ = placement
    if crop is not None:
        mat = mat[crop[0] : crop[2], crop[1] : crop[3]]
    if resize is not None and (mat.shape[:2] != size or part is not None):
        mat = resize(mat, *size, part)
    if canvas is None:
        return mat if crop is None else mat.copy()
    placed = np.full((*canvas, mat.shape[2]), value, mat.dtype)
    placed[top : top + size[0], left : left + size[1]] = mat
    return placed


# -- backends for Mats only -----------------------------------------------------------------------------


class cvtColorMat(ItemBackend):
    """Mat to Mat in channel order ``color``, or gray, only if it differs; a dict without ``color`` holds a BGR Mat.

    A Mat of one channel is gray. Three channels become one, and one three, as ``cv2.cvtColor`` does it; of four the
    last is dropped. Sets ``color``. ``InvalidRequest`` for a Mat of another number of channels than 1, 3 or 4, and for
    a ``color`` of the dict that is not a channel order.
    """

    reads = (TASK_COLOR_KEY,)

    takes, gives = MAT, MAT
    keeps_sides = True
    keeps_nothing = True
    isolation = Isolation.FOLLOWS

    color = Param(to_color, choices=MAT_COLORS, doc="channel order wanted, or gray for one channel")

    def prefer_color(self, color: str | None) -> str | None:
        return None if self.color == "gray" else str(self.color)

    def setup(self) -> None:
        self._recolor = Recolor(self.color)

    def forward_item(self, item: Data) -> None:
        mat = self._recolor(item)
        item[TASK_COLOR_KEY] = self.color
        item[TASK_RESULT_KEY] = mat


class AlignMat(ItemBackend):
    """Says in the dict to what size a Mat is to be resized: int ``resize_h`` and ``resize_w``; the Mat is unchanged.

    The height is the parameter's. The width is what keeps the aspect ratio (a fraction of a pixel is cut off), rounded
    up to a multiple of ``align``, at most ``max_w``; or rounded up to the next of ``widths``, at most the last.
    ``DynamicResizeMat`` does the resizing. ``ConfigError`` for a ``max_w`` that is not a multiple of ``align``, for
    ``widths`` that do not ascend, and for both or neither of them. A value that is not a Mat has an
    ``InvalidRequest`` as its ``error``.
    """

    reads = (TASK_COLOR_KEY,)

    takes, gives = MAT, MAT
    keeps_sides = True
    keeps_color = True
    keeps_nothing = True

    resize_h = geometry.side("height to write, pixels")
    max_w = Param(to_int, 0, low=0, high=geometry.MAX_SIDE, doc="largest width to write, pixels; a multiple of align")
    align = Param(to_int, 32, low=1, high=geometry.MAX_SIDE, doc="what widths are multiples of, pixels")
    widths = Param(to_ints, (), doc="the widths to write instead, ascending, pixels: few, so that images share batches")

    def setup(self) -> None:
        if bool(self.max_w) == bool(self.widths):
            raise ConfigError("AlignMat needs max_w, the largest width, or widths, a list of them, and not both")
        if self.max_w % self.align:
            raise ConfigError(f"max_w = {self.max_w} is not a multiple of align = {self.align}")
        if list(self.widths) != sorted({width for width in self.widths if 0 < width <= geometry.MAX_SIDE}):
            raise ConfigError(f"widths must ascend from 1 to {geometry.MAX_SIDE} (pixels), got {list(self.widths)}")

    def forward_item(self, item: Data) -> None:
        height, width, _ = as_mat(item[TASK_DATA_KEY]).shape
        width = self.resize_h * width // height
        if self.widths:
            width = next((wide for wide in self.widths if wide >= width), self.widths[-1])
        else:
            width = min(max(-(-width // self.align), 1) * self.align, self.max_w)
        item[geometry.HEIGHT_KEY], item[geometry.WIDTH_KEY] = self.resize_h, width
        item[TASK_RESULT_KEY] = item[TASK_DATA_KEY]


class PerspectiveTransformMat(ItemBackend):
    """The quadrilateral ``box`` of a Mat made upright: [[x, y], …], top left, top right, bottom right, bottom left.

    ``box`` is a list, tuple or array of 4×2 numbers, in pixels, fractions kept. As in ``CropMat`` a coordinate lies
    between pixels: 0 is the left side of the first, and the width of the image the right side of the last. The result
    is as wide as the longer of the top and bottom edge and as high as the longer of the left and right one, rounded, at
    least one pixel. Outside the image its border is repeated. By ``cv2.warpPerspective``, for which the
    interpolation ``area`` is ``bilinear``. Later detections are in pixels of the result.

    No ``result``, but an ``InvalidRequest`` as ``error``: a box that is missing, is not 4×2 finite numbers, has an edge
    longer than 2**20 or more than ``max_pixels``, has its corners crosswise, three of them on a line or two equal, or
    lies outside the image; a value that is not a Mat.
    """

    reads = (TASK_BOX_KEY, TASK_COLOR_KEY)

    takes, gives = MAT, MAT
    keeps_color = True
    keeps_nothing = True

    interpolation = interpolation()
    max_pixels = geometry.max_pixels()

    def setup(self) -> None:
        import cv2

        self._transform: Callable[..., Any] = cv2.getPerspectiveTransform
        self._warp: Callable[..., Any] = cv2.warpPerspective
        self._options = {"flags": getattr(cv2, INTERPOLATIONS[self.interpolation]), "borderMode": cv2.BORDER_REPLICATE}

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        corners, height, width = geometry.upright_box(item, mat.shape[0], mat.shape[1])
        geometry.check_size((height, width), mat.shape[2], mat.itemsize, self.max_pixels)
        upright = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
        # NOTE: OpenCV's coordinates start in the middle of the first pixel, those of a box at its corner.
        matrix = self._transform(corners - np.float32(0.5), upright - np.float32(0.5))
        item[TASK_RESULT_KEY] = as_mat(self._warp(mat, matrix, (width, height), **self._options))
        original.begin(item, height, width)
