"""Messages of Protocol Buffers, checked before they are parsed, or read without their classes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.wire.errors import Bound, RequestTooLargeError

_VARINT, _BYTES = 0, 2  # wire types: a number, and a text, bytes or a message after its size
_SIZES = {1: 8, 5: 4}  # bytes by wire type, of types with a fixed size
_MOST_VARINT = 10
_TEXT, _RAW = 9, 12  # the types of fields that are a text or bytes
_FIXED = {1: 8, 2: 4, 6: 8, 7: 4, 15: 4, 16: 8}  # bytes by the type of fields whose numbers have a fixed size


Span = tuple[int, int]
"""Where a field's value begins and ends."""


class Slices(Protocol):
    """Bytes, or the content of a file."""

    def __getitem__(self, span: slice, /) -> bytes: ...


def check_fields(data: bytes, descriptor: Any, most: int, text: Bound) -> None:
    """``RequestTooLargeError`` for a message with more than ``most`` fields, those of the messages in it included, with
    more text in all of them together than ``text``, or with more packed numbers than half of that.

    Each number becomes an object, of many times its bytes. ``InvalidRequest`` if it is not a message. ``descriptor``:
    that of the message's class.
    """
    left, todo = most, [(descriptor, 0, len(data))]
    most_numbers = text.bytes // 2
    numbers, text_left = 0, text.bytes
    while todo:
        descriptor, at, end = todo.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise RequestTooLargeError(f"the message has more than {most} fields (--max-items)")
            tag, at = varint(data, at)
            number, kind = tag >> 3, tag & 7
            if kind in _SIZES:
                at += _SIZES[kind]
                continue
            if kind not in (_VARINT, _BYTES):
                raise InvalidRequest(f"the message is not a {descriptor.full_name}")
            value, at = varint(data, at)
            if kind == _BYTES:
                field = descriptor.fields_by_number.get(number)
                if field is not None and field.message_type is not None:
                    todo.append((field.message_type, at, min(at + value, end)))
                elif field is not None and field.type == _TEXT:
                    text_left -= value
                    if text_left < 0:
                        size = text.bytes - text_left
                        raise RequestTooLargeError(
                            f"{size} bytes of text in {field.name}; the limit is {text.bytes} ({text.name})"
                        )
                elif field is not None and field.type != _RAW:
                    numbers += _count(data, at, value, field.type)
                    if numbers > most_numbers:
                        raise RequestTooLargeError(
                            f"{numbers} numbers up to {field.name}; the limit is {most_numbers} (half of {text.name}): "
                            "send large inputs as raw_input_contents"
                        )
                at += value


def _count(data: bytes, at: int, size: int, type_: int) -> int:
    """The numbers of a packed field. NOTE: their bytes say little: a number takes 1 to 10, and 8 when it is parsed."""
    if type_ in _FIXED:
        return size // _FIXED[type_]
    packed = np.frombuffer(memoryview(data)[at : at + size], np.uint8)
    return int(np.count_nonzero(packed < 0x80))  # the last byte of each


def varint(data: Slices, at: int) -> tuple[int, int]:
    """The number there, and where it ends; ``InvalidRequest`` (a ``ValueError``) if it is cut short."""
    number = 0
    for index, byte in enumerate(data[at : at + _MOST_VARINT]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, at + index + 1
    raise InvalidRequest("the message is cut short")


def fields_of(data: Slices, message: Span) -> dict[int, list[Span]]:
    """A message's fields by their numbers. ``ValueError`` and ``IndexError`` if it is not a protobuf message."""
    fields: dict[int, list[Span]] = defaultdict(list)
    at, end = message
    while at < end:
        tag, start = varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            at = varint(data, start)[1]
        elif kind == _BYTES:
            length, start = varint(data, start)
            at = start + length
        elif kind in _SIZES:
            at = start + _SIZES[kind]
        else:
            raise ValueError(f"a field of type {kind}")
        if at > end:
            raise ValueError("a field that ends after its message")
        fields[tag >> 3].append((start, at))
    return fields


def text_of(data: Slices, spans: Sequence[Span]) -> str:
    """The text of a field."""
    return b"".join([data[start:end] for start, end in spans]).decode()
