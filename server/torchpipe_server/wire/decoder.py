"""Reads the arguments of a complete message, whose sizes and depth a scanner has bounded.

thriftpy2 does not read: where a map's element type differs from the declared one it takes the bytes for what was
declared, so that lengths no scanner saw reach its C code; and it does not notice missing required fields.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, ClassVar

from thriftpy2.thrift import TType

from torchpipe_py.errors import InvalidRequest
from torchpipe_server.wire.scanner import (
    I64_VARINT,
    Limits,
    Scanner,
    compact_container,
    fixed_size,
    read_size,
    read_varint,
)

# Reads one value at a position; returns it and the position behind it.
Bytes = bytes | memoryview
Read = Callable[[Bytes, int], tuple[Any, int]]
Field = tuple[int, str, Read]  # type on the wire, name

_i16_at = Struct(">h").unpack_from
_i32_at = Struct(">i").unpack_from
_little_double_at = Struct("<d").unpack_from
_LISTS = (TType.LIST, TType.SET)


class BadArgumentsError(Exception):
    """A whole message whose body does not fit the method's arguments. The stream is intact."""


class TextTooLargeError(InvalidRequest):
    """Texts beyond ``Limits.text_bytes``: decoded they would take up to four times their bytes, and time to search."""

    code = "too_large"


class Decoder:
    """Compiles classes made by thriftpy2 into functions that read them.

    Fields of unknown number are skipped; a known field or element of another type is refused, unlike in other readers.
    """

    is_compact: ClassVar[bool]
    wire_types: ClassVar[dict[int, int]]  # of thriftpy2's types

    def __init__(self, limits: Limits) -> None:
        self._scanner = Scanner(limits, self.is_compact)
        self._limits = limits
        self.text_bytes = 0  # of the texts read since that was set to 0
        self._structs: dict[type, Read] = {}

    def struct(self, cls: type) -> Read:
        """The function that reads a `cls`."""
        read = self._structs.get(cls)
        if read is None:
            # A struct may contain itself: its fields are compiled after it is known.
            fields: dict[int, Field] = {}
            spec = cls.thrift_spec  # type: ignore[attr-defined]
            required = tuple(field[1] for field in spec.values() if field[-1])
            read = self._structs[cls] = self._struct_reader(cls, fields, required)
            for number, field in spec.items():
                ttype, element = field[0], field[2] if len(field) > 3 else None
                fields[number] = (self.wire_types[ttype], field[1], self._value(ttype, element))
        return read

    def _value(self, ttype: int, spec: Any) -> Read:
        if ttype == TType.STRUCT:
            return self.struct(spec)
        if ttype in _LISTS:
            return self._list_reader(*self._element(spec))
        if ttype == TType.MAP:
            return self._map_reader(*self._element(spec[0]), *self._element(spec[1]))
        return self._simple_reader(ttype)

    def _element(self, spec: Any) -> tuple[int, Read]:
        ttype, inner = spec if isinstance(spec, tuple) else (spec, None)
        return self.wire_types[ttype], self._value(ttype, inner)

    def _skip(self, view: Bytes, at: int, wire: int) -> int:
        size = fixed_size(wire, self.is_compact)
        if size > 0:
            return at + size
        self._scanner.start_value(at, len(view) + 1, wire)
        self._scanner.advance(view, len(view), 2 * len(view))
        return self._scanner.pos

    def _read_text(self, view: Bytes, at: int) -> tuple[str, int]:
        size, at = self._string(view, at)
        self.text_bytes += size
        if self.text_bytes > self._limits.text_bytes:
            limit = self._limits.text_bytes
            raise TextTooLargeError(
                f"texts of {self.text_bytes} bytes or more; the limit is {limit} (--max-text-bytes)"
            )
        return str(view[at : at + size], "utf-8"), at + size

    def _read_bytes(self, view: Bytes, at: int) -> tuple[bytes, int]:
        size, at = self._string(view, at)
        return bytes(view[at : at + size]), at + size

    def _string(self, view: Bytes, at: int) -> tuple[int, int]:
        """The size of a string and where its bytes begin."""
        raise NotImplementedError

    def _list_reader(self, wire: int, read: Read) -> Read:
        begin = self._container

        def read_list(view: Bytes, at: int) -> tuple[list[Any], int]:
            size, _, element, at = begin(view, at, False)
            if size and element != wire:
                raise BadArgumentsError(f"a list of type {element}, not {wire}")
            items = []
            for _ in range(size):
                item, at = read(view, at)
                items.append(item)
            return items, at

        return read_list

    def _map_reader(self, key_wire: int, read_key: Read, value_wire: int, read_value: Read) -> Read:
        begin = self._container

        def read_map(view: Bytes, at: int) -> tuple[dict[Any, Any], int]:
            size, key_type, value_type, at = begin(view, at, True)
            if size and (key_type, value_type) != (key_wire, value_wire):
                raise BadArgumentsError(f"a map of types {key_type}, {value_type}, not {key_wire}, {value_wire}")
            items = {}
            for _ in range(size):
                key, at = read_key(view, at)
                value, at = read_value(view, at)
                items[key] = value
            return items, at

        return read_map

    def _container(self, view: Bytes, at: int, is_map: bool) -> tuple[int, int, int, int]:
        raise NotImplementedError

    def _simple_reader(self, ttype: int) -> Read:
        raise NotImplementedError

    def _struct_reader(self, cls: type, fields: dict[int, Field], required: tuple[str, ...]) -> Read:
        raise NotImplementedError


class BinaryDecoder(Decoder):
    """Of the binary protocol, with or without a version in the header."""

    is_compact = False
    wire_types: ClassVar = {ttype: ttype for ttype in (2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15)} | {
        TType.BINARY: TType.STRING
    }

    def _struct_reader(self, cls: type, fields: dict[int, Field], required: tuple[str, ...]) -> Read:
        skip = self._skip

        def read_struct(view: Bytes, at: int) -> tuple[Any, int]:
            made, name = cls(), ""
            try:
                while wire := view[at]:
                    field = fields.get(_i16_at(view, at + 1)[0])
                    at += 3
                    if field is None:
                        at = skip(view, at, wire)
                        continue
                    expected, name, read = field
                    if wire != expected:
                        raise BadArgumentsError(f"{cls.__name__}.{name} is of type {wire}, not {expected}")
                    value, at = read(view, at)
                    setattr(made, name, value)
            except UnicodeDecodeError:
                raise BadArgumentsError(f"{cls.__name__}.{name} is not UTF-8") from None
            for name in required:
                if getattr(made, name) is None:
                    raise BadArgumentsError(f"{cls.__name__}.{name} is missing")
            return made, at + 1

        return read_struct

    def _read_bytes(self, view: Bytes, at: int) -> tuple[bytes, int]:
        end = at + 4 + _i32_at(view, at)[0]
        return bytes(view[at + 4 : end]), end

    def _container(self, view: Bytes, at: int, is_map: bool) -> tuple[int, int, int, int]:
        first = view[at]
        at += is_map
        return _i32_at(view, at + 1)[0], first, view[at], at + 5

    def _simple_reader(self, ttype: int) -> Read:
        if ttype == TType.STRING:
            return self._read_text
        if ttype == TType.BINARY:
            return self._read_bytes
        number = Struct({2: ">?", 3: ">b", 4: ">d", 6: ">h", 8: ">i", 10: ">q"}[ttype])
        number_at, size = number.unpack_from, number.size
        return lambda view, at: (number_at(view, at)[0], at + size)

    def _string(self, view: Bytes, at: int) -> tuple[int, int]:
        return _i32_at(view, at)[0], at + 4


class CompactDecoder(Decoder):
    """Of the compact protocol."""

    is_compact = True
    wire_types: ClassVar = {2: 1, 3: 3, 4: 7, 6: 4, 8: 5, 10: 6, 11: 8, 12: 12, 13: 11, 14: 10, 15: 9, TType.BINARY: 8}

    def _struct_reader(self, cls: type, fields: dict[int, Field], required: tuple[str, ...]) -> Read:
        skip = self._skip

        def read_struct(view: Bytes, at: int) -> tuple[Any, int]:
            made, name, number = cls(), "", 0
            try:
                while wire := view[at] & 15:
                    step = view[at] >> 4
                    at += 1
                    if step:
                        number += step
                    else:
                        zigzag, at = read_varint(view, at, len(view), I64_VARINT)
                        number = (zigzag >> 1) ^ -(zigzag & 1)
                    field = fields.get(number)
                    if field is None:
                        at = at if wire < 3 else skip(view, at, wire)
                        continue
                    expected, name, read = field
                    if wire != expected and (wire, expected) != (2, 1):
                        raise BadArgumentsError(f"{cls.__name__}.{name} is of type {wire}, not {expected}")
                    if wire < 3:
                        value: Any = wire == 1
                    else:
                        value, at = read(view, at)
                    setattr(made, name, value)
            except UnicodeDecodeError:
                raise BadArgumentsError(f"{cls.__name__}.{name} is not UTF-8") from None
            for name in required:
                if getattr(made, name) is None:
                    raise BadArgumentsError(f"{cls.__name__}.{name} is missing")
            return made, at + 1

        return read_struct

    def _container(self, view: Bytes, at: int, is_map: bool) -> tuple[int, int, int, int]:
        size, key, value, at = compact_container(view, at, len(view), is_map)
        return size, 1 if key == 2 else key, 1 if value == 2 else value, at

    def _simple_reader(self, ttype: int) -> Read:
        if ttype == TType.STRING:
            return self._read_text
        if ttype == TType.BINARY:
            return self._read_bytes
        if ttype == TType.BOOL:
            return lambda view, at: (view[at] == 1, at + 1)
        if ttype == TType.BYTE:
            return lambda view, at: ((view[at] ^ 0x80) - 0x80, at + 1)
        if ttype == TType.DOUBLE:
            return lambda view, at: (_little_double_at(view, at)[0], at + 8)
        return _int_reader({6: 16, 8: 32, 10: 64}[ttype])

    def _string(self, view: Bytes, at: int) -> tuple[int, int]:
        return read_size(view, at, len(view))


def _int_reader(bits: int) -> Read:
    def read_int(view: Bytes, at: int) -> tuple[int, int]:
        zigzag, at = read_varint(view, at, len(view), I64_VARINT)
        if zigzag >> bits:
            raise BadArgumentsError(f"a number of more than {bits} bits")
        return (zigzag >> 1) ^ -(zigzag & 1), at

    return read_int
