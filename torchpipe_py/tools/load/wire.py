"""How a service is spoken to: the bytes of calls over Thrift and HTTP, and a blocking connection.

A call is a list of buffers. Images are buffers of their own, which all client processes share and nothing copies.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.thrift import TApplicationException, TMessageType
from thriftpy2.transport.buffered import TCyBufferedTransport
from thriftpy2.transport.framed import TCyFramedTransport
from thriftpy2.transport.memory import TCyMemoryBuffer

from torchpipe_py.errors import counted
from torchpipe_py.tools.load.client import Answer, error_name
from torchpipe_py.tools.report import ToolError

_EMPTY_DATA = b"\x0b\x00\x02" + bytes(4)  # the field `data` of `InferenceParams`, of no bytes
_INT = struct.Struct(">i")
_RECEIVE_BYTES = 2**16
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,12})[ \t]*\r\n", re.IGNORECASE)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.01, 0.5
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")

Buffers = list[bytes]
Reader = Callable[[int, int], list[Any]]
"""Of the reply to call ``sequence``: an ``Answer`` or an exception for each of its ``count`` images."""


class ConnectionClosed(ConnectionError):
    """The server closed the connection in place of an answer."""


class ReplyError(Exception):
    """A reply that does not belong to the call: another sequence id, another number of results."""


class HttpStatusError(Exception):
    """An answer other than 200; ``code`` and ``message`` are those of its JSON, or the status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"status {status}: {message or code}")
        self.code, self.message = code, message


# --- Thrift


def encode_call(idl: ModuleType, method: str, arguments: dict[str, Any], sequence: int = 0) -> bytes:
    """One call of ``InferenceService``, unframed, as any thriftpy2 client would send it."""
    buffer = TCyMemoryBuffer()
    protocol = TCyBinaryProtocol(buffer)
    protocol.write_message_begin(method, TMessageType.CALL, sequence)
    getattr(idl.InferenceService, f"{method}_args")(**arguments).write(protocol)
    protocol.write_message_end()
    return bytes(buffer.getvalue())


class ThriftWire:
    """``InferenceService`` in the binary protocol: ``infer_batch`` where calls have one image, else ``infer_many``."""

    def __init__(self, idl: ModuleType, framed: bool, batch: int) -> None:
        self._idl, self._framed = idl, framed
        self._method = "infer_batch" if batch == 1 else "infer_many"

    def __str__(self) -> str:
        return f"ping ({'framed' if self._framed else 'buffered'} transport)"

    def probe(self) -> Buffers:
        """A call that says whether there is a service."""
        return self._message([encode_call(self._idl, "ping", {})])

    def request(self, client: int, sequence: int, bodies: Sequence[bytes]) -> Buffers:
        """A call with these images."""
        uuids = (f"{client:04x}-{sequence:08x}-{slot:04x}" for slot in range(len(bodies)))
        params = [self._idl.InferenceParams(uuid=uuid, data=b"") for uuid in uuids]
        arguments = {"params": params[0] if self._method == "infer_batch" else params}
        first, *others = encode_call(self._idl, self._method, arguments, sequence).split(_EMPTY_DATA)
        buffers = [first]
        for body, rest in zip(bodies, others, strict=True):
            buffers += [_EMPTY_DATA[: -_INT.size] + _INT.pack(len(body)), body, rest]
        return self._message(buffers)

    def _message(self, buffers: Buffers) -> Buffers:
        return [_INT.pack(sum(map(len, buffers))), *buffers] if self._framed else buffers

    def reader(self, connection: Connection) -> Reader:
        """Of the replies on a connection; ``count`` 0 reads that of the probe."""
        transport = TCyFramedTransport if self._framed else TCyBufferedTransport
        protocol = TCyBinaryProtocol(transport(connection))
        service = self._idl.InferenceService

        def read(sequence: int, count: int) -> list[Any]:
            method = self._method if count else "ping"
            if not count and connection.peek(5) == b"HTTP/":
                hint = "give --transport http, or the service's --port where this is its --http-port"
                raise ReplyError(f"it answers HTTP: {hint}")
            name, kind, answered = protocol.read_message_begin()
            if kind == TMessageType.EXCEPTION:
                result: Any = TApplicationException()
            elif kind != TMessageType.REPLY or name != method or answered != sequence:
                raise ReplyError(f"a reply to {name} number {answered} in place of {method} number {sequence}")
            else:
                result = getattr(service, f"{method}_result")()
            protocol.read_struct(result)
            protocol.read_message_end()
            return answers_of(result, count) if count else [result]

        return read


def answers_of(result: Any, count: int) -> list[Any]:
    """An ``Answer`` or an exception for each of a call's ``count`` images, from the decoded reply."""
    missing = TApplicationException(TApplicationException.MISSING_RESULT)
    if isinstance(result, TApplicationException):
        return [result] * count
    if result.success is None:
        return [result.error or missing] * count
    if not isinstance(result.success, list):
        return [Answer(result.success.label)]
    if len(result.success) != count:
        raise ReplyError(f"{counted(len(result.success), 'result')} for {counted(count, 'image')}")
    return [Answer(each.result.label) if each.result else each.error or missing for each in result.success]


# --- HTTP


class HttpWire:
    """Images as they are, each POSTed to ``path``; answers as JSON."""

    def __init__(self, host: str, path: str) -> None:
        self._head = f"{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\nContent-Length: "
        self._path = path

    def __str__(self) -> str:
        return f"OPTIONS {self._path} over HTTP"

    def probe(self) -> Buffers:
        """A request that any service answers, be it with an error."""
        return [f"OPTIONS {self._head}0\r\n\r\n".encode()]

    def request(self, client: int, sequence: int, bodies: Sequence[bytes]) -> Buffers:
        """The buffers of a request with this body, the only one."""
        (body,) = bodies
        return [f"POST {self._head}{len(body)}\r\n\r\n".encode(), body]

    def reader(self, connection: Connection) -> Reader:
        """Of the answers on a connection."""

        def read(sequence: int, count: int) -> list[Any]:
            data = connection.read(_RECEIVE_BYTES)
            while (end := data.find(b"\r\n\r\n")) < 0:
                data += connection.read(_RECEIVE_BYTES)
            status, length = _STATUS.match(data), _LENGTH.search(data, 0, end + 2)
            if status is None or length is None:
                raise ReplyError(f"no answer with a Content-Length: {data[:40]!r}")
            size = end + 4 + int(length[1])
            while len(data) < size:
                data += connection.read(_RECEIVE_BYTES)
            if len(data) > size:
                raise ReplyError(f"{len(data) - size} bytes after the answer")
            try:
                members = json.loads(data[end + 4 :])
            except ValueError:
                members = None
            members = members if isinstance(members, dict) else {}
            if status[1] != b"200":
                code, message = str(members.get("code", int(status[1]))), str(members.get("error", ""))
                return [HttpStatusError(int(status[1]), code, message)]
            label = members.get("label")
            return [Answer(None if label is None else str(label))]

        return read


# --- the connection


@dataclass(frozen=True)
class Endpoint:
    """Where the server is; ``timeout`` in seconds, for a call and for a connection."""

    host: str
    port: int
    timeout: float

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Connection:
    """A connected socket and the reader of its replies. One call at a time; after an error only ``close`` is left."""

    def __init__(self, wire: ThriftWire | HttpWire, endpoint: Endpoint) -> None:
        """Connects; raises ``OSError``."""
        self._timeout = endpoint.timeout
        self._sock = socket.create_connection((endpoint.host, endpoint.port), timeout=endpoint.timeout)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = wire.reader(self)
        self._deadline = 0.0

    def call(self, sequence: int, count: int, buffers: Buffers) -> list[Any]:
        """Send one call and return what the wire's reader makes of the reply.

        Raises ``TimeoutError`` after the endpoint's timeout, ``OSError`` and what the reader raises.
        """
        self._deadline = time.perf_counter() + self._timeout
        self._limit()
        if len(buffers) > _MAX_BUFFERS:
            buffers = [b"".join(buffers)]
        sent = self._sock.sendmsg(buffers)
        if sent < sum(map(len, buffers)):  # the kernel took only a part
            self._limit()
            self._sock.sendall(memoryview(b"".join(buffers))[sent:])
        return self._reader(sequence, count)

    def read(self, size: int) -> bytes:
        """Some bytes of a reply, at most ``size``: the wire's reader reads from here."""
        self._limit()
        chunk = self._sock.recv(size)
        if not chunk:
            raise ConnectionClosed("closed by the server")
        return chunk

    def peek(self, size: int) -> bytes:
        """What ``read`` returns next; empty when the server has closed."""
        return self._sock.recv(size, socket.MSG_PEEK)

    def close(self) -> None:
        """Close the socket; may be called again."""
        self._sock.close()

    def _limit(self) -> None:
        """No call outlives its time, however its reply trickles in."""
        left = self._deadline - time.perf_counter()
        if left <= 0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        self._sock.settimeout(left)


class ServiceSession:
    """One client's connection to the service, made anew when it breaks."""

    def __init__(self, wire: ThriftWire | HttpWire, endpoint: Endpoint, client: int) -> None:
        """Connects; raises ``OSError``."""
        self._wire, self._endpoint, self._client = wire, endpoint, client
        self._connection: Connection | None = None
        self.renew()

    def call(self, sequence: int, bodies: Sequence[bytes]) -> list[Any]:
        """Send these images in one call."""
        assert self._connection is not None
        return self._connection.call(sequence, len(bodies), self._wire.request(self._client, sequence, bodies))

    def renew(self) -> None:
        """Connect, for the endpoint's timeout with growing delays; raises the last ``OSError``."""
        self.close()
        deadline, delay = time.monotonic() + self._endpoint.timeout, _FIRST_DELAY_S
        while True:
            try:
                self._connection = Connection(self._wire, self._endpoint)
                return
            except OSError:
                if time.monotonic() + delay > deadline:
                    raise
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)

    def close(self) -> None:
        """Close the connection; may be called again."""
        if self._connection is not None:
            self._connection.close()


def probe(wire: ThriftWire | HttpWire, endpoint: Endpoint) -> None:
    """Connect and send the wire's probe; ``ToolError`` says in one line why the server cannot be tested."""
    try:
        connection = Connection(wire, endpoint)
    except OSError as error:
        hint = "start the service first, or say with --host and --port where it is"
        raise ToolError(f"cannot connect to {endpoint}: {error.strerror or error}; {hint}") from error
    try:
        connection.call(0, 0, wire.probe())
    except Exception as error:
        raise ToolError(f"{endpoint} does not answer {wire}: {error_name(error)}: {error}") from error
    finally:
        connection.close()
