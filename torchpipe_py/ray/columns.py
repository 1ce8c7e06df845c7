"""What a pipe writes for each row, as columns of one type: what Arrow takes, the same for every batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from torchpipe_py.backends.model.inputs import to_numpy
from torchpipe_py.errors import counted
from torchpipe_py.wire import answers
from torchpipe_py.wire.values import are_arrays, is_array, is_label_and_score, plain

Values = Sequence[Any]


class Form(Protocol):
    """What all values of a column are."""

    def value(self, given: Any) -> Any:
        """``given`` as it goes into the column; ``ValueError`` where it is something else."""

    def array(self, values: Values) -> np.ndarray:
        """The column; ``None`` stands for a row that has no result, which becomes zeros, or empty."""


@dataclass(frozen=True)
class Column:
    """A column of what the pipe writes under ``key``: the value itself, or what is at ``place`` in it."""

    name: str
    key: str
    form: Form
    place: int | None = None
    places: int = 0

    def value(self, written: Any) -> Any:
        """What goes into the column; ``ValueError`` where that is of another type than what the pipe was tried on."""
        if self.place is None:
            return self.form.value(written)
        if not isinstance(written, (list, tuple)) or len(written) != self.places:
            raise ValueError(f"expected {counted(self.places, 'value')}, got {_kind(written)}")
        return self.form.value(written[self.place])


def columns_of(key: str, written: Values, prefix: str = "") -> list[Column]:
    """The columns for what a pipe wrote under ``key``, as the values of a few requests show it.

    ``(label, score)``: a text ``label`` and a float32 ``score``. A Tensor or array, without the 1 in front that stands
    for the item: one array, or, where shapes differ, arrays of their own. Several of them: ``key_0``, ``key_1``, …
    A text, bytes, a number: the same. Anything else, boxes say: JSON text, as the service has it.
    """
    first = written[0]
    if all(map(is_label_and_score, written)):
        forms: dict[str, Form] = {"label": Texts(), "score": Numbers(np.dtype(np.float32))}
        return [Column(f"{prefix}{name}", key, form, place, 2) for place, (name, form) in enumerate(forms.items())]
    if all(are_arrays(each) and len(each) == len(first) for each in written):
        return [
            Column(f"{prefix}{key}_{place}", key, _form([each[place] for each in written]), place, len(first))
            for place in range(len(first))
        ]
    return [Column(f"{prefix}{key}", key, _form(written))]


def _form(values: Values) -> Form:
    if all(map(is_array, values)):
        arrays = [_array_of(value) for value in values]
        shapes = {array.shape for array in arrays}
        return Arrays(arrays[0].dtype, arrays[0].shape) if len(shapes) == 1 else Ragged(arrays[0].dtype, arrays[0].ndim)
    if all(isinstance(value, str) for value in values):
        return Texts()
    if all(isinstance(value, (bytes, bytearray)) for value in values):
        return Bytes()
    if all(isinstance(value, (bool, int, float, np.generic)) for value in values):
        return Numbers(np.result_type(*(np.asarray(value) for value in values)))
    return Json()


@dataclass(frozen=True)
class Arrays:
    """Arrays of one shape: an array N×…"""

    dtype: np.dtype
    shape: tuple[int, ...]

    def value(self, given: Any) -> np.ndarray:
        array = _array_of(given) if is_array(given) else None
        if array is None or (array.dtype, array.shape) != (self.dtype, self.shape):
            raise ValueError(f"expected {_array_text(self.dtype, self.shape)}, got {_kind(given)}")
        return array

    def array(self, values: Values) -> np.ndarray:
        column = np.empty((len(values), *self.shape), self.dtype)
        for row, value in enumerate(values):
            column[row] = 0 if value is None else value
        return column


@dataclass(frozen=True)
class Ragged:
    """Arrays of different shapes: an object array of them. Where there is no result, one of no element."""

    dtype: np.dtype
    ndim: int

    def value(self, given: Any) -> np.ndarray:
        array = _array_of(given) if is_array(given) else None
        if array is None or (array.dtype, array.ndim) != (self.dtype, self.ndim):
            raise ValueError(f"expected {self.dtype} of {counted(self.ndim, 'dimension')}, got {_kind(given)}")
        return array

    def array(self, values: Values) -> np.ndarray:
        blank = np.zeros((0,) * self.ndim, self.dtype)
        return _objects([blank if value is None else value for value in values])


class Texts:
    """Texts."""

    def value(self, given: Any) -> str:
        if not isinstance(given, (str, int, np.integer)):  # a class without a label is its index
            raise ValueError(f"expected a text, got {_kind(given)}")
        return answers.utf8_text(str(given)).decode()  # NOTE: Arrow refuses a column with half of a surrogate pair

    def array(self, values: Values) -> np.ndarray:
        return np.array([value or "" for value in values], np.str_)


class Json(Texts):
    """JSON texts."""

    def value(self, given: Any) -> str:
        try:
            return json.dumps(given, default=plain, allow_nan=False)
        except TypeError as error:
            raise ValueError(f"a {type(given).__name__} has no form as JSON: {error}") from None


class Bytes:
    """Bytes."""

    def value(self, given: Any) -> bytes:
        if not isinstance(given, (bytes, bytearray)):
            raise ValueError(f"expected bytes, got {_kind(given)}")
        return bytes(given)

    def array(self, values: Values) -> np.ndarray:
        # NOTE: of no bytes Arrow makes no column of bytes, but for this type; which cuts off zeros at an end.
        return _objects([value or b"" for value in values]) if values else np.array([], np.bytes_)


@dataclass(frozen=True)
class Numbers:
    """Numbers of one type, or truth values."""

    dtype: np.dtype

    def value(self, given: Any) -> Any:
        if not isinstance(given, (bool, int, float, np.generic)):
            raise ValueError(f"expected {self.dtype}, got {_kind(given)}")
        if self.dtype.kind != "f" and np.asarray(given).dtype.kind != self.dtype.kind:
            raise ValueError(f"expected {self.dtype}, got {given!r}")
        return given

    def array(self, values: Values) -> np.ndarray:
        return np.array([0 if value is None else value for value in values], self.dtype)


def _array_of(value: Any) -> np.ndarray:
    """A Tensor on the host without the 1 in front; an array as it is."""
    if isinstance(value, np.ndarray):
        return value
    array = to_numpy(value)
    return array[0] if array.ndim > 1 and array.shape[0] == 1 else array


def _objects(values: Values) -> np.ndarray:
    """An object array, also where the values are arrays of one shape."""
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def _kind(value: Any) -> str:
    if is_array(value):
        array = _array_of(value)
        return _array_text(array.dtype, array.shape)
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _array_text(dtype: np.dtype, shape: tuple[int, ...]) -> str:
    return f"{dtype} {'x'.join(map(str, shape)) or 'of no dimension'}"
