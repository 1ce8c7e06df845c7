"""``Detections`` as they cross a wire: rows of JSON, or one array of each kind for all items of a request."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from torchpipe_py.errors import NoResult
from torchpipe_py.results import Detections
from torchpipe_py.wire.answers import fast_encoder
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError
from torchpipe_py.wire.values import array_of_texts, check_finite, plain

FIELDS = ("boxes", "scores", "classes", "labels", "keypoints", "masks", "offsets")
"""The arrays of detections; there may be no ``labels``, ``keypoints`` and ``masks``."""
_PIECE = 512  # rows that are encoded without a pause, in which other threads get the GIL


def to_rows(key: str, found: Detections) -> list[dict[str, Any]]:
    """A dict for each detection, as ``Detections.to_list`` has it, of values that JSON has.

    Numbers have the fewest digits that are the same ``float32``. A mask that is an array or a PNG file is
    ``{"b64": …}``, the file. ``NoResult`` for numbers that are not finite.
    """
    arrays = [found.boxes, found.scores, *([] if found.keypoints is None else [found.keypoints])]
    boxes, scores, *keypoints = _numbers(key, arrays)
    rows: list[dict[str, Any]] = [
        {"box": box, "score": score, "class": index}
        for box, score, index in zip(boxes, scores, found.classes.tolist(), strict=True)
    ]
    for row in rows if found.names else ():
        if 0 <= row["class"] < len(found.names):
            row["label"] = found.names[row["class"]]
    for each in keypoints:
        for row, points in zip(rows, each, strict=True):
            row["keypoints"] = points
    for row, mask in zip(rows, found.masks or (), strict=False):
        file = png_of(mask)
        row["mask"] = mask if file is None else {"b64": base64.b64encode(file).decode()}
    return rows


def to_text(key: str, found: Detections, most: Bound | None = None) -> str:
    """The rows as JSON. ``ReplyTooLargeError`` as soon as they are more than ``most``."""
    pieces: list[str] = []
    size, encode = 0, fast_encoder(_encode)
    for start in range(0, len(found), _PIECE):
        rows = to_rows(key, found if len(found) <= _PIECE else found[start : start + _PIECE])
        try:
            text = _encode(rows) if found.masks is not None else encode(rows).decode()
            pieces.append(text[1:-1])
        except UnicodeEncodeError:  # a label with half of a surrogate pair
            pieces.append(_encode(rows)[1:-1])
        except (TypeError, ValueError) as error:
            raise NoResult(f"{key!r} has a mask that has no form in JSON: {error}") from None
        size += len(pieces[-1])
        if most is not None and size > most.bytes:
            raise ReplyTooLargeError(size, most)
    return f"[{', '.join(pieces)}]"


def _numbers(key: str, arrays: Sequence[np.ndarray]) -> list[list[Any]]:
    """The ``shortest`` of each array as a list: of all at once, since few numbers take as long as hundreds."""
    flat = np.concatenate([array.ravel() for array in arrays])
    check_finite(key, flat)
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = np.split(shortest(flat), ends)
    return [part.reshape(array.shape).tolist() for part, array in zip(parts, arrays, strict=True)]


def shortest(array: np.ndarray) -> np.ndarray:
    """``float32`` as ``float64`` with the fewest decimal digits that are the same ``float32``: 0.1 for 0.1."""
    exact = array.astype(np.float64)
    found: np.ndarray = exact.copy()
    is_open = exact != 0
    with np.errstate(all="ignore"):
        exponents = np.floor(np.log10(np.abs(exact), where=is_open, out=np.zeros_like(exact)))
        for digits in (6, 7, 8, 9):
            scale = 10.0 ** (digits - 1 - exponents)
            rounded = np.rint(exact * scale) / scale
            is_same = is_open & (rounded.astype(np.float32) == array)
            np.copyto(found, rounded, where=is_same)
            is_open &= ~is_same
            if not is_open.any():
                break
    return found


def png_of(mask: Any) -> bytes | None:
    """A mask that is a file of PNG, or an array, as one of black and white; ``None`` for any other kind.

    ``NoResult`` for an array that is no image, such as one without pixels.
    """
    if isinstance(mask, (bytes, bytearray)):
        return bytes(mask)
    if not isinstance(mask, np.ndarray):
        return None
    if not mask.size or mask.ndim < 2 or mask.shape[2:] not in ((), (1,), (3,)):
        raise NoResult(f"a mask is an array of shape {mask.shape}, which PNG cannot represent")
    import cv2

    file: bytes = cv2.imencode(".png", np.where(mask, np.uint8(255), np.uint8(0)))[1].tobytes()
    return file


def fields_of(items: Sequence[Detections]) -> list[str]:
    """The ``FIELDS`` that these items' detections have."""
    lacking = {
        "labels": not any(found.names for found in items),
        "keypoints": all(found.keypoints is None for found in items),
        "masks": all(found.masks is None for found in items),
    }
    return [field for field in FIELDS if not lacking.get(field)]


def tensors_of(key: str, items: Sequence[Detections], fields: Collection[str] = FIELDS) -> dict[str, Any]:
    """The arrays of all items' detections by ``fields``, as far as they have them: see ``tensor_of``."""
    return {field: tensor_of(key, items, field) for field in fields_of(items) if field in fields}


def tensor_of(key: str, items: Sequence[Detections], field: str) -> np.ndarray:
    """The array of all items' detections of this one of ``fields_of``, one item's rows after the other's.

    The detections of item ``i`` are the rows from ``offsets[i]`` to before ``offsets[i + 1]``. A mask is a PNG file, or
    a text of JSON. ``NoResult`` if some items have keypoints or masks and others lack them.
    """
    offsets = np.cumsum([0, *map(len, items)])
    if field == "offsets":
        return offsets.astype(np.int64)
    if field == "labels":
        labels = [str(label) for found in items for label in found.labels]
        return array_of_texts("", [len(labels)], labels)
    if field == "keypoints":
        points = [found.keypoints for found in items if found.keypoints is not None]
        # Items without a detection may say nothing of keypoints.
        if sum(map(len, points)) < offsets[-1] or len({each.shape[1] for each in points if len(each)}) > 1:
            raise NoResult(f"{key!r}: items with different numbers of keypoints make no batch; send such items singly")
        return np.concatenate([each for each in points if len(each)] or [max(points, key=lambda each: each.shape[1])])
    if field == "masks":
        masks = [found.masks for found in items if found.masks is not None]
        if sum(map(len, masks)) < offsets[-1]:
            raise NoResult(f"{key!r}: items with masks and items without make no batch; send such items singly")
        files = [_file_or_json(key, mask) for each in masks for mask in each]
        return array_of_texts("", [len(files)], files)
    return np.concatenate([getattr(found, field) for found in items])


def _file_or_json(key: str, mask: Any) -> bytes | str:
    file = png_of(mask)
    if file is not None:
        return file
    try:
        return _encode(mask)
    except (TypeError, ValueError) as error:
        raise NoResult(f"{key!r} has a mask that has no form in JSON: {error}") from None


_encode = json.JSONEncoder(default=plain, ensure_ascii=False, allow_nan=False).encode
