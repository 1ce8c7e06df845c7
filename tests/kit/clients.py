"""Clients over Thrift and HTTP that share no code with the service, their calls as bytes, and bare sockets."""

from __future__ import annotations

import fcntl
import http.client
import json
import re
import socket
import struct
import termios
from typing import Any, NamedTuple

import pytest
from thriftpy2.protocol import TBinaryProtocol, TCompactProtocol
from thriftpy2.thrift import TApplicationException, TException, TMessageType
from thriftpy2.transport import TBufferedTransport, TFramedTransport, TSocket

from kit.waits import WAIT
from torchpipe_py.idl import load_idl

IDL = load_idl()
FRAMINGS = [(framed, compact) for framed in (False, True) for compact in (False, True)]
BINARY_CALL = 0x80010001


class Asks:
    """What both clients share: their ``receive`` raises the error that an answer carries."""

    send_batch: Any
    receive: Any
    call: Any
    close: Any

    def infer_batch(self, data: bytes) -> tuple[str, float]:
        result = self.receive(self.send_batch(data))
        return result.label, result.score

    def error_of(self, method: str, **args: Any) -> Any:
        """The `InferenceError` that the call is answered with."""
        try:
            result = self.call(method, **args)
        except IDL.InferenceError as error:
            return error
        raise AssertionError(f"no error but {result!r}")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _CountingSocket(TSocket):  # type: ignore[misc]
    """A socket that counts the bytes that go through it."""

    sent = received = 0

    def write(self, data: bytes) -> None:
        self.sent += len(data)
        super().write(data)

    def read(self, size: int) -> bytes:
        data: bytes = super().read(size)
        self.received += len(data)
        return data


class Client(Asks):
    """Thrift, by thriftpy2; `send` and `receive` apart, so that calls can be pipelined."""

    def __init__(self, port: int, framed: bool = False, compact: bool = False, timeout: float = WAIT) -> None:
        opened = self.counted = _CountingSocket(sock=connect(port, timeout))
        self.sock: socket.socket = opened.sock
        self._transport = TFramedTransport(opened) if framed else TBufferedTransport(opened)
        self._protocol = TCompactProtocol(self._transport) if compact else TBinaryProtocol(self._transport)
        self._seqid, self._service = 0, IDL.InferenceService

    def send(self, method: str, service: Any = IDL.InferenceService, **args: Any) -> int:
        """Arguments of a method that ``service`` lacks are none."""
        self._service = service
        self._seqid += 1
        is_oneway = getattr(getattr(service, method + "_result", None), "oneway", False)
        self._protocol.write_message_begin(method, TMessageType.ONEWAY if is_oneway else TMessageType.CALL, self._seqid)
        self._protocol.write_struct(getattr(service, method + "_args", IDL.InferenceService.ping_args)(**args))
        self._protocol.write_message_end()
        self._transport.flush()
        return self._seqid

    def receive(self, seqid: int | None = None) -> Any:
        """The next answer; an error that it carries is raised."""
        name, kind, answered = self._protocol.read_message_begin()
        assert seqid is None or answered == seqid
        is_error = kind == TMessageType.EXCEPTION
        assert is_error or kind == TMessageType.REPLY
        result = TApplicationException() if is_error else getattr(self._service, name + "_result")()
        self._protocol.read_struct(result)
        self._protocol.read_message_end()
        if is_error:
            raise result
        for field, value in vars(result).items():
            if field != "success" and value is not None:
                raise value
        return getattr(result, "success", None)

    def call(self, method: str, *service: Any, **args: Any) -> Any:
        return self.receive(self.send(method, *service, **args))

    def ping(self) -> None:
        assert self.call("ping") is None

    @staticmethod
    def pack(data: bytes, seqid: int = 1) -> bytes:
        """The bytes of ``send_batch``."""
        return pack_batch(data, seqid)

    def send_batch(self, data: bytes) -> int:
        return self.send("infer_batch", params=IDL.InferenceParams(uuid="test", data=data))

    def infer_many(self, items: list[bytes], deadline_ms: int | None = None, priority: int | None = None) -> list[Any]:
        params = [IDL.InferenceParams(uuid="test", data=item) for item in items]
        return self.call("infer_many", params=params, deadline_ms=deadline_ms, priority=priority)

    def send_infer(self, inputs: dict[str, Any], **options: Any) -> int:
        return self.send("infer", request=IDL.InferRequest(uuid="test", inputs=inputs, **options))

    def infer(self, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
        answer = self.receive(self.send_infer(inputs, **options))
        assert answer.uuid == "test"
        return answer.outputs

    def close(self) -> None:
        self._transport.close()


class Response(NamedTuple):
    status: int
    fields: dict[str, str]
    body: bytes


class HttpClient(Asks):
    """Reads strictly what RFC 9112 lets a server send. An error that an answer carries is raised as Thrift's is."""

    def __init__(self, port: int) -> None:
        self.sock = connect(port)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def send(self, data: bytes, size: int = 2**20) -> None:
        for at in range(0, len(data), size):
            self.sock.sendall(data[at : at + size])

    def read(self, is_head: bool = False) -> Response:
        """The next response."""
        while b"\r\n\r\n" not in self._received:
            self._more()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) [ -~]*", line)
        assert match, line
        pairs = [re.fullmatch(r"([A-Za-z-]+): ([!-~](?:[ -~]*[!-~])?)", one) for one in lines]
        fields = {pair[1].lower(): pair[2] for pair in pairs if pair}
        assert len(fields) == len(lines), "a field that is none, or is there twice"
        status = int(match[1])
        assert status >= 200 or not fields
        size = 0 if is_head or status < 200 else int(fields["content-length"])
        while len(self._received) < size:
            self._more()
        body, self._received = self._received[:size], self._received[size:]
        return Response(status, fields, body)

    def end(self) -> None:
        """Nothing comes any more."""
        assert (self._received, self.sock.recv(2**16)) == (b"", b""), "an answer too many"

    def _more(self) -> None:
        piece = self.sock.recv(2**16)
        if not piece:
            raise EOFError("closed before the end of an answer")
        self._received += piece

    # -- as ``Client`` -------------------------------------------------------------------------------------

    @staticmethod
    def pack(data: bytes, seqid: int = 0) -> bytes:
        return b"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data

    def send_batch(self, data: bytes) -> None:
        self.send(self.pack(data))

    def receive(self, seqid: int | None = None) -> Any:
        status, fields, body = self.read()
        answer = json.loads(body)
        if status == 200:
            return IDL.InferenceResult(label=answer.get("label"), score=answer.get("score"))
        retry_after_ms = answer.get("retry_after_ms")
        assert fields.get("retry-after") == (None if retry_after_ms is None else str(-(-retry_after_ms // 1000)))
        raise IDL.InferenceError(code=answer["code"], message=answer["error"], retry_after_ms=retry_after_ms)

    def call(self, method: str, params: Any) -> Any:
        assert method == "infer_batch"
        return self.receive(self.send_batch(params.data))

    def ping(self) -> None:
        self.send(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")
        assert self.read().status == 200

    def close(self) -> None:
        self.sock.close()


def fetch(port: int, path: str, verb: str = "GET", body: Any = b"", **fields: str) -> Response:
    """The answer, on a connection of its own. A body that is no bytes goes as JSON, a field's ``_`` as ``-``."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(verb, path, content, {name.replace("_", "-"): value for name, value in fields.items()})
        answer = connection.getresponse()
        return Response(answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def ask(port: int, body: Any, path: str = "/infer", verb: str = "POST", **fields: str) -> tuple[int, Any]:
    """Status and JSON of the answer."""
    answer = fetch(port, path, verb, body, **fields)
    assert answer.fields["content-type"] == "application/json"
    return answer.status, json.loads(answer.body)


def get_json(port: int, path: str) -> tuple[int, Any]:
    return ask(port, b"", path, "GET")


def is_answered(client: Client) -> bool:
    """Whether it is: while no worker is there, requests are answered with an error on the same connection."""
    try:
        client.ping()
    except TApplicationException as error:
        if "Unavailable" not in error.message:
            raise
        return False
    return True


def is_served(port: int) -> bool:
    """Whether a newcomer is answered, and neither refused nor closed."""
    try:
        with Client(port) as client:
            client.ping()
    except (OSError, EOFError, TException):
        return False
    return True


every_client = pytest.mark.parametrize("client_type", [Client, HttpClient], ids=["thrift", "http"])


# -- bytes by hand --------------------------------------------------------------------------------------------------


def pack_call(name: str, body: bytes = b"\0", seqid: int = 1) -> bytes:
    """A call in the binary protocol; `body` is the arguments struct."""
    encoded = name.encode()
    return struct.pack(">II", BINARY_CALL, len(encoded)) + encoded + struct.pack(">i", seqid) + body


def pack_string(number: int, value: bytes) -> bytes:
    return struct.pack(">bhI", 11, number, len(value)) + value


def pack_batch(data: bytes, seqid: int = 1, uuid: bytes = b"raw") -> bytes:
    params = pack_string(1, uuid) + pack_string(2, data) + b"\0"
    return pack_call("infer_batch", struct.pack(">bh", 12, 1) + params + b"\0", seqid)


def pack_infer(text: bytes, seqid: int = 1) -> bytes:
    value = pack_string(2, text) + b"\0"
    inputs = struct.pack(">bhbbi", 13, 2, 11, 12, 1) + struct.pack(">I", 4) + b"data" + value
    return pack_call("infer", struct.pack(">bh", 12, 1) + pack_string(1, b"u") + inputs + b"\0\0", seqid)


def framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def connect(port: int, timeout: float = WAIT) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout)


def narrow(port: int) -> socket.socket:
    """A connection with a small receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT)
    sock.connect(("127.0.0.1", port))
    return sock


def on_its_way(sock: socket.socket) -> int:
    """How many bytes of what was sent do not lie in the socket at the other end yet: a busy machine takes a while."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as such, a timeout does not."""
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


def infer_rpc(port: int, request: Any, seconds: float, **options: Any) -> Any:
    """The answer of ``ModelInfer`` to this message. Raises ``RpcError``, and ``TimeoutError`` after it has left."""
    import grpc

    from torchpipe_py.methods.rpc.messages import message

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda given: given.SerializeToString(),
            response_deserializer=message("inference.ModelInferResponse").FromString,
        )
        under_way = infer.future(request, wait_for_ready=True, **options)
        try:
            return under_way.result(seconds)
        except grpc.FutureTimeoutError:
            under_way.cancel()
            raise TimeoutError from None
