"""HTTP/1.1 without bodies, read and written by h11: bytes become requests, an answer becomes bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

import h11

MAX_HEAD_BYTES = 8192
MAX_FIELDS = 64

_TARGET = re.compile(rb"(?:http://[^/?#]*)?([/*][^?]*)")
_HEAD_END = re.compile(rb"\n\r?\n")
# TRAP: h11 takes quadratic time for a run of blanks, and for folded lines, which it makes one of: seconds for 8 KiB.
_SLOW = re.compile(rb"[ \t]{64}|\n[ \t]")


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


class HttpAnswer(NamedTuple):
    """``kind`` is the body's type."""

    status: int
    kind: str
    body: bytes


class HttpConnection:
    """What is said on one connection: a request, its answer, the next request."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._has_body = True

    @property
    def has_begun(self) -> bool:
        """Whether some of the next request is there."""
        return bool(self._http.trailing_data[0])

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may follow the one that was answered."""
        return self._http.our_state is h11.DONE

    def receive(self, data: bytes) -> None:
        self._http.receive_data(data)

    def next_request(self) -> HttpRequest | None:
        """The next one; ``None`` if it is not whole. Raises ``HttpError``, which can still be answered."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self._has_body = True
        received = self._http.trailing_data[0]
        end = _HEAD_END.search(received)
        if _SLOW.search(received, 0, end.end() if end else len(received)):
            raise HttpError(400, "a header is folded, or has many blanks in a row")
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise HttpError(error.error_status_hint, str(error)[:80]) from None
        if not isinstance(event, h11.Request):
            return None
        self._has_body = event.method != b"HEAD"
        request = _request(event)
        self._http.next_event()  # the end of a request without a body
        return request

    def answer(self, answer: HttpAnswer, headers: Mapping[str, str], is_last: bool = False) -> bytes:
        """The answer to the last request, for HEAD without its body; ``is_last``: no other one is read."""
        fields = [("Content-Type", answer.kind), ("Content-Length", str(len(answer.body))), *headers.items()]
        if is_last:
            fields.append(("Connection", "close"))
        reason = HTTPStatus(answer.status).phrase
        response = h11.Response(status_code=answer.status, reason=reason.encode(), headers=fields)
        data: bytes = self._http.send(response)
        if self._has_body:
            data += self._http.send(h11.Data(answer.body))
        data += self._http.send(h11.EndOfMessage())
        return data


def _request(event: h11.Request) -> HttpRequest:
    if not event.http_version.startswith(b"1."):
        raise HttpError(505, "this port speaks HTTP/1.1")
    method, fields = event.method.decode(), dict(event.headers)
    if method not in ("GET", "HEAD"):
        raise HttpError(501, f"{method[:20]} is not served, only GET and HEAD")
    # NOTE: where a body ends is a question that two programs may answer differently. There is none here.
    if b"transfer-encoding" in fields or fields.get(b"content-length", b"0") != b"0":
        raise HttpError(413, f"{method} has no body here")
    if len(event.headers) > MAX_FIELDS:
        raise HttpError(431, f"a request has {MAX_FIELDS} header fields at most")
    target = _TARGET.match(event.target)
    if target is None:
        raise HttpError(400, "the target is not a path")
    return HttpRequest(method, target[1].decode(), fields.get(b"host", b"").decode("latin-1"))
