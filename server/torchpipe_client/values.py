"""Converts Python values to the contract's ``Value`` and back."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchpipe_client.contract import IDL
from torchpipe_client.detections import detections_of
from torchpipe_client.errors import BadReply, InvalidRequest

if TYPE_CHECKING:
    import numpy as np

_DTYPES = frozenset(
    {
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    }
)
_BFLOAT16, _STRING = "bfloat16", "string"
_LENGTH = struct.Struct("<I")  # before each text of an array
_MOST_DIMENSIONS = 32
_MOST_DIMENSIONS_BACK = 64  # of NumPy 2 and PyTorch
_MOST_JSON_VALUES = 2**22
"""Values in a text of JSON. Empty lists take some 30 times the memory of their text."""
_FIELDS = ("tensor", "bytes", "text", "number", "integer", "tensors")


class Result(NamedTuple):
    """A classifier's answer for an image."""

    label: str
    score: float


def to_bytes(name: str, data: Any) -> bytes:
    """``data`` as ``bytes``. Raises ``InvalidRequest`` for other types."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(data)
    hint = "; read a file with Path(...).read_bytes()" if isinstance(data, (str, os.PathLike)) else ""
    raise InvalidRequest(f"{name}: expected bytes, got a {type(data).__name__}{hint}")


def to_value(name: str, value: Any) -> Any:
    """Bytes, text, numbers, NumPy arrays and lists of arrays as a ``Value``; (nested) lists of numbers become arrays.

    Raises ``InvalidRequest`` for anything else.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return IDL.Value(bytes=bytes(value))
    if isinstance(value, str):
        return IDL.Value(text=value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise InvalidRequest(f"{name}: an integer of more than 64 bits")
        return IDL.Value(integer=int(value))
    if isinstance(value, float):
        return IDL.Value(number=float(value))
    if hasattr(value, "__array__"):
        return IDL.Value(tensor=_to_tensor(name, value))
    if isinstance(value, (list, tuple)):
        if _begins_with_a_number(value):
            return IDL.Value(tensor=_to_tensor(name, _array_of(name, value)))
        other = next((index for index, item in enumerate(value) if not hasattr(item, "__array__")), None)
        if other is None:
            return IDL.Value(tensors=[_to_tensor(name, item) for item in value])
        kind = type(value[other]).__name__
        hint = "; send several files with infer_many" if kind in ("bytes", "bytearray", "memoryview") else ""
        raise InvalidRequest(f"{name}[{other}]: a list cannot contain a {kind}, only arrays or numbers{hint}")
    kinds = "bytes, text, numbers, arrays and lists of arrays or numbers"
    raise InvalidRequest(f"{name}: a {type(value).__name__} cannot be sent; supported: {kinds}")


def from_response(response: Any, uuid: str, keys: Iterable[str]) -> dict[str, Any]:
    """The outputs of an ``InferResponse``.

    Raises ``BadReply`` if it is of another ``uuid``, lacks one of ``keys``, or has a malformed value.
    """
    if response.uuid != uuid:
        raise BadReply(f"an answer to the request {response.uuid[:40]!r} in place of {uuid[:40]!r}")
    outputs, are_json = response.outputs, frozenset(response.json or ())
    for key in keys:
        if key not in outputs:
            raise BadReply(f"an answer without {key!r}")
    values = {
        key: _from_json(key, value) if key in are_json else from_value(key, value) for key, value in outputs.items()
    }
    for key in are_json.intersection(response.detections or ()):
        values[key] = detections_of(key, values[key])
    return values


def _from_json(name: str, value: Any) -> Any:
    """Dicts and lists, from JSON."""
    text = value.text
    if text is None:
        raise BadReply(f"{name}: JSON that is not text")
    if sum(map(text.count, ",[{")) > _MOST_JSON_VALUES:
        raise BadReply(f"{name}: JSON of more than {_MOST_JSON_VALUES} values; have the pipeline return an array")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"{name}: not valid JSON: {error}") from error


def from_value(name: str, value: Any) -> Any:
    """A value of the answer. Raises ``BadReply`` if it is empty or has a malformed array."""
    fields = [field for field in _FIELDS if getattr(value, field) is not None]
    if len(fields) != 1:
        raise BadReply(f"{name}: a value with {len(fields)} fields instead of one")
    held = getattr(value, fields[0])
    if fields[0] == "tensor":
        return _to_array(name, held)
    if fields[0] == "tensors":
        return [_to_array(name, tensor) for tensor in held]
    return held


def _begins_with_a_number(items: Any) -> bool:
    """Whether the first element of a list, possibly nested, is a number of Python or NumPy."""
    for _ in range(_MOST_DIMENSIONS):
        if not isinstance(items, (list, tuple)) or not items:
            break
        items = items[0]
    if hasattr(items, "__array__"):
        import numpy as np

        return isinstance(items, np.generic)
    return isinstance(items, (int, float))


def _array_of(name: str, items: Any) -> np.ndarray[Any, Any]:
    """A list of numbers as an array of bool, int64 or float64, or of the type of NumPy's numbers."""
    np, array = _numpy(name), _as_array(name, items)
    if array.dtype.name not in _DTYPES:
        raise InvalidRequest(f"{name}: a list of numbers with an element that is not a number of at most 64 bits")
    if array.dtype.kind == "f":  # NOTE: NumPy makes float64 of integers beyond int64.
        leaves = np.asarray(items, object).ravel()
        if not any(isinstance(leaf, (float, np.floating)) for leaf in leaves):
            raise InvalidRequest(f"{name}: an integer of more than 64 bits")
    return array


def _numpy(name: str) -> ModuleType:
    """NumPy; without it, an ``ImportError`` that names the array."""
    try:
        import numpy
    except ImportError as error:
        raise ImportError(f"{name} is an array, which needs numpy (pip install numpy)") from error
    return numpy


def _as_array(name: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = _numpy(name).asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # such as for a tensor on a GPU
        raise InvalidRequest(f"{name}: NumPy cannot make an array of this {type(value).__name__}: {error}") from error
    return array


def _to_tensor(name: str, value: Any) -> Any:
    array = _as_array(name, value)
    if array.dtype.kind in "OSU":
        return IDL.Tensor(dtype=_STRING, shape=list(array.shape), data=_joined(name, array.ravel().tolist()))
    if array.dtype.name == _BFLOAT16:  # of the package ml_dtypes
        return IDL.Tensor(dtype=_BFLOAT16, shape=list(array.shape), data=array.tobytes())
    if array.dtype.name not in _DTYPES:
        raise InvalidRequest(f"{name}: an array of {array.dtype}; supported: {', '.join(sorted(_DTYPES))}")
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return IDL.Tensor(dtype=array.dtype.name, shape=list(array.shape), data=little.tobytes())


def _joined(name: str, elements: list[Any]) -> bytes:
    """Texts, each after its length."""
    if not all(isinstance(element, (str, bytes)) for element in elements):
        raise InvalidRequest(f"{name}: an array of objects other than texts and bytes")
    try:
        encoded = [element.encode() if isinstance(element, str) else element for element in elements]
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name}: a text with half of a surrogate pair") from None
    return b"".join([part for element in encoded for part in (_LENGTH.pack(len(element)), element)])


def _to_texts(name: str, data: bytes, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of texts, or of bytes where they are not UTF-8."""
    np = _numpy(name)
    elements: list[str | bytes] = []
    start = 0
    while start < len(data):
        end = start + _LENGTH.size
        if end <= len(data):
            start, end = end, end + _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            raise BadReply(f"{name}: a text that ends after its {len(data)} bytes")
        try:
            elements.append(data[start:end].decode())
        except UnicodeDecodeError:
            elements.append(data[start:end])
        start = end
    if min(shape, default=0) < 0 or math.prod(shape) != len(elements):
        raise BadReply(f"{name}: {len(elements)} texts do not fit an array of shape {shape}")
    array = np.empty(len(elements), object)
    array[:] = elements
    try:
        return array.reshape(shape)  # type: ignore[no-any-return]
    except ValueError as error:
        raise BadReply(f"{name}: NumPy has no array of shape {shape}: {error}") from error


def _to_array(name: str, tensor: Any) -> np.ndarray[Any, Any]:
    """A writable array."""
    np = _numpy(name)
    shape = tuple(tensor.shape)
    if len(shape) > _MOST_DIMENSIONS_BACK:
        raise BadReply(f"{name}: an array of {len(shape)} dimensions; the limit is {_MOST_DIMENSIONS_BACK}")
    if tensor.dtype == _STRING:
        return _to_texts(name, tensor.data, shape)
    if tensor.dtype not in _DTYPES or min(shape, default=0) < 0:
        raise BadReply(f"{name}: an array of dtype {tensor.dtype[:40]!r} and shape {shape}")
    dtype = np.dtype(tensor.dtype)
    if math.prod(shape) * dtype.itemsize != len(tensor.data):
        raise BadReply(f"{name}: {len(tensor.data)} bytes do not fit an array of {dtype} and shape {shape}")
    if dtype.kind == "b" and np.frombuffer(tensor.data, np.uint8).max(initial=0) > 1:
        raise BadReply(f"{name}: an array of bool with a byte that is neither 0 nor 1")
    try:
        array = np.frombuffer(tensor.data, dtype.newbyteorder("<")).reshape(shape)
    except ValueError as error:  # such as [2**62, 0], or more dimensions than an old NumPy has
        raise BadReply(f"{name}: NumPy has no array of shape {shape}: {error}") from error
    return array.astype(dtype)  # type: ignore[no-any-return]
