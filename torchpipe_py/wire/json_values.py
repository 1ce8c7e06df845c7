"""Values of a request's dict as JSON, and back."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from torchpipe_py.errors import InvalidRequest, NoResult, counted, nearest, shown
from torchpipe_py.wire.answers import utf8_json
from torchpipe_py.wire.errors import Bound, RequestTooLargeError
from torchpipe_py.wire.values import (
    DTYPES,
    MOST_DIMENSIONS,
    MOST_TENSORS,
    check_names,
    is_array,
    is_label_and_score,
    plain,
    to_array,
)

if TYPE_CHECKING:
    import torch

NUMBER_BYTES = 4
"""An array's bytes become about so many times as many."""
_KINDS: Mapping[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""Of NumPy's kinds of types: what JSON may hold for each."""
_SHOWN = {
    bool: "true or false", float: "fractions", int: "numbers", list: "lists of several depths", str: "texts",
    type(None): "null",
}  # fmt: skip
MOST_CONTAINERS = 2**16
"""Lists and objects of one body: what is made of them costs more than their bytes."""
MOST_ELEMENTS = 2**12
"""In the plain lists of one request, all together. Each takes up to 100 bytes, for as long as the request lives."""


def parse_json(body: bytes, most: Bound) -> Any:
    """The value; ``InvalidRequest`` for what is none, or is larger than ``most``."""
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
    list as it is: of texts, numbers, truths and such lists. ``InvalidRequest`` for anything else, and for too much."""
    check_names("inputs", given)
    inputs: dict[str, Any] = {}
    elements = 0
    for key, value in given.items():
        if not isinstance(value, list):
            inputs[key] = from_json(key, value)
        elif value and all(isinstance(item, dict) for item in value):
            if len(value) > MOST_TENSORS:
                raise InvalidRequest(f"{key[:40]!r}: a list of {len(value)}; the limit is {MOST_TENSORS}")
            inputs[key] = [from_json(key, item) for item in value]
        else:
            elements = _elements(key, value, elements)
            inputs[key] = value
    return inputs


def _elements(key: str, value: list[Any], elements: int) -> int:
    """``elements`` and those of a plain list; ``InvalidRequest`` for too many, or a list that is too deep or none."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DIMENSIONS:
            raise InvalidRequest(f"{key[:40]!r}: a list of {depth} or more dimensions; the limit is {MOST_DIMENSIONS}")
        below: list[list[Any]] = []
        for items in level:
            elements += len(items)
            if elements > MOST_ELEMENTS:
                array = '{"dtype": "float32", "shape": […], "data": […]}'
                raise InvalidRequest(
                    f"{key[:40]!r}: lists of more than {MOST_ELEMENTS} elements; numbers may come as {array}"
                )
            for item in items:
                if isinstance(item, list):
                    below.append(item)
                elif isinstance(item, (int, float)):
                    _check_finite(key, item)
                elif not isinstance(item, str):
                    what = _SHOWN.get(type(item), "objects")
                    raise InvalidRequest(
                        f"{key[:40]!r}: a list with {what}; a list holds texts, numbers, true, false and such lists, or"
                        " else only bytes and arrays"
                    )
        level = below
    return elements


def _check_finite(key: str, value: float) -> None:
    """NOTE: Python reads ``NaN``, ``Infinity`` and ``1e400`` as JSON."""
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an integer
        is_finite = False
    if not is_finite:
        raise InvalidRequest(f"{key[:40]!r}: a number that is none, or beyond those of float64")


def from_json(key: str, value: Any) -> Any:
    """A text, a number, ``{"b64": …}`` for bytes or ``{"dtype": …, "shape": …, "data": […]}`` for an array."""
    if isinstance(value, dict):
        if set(value) == {"b64"}:
            return _from_base64(key, value["b64"])
        if "dtype" in value:
            return tensor_from(key, value["dtype"], value.get("shape"), value.get("data"))
    elif isinstance(value, str):
        return value
    elif isinstance(value, (int, float)):
        _check_finite(key, value)
        return value
    raise InvalidRequest(
        f'{key[:40]!r}: expected a text, a number, {{"b64": "…"}}, {{"dtype": "uint8", "shape": […], "data": […]}}, or'
        " a list"
    )


def tensor_from(key: str, dtype: Any, shape: Any, data: Any) -> torch.Tensor:
    """An array of NumPy's name for its type, its shape, and its numbers in C order, flat or nested."""
    import torch

    where = f"{key[:40]!r}: "
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidRequest(f"{where}dtype {str(dtype)[:40]!r}; {nearest(str(dtype)[:40], DTYPES)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise InvalidRequest(f"{where}the shape is no list of sizes")
    if len(shape) > MOST_DIMENSIONS:
        raise InvalidRequest(f"{where}an array of {len(shape)} dimensions; the limit is {MOST_DIMENSIONS}")
    array = array_from(where, dtype, data)
    return torch.from_numpy(shaped(where, array, shape))


def shaped(where: str, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The array in another shape; ``InvalidRequest`` where that has another size, or none can have it."""
    if array.size != math.prod(shape):
        raise InvalidRequest(f"{where}shape {list(shape)} does not fit {counted(array.size, 'number')}")
    try:
        return array.reshape(shape)
    except ValueError as error:  # more elements in a dimension than NumPy can count, where another one is 0
        raise InvalidRequest(f"{where}shape {list(shape)}: {error}") from None


def array_from(where: str, dtype: str, data: Any) -> np.ndarray:
    """A list of numbers, flat or nested, as an array of this type; ``InvalidRequest`` for numbers that it has not."""
    if not isinstance(data, list):
        raise InvalidRequest(f"{where}the data is no list")
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
    """What a pipeline wrote under ``key``, as members of an object for ``json_line``; ``(label, score)`` becomes two.

    Their values are JSON. Raises ``NoResult`` for what has no form in it.
    """
    if is_label_and_score(value):
        return {"label": _text("label", str(value[0])), "score": _text("score", float(value[1]))}
    return {key: _json_of(key, value)}


def _json_of(key: str, value: Any) -> str:
    if is_array(value):
        return _json_of_array(key, value)
    if isinstance(value, (list, tuple)) and any(map(is_array, value)):
        return f"[{', '.join([_json_of(key, item) for item in value])}]"
    return _text(key, value)


def _json_of_array(key: str, value: Any) -> str:
    array = to_array(value, "in JSON")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise NoResult(f"{key!r} holds numbers that JSON has not: infinite, or not a number")
    flat = array.ravel()
    # NOTE: in pieces, between which other threads get the GIL: 12 million numbers take more than a second.
    pieces = [_encode(flat[start : start + _PIECE].tolist())[1:-1] for start in range(0, flat.size, _PIECE)]
    return f'{{"dtype": "{array.dtype.name}", "shape": {list(array.shape)}, "data": [{", ".join(pieces)}]}}'


def json_line(members: Mapping[str, str]) -> bytes:
    """The object as a line of JSON; the values are JSON already."""
    return utf8_json(f"{{{', '.join([f'{_encode(key)}: {text}' for key, text in members.items()])}}}\n")


def label_line(value: tuple[Any, Any]) -> bytes:
    """``json_line`` of a label and its score, whose form is known."""
    label, score = str(value[0]), float(value[1])
    if not math.isfinite(score):
        return json_line(to_json("result", value))
    return utf8_json(f'{{"label": {_encode(label)}, "score": {score!r}}}\n')


def to_text(key: str, value: Any) -> bytes:
    """What a pipeline wrote under ``key`` as a text, JSON in UTF-8; ``NoResult`` for what has no form in it."""
    return utf8_json(_text(key, value))


def _text(key: str, value: Any) -> str:
    try:
        return _encode(value)
    except (TypeError, ValueError) as error:
        raise NoResult(f"{key!r} holds a {type(value).__name__} that has no form in JSON: {error}") from None


def _plain(value: Any) -> Any:
    """What JSON does not know itself."""
    return _base64(value) if isinstance(value, (bytes, bytearray)) else plain(value)


_encode = json.JSONEncoder(default=_plain, ensure_ascii=False, allow_nan=False).encode
_PIECE = 2**12  # numbers that are encoded without a pause


_NO_BASE64 = re.compile(r"[^A-Za-z0-9+/=]")


def _base64(value: bytes | bytearray) -> dict[str, str]:
    return {"b64": base64.b64encode(value).decode()}


def _from_base64(key: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise InvalidRequest(f"{key[:40]!r}: b64 is not base64{_why_not(text)}") from None


def _why_not(text: Any) -> str:
    if not isinstance(text, str):
        return f", but {shown(text)}"
    if text.startswith("data:"):
        return "; leave out what is before its comma, 'data:image/…;base64,'"
    other = _NO_BASE64.search(text)
    return f": it has {other[0]!r} at {other.start()}" if other else ": it is cut off, or padded wrongly"
