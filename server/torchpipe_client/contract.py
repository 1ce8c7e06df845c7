"""Encodes calls and decodes answers of ``inference.thrift``. Binary protocol, framed transport."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torchpipe_client.errors import BadReply, InferenceError, InvalidRequest, inference_error, undeclared_error

try:
    import thriftpy2
    from thriftpy2.protocol import TBinaryProtocol
    from thriftpy2.thrift import TApplicationException, TMessageType, TType
    from thriftpy2.transport import TMemoryBuffer
except ImportError as error:
    raise ImportError(f"torchpipe_client needs thriftpy2 (pip install thriftpy2): {error}") from error

MAX_REPLY_BYTES = 256 * 2**20
"""Larger than any reply by default. The first bytes of another protocol, read as a length, exceed it."""

_MAX_VALUES = 2**18
"""Fields and elements of an answer. A list could announce billions that take no bytes but minutes to read."""

_MAX_DEPTH = 32
"""Nested structs and containers of an answer."""

_TOO_DEEP = f"nested more than {_MAX_DEPTH} deep"

_FRAME = _I32 = struct.Struct(">i")
_VERSION = 0x80010000
_NUMBERS = {
    TType.BOOL: struct.Struct(">?"),
    TType.BYTE: struct.Struct(">b"),
    TType.DOUBLE: struct.Struct(">d"),
    TType.I16: struct.Struct(">h"),
    TType.I32: _I32,
    TType.I64: struct.Struct(">q"),
}
_MAX_CALL_BYTES = 2**31 - 1

_PACKAGE = Path(__file__).resolve().parent
# A wheel has the file in the package torchpipe_py, a checkout in its folder idl/; a copy of this folder may hold it.
_PLACES = (_PACKAGE, _PACKAGE.parent / "torchpipe_py", _PACKAGE.parents[1] / "idl")


def _load() -> ModuleType:
    """Load the contract with thriftpy2, under a unique module name."""
    paths = [place / "inference.thrift" for place in _PLACES]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ImportError(f"inference.thrift is missing; looked at {', '.join(map(str, paths))}")
    idl: ModuleType = thriftpy2.load(str(path), module_name="torchpipe_client_thrift")
    return idl


IDL = _load()
_SERVICE = IDL.InferenceService

_UNDECLARED_CODES = {
    TApplicationException.UNKNOWN_METHOD: "unknown_method",
    TApplicationException.PROTOCOL_ERROR: "bad_arguments",
}


def encode_call(method: str, sequence: int, arguments: dict[str, Any]) -> bytes:
    """Encode a call with its frame. Raises ``InvalidRequest`` for values that do not fit the contract."""
    buffer = TMemoryBuffer()
    protocol = TBinaryProtocol(buffer)
    try:
        protocol.write_message_begin(method, TMessageType.CALL, sequence)
        protocol.write_struct(getattr(_SERVICE, f"{method}_args")(**arguments))
    except Exception as error:
        raise InvalidRequest(f"{method}: {error}") from error
    message: bytes = buffer.getvalue()
    if len(message) > _MAX_CALL_BYTES:
        raise InvalidRequest(f"a message of {len(message)} bytes; a frame holds {_MAX_CALL_BYTES}")
    return _FRAME.pack(len(message)) + message


def decode_reply(method: str, sequence: int, message: bytes) -> Any:
    """The result of the method. Raises the ``InferenceError`` of the answer, or ``BadReply``."""
    decoder = _Decoder(message)
    try:
        name, kind, answered, begin = decoder.head()
        is_error = kind == TMessageType.EXCEPTION
        if not is_error and kind != TMessageType.REPLY:
            raise ValueError(f"a message of type {kind}")
        if answered != sequence or (name != method and not is_error):
            raise BadReply(f"an answer to {name[:40]} number {answered} in place of {method} number {sequence}")
        result = decoder.whole(TApplicationException if is_error else getattr(_SERVICE, f"{method}_result"), begin)
    except (ValueError, IndexError, struct.error) as error:
        raise BadReply(f"an answer to {method} that is not a message of the contract: {error}") from error
    if is_error:
        raise undeclared_error(_UNDECLARED_CODES.get(result.type, "internal"), result.message or str(result))
    if (failure := getattr(result, "error", None)) is not None:
        raise declared_error(failure)
    success = getattr(result, "success", None)
    if success is None and method != "ping":
        raise BadReply(f"an answer to {method} with neither a result nor an error")
    return success


def declared_error(failure: Any) -> InferenceError:
    """The exception for an ``InferenceError`` of the contract. Raises ``BadReply`` for a negative wait."""
    if (failure.retry_after_ms or 0) < 0:
        raise BadReply(f"an error {failure.code[:40]!r} to be retried after {failure.retry_after_ms} ms")
    return inference_error(failure.code, failure.message, failure.retry_after_ms)


@cache
def _declared(cls: Any) -> tuple[dict[int, tuple[str, int, Any]], frozenset[str]]:
    """The fields of a struct by number, each with its name, type and what is in it; the names of required ones."""
    spec = cls.thrift_spec
    fields = {number: (name, type_, inner[0] if inner else None) for number, (type_, name, *inner, _) in spec.items()}
    return fields, frozenset(field[1] for field in spec.values() if field[-1])


def _parts(declared: Any) -> tuple[int, Any]:
    """The declared type of an element, and what is in that."""
    return declared if isinstance(declared, tuple) else (declared, None)


class _Decoder:
    """Decodes an answer as the contract declares it; fields that a later contract may have are skipped.

    thriftpy2 is not used, because it allocates what an answer announces, reads past the end of a short one, returns
    text that is not UTF-8 as bytes, and accepts wrong types and missing fields. Here a size is compared with the bytes
    that are left before anything is allocated. Each method takes the place of a value in the message, and returns the
    place after it. Raises ``ValueError``, ``IndexError`` or ``struct.error``.
    """

    def __init__(self, message: bytes) -> None:
        self._message, self._left = message, _MAX_VALUES

    def head(self) -> tuple[str, int, int, int]:
        """The name of the method, the type of the message, its number, and where its struct begins."""
        version, at = self._number(TType.I32, 0)
        if version & 0xFFFF0000 != _VERSION:
            raise ValueError("it does not begin as one of Thrift's binary protocol")
        name, at = self._string(at)
        number, at = self._number(TType.I32, at)
        return name.decode(), version & 0xFF, number, at

    def whole(self, cls: type, at: int) -> Any:
        """A struct of class ``cls``, with which the message ends."""
        decoded, at = self._struct(cls, at, 0)
        if at != len(self._message):
            raise ValueError(f"{len(self._message) - at} bytes after its end")
        return decoded

    def _struct(self, cls: Any, at: int, depth: int) -> tuple[Any, int]:
        message, values = self._message, {}
        declared, required = _declared(cls)
        while kind := message[at]:
            field, at = declared.get(message[at + 1] << 8 | message[at + 2]), at + 3
            self._count(1)
            if field is None:
                at = self._skip(kind, at, depth + 1)
                continue
            name, type_, inner = field
            try:
                values[name], at = self._value(kind, type_, inner, at, depth + 1)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if not required <= values.keys():
            raise ValueError(f"{cls.__name__} without {', '.join(sorted(required - values.keys()))}")
        return cls(**values), at + 1

    def _value(self, kind: int, type_: int, inner: Any, at: int, depth: int) -> tuple[Any, int]:
        """A value of wire type ``kind``, which has to be the declared one. ``inner``: the struct, or types in it."""
        if kind != type_ and (kind, type_) != (TType.STRING, TType.BINARY):
            raise ValueError(f"a value of type {kind}, not {type_}")
        if kind == TType.STRING:
            data, at = self._string(at)
            return (data if type_ == TType.BINARY else data.decode()), at
        if type_ in _NUMBERS:
            return self._number(type_, at)
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if type_ == TType.STRUCT:
            return self._struct(inner, at, depth)
        if type_ == TType.LIST:
            (kind,), size, at = self._elements(1, at)
            (item_type, item_inner), items = _parts(inner), []
            for _ in range(size):
                item, at = self._value(kind, item_type, item_inner, at, depth + 1)
                items.append(item)
            return items, at
        (key_kind, kind), size, at = self._elements(2, at)
        (key_type, _), (item_type, item_inner), entries = _parts(inner[0]), _parts(inner[1]), {}
        for _ in range(size):
            key, at = self._value(key_kind, key_type, None, at, depth + 1)
            entries[key], at = self._value(kind, item_type, item_inner, at, depth + 1)
        return entries, at

    def _skip(self, kind: int, at: int, depth: int) -> int:
        """The place after a value that the contract does not declare."""
        if kind in _NUMBERS:
            return self._number(kind, at)[1]
        if kind == TType.STRING:
            return self._string(at)[1]
        if depth > _MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if kind == TType.STRUCT:
            while field := self._message[at]:
                self._count(1)
                at = self._skip(field, at + 3, depth + 1)
            return at + 1
        if kind not in (TType.LIST, TType.SET, TType.MAP):
            raise ValueError(f"a value of type {kind}")
        kinds, size, at = self._elements(2 if kind == TType.MAP else 1, at)
        for _ in range(size):
            for each in kinds:
                at = self._skip(each, at, depth + 1)
        return at

    def _number(self, kind: int, at: int) -> tuple[Any, int]:
        form = _NUMBERS[kind]
        return form.unpack_from(self._message, at)[0], at + form.size

    def _string(self, at: int) -> tuple[bytes, int]:
        size, at = _I32.unpack_from(self._message, at)[0], at + 4
        end = at + size
        if not at <= end <= len(self._message):
            raise ValueError(f"a size of {size} with {len(self._message) - at} bytes left")
        return self._message[at:end], end

    def _elements(self, types: int, at: int) -> tuple[bytes, int, int]:
        """The wire types of the elements of a list (1) or map (2), their number, and the place of the first."""
        begin = at + types
        size = _I32.unpack_from(self._message, begin)[0]
        if size < 0:
            raise ValueError(f"a size of {size}")
        self._count(size * types)
        return self._message[at:begin], size, begin + 4

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ValueError(f"more than {_MAX_VALUES} values")


class FrameReader:
    """Collects received bytes until an answer is complete."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """The message, without its frame, once it is complete. Raises ``BadReply`` for anything but a frame."""
        self._received += data
        if len(self._received) < _FRAME.size:
            return None
        (length,) = _FRAME.unpack_from(self._received)
        if not 0 <= length <= MAX_REPLY_BYTES or len(self._received) > _FRAME.size + length:
            begin = bytes(self._received[:40])
            raise BadReply(
                f"an answer that begins with {begin!r} is not a Thrift frame; is this torchpipe-serve's --port?"
            )
        if len(self._received) < _FRAME.size + length:
            return None
        with memoryview(self._received) as received:
            return bytes(received[_FRAME.size :])
