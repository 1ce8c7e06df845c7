"""Keypoints of the objects that a detector found, on the original image."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import numpy as np

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
    YoloRows,
    shown_outputs,
)
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import TensorSpec, detection_outputs
from torchpipe_py.errors import ConfigError
from torchpipe_py.results import Detections
from torchpipe_py.values import to_int


class YoloPose(Detector):
    """YOLOv8-pose, v11-pose, v26-pose: boxes with P keypoints behind them: x, y, score, or x, y.

    P comes from ``keypoints``, from the metadata of an ONNX file (``kpt_shape``), or is what one class leaves.
    """

    layouts = (Yolo, YoloRows, EndToEnd)

    keypoints = Param(to_int, 0, low=0, high=1000, doc="the number of keypoints; default: the model's")

    def candidates(self, outputs: Sequence[TensorSpec]) -> Sequence[type[Layout]]:
        rows = rows_of(outputs[0])
        return (Yolo, EndToEnd) if rows is None or rows <= MOST_ROWS else (Yolo, YoloRows)

    def find_layout(self, outputs: Sequence[TensorSpec], extra: int = 0) -> Layout:
        self.shape = self._shape_of(outputs[0])
        return super().find_layout(outputs[:1], self.shape[0] * self.shape[1])

    def _shape_of(self, output: TensorSpec) -> tuple[int, int]:
        """The number of keypoints, and of numbers for each."""
        try:
            count, numbers = ast.literal_eval(self.metadata.get("kpt_shape", "")[:100])
            if type(count) is type(numbers) is int and 0 < count <= 1000 and numbers in (2, 3):
                return count, numbers
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
        if self.keypoints:
            return self.keypoints, 3
        rows, last = rows_of(output), output.dims[-1] if output.dims else None
        classes = max(1, len(self.names))
        if last is not None and (rows is None or rows > last):
            values = last - (6 if rows is None or rows <= MOST_ROWS else 4 + classes)
        else:
            values = (rows or 0) - 4 - classes
        if len(output.dims) != 3 and (len(output.dims) != 2 or self.has_rows):
            raise ConfigError(
                "YoloPose takes an output Nx(5+3P)xA or NxKx(6+3P), rows of a box, scores and P keypoints; "
                f"the model has {shown_outputs([output])}"
            )
        if values <= 0 or values % 3:
            if None in output.dims[-2:]:
                raise OpenShapeError(f"the number of keypoints is not declared: {shown_outputs([output])}")
            raise ConfigError(f"YoloPose: {output} does not tell the number of keypoints: set keypoints")
        return values // 3, 3

    def gives(self, outputs: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return detection_outputs(bool(self.names), keypoints=self.shape[0] if self.layout else None)

    def result(
        self, scores: np.ndarray, objects: Objects, arrays: Sequence[np.ndarray], size: Size, back: WayBack
    ) -> Detections:
        values = objects.extra.reshape(len(scores), *self.shape).astype(np.float64)
        if not np.isfinite(values).all():
            raise self.origin.not_finite("keypoints")
        points = np.ones((len(scores), self.shape[0], 3))
        points[:, :, 2 : self.shape[1]] = values[:, :, 2:]
        points[:, :, :2] = back.points(values[:, :, :2])
        return Detections(self.on_original(objects.boxes, back), scores, objects.classes, self.names, points)
