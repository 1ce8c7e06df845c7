"""The objects that a detector found in an image, as a service answers them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from torchpipe_client.errors import BadReply

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


_MOST_FLOAT32 = 3.4028234663852886e38


class Detections(list[dict[str, Any]]):
    """A dict for each object found in an image, best first.

    ``box``: [left, top, right, bottom] in pixels of the image as a viewer shows it; ``score``; ``class``, an index;
    ``label``, if the class has a name; ``keypoints``, a list of [x, y, score], and ``mask``, if the model gives any: a
    PNG file (``bytes``), polygons or run lengths. The attributes are all objects' values together; arrays need NumPy.
    """

    @property
    def boxes(self) -> Array:
        """``float32`` K×4."""
        return self._array("box", "float32").reshape(-1, 4)

    @property
    def scores(self) -> Array:
        """``float32`` K."""
        return self._array("score", "float32")

    @property
    def classes(self) -> Array:
        """``int64`` K."""
        return self._array("class", "int64")

    @property
    def labels(self) -> list[str | int]:
        """The label of each, or else its class."""
        return [row.get("label", row["class"]) for row in self]

    @property
    def keypoints(self) -> Array | None:
        """``float32`` K×P×3, or ``None``."""
        if not self or "keypoints" not in self[0]:
            return None
        return self._array("keypoints", "float32").reshape(len(self), -1, 3)

    @property
    def masks(self) -> list[Any] | None:
        """The mask of each, or ``None``."""
        return [row["mask"] for row in self] if self and "mask" in self[0] else None

    def _array(self, key: str, dtype: str) -> Array:
        import numpy as np

        return np.array([row[key] for row in self], dtype)


def detections_of(name: str, rows: Any) -> Detections:
    """The rows of an answer. Raises ``BadReply`` if one lacks a value, or has one of another type."""
    if not isinstance(rows, list):
        raise BadReply(f"{name}: detections that are not a list")
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not _is_detection(row):
            raise BadReply(f"{name}[{index}]: not a detection")
        mask = row.get("mask")
        if isinstance(mask, dict) and mask.keys() == {"b64"}:
            row["mask"] = _bytes(f"{name}[{index}]", mask["b64"])
    if len({len(row["keypoints"]) if "keypoints" in row else None for row in rows}) > 1:
        raise BadReply(f"{name}: detections with different numbers of keypoints")
    if len({"mask" in row for row in rows}) > 1:
        raise BadReply(f"{name}: detections with a mask and without")
    return Detections(rows)


def _is_detection(row: dict[str, Any]) -> bool:
    box, points = row.get("box"), row.get("keypoints", [])
    return (
        _are_numbers(box, 4)
        and _are_numbers([row.get("score")], 1)
        and type(row.get("class")) is int
        and abs(row["class"]) < 2**63
        and isinstance(row.get("label", ""), str)
        and isinstance(points, list)
        and all(_are_numbers(point, 3) for point in points)
    )


def _are_numbers(values: Any, count: int) -> bool:
    """Whether it is a list of so many numbers that ``float32`` has."""
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(type(value) in (int, float) and abs(value) <= _MOST_FLOAT32 for value in values)


def _bytes(name: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise BadReply(f"{name}: a mask that is not base64: {error}") from None
