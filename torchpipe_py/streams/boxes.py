"""Drawing of a result's boxes, keypoints and masks on its image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.results import Detections

COLORS = ((80, 220, 60), (60, 120, 255), (255, 160, 40), (40, 220, 255), (220, 80, 220), (200, 200, 60), (90, 90, 240))
"""BGR, by class; the first for what has none."""
LEAST_POINT_SCORE = 0.25
"""The score of a keypoint from which on it is drawn."""
_OPACITY = 0.45  # of a mask

Color = tuple[int, int, int]


class _Shape(NamedTuple):
    """Shape and text to draw for a detection; ``box`` is ``None`` for a label of the whole image."""

    box: tuple[int, int, int, int] | None
    text: str
    color: Color = COLORS[0]
    points: Any = ()
    mask: Any = None


def draw_boxes(image: Any, result: Any) -> np.ndarray:
    """A copy of ``image`` with the boxes and labels of ``result``; H×W×3 ``uint8`` BGR.

    ``image`` is the image of a ``Frame``: H×W×3 ``uint8`` BGR, or a Tensor 1×3×H×W ``uint8`` RGB.
    ``result`` is ``Detections``, or a list of such dicts: a box is ``{"box": [left, top, right, bottom], "label": …,
    "score": …}`` in pixels of the image, perhaps with ``keypoints`` and ``mask``, or a list that begins with these four
    numbers. ``(label, score)`` of the whole image is written into its corner.
    """
    import cv2

    is_mat = isinstance(image, np.ndarray)
    drawn = image.copy() if is_mat else np.ascontiguousarray(image[0].flip(0).permute(1, 2, 0).cpu().numpy())
    scale = max(0.4, drawn.shape[0] / 900)
    width = max(1, round(2 * scale))
    shapes = list(_shapes(result))
    for shape in shapes:
        if shape.mask is not None:
            _tint(drawn, shape.mask, shape.color)
    for box, text, color, points, _ in shapes:
        if box is not None:
            left, top, right, bottom = box
            cv2.rectangle(drawn, (left, top), (right, bottom), color, width)
        else:
            left, top = 4, round(30 * scale)
        for x, y, score in points:
            if score >= LEAST_POINT_SCORE:
                cv2.circle(drawn, (_pixel(x), _pixel(y)), 2 * width, color, -1, cv2.LINE_AA)
        place = (left, max(top - 3, round(26 * scale)))
        cv2.putText(drawn, text, place, cv2.FONT_HERSHEY_SIMPLEX, scale, color, width, cv2.LINE_AA)
    return drawn


def _shapes(result: Any) -> Iterator[_Shape]:
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str):
        yield _Shape(None, _text(*result))
        return
    if isinstance(result, Detections):
        items: Any = result.to_list(plain=False)
    else:
        items = result.tolist() if hasattr(result, "tolist") else result
    for item in items if isinstance(items, (list, tuple)) else ():
        is_dict = isinstance(item, Mapping)
        try:
            left, top, right, bottom = map(_pixel, list(item.get("box", ()) if is_dict else item)[:4])
        except (TypeError, ValueError, OverflowError):
            continue
        box = (left, top, right, bottom)
        if not is_dict:
            yield _Shape(box, "")
            continue
        number = item.get("class")
        color = COLORS[number % len(COLORS)] if isinstance(number, int) else COLORS[0]
        text = _text(item.get("label", "" if number is None else number), item.get("score"))
        yield _Shape(box, text, color, _points(item.get("keypoints")), item.get("mask"))


def _pixel(side: Any) -> int:
    return max(-(2**20), min(2**20, round(float(side))))


def _points(given: Any) -> Sequence[tuple[float, float, float]]:
    """Finite ``(x, y, score)``; none if they are not such numbers."""
    try:
        points = np.asarray([] if given is None else given, np.float64).reshape(-1, 3)
    except (TypeError, ValueError):
        return ()
    return [(x, y, score) for x, y, score in points[np.isfinite(points).all(1)].tolist()]


def _text(label: Any, score: Any) -> str:
    """The text beside a box."""
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    return f"{label} {score:.2f}" if is_number else str(label)


# -- masks ----------------------------------------------------------------------------------------------------------


def _tint(drawn: np.ndarray, mask: Any, color: Color) -> None:
    """Mix the color into the pixels of a mask; one that cannot be read is left out."""
    import cv2

    height, width = drawn.shape[:2]
    try:
        inside = to_array(mask, height, width)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, cv2.error):
        return
    if inside.shape != (height, width):
        inside = cv2.resize(inside.astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST).astype(bool)
    drawn[inside] = (drawn[inside] * (1 - _OPACITY) + np.array(color) * _OPACITY).astype(np.uint8)


def to_array(mask: Any, height: int, width: int) -> np.ndarray:
    """A mask as an array of bools; ``height`` and ``width`` are the image's, for polygons."""
    import cv2

    if isinstance(mask, np.ndarray):
        return np.asarray(mask, bool)
    if isinstance(mask, bytes):
        file = cv2.imdecode(np.frombuffer(mask, np.uint8), cv2.IMREAD_GRAYSCALE)
        if file is None:
            raise ValueError("not a PNG file")
        return np.asarray(file, bool)
    if isinstance(mask, Mapping):
        return _from_run_lengths(mask)
    filled = np.zeros((height, width), np.uint8)
    cv2.fillPoly(filled, [np.rint(polygon).astype(np.int32).reshape(-1, 1, 2) for polygon in mask], 1)
    return np.asarray(filled, bool)


def _from_run_lengths(mask: Mapping[str, Any]) -> np.ndarray:
    """COCO's run lengths of columns, alternately outside and inside, as numbers or as its text."""
    height, width = mask["size"]
    counts = mask["counts"]
    if isinstance(counts, (str, bytes)):
        counts = _counts(counts.encode() if isinstance(counts, str) else counts)
    if sum(counts) != height * width or height * width > 2**28:
        raise ValueError("run lengths that do not fit the size")
    columns = np.repeat(np.arange(len(counts)) % 2 == 1, counts).reshape(width, height)
    return np.asarray(columns.T)


def _counts(text: bytes) -> list[int]:
    """The numbers in COCO's text: five bits a character, from the third on differences to the one before the last."""
    counts: list[int] = []
    number = shift = 0
    for character in text:
        bits = character - 48
        number |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                number -= 1 << shift
            counts.append(number + (counts[-2] if len(counts) > 2 else 0))
            number = shift = 0
    return counts
