"""A pipe's outputs as columns of types that Arrow takes, the same for every batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.backends.model.inputs import to_numpy
from torchpipe_py.errors import counted
from torchpipe_py.results import Detections
from torchpipe_py.wire import answers
from torchpipe_py.wire.detections import FIELDS, fields_of, tensor_of, tensors_of
from torchpipe_py.wire.json_values import json_plain
from torchpipe_py.wire.values import are_arrays, is_array, is_label_and_score

Read = Callable[[Any], Any]
"""Converts a pipe's output to a column's value; ``ValueError`` if it is of another type."""


@dataclass(frozen=True)
class Column:
    """A column for the pipe's output ``key``: the value itself, or element ``place`` of its ``places`` elements.

    ``read`` gives a row's value, of ``dtype`` and ``shape``; ``blank`` is the value of a row without a result.
    """

    name: str
    key: str
    read: Read
    dtype: Any
    shape: tuple[int, ...] = ()
    blank: Any = 0
    place: int | None = None
    places: int = 0

    def value(self, written: Any) -> Any:
        """The column's value; ``ValueError`` if its type differs from the trial's."""
        if self.place is None:
            return self.read(written)
        if not isinstance(written, (list, tuple)) or len(written) != self.places:
            raise ValueError(f"expected {counted(self.places, 'value')}, got {_kind(written)}")
        return self.read(written[self.place])

    def array(self, values: Sequence[Any]) -> np.ndarray:
        """The column; ``None`` marks a row without a result."""
        filled = [self.blank if value is None else value for value in values]
        if self.dtype is str:
            return np.array(filled, np.str_)
        if self.dtype is bytes and not filled:
            # NOTE: Arrow needs this type for a bytes column without rows; otherwise it would cut off final zeros.
            return np.array([], np.bytes_)
        column = np.empty((len(filled), *self.shape), object if self.dtype is bytes else self.dtype)
        for row, value in enumerate(filled):
            column[row] = value
        return column


def columns_of(key: str, written: Sequence[Any], prefix: str = "") -> list[Column]:
    """The columns for a pipe's output ``key``, derived from the values of a few requests.

    ``(label, score)``: a text ``label`` and a float32 ``score``. A Tensor or array, without the leading 1 that stands
    for the item: one array, or, if shapes differ, an object array of arrays; one without a result has no elements.
    Several of them: ``key_0``, ``key_1``, … A text, bytes, a number, a boolean: the same. ``Detections``: object arrays
    of ``boxes``, ``scores`` and ``classes`` (arrays), of ``keypoints`` (arrays), ``labels`` and ``masks`` (lists of
    texts or files) if the results have them. Anything else: JSON text, as the service has it. Rows without a result
    are zeros, or empty.
    """
    first = written[0]
    if all(map(is_label_and_score, written)):
        label = Column(f"{prefix}label", key, _text, str, blank="", place=0, places=2)
        return [label, Column(f"{prefix}score", key, _number_of(np.dtype(np.float32)), np.float32, place=1, places=2)]
    if all(isinstance(each, Detections) for each in written):
        return [
            Column(f"{prefix}{name}", key, _field_of(name, tensor), object, (), _field(tensor[:0]))
            for name, tensor in tensors_of(key, written, [name for name in FIELDS if name != "offsets"]).items()
        ]
    if all(are_arrays(each) and len(each) == len(first) for each in written):
        return [
            Column(f"{prefix}{key}_{place}", key, *_form([each[place] for each in written]), place, len(first))
            for place in range(len(first))
        ]
    return [Column(f"{prefix}{key}", key, *_form(written))]


def _form(values: Sequence[Any]) -> tuple[Read, Any, tuple[int, ...], Any]:
    """``read``, ``dtype``, ``shape`` and ``blank`` of the column for such values."""
    if all(map(is_array, values)):
        arrays = [_array_of(value) for value in values]
        dtype, shape, ndim = arrays[0].dtype, arrays[0].shape, arrays[0].ndim
        if all(array.shape == shape for array in arrays):
            return _array_like(dtype, shape), dtype, shape, 0
        return _array_like(dtype, ndim), object, (), np.zeros((0,) * ndim, dtype)
    if all(isinstance(value, str) for value in values):
        return _text, str, (), ""
    if all(isinstance(value, (bytes, bytearray)) for value in values):
        return _bytes, bytes, (), b""
    if all(isinstance(value, (bool, int, float, np.generic)) for value in values):
        dtype = np.result_type(*(np.asarray(value) for value in values))
        return _number_of(dtype), dtype, (), 0
    return _json, str, (), ""


def _field(tensor: np.ndarray) -> Any:
    """Numbers as an array, texts as a list."""
    return tensor.tolist() if tensor.dtype == object else tensor


def _field_of(name: str, tried: np.ndarray) -> Read:
    """Reads this one of the arrays of ``tensors_of``; ``tried`` is that of the trial."""

    def read(given: Any) -> Any:
        if not isinstance(given, Detections):
            raise ValueError(f"expected Detections, got {_kind(given)}")
        if name in fields_of([given]):
            return _field(tensor_of("result", [given], name))
        if len(given):
            raise ValueError(f"expected detections with {name}, got some without")
        return _field(tried[:0])

    return read


def _array_like(dtype: np.dtype, form: tuple[int, ...] | int) -> Read:
    """Reads arrays of a shape, or of so many dimensions."""

    def read(given: Any) -> np.ndarray:
        array = _array_of(given) if is_array(given) else None
        if array is None or array.dtype != dtype or form not in (array.shape, array.ndim):
            expected = f"{dtype} of {counted(form, 'dimension')}" if isinstance(form, int) else _shown(dtype, form)
            raise ValueError(f"expected {expected}, got {_kind(given)}")
        return array

    return read


def _number_of(dtype: np.dtype) -> Read:
    def read(given: Any) -> Any:
        if not isinstance(given, (bool, int, float, np.generic)):
            raise ValueError(f"expected {dtype}, got {_kind(given)}")
        if dtype.kind != "f" and np.asarray(given).dtype.kind != dtype.kind:
            raise ValueError(f"expected {dtype}, got {given!r}")
        return given

    return read


def _text(given: Any) -> str:
    if not isinstance(given, (str, int, np.integer)):  # a class without a label is its index
        raise ValueError(f"expected a text, got {_kind(given)}")
    return answers.utf8_text(str(given)).decode()  # NOTE: Arrow refuses a column with half of a surrogate pair


def _json(given: Any) -> str:
    try:
        return json.dumps(given, default=json_plain, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"a {type(given).__name__} has no form as JSON: {error}") from None


def _bytes(given: Any) -> bytes:
    if not isinstance(given, (bytes, bytearray)):
        raise ValueError(f"expected bytes, got {_kind(given)}")
    return bytes(given)


def _array_of(value: Any) -> np.ndarray:
    """A Tensor on the host without the 1 in front; an array as it is."""
    if isinstance(value, np.ndarray):
        return value
    array = to_numpy(value)
    return array[0] if array.ndim > 1 and array.shape[0] == 1 else array


def _kind(value: Any) -> str:
    if is_array(value):
        array = _array_of(value)
        return _shown(array.dtype, array.shape)
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple)) else "")


def _shown(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype} {'x'.join(map(str, shape)) or 'of no dimension'}"
