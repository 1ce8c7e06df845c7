"""A client over HTTP by hand, with the calls of ``service.Client``: tests of connections take either."""

from __future__ import annotations

import json
import re
import socket
from typing import Any, NamedTuple

import pytest
from service import IDL, Client, connect


class Response(NamedTuple):
    status: int
    fields: dict[str, str]
    body: bytes


class HttpClient:
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

    # -- as ``service.Client`` -------------------------------------------------------------------------------------

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

    def infer_batch(self, data: bytes) -> tuple[str, float]:
        self.send_batch(data)
        result = self.receive()
        return result.label, result.score

    def error_of(self, method: str, params: Any) -> Any:
        assert method == "infer_batch"
        self.send_batch(params.data)
        try:
            result = self.receive()
        except IDL.InferenceError as error:
            return error
        raise AssertionError(f"no error but {result!r}")

    def ping(self) -> None:
        self.send(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")
        assert self.read().status == 200

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


every_client = pytest.mark.parametrize("client_type", [Client, HttpClient], ids=["thrift", "http"])
