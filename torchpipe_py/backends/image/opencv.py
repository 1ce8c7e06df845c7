"""Mats decoded and recolored by OpenCV.

A Mat is a ``numpy.ndarray`` of shape H×W×C, ``uint8`` or ``float32``; its ``color`` travels in the dict.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, Isolation, StatelessBackend
from torchpipe_py.backends.image.geometry import MAX_SIDE
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import ENCODED, ENCODED_IMAGE, MAT, Signature
from torchpipe_py.errors import DecodeError, InvalidRequest, first_line, shown
from torchpipe_py.images.header import FORMATS, MAX_PIXELS, HeaderCheck, Size, declared_size, is_large, to_formats
from torchpipe_py.images.memory import DECODING, SMALL
from torchpipe_py.images.png import without_profile_name
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int, to_str

COLORS = ("bgr", "rgb")
"""Channel orders."""

MAT_COLORS = (*COLORS, "gray")

OF_MATS, OF_TENSORS = "bgr", "rgb"
"""The channel order of an image whose dict has no ``color``."""


def color_of(item: Data, channels: int, default: str) -> str:
    """What an image of so many channels holds: gray where it is one, else the dict's ``color``, or else ``default``.

    ``InvalidRequest`` for a ``color`` that is no channel order.
    """
    if channels == 1:
        return "gray"
    color: str = item.get(TASK_COLOR_KEY, default)
    if not (isinstance(color, str) and color in COLORS):
        raise InvalidRequest(f"color {shown(color)} of an image of {channels} channels; expected bgr or rgb")
    return color


def name_color(item: Data, channels: int, default: str) -> None:
    """Say in the dict what an image of so many channels holds, before a Tensor is made of a Mat, or a Mat of a Tensor.

    What it becomes has another default.
    """
    if channels in (3, 4):
        item.setdefault(TASK_COLOR_KEY, default)


def to_color(value: Any) -> str:
    """A color name in lower case."""
    return to_str(value).lower()


def side(doc: str) -> Param:
    """A required image side in pixels."""
    return Param(to_int, low=1, high=MAX_SIDE, doc=doc)


def max_pixels() -> Param:
    """The parameter ``max_pixels``."""
    return Param(to_int, MAX_PIXELS, low=1, high=2**30, doc="most pixels of an image; a larger one is refused")


UINT8, FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
EIGHT_BITS = (UINT8,)


def as_mat(value: Any, dtypes: tuple[np.dtype, ...] = (UINT8, FLOAT32)) -> np.ndarray:
    """``value`` as an H×W×C array of one of ``dtypes``; H×W becomes H×W×1; ``InvalidRequest`` for anything else."""
    # NOTE: on the path of every request, under the GIL: a dtype is one object, and comparing it with a type is slow.
    if isinstance(value, np.ndarray) and (value.dtype is UINT8 or value.dtype in dtypes) and value.size:
        if value.ndim == 3:
            return value
        if value.ndim == 2:
            return value[:, :, None]
    kind = f"{value.dtype} array of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
    raise InvalidRequest(f"expected a Mat ({' or '.join(map(str, dtypes))} array, HxWxC), got {kind}")


def encoded_bytes(value: Any) -> np.ndarray:
    """Encoded image bytes as a contiguous 1-D ``uint8`` array, mostly no copy; ``InvalidRequest`` for others."""
    if isinstance(value, bytes):
        return np.frombuffer(value, UINT8)
    if isinstance(value, np.ndarray):
        if value.dtype == np.uint8 and value.ndim == 1:
            return np.ascontiguousarray(value)
        raise InvalidRequest(f"expected encoded bytes, got {value.dtype} array of shape {value.shape}")
    if not isinstance(value, (bytearray, memoryview)):
        hint = "; of a file they are Path(...).read_bytes()" if isinstance(value, (str, os.PathLike)) else ""
        hint += ', in JSON {"b64": "…"}' if isinstance(value, str) else ""
        raise InvalidRequest(f"expected encoded bytes, got {type(value).__name__}{hint}")
    return np.frombuffer(value, UINT8)


class MatDecoder:
    """Encoded image bytes to a Mat, H×W×3 or gray H×W×1, by ``cv2.imdecode``, which sees what a ``HeaderCheck`` passes.

    Large images, of more than a quarter of ``max_pixels``, have up to eight bytes for each of ``max_pixels`` under way
    in a process, and the others half as much beside them; the next image waits.
    """

    def __init__(self, color: str, formats: Sequence[str] = FORMATS, max_pixels: int = MAX_PIXELS) -> None:
        import cv2

        self._check = HeaderCheck(formats, max_pixels)
        self._max_pixels, self._limit = max_pixels, 8 * max_pixels
        self._imdecode: Callable[..., Any] = cv2.imdecode
        flags = {"bgr": cv2.IMREAD_COLOR_BGR, "rgb": cv2.IMREAD_COLOR_RGB, "gray": cv2.IMREAD_GRAYSCALE}
        self._flags = flags[color]
        self._cv2_error = cv2.error

    def __call__(self, data: Any, start: Size | None = None) -> Any:
        """A Mat, of the size in the header or turned by a quarter; ``DecodeError`` where there is none.

        ``start`` is what ``declared_size`` has read of it. ``InvalidRequest`` for what is no bytes.
        """
        encoded = encoded_bytes(data)
        header = self._check(data if isinstance(data, bytes) else encoded.data, start)
        if header.format == "png":
            encoded = np.frombuffer(without_profile_name(encoded.data), UINT8)
        try:
            if header.memory <= SMALL:
                mat = self._imdecode(encoded, self._flags)
            else:
                with DECODING.reserved(
                    header.memory, self._limit, is_large(header.width * header.height, self._max_pixels)
                ):
                    mat = self._imdecode(encoded, self._flags)
        except self._cv2_error as error:
            reason = getattr(error, "err", "") or first_line(error)  # the rest names OpenCV's own files
            raise DecodeError(f"{len(encoded)} bytes: OpenCV: {reason.strip()}") from None
        if mat is None:
            size = f"{header.width}x{header.height}"
            raise DecodeError(
                f"{len(encoded)} bytes: OpenCV cannot decode this {header.format} of {size} pixels;"
                " it is damaged, cut off or of a rare kind"
            )
        return mat if mat.ndim == 3 else mat[:, :, None]


class DecodeMat(StatelessBackend):
    """Encoded image bytes (JPEG, PNG, WebP, BMP) to an H×W×3 Mat by ``cv2.imdecode``; H×W×1 with ``color = "gray"``.

    Whatever an image holds becomes these channels of 8 bits, EXIF orientation is applied, alpha is dropped.
    No ``result``, but a ``DecodeError`` as ``error``: bytes that are no image, of a format that is not in ``formats``,
    of more pixels than ``max_pixels``, JPEGs of more than 32 scans or 16 × ``max_pixels`` in all of them, animated PNG
    and WebP. All that is read from the header, before OpenCV sees the image. At a time a process decodes what takes up
    to twelve bytes for each of ``max_pixels``; the next image waits. One of more than a quarter of ``max_pixels`` keeps
    no smaller one waiting, where its node takes one request at a time and has two instances or more.
    """

    takes, gives = ENCODED, MAT
    isolation = Isolation.MOVES

    color = Param(to_color, "bgr", choices=MAT_COLORS, doc="channel order of the Mat, or gray for one channel")
    formats = Param(to_formats, FORMATS, doc="what is read, of jpeg, png, webp, bmp, gif, tiff, pnm")
    max_pixels = max_pixels()

    def prefer_color(self, color: str | None) -> str | None:
        # NOTE: gray is not the same pixels, whether it is decoded or converted.
        if color is not None and self.color != "gray":
            self.color = color
        return None

    # What ``is_large`` has read, until the same bytes are decoded. NOTE: bytes never change in between.
    _declared: tuple[bytes, Size | None] | None = None
    _decodes = False  # in a process of its own it only says what is large

    def setup(self) -> None:
        self._decodes = True
        self._decode = MatDecoder(self.color, self.formats, self.max_pixels)

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def is_large(self, item: Data) -> bool:
        data = item[TASK_DATA_KEY]
        size = declared_size(data)
        large = size is not None and is_large(size.width * size.height, self.max_pixels)
        # NOTE: a large one may be put aside, or end there, and would be kept here.
        if self._decodes and isinstance(data, bytes) and not large:
            self._declared = data, size
        return large

    def forward_item(self, item: Data) -> None:
        data, declared = item[TASK_DATA_KEY], self._declared
        self._declared = None
        try:
            start = None if declared is None or declared[0] is not data else declared[1]
            item[TASK_RESULT_KEY] = self._decode(data, start)
        except DecodeError as error:
            item[TASK_ERROR_KEY] = error
            return
        item[TASK_COLOR_KEY] = self.color


class cvtColorMat(StatelessBackend):
    """Mat to Mat in channel order ``color``, or gray, only if it differs; a dict without ``color`` holds a BGR Mat.

    A Mat of one channel is gray. Three channels become one, and one three, as ``cv2.cvtColor`` does it; of four the
    last is dropped. Sets ``color``. ``InvalidRequest`` for a Mat of another number of channels than 1, 3 or 4, and for
    a ``color`` of the dict that is no channel order.
    """

    takes, gives = MAT, MAT
    keeps_sides = True
    isolation = Isolation.FOLLOWS

    color = Param(to_color, choices=MAT_COLORS, doc="channel order wanted, or gray for one channel")

    def prefer_color(self, color: str | None) -> str | None:
        return None if self.color == "gray" else str(self.color)

    def setup(self) -> None:
        import cv2

        self._convert: Callable[..., Any] = cv2.cvtColor
        wanted = self.color.upper()
        self._codes = {
            color: getattr(cv2, f"COLOR_{color.upper()}2{wanted}") for color in MAT_COLORS if color != self.color
        }
        self._codes[self.color] = cv2.COLOR_BGRA2BGR  # of either order

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        channels = mat.shape[2]
        if channels not in (1, 3, 4):
            raise InvalidRequest(f"color {self.color} needs a Mat of 1, 3 or 4 channels, got {channels}")
        color = color_of(item, channels, OF_MATS)
        if color != self.color or channels == 4:
            mat = as_mat(self._convert(mat, self._codes[color]))
        item[TASK_COLOR_KEY] = self.color
        item[TASK_RESULT_KEY] = mat
