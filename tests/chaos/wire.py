"""Calls as bytes, made by hand: the unframed binary protocol, HTTP, and what of a reply a judge looks at."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import NamedTuple

_CALL, _REPLY, _EXCEPTION = 1, 2, 3
_STRUCT, _STRING, _DOUBLE, _I32, _LIST = 12, 11, 4, 8, 15


class Reply(NamedTuple):
    """code: ``ok``, that of an ``InferenceError``, or ``exception``. answers: (label or code, score) of each item."""

    seqid: int
    code: str
    answers: list[tuple[str, float]]
    retry_after_ms: int | None = None


class ClosedError(Exception):
    """The server has closed the connection before the whole reply."""


def pack_call(name: str, body: bytes = b"\0", seqid: int = 1) -> bytes:
    """``body`` is the struct of the arguments."""
    encoded = name.encode()
    return struct.pack(">HHI", 0x8001, _CALL, len(encoded)) + encoded + struct.pack(">i", seqid) + body


def pack_batch(data: bytes, seqid: int = 1) -> bytes:
    return pack_call("infer_batch", struct.pack(">bh", _STRUCT, 1) + _params(data) + b"\0", seqid)


def pack_many(items: list[bytes], seqid: int = 1) -> bytes:
    items_ = b"".join(map(_params, items))
    return pack_call("infer_many", struct.pack(">bhbi", _LIST, 1, _STRUCT, len(items)) + items_ + b"\0", seqid)


def batch_of(size: int) -> bytes:
    """An ``infer_batch`` message of exactly so many bytes."""
    return pack_batch(b"x" * (size - len(pack_batch(b""))))


def _params(data: bytes) -> bytes:
    return _string(1, b"chaos") + _string(2, data) + b"\0"


def _string(number: int, value: bytes) -> bytes:
    return struct.pack(">bhI", _STRING, number, len(value)) + value


class Wire:
    """A blocking connection that reads one reply at a time, however the bytes arrive."""

    is_over = False
    """Whether the last reply has said that the connection ends."""

    def __init__(self, port: int, timeout: float) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def pack(self, data: bytes, seqid: int) -> bytes:
        """The next request, to be sent whole or not."""
        return pack_batch(data, seqid)

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except ConnectionError as error:
            raise ClosedError from error

    def receive(self) -> Reply:
        """``TimeoutError``, ``ClosedError``."""
        while True:
            try:
                reply, end = self._read_reply()
            except (struct.error, IndexError):
                self._received += self._more()
                continue
            self._received = self._received[end:]
            return reply

    def has_more(self) -> bool:
        """Whether anything has come that nobody asked for."""
        self.sock.setblocking(False)
        try:
            return bool(self._received or self.sock.recv(1))
        except (BlockingIOError, ConnectionError):
            return False

    def read_all(self) -> bytes:
        """Until the server closes."""
        try:
            while piece := self.sock.recv(2**16):
                self._received += piece
        except ConnectionError:
            pass
        return self._received

    def close(self) -> None:
        self.sock.close()

    def _read_reply(self) -> tuple[Reply, int]:
        """The first of what was received, and where it ends; ``IndexError`` if it is not whole."""
        return _read_reply(self._received)

    def _more(self) -> bytes:
        try:
            piece = self.sock.recv(2**16)
        except ConnectionError as error:
            raise ClosedError from error
        if not piece:
            raise ClosedError
        return piece

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HttpWire(Wire):
    """The same over HTTP: one request at a time, whose number is the reply's."""

    _seqid = 0

    def pack(self, data: bytes, seqid: int) -> bytes:
        self._seqid = seqid
        return b"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data

    def _read_reply(self) -> tuple[Reply, int]:
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            raise IndexError
        line, *lines = head.decode().lower().split("\r\n")
        fields = dict(one.split(": ", 1) for one in lines)
        size = int(fields["content-length"])
        if not line.startswith("http/1.1 "):
            raise ValueError(f"no reply: {head[:40]!r}")
        if len(rest) < size:
            raise IndexError
        self.is_over = fields.get("connection") == "close"
        answer, end = json.loads(rest[:size]), len(head) + 4 + size
        if "code" in answer:
            return Reply(self._seqid, answer["code"], [], answer.get("retry_after_ms")), end
        return Reply(self._seqid, "ok", [(answer["label"], answer["score"])]), end


def connect(port: int, timeout: float, answer_within: float = 30.0, wire: type[Wire] = Wire) -> Wire:
    """A full accept queue resets connections: try again for a while."""
    until = time.monotonic() + answer_within
    while True:
        try:
            return wire(port, timeout)
        except (ConnectionError, TimeoutError):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _read_reply(data: bytes) -> tuple[Reply, int]:
    version, kind, size = struct.unpack_from(">HHI", data)
    if version != 0x8001 or kind not in (_REPLY, _EXCEPTION):
        raise ValueError(f"no reply: {data[:40]!r}")
    (seqid,) = struct.unpack_from(">i", data, 8 + size)
    fields, end = _read_struct(data, 12 + size)
    if kind == _EXCEPTION:
        return Reply(seqid, "exception", []), end
    if 1 in fields:
        code, retry = _error(fields[1])
        return Reply(seqid, code, [], retry), end
    found = fields.get(0, [])
    return Reply(seqid, "ok", [_answer(one) for one in (found if isinstance(found, list) else [found])]), end


def _answer(fields: dict) -> tuple[str, float]:
    """Of an ``InferenceResult``, or of an ``InferenceOutcome``."""
    if isinstance(fields.get(1), dict):
        fields = fields[1]
    elif isinstance(fields.get(2), dict):
        return _error(fields[2])[0], -1.0
    return fields[1].decode(), fields[2]


def _error(fields: dict) -> tuple[str, int | None]:
    return fields[1].decode(), fields.get(3)


def _read_struct(data: bytes, at: int) -> tuple[dict, int]:
    fields = {}
    while data[at]:
        kind, number = struct.unpack_from(">bh", data, at)
        fields[number], at = _read_value(data, at + 3, kind)
    return fields, at + 1


def _read_value(data: bytes, at: int, kind: int) -> tuple:
    if kind == _STRING:
        (size,) = struct.unpack_from(">I", data, at)
        if at + 4 + size > len(data):
            raise IndexError
        return data[at + 4 : at + 4 + size], at + 4 + size
    if kind == _STRUCT:
        return _read_struct(data, at)
    if kind == _LIST:
        inner, count = struct.unpack_from(">bi", data, at)
        at += 5
        found = []
        for _ in range(count):
            value, at = _read_value(data, at, inner)
            found.append(value)
        return found, at
    form = {_DOUBLE: ">d", _I32: ">i"}[kind]
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
