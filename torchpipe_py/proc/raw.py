"""Answers of an untrusted decoder: bytes of a slot, and numbers that are checked before use.

An attacker's code may run in the decoder, so its answers are never unpickled.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py import errors
from torchpipe_py.backends.image.mat import EIGHT_BITS, as_mat
from torchpipe_py.backends.image.original import Way
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import DecodeError, InvalidRequest, NoResult, message_of
from torchpipe_py.keys import (
    TASK_COLOR_KEY,
    TASK_ERROR_KEY,
    TASK_IMAGE_SIZE_KEY,
    TASK_RESULT_KEY,
    TASK_TO_ORIGINAL_KEY,
)
from torchpipe_py.proc.codec import Packed, padded
from torchpipe_py.proc.link import DONE, FAILURE_BYTES, GarbledError, Header, Link, Room

FILTERED = "filtered"
"""The answer of a ready decoder, if the kernel filters its system calls."""

_MAX_TEXT = 1024
_SIZE = struct.Struct("<Q")
_ANSWER = struct.Struct("<BBIII II4d")  # kind, color, height, width, channels; of the original: size, way to it
_IMAGE, _NO_RESULT, _RAISED = range(3)
_COLORS = (None, "bgr", "rgb", "gray")
_UNKNOWN = (0, 0, 0.0, 0.0, 0.0, 0.0)  # no size of the original; no way to it: the image is the original
_MAX_SIDE, _MAX_CHANNELS = 2**20, 512
_KEPT = 16 * 2**20
_NO_RESULTS: Mapping[str, type[NoResult]] = {
    name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, NoResult)
}


class Image(NamedTuple):
    """A decoded Mat, and the values of its ``keys`` in the dict."""

    mat: np.ndarray
    keys: dict[str, Any]


class Refusal(NamedTuple):
    """An answer without an image. ``name`` is the error's class; ``raised``: the backend raised it, a defect."""

    name: str
    message: str
    raised: bool = False

    def error(self) -> NoResult | None:
        """The error for the dict, if the decoder reported any."""
        if not self.name:
            return None
        cls = _NO_RESULTS.get(self.name)
        return cls(self.message) if cls else NoResult(f"{self.name}: {self.message}")


def room_for(capacity: int) -> Room:
    """A single slot, for an encoded and a decoded image of ``capacity`` bytes each."""
    return Room(1, padded(2 * capacity) + 2 * FAILURE_BYTES, _KEPT)


def pack_encoded(encoded: np.ndarray) -> Packed:
    """Pack a call to a decoder."""
    return Packed(_SIZE.pack(encoded.size), b"", [encoded], 1)


def encoded_in(link: Link, slot: int, header: Header) -> np.ndarray:
    """A view of the encoded bytes of such a call."""
    (size,) = _SIZE.unpack(link.content(slot, header.start, _SIZE.size).tobytes())
    return link.content(slot, header.start + padded(_SIZE.size), size)


def pack_answer(item: Mapping[str, Any], capacity: int) -> Packed:
    """Pack the outcome of an item, whose Mat may have up to ``capacity`` bytes."""
    mat = item.get(TASK_RESULT_KEY)
    if mat is None:
        error = item.get(TASK_ERROR_KEY)
        return _packed(_NO_RESULT) if error is None else pack_error(error, raised=False)
    try:
        mat = as_mat(mat, EIGHT_BITS)
    except InvalidRequest as error:
        return pack_error(TypeError(str(error)), raised=True)  # the Mat comes from the decoder, not from a request
    if mat.nbytes > capacity:
        size = shown_dims(mat.shape)
        return pack_error(DecodeError(f"{size} pixels are more than max_memory has room for"), raised=False)
    color = item.get(TASK_COLOR_KEY)
    geometry = *item.get(TASK_IMAGE_SIZE_KEY, _UNKNOWN[:2]), *(item.get(TASK_TO_ORIGINAL_KEY) or _UNKNOWN[2:])
    return _packed(_IMAGE, _COLORS.index(color) if color in _COLORS else 0, mat, geometry=geometry)


def pack_error(error: object, raised: bool) -> Packed:
    """Pack an error as text; ``raised``: it is a defect."""
    problem = error if isinstance(error, BaseException) else NoResult(str(error))
    text = f"{type(problem).__name__}\n{message_of(problem, _MAX_TEXT)}"
    return _packed(_RAISED if raised else _NO_RESULT, text=text.encode("utf-8", "replace")[:_MAX_TEXT])


def _packed(
    kind: int,
    color: int = 0,
    mat: np.ndarray | None = None,
    text: bytes = b"",
    geometry: tuple[float, ...] = _UNKNOWN,
) -> Packed:
    shape = (0, 0, 0) if mat is None else mat.shape
    parts = [] if mat is None else [np.ascontiguousarray(mat)]
    return Packed(_ANSWER.pack(kind, color, *shape, *geometry), text, parts, len(parts))


def read(link: Link, slot: int, header: Header) -> Image | Refusal:
    """A copy of an answer's image, or the refusal. ``GarbledError`` if the answer is not valid."""
    size = header.head + header.pickled
    if header.kind != DONE or header.head != _ANSWER.size or header.pickled > _MAX_TEXT:
        raise GarbledError(f"an answer of kind {header.kind}, {size} bytes")
    packed = link.content(slot, header.start, size).tobytes()
    kind, color, height, width, channels, *geometry = _ANSWER.unpack_from(packed)
    if kind in (_NO_RESULT, _RAISED):
        name, _, message = packed[_ANSWER.size :].decode("utf-8", "replace").partition("\n")
        return Refusal(name, message, kind == _RAISED)
    if kind != _IMAGE or color >= len(_COLORS):
        raise GarbledError(f"an answer of kind {kind}, color {color}")
    if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE and 0 < channels <= _MAX_CHANNELS):
        raise GarbledError(f"an image of {height}x{width}x{channels}")
    content = link.content(slot, header.start + padded(size), height * width * channels)
    keys = {TASK_COLOR_KEY: _COLORS[color], **_original((height, width), *geometry)}
    mat = content.reshape(height, width, channels).copy()
    return Image(mat, {key: value for key, value in keys.items() if value is not None})


def _original(size: tuple[int, int], height: int, width: int, *way: float) -> dict[str, Any]:
    """The keys of the original image, for an image of ``size``; ``GarbledError`` if their values cannot be right."""
    if (height, width, *way) == _UNKNOWN:
        return {}
    if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE and all(map(math.isfinite, way))):
        raise GarbledError(f"an original of {height}x{width}, {way}")
    return {TASK_IMAGE_SIZE_KEY: (height, width), TASK_TO_ORIGINAL_KEY: Way(way, size) if any(way) else None}
