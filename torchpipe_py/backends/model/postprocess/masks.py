"""Masks of the objects that a detector found, on the original image, from prototypes; forms of a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.image.geometry import MAX_PIXELS
from torchpipe_py.backends.image.original import WayBack
from torchpipe_py.backends.model.postprocess.detections import Detector, rows_of
from torchpipe_py.backends.model.postprocess.layouts import (
    MOST_ROWS,
    EndToEnd,
    Layout,
    Objects,
    OpenShapeError,
    Size,
    Yolo,
    Yolo5,
    YoloRows,
    shown_outputs,
)
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import TensorSpec, detection_outputs
from torchpipe_py.errors import ConfigError, InvalidRequest
from torchpipe_py.results import Detections
from torchpipe_py.values import to_str

MOST_SIDE = 2**16
MOST_MASK_PIXELS = 2**28
"""Limit of the pixels within the boxes of an item's masks, together: so many take ten seconds."""
MOST_WHOLE_PIXELS = 2**30
"""Limit of the pixels of an item's masks in a form that has those outside the boxes, too: PNG takes 8 s for them."""

FINEST = 4
"""The stride of YOLO's prototypes: so many times their size is the input's."""


class Window(NamedTuple):
    """The part of a mask that may be set: bool h×w, whose top left pixel is (``top``, ``left``) of ``size``."""

    pixels: np.ndarray
    top: int
    left: int
    size: Size

    def whole(self) -> np.ndarray:
        """The mask of the whole image: bool H×W."""
        mask = np.zeros(self.size, bool)
        height, width = self.pixels.shape
        mask[self.top : self.top + height, self.left : self.left + width] = self.pixels
        return mask


class Upsampler:
    """Brings prototypes of ``shape`` (h, w), for a model's input of ``size``, to the pixels of the original image.

    As Ultralytics' ``process_mask_native``: bilinear to the input's resolution, unless the padding is whole pixels of
    the prototypes; the padding is cut off; then bilinear to the original. Both steps are separable and linear, so that
    each axis is one matrix, of which a window takes the rows that it needs.
    """

    def __init__(self, shape: Size, size: Size, back: WayBack) -> None:
        spans = []
        for axis, (count, pixels) in enumerate(zip(shape, size, strict=True)):
            scale, offset = back.scale[1 - axis], back.offset[1 - axis]
            start, end = -offset / scale, (back.size[axis] - offset) / scale
            spans.append((start * count / pixels, end * count / pixels))
        factor = next((factor for factor in (1, 2) if all(map(_is_whole, np.ravel(spans) * factor))), FINEST)
        self.rows, self.columns = (
            _matrix(count, factor, span, length) for count, span, length in zip(shape, spans, back.size, strict=True)
        )
        self._size = back.size

    def window(self, prototypes: np.ndarray, coefficients: np.ndarray, box: Sequence[float]) -> Window:
        """The mask of ``prototypes`` C×h×w by C ``coefficients``, inside ``box`` on the original image."""
        left, top, right, bottom = (math.ceil(side) for side in box)
        rows, columns = self.rows[top:bottom], self.columns[left:right]
        if not rows.size or not columns.size:
            return Window(np.zeros((0, 0), bool), top, left, self._size)
        used_rows, used_columns = _used(rows), _used(columns)
        values = np.tensordot(coefficients, prototypes[:, used_rows, used_columns], 1)
        pixels = rows[:, used_rows] @ values @ columns[:, used_columns].T > 0
        return Window(pixels, top, left, self._size)


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-6


def _matrix(count: int, factor: int, span: tuple[float, float], length: int) -> np.ndarray:
    """``length`` × ``count``: values at the pixels of the original, from those at prototypes; float32.

    ``span`` is the part of the prototypes that shows the original.
    """
    finer = count * factor
    places = (np.arange(finer) + 0.5) / factor - 0.5
    upsampled = _interpolated(np.eye(count, dtype=np.float32), places, 0, count - 1)
    start, end = span[0] * factor, span[1] * factor
    places = start + (np.arange(length) + 0.5) * (end - start) / length - 0.5
    low, high = max(0, math.ceil(start - 1e-6)), min(finer, math.floor(end + 1e-6)) - 1
    return _interpolated(upsampled, places, min(low, finer - 1), max(high, low, 0))


def _interpolated(rows: np.ndarray, places: np.ndarray, low: int, high: int) -> np.ndarray:
    """Linear interpolation between rows at fractional places, which are clamped to ``low``..``high``."""
    high = min(high, len(rows) - 1)
    places = np.clip(places, low, high)
    first = places.astype(np.int64)
    weights = (places - first).astype(np.float32)[:, None]
    between: np.ndarray = rows[first] * (1 - weights) + rows[np.minimum(first + 1, high)] * weights
    return between


def _used(matrix: np.ndarray) -> slice:
    """The columns in which anything is set."""
    columns = np.flatnonzero(matrix.any(0))
    return slice(int(columns[0]), int(columns[-1]) + 1)


# -- forms ------------------------------------------------------------------------------------------------------------


def to_polygons(window: Window) -> list[list[list[int]]]:
    """The outline of each part: lists of [x, y], pixels on the edge; holes are left out."""
    import cv2

    found, _ = cv2.findContours(window.pixels.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    corner = np.array([window.left, window.top])
    return [(points.reshape(-1, 2) + corner).tolist() for points in found]


def to_run_lengths(window: Window) -> dict[str, Any]:
    """COCO's compressed run lengths, column by column: ``{"size": [H, W], "counts": text}``, as pycocotools has it."""
    height, width = window.size
    columns = np.zeros((window.pixels.shape[1], window.pixels.shape[0] + 2), np.int8)
    columns[:, 1:-1] = window.pixels.T
    changes = np.diff(columns, axis=1)
    starts, ends = (
        (column + window.left) * height + row + window.top
        for column, row in (np.nonzero(changes == step) for step in (1, -1))
    )
    places = np.stack([starts, ends], 1).ravel()
    touching = np.flatnonzero(places[1:-1:2] == places[2::2])  # the foot of a column and the head of the next
    places = np.delete(places, np.concatenate([2 * touching + 1, 2 * touching + 2]))
    counts = np.diff(np.concatenate([[0], places, [height * width]]))
    counts = counts[:-1] if len(counts) > 1 and not counts[-1] else counts
    return {"size": [height, width], "counts": _compressed(counts.tolist())}


def _compressed(counts: list[int]) -> str:
    """The text of ``rleToString`` in COCO's ``maskApi.c``: five bits a character, differences from the third on."""
    text = []
    for index, count in enumerate(counts):
        value = count - counts[index - 2] if index > 2 else count
        while True:
            bits = value & 31
            value >>= 5
            is_last = value == (-1 if bits & 16 else 0)
            text.append(chr(48 + bits + (0 if is_last else 32)))
            if is_last:
                break
    return "".join(text)


def to_png(window: Window) -> bytes:
    """A PNG of the original's size: 255 where the mask is, else 0."""
    import cv2

    file: bytes = cv2.imencode(".png", window.whole().astype(np.uint8) * 255)[1].tobytes()
    return file


FORMS: dict[str, Callable[[Window], Any]] = {
    "polygons": to_polygons,
    "rle": to_run_lengths,
    "png": to_png,
    "arrays": Window.whole,
}
_WHOLE = ("png", "arrays")


class YoloSegments(Detector):
    """YOLOv8-seg, v11-seg, v26-seg, v5-seg: boxes with coefficients behind them, and prototypes N×M×h×w.

    Each detection has a mask of the original's size; one without a pixel is left out.
    """

    masks = Param(to_str, "polygons", choices=tuple(FORMS), doc="form of the masks: outlines, COCO's run lengths, …")

    def candidates(self, outputs: Sequence[TensorSpec]) -> Sequence[type[Layout]]:
        rows = rows_of(outputs[0])
        if rows is None:
            return Yolo, Yolo5, EndToEnd
        return (Yolo, EndToEnd) if rows <= MOST_ROWS else (Yolo, Yolo5, YoloRows, EndToEnd)

    def find_layout(self, outputs: Sequence[TensorSpec], extra: int = 0) -> Layout:
        most = max((len(output.dims) for output in outputs), default=0)
        prototypes = [index for index, output in enumerate(outputs) if len(output.dims) == most]
        ranks = (4,) if self.has_rows else (3, 4)
        channels = outputs[prototypes[0]].dims[-3:-2] if most in ranks else ()
        boxes = next((index for index, output in enumerate(outputs) if len(output.dims) == most - 1), None)
        if len(prototypes) != 1 or not channels or boxes is None:
            takes = "YoloSegments takes boxes with coefficients and prototypes NxMxhxw"
            raise ConfigError(f"{takes}; the model has {shown_outputs(outputs)}")
        if channels[0] is None:
            raise OpenShapeError(f"the number of prototypes is not declared: {shown_outputs(outputs)}")
        layout = super().find_layout([outputs[boxes]], channels[0])
        layout.used, layout.boxes_output = (boxes, prototypes[0]), boxes
        layout.sizes = (*layout.sizes, (channels[0], "h", "w"))
        return layout

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return detection_outputs(bool(self.names), has_masks=True)

    def result(
        self, scores: np.ndarray, objects: Objects, arrays: Sequence[np.ndarray], size: Size, back: WayBack
    ) -> Detections:
        boxes, prototypes = self.on_original(objects.boxes, back), arrays[1]
        if back.size[0] * back.size[1] > MAX_PIXELS or max(back.size) > MOST_SIDE:  # a client may have sent the size
            bounds = f"{MOST_SIDE} in a side, {MAX_PIXELS} altogether"
            raise InvalidRequest(f"masks of {back.size[1]}x{back.size[0]} pixels; at most {bounds}")
        if not np.isfinite(prototypes).all() or not np.isfinite(objects.extra).all():
            raise self.origin.not_finite("masks")
        upsampler = Upsampler(prototypes.shape[1:], size, back)
        pairs = zip(objects.extra, boxes.astype(np.float32), strict=True)
        form, pixels = FORMS[self.masks], 0
        kept: list[int] = []
        masks: list[Any] = []
        most_whole = MOST_WHOLE_PIXELS // (back.size[0] * back.size[1]) if self.masks in _WHOLE else len(scores)
        for index, (coefficients, box) in enumerate(pairs):
            pixels += math.ceil((box[2] - box[0] + 1) * (box[3] - box[1] + 1))
            if pixels > MOST_MASK_PIXELS:
                most = f"{index} of {len(scores)} masks have {MOST_MASK_PIXELS} pixels together, the most of an item"
                raise InvalidRequest(f"{most}: raise threshold, or lower iou or max_det")
            window = upsampler.window(prototypes, coefficients, box)
            if window.pixels.any():
                if len(kept) == most_whole:
                    most = f"{len(scores)} masks of {back.size[1]}x{back.size[0]} pixels, at most {most_whole} of them"
                    raise InvalidRequest(f"{most}: raise threshold, lower iou or max_det, or send a smaller image")
                kept.append(index)
                masks.append(form(window))
        return Detections(boxes[kept], scores[kept], objects.classes[kept], self.names, masks=tuple(masks))
