"""A result that is an image as a file, for clients whose ``Accept`` asks for one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.errors import NoResult
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError
from torchpipe_py.wire.values import is_array, to_array

PNG, JPEG = "image/png", "image/jpeg"
_JSON = "application/json"
_NAMES = {PNG: (PNG,), JPEG: (JPEG, "image/jpg")}
_ENDINGS = {PNG: ".png", JPEG: ".jpg"}
_STARTS = {PNG: b"\x89PNG\r\n\x1a\n", JPEG: b"\xff\xd8\xff"}
_OTHER_STARTS = (b"GIF8", b"BM", b"II*\0", b"MM\0*")
_MOST_RATIO = {PNG: 1032, JPEG: 192}
"""Most bytes of pixels per byte of a file: the limit of deflate, and 16x16 pixels in 32 bits."""
_SMALLER = "ask for image/jpeg, or for a smaller image"


def is_picture(body: bytes) -> bool:
    """Whether the first bytes are those of an image file."""
    in_container = (body[:4], body[8:12]) == (b"RIFF", b"WEBP") or body[4:8] == b"ftyp"
    return in_container or body.startswith((*_STARTS.values(), *_OTHER_STARTS))


class NotAcceptableError(NoResult):
    """A client accepts none of the forms that its result has."""

    code = "not_acceptable"


class Accepted(NamedTuple):
    """The kinds of files that a client prefers to JSON, the best first. ``is_only``: it takes no JSON instead."""

    kinds: tuple[str, ...]
    is_only: bool

    def check_json(self, what: str) -> None:
        """Raise ``NotAcceptableError`` if ``what`` must be answered in JSON and the client does not take that."""
        if self.is_only:
            raise NotAcceptableError(f"{what}: it is answered as {_JSON}, which Accept does not allow")


def accepted_image(accept: str) -> Accepted | None:
    """The kinds of images that a request's ``Accept`` prefers; ``None`` if it names none, or prefers JSON.

    A type's weight is that of its own name, or else of ``image/*``, or else of ``*/*``. Raises ``NotAcceptableError``
    if it names images, but neither ours nor JSON.
    """
    accept = accept.lower()
    if "image/" not in accept:
        return None
    weights: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weights.setdefault(name, _weight(parameters))
    json = _weight_of(weights, (_JSON, "application/*", "*/*"))
    # By their order in the header, and then those that only ``image/*`` stands for.
    named = {kind: weight for name, weight in weights.items() for kind in _NAMES if name in _NAMES[kind]}
    images = named | {kind: weights.get("image/*", 0.0) for kind in _NAMES if kind not in named}
    kinds = sorted((kind for kind in images if images[kind]), key=images.__getitem__, reverse=True)
    if not kinds and not json and any(weight for name, weight in weights.items() if name.startswith("image/")):
        raise NotAcceptableError(f"Accept names neither {PNG} nor {JPEG}, nor {_JSON}: a result is one of these")
    preferred = tuple(kind for kind in kinds if images[kind] >= json)
    return Accepted(preferred, not json) if preferred else None


def _weight_of(weights: dict[str, float], names: tuple[str, ...]) -> float:
    """The weight of the first of these names that is there; 0.0 without one."""
    return next((weights[name] for name in names if name in weights), 0.0)


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                weight = float(parameter[2:])
            except ValueError:
                return 0.0
            return min(weight, 1.0) if weight > 0 else 0.0
    return 1.0


class Picture(NamedTuple):
    """A value that can be sent as a file of this ``kind``.

    ``shape`` is that of the image, ``color`` the order of its channels, ``bgr`` or ``rgb``. In place of its pixels it
    may have the file; then ``shape`` is its size.
    """

    pixels: Any
    shape: tuple[int, ...]
    color: str
    kind: str

    @property
    def size(self) -> int:
        """Bytes of its pixels."""
        return math.prod(self.shape)

    def check(self, most: Bound) -> None:
        """Raise ``ReplyTooLargeError`` if a file of these pixels is larger, whatever they show."""
        least = self.size // _MOST_RATIO[self.kind]
        if least > most.bytes:
            raise ReplyTooLargeError(least, most, _SMALLER)

    def encode(self, most: Bound) -> bytes:
        """The file, which takes long for a large one. ``NoResult`` if a file of this kind cannot hold it,
        ``ReplyTooLargeError`` if it is larger than ``most``.
        """
        if isinstance(self.pixels, bytes):
            if len(self.pixels) > most.bytes:
                raise ReplyTooLargeError(len(self.pixels), most, _SMALLER)
            return self.pixels
        import cv2

        pixels = to_array("result", self.pixels).reshape(self.shape)
        if self.shape[2:] == (3,) and self.color.lower() == "rgb":
            pixels = pixels[..., ::-1]
        try:
            is_made, file = cv2.imencode(_ENDINGS[self.kind], np.ascontiguousarray(pixels))
        except cv2.error:  # a side that the format does not have
            is_made = False
        if not is_made:
            raise NoResult(f"an image of {self.shape[1]}x{self.shape[0]} pixels cannot be {self.kind}")
        if file.size > most.bytes:
            raise ReplyTooLargeError(file.size, most, _SMALLER)
        return file.tobytes()


def picture_of(value: Any, color: str, kinds: Sequence[str]) -> Picture | None:
    """An array H×W×3, H×W×1 or H×W of ``uint8``, perhaps with a first dimension of 1, as a file of the first kind.

    A file of any of these kinds is sent as it is. ``None`` for any other value.
    """
    if isinstance(value, bytes):
        kind = next((kind for kind in kinds if value.startswith(_STARTS[kind])), "")
        return Picture(value, (len(value),), "", kind) if kind else None
    if not is_array(value) or str(value.dtype).removeprefix("torch.") != "uint8":
        return None
    shape = tuple(value.shape)
    if shape[:1] == (1,) and (len(shape) == 4 or (len(shape) == 3 and shape[2] not in (1, 3))):
        shape = shape[1:]
    is_picture = len(shape) >= 2 and shape[2:] in ((), (1,), (3,)) and 0 not in shape
    return Picture(value, shape, color, kinds[0]) if is_picture else None
