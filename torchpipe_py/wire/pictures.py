"""A result that is an image as a file, for clients whose ``Accept`` asks for one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.errors import NoResult
from torchpipe_py.wire.values import is_array, to_array

PNG, JPEG = "image/png", "image/jpeg"
_JSON = "application/json"
_KINDS = {PNG: PNG, JPEG: JPEG, "image/jpg": JPEG, "image/*": PNG}
_ENDINGS = {PNG: ".png", JPEG: ".jpg"}


class NotAcceptableError(NoResult):
    """A result that has none of the forms that its client accepts."""

    code = "not_acceptable"


class Accepted(NamedTuple):
    """The kind of file that a client prefers to JSON. ``is_only``: it takes no JSON in place of it."""

    kind: str
    is_only: bool

    def check_json(self, what: str) -> None:
        """Raise ``NotAcceptableError`` if ``what`` must be answered in JSON and the client does not take that."""
        if self.is_only:
            raise NotAcceptableError(f"{what}: it is answered as {_JSON}, which Accept does not allow")


def accepted_image(accept: str) -> Accepted | None:
    """The image that a request's ``Accept`` prefers; ``None`` where it does not, or prefers JSON."""
    accept = accept.lower()
    if "image/" not in accept:
        return None
    weights: dict[str, float] = {}
    for part in accept.split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        weights.setdefault(kind, _weight(parameters))
    wanted = max((kind for kind in weights if kind in _KINDS), key=lambda kind: weights[kind], default="")
    if not wanted or not weights[wanted] or weights.get(_JSON, 0.0) > weights[wanted]:
        return None
    takes_json = any(weights.get(kind) for kind in (_JSON, "application/*", "*/*"))
    return Accepted(_KINDS[wanted], not takes_json)


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def to_image(value: Any, color: str, kind: str) -> bytes | None:
    """An array H×W×3, H×W×1 or H×W of ``uint8``, perhaps with a first dimension of 1, as a file of this kind.

    ``color`` is the order of its channels, ``bgr`` or ``rgb``. ``None`` for any other value. ``NoResult`` if a file of
    this kind cannot hold it.
    """
    pixels = to_array("result", value) if is_array(value) and str(value.dtype).endswith("uint8") else None
    if pixels is None or pixels.dtype != np.uint8:
        return None
    if pixels.shape[:1] == (1,) and (pixels.ndim == 4 or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3))):
        pixels = pixels[0]
    if pixels.shape[2:] not in ((), (1,), (3,)) or pixels.ndim < 2 or not pixels.size:
        return None
    import cv2

    if pixels.shape[2:] == (3,) and color.lower() == "rgb":
        pixels = pixels[..., ::-1]
    try:
        is_made, file = cv2.imencode(_ENDINGS[kind], np.ascontiguousarray(pixels))
    except cv2.error:  # a side that the format does not have
        is_made = False
    if not is_made:
        raise NoResult(f"an image of {pixels.shape[1]}x{pixels.shape[0]} pixels cannot be {kind}")
    return file.tobytes()
