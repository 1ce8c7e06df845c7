"""What goes between a worker and its decoders: numbers through a socket, bytes through memory that both have mapped.

The decoder may have been made to run anybody's code. So nothing of its answer is unpickled, and every number in it is
checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py import errors
from torchpipe_py.backends.image.mat import EIGHT_BITS, as_mat
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import DecodeError, InvalidRequest, NoResult, message_of
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY

REQUEST = struct.Struct("<QQ")  # its number, bytes of the encoded image
TAKEN = struct.Struct("<Q")  # at the start of the memory: the number of the last request that the decoder received
DATA_AT = 4096
"""Where the encoded image begins in the memory; ``capacity`` bytes on, the answer begins."""

MAX_ANSWER = 1024
"""Bytes of an answer, less the pixels."""

_ANSWER = struct.Struct("<QBBIII")  # number, kind, color, height, width, channels; a text follows
_IMAGE, _NO_RESULT, _RAISED = range(3)
_COLORS = (None, "bgr", "rgb", "gray")
_MAX_SIDE, _MAX_CHANNELS = 2**20, 512
_NO_RESULTS: Mapping[str, type[NoResult]] = {
    name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, NoResult)
}


def total_size(capacity: int) -> int:
    """Bytes of the memory in which an encoded and a decoded image of ``capacity`` bytes each have room."""
    return DATA_AT + 2 * capacity


@dataclass(frozen=True)
class Image:
    """A Mat lies in the memory; ``color`` is what the dict is to say, if anything."""

    shape: tuple[int, int, int]
    color: str | None


@dataclass(frozen=True)
class Refusal:
    """No image. ``name`` is the class of the error; ``raised``: the backend has raised it, which is a defect."""

    name: str
    message: str
    raised: bool

    def error(self) -> NoResult | None:
        """What the dict is to hold as its error, if anything."""
        if not self.name:
            return None
        cls = _NO_RESULTS.get(self.name)
        return cls(self.message) if cls else NoResult(f"{self.name}: {self.message}")


def pack_answer(number: int, item: Mapping[str, Any], pixels: memoryview) -> bytes:
    """What became of an item; a Mat goes into ``pixels``."""
    mat = item.get(TASK_RESULT_KEY)
    if mat is None:
        error = item.get(TASK_ERROR_KEY)
        return pack_error(number, error, raised=False) if error is not None else _packed_text(number, _NO_RESULT, "")
    try:
        mat = as_mat(mat, EIGHT_BITS)
    except InvalidRequest as error:
        return pack_error(number, TypeError(str(error)), raised=True)  # it is the decoder's Mat, no request's
    if mat.nbytes > len(pixels):
        size = shown_dims(mat.shape)
        return pack_error(number, DecodeError(f"{size} pixels are more than max_memory has room for"), raised=False)
    np.copyto(np.frombuffer(pixels, np.uint8, mat.size).reshape(mat.shape), mat)
    color = item.get(TASK_COLOR_KEY)
    known = _COLORS.index(color) if color in _COLORS else 0
    return _ANSWER.pack(number, _IMAGE, known, *mat.shape)


def pack_error(number: int, error: object, raised: bool) -> bytes:
    """An error as a text; ``raised``: it is a defect."""
    problem = error if isinstance(error, BaseException) else NoResult(str(error))
    text = f"{type(problem).__name__}\n{message_of(problem, MAX_ANSWER)}"
    return _packed_text(number, _RAISED if raised else _NO_RESULT, text)


def _packed_text(number: int, kind: int, text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")[: MAX_ANSWER - _ANSWER.size]
    return _ANSWER.pack(number, kind, 0, 0, 0, 0) + encoded


def unpack_answer(packed: bytes, number: int, capacity: int) -> Image | Refusal:
    """The answer to request ``number``; ``ValueError`` where it is none, or speaks of more than ``capacity`` bytes."""
    if not _ANSWER.size <= len(packed) <= MAX_ANSWER:
        raise ValueError(f"an answer of {len(packed)} bytes")
    answered, kind, color, height, width, channels = _ANSWER.unpack_from(packed)
    if answered != number:
        raise ValueError(f"an answer to request {answered} instead of {number}")
    if kind in (_NO_RESULT, _RAISED):
        name, _, message = packed[_ANSWER.size :].decode("utf-8", "replace").partition("\n")
        return Refusal(name, message, kind == _RAISED)
    if kind != _IMAGE or color >= len(_COLORS):
        raise ValueError(f"an answer of kind {kind}, color {color}")
    if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE and 0 < channels <= _MAX_CHANNELS):
        raise ValueError(f"an image of {height}x{width}x{channels}")
    if height * width * channels > capacity:
        raise ValueError(f"an image of {height}x{width}x{channels}, more than {capacity} bytes")
    return Image((height, width, channels), _COLORS[color])
