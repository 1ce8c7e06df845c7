#!/usr/bin/env python3
"""One call of ``infer_batch`` by a socket alone: the bytes that a client in any language writes and reads.

    python scripts/socket_client.py photo.jpg --port 8888

Thrift's binary protocol without frames. Prints label and score and exits with 0, or prints the error and exits with 1.
"""

from __future__ import annotations

import argparse
import socket
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

STOP, DOUBLE, I32, STRING, STRUCT = 0, 4, 8, 11, 12
CALL, EXCEPTION = 0x80010001, 3  # version 1 and the kind of message


def read(stream: BinaryIO, form: str) -> Any:
    """Read one value; ``form`` is a format of ``struct``."""
    data = stream.read(struct.calcsize(form))
    if len(data) < struct.calcsize(form):
        raise ConnectionError("the service closed the connection without an answer")
    return struct.unpack(form, data)[0]


def read_struct(stream: BinaryIO) -> dict[int, Any]:
    """Values by field number: the answer holds strings, numbers and structs."""
    found: dict[int, Any] = {}
    while (kind := read(stream, ">b")) != STOP:
        number = read(stream, ">h")
        if kind == STRUCT:
            found[number] = read_struct(stream)
        elif kind == STRING:
            found[number] = read(stream, f">{read(stream, '>I')}s").decode()
        else:
            found[number] = read(stream, {DOUBLE: ">d", I32: ">i"}[kind])
    return found


def infer_batch(host: str, port: int, image: bytes) -> tuple[str, float]:
    """Label and score; ``RuntimeError`` with any other answer of the service."""
    with socket.create_connection((host, port), timeout=30) as sock, sock.makefile("rb") as stream:
        name = b"infer_batch"
        head = struct.pack(f">II{len(name)}si", CALL, len(name), name, 1)  # 1: the call's sequence number
        uuid = struct.pack(">bhI", STRING, 1, 0)
        data = struct.pack(">bhI", STRING, 2, len(image)) + image
        sock.sendall(head + struct.pack(">bh", STRUCT, 1) + uuid + data + bytes([STOP, STOP]))
        kind = read(stream, ">I") & 0xFF
        read(stream, f">{read(stream, '>I')}s")  # the method's name again
        read(stream, ">i")  # and the sequence number
        answer = read_struct(stream)
    if kind == EXCEPTION:
        raise RuntimeError(answer[1])
    if 1 in answer:  # InferenceError: code, message
        raise RuntimeError(f"{answer[1][1]}: {answer[1][2]}")
    return answer[0][1], answer[0][2]  # InferenceResult: label, score


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Ask the service for the label of one image.")
    parser.add_argument("image", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8888)
    options = parser.parse_args()
    try:
        label, score = infer_batch(options.host, options.port, options.image.read_bytes())
    except (OSError, RuntimeError) as error:
        print(f"socket_client: {error}", file=sys.stderr)
        return 1
    print(f"{label} {score:.4f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
