"""Drawing of a result's boxes on its image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

COLOR = (80, 220, 60)
"""BGR."""


def draw_boxes(image: Any, result: Any) -> np.ndarray:
    """A copy of ``image`` with the boxes and labels of ``result``; H×W×3 ``uint8`` BGR.

    ``image`` is the image of a ``Frame``: H×W×3 ``uint8`` BGR, or a Tensor 1×3×H×W ``uint8`` RGB.
    A box is ``{"box": [left, top, right, bottom], "label": …, "score": …}`` in pixels of the image, or a list that
    begins with these four numbers. ``(label, score)`` of the whole image is written into its corner.
    """
    import cv2

    is_mat = isinstance(image, np.ndarray)
    drawn = image.copy() if is_mat else np.ascontiguousarray(image[0].flip(0).permute(1, 2, 0).cpu().numpy())
    scale = max(0.4, drawn.shape[0] / 900)
    for box, text in _boxes(result):
        if box is not None:
            left, top, right, bottom = box
            cv2.rectangle(drawn, (left, top), (right, bottom), COLOR, max(1, round(2 * scale)))
        else:
            left, top = 4, round(30 * scale)
        place = (left, max(top - 3, round(26 * scale)))
        cv2.putText(drawn, text, place, cv2.FONT_HERSHEY_SIMPLEX, scale, COLOR, max(1, round(2 * scale)), cv2.LINE_AA)
    return drawn


def _boxes(result: Any) -> Iterator[tuple[tuple[int, int, int, int] | None, str]]:
    """Corners and text of each box; corners are ``None`` for a label of the whole image."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], str):
        yield None, _text(*result)
        return
    items = result.tolist() if hasattr(result, "tolist") else result
    for item in items if isinstance(items, (list, tuple)) else ():
        corners: Any
        if isinstance(item, Mapping):
            corners, text = item.get("box", ()), _text(item.get("label", ""), item.get("score"))
        else:
            corners, text = item, ""
        try:
            left, top, right, bottom = (max(-(2**20), min(2**20, round(float(side)))) for side in list(corners)[:4])
        except (TypeError, ValueError, OverflowError):
            continue
        yield (left, top, right, bottom), text


def _text(label: Any, score: Any) -> str:
    """The text beside a box."""
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    return f"{label} {score:.2f}" if is_number else str(label)
