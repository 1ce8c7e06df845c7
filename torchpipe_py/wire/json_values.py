"""Values of a request's dict as JSON, and back."""

from __future__ import annotations

import base64
import codecs
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any

import numpy as np

from torchpipe_py.errors import InvalidRequest, NoResult
from torchpipe_py.results import Detections
from torchpipe_py.wire import detections
from torchpipe_py.wire.answers import fast_encoder, utf8_json
from torchpipe_py.wire.errors import Bound, ReplyTooLargeError, RequestTooLargeError
from torchpipe_py.wire.http import SMALL_BYTES
from torchpipe_py.wire.json_reader import Numbers, Turns, read_json
from torchpipe_py.wire.parameters import MOST_PARAMETER_DEPTH, MOST_PARAMETER_VALUES, too_deep
from torchpipe_py.wire.values import (
    BFLOAT16,
    MOST_DIMENSIONS,
    MOST_TENSORS,
    MOST_TEXTS,
    STRING,
    array_of_texts,
    check_finite,
    check_form,
    check_names,
    dtype_name,
    is_array,
    is_label_and_score,
    is_texts,
    plain,
    shaped,
    to_array,
    to_float,
)

if TYPE_CHECKING:
    import torch

NUMBER_BYTES = 2
"""The fewest bytes of a number in a list of JSON: a digit and a comma."""
_BODY_PIECE = 2**16  # bytes of a body that are decoded without a pause
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a character of UTF-8 after its first
_BASE64_PIECE = 2**16  # characters that are decoded without a pause; four of them are three bytes
_PART = 2**13  # elements of nested lists that become an array without a pause
_DATA_URI = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
_JSON_STARTS = frozenset("0123456789[tf")  # first characters of numbers, lists and booleans
_KINDS: Mapping[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""The types of each of NumPy's kinds as Python reads them. Other JSON of the same values becomes these first."""
_SHOWN = {
    bool: "true or false", float: "fractions", int: "numbers", list: "lists of several depths", str: "texts",
    type(None): "null",
}  # fmt: skip
MOST_CONTAINERS = 2**16
"""Lists and objects of one body: what is made of them costs more than their bytes."""
MOST_ELEMENTS = 2**12
"""Limit of the elements of one request's plain lists. Each takes up to 100 bytes, as long as the request lives."""


def parse_json(body: bytes) -> Any:
    """The value; in a large one, long lists of numbers are ``Numbers``. ``InvalidRequest`` for malformed JSON."""
    if body.count(b"[") + body.count(b"{") > MOST_CONTAINERS:  # those within texts too: it is not parsed yet
        raise RequestTooLargeError(f"JSON of more than {MOST_CONTAINERS} lists and objects: write arrays flat")
    try:
        if len(body) <= SMALL_BYTES:
            return json.loads(body)
        body = _in_utf8(body)
        return read_json(body)
    except RecursionError:
        raise InvalidRequest("JSON: nested too deeply") from None
    except InvalidRequest:
        raise
    except ValueError as error:  # no UTF-8 as well
        if body.startswith(b"\x1f\x8b"):
            raise InvalidRequest("JSON: the body is gzip, which needs the header Content-Encoding: gzip") from None
        if isinstance(error, JSONDecodeError):
            pos = error.pos if len(body) <= SMALL_BYTES else _characters(body, error.pos)
            raise InvalidRequest(f"JSON: {error.msg} (char {pos})") from None
        raise InvalidRequest(f"JSON: {error}") from None


def _in_utf8(body: bytes) -> bytes:
    """A body of JSON in UTF-8, without a mark of byte order. Raises ``ValueError`` for one that is not text.

    In pieces, between which other threads get the GIL.
    """
    coding = json.detect_encoding(body)
    if coding == "utf-8":
        return body
    if coding == "utf-8-sig":
        return body[len(codecs.BOM_UTF8) :]
    pieces, turns = [], Turns()
    decoder = codecs.getincrementaldecoder(coding)("surrogatepass")
    for start in range(0, len(body), _BODY_PIECE):
        text = decoder.decode(body[start : start + _BODY_PIECE], start + _BODY_PIECE >= len(body))
        pieces.append(text.encode("utf-8", "surrogatepass"))
        turns.pause()
    return b"".join(pieces)


def _characters(body: bytes, end: int) -> int:
    """The number of characters in the first bytes of UTF-8."""
    starts = range(0, end, _BODY_PIECE)
    return sum(len(body[start : min(start + _BODY_PIECE, end)].translate(None, _CONTINUATION)) for start in starts)


def with_lists(parameters: Any, depth: int = 0) -> Any:
    """The parameters of a large body as those of a small one: their ``Numbers`` are lists, but for too many of them.

    ``InvalidRequest`` for malformed JSON in one, and for more than ``MOST_PARAMETER_DEPTH`` levels.
    """
    if depth > MOST_PARAMETER_DEPTH:
        raise too_deep()
    if isinstance(parameters, dict):
        return {name: with_lists(value, depth + 1) for name, value in parameters.items()}
    if isinstance(parameters, list):
        return [with_lists(value, depth + 1) for value in parameters]
    if not isinstance(parameters, Numbers) or parameters.most > MOST_PARAMETER_VALUES:
        return parameters
    try:
        return parameters.to_list()
    except JSONDecodeError as error:
        raise InvalidRequest(f"JSON: {error.msg} (char {error.pos})") from None


class InputReader:
    """Reads the inputs of one call, and counts the elements of its plain lists and the characters of its texts.

    ``text`` bounds the texts: in memory a character may take four times its bytes.
    """

    def __init__(self, text: Bound) -> None:
        self._text, self._elements, self._characters = text, 0, 0

    def read(self, given: Mapping[str, Any], images: Collection[str] = ()) -> dict[str, Any]:
        """A request's dict: of each key what ``from_json`` makes of its value, a list of such bytes and arrays, or a
        plain list as it is: of texts, numbers, booleans and such lists. A text for one of ``images`` is base64.

        ``InvalidRequest`` for anything else, ``RequestTooLargeError`` for too much text.
        """
        check_names("inputs", given)
        inputs: dict[str, Any] = {}
        for key, value in given.items():
            where = f"{key[:40]!r}: "
            if isinstance(value, str) and key in images:
                inputs[key] = from_base64(where, value, "the text of an image is neither base64 nor a data URI")
            elif not isinstance(value, (list, Numbers)):
                inputs[key] = from_json(where, value)
                if isinstance(value, str):
                    self._add_text(where, value)
            elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                if len(value) > MOST_TENSORS:
                    raise InvalidRequest(f"{where}a list of {len(value)}; the limit is {MOST_TENSORS}")
                inputs[key] = [from_json(where, item) for item in value]
            else:
                inputs[key] = self._plain_list(where, value)
        return inputs

    def _add_text(self, where: str, text: str) -> None:
        """Raises ``RequestTooLargeError`` for too much text."""
        self._characters += len(text)
        if self._characters > self._text.bytes:
            raise RequestTooLargeError(
                f"{where}text of {self._characters} characters or more; the limit is {self._text.bytes} "
                f'({self._text.name}): send it as {{"b64": "…"}}'
            )

    def _plain_list(self, where: str, items: list[Any] | Numbers, depth: int = 1) -> list[Any]:
        """The list; raises ``InvalidRequest`` for too many elements, or other types."""
        if depth > MOST_DIMENSIONS:
            raise InvalidRequest(f"{where}a list of {depth} or more dimensions; the limit is {MOST_DIMENSIONS}")
        self._elements += items.most if isinstance(items, Numbers) else len(items)
        if self._elements > MOST_ELEMENTS:
            array = '{"dtype": "float32", "shape": […], "data": […]}'
            raise InvalidRequest(f"{where}lists of more than {MOST_ELEMENTS} elements; numbers may come as {array}")
        plain = list(chain.from_iterable(_pieces(where, items)))
        for index, item in enumerate(plain):
            if isinstance(item, (list, Numbers)):
                plain[index] = self._plain_list(where, item, depth + 1)
            elif isinstance(item, (int, float)):
                _check_finite(where, item)
            elif isinstance(item, str):
                self._add_text(where, item)
            else:
                holds = "a list holds texts, numbers, true, false and such lists, or else only bytes and arrays"
                raise InvalidRequest(f"{where}a list with {_SHOWN.get(type(item), 'objects')}; {holds}")
        return plain


def _pieces(where: str, items: list[Any] | Numbers) -> Iterator[list[Any]]:
    """The elements of a list, a part at a time."""
    if isinstance(items, list):
        yield items
        return
    try:
        yield from items.pieces()
    except JSONDecodeError as error:
        raise InvalidRequest(f"{where}JSON: {error.msg} (char {error.pos})") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise InvalidRequest(f"{where}JSON: {error}") from None


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
            return from_base64(where, value["b64"])
        if "dtype" in value:
            return _tensor_from(where, value["dtype"], value.get("shape"), value.get("data"))
    elif isinstance(value, str):
        return value
    elif isinstance(value, (int, float)):
        _check_finite(where, value)
        return value
    forms = '{"b64": "…"}, {"dtype": "uint8", "shape": […], "data": […]}'
    raise InvalidRequest(f"{where}expected a text, a number, {forms}, or a list")


def from_text(where: str, text: str) -> Any:
    """A number, a boolean or a list of JSON; any other text as it is."""
    if text.lstrip(" \t\r\n-")[:1] not in _JSON_STARTS:
        return text
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidRequest(f"{where} is nested too deeply") from None
    except ValueError:
        return text


def from_base64(where: str, text: Any, problem: str = "b64 is not base64") -> bytes:
    """The bytes of a text that is base64, perhaps in lines, or a data URI. ``InvalidRequest`` with the ``problem``."""
    if isinstance(text, str):
        if (uri := _DATA_URI.match(text)) is not None:
            if not uri[1].lower().endswith(";base64"):
                raise InvalidRequest(f"{where}a data URI that is not base64: 'data:{uri[1][:40]}'")
            text = text[uri.end() :]
        if "\n" in text:
            pieces = (text[start : start + _BASE64_PIECE] for start in range(0, len(text), _BASE64_PIECE))
            text = "".join([piece.replace("\r", "").replace("\n", "") for piece in pieces])
    try:
        if len(text) <= _BASE64_PIECE:
            return base64.b64decode(text, validate=True)
        return b"".join(_base64_pieces(text))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{where}{problem}: {str(error)[:80]}") from None


def _base64_pieces(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), _BASE64_PIECE):
        piece = text[start : start + _BASE64_PIECE]
        if "=" in piece and start + _BASE64_PIECE < len(text):
            raise ValueError("padding before its end")
        yield base64.b64decode(piece, validate=True)


def _tensor_from(where: str, dtype: Any, shape: Any, data: Any) -> torch.Tensor | np.ndarray:
    """An array of NumPy's name for its type, its shape, and its numbers or texts in C order, flat or nested."""
    import torch

    check_form(where, dtype, shape)
    if dtype == STRING:
        return _texts_from(where, shape, data)
    if dtype == BFLOAT16:
        return torch.from_numpy(shaped(where, array_from(where, "float32", data), shape)).bfloat16()
    return torch.from_numpy(shaped(where, array_from(where, dtype, data), shape))


def _texts_from(where: str, shape: Any, data: Any) -> np.ndarray:
    rows = _rows(where, data) if isinstance(data, list) else []
    flat = [each for row in rows if isinstance(row, list) for each in row]
    if not all(isinstance(row, list) for row in (data, *rows)) or not set(map(type, flat)) <= {str, dict}:
        raise InvalidRequest(f'{where}the data of {STRING} is a list of texts, or of {{"b64": "…"}} for bytes')
    if len(flat) > MOST_TEXTS:
        raise InvalidRequest(f"{where}{len(flat)} texts; the limit is {MOST_TEXTS}")
    elements: list[Any] = [from_json(where, each) if isinstance(each, dict) else each for each in flat]
    if not all(isinstance(each, (str, bytes)) for each in elements):
        raise InvalidRequest(f"{where}the data of {STRING} is a list of texts")
    return array_of_texts(where, shape, elements)


def array_from(where: str, dtype: str, data: Any) -> np.ndarray:
    """A list of numbers, flat or nested, as a flat array of this type; ``InvalidRequest`` for numbers beyond it."""
    if not isinstance(data, (list, Numbers)):
        raise InvalidRequest(f"{where}the data is not a list")
    wanted = np.dtype(dtype)
    rows = _rows(where, data)
    if all(isinstance(row, list) for row in rows) and sum(map(len, rows)) <= _PART:
        sizes = set(map(len, rows))
        array = _part(where, wanted, list(chain.from_iterable(rows)) if len(rows) > 1 else rows[0])
    else:
        sizes, parts, turns = set(), [], Turns()
        elements = chain.from_iterable(_sized_pieces(where, rows, sizes))
        while numbers := list(islice(elements, _PART)):
            parts.append(_part(where, wanted, numbers))
            turns.pause()
        array = np.concatenate(parts or [np.empty(0, wanted)])
    if len(sizes) > 1:
        raise InvalidRequest(f"{where}the data has lists of several lengths")
    return array


def _sized_pieces(where: str, rows: list[Any], sizes: set[int]) -> Iterator[list[Any]]:
    """The elements of the rows, a part at a time. The number of each row's goes to ``sizes``."""
    for row in rows:
        size = 0
        for piece in _pieces(where, row):
            size += len(piece)
            yield piece
        sizes.add(size)


def _rows(where: str, data: list[Any] | Numbers) -> list[Any]:
    """The innermost lists of nested ones."""
    rows: list[Any] = [data]
    while any(isinstance(row, list) and row and isinstance(row[0], (list, Numbers)) for row in rows):
        if not all(isinstance(row, list) and all(isinstance(item, (list, Numbers)) for item in row) for row in rows):
            raise InvalidRequest(f"{where}the data has lists of several depths")
        if len(set(map(len, rows))) > 1:
            raise InvalidRequest(f"{where}the data has lists of several lengths")
        rows = list(chain.from_iterable(rows))
    return rows


def _part(where: str, wanted: np.dtype, numbers: list[Any]) -> np.ndarray:
    # NOTE: before NumPy sees them, which gives each of many texts as much memory as the longest takes.
    kinds = set(map(type, numbers))
    if wanted.kind in "iu" and float in kinds <= {int, float}:  # 1.0, of clients with one type of numbers
        if not all(number.is_integer() for number in numbers if type(number) is float):
            raise InvalidRequest(f"{where}the data has fractions, not {wanted}")
        numbers, kinds = list(map(int, numbers)), {int}
    elif wanted.kind == "b" and not kinds <= {bool} and kinds <= {bool, int, float}:
        if not set(numbers) <= {0, 1}:
            raise InvalidRequest(f"{where}the data has numbers other than 0 and 1, not {wanted}")
        numbers, kinds = list(map(bool, numbers)), {bool}
    if not kinds <= _KINDS[wanted.kind]:
        other = next(kind for kind in kinds if kind not in _KINDS[wanted.kind])
        raise InvalidRequest(f"{where}the data has {_SHOWN.get(other, 'objects')}, not {wanted}")
    if numbers and wanted.kind in "iu":
        check_range(where, wanted, min(numbers), max(numbers))
    try:
        with np.errstate(over="raise"):
            array = np.array(numbers, wanted)
    except FloatingPointError:
        raise InvalidRequest(f"{where}the data has numbers beyond those of {wanted}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"{where}{str(error)[:200]}") from None
    if wanted.kind == "f" and not np.isfinite(array).all():  # of NaN and Infinity, which Python reads, and 1e400
        raise InvalidRequest(f"{where}the data has NaN or infinity, which JSON cannot represent: send it as binary")
    return array


def check_range(where: str, wanted: np.dtype, least: int, most: int) -> None:
    """``InvalidRequest`` if integers from ``least`` to ``most`` are beyond those of a type."""
    limits = np.iinfo(wanted)
    if not limits.min <= least <= most <= limits.max:
        given = f"{str(least)[:24]}..{str(most)[:24]}"
        raise InvalidRequest(f"{where}the data has {given}, {wanted} has {limits.min}..{limits.max}")


def to_json(key: str, value: Any, most: Bound | None = None) -> dict[str, str]:
    """A pipeline's value under ``key`` as members of an object for ``json_line``; ``(label, score)`` becomes two.

    Their values are JSON. Raises ``NoResult`` for types that JSON lacks, ``ReplyTooLargeError`` for arrays of more than
    ``most``.
    """
    if is_label_and_score(value):
        return {"label": to_text("label", str(value[0])), "score": to_text("score", to_float("score", value[1]))}
    return {key: _json_of(key, value, most)}


def _json_of(key: str, value: Any, most: Bound | None) -> str:
    if is_array(value):
        return _json_of_array(key, value, most)
    if isinstance(value, (list, tuple)) and any(map(is_array, value)):
        return f"[{', '.join([_json_of(key, item, most) for item in value])}]"
    return to_text(key, value, most)


def numbers_to_json(array: np.ndarray, most: Bound | None = None, hint: str = "") -> bytes:
    """The finite numbers of an array as a flat list. ``ReplyTooLargeError`` as soon as there are more than ``most``."""
    flat, pieces, size, encode = array.ravel(), [], 0, _encode_numbers
    # In pieces, between which other threads get the GIL.
    for start in range(0, flat.size, _PIECE):
        pieces.append(encode(flat[start : start + _PIECE].tolist())[1:-1])
        size += len(pieces[-1]) + 1
        if most is not None and size > most.bytes:
            raise ReplyTooLargeError(size, most, hint)
    return b"[%b]" % b",".join(pieces)


def _json_of_array(key: str, value: Any, most: Bound | None) -> str:
    if is_texts(value):
        data, dtype = encode_json(value.ravel().tolist()), STRING
    else:
        value = to_array(key, value)
        check_finite(key, value)
        data, dtype = numbers_to_json(value, most).decode(), dtype_name(value.dtype)
    return f'{{"dtype": "{dtype}", "shape": {list(value.shape)}, "data": {data}}}'


def json_line(members: Mapping[str, str]) -> bytes:
    """The object as a line of JSON; the values are JSON already."""
    # NOTE: each by itself, since a wide character would widen all of a long text.
    return b"{%b}\n" % b", ".join(
        [utf8_json(f"{encode_json(key)}: ") + utf8_json(text) for key, text in members.items()]
    )


def label_line(value: tuple[Any, Any]) -> bytes:
    """A label and its score as a line of JSON."""
    label, score = str(value[0]), to_float("score", value[1])
    if not math.isfinite(score):
        return json_line(to_json("result", value))
    return utf8_json(f'{{"label": {encode_json(label)}, "score": {score!r}}}\n')


def to_text(key: str, value: Any, most: Bound | None = None) -> str:
    """A pipeline's value under ``key`` as JSON. Raises ``NoResult`` for a type that JSON lacks.

    ``ReplyTooLargeError`` for ``Detections`` of more than ``most``.
    """
    if isinstance(value, Detections):
        return detections.to_text(key, value, most)
    try:
        if type(value) is int or (type(value) is float and math.isfinite(value)):
            return repr(value)  # ValueError for thousands of digits
        return encode_json(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoResult(f"{key!r} holds a {type(value).__name__} that has no form in JSON: {error}") from None


def json_plain(value: Any) -> Any:
    """A form in JSON for types that it lacks. Raises ``TypeError`` for those that have none."""
    if isinstance(value, Detections):
        return detections.to_rows("result", value)
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, (bytes, bytearray)) else plain(value)


encode_json = json.JSONEncoder(default=json_plain, ensure_ascii=False, allow_nan=False).encode
"""JSON of a value, with what ``json_plain`` makes of NumPy's and PyTorch's; ``ValueError`` for NaN and infinity."""
_encode_numbers = fast_encoder(encode_json)
_PIECE = 2**13  # numbers that are encoded without a pause
