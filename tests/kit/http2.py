"""What a client of gRPC sends that keeps to no rule: frames of HTTP/2 as bytes."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def opening(settings: bytes = b"") -> bytes:
    """The first bytes of a connection."""
    return PREFACE + frame(SETTINGS, 0, 0, settings)


def head(path: str, stream: int) -> bytes:
    """The begin of a call."""
    fields = f":method POST :scheme http :path {path} :authority a content-type application/grpc te trailers"
    texts = [bytes([len(text)]) + text.encode() for text in fields.split()]
    block = b"".join(b"\0" + key + value for key, value in zip(texts[::2], texts[1::2], strict=True))
    return frame(HEADERS, END_HEADERS, stream, block)


def message(stream: int, data: bytes, size: int | None = None) -> bytes:
    """A message of ``size`` bytes, of which ``data`` is sent: all of them unless ``size`` says otherwise."""
    sent = b"\0" + struct.pack(">I", len(data) if size is None else size) + data
    return b"".join(frame(DATA, 0, stream, sent[at : at + 2**14]) for at in range(0, len(sent), 2**14))
