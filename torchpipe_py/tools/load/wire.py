"""Encodes calls over Thrift and HTTP, decodes answers, and connects on an asyncio loop."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from urllib.parse import quote

from thriftpy2.protocol.cybin import TCyBinaryProtocol
from thriftpy2.thrift import TApplicationException, TMessageType
from thriftpy2.transport import TTransportException
from thriftpy2.transport.buffered import TCyBufferedTransport
from thriftpy2.transport.framed import TCyFramedTransport
from thriftpy2.transport.memory import TCyMemoryBuffer

from torchpipe_py.errors import counted
from torchpipe_py.tools.load.records import Answer, error_name
from torchpipe_py.tools.report import ToolError, printable

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,12})[ \t]*\r\n", re.IGNORECASE)
_PROBE_NUMBER = 0x0A0A0A0A  # NOTE: line feeds, since an HTTP port waits for an empty line before it answers
_MONITORING = "this port is for monitoring"  # the answer of torchpipe-serve --http-port
_CALL_INFER = "call infer"  # in the service's answer to a call for a label and a score that there is not
_SHOWN_BYTES = 200  # of an error page that is not JSON
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.01, 0.5


class ConnectionClosed(ConnectionError):
    """The server closed the connection instead of answering."""


class ReplyError(Exception):
    """A reply that does not match the call: another sequence number or number of results."""


class HttpStatusError(Exception):
    """An answer other than 200; ``code`` and ``message`` are from its JSON, or ``code`` is the status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"status {status}: {message or code}")
        self.code, self.message = code, message


class ThriftWire:
    """``InferenceService`` in the binary protocol: ``infer_batch`` for one image per call, else ``infer_many``.

    ``takes_any``: for results of any kind, such as detections; both methods answer only labels with scores, unless
    ``infer_many`` gets images as ``inputs``. So it does for a ``node_name``, which is only for these.
    """

    def __init__(
        self,
        idl: ModuleType,
        framed: bool,
        batch: int,
        priority: int = 0,
        takes_any: bool = False,
        node_name: str | None = None,
    ) -> None:
        takes_any = takes_any or node_name is not None
        self._idl, self._framed, self._priority, self._takes_any = idl, framed, priority, takes_any
        self._node_name = node_name
        # ``infer_batch`` has no priority.
        self._method = "infer_batch" if batch == 1 and not priority and not takes_any else "infer_many"

    def fitting(self, answers: Sequence[Any]) -> ThriftWire | None:
        """A wire for results of any kind, if an answer asks for one."""
        if self._takes_any or not any(
            getattr(each, "code", "") == "no_result" and _CALL_INFER in each.message for each in answers
        ):
            return None
        return ThriftWire(self._idl, self._framed, len(answers), self._priority, True)

    def __str__(self) -> str:
        return f"ping ({'framed' if self._framed else 'buffered'} transport)"

    def probe(self) -> bytes:
        """A call to check that the service answers."""
        return self._call("ping", _PROBE_NUMBER)

    def request(self, client: int, sequence: int, bodies: Sequence[bytes]) -> bytes:
        """A call with these images."""
        priority = self._priority or None
        if self._takes_any:
            inputs = [{"data": self._idl.Value(bytes=body)} for body in bodies]
            return self._call(self._method, sequence, inputs=inputs, priority=priority, node_name=self._node_name)
        uuids = (f"{client:04x}-{sequence:08x}-{slot:04x}" for slot in range(len(bodies)))
        params = [self._idl.InferenceParams(uuid=uuid, data=body) for uuid, body in zip(uuids, bodies, strict=True)]
        if self._method == "infer_batch":
            return self._call(self._method, sequence, params=params[0])
        return self._call(self._method, sequence, params=params, priority=priority)

    def _call(self, method: str, sequence: int, **arguments: Any) -> bytes:
        buffer = TCyMemoryBuffer()
        protocol = TCyBinaryProtocol(buffer)
        protocol.write_message_begin(method, TMessageType.CALL, sequence)
        getattr(self._idl.InferenceService, f"{method}_args")(**arguments).write(protocol)
        protocol.write_message_end()
        message = bytes(buffer.getvalue())
        return struct.pack(">i", len(message)) + message if self._framed else message

    def answers(self, received: bytes | bytearray, sequence: int, count: int) -> list[Any] | None:
        """An ``Answer`` or an exception for each of a call's ``count`` images; ``count`` is 0 for the probe.

        None until the reply is complete; raises for anything but the reply to this call.
        """
        method = self._method if count else "ping"
        if received.startswith(b"HTTP/"):
            hint = "give --transport http, or the service's --port where this is its --http-port"
            raise ReplyError(f"it answers HTTP: {hint}")
        transport = TCyFramedTransport if self._framed else TCyBufferedTransport
        protocol = TCyBinaryProtocol(transport(io.BytesIO(received)))
        try:
            name, kind, answered = protocol.read_message_begin()
            if kind == TMessageType.EXCEPTION:
                result: Any = TApplicationException()
            elif kind != TMessageType.REPLY or name != method or answered != sequence:
                raise ReplyError(f"a reply to {name} number {answered} instead of {method} number {sequence}")
            else:
                result = getattr(self._idl.InferenceService, f"{method}_result")()
            protocol.read_struct(result)
            protocol.read_message_end()
        except TTransportException as error:
            if error.type == TTransportException.END_OF_FILE:
                return None
            raise
        return _answers(result, count) if count else [result]


def _answers(result: Any, count: int) -> list[Any]:
    missing = TApplicationException(TApplicationException.MISSING_RESULT)
    if isinstance(result, TApplicationException):
        return [result] * count
    if result.success is None:
        return [result.error or missing] * count
    if not isinstance(result.success, list):
        return [Answer(result.success.label)]
    if len(result.success) != count:
        raise ReplyError(f"{counted(len(result.success), 'result')} for {counted(count, 'image')}")
    return [_answer(each) or each.error or missing for each in result.success]


def _answer(outcome: Any) -> Answer | None:
    if outcome.result is not None:
        return Answer(outcome.result.label)
    if outcome.response is None:
        return None
    label = outcome.response.outputs.get("label")
    return Answer(None if label is None else label.text)


class HttpWire:
    """Raw images, each POSTed to ``path``; answers as JSON."""

    def __init__(self, host: str, path: str, priority: int = 0, node_name: str | None = None) -> None:
        if node_name is not None:
            path += f"{'&' if '?' in path else '?'}node_name={quote(node_name, safe='', errors='surrogateescape')}"
        fields = "X-Priority: 1\r\n" if priority else ""
        fields += "Content-Type: application/octet-stream\r\nContent-Length: "
        self._head = f"{path} HTTP/1.1\r\nHost: {host}\r\n{fields}"
        self._path = path

    def __str__(self) -> str:
        return f"OPTIONS {self._path} over HTTP"

    def fitting(self, answers: Sequence[Any]) -> None:
        """None: an answer has any result."""

    def probe(self) -> bytes:
        """A request that any HTTP service answers, perhaps with an error."""
        return f"OPTIONS {self._head}0\r\n\r\n".encode()

    def request(self, client: int, sequence: int, bodies: Sequence[bytes]) -> bytes:
        """A request with the only body."""
        (body,) = bodies
        return f"POST {self._head}{len(body)}\r\n\r\n".encode() + body

    def answers(self, received: bytes | bytearray, sequence: int, count: int) -> list[Any] | None:
        """Like ``ThriftWire.answers``."""
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return None
        status, length = _STATUS.match(received), _LENGTH.search(received, 0, end + 2)
        if status is None or length is None:
            raise ReplyError(f"no answer with a Content-Length: {bytes(received[:40])!r}")
        size = end + 4 + int(length[1])
        if len(received) < size:
            return None
        if len(received) > size:
            raise ReplyError(f"{len(received) - size} bytes after the answer")
        try:
            members = json.loads(received[end + 4 :])
        except ValueError:
            members = {"error": received[end + 4 :][:_SHOWN_BYTES].decode(errors="replace")}
        members = members if isinstance(members, dict) else {}
        if status[1] != b"200":
            code, message = str(members.get("code", int(status[1]))), str(members.get("error", ""))
            return [HttpStatusError(int(status[1]), code, message)]
        label = members.get("label")
        return [Answer(None if label is None else str(label))]


@dataclass(frozen=True)
class Endpoint:
    """Address and protocol of the server; ``timeout`` in seconds, for a call and for connecting."""

    wire: ThriftWire | HttpWire
    host: str
    port: int
    timeout: float

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def fitting(self, answers: Sequence[Any]) -> Endpoint | None:
        """The endpoint with another wire, if an answer asks for one."""
        wire = self.wire.fitting(answers)
        return None if wire is None else replace(self, wire=wire)

    async def connect(self, seconds: float) -> Connection:
        """Connect, retrying for ``seconds`` with growing delays. Raises the last ``OSError``."""
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + seconds, _FIRST_DELAY_S
        while True:
            connecting = loop.create_connection(lambda: Connection(self), self.host, self.port)
            try:
                return (await asyncio.wait_for(connecting, self.timeout))[1]
            except (OSError, asyncio.TimeoutError) as error:
                if loop.time() + delay > deadline:
                    number = getattr(error, "errno", None)
                    raise OSError(number, os.strerror(number) if number else str(error) or "timed out") from error
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY_S)


class Connection(asyncio.Protocol):
    """Makes one call at a time; after a call that raises, only ``close`` may be used."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._wire, self._timeout = endpoint.wire, endpoint.timeout
        self._transport: Any = None
        self._reply: asyncio.Future[list[Any]] | None = None
        self._received, self._expected = bytearray(), (0, 0)

    async def call(self, sequence: int, count: int, request: bytes) -> list[Any]:
        """Send one call and return the wire's ``answers``.

        Raises ``TimeoutError`` if the reply is incomplete after the endpoint's timeout, ``OSError`` for a lost
        connection, and what ``answers`` raises.
        """
        loop = asyncio.get_running_loop()
        self._reply, self._received, self._expected = loop.create_future(), bytearray(), (sequence, count)
        timer = loop.call_later(self._timeout, self._fail, TimeoutError(f"no answer within {self._timeout:g} s"))
        if self._transport.is_closing():
            self._fail(ConnectionClosed("closed by the server"))
        else:
            self._transport.write(request)
        try:
            return await self._reply
        finally:
            timer.cancel()

    def close(self) -> None:
        """Close the connection at once; may be called again."""
        self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    # --- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        try:
            answers = self._wire.answers(self._received, *self._expected)
        except Exception as error:  # any bad answer is a result, counted by type
            self._fail(error)
        else:
            if answers is not None and self._reply is not None and not self._reply.done():
                self._reply.set_result(answers)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionClosed("closed by the server"))


async def probe(endpoint: Endpoint) -> None:
    """Connect and send the wire's probe; ``ToolError`` explains in one line why the server cannot be tested."""
    try:
        connection = await endpoint.connect(0)
    except OSError as error:
        hint = "start the service first, or give its --host and --port"
        raise ToolError(f"cannot connect to {endpoint}: {error.strerror}; {hint}") from error
    try:
        (answer,) = await connection.call(_PROBE_NUMBER, 0, endpoint.wire.probe())
    except Exception as error:
        problem = printable(f"{error_name(error)}: {error}")
        raise ToolError(f"{endpoint} does not answer {endpoint.wire}: {problem}") from error
    finally:
        connection.close()
    if _MONITORING in str(answer):
        raise ToolError(f"{endpoint}: {printable(str(answer))}")
