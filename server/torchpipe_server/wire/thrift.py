"""Thrift messages: detects the protocol of a stream, and encodes results.

A client uses one of two transports (buffered, which adds nothing around a message, or framed) and one of the protocols
binary, binary without a version (old clients) and compact; the first bytes show which.
"""

from __future__ import annotations

import copy
from struct import Struct
from typing import Any, NamedTuple

from thriftpy2.protocol import TBinaryProtocol, TCompactProtocol
from thriftpy2.thrift import TApplicationException, TDecodeException, TType
from thriftpy2.transport import TMemoryBuffer

from torchpipe_py.serving import answers
from torchpipe_server.wire.errors import ProtocolError

CALL, REPLY, EXCEPTION, ONEWAY = 1, 2, 3, 4
NAME_BYTES = 255  # limit of a method's name

_frame_length = Struct(">I")


class Framing(NamedTuple):
    """The transport and protocol of a connection. ``protocol``: "binary", "binary_old", "compact"."""

    framed: bool
    protocol: str


class Message:
    """A complete message.

    name: of the method. seqid: signed, 32 bits. args: of the method's class, with None for fields that were not sent;
    None for an unknown method. model: ``NAME/VERSION`` of the one that it asks, once that is known. error: what is
    wrong with the arguments, or why the message was not read to its end. size: estimated bytes in memory.
    """

    __slots__ = ("args", "error", "is_oneway", "model", "name", "protocol", "seqid", "size")

    is_last = False  # the connection goes on after each answer

    def __init__(self, name: str, is_oneway: bool, seqid: int, protocol: Framing) -> None:
        self.name, self.is_oneway, self.seqid, self.protocol = name, is_oneway, seqid, protocol
        self.args: Any = None
        self.model = ""
        self.error: Exception | None = None
        self.size = 0

    def refused(self, error: ProtocolError) -> Message:
        """Mark the message as not read to its end because of ``error``; returns it."""
        self.error = error
        return self

    def reply(self, payload: Any) -> bytes:
        """Encode the answer: ``payload`` is the method's result struct, or a `TApplicationException`.

        The latter is for errors that the IDL does not declare.
        """
        try:
            return _encode(self, payload)
        except (UnicodeEncodeError, TDecodeException):  # NOTE: the Cython protocol raises the latter for the former
            return _encode(self, _sendable(payload))


def detect(buffer: bytes | bytearray) -> Framing | None:
    """The framing of a stream that begins with ``buffer``; ``None`` while undecided. Raises `ProtocolError`."""
    start = bytes(buffer[:5])
    if start.startswith(b"\x82"):
        return Framing(False, "compact")
    if start.startswith(b"\x80\x01"):
        return Framing(False, "binary")
    if start[:1] >= b"\x80" and start != b"\x80":
        raise ProtocolError("not_thrift", f"a stream that begins with {start[0]:#04x}")
    if start.startswith(b"\x16\x03"):
        raise ProtocolError("not_thrift", "TLS; a proxy in front of this port must terminate it (docs/deployment.md)")
    if start.startswith(bytes(4)):
        raise ProtocolError("not_thrift", "a stream that begins with a zero length")
    if len(start) < 5:
        return None
    length, fifth = _frame_length.unpack_from(start)[0], start[4]
    framed = {0x80: "binary", 0x82: "compact", 0x00: "binary_old"}  # binary_old begins with the length of a name
    if fifth in framed:
        return Framing(True, framed[fifth])
    if length <= NAME_BYTES and 0x20 < fifth < 0x7F:
        return Framing(False, "binary_old")
    raise ProtocolError("not_thrift", f"a stream that begins with {start!r}")


# -- sizes ----------------------------------------------------------------------------------------------------------

MESSAGE_BYTES = 16
"""Bytes of a framed message of the binary protocol beside the method's name and the struct."""

_LENGTH, _FIELD, _STOP = 4, 3, 1
_FIXED = {
    **dict.fromkeys((TType.BOOL, TType.BYTE), 1), TType.I16: 2, TType.I32: 4, TType.I64: 8, TType.DOUBLE: 8
}  # fmt: skip


def struct_size(value: Any) -> int:
    """The bytes of a struct in the binary protocol; in the compact one they are fewer."""
    size = _STOP
    for kind, name, *more in value.thrift_spec.values():
        held = getattr(value, name)
        if held is not None:
            size += _FIELD + _size(kind, more[0], held)
    return size


def _size(kind: int, of: Any, value: Any) -> int:
    """The bytes of a value of this type; ``of`` are the types of its elements."""
    if kind in _FIXED:
        return _FIXED[kind]
    if kind == TType.STRUCT:
        return struct_size(value)
    if kind == TType.MAP:
        keys, values = map(_type_of, of)
        held = sum(_size(*keys, key) + _size(*values, each) for key, each in value.items())
        return 2 + _LENGTH + held
    if kind in (TType.LIST, TType.SET):
        elements = _type_of(of)
        return 1 + _LENGTH + sum(_size(*elements, each) for each in value)
    return _LENGTH + len(value.encode("utf-8", "replace") if isinstance(value, str) else value)


def _type_of(given: Any) -> tuple[int, Any]:
    """A type in a ``thrift_spec``, and that of its elements: a number, or a pair of these."""
    return given if isinstance(given, tuple) else (given, None)


# -- answers --------------------------------------------------------------------------------------------------------


def _sendable(value: Any) -> Any:
    """A copy without lone surrogates, which UTF-8 cannot encode: thriftpy2 would refuse the whole answer."""
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


def _encode(message: Message, payload: Any) -> bytes:
    framed, protocol_name = message.protocol
    transport = TMemoryBuffer()
    seqid = message.seqid
    if protocol_name == "compact":
        protocol = TCompactProtocol(transport)
        seqid &= 0xFFFFFFFF  # TRAP: thriftpy2 writes negative numbers forever
    else:
        protocol = TBinaryProtocol(transport, strict_write=protocol_name == "binary")
    kind = EXCEPTION if isinstance(payload, TApplicationException) else REPLY
    protocol.write_message_begin(message.name, kind, seqid)
    protocol.write_struct(payload)
    body: bytes = transport.getvalue()
    return _frame_length.pack(len(body)) + body if framed else body
