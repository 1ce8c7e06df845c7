"""The bytes of a call, made once in advance by thriftpy2's binary protocol, and the decoding of replies.

A call is sent as a list of buffers, in this order:

    head 0   frame length (framed only), message header with the sequence id, first uuid
    body 0   the first image's `data` field: immutable, shared by all client processes, never copied
    head 1   second uuid
    body 1   ...
    tail     the end of the arguments

so that a call costs two patches of a few bytes, whatever the size of its images.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.thrift import TApplicationException, TMessageType
from thriftpy2.transport import TTransportException
from thriftpy2.transport.buffered import TCyBufferedTransport
from thriftpy2.transport.framed import TCyFramedTransport
from thriftpy2.transport.memory import TCyMemoryBuffer

from torchpipe_py.errors import counted
from torchpipe_py.loadtest.errors import ReplyError

_UUID_FORMAT = b"%04x-%08x-%04x"  # client, sequence id, position in the call
_UUID_BLANK = "0" * len(_UUID_FORMAT % (0, 0, 0))
_FRAME_LENGTH = struct.Struct(">i")
_SEQUENCE = struct.Struct(">i")
_HTTP = b"HTTP/"

_APPLICATION_ERRORS = {
    value: name.lower() for name, value in vars(TApplicationException).items() if name.isupper() and value is not None
}


def encode_call(idl: ModuleType, method: str, arguments: dict[str, Any], sequence: int = 0) -> bytes:
    """One call of `InferenceService`, unframed, as any thriftpy2 client would send it."""
    buffer = TCyMemoryBuffer()
    protocol = TCyBinaryProtocol(buffer)
    protocol.write_message_begin(method, TMessageType.CALL, sequence)
    getattr(idl.InferenceService, f"{method}_args")(**arguments).write(protocol)
    protocol.write_message_end()
    return bytes(buffer.getvalue())


def encode_body(idl: ModuleType, data: bytes) -> bytes:
    """An image's part of a call: all of its `InferenceParams` that follows the uuid."""
    return _encode_params(idl, data).partition(_UUID_BLANK.encode())[2]


def _encode_params(idl: ModuleType, data: bytes) -> bytes:
    buffer = TCyMemoryBuffer()
    idl.InferenceParams(uuid=_UUID_BLANK, data=data).write(TCyBinaryProtocol(buffer))
    return bytes(buffer.getvalue())


class Template(Protocol):
    """The calls of one client."""

    def fill(self, sequence: int, bodies: Sequence[bytes]) -> Sequence[bytes | bytearray]:
        """The buffers of call number `sequence` with these bodies, one per image."""


class Answers(Protocol):
    """Reads the replies of one connection."""

    def read(self, sequence: int, count: int) -> list[Any]:
        """Of the reply to that call, one result or one exception for each of its `count` images."""


class Wire(Protocol):
    """How a service is spoken to."""

    def body(self, data: bytes) -> bytes:
        """An image's part of a call."""

    def template(self, count: int, client: int) -> Template:
        """Of calls with `count` images."""

    def probe(self) -> Sequence[bytes]:
        """A call that says whether there is a service."""

    def reader(self, source: Any) -> Answers:
        """Of the replies on a connection: `source.read(n)` returns at most `n` bytes, and at least one, and
        `source.peek(n)` leaves them there."""


class ThriftWire:
    """`InferenceService` in the binary protocol: `infer_batch` where calls have one image, else `infer_many`."""

    def __init__(self, idl: ModuleType, framed: bool, batch: int) -> None:
        self._idl, self._framed = idl, framed
        self._method = "infer_batch" if batch == 1 else "infer_many"

    def __str__(self) -> str:
        return f"ping ({'framed' if self._framed else 'buffered'} transport)"

    def body(self, data: bytes) -> bytes:
        """An image's part of a call."""
        return encode_body(self._idl, data)

    def template(self, count: int, client: int) -> CallTemplate:
        """Of calls with `count` images."""
        return CallTemplate(self._idl, self._method, count, client, self._framed)

    def probe(self) -> Sequence[bytes]:
        """A `ping`."""
        ping = encode_call(self._idl, "ping", {})
        return [_FRAME_LENGTH.pack(len(ping)) + ping if self._framed else ping]

    def reader(self, source: Any) -> ReplyReader:
        """Of the replies on a connection."""
        return ReplyReader(self._idl, source, self._framed, self._method)


class CallTemplate:
    """The buffers of a call with `count` images, complete but for sequence id, uuids and bodies.

    Owned by one client process; `fill` changes the buffers that the previous `fill` returned.
    """

    def __init__(self, idl: ModuleType, method: str, count: int, client: int, framed: bool) -> None:
        blank = _encode_params(idl, b"")
        slot = blank[: blank.index(_UUID_BLANK.encode()) + len(_UUID_BLANK)]
        params = [idl.InferenceParams(uuid=_UUID_BLANK, data=b"")] * count
        call = encode_call(idl, method, {"params": params[0] if method == "infer_batch" else params})
        prefix, _, tail = call.partition(blank * count)
        frame = bytes(_FRAME_LENGTH.size) if framed else b""
        self._heads = [bytearray(frame + prefix + slot), *(bytearray(slot) for _ in range(count - 1))]
        self._buffers: list[bytes | bytearray] = [part for head in self._heads for part in (head, b"")] + [tail]
        self._fixed_length = sum(map(len, self._buffers)) - len(frame)
        self._sequence_at = len(frame) + 4 + 4 + len(method)
        self._client = client
        self._framed = framed

    def fill(self, sequence: int, bodies: Sequence[bytes]) -> list[bytes | bytearray]:
        """The buffers of call number `sequence` with these bodies, one per image."""
        buffers = self._buffers
        for slot, body in enumerate(bodies):
            self._heads[slot][-len(_UUID_BLANK) :] = _UUID_FORMAT % (self._client, sequence, slot)
            buffers[2 * slot + 1] = body
        _SEQUENCE.pack_into(self._heads[0], self._sequence_at, sequence)
        if self._framed:
            _FRAME_LENGTH.pack_into(self._heads[0], 0, self._fixed_length + sum(map(len, bodies)))
        return buffers


class ReplyReader:
    """Decodes the replies of one connection, to calls of `method`."""

    def __init__(self, idl: ModuleType, source: Any, framed: bool, method: str) -> None:
        self._source = source
        self._protocol = TCyBinaryProtocol((TCyFramedTransport if framed else TCyBufferedTransport)(source))
        self._service, self._method = idl.InferenceService, method

    def read(self, sequence: int, count: int) -> list[Any]:
        """One `InferenceResult` or one exception for each of the call's `count` images; none is a `ping`.

        Raises `ReplyError` for a reply to another call, and what thriftpy2 and `source` raise.
        """
        if not count:
            if self._source.peek(len(_HTTP)) == _HTTP:
                raise ReplyError(
                    "it answers HTTP: give --transport http, or the service's --port where this is its --http-port"
                )
            return [self._read("ping", sequence)]
        return answers_of(self._read(self._method, sequence), count)

    def _read(self, method: str, sequence: int) -> Any:
        name, kind, answered = self._protocol.read_message_begin()
        if kind == TMessageType.EXCEPTION:
            return self._read_struct(TApplicationException())
        if kind != TMessageType.REPLY or name != method or answered != sequence:
            raise ReplyError(f"a reply to {name} number {answered} in place of {method} number {sequence}")
        return self._read_struct(getattr(self._service, f"{method}_result")())

    def _read_struct(self, value: Any) -> Any:
        self._protocol.read_struct(value)
        self._protocol.read_message_end()
        return value


def answers_of(result: Any, count: int) -> list[Any]:
    """One `InferenceResult` or one exception for each of a call's `count` images.

    Raises `ReplyError` when the server answered with another number of results.
    """
    if isinstance(result, TApplicationException):
        return [result] * count
    success = result.success
    if success is None:
        return [result.error or TApplicationException(TApplicationException.MISSING_RESULT)] * count
    if not isinstance(success, list):
        return [success]
    if len(success) != count:
        raise ReplyError(f"{counted(len(success), 'result')} for {counted(count, 'image')}")
    missing = TApplicationException(TApplicationException.MISSING_RESULT)
    return [outcome.result or outcome.error or missing for outcome in success]


def error_message(error: Any) -> str:
    """What the service says of an error beyond its name; an empty string where it says nothing."""
    return str(getattr(error, "message", None) or "").strip().split("\n", 1)[0]


def error_name(error: Any) -> str:
    """What an error is counted as: `InferenceError:<code>` (over HTTP `HttpStatusError:<code>`),
    `TApplicationException:<type>`, `timeout`, or its class."""
    kind = type(error).__name__
    if kind in ("InferenceError", "HttpStatusError"):
        return f"{kind}:{error.code}"
    if isinstance(error, TApplicationException):
        return f"{kind}:{_APPLICATION_ERRORS.get(error.type, error.type)}"
    if isinstance(error, TTransportException):
        return f"{kind}:{error.type}"
    return "timeout" if isinstance(error, TimeoutError) else kind
