"""What stands before the arguments of a Thrift message: how it is framed, its protocol, its method's name.

A client speaks one of the framings (buffered, which puts nothing around a message, or framed) and one of the protocols
(binary, binary without a version as old clients write it, compact); the first bytes tell which.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from torchpipe_server.wire.scanner import I32_VARINT, Buffer, ProtocolError, read_size, read_varint

CALL, REPLY, EXCEPTION, ONEWAY = 1, 2, 3, 4
NAME_BYTES = 255  # of a method's name
HEADER_BYTES = NAME_BYTES + 16  # no header is longer
_VERSION_CALL = 0x80010001

_u32_at = Struct(">I").unpack_from
_i32_at = Struct(">i").unpack_from
_version_and_size_at = Struct(">Ii").unpack_from


class Framing(NamedTuple):
    """How a connection's client writes, and so how it is answered."""

    framed: bool
    protocol: str  # "binary", "binary_old", "compact" or "http"


HTTP = Framing(False, "http")


Header = tuple[str, int, int, int]
"""Name, type, seqid, and where the arguments struct begins."""


def detect(buffer: Buffer, start: int, end: int) -> Framing | None:
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
    length = _u32_at(buffer, start)[0]
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


def read_header(protocol: str, buffer: Buffer, start: int, end: int) -> Header | None:
    """What stands there; ``None`` if it is not all there yet. Raises `ProtocolError`."""
    if protocol == "binary":
        return _binary_header(buffer, start, end)
    if protocol == "compact":
        return _compact_header(buffer, start, end)
    return _old_header(buffer, start, end)


def _binary_header(buffer: Buffer, start: int, end: int) -> Header | None:
    if end - start < 8:
        return None
    version, size = _version_and_size_at(buffer, start)
    at = start + 8 + size
    if version == _VERSION_CALL and 0 < size <= NAME_BYTES and at + 4 <= end:  # nearly all
        return _name(buffer, start + 8, at), CALL, _i32_at(buffer, at)[0], at + 4
    if version >> 16 != 0x8001:
        raise ProtocolError("bad_version", f"a message that begins with {version:#010x}")
    _check_name_size(size)
    if at + 4 > end:
        return None
    return _name(buffer, start + 8, at), _type(version & 0xFF), _i32_at(buffer, at)[0], at + 4


def _old_header(buffer: Buffer, start: int, end: int) -> Header | None:
    if end - start < 4:
        return None
    size = _i32_at(buffer, start)[0]
    _check_name_size(size)
    at = start + 4 + size
    if at + 5 > end:
        return None
    return _name(buffer, start + 4, at), _type(buffer[at]), _i32_at(buffer, at + 1)[0], at + 5


def _compact_header(buffer: Buffer, start: int, end: int) -> Header | None:
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
    return _name(buffer, at, at + size), _type(head >> 5), signed, at + size


def _check_name_size(size: int) -> None:
    if not 0 < size <= NAME_BYTES:
        raise ProtocolError("negative_size" if size < 0 else "bad_message", f"a method's name of {size} bytes")


def _name(buffer: Buffer, start: int, end: int) -> str:
    try:
        return str(buffer[start:end], "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("bad_message", "a method's name is not UTF-8") from None


def _type(code: int) -> int:
    if code not in (CALL, ONEWAY):
        raise ProtocolError("bad_message", f"a message of type {code} is no call")
    return code
