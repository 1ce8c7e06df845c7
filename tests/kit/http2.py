"""What a client of gRPC sends that keeps to no rule: frames of HTTP/2 as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
INITIAL_WINDOW = 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def opening(settings: bytes = b"") -> bytes:
    """The first bytes of a connection."""
    return PREFACE + frame(SETTINGS, 0, 0, settings)


def head(path: str, stream: int, coding: str = "", metadata: Mapping[str, bytes] = {}) -> bytes:
    """The begin of a call."""
    fields = f":method POST :scheme http :path {path} :authority a content-type application/grpc te trailers".split()
    if coding:
        fields += ["grpc-encoding", coding, "grpc-accept-encoding", "identity,gzip"]
    values = [text.encode() for text in fields]
    for name, value in metadata.items():
        values += [name.encode(), value]
    texts = [bytes([len(value)]) + value for value in values]
    block = b"".join(b"\0" + key + value for key, value in zip(texts[::2], texts[1::2], strict=True))
    return frame(HEADERS, END_HEADERS, stream, block)


def message(stream: int, data: bytes, size: int | None = None, is_compressed: bool = False) -> bytes:
    """A message of ``size`` bytes, of which ``data`` is sent: all of them unless ``size`` says otherwise."""
    sent = bytes([is_compressed]) + struct.pack(">I", len(data) if size is None else size) + data
    return b"".join(frame(DATA, 0, stream, sent[at : at + 2**14]) for at in range(0, len(sent), 2**14))


class Reply(NamedTuple):
    """The one answer to a call: whether it is flagged as compressed, its bytes, and the last header block."""

    is_compressed: bool
    data: bytes
    trailers: bytes


def ask(
    sock: Any, path: str, data: bytes, coding: str, is_compressed: bool = True, metadata: Mapping[str, bytes] = {}
) -> Reply:  # fmt: skip
    """The answer to a call with one message, on a new connection."""
    window = 2**30
    update = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", window))
    sock.sendall(opening(struct.pack(">HI", INITIAL_WINDOW, window)) + update + head(path, 1, coding, metadata))
    sock.sendall(message(1, data, is_compressed=is_compressed) + frame(DATA, END_STREAM, 1))
    received = b""
    for kind, flags, content in _frames(sock):
        if kind == DATA:
            received += content
        elif kind == HEADERS and flags & END_STREAM:
            return Reply(received[:1] == b"\1", received[5:], content)
    raise EOFError("closed before the end of an answer")


def _frames(sock: Any) -> Iterator[tuple[int, int, bytes]]:
    with sock.makefile("rb") as file:
        while len(start := file.read(9)) == 9:
            yield start[3], start[4], file.read(int.from_bytes(start[:3], "big"))
