"""Finds where a Thrift struct ends and checks every size in it, without decoding and without recursion."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import NoReturn

Buffer = bytes | bytearray | memoryview

_i32_at = Struct(">i").unpack_from

SLICE_STEPS = 256  # of one call: 0.1 to 0.3 ms

I32_VARINT = 5  # bytes at most
I64_VARINT = 10


@dataclass(frozen=True)
class Limits:
    """What one message may hold.

    message_bytes: a whole message; of a framed one, what follows the length.
    string_bytes: one string or binary. text_bytes: what the method's arguments declare as strings, all together.
    items: struct fields, list and set elements and map entries of a message, all together.
    depth: nested structs and containers; the arguments struct is the first.
    """

    message_bytes: int = 16 * 2**20
    string_bytes: int = 16 * 2**20
    text_bytes: int = 2**20
    items: int = 2**12
    depth: int = 64


class ProtocolError(Exception):
    """The byte stream is broken: no later message of this connection can be found.

    kind: "not_thrift", "bad_version", "bad_message", "bad_frame", "bad_type", "bad_varint", "negative_size",
        "too_large" or "too_deep". detail: one line for a person.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


def endless(kind: str, limits: Limits) -> ProtocolError:
    """The error for a message that goes on after its frame, or after the limit where it has none."""
    if kind == "too_large":
        return ProtocolError(kind, f"the message has more than {limits.message_bytes} bytes (--max-message-bytes)")
    return ProtocolError(kind, "the message goes on after the end of its frame")


def read_varint(buffer: Buffer, at: int, end: int, max_bytes: int) -> tuple[int, int]:
    """The unsigned number at `at` and the position behind it, which is 0 if the number goes on after `end`."""
    if at < end and buffer[at] < 0x80:
        return buffer[at], at + 1
    value = shift = 0
    for position in range(at, min(end, at + max_bytes)):
        byte = buffer[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    if end - at >= max_bytes:
        raise ProtocolError("bad_varint", f"a number is longer than {max_bytes} bytes")
    return 0, 0


def _skip_varint(buffer: Buffer, at: int, end: int) -> int:
    """The position behind the number at `at`, 0 if it goes on after `end`."""
    last = min(end, at + I64_VARINT)
    while at < last:
        if buffer[at] < 0x80:
            return at + 1
        at += 1
    if last < end:
        raise ProtocolError("bad_varint", f"a number is longer than {I64_VARINT} bytes")
    return 0


def read_size(buffer: Buffer, at: int, end: int) -> tuple[int, int]:
    """As `read_varint`, of a signed 32-bit size."""
    size, at = read_varint(buffer, at, end, I32_VARINT)
    if size >= 2**31:
        raise ProtocolError("negative_size" if size < 2**32 else "bad_varint", f"a size of {size}")
    return size, at


# What a type on the wire is: a size in bytes where that is fixed, else one of these.
_BAD, _VARINT, _STRING, _STRUCT, _MAP, _LIST = range(-1, -7, -1)
_BINARY = {2: 1, 3: 1, 4: 8, 6: 2, 8: 4, 10: 8, 11: _STRING, 12: _STRUCT, 13: _MAP, 14: _LIST, 15: _LIST}
_COMPACT = {1: 1, 2: 1, 3: 1, 4: _VARINT, 5: _VARINT, 6: _VARINT, 7: 8, 8: _STRING, 9: _LIST, 10: _LIST} | {
    11: _MAP,
    12: _STRUCT,
}
_BINARY_KINDS = [_BINARY.get(wire, _BAD) for wire in range(256)]
_COMPACT_KINDS = [_COMPACT.get(wire, _BAD) for wire in range(16)]


def fixed_size(wire_type: int, is_compact: bool) -> int:
    """The bytes of every value of a type, less than 1 where they differ."""
    return _COMPACT_KINDS[wire_type] if is_compact else _BINARY_KINDS[wire_type]


class Scanner:
    """A position in a value that arrives in pieces, of the compact protocol or of the binary one.

    `advance` does not look again at what it passed: an interruption repeats at most one field header. `pos` may lie
    behind the bytes that have arrived, since strings and numbers of a fixed size are passed by arithmetic.
    """

    __slots__ = (
        "_beyond", "_first", "_is_compact", "_items", "_left", "_limits", "_second", "_stack", "is_paused", "limit",
        "pos",
    )  # fmt: skip

    def __init__(self, limits: Limits, is_compact: bool) -> None:
        self._limits, self._is_compact = limits, is_compact
        self.start_struct(0, 0)

    def start_struct(self, pos: int, limit: int, beyond: str = "too_large") -> None:
        """A struct begins at `pos`; it is an error of kind `beyond` not to end until `limit`."""
        self.pos, self.limit, self._beyond = pos, limit, beyond
        # Elements to come in the innermost container, in a map keys and values; negative in a struct.
        # The next one is of type `_first` where that number is even, else `_second`: a list has both the same.
        self._left, self._first, self._second = -1, 0, 0
        self._stack: list[tuple[int, int, int]] = []
        self._items = self._limits.items
        self.is_paused = False

    def start_value(self, pos: int, limit: int, wire_type: int) -> None:
        """A value begins at `pos`, as an element of a container would."""
        self.start_struct(pos, limit)
        self._left, self._first, self._second = 1, wire_type, wire_type

    def shift(self, offset: int) -> None:
        """The buffer lost its first `offset` bytes."""
        self.pos -= offset
        self.limit -= offset

    @property
    def items(self) -> int:
        """How many the value has, once it has ended."""
        return self._limits.items - self._items

    def advance(self, buffer: Buffer, end: int, most: int = SLICE_STEPS) -> bool:
        """Scan up to `end`; True when the value has ended, at `pos`. Raises `ProtocolError`.

        After `most` steps it pauses: `is_paused` tells that another call goes on with the same bytes.
        """
        is_compact, limits, stack = self._is_compact, self._limits, self._stack
        kinds = _COMPACT_KINDS if is_compact else _BINARY_KINDS
        pos, left, first, second, items = self.pos, self._left, self._first, self._second, self._items
        end = min(end, self.limit)
        self.is_paused = False
        for _ in range(most):
            unread = items
            if left < 0:
                if pos >= end:
                    break
                head = buffer[pos]
                if is_compact:
                    wire, at = head & 15, pos + 1
                    if head < 16 and wire:
                        _, at = read_varint(buffer, at, end, I32_VARINT)
                        if not at:
                            break
                else:
                    wire, at = head, pos + 3
                if not wire:
                    pos += 1
                    if not stack:
                        self.pos, self._items = pos, items
                        return True
                    left, first, second = stack.pop()
                    continue
                items -= 1
                if items < 0:
                    self._refuse_items(0)
                if wire < 3 and is_compact:  # a bool field: its type is its value
                    pos = at
                    continue
            elif left:
                wire = second if left & 1 else first
                at = pos
            else:
                if not stack:
                    self.pos, self._items = pos, items
                    return True
                left, first, second = stack.pop()
                continue

            kind = kinds[wire]
            if kind == _STRING:
                if not is_compact:
                    body = at + 4
                    if body > end:
                        break
                    size = _i32_at(buffer, at)[0]
                else:
                    size, body = read_size(buffer, at, end)
                    if not body:
                        break
                if not 0 <= size <= limits.string_bytes:
                    self._refuse_string(size)
                pos = body + size
                left -= 1
                continue
            if kind > 0:
                pos = at + kind
                left -= 1
                continue
            if kind == _VARINT:
                at = _skip_varint(buffer, at, end)
                if not at:
                    break
                pos = at
                left -= 1
                continue
            if kind == _BAD:
                raise ProtocolError("bad_type", f"type {wire}")

            if len(stack) + 2 > limits.depth:
                self._refuse_depth()
            if kind == _STRUCT:
                stack.append((left - 1, first, second))
                pos, left = at, -1
                continue
            is_map = kind == _MAP
            if is_compact:
                size, key, value, at = compact_container(buffer, at, end, is_map)
                if not at:
                    break
            else:
                body = at + 5 + is_map
                if body > end:
                    break
                size, key, value, at = _i32_at(buffer, body - 4)[0], buffer[at], buffer[body - 5], body
            items -= size
            if size < 0 or items < 0:
                self._refuse_items(size)
            pos = at
            if size == 0:
                left -= 1
                continue
            key_kind, value_kind = kinds[key], kinds[value]
            if key_kind == _BAD or value_kind == _BAD:
                raise ProtocolError("bad_type", f"a container of types {key}, {value}")
            if key_kind > 0 and value_kind > 0:
                pos += size * (key_kind + value_kind if is_map else value_kind)
                left -= 1
                continue
            stack.append((left - 1, first, second))
            left, first, second = (2 * size if is_map else size), key, value
        else:
            unread, self.is_paused = items, True
        if pos > self.limit or (end >= self.limit and not self.is_paused):
            raise endless(self._beyond, self._limits)
        self.pos, self._left, self._first, self._second, self._items = pos, left, first, second, unread
        return False

    def _refuse_string(self, size: int) -> NoReturn:
        if size < 0:
            raise ProtocolError("negative_size", f"a string of {size} bytes")
        limit = self._limits.string_bytes
        raise ProtocolError("too_large", f"a string of {size} bytes; the limit is {limit} (--max-message-bytes)")

    def _refuse_items(self, size: int) -> NoReturn:
        if size < 0:
            raise ProtocolError("negative_size", f"a container of {size} elements")
        limit = self._limits.items
        raise ProtocolError("too_large", f"more than {limit} fields and elements in a message (--max-items)")

    def _refuse_depth(self) -> NoReturn:
        raise ProtocolError("too_deep", f"more than {self._limits.depth} nested structs and containers (--max-depth)")


def compact_container(buffer: Buffer, at: int, end: int, is_map: bool) -> tuple[int, int, int, int]:
    """Size, types of key and value (of a list: the same twice), and the position behind the header, 0 if it goes on."""
    if is_map:
        size, at = read_size(buffer, at, end)
        if size == 0 or not at:
            return 0, 0, 0, at
        if at >= end:
            return 0, 0, 0, 0
        return size, buffer[at] >> 4, buffer[at] & 15, at + 1
    if at >= end:
        return 0, 0, 0, 0
    head = buffer[at]
    if head < 0xF0:
        return head >> 4, head & 15, head & 15, at + 1
    size, at = read_size(buffer, at + 1, end)
    return size, head & 15, head & 15, at
