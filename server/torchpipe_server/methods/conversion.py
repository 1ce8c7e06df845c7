"""Python values to the contract's structs and back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from torchpipe_py import InvalidRequest, NoResult
from torchpipe_py.errors import nearest
from torchpipe_py.wire.values import (
    DTYPES,
    MOST_DIMENSIONS,
    MOST_TENSORS,
    are_arrays,
    is_array,
    is_label_and_score,
    plain,
    to_array,
)

_VALUE_FIELDS = ("tensor", "bytes", "text", "number", "integer", "tensors")


def to_python(value: Any) -> Any:
    """A ``Value`` as what a pipeline works on; exactly one field must be set, or ``InvalidRequest``."""
    names = [name for name in _VALUE_FIELDS if getattr(value, name) is not None]
    if len(names) != 1:
        raise InvalidRequest(f"a Value has exactly one field set, this one {', '.join(names) or 'none'}")
    held = getattr(value, names[0])
    if names[0] == "tensor":
        return _to_tensor(held)
    if names[0] == "tensors":
        if len(held) > MOST_TENSORS:
            raise InvalidRequest(f"a list of {len(held)} tensors; the limit is {MOST_TENSORS}")
        return [_to_tensor(tensor) for tensor in held]
    return held


def to_values(idl: Any, key: str, value: Any) -> dict[str, Any]:
    """What a pipeline wrote under ``key``, as named ``Value``s.

    Dicts and lists of texts, numbers and the like, boxes say, become a text: JSON. So do ``(label, score)`` and a list
    of such pairs, best first; beside them stand ``label`` and ``score``, those of the first.
    """
    if is_label_and_score(value):
        return _ranked(idl, key, value, _pair(value))
    if is_ranking(value):
        return _ranked(idl, key, value[0], list(map(_pair, value)))
    if is_array(value):
        return {key: idl.Value(tensor=_from_array(idl, value))}
    if are_arrays(value):
        return {key: idl.Value(tensors=[_from_array(idl, array) for array in value])}
    if isinstance(value, (bytes, bytearray)):
        return {key: idl.Value(bytes=bytes(value))}
    if isinstance(value, str):
        return {key: idl.Value(text=value)}
    if isinstance(value, (bool, int, np.integer)):
        return {key: idl.Value(integer=int(value))}
    if isinstance(value, (float, np.floating)):
        return {key: idl.Value(number=_finite(value))}
    if isinstance(value, (dict, list, tuple)):
        try:
            return {key: idl.Value(text=json.dumps(value, default=plain, allow_nan=False))}
        except (TypeError, ValueError) as error:
            raise NoResult(f"{key!r} holds a {type(value).__name__} that has no form on the wire: {error}") from None
    raise NoResult(f"{key!r} holds a {type(value).__name__}, which has no form on the wire")


def _ranked(idl: Any, key: str, best: Any, pairs: Any) -> dict[str, Any]:
    outputs = {"label": idl.Value(text=str(best[0])), "score": idl.Value(number=_finite(best[1]))}
    return {**outputs, key: idl.Value(text=json.dumps(pairs))}


def _pair(value: Any) -> list[Any]:
    """A label and a score as JSON can say them."""
    label = value[0]
    return [label if isinstance(label, str) else int(label), _finite(value[1])]


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NoResult(f"the result holds {number}, which is no score and has no form in JSON")
    return number


def to_label_and_score(result: Any, score: Any = None) -> tuple[str, float]:
    """``(label, score)`` as it is; of a list of such pairs the first; a label alone with its ``score``.

    Of a tensor of logits, 1×C, the most probable class and its softmax probability.
    """
    if is_label_and_score(result):
        return str(result[0]), _finite(result[1])
    if is_ranking(result):
        return str(result[0][0]), _finite(result[0][1])
    if is_label_and_score((result, score)):
        return str(result), _finite(score)
    if isinstance(result, list) and not result:
        raise NoResult("the result is an empty list: no class has the score that is asked for")
    if isinstance(result, torch.Tensor) and result.numel() and result.numel() == result.shape[-1]:
        values = result.detach().float().cpu().numpy().ravel()
        exponentials = np.exp(values - values.max())
        return str(int(values.argmax())), _finite(exponentials.max() / exponentials.sum())
    raise NoResult(f"the result is a {type(result).__name__}, not (label, score) or logits 1xC; call infer instead")


def is_ranking(value: Any) -> bool:
    """Whether ``value`` is a list of pairs of a label and a number."""
    return isinstance(value, list) and bool(value) and all(map(is_label_and_score, value))


def _to_tensor(tensor: Any) -> torch.Tensor:
    if tensor.dtype not in DTYPES:
        raise InvalidRequest(f"tensor of dtype {tensor.dtype[:40]!r}; {nearest(tensor.dtype[:40], DTYPES)}")
    dtype, shape = np.dtype(tensor.dtype), tuple(tensor.shape)
    if len(shape) > MOST_DIMENSIONS:  # before the product, whose time grows with the square of their number
        raise InvalidRequest(f"a tensor of {len(shape)} dimensions; the limit is {MOST_DIMENSIONS}")
    wanted = math.prod(shape) * dtype.itemsize
    if any(size < 0 for size in shape) or wanted != len(tensor.data):
        raise InvalidRequest(f"tensor of dtype {dtype} and shape {shape}: {len(tensor.data)} bytes do not fit")
    try:
        array = np.frombuffer(tensor.data, dtype.newbyteorder("<")).reshape(shape)
        return torch.from_numpy(array.astype(dtype))
    except ValueError as error:  # more elements in a dimension than NumPy can count
        raise InvalidRequest(f"tensor of shape {shape}: {error}") from None


def _from_array(idl: Any, value: Any) -> Any:
    array = to_array(value, "on the wire")
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return idl.Tensor(dtype=array.dtype.name, shape=list(array.shape), data=little.tobytes())
