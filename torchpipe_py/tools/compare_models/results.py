"""Results by their kind, in forms that can be compared."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from torchpipe_py.backends.image.mat import COLORS, OF_MATS, OF_TENSORS
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import TorchpipeError, counted, describe
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.results import Detections
from torchpipe_py.tools.compare_models.figures import Prediction
from torchpipe_py.tools.report import ToolError


class Unusable(TorchpipeError):
    """A result of the right kind without usable values for this image; others may be fine."""


@dataclass(frozen=True)
class Pixels:
    """float32 H×W×C on the 0..255 scale, RGB where there are three channels; ``origin`` describes its source."""

    values: np.ndarray
    origin: str


def refusal(item: dict[str, Any]) -> str:
    """Why a finished request has no result, on one line; ``""`` if it has one."""
    if TASK_RESULT_KEY in item:
        return ""
    error = item.get(TASK_ERROR_KEY)
    return "no result, without a reason" if error is None else " ".join(describe(error).split())


def is_tensor(value: Any) -> bool:
    """Whether this is a PyTorch tensor; False if PyTorch is not imported."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def on_host(tensor: Any) -> np.ndarray:
    """The tensor on the host, floating-point ones as float32."""
    if tensor.is_cuda:
        import torch

        # Without SyncTensor, another thread's stream may still be writing it.
        torch.cuda.synchronize(tensor.device)
    copied = tensor.detach().cpu()
    values: np.ndarray = (copied.float() if copied.is_floating_point() else copied).numpy()
    return values


def _described(value: Any) -> str:
    """Type, dtype and shape, as far as known."""
    found = type(value).__name__
    if is_tensor(value) or isinstance(value, np.ndarray):
        name = "Tensor" if is_tensor(value) else "array"
        found = f"{name} of {value.dtype}, shape {shown_dims(value.shape) if value.ndim else '()'}"
    elif isinstance(value, (list, tuple)):
        found += f" of {len(value)}"
    return found


def _unreadable(config: str, what: str, wanted: str, value: Any) -> ToolError:
    return ToolError(f"{config}: its result {what}: expected {wanted}, got {_described(value)}")


def read_pixels(item: dict[str, Any], config: str) -> Pixels:
    """The result of a finished request.

    Raises ``ToolError``, naming ``config``, if it is neither Mat nor Tensor; ``Unusable`` for an image without pixels
    or with NaN or infinity.
    """
    value, color = item[TASK_RESULT_KEY], item.get(TASK_COLOR_KEY)
    wanted = "a Mat (uint8 array, HxWxC) or a Tensor (1xCxHxW)"
    if is_tensor(value):
        if value.ndim not in (3, 4) or (value.ndim == 4 and value.shape[0] != 1) or value.is_complex():
            raise _unreadable(config, "is neither Mat nor Tensor", wanted, value)
        planes = on_host(value).astype(np.float32, copy=False)
        values, kind = np.ascontiguousarray(planes.reshape(planes.shape[-3:]).transpose(1, 2, 0)), "Tensor"
    else:
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (2, 3):
            raise _unreadable(config, "is neither Mat nor Tensor", wanted, value)
        values, kind = (value if value.ndim == 3 else value[:, :, None]).astype(np.float32), "Mat"
    if values.size == 0:
        raise Unusable(f"an empty {kind} of shape {shown_dims(values.shape)}")
    if not np.isfinite(values).all():
        raise Unusable(f"a {kind} that contains NaN or infinity")
    if values.shape[2] != 3:
        return Pixels(values, f"{kind}, {counted(values.shape[2], 'channel')}")
    # Without a color in the dict, a Mat is BGR and a Tensor RGB.
    named = color if color in COLORS else None
    order = named or (OF_MATS if kind == "Mat" else OF_TENSORS)
    origin = f"{kind}, {order.upper()}" + ("" if named else " assumed: its dict names no color")
    if order == "rgb":
        return Pixels(values, origin)
    return Pixels(np.ascontiguousarray(values[:, :, ::-1]), f"{origin}, converted to RGB before comparing")


# --- kinds

Result = Pixels | Prediction | Detections | np.ndarray
"""A result of the kind pixels, classes or detections, or a map H×W or a vector."""

RESULTS = (
    "a class, detections, a map of classes, a vector, or pixels: (label, score), a list of these, logits 1xC, "
    "Detections, integers 1xHxW, floats 1xD, a Mat HxWxC or a Tensor 1xCxHxW"
)


def kinds_of(item: Mapping[str, Any], config: str) -> tuple[str, ...]:
    """The kinds of ``measures.KINDS`` as which a finished request can be read, the likeliest first.

    Raises ``ToolError``, naming ``config``, if there is none.
    """
    value = item[TASK_RESULT_KEY]
    if isinstance(value, Detections):
        return ("detections",)
    if _is_label(value) or _is_scored(value) or (isinstance(value, (list, tuple)) and all(map(_is_scored, value))):
        return ("classes",)
    array = _array(value)
    if array is None:
        raise _unreadable(config, "cannot be compared", RESULTS, value)
    shape = tuple(array.shape)
    if shape[:-1] in ((), (1,)) and shape and shape[-1] > 1 and (array.dtype.kind == "f" or is_tensor(value)):
        return ("embeddings", "classes") if _has_length_one(array) else ("classes", "embeddings")
    is_plane = len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)
    if is_plane and array.dtype.kind in "iub":
        if array.dtype != np.uint8:
            return ("masks",)
        # A Tensor of a picture is 1×C×H×W, and a Mat H×W may be a gray one.
        return ("masks", "pixels") if is_tensor(value) or len(shape) == 3 else ("pixels", "masks")
    return ("pixels",)


def read(kind: str, item: dict[str, Any], config: str) -> Result:
    """The result of a finished request as one of ``kinds_of`` it.

    Raises ``ToolError``, naming ``config``, if it is none of that kind; ``Unusable`` if its values are.
    """
    value: Any = item[TASK_RESULT_KEY]
    if kind == "pixels":
        return read_pixels(item, config)
    if kind == "classes":
        return read_prediction(item, config)
    if kind == "detections":
        if not isinstance(value, Detections):
            raise _unreadable(config, "is not what it was before", "Detections", value)
        if not (np.isfinite(value.boxes).all() and np.isfinite(value.scores).all()):
            raise Unusable("detections that contain NaN or infinity")
        return value
    array = _array(value)
    if array is None or not array.size or (kind == "masks" and (array.ndim < 2 or array.dtype.kind not in "iub")):
        raise _unreadable(config, "is not what it was before", f"a result of the kind {kind}", value)
    if kind == "masks":
        return array.reshape(array.shape[-2:]).astype(np.int64)
    if not np.isfinite(array).all():
        raise Unusable("a vector that contains NaN or infinity")
    return array.reshape(-1).astype(np.float64)


def read_prediction(item: Mapping[str, Any], config: str) -> Prediction:
    """``(label, score)``, the best of a list of these, a label with ``score`` beside it, or the best of logits 1×C.

    The score of logits is their softmax, unless they are probabilities already. Raises ``ToolError``, naming
    ``config``, if it is not a class; ``Unusable`` if it contains NaN.
    """
    value: Any = item[TASK_RESULT_KEY]
    if _is_label(value):
        score = item.get("score")
        return _prediction(value, float(score) if isinstance(score, Real) else None)
    if _is_scored(value):
        return _prediction(value[0], float(value[1]))
    if isinstance(value, (list, tuple)) and all(map(_is_scored, value)):
        classes = [_prediction(label, float(score)) for label, score in value]
        best = classes[0] if classes else Prediction(None)
        return Prediction(best.label, best.score, tuple(each.label for each in classes))
    row = _array(value)
    if row is None or row.ndim == 0 or row.shape[:-1] not in ((), (1,)) or row.shape[-1] < 2:
        wanted = "(label, score) or logits 1xC of at least two classes"
        raise _unreadable(config, "cannot be read as a class", wanted, value)
    logits = row.reshape(-1).astype(np.float64)
    if np.isnan(logits).any():
        raise Unusable("logits that contain NaN")
    index = int(logits.argmax())
    if _are_probabilities(logits):
        return Prediction(index, float(logits[index]))
    return Prediction(index, float(1 / np.exp(logits - logits[index]).sum()) if np.isfinite(logits[index]) else None)


def _prediction(label: Any, score: float | None) -> Prediction:
    if score is not None and not math.isfinite(score):
        raise Unusable(f"class {label} with a score of {score}")
    return Prediction(label if isinstance(label, str) else int(label), score)


def _is_label(value: Any) -> bool:
    return isinstance(value, (str, Integral)) and not isinstance(value, bool)


def _is_scored(value: Any) -> bool:
    """Whether this is ``(label, score)``."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    return _is_label(value[0]) and isinstance(value[1], Real) and not isinstance(value[1], bool)


def _array(value: Any) -> np.ndarray | None:
    """A Tensor, array or list of floats as an array; ``None`` for anything else."""
    if is_tensor(value):
        return None if value.is_complex() else on_host(value)
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "iubf" else None
    is_vector = isinstance(value, list) and len(value) > 1 and all(isinstance(each, float) for each in value)
    return np.array(value) if is_vector else None


def _has_length_one(row: np.ndarray) -> bool:
    """Whether a row is a vector of length 1, but not probabilities of which one is certain."""
    values = row.astype(np.float64)
    return abs(float(np.linalg.norm(values)) - 1) < 1e-3 and not _are_probabilities(values)


def _are_probabilities(row: np.ndarray) -> bool:
    return bool(row.min() >= 0) and abs(float(row.sum()) - 1) < 1e-3
