"""HTTP/1.1 by h11: bytes become requests, an answer becomes bytes. No sockets, no threads, no clock."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

import h11

from torchpipe_server.wire.protocol import CALL, COSTLY_BYTES, HTTP, ProtocolError
from torchpipe_server.wire.scanner import Buffer

MAX_HEAD_BYTES = 8192
MAX_FIELDS = 64
NAME_CHARACTERS = 48
SMALL_CHUNKS = 64
CHUNK_BYTES = 1024
"""A body has so many chunks that are shorter, no more: each costs the same."""
COSTLY_JSON_BYTES = 2**13
COSTLY_QUERY_BYTES = 2**10

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+;=%-]*)(?::\d*)?"
_FIELD_HOST = re.compile(_HOST, re.ASCII)
# Groups: the host, the path, the query.
_TARGET = re.compile(rf"(?:(?i:https?)://(?![/?:]|$)({_HOST})(?=[/?]|$))?(/[^?#]*|\*)?(?:\?([^#]*))?", re.ASCII)
_HEAD_END = re.compile(rb"\n\r?\n")
# TRAP: h11 takes quadratic time for a run of blanks, and for folded lines, which it makes one of: seconds for 8 KiB.
_SLOW = re.compile(rb"[ \t]{64}|\n[ \t]")
# The line before a chunk, behind the end of the last one. Group: its size.
_CHUNK_LINE = re.compile(rb"(?:\r?\n)?([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r\n")
_CHUNK_LINE_BYTES = 256
_EMPTY_LINES = re.compile(rb"(?:\r?\n)+")


class HttpError(ProtocolError):
    """Bytes that are no request, or one that is not answered; nothing that follows them can be read."""

    def __init__(self, status: int, text: str, kind: str = "bad_request") -> None:
        super().__init__(kind, text)
        self.status = status

    def __str__(self) -> str:
        return self.detail


class HttpAnswer(NamedTuple):
    """``kind`` is the body's type, ``headers`` what stands beside it and the length."""

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = {}


class HttpRequest:
    """One request; ``answer`` makes its bytes, once, on any thread.

    method, path: visible ASCII, the path without the query. fields: the headers, their names in lower case.
    size: bytes of the head and of the body. error: why there is no body, of a request that was not read to its end.
    is_last: whether the connection ends behind its answer.
    """

    __slots__ = ("body", "error", "fields", "is_last", "method", "parameters", "path", "query", "size")

    framing, type, seqid = HTTP, CALL, 0

    def __init__(self) -> None:
        self.method, self.path, self.query = "", "", ""
        self.parameters: Mapping[str, str] = {}  # what its route calls parts of the path
        self.fields: Mapping[str, str] = {}
        self.body, self.size = b"", 0
        self.error: ProtocolError | None = None
        self.is_last = False

    @classmethod
    def named(cls, name: str) -> HttpRequest:
        """What is left of one whose ``name`` alone is known; its answer is the connection's last."""
        request = cls()
        request.method, _, request.path = name.partition(" ")
        request.is_last = True
        return request

    @property
    def name(self) -> str:
        """Method and path, cut where they are long."""
        return f"{self.method} {self.path}"[:NAME_CHARACTERS]

    @property
    def host(self) -> str:
        """What the client calls this service; empty where it is not said."""
        return self.fields.get("host", "")

    @property
    def is_json(self) -> bool:
        """Whether the body is, as its kind says."""
        return self.fields.get("content-type", "").partition(";")[0].strip().lower() == "application/json"

    @property
    def is_costly(self) -> bool:
        """Whether it may take milliseconds to decode it."""
        most = COSTLY_JSON_BYTES if self.is_json else COSTLY_BYTES
        return len(self.body) > most or len(self.query) > COSTLY_QUERY_BYTES

    def without_body(self) -> HttpRequest:
        """What an answer needs."""
        head = HttpRequest()
        head.method, head.path, head.is_last, head.error = self.method, self.path, self.is_last, self.error
        return head

    def refused(self, error: ProtocolError) -> HttpRequest:
        """The same, not read to its end because of ``error``; nothing behind it is read."""
        self.error, self.is_last = error, True
        return self

    def answer(self, answer: HttpAnswer, headers: Mapping[str, str] | None = None, is_last: bool = False) -> bytes:
        """The bytes of the answer, for HEAD without its body; ``is_last``: no other request is read."""
        fields = [("Content-Type", answer.kind), ("Content-Length", str(len(answer.body)))]
        fields += [*answer.headers.items(), *(headers or {}).items()]
        if is_last or self.is_last:
            fields.append(("Connection", "close"))
        reason = HTTPStatus(answer.status).phrase
        http = h11.Connection(h11.SERVER)  # NOTE: the one that read the request holds all that came behind it as well
        if self.method == "HEAD":  # whose answer has no body
            http.receive_data(b"HEAD / HTTP/1.1\r\nHost:\r\n\r\n")
            http.next_event()
        data: bytes = http.send(h11.Response(status_code=answer.status, reason=reason.encode(), headers=fields))
        if self.method != "HEAD":
            data += http.send(h11.Data(answer.body))
        return data + http.send(h11.EndOfMessage())

    def read_head(self, event: h11.Request, methods: frozenset[str]) -> None:
        """Take what the head says. Raises ``HttpError``."""
        self.method = event.method.decode()
        if not event.http_version.startswith(b"1."):
            raise HttpError(505, "this port speaks HTTP/1.1")
        if self.method not in methods:
            raise HttpError(501, f"{self.method[:20]} is not served, only {', '.join(sorted(methods))}")
        fields: dict[str, str] = {}
        for name, value in event.headers:
            key, text = name.decode(), value.decode("latin-1")
            fields[key] = f"{fields[key]}, {text}" if key in fields else text
        self.fields = fields
        # NOTE: two programs may answer differently where such a body ends.
        if "transfer-encoding" in fields and "content-length" in fields:
            raise HttpError(400, "both Content-Length and Transfer-Encoding")
        self._read_target(event.target.decode())
        options = {option.strip().lower() for option in fields.get("connection", "").split(",")}
        self.is_last = event.http_version < b"1.1" or "close" in options

    def _read_target(self, text: str) -> None:
        target = _TARGET.fullmatch(text)
        if target is None or (target[1] is None and target[2] is None):
            raise HttpError(400, "the target is not a path")
        host, path, query = target.groups()
        if path == "*" and (self.method != "OPTIONS" or host is not None):
            raise HttpError(400, f"the target * is for OPTIONS, not {self.method}")
        if _FIELD_HOST.fullmatch(self.host) is None:
            raise HttpError(400, "the field Host is no name of a host")
        if host is not None:
            self.fields = {**self.fields, "host": host}
        self.path, self.query = path or "/", query or ""


class HttpReader:
    """Cuts a byte stream into requests. One per connection, for one thread.

    ``methods`` are those that are read, ``body_bytes`` the most that a body may have.
    """

    def __init__(self, methods: frozenset[str], body_bytes: int) -> None:
        self._methods, self._body_bytes = methods, body_bytes
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._request: HttpRequest | None = None  # the one that is read
        self._body = bytearray()
        self._chunks = 0
        self._is_at_line = False  # the body is chunked, and the next bytes are the line of a chunk, or fields
        self._is_at_trailer = False  # they are fields, behind the last chunk
        self._held = 0  # bytes of the unfinished request that h11 has, and those of its body
        self._broken: HttpError | None = None
        self._is_over = False  # behind a request that is the last: what follows is nobody's

    @property
    def pending_bytes(self) -> int:
        """Bytes held here that belong to no whole request yet."""
        return self._held

    @property
    def is_paused(self) -> bool:
        """Whether the last ``feed`` ended within a request of which all is there: none takes so long."""
        return False

    @property
    def request(self) -> HttpRequest | None:
        """The unfinished request, to be answered with an error; its head may be unknown."""
        if self._request is None and (self._held or self._broken):
            self._request = HttpRequest()
        return self._request

    def feed(self, data: Buffer) -> Iterator[HttpRequest]:
        """The requests completed by ``data``, in order, each read when it is asked for. Exhaust it before the next.

        Raises ``HttpError`` behind the last whole request of a broken stream, and for everything fed after it.
        """
        if self._broken is not None:
            raise HttpError(self._broken.status, self._broken.detail, self._broken.kind)
        if self._is_over:
            return
        self._held += len(data)
        try:
            self._http.receive_data(bytes(data))
            while (request := self._next()) is not None:
                yield request
        except HttpError as error:
            self.abandon(error)
            raise
        except h11.RemoteProtocolError as error:
            wrong = HttpError(error.error_status_hint, str(error)[:80])
            self.abandon(wrong)
            raise wrong from None

    def abandon(self, error: ProtocolError) -> None:
        """Give up the unfinished request, whatever it holds; ``error`` is what a further ``feed`` raises."""
        status = error.status if isinstance(error, HttpError) else 400
        self._broken = HttpError(status, error.detail, error.kind)
        self._body, self._held = bytearray(), 0

    @property
    def awaits_invitation(self) -> bool:
        """Whether the client sends the body of its request once it is told to (``Expect: 100-continue``)."""
        return bool(self._http.they_are_waiting_for_100_continue)

    def invitation(self) -> bytes:
        """What tells it."""
        data: bytes = self._http.send(h11.InformationalResponse(status_code=100, headers=[]))
        return data

    def _next(self) -> HttpRequest | None:
        """The next request; ``None`` if it is not whole."""
        if (self._request is None or not self._request.method) and not self._begin():
            return None
        request = self._request
        assert request is not None
        while True:
            if self._is_at_line:
                self._check_line()
            event = self._http.next_event()
            if isinstance(event, h11.Data):
                self._take(event)
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return None
        request.body = bytes(self._body)
        request.size += len(request.body)
        self._is_over = request.is_last
        self._renew(b"" if self._is_over else self._http.trailing_data[0])
        self._request, self._body, self._chunks = None, bytearray(), 0
        return request

    def _renew(self, rest: bytes) -> None:
        """Go on behind a request, or before one, with what was received there."""
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._held = len(rest)
        if rest:  # h11 takes nothing for the end
            self._http.receive_data(rest)

    def _begin(self) -> bool:
        """Read the head of a request; whether it is there."""
        received = self._http.trailing_data[0]
        if (empty := _EMPTY_LINES.match(received)) is not None:
            received = received[empty.end() :]
            self._renew(received)
        if received == b"\r":  # h11 takes it for a wrong line at once
            return False
        size = _check_fields(received)
        event = self._http.next_event()
        if not isinstance(event, h11.Request):
            return False
        request = self._request or HttpRequest()
        self._request, request.size = request, size
        request.read_head(event, self._methods)
        if int(request.fields.get("content-length", 0)) > self._body_bytes:
            raise self._too_large()
        self._is_at_line, self._is_at_trailer = "transfer-encoding" in request.fields, False
        return True

    def _check_line(self) -> None:
        """Bound what h11 is to read before a chunk, or behind the last one: its patterns go back there as well."""
        received = self._http.trailing_data[0]
        if not self._is_at_trailer:
            line = _CHUNK_LINE.match(received, 0, _CHUNK_LINE_BYTES)
            if line is None:
                if b"\n" in received[:_CHUNK_LINE_BYTES].lstrip(b"\r\n"):
                    raise HttpError(400, "the line of a chunk is no size, or does not end with CR LF")
                if len(received) >= _CHUNK_LINE_BYTES:
                    raise HttpError(400, f"the line of a chunk has more than {_CHUNK_LINE_BYTES} bytes")
                return
            size = int(line[1], 16)
            if len(self._body) + size > self._body_bytes:
                raise self._too_large()
            self._is_at_line = self._is_at_trailer = size == 0
            received = received[line.end() :]
        if self._is_at_trailer:
            _check_fields(b"\n" + received)  # an empty line may be the first

    def _take(self, piece: h11.Data) -> None:
        self._body += piece.data
        self._chunks += piece.chunk_start
        self._is_at_line = piece.chunk_end
        if len(self._body) > self._body_bytes:
            raise self._too_large()
        if self._chunks > SMALL_CHUNKS + len(self._body) // CHUNK_BYTES:
            raise HttpError(413, f"too many chunks of fewer than {CHUNK_BYTES} bytes", "too_large")

    def _too_large(self) -> HttpError:
        if self._body_bytes:
            return HttpError(413, f"a body of more than {self._body_bytes} bytes (--max-message-bytes)", "too_large")
        return HttpError(413, "a request has no body here", "too_large")


def _check_fields(received: bytes) -> int:
    """How many bytes of it are a head, all as long as its end is not there. Raises ``HttpError`` for a costly one."""
    end = _HEAD_END.search(received)
    size = end.end() if end else len(received)
    if size > MAX_HEAD_BYTES:  # h11 bounds only one that is not whole
        if b"\n" not in received[:MAX_HEAD_BYTES]:
            raise HttpError(414, f"a target of more than {MAX_HEAD_BYTES} bytes")
        raise HttpError(431, f"a head of more than {MAX_HEAD_BYTES} bytes")
    if received.count(b"\n", 0, size) > MAX_FIELDS + 2:
        raise HttpError(431, f"a request has {MAX_FIELDS} header fields at most")
    if _SLOW.search(received, 0, size):
        raise HttpError(400, "a header is folded, or has many blanks in a row")
    return size
