"""The bytes of a request over HTTP, made in advance but for its length, and the reading of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchpipe_py.loadtest.errors import ReplyError

_RECEIVE_BYTES = 2**16
_HEAD_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,12})[ \t]*\r\n", re.IGNORECASE)


class HttpStatusError(Exception):
    """An answer that is no 200; ``code`` and ``message`` are what the service says in its JSON, or the status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"status {status}: {message or code}")
        self.code, self.message = code, message


@dataclass(frozen=True)
class HttpResult:
    """``label`` is that of the answer's JSON, None where it has none."""

    label: str | None


class HttpWire:
    """Images as they are, each POSTed to ``path``; answers as JSON."""

    def __init__(self, host: str, path: str) -> None:
        self._host, self._path = host, path

    def __str__(self) -> str:
        return f"OPTIONS {self._path} over HTTP"

    def body(self, data: bytes) -> bytes:
        """An image's part of a request."""
        return data

    def template(self, count: int, client: int) -> HttpTemplate:
        """Of the requests of that client; ``count`` is 1."""
        return HttpTemplate(self._head("POST"))

    def probe(self) -> Sequence[bytes]:
        """A request that any service answers, be it with an error."""
        return [f"{self._head('OPTIONS')}Content-Length: 0\r\n\r\n".encode()]

    def reader(self, source: Any) -> HttpAnswers:
        """Of the answers on a connection: ``source.read(n)`` returns at most n bytes, and at least one."""
        return HttpAnswers(source)

    def _head(self, verb: str) -> str:
        return f"{verb} {self._path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/octet-stream\r\n"


class HttpTemplate:
    """A request without its length and its body."""

    def __init__(self, head: str) -> None:
        self._head = f"{head}Content-Length: "

    def fill(self, sequence: int, bodies: Sequence[bytes]) -> list[bytes]:
        """The buffers of a request with this body, the only one."""
        (body,) = bodies
        return [f"{self._head}{len(body)}\r\n\r\n".encode(), body]


class HttpAnswers:
    """Reads the answers of one connection."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self, sequence: int, count: int) -> list[Any]:
        """The next answer as a list of one: an ``HttpResult``, or an ``HttpStatusError``.

        Raises ``ReplyError`` for what is no answer with a length, and what ``source`` raises.
        """
        data = self._source.read(_RECEIVE_BYTES)
        while (end := data.find(_HEAD_END)) < 0:
            data += self._source.read(_RECEIVE_BYTES)
        status, length = _STATUS.match(data), _LENGTH.search(data, 0, end + 2)
        if status is None or length is None:
            raise ReplyError(f"no answer with a Content-Length: {data[:40]!r}")
        end += len(_HEAD_END)
        size = end + int(length[1])
        while len(data) < size:
            data += self._source.read(_RECEIVE_BYTES)
        if len(data) > size:
            raise ReplyError(f"{len(data) - size} bytes behind the answer")
        return [_result(int(status[1]), data[end:])]


def _result(status: int, body: bytes) -> HttpResult | HttpStatusError:
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    members = said if isinstance(said, dict) else {}
    if status != 200:
        return HttpStatusError(status, str(members.get("code", status)), str(members.get("error", "")))
    label = members.get("label")
    return HttpResult(None if label is None else str(label))
