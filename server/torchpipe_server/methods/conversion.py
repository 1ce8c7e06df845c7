"""Converts Python values to the contract's structs and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchpipe_py import Detections, InvalidRequest, NoResult
from torchpipe_py.serving import Bound, answers, to_text
from torchpipe_py.serving import values as wire

_VALUE_FIELDS = ("tensor", "bytes", "text", "number", "integer", "tensors")


def to_python(where: str, value: Any) -> Any:
    """A ``Value`` as a Python value; ``InvalidRequest`` unless exactly one field is set. It begins with ``where``."""
    names = [name for name in _VALUE_FIELDS if getattr(value, name) is not None]
    if len(names) != 1:
        raise InvalidRequest(f"{where}a Value has exactly one field set, this one {', '.join(names) or 'none'}")
    field = getattr(value, names[0])
    if names[0] == "tensor":
        return _to_tensor(where, field)
    if names[0] == "tensors":
        if len(field) > wire.MOST_TENSORS:
            raise InvalidRequest(f"{where}a list of {len(field)} tensors; the limit is {wire.MOST_TENSORS}")
        return [_to_tensor(where, tensor) for tensor in field]
    return field


def _to_tensor(where: str, tensor: Any) -> torch.Tensor | np.ndarray:
    wire.check_form(where, tensor.dtype, tensor.shape)
    if tensor.dtype == wire.STRING:
        return wire.array_of_texts(where, tensor.shape, wire.split_texts(where, tensor.data))
    if tensor.dtype == wire.BFLOAT16:
        bits = wire.array_of_bytes(where, "int16", tensor.shape, tensor.data)
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(wire.array_of_bytes(where, tensor.dtype, tensor.shape, tensor.data))


def to_values(idl: Any, key: str, value: Any, most: Bound | None = None) -> dict[str, Any]:
    """A pipeline's value under ``key`` as named ``Value``s.

    ``Detections``, of ``most`` bytes, and whatever else has no field of its own (dicts, lists, ``None``, integers
    beyond 64 bits) become JSON text. So do ``(label, score)`` and lists of such pairs, best first, with ``label`` and
    ``score`` of the first beside them. Raises ``NoResult`` for what JSON lacks, too.
    """
    is_pair = wire.is_label_and_score(value)
    if is_pair or wire.is_ranking(value):
        pairs = [
            (label if isinstance(label, str) else int(label), wire.finite(key, score))
            for label, score in ([value] if is_pair else value)
        ]
        (label, score), text = pairs[0], _json(key, pairs[0] if is_pair else pairs)
        return {"label": idl.Value(text=str(label)), "score": idl.Value(number=score), key: idl.Value(text=text)}
    if isinstance(value, Detections):
        return {key: idl.Value(text=_json(key, value, most))}
    return {key: idl.Value(**_field(idl, key, value))}


def _field(idl: Any, key: str, value: Any) -> dict[str, Any]:
    if wire.is_array(value):
        return {"tensor": _from_array(idl, key, value)}
    if wire.are_arrays(value):
        return {"tensors": [_from_array(idl, key, array) for array in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value)}
    if isinstance(value, str):
        return {"text": value}
    # NOTE: NumPy counts a timedelta64 as an integer.
    if isinstance(value, (bool, np.bool_, int, np.integer)) and not isinstance(value, np.timedelta64):
        if -(2**63) <= (integer := int(value)) < 2**63:
            return {"integer": integer}
    elif isinstance(value, (float, np.floating)):
        return {"number": wire.finite(key, value)}
    return {"text": _json(key, value)}


def _json(key: str, value: Any, most: Bound | None = None) -> str:
    return answers.utf8_json(to_text(key, value, most)).decode()


def _from_array(idl: Any, key: str, value: Any) -> Any:
    if wire.is_texts(value):
        return idl.Tensor(dtype=wire.STRING, shape=list(value.shape), data=wire.joined_texts(value))
    array = wire.to_array(key, value)
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return idl.Tensor(dtype=wire.dtype_name(array.dtype), shape=list(array.shape), data=little.tobytes())


def to_label_and_score(result: Any, score: Any = None) -> tuple[str, float]:
    """A label and its score: from a pair, the first of a list of pairs, or a label and ``score``.

    For a tensor of logits, 1×C: the most probable class and its softmax probability.
    """
    if wire.is_ranking(result):
        result = result[0]
    elif not wire.is_label_and_score(result):
        if wire.is_label_and_score((result, score)):
            result = result, score
        elif isinstance(result, list) and not result:
            raise NoResult("the result is an empty list: no class reaches the required score")
        elif isinstance(result, torch.Tensor) and result.numel() and result.numel() == result.shape[-1]:
            values = result.detach().float().cpu().numpy().ravel()
            exponentials = np.exp(values - values.max())
            result = int(values.argmax()), exponentials.max() / exponentials.sum()
        else:
            raise NoResult(
                f"the result is a {type(result).__name__}, not (label, score) or logits 1xC; call infer, "
                "infer_many with inputs, or POST /infer"
            )
    return str(result[0]), wire.finite("score", result[1])
