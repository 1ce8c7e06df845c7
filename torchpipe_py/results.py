"""The objects that a detector found in an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class Detections(Sequence[dict[str, Any]]):
    """The K objects found in one image, in the order given, which from a postprocessor is best first.

    ``boxes``: float32 K×4, [left, top, right, bottom] in pixels of the original image as a viewer shows it (EXIF
    orientation applied); a coordinate lies between pixels: 0 is the left side of the first pixel. ``scores``: float32
    K. ``classes``: int64 K. ``names``: the label of each class by index, perhaps empty. ``keypoints``: float32 K×P×3
    (x, y, score), or ``None``. ``masks``: K of the same kind, or ``None``: polygons (a list of lists of [x, y]),
    COCO's run lengths ``{"size": [height, width], "counts": text}``, PNG files (``bytes``) or bool arrays H×W.

    ``d[i]`` is a dict; a slice, and an array of bools or of indices, gives ``Detections``. Arrays are not copied and
    cannot be written to. ``ValueError`` for shapes that do not fit each other.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    names: tuple[str, ...] = ()
    keypoints: np.ndarray | None = None
    masks: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        count = len(self.scores)
        set_ = object.__setattr__  # a frozen dataclass has no other way
        set_(self, "boxes", _frozen(self.boxes, np.float32, (count, 4), "boxes"))
        set_(self, "scores", _frozen(self.scores, np.float32, (count,), "scores"))
        set_(self, "classes", _frozen(self.classes, np.int64, (count,), "classes"))
        set_(self, "names", tuple(self.names))
        if self.keypoints is not None:
            set_(self, "keypoints", _frozen(self.keypoints, np.float32, (count, None, 3), "keypoints"))
        if self.masks is not None:
            set_(self, "masks", tuple(self.masks))
            if len(self.masks) != count:
                raise ValueError(f"masks: expected {count}, one for each score, got {len(self.masks)}")

    @property
    def labels(self) -> list[str | int]:
        """The name of each detection's class, or its index where ``names`` has none for it."""
        return [self.names[index] if 0 <= index < len(self.names) else index for index in self.classes.tolist()]

    def __len__(self) -> int:
        return len(self.scores)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice | np.ndarray | Sequence[int]) -> Detections: ...

    def __getitem__(self, index: Any) -> Any:
        """One detection as a dict, or ``Detections`` of a slice, of an array of K bools or of one of indices.

        The dict has ``box`` ([left, top, right, bottom]), ``score``, ``class``, ``label`` if the class has a name, and
        ``keypoints`` (a list of [x, y, score]) and ``mask`` if there are any.
        """
        if isinstance(index, slice):
            chosen = np.arange(len(self))[index]
        elif hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0:
            place = range(len(self))[index]  # IndexError beyond the last
            return self[place : place + 1].to_list(plain=False)[0]
        else:
            chosen = np.asarray(index)
            chosen = chosen.astype(np.int64) if not chosen.size else np.arange(len(self))[chosen]
        return Detections(
            self.boxes[chosen],
            self.scores[chosen],
            self.classes[chosen],
            self.names,
            None if self.keypoints is None else self.keypoints[chosen],
            None if self.masks is None else tuple(self.masks[place] for place in chosen.tolist()),
        )

    def to_list(self, plain: bool = True) -> list[dict[str, Any]]:
        """A dict for each detection, as ``d[i]`` gives it.

        ``plain``: for JSON; masks that are arrays become lists. Masks that are PNG files stay ``bytes``.
        """
        rows: list[dict[str, Any]] = [
            {"box": box, "score": score, "class": index}
            for box, score, index in zip(self.boxes.tolist(), self.scores.tolist(), self.classes.tolist(), strict=True)
        ]
        for row in rows:
            if 0 <= row["class"] < len(self.names):
                row["label"] = self.names[row["class"]]
        for key, values in (("keypoints", _listed(self.keypoints)), ("mask", self.masks or ())):
            for row, value in zip(rows, values, strict=False):
                row[key] = value.tolist() if plain and isinstance(value, np.ndarray) else value
        return rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Detections):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Detections({self.to_list()!r})" if len(self) <= 3 else f"<Detections of {len(self)} objects>"

    def __reduce__(self) -> tuple[Any, ...]:
        # NOTE: by the constructor: arrays over another process's memory could be written to.
        return Detections, (self.boxes, self.scores, self.classes, self.names, self.keypoints, self.masks)


def _frozen(value: Any, dtype: Any, shape: tuple[int | None, ...], name: str) -> np.ndarray:
    """``value`` as a read-only array of ``dtype`` and ``shape`` (``None``: any size), without a copy if it is one."""
    array: np.ndarray = np.asarray(value, dtype)
    if not array.size and array.ndim < len(shape):
        array = array.reshape([size or 0 for size in shape])
    if array.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True)):
        wanted = "x".join("?" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected an array {wanted}, got {'x'.join(map(str, array.shape)) or 'a number'}")
    frozen: np.ndarray = array.view()
    frozen.flags.writeable = False
    return frozen


def _listed(array: np.ndarray | None) -> Iterable[Any]:
    return () if array is None else array.tolist()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
