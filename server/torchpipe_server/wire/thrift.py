"""Thrift: bytes become messages with their arguments, and results become bytes. No sockets, no threads, no clock.

A client speaks one of the framings (buffered, which puts nothing around a message, or framed) and one of the protocols
(binary, binary without a version as old clients write it, compact); the first bytes tell which.

One walk over a message bounds every size in it, finds its end and makes its arguments. thriftpy2 does not read: where
the type of a map's elements differs from the declared one it takes the bytes for what was declared, so that unchecked
lengths reach its C code; and it does not notice missing required fields.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple, NoReturn

import thriftpy2.transport
from thriftpy2.protocol import TBinaryProtocol, TCompactProtocol
from thriftpy2.thrift import TApplicationException, TDecodeException, TType

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.wire import answers
from torchpipe_server.wire.errors import ProtocolError

CALL, REPLY, EXCEPTION, ONEWAY = 1, 2, 3, 4
NAME_BYTES = 255  # of a method's name
HEADER_BYTES = NAME_BYTES + 16  # no header is longer
SLICE_STEPS = 256  # of one walk: 0.2 to 0.5 ms
I32_VARINT, I64_VARINT = 5, 10  # bytes at most
TEXT_BYTES = 4  # that a byte of a text takes as Python keeps it, at most
ITEM_BYTES = 256  # that an item takes besides its contents: its part of an object, of a tensor or of a request

_VERSION_CALL = 0x80010001
_u32, _i32, _version_and_size = Struct(">I"), Struct(">i"), Struct(">Ii")
_little_double = Struct("<d")
_MemoryBuffer = getattr(thriftpy2.transport, "TCyMemoryBuffer", thriftpy2.transport.TMemoryBuffer)
try:
    from thriftpy2.protocol.cybin import TCyBinaryProtocol as _BinaryWriter
except ImportError:  # where thriftpy2 was installed without a compiler
    _BinaryWriter = TBinaryProtocol


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


class BadArgumentsError(Exception):
    """A whole message whose body does not fit the method's arguments. The stream is intact."""


class TextTooLargeError(InvalidRequest):
    """Texts beyond ``Limits.text_bytes``: decoded they would take up to four times their bytes, and time to search."""

    code = "too_large"


class Framing(NamedTuple):
    """How a connection's client writes, and so how it is answered. ``protocol``: "binary", "binary_old", "compact"."""

    framed: bool
    protocol: str


class Message:
    """A complete message.

    name: of the method. seqid: signed, 32 bits. args: of the method's class, fields that were not sent are None; none
    where there is no such method. error: what is wrong with the arguments, or why the message was not read to its end.
    size: what the message holds in memory, about.
    """

    __slots__ = ("args", "error", "framing", "is_oneway", "name", "seqid", "size")

    is_last = False  # the connection goes on after each answer
    head = None

    def __init__(self, name: str, is_oneway: bool, seqid: int, framing: Framing) -> None:
        self.name, self.is_oneway, self.seqid, self.framing = name, is_oneway, seqid, framing
        self.args: Any = None
        self.error: Exception | None = None
        self.size = 0

    @property
    def protocol(self) -> Framing:
        """For the journal."""
        return self.framing

    def refused(self, error: ProtocolError) -> Message:
        """The same, not read to its end because of ``error``."""
        self.error = error
        return self

    def reply(self, result: Any) -> bytes:
        """The answer that carries ``result``, an object of the method's result struct."""
        return _encode(self, REPLY, result)

    def exception(self, error: TApplicationException) -> bytes:
        """The answer that carries an error that the IDL does not declare."""
        return _encode(self, EXCEPTION, error)


# -- what stands before the arguments -------------------------------------------------------------------------------


def endless(kind: str, limits: Limits) -> ProtocolError:
    """The error for a message that goes on after its frame, or after the limit where it has none."""
    if kind == "too_large":
        return ProtocolError(kind, f"the message has more than {limits.message_bytes} bytes (--max-message-bytes)")
    return ProtocolError(kind, "the message goes on after the end of its frame")


def read_varint(buffer: Any, at: int, end: int, max_bytes: int) -> tuple[int, int]:
    """The unsigned number at `at` and the position after it, which is 0 if the number goes on after `end`."""
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


def read_size(buffer: Any, at: int, end: int) -> tuple[int, int]:
    """As `read_varint`, of a signed 32-bit size."""
    size, at = read_varint(buffer, at, end, I32_VARINT)
    if size >= 2**31:
        raise ProtocolError("negative_size" if size < 2**32 else "bad_varint", f"a size of {size}")
    return size, at


def detect(buffer: Any, start: int, end: int) -> Framing | None:
    """What a stream that begins so is written in, None while it may be several. Raises `ProtocolError`."""
    size = end - start
    if size == 0:
        return None
    first = buffer[start]
    if first == 0x82:
        return Framing(False, "compact")
    if first == 0x80:
        if size == 1:
            return None
        if buffer[start + 1] == 0x01:
            return Framing(False, "binary")
    if first >= 0x80:
        raise ProtocolError("not_thrift", f"a stream that begins with {first:#04x}")
    if size < 4:
        return None
    length = _u32.unpack_from(buffer, start)[0]
    if length == 0:
        raise ProtocolError("not_thrift", "a stream that begins with a zero length")
    if size == 4:
        return None
    fifth = buffer[start + 4]
    if fifth == 0x80:
        return Framing(True, "binary")
    if fifth == 0x82:
        return Framing(True, "compact")
    if fifth == 0x00:  # of the length of a name
        return Framing(True, "binary_old")
    if length <= NAME_BYTES and 0x20 < fifth < 0x7F:
        return Framing(False, "binary_old")
    raise ProtocolError("not_thrift", f"a stream that begins with {bytes(buffer[start : start + 5])!r}")


Header = tuple[str, bool, int, int]
"""Name, whether it is oneway, sequence number, and where the arguments begin."""


def read_header(protocol: str, buffer: Any, start: int, end: int) -> Header | None:
    """What stands there; ``None`` if it is not all there yet. Raises `ProtocolError`."""
    if protocol == "compact":
        return _compact_header(buffer, start, end)
    if protocol == "binary":
        if end - start < 8:
            return None
        version, size = _version_and_size.unpack_from(buffer, start)
        if version >> 16 != 0x8001:
            raise ProtocolError("bad_version", f"a message that begins with {version:#010x}")
        _check_name_size(size)
        at = start + 8 + size
        if at + 4 > end:
            return None
        return _name(buffer, start + 8, at), _is_oneway(version & 0xFF), _i32.unpack_from(buffer, at)[0], at + 4
    if end - start < 4:
        return None
    size = _i32.unpack_from(buffer, start)[0]
    _check_name_size(size)
    at = start + 4 + size
    if at + 5 > end:
        return None
    return _name(buffer, start + 4, at), _is_oneway(buffer[at]), _i32.unpack_from(buffer, at + 1)[0], at + 5


def _compact_header(buffer: Any, start: int, end: int) -> Header | None:
    if end - start < 2:
        return None
    head = buffer[start + 1]
    if buffer[start] != 0x82 or head & 0x1F != 1:
        raise ProtocolError("bad_version", f"a message that begins with {buffer[start]:#04x}, {head:#04x}")
    seqid, at = read_varint(buffer, start + 2, end, I32_VARINT)
    if not at:
        return None
    if seqid >= 2**32:
        raise ProtocolError("bad_varint", "a sequence number of more than 32 bits")
    size, at = read_size(buffer, at, end)
    if not at:
        return None
    _check_name_size(size)
    if at + size > end:
        return None
    signed = seqid if seqid < 2**31 else seqid - 2**32
    return _name(buffer, at, at + size), _is_oneway(head >> 5), signed, at + size


def _check_name_size(size: int) -> None:
    if not 0 < size <= NAME_BYTES:
        raise ProtocolError("negative_size" if size < 0 else "bad_message", f"a method's name of {size} bytes")


def _name(buffer: Any, start: int, end: int) -> str:
    try:
        return str(buffer[start:end], "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("bad_message", "a method's name is not UTF-8") from None


def _is_oneway(code: int) -> bool:
    if code not in (CALL, ONEWAY):
        raise ProtocolError("bad_message", f"a message of type {code} is no call")
    return code == ONEWAY


# -- what a method's arguments look like ----------------------------------------------------------------------------

_WIRE_OF_COMPACT = {2: 1, 3: 3, 4: 7, 6: 4, 8: 5, 10: 6, 11: 8, 12: 12, 13: 11, 14: 10, 15: 9, TType.BINARY: 8}


class _Struct:
    """A class made by thriftpy2; ``fields[number]`` is (type on the wire, name, spec of the value)."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.fields: dict[int, tuple[int, str, Any]] = {}
        self.required = [field[1] for field in cls.thrift_spec.values() if field[-1]]  # type: ignore[attr-defined]


class _Container(NamedTuple):
    """Of a list or set (the same type twice) or a map. A spec is that of a value: a struct, a container or its type."""

    make: type
    wires: tuple[int, int]
    specs: tuple[Any, Any]


class Specs:
    """The classes of a service, as a walk over one protocol needs them; each is looked at once."""

    def __init__(self, is_compact: bool) -> None:
        self._is_compact = is_compact
        self._structs: dict[type, _Struct] = {}

    def struct(self, cls: type) -> _Struct:
        """That of the class."""
        found = self._structs.get(cls)
        if found is None:
            # A struct may contain itself: its fields are looked at after it is known.
            found = self._structs[cls] = _Struct(cls)
            for number, field in cls.thrift_spec.items():  # type: ignore[attr-defined]
                wire, spec = self._value(field[0], field[2] if len(field) > 3 else None)
                found.fields[number] = wire, field[1], spec
        return found

    def _value(self, ttype: int, inner: Any) -> tuple[int, Any]:
        """A value's type on the wire, and its spec."""
        spec: Any = ttype
        if ttype == TType.STRUCT:
            spec = self.struct(inner)
        elif ttype in (TType.LIST, TType.SET):
            wire, element = self._element(inner)
            spec = _Container(list, (wire, wire), (element, element))
        elif ttype == TType.MAP:
            pairs = self._element(inner[0]), self._element(inner[1])
            spec = _Container(dict, (pairs[0][0], pairs[1][0]), (pairs[0][1], pairs[1][1]))
        if self._is_compact:
            return _WIRE_OF_COMPACT[ttype], spec
        return TType.STRING if ttype == TType.BINARY else ttype, spec

    def _element(self, inner: Any) -> tuple[int, Any]:
        return self._value(*inner) if isinstance(inner, tuple) else self._value(inner, None)


# -- the walk -------------------------------------------------------------------------------------------------------

# What a type on the wire is: a size in bytes where that is fixed, else one of these.
_BAD, _VARINT, _STRING, _STRUCT, _MAP, _LIST = range(-1, -7, -1)
_BINARY = {2: 1, 3: 1, 4: 8, 6: 2, 8: 4, 10: 8, 11: _STRING, 12: _STRUCT, 13: _MAP, 14: _LIST, 15: _LIST}
_COMPACT = {1: 1, 2: 1, 3: 1, 4: _VARINT, 5: _VARINT, 6: _VARINT, 7: 8, 8: _STRING, 9: _LIST, 10: _LIST} | {
    11: _MAP,
    12: _STRUCT,
}
_BINARY_KINDS = [_BINARY.get(wire, _BAD) for wire in range(256)]
_COMPACT_KINDS = [_COMPACT.get(wire, _BAD) for wire in range(16)]
_NUMBERS: dict[int, Callable[..., tuple[Any, ...]]] = {
    wire: Struct(form).unpack_from for wire, form in {2: ">?", 3: ">b", 4: ">d", 6: ">h", 8: ">i", 10: ">q"}.items()
}
_BITS = {4: 16, 5: 32, 6: 64}  # of the compact protocol's integers


class _Frame:
    """A struct or container that is not over. ``made`` is None where nobody wants it.

    left: elements to come, of a map keys and values; negative in a struct. number: of a struct's last field.
    """

    __slots__ = ("key", "left", "made", "name", "number", "specs", "struct", "wires")

    def __init__(
        self, left: int, made: Any, struct: _Struct | None, wires: Any = (), specs: Any = (None, None)
    ) -> None:
        self.left, self.made, self.struct, self.wires, self.specs = left, made, struct, wires, specs
        self.number = 0
        self.name = ""  # of the struct's field that is being read
        self.key: Any = None

    def put(self, value: Any) -> None:
        """The next value is this."""
        left, made = self.left, self.made
        if left < 0:
            if made is not None and self.name:
                setattr(made, self.name, value)
            return
        self.left = left - 1
        if made is None:
            return
        if type(made) is list:
            made.append(value)
        elif left & 1:
            made[self.key] = value
        else:
            self.key = value


class Walker:
    """A walk over the arguments struct of one message, which arrives in pieces.

    `walk` does not look again at what it passed: an interruption repeats at most one field header.
    """

    def __init__(self, limits: Limits, is_compact: bool, struct: _Struct | None, pos: int, end: int, kind: str) -> None:
        """The struct begins at ``pos``; it is an error of this kind not to end until ``end``."""
        self._limits, self._is_compact, self._beyond = limits, is_compact, kind
        self.pos, self.limit = pos, end
        self.items = self.text_bytes = 0
        self.args = None if struct is None else struct.cls()
        self.error: Exception | None = None  # what is wrong with the arguments, first
        self.is_paused = False
        self.needed = 0  # bytes that must have arrived before another walk is worth it
        self._stack = [_Frame(-1, self.args, struct)]

    def walk(self, view: memoryview, end: int) -> bool:
        """Walk up to ``end``; True when the struct has ended, at `pos`. Raises `ProtocolError`.

        After ``SLICE_STEPS`` it pauses: `is_paused` tells that another call goes on with the same bytes.
        """
        is_compact, stack = self._is_compact, self._stack
        kinds = _COMPACT_KINDS if is_compact else _BINARY_KINDS
        pos, frame, end = self.pos, stack[-1], min(end, self.limit)
        self.is_paused = False
        needed = 0
        for _ in range(SLICE_STEPS):
            if not frame.left:
                stack.pop()
                value, frame = frame.made, stack[-1]
                frame.put(value)
                continue
            if frame.left > 0:
                at, is_second = pos, frame.left & 1
                wire, spec = frame.wires[is_second], frame.specs[is_second]
            else:
                if pos >= end:
                    break
                head, number, at = view[pos], 0, pos + 3
                wire = head & 15 if is_compact else head
                if not wire:
                    pos += 1
                    self._end(frame)
                    if len(stack) == 1:
                        self.pos = pos
                        return True
                    stack.pop()
                    value, frame = frame.made, stack[-1]
                    frame.put(value)
                    continue
                if not is_compact:
                    if at > end:
                        break
                    number = (view[pos + 1] << 8 | view[pos + 2]) ^ 0x8000
                    number -= 0x8000
                elif head >= 16:
                    number, at = frame.number + (head >> 4), pos + 1
                else:
                    zigzag, at = read_varint(view, pos + 1, end, I32_VARINT)
                    if not at:
                        break
                    number = (zigzag >> 1) ^ -(zigzag & 1)
                spec = self._field(frame, number, wire)
                if is_compact and wire < 3:  # the type of a bool field is its value
                    self._count(1)
                    frame.number, pos = number, at
                    if spec is not None:
                        frame.put(wire == 1)
                    continue

            kind = kinds[wire]
            value = None
            if kind == _STRING:
                if is_compact:
                    size, body = read_size(view, at, end)
                    if not body:
                        break
                else:
                    body = at + 4
                    if body > end:
                        break
                    size = _i32.unpack_from(view, at)[0]
                if not 0 <= size <= self._limits.string_bytes:
                    self._refuse_string(size)
                at = body + size
                if at > end:
                    needed = at
                    break
                if spec is not None:
                    value = bytes(view[body:at]) if spec == TType.BINARY else self._text(frame, view[body:at])
            elif kind > 0:
                if at + kind > end:
                    needed = at + kind
                    break
                if spec is not None:
                    value = _compact_number(wire, view, at) if is_compact else _NUMBERS[wire](view, at)[0]
                at += kind
            elif kind == _VARINT:
                zigzag, after = read_varint(view, at, end, I64_VARINT)
                if not after:
                    break
                at = after
                if spec is not None:
                    value = (zigzag >> 1) ^ -(zigzag & 1)
                    if zigzag >> _BITS[wire]:
                        self._blame(f"a number of more than {_BITS[wire]} bits")
            elif kind == _BAD:
                raise ProtocolError("bad_type", f"type {wire}")
            else:
                if len(stack) + 1 > self._limits.depth:
                    most = self._limits.depth
                    raise ProtocolError("too_deep", f"more than {most} nested structs and containers (--max-depth)")
                inner, after = self._begin(kind, spec, view, at, end)
                if inner is None:
                    break
                if frame.left < 0:
                    self._count(1)
                    frame.number = number
                pos, frame = after, inner
                stack.append(frame)
                continue
            if frame.left < 0:
                self._count(1)
                frame.number, pos = number, at
                if spec is not None:
                    frame.put(value)
            else:
                pos = at
                frame.put(value)
        else:
            self.is_paused = True
        if max(pos, needed) > self.limit or (end >= self.limit and not self.is_paused):
            raise endless(self._beyond, self._limits)
        self.pos, self.needed = pos, needed
        return False

    def _begin(self, kind: int, spec: Any, view: memoryview, at: int, end: int) -> tuple[_Frame | None, int]:
        """A struct or a container begins there: its frame, and where its first part is; none while more is needed."""
        if kind == _STRUCT:
            return _Frame(-1, None if spec is None else spec.cls(), spec), at
        is_map = kind == _MAP
        if self._is_compact:
            size, key, value, at = _compact_container(view, at, end, is_map)
            if not at:
                return None, 0
            key, value = (1 if one == 2 else one for one in (key, value))
        else:
            after = at + 5 + is_map
            if after > end:
                return None, 0
            size, key, value, at = _i32.unpack_from(view, after - 4)[0], view[at], view[after - 5], after
        if size < 0:
            raise ProtocolError("negative_size", f"a container of {size} elements")
        self._count(size)
        kinds = _COMPACT_KINDS if self._is_compact else _BINARY_KINDS
        if size and _BAD in (kinds[key], kinds[value]):
            raise ProtocolError("bad_type", f"a container of types {key}, {value}")
        if spec is not None and size and spec.wires != (key, value):
            if is_map:
                self._blame(f"a map of types {key}, {value}, not {spec.wires[0]}, {spec.wires[1]}")
            else:
                self._blame(f"a list of type {value}, not {spec.wires[0]}")
            spec = None
        # NOTE: of a map the number of parts to come is even before a key, odd before a value.
        left = 2 * size if is_map else size
        if spec is None:
            if size and kinds[key] > 0 and kinds[value] > 0:
                at, left = at + size * (kinds[key] + kinds[value] if is_map else kinds[value]), 0
                if at > self.limit:
                    raise endless(self._beyond, self._limits)
            return _Frame(left, None, None, (key, value)), at
        return _Frame(left, spec.make(), None, (key, value), spec.specs), at

    def _field(self, frame: _Frame, number: int, wire: int) -> Any:
        """The spec of a field's value; none where nobody wants it."""
        frame.name = ""
        field = None if frame.struct is None else frame.struct.fields.get(number)
        if field is None or self.error is not None:
            return None
        expected, frame.name, spec = field
        if wire != expected and (wire, expected, self._is_compact) != (2, 1, True):
            self._blame(f"{frame.struct.cls.__name__}.{frame.name} is of type {wire}, not {expected}")  # type: ignore[union-attr]
            return None
        return spec

    def _end(self, frame: _Frame) -> None:
        """A struct is over."""
        if frame.struct is not None:
            for name in frame.struct.required:
                if getattr(frame.made, name) is None:
                    self._blame(f"{frame.struct.cls.__name__}.{name} is missing")

    def _text(self, frame: _Frame, data: memoryview) -> str:
        self.text_bytes += len(data)
        most = self._limits.text_bytes
        if self.text_bytes > most:
            text = f"texts of {self.text_bytes} bytes or more; the limit is {most} (--max-text-bytes)"
            self.error = self.error or TextTooLargeError(text)
            return ""
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            while frame.struct is None:  # in a list or map
                frame = self._stack[self._stack.index(frame) - 1]
            self._blame(f"{frame.struct.cls.__name__}.{frame.name} is not UTF-8")
            return ""

    def _blame(self, text: str) -> None:
        self.error = self.error or BadArgumentsError(text)

    def _count(self, items: int) -> None:
        self.items += items
        if self.items > self._limits.items:
            limit = self._limits.items
            raise ProtocolError("too_large", f"more than {limit} fields and elements in a message (--max-items)")

    def _refuse_string(self, size: int) -> NoReturn:
        if size < 0:
            raise ProtocolError("negative_size", f"a string of {size} bytes")
        limit = self._limits.string_bytes
        raise ProtocolError("too_large", f"a string of {size} bytes; the limit is {limit} (--max-message-bytes)")


def _compact_number(wire: int, view: memoryview, at: int) -> Any:
    if wire == 7:
        return _little_double.unpack_from(view, at)[0]
    return view[at] == 1 if wire < 3 else (view[at] ^ 0x80) - 0x80


def _compact_container(view: memoryview, at: int, end: int, is_map: bool) -> tuple[int, int, int, int]:
    """Size, types of key and value (of a list: the same twice), and the position after the header, 0 if it goes on."""
    if is_map:
        size, at = read_size(view, at, end)
        if size == 0 or not at:
            return 0, 0, 0, at
        if at >= end:
            return 0, 0, 0, 0
        return size, view[at] >> 4, view[at] & 15, at + 1
    if at >= end:
        return 0, 0, 0, 0
    head = view[at]
    if head < 0xF0:
        return head >> 4, head & 15, head & 15, at + 1
    size, at = read_size(view, at + 1, end)
    return size, head & 15, head & 15, at


class ThriftReader:
    """Cuts a byte stream into messages. One per connection.

    ``args_of(name, is_compact)`` gives what the arguments of a method look like; none for one that there is not.
    """

    awaits_invitation = is_over = False

    def __init__(self, limits: Limits, args_of: Callable[[str, bool], _Struct | None]) -> None:
        self._limits, self._args_of = limits, args_of
        self._framing: Framing | None = None
        self._buffer: bytes | bytearray = b""
        self._at = 0  # the first byte in it that belongs to no message that was returned
        self._header: Header | None = None  # of the unfinished message
        self._walker: Walker | None = None
        self._broken: tuple[str, str] | None = None  # not the exception: its traceback would keep the buffers

    @property
    def pending_bytes(self) -> int:
        """Bytes held here that belong to no message that was returned."""
        return len(self._buffer) - self._at

    @property
    def is_paused(self) -> bool:
        """Whether the last `next` ended within a message of many items: another one goes on."""
        return self._walker is not None and self._walker.is_paused

    @property
    def request(self) -> Message | None:
        """The unfinished message, once its header has arrived: an error can be answered by name."""
        if self._header is None or self._framing is None:
            return None
        name, is_oneway, seqid, _ = self._header
        return Message(name, is_oneway, seqid, self._framing)

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        if self._broken is not None:
            return
        if self._at == len(self._buffer):
            self._buffer, self._at = data, 0
        elif self._header is None:
            self._buffer, self._at = bytes(memoryview(self._buffer)[self._at :]) + data, 0
        else:  # NOTE: positions in the message stay what they are.
            if isinstance(self._buffer, bytes):
                self._buffer = bytearray(self._buffer)
            self._buffer += data

    def next(self) -> Message | None:
        """The next message; ``None`` if it is not whole. Raises `ProtocolError`, from then on each time."""
        if self._broken is not None:
            raise ProtocolError(*self._broken)
        end = len(self._buffer)
        if self._at == end or (self._walker is not None and self._walker.needed > end):
            return None
        with memoryview(self._buffer) as view:
            try:
                return self._next(view, end)
            except ProtocolError as error:
                broken = error
        self.abandon(broken)
        raise ProtocolError(broken.kind, broken.detail)

    def abandon(self, error: ProtocolError) -> None:
        """Give up the unfinished message, whatever it holds; ``error`` is what a further `next` raises."""
        if self._header is None:
            with memoryview(self._buffer) as view, suppress(ProtocolError):
                self._begin(view, len(view))  # so that the error is answered by name
        self._broken = error.kind, error.detail
        self._buffer, self._at, self._walker = b"", 0, None

    def _next(self, view: memoryview, end: int) -> Message | None:
        walker = self._walker
        if walker is None:
            walker = self._begin(view, end)
            if walker is None:
                return None
        if not walker.walk(view, end):
            return None
        framing, header = self._framing, self._header
        assert framing is not None
        assert header is not None
        if framing.framed and walker.pos != walker.limit:
            raise ProtocolError("bad_frame", "the frame goes on after its message")
        message = Message(header[0], header[1], header[2], framing)
        message.args, message.error = walker.args, walker.error
        message.size = walker.pos - header[3] + TEXT_BYTES * walker.text_bytes + ITEM_BYTES * walker.items
        self._at, self._header, self._walker = walker.pos, None, None
        return message

    def _begin(self, view: memoryview, end: int) -> Walker | None:
        """Read what precedes the arguments; None if it is not all there yet."""
        start = self._at
        framing = self._framing = self._framing or detect(view, start, end)
        if framing is None:
            return None
        size, limit, beyond = 0, start + self._limits.message_bytes, "too_large"
        if framing.framed:
            if end - start < 4:
                return None
            start += 4
            size = _i32.unpack_from(view, start - 4)[0]
            if size <= 0:
                raise ProtocolError("negative_size" if size else "bad_frame", f"a frame of {size} bytes")
            limit, beyond = start + size, "bad_frame"
        header = self._header = read_header(framing.protocol, view, start, min(end, limit))
        if size > self._limits.message_bytes:
            if header is None and end - start < HEADER_BYTES:
                return None  # with its name and number, the refusal can be answered
            most = self._limits.message_bytes
            raise ProtocolError("too_large", f"a frame of {size} bytes; the limit is {most} (--max-message-bytes)")
        if header is None:
            if end >= limit:
                raise endless(beyond, self._limits)
            return None
        is_compact = framing.protocol == "compact"
        struct = self._args_of(header[0], is_compact)
        self._walker = Walker(self._limits, is_compact, struct, header[3], limit, beyond)
        return self._walker


# -- answers --------------------------------------------------------------------------------------------------------


def _encode(message: Message, type_: int, payload: Any) -> bytes:
    try:
        return _written(message, type_, payload)
    except (UnicodeEncodeError, TDecodeException):  # NOTE: the latter is how the Cython protocol says the former
        return _written(message, type_, _sendable(payload))


def _sendable(value: Any) -> Any:
    """A copy without halves of surrogate pairs, which UTF-8 has not; thriftpy2 would refuse all of an answer."""
    if isinstance(value, str):
        return answers.utf8_text(value).decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(held) for key, held in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_sendable(element) for element in value]
    if hasattr(value, "thrift_spec"):
        value = copy.copy(value)
        for _, name, *_ in value.thrift_spec.values():
            setattr(value, name, _sendable(getattr(value, name)))
    return value


def _written(message: Message, type_: int, payload: Any) -> bytes:
    framed, protocol_name = message.framing
    transport = _MemoryBuffer()
    seqid = message.seqid
    if protocol_name == "compact":
        protocol = TCompactProtocol(transport)
        seqid &= 0xFFFFFFFF  # TRAP: thriftpy2 writes negative numbers for ever
    else:
        protocol = _BinaryWriter(transport, strict_write=protocol_name == "binary")
    protocol.write_message_begin(message.name, type_, seqid)
    protocol.write_struct(payload)
    body: bytes = transport.getvalue()
    return _u32.pack(len(body)) + body if framed else body
