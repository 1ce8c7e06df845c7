"""Makes results of pipes comparable: as pixels, or as the class from a model."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from torchpipe_py.backends.image.mat import COLORS, OF_MATS, OF_TENSORS
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import TorchpipeError, counted, describe
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.tools.compare_models.figures import Prediction
from torchpipe_py.tools.report import ToolError


class Unusable(TorchpipeError):
    """A result of the right type without pixels or a class for this image; others may be fine."""


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
    """The tensor as float32 on the host."""
    if tensor.is_cuda:
        import torch

        # Without SyncTensor, another thread's stream may still be writing it.
        torch.cuda.synchronize(tensor.device)
    values: np.ndarray = tensor.detach().cpu().float().numpy()
    return values


def _unreadable(config: str, what: str, wanted: str, value: Any) -> ToolError:
    """An error that names type, dtype and shape, as far as known."""
    found = type(value).__name__
    if is_tensor(value) or isinstance(value, np.ndarray):
        name = "Tensor" if is_tensor(value) else "array"
        found = f"{name} of {value.dtype}, shape {shown_dims(value.shape) if value.ndim else '()'}"
    elif isinstance(value, (list, tuple)):
        found += f" of {len(value)}"
    return ToolError(f"{config}: its result {what}: expected {wanted}, got {found}")


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
        planes = on_host(value)
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


def is_class(value: Any) -> bool:
    """Whether a result is a class, not pixels: a pair, or a row of logits."""
    return isinstance(value, (list, tuple)) or (is_tensor(value) and value.ndim <= 2)


def read_prediction(value: Any, config: str) -> Prediction:
    """``(label, score)``, or the index of the largest of the logits 1×C.

    Raises ``ToolError``, naming ``config``, if it is not a class; ``Unusable`` if it contains NaN.
    """
    if isinstance(value, (list, tuple)) and len(value) == 2:
        label, score = value
        is_pair = isinstance(label, (str, Integral)) and isinstance(score, Real)
        if is_pair and not isinstance(label, bool) and not isinstance(score, bool):
            if not math.isfinite(score):
                raise Unusable(f"class {label} with a score of {float(score)}")
            return Prediction(label if isinstance(label, str) else int(label), float(score))
    elif is_tensor(value) or isinstance(value, np.ndarray):
        shape = tuple(value.shape)
        if shape and shape[-1] >= 2 and shape[:-1] in ((), (1,)):
            logits = (on_host(value) if is_tensor(value) else value.astype(np.float32)).reshape(-1)
            if np.isnan(logits).any():
                raise Unusable("logits that contain NaN")
            return Prediction(int(logits.argmax()))
    raise _unreadable(
        config, "cannot be read as a class", "(label, score) or logits 1xC of at least two classes", value
    )
