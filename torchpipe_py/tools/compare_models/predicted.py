"""Results of functions in PyTorch, in the forms that pipes give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchpipe_py.keys import TASK_COLOR_KEY, TASK_RESULT_KEY
from torchpipe_py.results import Detections

Data = dict[str, Any]


def as_result(value: Any) -> Data:
    """A finished request whose result is ``value``, what a function returned for one image.

    Detections may be torchvision's (a dict of boxes, scores and labels, perhaps masks and keypoints), Ultralytics'
    ``Results``, or a list of dicts as ``Detections.to_list`` gives it. A list of one result is that result. Arrays
    H×W×3 are RGB, as in PyTorch.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1 and not isinstance(value[0], (int, float, list, tuple)):
        (only,) = value
        is_row = isinstance(only, Mapping) and "box" in only
        return as_result(only if not is_row else _of_rows(value))
    if isinstance(value, Mapping) and "boxes" in value:
        return {TASK_RESULT_KEY: _of_arrays(value)}
    if isinstance(value, list) and value and all(isinstance(row, Mapping) and "box" in row for row in value):
        return {TASK_RESULT_KEY: _of_rows(value)}
    if hasattr(value, "probs") and hasattr(value, "boxes") and hasattr(value, "orig_shape"):
        return {TASK_RESULT_KEY: _of_ultralytics(value)}
    return {TASK_RESULT_KEY: value, TASK_COLOR_KEY: "rgb"}


def _of_arrays(found: Mapping[str, Any]) -> Detections:
    """Of ``boxes``, ``scores`` and ``labels`` or ``classes``."""
    classes = found["labels"] if "labels" in found else found["classes"]
    names: tuple[str, ...] = ()
    if any(isinstance(label, str) for label in classes):
        names = tuple(sorted(set(map(str, classes))))
        classes = [names.index(str(label)) for label in classes]
    masks = found.get("masks")
    if masks is not None and not isinstance(masks, (list, tuple)):
        masks = tuple(mask.reshape(mask.shape[-2:]) > 0.5 for mask in _numbers(masks))
    keypoints = found.get("keypoints")
    return Detections(
        _numbers(found["boxes"]),
        _numbers(found["scores"]),
        _numbers(classes),
        names,
        None if keypoints is None else _numbers(keypoints),
        None if masks is None else tuple(masks),
    )


def _of_rows(rows: Sequence[Any]) -> Detections:
    columns: Data = {
        "boxes": [row["box"] for row in rows],
        "scores": [row["score"] for row in rows],
        "labels": [row.get("label", row.get("class")) for row in rows],
    }
    if all("keypoints" in row for row in rows):
        columns["keypoints"] = [row["keypoints"] for row in rows]
    if all("mask" in row for row in rows):
        columns["masks"] = tuple(row["mask"] for row in rows)
    return _of_arrays(columns)


def _of_ultralytics(found: Any) -> Any:
    """``(label, score)`` of a classifier, otherwise ``Detections`` with masks and keypoints if there are any."""
    if found.probs is not None:
        return found.names[int(found.probs.top1)], float(found.probs.top1conf)
    masks = None
    if found.masks is not None:
        # Masks have the size of the model's input, unless predict was asked for retina_masks; polygons never do.
        has_size = tuple(found.masks.shape[-2:]) == tuple(found.orig_shape)
        masks = [*(_numbers(found.masks.data) > 0.5)] if has_size else [[part.tolist()] for part in found.masks.xy]
    return Detections(
        _numbers(found.boxes.xyxy),
        _numbers(found.boxes.conf),
        _numbers(found.boxes.cls),
        tuple(found.names.get(index, str(index)) for index in range(max(found.names, default=-1) + 1)),
        None if found.keypoints is None else _numbers(found.keypoints.data),
        None if masks is None else tuple(masks),
    )


def _numbers(value: Any) -> np.ndarray:
    """A Tensor, array or list as an array on the host."""
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
