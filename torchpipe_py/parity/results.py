"""What pipes return, made comparable: pixels of a preprocessing result, the class of a model's result."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from torchpipe_py.backends.images.opencv import COLORS, OF_MATS, OF_TENSORS
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import TorchpipeError, counted
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.parity.record import ParityError, Prediction


class Unusable(TorchpipeError):
    """A result of the right type that holds no pixels or no class for this one image; the others may be fine."""


@dataclass(frozen=True)
class Pixels:
    """float32 H×W×C on the 0..255 scale, RGB where there are three channels; ``origin`` says what it was made of."""

    values: np.ndarray
    origin: str


def refusal(item: dict[str, Any]) -> str:
    """Why a finished request has no result, on one line; ``""`` where it has one."""
    if TASK_RESULT_KEY in item:
        return ""
    error = item.get(TASK_ERROR_KEY)
    return "no result, and no reason given" if error is None else describe_error(error)


def describe_error(error: BaseException) -> str:
    """Class and message on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def read_pixels(item: dict[str, Any], config: str) -> Pixels:
    """The result of a finished request.

    Raises ``ParityError``, naming ``config``, for what is neither Mat nor Tensor; ``Unusable`` for an image without
    pixels, or with values that are not finite.
    """
    value, color = item[TASK_RESULT_KEY], item.get(TASK_COLOR_KEY)
    if is_tensor(value):
        values, origin = _of_tensor(value, config), "Tensor"
    else:
        values, origin = _of_mat(value, config), "Mat"
    if values.size == 0:
        raise Unusable(f"an empty {origin} of shape {shown_dims(values.shape)}")
    if not np.isfinite(values).all():
        raise Unusable(f"a {origin} that holds NaN or infinity")
    return _in_rgb(values, origin, color)


def is_tensor(value: Any) -> bool:
    """Whether this is a PyTorch tensor; where PyTorch was never imported, there is none."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def describe_type(value: Any) -> str:
    """Type, dtype and shape, as far as there are any."""
    if is_tensor(value) or isinstance(value, np.ndarray):
        name = "Tensor" if is_tensor(value) else "array"
        return f"{name} of {value.dtype}, shape {shown_dims(value.shape) if value.ndim else '()'}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _of_mat(value: Any, config: str) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (2, 3):
        raise _not_pixels(value, config)
    mat = value if value.ndim == 3 else value[:, :, None]
    return mat.astype(np.float32)


def _of_tensor(value: Any, config: str) -> np.ndarray:
    if value.ndim not in (3, 4) or (value.ndim == 4 and value.shape[0] != 1) or value.is_complex():
        raise _not_pixels(value, config)
    planes = on_host(value)
    return np.ascontiguousarray(planes.reshape(planes.shape[-3:]).transpose(1, 2, 0))


def on_host(tensor: Any) -> np.ndarray:
    """float32 on the host, of the same shape."""
    if tensor.is_cuda:
        import torch

        # Another thread's stream may still write what a configuration without SyncTensor returned.
        torch.cuda.synchronize(tensor.device)
    values: np.ndarray = tensor.detach().cpu().float().numpy()
    return values


def _not_pixels(value: Any, config: str) -> ParityError:
    wanted = "a Mat (uint8 array, HxWxC) or a Tensor (1xCxHxW)"
    return ParityError(f"{config}: its result is neither Mat nor Tensor: expected {wanted}, got {describe_type(value)}")


def _in_rgb(values: np.ndarray, origin: str, color: Any) -> Pixels:
    """Three channels in RGB order: by the dict's ``color``; without one a Mat holds BGR and a Tensor RGB."""
    if values.shape[2] != 3:
        return Pixels(values, f"{origin}, {counted(values.shape[2], 'channel')}")
    named = color if color in COLORS else None
    order = named or (OF_MATS if origin == "Mat" else OF_TENSORS)
    source = f"{origin}, {order.upper()}" + ("" if named else " assumed: its dict names no color")
    if order == "rgb":
        return Pixels(values, source)
    return Pixels(np.ascontiguousarray(values[:, :, ::-1]), f"{source}, converted to RGB before comparing")


def is_class(value: Any) -> bool:
    """Whether a result is meant as a class, and not as pixels: a pair, or a row of logits."""
    return isinstance(value, (list, tuple)) or (is_tensor(value) and value.ndim <= 2)


def read_prediction(value: Any, config: str) -> Prediction:
    """``(label, score)``, or the index of the largest of the logits 1×C.

    Raises ``ParityError``, naming ``config``, for what cannot be read as a class; ``Unusable`` where it holds NaN.
    """
    if isinstance(value, (list, tuple)):
        return _of_pair(value, config)
    if is_tensor(value) or isinstance(value, np.ndarray):
        return _of_logits(value, config)
    raise _no_class(value, config)


def _of_pair(value: Any, config: str) -> Prediction:
    if len(value) != 2 or isinstance(value[0], bool) or isinstance(value[1], bool):
        raise _no_class(value, config)
    label, score = value
    if not isinstance(label, (str, Integral)) or not isinstance(score, Real):
        raise _no_class(value, config)
    if not math.isfinite(score):
        raise Unusable(f"class {label} with a score of {float(score)}")
    return Prediction(label if isinstance(label, str) else int(label), float(score))


def _of_logits(value: Any, config: str) -> Prediction:
    shape = tuple(value.shape)
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[0] != 1) or shape[-1] < 2:
        raise _no_class(value, config)
    logits = (on_host(value) if is_tensor(value) else value.astype(np.float32)).reshape(-1)
    if np.isnan(logits).any():
        raise Unusable("logits that hold NaN")
    return Prediction(int(logits.argmax()))


def _no_class(value: Any, config: str) -> ParityError:
    wanted = "(label, score) or logits 1xC of at least two classes"
    return ParityError(f"{config}: its result cannot be read as a class: expected {wanted}, got {describe_type(value)}")
