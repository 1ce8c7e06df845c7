"""Thrift: bytes become messages with their arguments, and results become bytes. No sockets, no threads, no clock.

A client speaks one of the framings (buffered, which puts nothing around a message, or framed) and one of the protocols
(binary, binary without a version as old clients write it, compact); the first bytes tell which.

One walk over a message bounds every size in it, finds its end and makes its arguments. thriftpy2 only writes: reading,
it takes a map's elements for what was declared, whatever their type on the wire, so that unchecked lengths reach its C
code; and it does not notice missing required fields.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple

import thriftpy2.transport
from thriftpy2.protocol import TBinaryProtocol, TCompactProtocol
from thriftpy2.thrift import TApplicationException, TDecodeException, TType

from torchpipe_py.errors import InvalidRequest
from torchpipe_py.wire import answers
from torchpipe_server.wire.errors import ProtocolError

CALL, REPLY, EXCEPTION, ONEWAY = 1, 2, 3, 4
NAME_BYTES = 255  # of a method's name
SLICE_STEPS = 256  # values of one walk before it pauses: 0.2 to 0.5 ms
I32_VARINT, I64_VARINT = 5, 10  # bytes at most
TEXT_BYTES = 4  # that a byte of a text takes as Python keeps it, at most
ITEM_BYTES = 256  # that an item takes besides its contents: its part of an object, of a tensor or of a request

_u32, _i32, _i16 = Struct(">I"), Struct(">i"), Struct(">h")
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


# -- what a method's arguments look like ----------------------------------------------------------------------------

_WIRE_OF_COMPACT = {2: 1, 3: 3, 4: 7, 6: 4, 8: 5, 10: 6, 11: 8, 12: 12, 13: 11, 14: 10, 15: 9, TType.BINARY: 8}


class _Struct:
    """A class made by thriftpy2; ``fields[number]`` is (type on the wire, name, spec of the value, its name)."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.fields: dict[int, tuple[int, str, Any, str]] = {}
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
                found.fields[number] = wire, field[1], spec, f"{cls.__name__}.{field[1]}"
        return found

    def _value(self, ttype: int, inner: Any) -> tuple[int, Any]:
        """A value's type on the wire, and its spec."""
        spec: Any = ttype
        if ttype == TType.STRUCT:
            spec = self.struct(inner)
        elif ttype in (TType.LIST, TType.SET, TType.MAP):
            kinds = inner if ttype == TType.MAP else (inner, inner)
            wires, specs = zip(
                *(self._value(*(kind if isinstance(kind, tuple) else (kind, None))) for kind in kinds), strict=True
            )
            spec = _Container(dict if ttype == TType.MAP else list, wires, specs)
        if self._is_compact:
            return _WIRE_OF_COMPACT[ttype], spec
        return TType.STRING if ttype == TType.BINARY else ttype, spec


# -- the walk -------------------------------------------------------------------------------------------------------

# What a type on the wire is: a size in bytes where that is fixed, else one of these.
_BAD, _VARINT, _STRING, _STRUCT, _MAP, _LIST = range(-1, -7, -1)
_BINARY = {2: 1, 3: 1, 4: 8, 6: 2, 8: 4, 10: 8, 11: _STRING, 12: _STRUCT, 13: _MAP, 14: _LIST, 15: _LIST}
_COMPACT = {
    1: 1, 2: 1, 3: 1, 4: _VARINT, 5: _VARINT, 6: _VARINT, 7: 8, 8: _STRING, 9: _LIST, 10: _LIST, 11: _MAP, 12: _STRUCT,
}  # fmt: skip
_KINDS_OF_BINARY = [_BINARY.get(wire, _BAD) for wire in range(256)]
_KINDS_OF_COMPACT = [_COMPACT.get(wire, _BAD) for wire in range(16)]
_BITS = {4: 16, 5: 32, 6: 64}  # of the compact protocol's integers
_NUMBERS = {
    wire: Struct(form).unpack_from for wire, form in {2: ">?", 3: ">b", 4: ">d", 6: ">h", 8: ">i", 10: ">q"}.items()
}
_NUMBERS_OF_COMPACT = {wire: Struct(form).unpack_from for wire, form in {3: "<b", 7: "<d"}.items()}

Walk = Generator[int, None, Any]
"""A part of the walk over a message. It yields how long the buffer must be for it to go on, 0 where it only pauses."""


def detect(buffer: bytes | bytearray) -> Framing | None:
    """What a stream that begins so is written in; ``None`` while it may be several. Raises `ProtocolError`."""
    start = bytes(buffer[:5])
    if start.startswith(b"\x82"):
        return Framing(False, "compact")
    if start.startswith(b"\x80\x01"):
        return Framing(False, "binary")
    if start[:1] >= b"\x80" and start != b"\x80":
        raise ProtocolError("not_thrift", f"a stream that begins with {start[0]:#04x}")
    if start.startswith(bytes(4)):
        raise ProtocolError("not_thrift", "a stream that begins with a zero length")
    if len(start) < 5:
        return None
    length, fifth = _u32.unpack_from(start)[0], start[4]
    framed = {0x80: "binary", 0x82: "compact", 0x00: "binary_old"}  # the last is of the length of a name
    if fifth in framed:
        return Framing(True, framed[fifth])
    if length <= NAME_BYTES and 0x20 < fifth < 0x7F:
        return Framing(False, "binary_old")
    raise ProtocolError("not_thrift", f"a stream that begins with {start!r}")


class ThriftReader:
    """Cuts a byte stream into messages. One per connection.

    ``args_of(name, is_compact)`` gives what the arguments of a method look like; none for one that there is not.
    The walk over a message is a generator, which goes on where it was when more bytes have come.
    """

    awaits_invitation = is_over = False

    def __init__(self, limits: Limits, args_of: Callable[[str, bool], _Struct | None]) -> None:
        self._limits, self._args_of = limits, args_of
        self._framing: Framing | None = None
        self._is_compact = False
        self._buffer: bytes | bytearray = b""
        self._start = 0  # the first byte in it that belongs to no message that was returned
        self._at = 0  # where the walk is
        self._end = 0  # of what there is of the message
        self._limit = sys.maxsize  # where the message must have ended
        self._items = self._text_bytes = self._steps = 0
        self._error: Exception | None = None  # what is wrong with the arguments, first
        self._walk: Walk | None = None
        self._needed = 0  # bytes that the buffer must have before the walk can go on
        self._broken: tuple[str, str] | None = None  # not the exception: its traceback would keep the buffers
        self.request: Message | None = None
        """The unfinished message, once its header has arrived: an error can be answered by name."""
        self.is_paused = False
        """Whether the last `next` ended within a message of many items: another one goes on."""

    @property
    def pending_bytes(self) -> int:
        """Bytes held here that belong to no message that was returned."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        if self._broken is not None:
            return
        if self._walk is None:
            self._buffer, self._start = self._buffer[self._start :] + data if self.pending_bytes else data, 0
        else:  # NOTE: positions in the message stay what they are.
            if isinstance(self._buffer, bytes):
                self._buffer = bytearray(self._buffer)
            self._buffer += data

    def next(self) -> Message | None:
        """The next message; ``None`` if it is not whole. Raises `ProtocolError`, from then on each time."""
        if self._broken is not None:
            raise ProtocolError(*self._broken)
        size = len(self._buffer)
        if self._start == size or self._needed > size:
            return None
        if self._walk is None:
            self._walk, self._limit = self._message(), sys.maxsize
        self._end = min(size, self._limit)
        try:
            self._needed = next(self._walk)
        except StopIteration as stop:
            message: Message = stop.value
            self._start, self._walk, self._needed, self.request, self.is_paused = self._at, None, 0, None, False
            return message
        except ProtocolError as error:
            broken = error
        except RecursionError:
            broken = ProtocolError("too_deep", "more nested structs and containers than this process can follow")
        else:
            self.is_paused = not self._needed
            return None
        self.abandon(broken)
        raise ProtocolError(*self._broken)  # type: ignore[misc]

    def abandon(self, error: ProtocolError) -> None:
        """Give up the unfinished message, whatever it holds; ``error`` is what a further `next` raises."""
        if self._walk is None and self.pending_bytes:
            with suppress(ProtocolError):  # so that the error is answered by name
                self.request = self.next() or self.request
        self._broken = error.kind, error.detail
        self._buffer, self._start, self._walk, self.is_paused = b"", 0, None, False

    # -- parts of the walk ------------------------------------------------------------------------------------------

    def _message(self) -> Walk:
        while self._framing is None:
            self._framing = detect(self._buffer[self._start : self._start + 5])
            if self._framing is None:
                yield len(self._buffer) + 1
        framing, limits = self._framing, self._limits
        self._is_compact = framing.protocol == "compact"
        self._at, self._items, self._text_bytes, self._error = self._start, 0, 0, None
        size = 0
        if framing.framed:
            yield from self._wait(4)
            size = _i32.unpack_from(self._buffer, self._at)[0]
            if size <= 0:
                raise ProtocolError("negative_size" if size else "bad_frame", f"a frame of {size} bytes")
            self._at += 4
        self._limit = self._at + (size or limits.message_bytes)
        self._end = min(self._end, self._limit)
        # A frame that is too large is refused once its header has come: with name and number it can be answered.
        message = self.request = yield from self._header(framing)
        if size > limits.message_bytes:
            text = f"a frame of {size} bytes; the limit is {limits.message_bytes} (--max-message-bytes)"
            raise ProtocolError("too_large", text)
        begin = self._at
        message.args = yield from self._struct(self._args_of(message.name, self._is_compact), 1)
        if framing.framed and self._at != self._limit:
            raise ProtocolError("bad_frame", "the frame goes on after its message")
        message.error = self._error
        message.size = self._at - begin + TEXT_BYTES * self._text_bytes + ITEM_BYTES * self._items
        return message

    def _header(self, framing: Framing) -> Walk:
        """What precedes the arguments, as a `Message`."""
        kind = 0
        if framing.protocol == "compact":
            yield from self._wait(2)
            version, head = self._buffer[self._at], self._buffer[self._at + 1]
            if version != 0x82 or head & 0x1F != 1:
                raise ProtocolError("bad_version", f"a message that begins with {version:#04x}, {head:#04x}")
            kind = head >> 5
            self._at += 2
            seqid = yield from self._varint(I32_VARINT)
            if seqid >= 2**32:
                raise ProtocolError("bad_varint", "a sequence number of more than 32 bits")
            seqid -= (seqid >= 2**31) << 32
        elif framing.protocol == "binary":
            yield from self._wait(4)
            version = _u32.unpack_from(self._buffer, self._at)[0]
            if version >> 16 != 0x8001:
                raise ProtocolError("bad_version", f"a message that begins with {version:#010x}")
            kind = version & 0xFF
            self._at += 4
        size = yield from self._size()
        if not 0 < size <= NAME_BYTES:
            raise ProtocolError("bad_message", f"a method's name of {size} bytes")
        yield from self._wait(size)
        try:
            name = str(self._buffer[self._at : self._at + size], "utf-8")
        except UnicodeDecodeError:
            raise ProtocolError("bad_message", "a method's name is not UTF-8") from None
        self._at += size
        if framing.protocol == "binary_old":
            yield from self._wait(1)
            kind = self._buffer[self._at]
            self._at += 1
        if framing.protocol != "compact":
            yield from self._wait(4)
            seqid = _i32.unpack_from(self._buffer, self._at)[0]
            self._at += 4
        if kind not in (CALL, ONEWAY):
            raise ProtocolError("bad_message", f"a message of type {kind} is no call")
        return Message(name, kind == ONEWAY, seqid, framing)

    def _struct(self, spec: _Struct | None, depth: int) -> Walk:
        """An object of the class; ``None`` where nobody wants it."""
        made = None if spec is None else spec.cls()
        is_compact, number = self._is_compact, 0
        while True:
            if self._at >= self._end:
                yield from self._wait(1)
            head = self._buffer[self._at]
            wire = head & 15 if is_compact else head
            if not wire:
                self._at += 1
                break
            if not is_compact:
                if self._at + 3 > self._end:
                    yield from self._wait(3)
                number = _i16.unpack_from(self._buffer, self._at + 1)[0]
                self._at += 3
            else:
                self._at += 1
                if head >= 16:
                    number += head >> 4
                else:
                    zigzag = yield from self._varint(I32_VARINT)
                    number = (zigzag >> 1) ^ -(zigzag & 1)
            self._count(1)
            field = spec.fields.get(number) if spec is not None and self._error is None else None
            if field is None:
                name, inner, place = "", None, ""
            else:
                expected, name, inner, place = field
                if wire != expected and (wire, expected, is_compact) != (2, 1, True):
                    self._blame(f"{place} is of type {wire}, not {expected}")
                    inner = None
            if is_compact and wire < 3:  # the type of a bool field is its value
                value: Any = wire == 1
            else:
                value = yield from self._value(wire, inner, depth, place)
            if inner is not None:
                setattr(made, name, value)
        if spec is not None:
            for name in spec.required:
                if getattr(made, name) is None:
                    self._blame(f"{spec.cls.__name__}.{name} is missing")
        return made

    def _value(self, wire: int, spec: Any, depth: int, place: str) -> Walk:
        """A value of this type on the wire, as its spec says; ``None`` where there is none, since nobody wants it."""
        self._steps += 1
        if not self._steps % SLICE_STEPS:
            yield 0
        kind = (_KINDS_OF_COMPACT if self._is_compact else _KINDS_OF_BINARY)[wire]
        if kind > 0:
            if self._at + kind > self._end:
                yield from self._wait(kind)
            at, self._at = self._at, self._at + kind
            if spec is None:
                return None
            if self._is_compact and wire < 3:
                return self._buffer[at] == 1
            return (_NUMBERS_OF_COMPACT if self._is_compact else _NUMBERS)[wire](self._buffer, at)[0]
        if kind == _STRING:
            size = yield from self._size()
            most = self._limits.string_bytes
            if size > most:
                raise ProtocolError("too_large", f"a string of {size} bytes; the limit is {most} (--max-message-bytes)")
            if self._at + size > self._end:
                yield from self._wait(size)
            at, self._at = self._at, self._at + size
            if spec is None:
                return None
            data = bytes(memoryview(self._buffer)[at : at + size])
            return data if spec == TType.BINARY else self._text(data, place)
        if kind == _VARINT:
            zigzag = yield from self._varint(I64_VARINT)
            if spec is not None and zigzag >> _BITS[wire]:
                self._blame(f"{place} is a number of more than {_BITS[wire]} bits")
            return (zigzag >> 1) ^ -(zigzag & 1)
        if kind == _BAD:
            raise ProtocolError("bad_type", f"type {wire}")
        most = self._limits.depth
        if depth >= most:
            raise ProtocolError("too_deep", f"more than {most} nested structs and containers (--max-depth)")
        if kind == _STRUCT:
            return (yield from self._struct(spec, depth + 1))
        return (yield from self._container(kind == _MAP, spec, depth + 1, place))

    def _container(self, is_map: bool, spec: _Container | None, depth: int, place: str) -> Walk:
        """A list or a dict; ``None`` where nobody wants it."""
        if not self._is_compact:
            yield from self._wait(1 + is_map)
            wires = self._buffer[self._at], self._buffer[self._at + is_map]
            self._at += 1 + is_map
            size = yield from self._size()
            kinds = _KINDS_OF_BINARY
        else:
            size, wires, kinds = 0, (0, 0), _KINDS_OF_COMPACT
            if is_map:
                size = yield from self._size()
            if size or not is_map:
                yield from self._wait(1)
                head = self._buffer[self._at]
                self._at += 1
                wires = (head >> 4 if is_map else head & 15), head & 15
                if not is_map:
                    size = head >> 4 if head < 0xF0 else (yield from self._size())
            wires = wires[0] - (wires[0] == 2), wires[1] - (wires[1] == 2)  # bools have two types
        self._count(size)
        key_kind, kind = kinds[wires[0]], kinds[wires[1]]
        if size and _BAD in (key_kind, kind):
            raise ProtocolError("bad_type", f"a container of types {wires[0]}, {wires[1]}")
        if spec is not None and size and spec.wires != wires:
            what = f"a map of types {wires[0]}, {wires[1]}" if is_map else f"a list of type {wires[1]}"
            self._blame(f"{place} is {what}, not {', '.join(map(str, spec.wires[not is_map :]))}")
            spec = None
        if spec is None and key_kind > 0 and kind > 0:
            skipped = size * (key_kind + kind if is_map else kind)
            yield from self._wait(skipped)
            self._at += skipped
            return None
        key_spec, value_spec = (None, None) if spec is None else spec.specs
        made = None if spec is None else spec.make()
        for _ in range(size):
            key = (yield from self._value(wires[0], key_spec, depth, place)) if is_map else None
            value = yield from self._value(wires[1], value_spec, depth, place)
            if made is None:
                continue
            if is_map:
                made[key] = value
            else:
                made.append(value)
        return made

    # -- small parts ------------------------------------------------------------------------------------------------

    def _wait(self, count: int) -> Walk:
        """Go on when so many bytes are there."""
        while (until := self._at + count) > self._end:
            if until > self._limit:
                if self._framing is not None and self._framing.framed:
                    raise ProtocolError("bad_frame", "the message goes on after the end of its frame")
                most = self._limits.message_bytes
                raise ProtocolError("too_large", f"the message has more than {most} bytes (--max-message-bytes)")
            yield until

    def _varint(self, most: int) -> Walk:
        """An unsigned number of so many bytes at most."""
        value = 0
        for shift in range(0, 7 * most, 7):
            if self._at >= self._end:
                yield from self._wait(1)
            byte = self._buffer[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ProtocolError("bad_varint", f"a number is longer than {most} bytes")

    def _size(self) -> Walk:
        """A signed 32-bit size."""
        if self._is_compact:
            size: int = yield from self._varint(I32_VARINT)
            if size >= 2**31:
                raise ProtocolError("negative_size" if size < 2**32 else "bad_varint", f"a size of {size}")
            return size
        if self._at + 4 > self._end:
            yield from self._wait(4)
        size = _i32.unpack_from(self._buffer, self._at)[0]
        self._at += 4
        if size < 0:
            raise ProtocolError("negative_size", f"a size of {size}")
        return size

    def _text(self, data: bytes, place: str) -> str:
        self._text_bytes += len(data)
        most = self._limits.text_bytes
        if self._text_bytes > most:
            text = f"texts of {self._text_bytes} bytes or more; the limit is {most} (--max-text-bytes)"
            self._error = self._error or TextTooLargeError(text)
            return ""
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._blame(f"{place} is not UTF-8")
            return ""

    def _blame(self, text: str) -> None:
        self._error = self._error or BadArgumentsError(text)

    def _count(self, items: int) -> None:
        self._items += items
        most = self._limits.items
        if self._items > most:
            raise ProtocolError("too_large", f"more than {most} fields and elements in a message (--max-items)")


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
