"""Values of a request's dict as JSON, and back."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from torchpipe_py.errors import InvalidRequest, NoResult
from torchpipe_py.wire.answers import utf8_json
from torchpipe_py.wire.errors import Bound, RequestTooLargeError
from torchpipe_py.wire.values import (
    MOST_DIMENSIONS,
    MOST_TENSORS,
    check_finite,
    check_form,
    check_names,
    is_array,
    is_label_and_score,
    plain,
    shaped,
    to_array,
)

if TYPE_CHECKING:
    import torch

NUMBER_BYTES = 4
"""An array's bytes become about so many times as many."""
_KINDS: Mapping[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""The types that JSON may hold for each of NumPy's kinds."""
_SHOWN = {
    bool: "true or false", float: "fractions", int: "numbers", list: "lists of several depths", str: "texts",
    type(None): "null",
}  # fmt: skip
MOST_CONTAINERS = 2**16
"""Lists and objects of one body: what is made of them costs more than their bytes."""
MOST_ELEMENTS = 2**12
"""Limit of the elements of one request's plain lists. Each takes up to 100 bytes, as long as the request lives."""


def parse_json(body: bytes, most: Bound) -> Any:
    """The value; ``InvalidRequest`` for malformed JSON, and for more than ``most``."""
    if len(body) > most.bytes:
        raise RequestTooLargeError(
            f"JSON of {len(body)} bytes; the limit is {most.bytes} ({most.name}): send large values as binary"
        )
    if body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:  # those within texts too: it is not parsed yet
        raise RequestTooLargeError(f"JSON of more than {MOST_CONTAINERS} lists and objects: write arrays flat")
    try:
        return json.loads(body)
    except RecursionError:
        raise InvalidRequest("JSON: nested too deeply") from None
    except ValueError as error:  # no UTF-8 as well
        raise InvalidRequest(f"JSON: {error}") from None


def inputs_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """A request's dict: of each key what ``from_json`` makes of its value, a list of such bytes and arrays, or a plain
    list as it is: of texts, numbers, booleans and such lists. ``InvalidRequest`` for anything else, and for too much.
    """
    check_names("inputs", given)
    inputs: dict[str, Any] = {}
    elements = 0
    for key, value in given.items():
        where = f"{key[:40]!r}: "
        if not isinstance(value, list):
            inputs[key] = from_json(where, value)
        elif value and all(isinstance(item, dict) for item in value):
            if len(value) > MOST_TENSORS:
                raise InvalidRequest(f"{where}a list of {len(value)}; the limit is {MOST_TENSORS}")
            inputs[key] = [from_json(where, item) for item in value]
        else:
            elements = _count(where, value, 1, elements)
            inputs[key] = value
    return inputs


def _count(where: str, items: list[Any], depth: int, elements: int) -> int:
    """Add a plain list's elements to ``elements``. Raises ``InvalidRequest`` for too many, or other types."""
    if depth > MOST_DIMENSIONS:
        raise InvalidRequest(f"{where}a list of {depth} or more dimensions; the limit is {MOST_DIMENSIONS}")
    elements += len(items)
    if elements > MOST_ELEMENTS:
        array = '{"dtype": "float32", "shape": […], "data": […]}'
        raise InvalidRequest(f"{where}lists of more than {MOST_ELEMENTS} elements; numbers may come as {array}")
    for item in items:
        if isinstance(item, list):
            elements = _count(where, item, depth + 1, elements)
        elif isinstance(item, (int, float)):
            _check_finite(where, item)
        elif not isinstance(item, str):
            holds = "a list holds texts, numbers, true, false and such lists, or else only bytes and arrays"
            raise InvalidRequest(f"{where}a list with {_SHOWN.get(type(item), 'objects')}; {holds}")
    return elements


def _check_finite(where: str, value: float) -> None:
    """NOTE: Python reads ``NaN``, ``Infinity`` and ``1e400`` as JSON."""
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an integer
        is_finite = False
    if not is_finite:
        raise InvalidRequest(f"{where}a number that is NaN or beyond float64")


def from_json(where: str, value: Any) -> Any:
    """A text, a number, ``{"b64": …}`` for bytes or ``{"dtype": …, "shape": …, "data": […]}`` for an array."""
    if isinstance(value, dict):
        if set(value) == {"b64"}:
            return _from_base64(where, value["b64"])
        if "dtype" in value:
            return _tensor_from(where, value["dtype"], value.get("shape"), value.get("data"))
    elif isinstance(value, str):
        return value
    elif isinstance(value, (int, float)):
        _check_finite(where, value)
        return value
    forms = '{"b64": "…"}, {"dtype": "uint8", "shape": […], "data": […]}'
    raise InvalidRequest(f"{where}expected a text, a number, {forms}, or a list")


def _from_base64(where: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        hint = "; leave out what is before its comma, 'data:image/…;base64,'" if str(text)[:5] == "data:" else ""
        raise InvalidRequest(f"{where}b64 is not base64: {str(error)[:80]}{hint}") from None


def _tensor_from(where: str, dtype: Any, shape: Any, data: Any) -> torch.Tensor:
    """An array of NumPy's name for its type, its shape, and its numbers in C order, flat or nested."""
    import torch

    check_form(where, dtype, shape)
    return torch.from_numpy(shaped(where, array_from(where, dtype, data), shape))


def array_from(where: str, dtype: str, data: Any) -> np.ndarray:
    """A list of numbers, flat or nested, as an array of this type; ``InvalidRequest`` for numbers beyond it."""
    if not isinstance(data, list):
        raise InvalidRequest(f"{where}the data is not a list")
    wanted = np.dtype(dtype)
    # NOTE: before NumPy sees them, which gives each of many texts as much memory as the longest takes.
    flat, kinds = _flat(data)
    if not kinds <= _KINDS[wanted.kind]:
        other = next(kind for kind in kinds if kind not in _KINDS[wanted.kind])
        raise InvalidRequest(f"{where}the data has {_SHOWN.get(other, 'objects')}, not {dtype}")
    if flat and wanted.kind in "iu":
        least, most, limits = min(flat), max(flat), np.iinfo(wanted)
        if not limits.min <= least <= most <= limits.max:
            given = f"{str(least)[:24]}..{str(most)[:24]}"
            raise InvalidRequest(f"{where}the data has {given}, {dtype} has {limits.min}..{limits.max}")
    try:
        with np.errstate(over="raise"):
            return np.array(data, wanted)
    except FloatingPointError:
        raise InvalidRequest(f"{where}the data has numbers beyond those of {dtype}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"{where}{str(error)[:200]}") from None


def _flat(data: list[Any]) -> tuple[list[Any], set[type]]:
    """The elements of nested lists, and their types; lists are among them where the nesting is not even."""
    kinds = set(map(type, data))
    while kinds == {list}:
        data = list(chain.from_iterable(data))
        kinds = set(map(type, data))
    return data, kinds


def to_json(key: str, value: Any) -> dict[str, str]:
    """A pipeline's value under ``key`` as members of an object for ``json_line``; ``(label, score)`` becomes two.

    Their values are JSON. Raises ``NoResult`` for types that JSON lacks.
    """
    if is_label_and_score(value):
        return {"label": to_text("label", str(value[0])), "score": to_text("score", float(value[1]))}
    return {key: _json_of(key, value)}


def _json_of(key: str, value: Any) -> str:
    if is_array(value):
        return _json_of_array(key, value)
    if isinstance(value, (list, tuple)) and any(map(is_array, value)):
        return f"[{', '.join([_json_of(key, item) for item in value])}]"
    return to_text(key, value)


def _json_of_array(key: str, value: Any) -> str:
    array = to_array(key, value)
    check_finite(key, array)
    flat = array.ravel()
    # NOTE: in pieces, between which other threads get the GIL: 12 million numbers take more than a second.
    pieces = [_encode(flat[start : start + _PIECE].tolist())[1:-1] for start in range(0, flat.size, _PIECE)]
    return f'{{"dtype": "{array.dtype.name}", "shape": {list(array.shape)}, "data": [{", ".join(pieces)}]}}'


def json_line(members: Mapping[str, str]) -> bytes:
    """The object as a line of JSON; the values are JSON already."""
    return utf8_json(f"{{{', '.join([f'{_encode(key)}: {text}' for key, text in members.items()])}}}\n")


def label_line(value: tuple[Any, Any]) -> bytes:
    """A label and its score as a line of JSON."""
    label = str(value[0])
    try:
        score = float(value[1])
    except OverflowError:
        raise NoResult("'score' is an integer beyond the numbers of float64") from None
    if not math.isfinite(score):
        return json_line(to_json("result", value))
    return utf8_json(f'{{"label": {_encode(label)}, "score": {score!r}}}\n')


def to_text(key: str, value: Any) -> str:
    """A pipeline's value under ``key`` as JSON. Raises ``NoResult`` for a type that JSON lacks."""
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)
    try:
        return _encode(value)
    except (TypeError, ValueError) as error:
        raise NoResult(f"{key!r} holds a {type(value).__name__} that has no form in JSON: {error}") from None


def _plain(value: Any) -> Any:
    """A form in JSON for types that it lacks."""
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, (bytes, bytearray)) else plain(value)


_encode = json.JSONEncoder(default=_plain, ensure_ascii=False, allow_nan=False).encode
_PIECE = 2**12  # numbers that are encoded without a pause
