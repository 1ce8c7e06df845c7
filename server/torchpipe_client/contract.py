"""Encodes calls and decodes answers of ``inference.thrift``. Binary protocol, framed transport."""

from __future__ import annotations

import struct
from pathlib import Path
from types import ModuleType
from typing import Any

from torchpipe_client.errors import BadReply, InvalidRequest, inference_error, undeclared_error

try:
    import thriftpy2
    from thriftpy2.protocol import TBinaryProtocol
    from thriftpy2.thrift import TApplicationException, TMessageType
    from thriftpy2.transport import TMemoryBuffer
except ImportError as error:
    raise ImportError(f"torchpipe_client needs thriftpy2 (pip install thriftpy2): {error}") from error

MAX_REPLY_BYTES = 256 * 2**20
"""Larger than any reply by default. The first bytes of another protocol, read as a length, exceed it."""

_MAX_VALUES = 2**18
"""Fields and elements of an answer. A list could announce billions that take no bytes but minutes to read."""

_FRAME = _INT = struct.Struct(">i")
_STRING, _STRUCT, _MAP, _SET, _LIST = 11, 12, 13, 14, 15
_SIZES = {2: 1, 3: 1, 4: 8, 6: 2, 8: 4, 10: 8}
"""Bytes of Thrift's types of fixed size."""
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
    try:
        protocol = TBinaryProtocol(TMemoryBuffer(message))
        name, kind, answered = protocol.read_message_begin()
        _Bounds(message).value(_STRUCT, 12 + _INT.unpack_from(message, 4)[0])
        is_error = kind == TMessageType.EXCEPTION
        result = TApplicationException() if is_error else getattr(_SERVICE, f"{method}_result")()
        protocol.read_struct(result)
    except Exception as error:
        raise BadReply(f"an answer to {method} that is not a message of the contract: {error}") from error
    if answered != sequence or not (is_error or (kind == TMessageType.REPLY and name == method)):
        raise BadReply(f"an answer to {name} number {answered} in place of {method} number {sequence}")
    if is_error:
        raise undeclared_error(_UNDECLARED_CODES.get(result.type, "internal"), result.message or str(result))
    if (failure := getattr(result, "error", None)) is not None:
        raise inference_error(failure.code, failure.message, failure.retry_after_ms)
    success = getattr(result, "success", None)
    if success is None and method != "ping":
        raise BadReply(f"an answer to {method} with neither a result nor an error")
    return success


class _Bounds:
    """Checks an answer before thriftpy2 decodes it, because its C decoder reads past the end of a bad one.

    Raises ``ValueError``, ``IndexError``, ``struct.error`` or, for deep nesting, ``RecursionError``.
    """

    def __init__(self, message: bytes) -> None:
        self._message, self._left = message, _MAX_VALUES

    def value(self, kind: int, at: int) -> int:
        """The end of a value of type ``kind`` that begins at ``at``."""
        message = self._message
        if kind in _SIZES:
            return at + _SIZES[kind]
        if kind == _STRING:
            return at + _INT.size + self._size(at)
        if kind == _STRUCT:
            while field := message[at]:
                self._count(1)
                at = self.value(field, at + 3)
            return at + 1
        if kind in (_LIST, _SET):
            types, at = message[at : at + 1], at + 1
        elif kind == _MAP:
            types, at = message[at : at + 2], at + 2
        else:
            raise ValueError(f"a value of type {kind}")
        size, at = self._size(at), at + _INT.size
        self._count(size * len(types))
        for _ in range(size):
            for each in types:
                at = self.value(each, at)
        return at

    def _size(self, at: int) -> int:
        size: int = _INT.unpack_from(self._message, at)[0]
        if size < 0:
            raise ValueError(f"a size of {size}")
        return size

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
        return bytes(self._received[_FRAME.size :])
