"""HTTP/1.1 as far as questions without a body need it: bytes become a request, an answer becomes bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

MAX_HEAD_BYTES = 8192
MAX_FIELDS = 64

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) (?:http://[^\s/?#]*)?([/*][!-~]*) HTTP/(\d)\.(\d)")
# TRAP: with a part of its own for the blanks before a value, a run of blanks takes quadratic time.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")


class HttpError(Exception):
    """Bytes that are no request, or one that is not answered; nothing that follows them can be read."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HttpRequest(NamedTuple):
    """``path`` is visible ASCII, without the query; ``host`` is empty where none is named."""

    method: str
    path: str
    host: str
    keeps_alive: bool


class HttpAnswer(NamedTuple):
    """``kind`` is the body's type."""

    status: int
    kind: str
    body: bytes


def read_request(received: bytearray) -> HttpRequest | None:
    """Take the first request from what was received; ``None`` if it is not whole. Raises ``HttpError``."""
    while received.startswith((b"\r", b"\n")):
        del received[:1]  # some clients end a request with one line too many
    if received and not received[:1].isupper():
        raise HttpError(400, "this port speaks HTTP")
    end = _HEAD_END.search(received, 0, MAX_HEAD_BYTES)
    if end is None:
        if len(received) >= MAX_HEAD_BYTES:
            raise HttpError(431, f"a request has {MAX_HEAD_BYTES} bytes at most")
        return None
    line, *fields = _LINE_END.split(received[: end.start()])
    del received[: end.end()]
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise HttpError(400, "the request line is wrong")
    method, target, major, minor = found.groups()
    if major != b"1":
        raise HttpError(505, "this port speaks HTTP/1.1")
    return _request(method.decode(), target, minor != b"0", _fields(fields))


def _request(method: str, target: bytes, keeps_alive: bool, fields: Mapping[bytes, list[bytes]]) -> HttpRequest:
    if method not in ("GET", "HEAD"):
        raise HttpError(501, f"{method} is not served, only GET and HEAD")
    # NOTE: where a body ends is a question that two programs may answer differently. There is none here.
    if b"transfer-encoding" in fields or any(length != b"0" for length in fields.get(b"content-length", ())):
        raise HttpError(413, f"{method} has no body here")
    hosts = fields.get(b"host", [b""])
    if len(hosts) > 1:
        raise HttpError(400, "a request names one host")
    is_last = any(b"close" in value.lower() for value in fields.get(b"connection", ()))
    path = target.partition(b"?")[0].decode()
    return HttpRequest(method, path, hosts[0].decode("latin-1"), keeps_alive and not is_last)


def _fields(lines: list[bytes]) -> Mapping[bytes, list[bytes]]:
    if len(lines) > MAX_FIELDS:
        raise HttpError(431, f"a request has {MAX_FIELDS} header fields at most")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise HttpError(400, "a header field is wrong")
        fields.setdefault(found[1].lower(), []).append(found[2].strip())
    return fields


def write_answer(answer: HttpAnswer, has_body: bool, is_last: bool, headers: Mapping[str, str]) -> bytes:
    """The answer, for HEAD without its body; ``is_last`` says that the connection is closed behind it."""
    lines = [
        f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.kind}",
        f"Content-Length: {len(answer.body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if is_last:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + (answer.body if has_body else b"")
