"""Small copies of the images that nodes produce for a request, for display."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

MOST_PICTURES = 16
"""Maximum number of pictures of one request."""

MOST_SIDE = 192
"""Maximum rows and columns of a copy; a larger image is reduced to every second, third, … row and column."""


class Picture(NamedTuple):
    """``pixels``: H×W×3 RGB or H×W×1, ``uint8``; the other fields are the rows and columns of the original image."""

    height: int
    width: int
    pixels: np.ndarray


def small_copy(value: Any, color: str) -> Picture | None:
    """Copy a Mat H×W×C or H×W, or a Tensor 1×C×H×W or C×H×W, with 1 or 3 channels; ``None`` for anything else.

    Numbers outside 0 to 255, and fractions outside 0 to 1, are scaled to 0 to 255. It never raises: recording pictures
    must not fail a batch.
    """
    try:
        with np.errstate(all="ignore"):
            return _copied(value, color)
    except Exception:  # for example, a sparse Tensor or an object that only looks like an array
        return None


def _copied(value: Any, color: str) -> Picture | None:
    shape = tuple(getattr(value, "shape", ()))
    if hasattr(value, "detach"):
        shape = shape[1:] if len(shape) == 4 and shape[0] == 1 else shape
        if len(shape) != 3 or shape[0] not in (1, 3) or min(shape[1:]) < 2 or value.is_complex():
            return None
        rows, columns, step = shape[1], shape[2], -(-max(shape[1:]) // MOST_SIDE)
        array = value.detach().reshape(shape)[:, ::step, ::step].float().cpu().numpy().transpose(1, 2, 0)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "buif" and len(shape) in (2, 3):
        if shape[2:] not in ((), (1,), (3,)) or min(shape[:2]) < 2:
            return None
        rows, columns, step = shape[0], shape[1], -(-max(shape[:2]) // MOST_SIDE)
        array = value[::step, ::step].reshape(-(-rows // step), -(-columns // step), -1).astype(np.float32)
    else:
        return None
    array = np.nan_to_num(array)
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 255:
        array = (array - low) * (255 / max(high - low, 1e-12))
    elif high <= 1:
        array = array * 255
    pixels = np.ascontiguousarray(array.round().astype(np.uint8))
    return Picture(rows, columns, pixels[..., ::-1].copy() if color.lower() == "bgr" else pixels)
