"""Thrift: bytes become messages with their arguments. No sockets, no threads, no clock.

One pass over a message bounds every size, finds the end and builds the arguments. thriftpy2 is only used for writing:
its reader assumes the declared types of a map's elements, whatever their type on the wire, so that unchecked lengths
reach its C code; and it does not notice missing required fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from struct import Struct
from typing import Any

from thriftpy2.thrift import TType

from torchpipe_py import InvalidRequest
from torchpipe_server.options import Options
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.thrift import CALL, NAME_BYTES, ONEWAY, Framing, Message, detect

SLICE_STEPS = 256  # values before the walk pauses, after 0.2 to 0.5 ms
I32_VARINT, I64_VARINT = 5, 10  # bytes at most
TEXT_BYTES = 4  # of memory for each byte of text, at most
ITEM_BYTES = 256  # of memory for each item besides its content

_u8, _u16, _u32, _i32, _i16 = (Struct(f">{form}") for form in "BHIih")

_BOOL, _STRING, _STRUCT, _MAP, _BYTES = TType.BOOL, TType.STRING, TType.STRUCT, TType.MAP, TType.BINARY

# Values of a fixed size, by type: their bytes and a function that reads one.
_Fixed = Mapping[int, "tuple[int, Callable[[Any, int], Any]]"]
_BINARY: _Fixed = {
    ttype: (Struct(form).size, Struct(form).unpack_from)
    for ttype, form in (
        (TType.BOOL, ">?"), (TType.BYTE, ">b"), (TType.DOUBLE, ">d"), (TType.I16, ">h"), (TType.I32, ">i"),
        (TType.I64, ">q"),
    )
}  # fmt: skip
_COMPACT: _Fixed = {
    TType.BOOL: (1, lambda buffer, at: (buffer[at] == 1,)),
    TType.BYTE: (1, Struct("<b").unpack_from),
    TType.DOUBLE: (8, Struct("<d").unpack_from),
}
_BITS = {TType.I16: 16, TType.I32: 32, TType.I64: 64}  # of the compact protocol's integers
# The types of the compact protocol, in order; two are bools.
_OF_COMPACT = [
    TType.STOP, TType.BOOL, TType.BOOL, TType.BYTE, TType.I16, TType.I32, TType.I64, TType.DOUBLE, TType.STRING,
    TType.LIST, TType.SET, TType.MAP, TType.STRUCT, -1, -1, -1,
]  # fmt: skip
_VARYING = frozenset({TType.STRING, TType.STRUCT, TType.MAP, TType.SET, TType.LIST})

Walk = Generator[int, None, Any]
"""A part of the walk over a message. It yields the length that the buffer must have to continue, or 0 to pause."""

Spec = Any
"""The declared type of a value, in thriftpy2's form: a type, or a type with a class, a spec or a pair of specs."""


class BadArgumentsError(Exception):
    """A complete message that does not fit the method's arguments; the stream is intact."""


class TextTooLargeError(InvalidRequest):
    """Text beyond ``--max-text-bytes``: decoded, it would take up to four times its bytes."""

    code = "too_large"


class ThriftReader:
    """Splits the byte stream of one connection into messages.

    ``limits`` bound a message: ``max_message_bytes``, ``max_text_bytes``, ``max_items`` and ``max_depth``.
    ``args_of(name)`` returns the class of a method's arguments, None for an unknown method. The walk over a message is
    a generator, which continues when more bytes have arrived.
    """

    awaits_invitation = is_over = False

    def __init__(self, limits: Options, args_of: Callable[[str], type | None]) -> None:
        self._limits, self._args_of = limits, args_of
        self._framing: Framing | None = None
        self._is_compact, self._fixed = False, _BINARY
        self._buffer: bytes | bytearray = b""
        self._start = 0  # the first byte after the last returned message
        self._at = 0  # the position of the walk
        self._end = 0  # of the available bytes of the message
        self._limit = sys.maxsize  # the last possible end of the message
        self._items = self._text_bytes = self._steps = 0
        self._error: Exception | None = None  # the first error in the arguments
        self._walk: Walk | None = None
        self._needed = 0  # length of the buffer with which the walk can continue
        self._broken: tuple[str, str] | None = None  # not the exception, whose traceback would keep the buffers
        self.request: Message | None = None
        """The unfinished message, once its header has arrived; an error can then be answered."""
        self.is_paused = False
        """Whether the last `next` paused within a long message; the next call continues."""

    @property
    def pending_bytes(self) -> int:
        """Size of the buffered messages that were not returned yet."""
        return len(self._buffer) - self._start

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._broken is not None:
            return
        if self._walk is None:
            self._buffer, self._start = self._buffer[self._start :] + data if self.pending_bytes else data, 0
        else:  # NOTE: positions in the message must stay valid
            if isinstance(self._buffer, bytes):
                self._buffer = bytearray(self._buffer)
            self._buffer += data

    def next(self) -> Message | None:
        """The next message; ``None`` if it is incomplete. After a first `ProtocolError`, raises it every time."""
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
            self._walk, self._needed, self.request, self.is_paused, self._error = None, 0, None, False, None
            self._start = self._at
            if self._start == size:  # an idle connection keeps no memory of its last message
                self._buffer, self._start = b"", 0
            message: Message = stop.value
            return message
        except ProtocolError as error:
            broken = error
        else:
            self.is_paused = not self._needed
            return None
        self.abandon(broken)
        raise ProtocolError(*self._broken)  # type: ignore[misc]

    def abandon(self, error: ProtocolError) -> None:
        """Give up the unfinished message; further calls of `next` raise ``error``."""
        if self._walk is None and self.pending_bytes:
            with suppress(ProtocolError):  # read the name, so that the error can be answered
                self.request = self.next() or self.request
        self._broken = error.kind, error.detail
        self._buffer, self._start, self._walk, self.is_paused = b"", 0, None, False

    # -- parts of the walk ------------------------------------------------------------------------------------------

    def _message(self) -> Walk:
        while self._framing is None:
            self._framing = detect(self._buffer[self._start : self._start + 5])
            if self._framing is None:
                yield len(self._buffer) + 1
            elif self._framing.protocol == "compact":
                self._is_compact, self._fixed = True, _COMPACT
        framing, limits = self._framing, self._limits
        self._at, self._items, self._text_bytes, self._error = self._start, 0, 0, None
        size = 0
        if framing.framed:
            size = yield from self._number(_i32)
            if size <= 0:
                raise ProtocolError("negative_size" if size else "bad_frame", f"a frame of {size} bytes")
        self._limit = self._at + (size or limits.max_message_bytes)
        self._end = min(self._end, self._limit)
        # Refuse a too large frame only after its header: the answer needs name and number.
        message = self.request = yield from self._header(framing)
        if size > limits.max_message_bytes:
            text = f"a frame of {size} bytes; the limit is {limits.max_message_bytes} (--max-message-bytes)"
            raise ProtocolError("too_large", text)
        begin, cls = self._at, self._args_of(message.name)
        message.args = yield from self._struct(cls, 1)
        if framing.framed and self._at != self._limit:
            raise ProtocolError("bad_frame", "the frame has bytes after its message")
        message.error = self._error
        message.size = self._at - begin + TEXT_BYTES * self._text_bytes + ITEM_BYTES * self._items
        return message

    def _header(self, framing: Framing) -> Walk:
        """The header before the arguments, as a `Message`."""
        kind = seqid = 0
        if framing.protocol == "compact":
            version = yield from self._number(_u16)
            if version >> 8 != 0x82 or version & 0x1F != 1:
                raise ProtocolError("bad_version", f"a message that begins with {version:#06x}")
            kind = version >> 5 & 7
            seqid = yield from self._varint(I32_VARINT)
            seqid = (seqid & 0xFFFFFFFF) - ((seqid & 0x80000000) << 1)
        elif framing.protocol == "binary":
            version = yield from self._number(_u32)
            if version >> 16 != 0x8001:
                raise ProtocolError("bad_version", f"a message that begins with {version:#010x}")
            kind = version & 0xFF
        size = yield from self._size()
        if not 0 < size <= NAME_BYTES:
            raise ProtocolError("bad_message", f"a method's name of {size} bytes")
        try:
            name = (yield from self._bytes(size)).decode()
        except UnicodeDecodeError:
            raise ProtocolError("bad_message", "a method's name is not UTF-8") from None
        if framing.protocol == "binary_old":
            kind = yield from self._number(_u8)
        if framing.protocol != "compact":
            seqid = yield from self._number(_i32)
        if kind not in (CALL, ONEWAY):
            raise ProtocolError("bad_message", f"a message of type {kind} is not a call")
        return Message(name, kind == ONEWAY, seqid, framing)

    def _struct(self, cls: Any, depth: int) -> Walk:
        """An object of ``cls``; ``None``, skipping it, without a class."""
        made, (fields, required) = (None, _SKIPPED) if cls is None else (cls(), _declared(cls))
        is_compact, number = self._is_compact, 0
        while True:
            if self._at >= self._end:
                yield from self._wait(1)
            head = self._buffer[self._at]
            ttype = _OF_COMPACT[head & 15] if is_compact else head
            if not ttype:
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
            field = fields.get(number) if self._error is None else None
            if field is None:
                name, spec, place = "", None, ""
            else:
                declared, name, spec, place = field
                if ttype != declared:
                    self._blame(place, f"is of type {ttype}, not {declared}")
                    spec = None
            if is_compact and ttype == _BOOL:  # the type contains the value of a bool field
                value: Any = head & 15 == 1
            else:
                value = yield from self._value(ttype, spec, depth, place)
            if spec is not None:
                setattr(made, name, value)
        for name in required:
            if getattr(made, name) is None:
                self._blame(f"{cls.__name__}.{name}", "is missing")
        return made

    def _value(self, ttype: int, spec: Spec, depth: int, place: str) -> Walk:
        """A value of type ``ttype``; ``None`` without a spec, in which case it is skipped."""
        self._steps += 1
        if not self._steps % SLICE_STEPS:
            yield 0
        if ttype == _STRING:
            data = yield from self._bytes((yield from self._size()), spec is not None)
            return self._text(data, place) if spec == _STRING else data
        fixed = self._fixed.get(ttype)
        if fixed is not None:
            size, read = fixed
            if self._at + size > self._end:
                yield from self._wait(size)
            at, self._at = self._at, self._at + size
            return None if spec is None else read(self._buffer, at)[0]
        if ttype in _BITS:  # of the compact protocol
            zigzag = yield from self._varint(I64_VARINT)
            if spec is not None and zigzag >> _BITS[ttype]:
                self._blame(place, f"has more than {_BITS[ttype]} bits")
            return (zigzag >> 1) ^ -(zigzag & 1)
        if ttype not in _VARYING:
            raise ProtocolError("bad_type", f"type {ttype}")
        most = self._limits.max_depth
        if depth >= most:
            raise ProtocolError("too_deep", f"more than {most} nested structs and containers (--max-depth)")
        inner = None if spec is None else spec[1]
        if ttype == _STRUCT:
            return (yield from self._struct(inner, depth + 1))
        return (yield from self._container(ttype == _MAP, inner, depth + 1, place))

    def _container(self, is_map: bool, inner: Any, depth: int, place: str) -> Walk:
        """A list or a dict; ``None`` if it is skipped."""
        if self._is_compact:
            size, types = yield from self._compact_head(is_map)
        else:
            types = list((yield from self._bytes(1 + is_map)))
            size = yield from self._size()
        self._count(size)
        specs: Any = (None, None)
        if inner is not None:
            expected, specs = _inside(is_map, inner)
            if size and expected != types:
                sent, declared = (", ".join(map(str, kinds)) for kinds in (types, expected))
                self._blame(place, f"is a {'map' if is_map else 'list'} of type {sent}, not {declared}")
                inner, specs = None, (None, None)
        made: Any = {} if is_map else []
        for _ in range(size):
            key = (yield from self._value(types[0], specs[0], depth, place)) if is_map else None
            value = yield from self._value(types[-1], specs[1], depth, place)
            if inner is None:
                continue
            if is_map:
                made[key] = value
            else:
                made.append(value)
        return None if inner is None else made

    def _compact_head(self, is_map: bool) -> Walk:
        """The number of elements, and their types: one, or two for a map."""
        size = (yield from self._size()) if is_map else 1
        if not size:
            return 0, []
        head = yield from self._number(_u8)
        if is_map:
            return size, [_OF_COMPACT[head >> 4], _OF_COMPACT[head & 15]]
        return head >> 4 if head < 0xF0 else (yield from self._size()), [_OF_COMPACT[head & 15]]

    # -- small parts ------------------------------------------------------------------------------------------------

    def _wait(self, count: int) -> Walk:
        """Wait for ``count`` more bytes."""
        while (until := self._at + count) > self._end:
            if until > self._limit:
                if self._framing is not None and self._framing.framed:
                    raise ProtocolError("bad_frame", "the message exceeds its frame")
                most = self._limits.max_message_bytes
                raise ProtocolError("too_large", f"the message has more than {most} bytes (--max-message-bytes)")
            yield until

    def _varint(self, most: int) -> Walk:
        """An unsigned number of at most ``most`` bytes."""
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
        size: int = yield from self._varint(I32_VARINT) if self._is_compact else self._number(_i32)
        if not 0 <= size < 2**31:
            raise ProtocolError("negative_size", f"a size of {size}")
        return size

    def _number(self, form: Struct) -> Walk:
        """A number of a fixed size."""
        if self._at + form.size > self._end:
            yield from self._wait(form.size)
        at, self._at = self._at, self._at + form.size
        return form.unpack_from(self._buffer, at)[0]

    def _bytes(self, size: int, is_wanted: bool = True) -> Walk:
        """``size`` bytes; ``None`` if they are skipped."""
        if self._at + size > self._end:
            yield from self._wait(size)
        at, self._at = self._at, self._at + size
        return bytes(memoryview(self._buffer)[at : at + size]) if is_wanted else None

    def _text(self, data: bytes, place: str) -> str:
        self._text_bytes += len(data)
        most = self._limits.max_text_bytes
        if self._text_bytes > most:
            text = f"text of {self._text_bytes} bytes or more; the limit is {most} (--max-text-bytes)"
            self._error = self._error or TextTooLargeError(text)
            return ""
        try:
            return data.decode()
        except UnicodeDecodeError:
            self._blame(place, "is not UTF-8")
            return ""

    def _blame(self, place: str, text: str) -> None:
        self._error = self._error or BadArgumentsError(f"{place} {text}")

    def _count(self, items: int) -> None:
        self._items += items
        most = self._limits.max_items
        if self._items > most:
            raise ProtocolError("too_large", f"more than {most} fields and elements in a message (--max-items)")


@lru_cache(maxsize=256)
def _declared(cls: Any) -> tuple[Mapping[int, tuple[int, str, Spec, str]], Sequence[str]]:
    """For a class: type on the wire, name, spec and place of each field by number; the names of required fields."""
    fields = {}
    for number, (ttype, name, *more) in cls.thrift_spec.items():
        spec = (ttype, more[0]) if len(more) > 1 else ttype
        fields[number] = _STRING if ttype == _BYTES else ttype, name, spec, f"{cls.__name__}.{name}"
    return fields, [field[1] for field in cls.thrift_spec.values() if field[-1]]


_SKIPPED: tuple[Mapping[int, Any], Sequence[str]] = {}, ()


@lru_cache(maxsize=256)
def _inside(is_map: bool, inner: Any) -> tuple[list[int], Any]:
    """For a container: the types of its elements on the wire, and the specs of key and value."""
    specs = inner if is_map else (inner, inner)
    types = [spec if isinstance(spec, int) else spec[0] for spec in specs]
    return [_STRING if ttype == _BYTES else ttype for ttype in types[not is_map :]], specs
