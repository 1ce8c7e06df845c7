"""HTTP/1.1: bytes become requests, and answers become bytes. No sockets, no threads, no clock.

httptools parses header fields. The ends of heads and bodies are found here, with every size bounded first.
"""

from __future__ import annotations

import re

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from torchpipe_py.serving import HttpRequest
from torchpipe_server.wire.errors import ProtocolError

MAX_HEAD_BYTES = 8192
MAX_FIELDS = 64
SMALL_CHUNKS = 64
CHUNK_BYTES = 1024
"""A body has at most ``SMALL_CHUNKS`` shorter chunks, because each chunk costs the same."""
INVITATION = b"HTTP/1.1 100 Continue\r\n\r\n"

_METHOD, _VERSION = rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+)", rb"HTTP/(\d)\.(\d)\r?\n"
_HOST = rb"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+;=%-]*)(?::\d*)?"
_FIELD_HOST = re.compile(_HOST.decode(), re.ASCII)
# Groups: the method, the host of an absolute target, the path, the query, both digits of the version.
_REQUEST_LINE = re.compile(
    rb"%b (?:(?i:https?)://(?![/?: ])(%b)(?=[/? ]))?(/[!\"$->@-~]*|\*)?(?:\?([!\"$-~]*))? %b"
    % (_METHOD, _HOST, _VERSION)
)
_ANY_REQUEST_LINE = re.compile(rb"%b ([!-~]+) %b" % (_METHOD, _VERSION))
_EMPTY_LINES = re.compile(rb"(?:\r?\n)+")
_HEAD_END = re.compile(rb"\n\r?\n")
_CHUNK_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t -~\x80-\xff]*)?\r\n")
_NEXT_CHUNK_LINE = re.compile(rb"\r\n" + _CHUNK_LINE.pattern)  # after the end of the chunk before it
_CHUNK_LINE_BYTES = 256


class HttpError(ProtocolError):
    """An invalid or unsupported request, after which nothing can be read."""

    def __init__(self, status: int, text: str, kind: str = "bad_request") -> None:
        super().__init__(kind, text)
        self.status = status

    def __str__(self) -> str:
        return self.detail


class HttpReader:
    """Splits the byte stream of one connection into requests.

    ``methods`` are the accepted ones, ``body_bytes`` is the largest body.
    """

    def __init__(self, methods: frozenset[str], body_bytes: int) -> None:
        self._methods, self._body_bytes = methods, body_bytes
        self._data, self._at = b"", 0  # received bytes, and the index of the first unread one
        self._request: HttpRequest | None = None  # with its head read, its body not yet
        self._method = ""  # known before all of the head is checked
        self._head_size = 0
        self._body: bytes | bytearray = b""
        self._left = 0  # unread bytes of the body or of its chunk
        self._is_chunked = self._is_at_trailers = False
        self._chunks = 0  # begun so far
        self._broken: HttpError | None = None
        self.is_over = False  # after the last request: the rest is ignored
        self.awaits_invitation = False
        """Whether the client waits for ``100 Continue`` before it sends the body."""

    is_paused = False

    @property
    def pending_bytes(self) -> int:
        """Bytes kept here of requests that were not returned yet."""
        if self._broken is not None:
            return 0
        return len(self._data) - self._at + len(self._body) + (self._head_size if self._request is not None else 0)

    @property
    def request(self) -> HttpRequest | None:
        """The unfinished request, to be answered with an error; its head may be unknown."""
        if self._request is None and (self.pending_bytes or self._broken):
            self._request = HttpRequest(self._method, is_last=True)
        return self._request

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        if self._broken is None and not self.is_over:
            self._data, self._at = self._data[self._at :] + data if self._at < len(self._data) else data, 0

    def next(self) -> HttpRequest | None:
        """The next request; ``None`` if it is incomplete. After a first ``HttpError``, raises it every time."""
        if self._broken is not None:
            raise HttpError(self._broken.status, self._broken.detail, self._broken.kind)
        if self._request is None and self._at == len(self._data):
            return None
        try:
            request = self._request or self._read_head()
            if request is None:
                return None
            if self.awaits_invitation and self._at < len(self._data):
                self.awaits_invitation = False
            if not (self._read_chunks() if self._is_chunked else self._read_bytes()):
                return None
        except HttpError as error:
            self.abandon(error)
            raise
        request.body = bytes(self._body)
        self._request, self._method, self._body, self.awaits_invitation = None, "", b"", False
        if request.is_last:
            self.is_over, self._data, self._at = True, b"", 0
        return request

    def abandon(self, error: ProtocolError) -> None:
        """Give up the unfinished request; further calls of ``next`` raise ``error``."""
        status = error.status if isinstance(error, HttpError) else 400
        self._broken = HttpError(status, error.detail, error.kind)
        self._body, self._data, self._at = b"", b"", 0

    def _read_head(self) -> HttpRequest | None:
        """Begin a request if its head is complete."""
        data, at = self._data, self._at
        if data[at] < 0x21:
            if (empty := _EMPTY_LINES.match(data, at)) is not None:
                at = self._at = empty.end()
            if at < len(data) and data[at] < 0x21 and data[at:] != b"\r":
                raise HttpError(400, "no request line")
        end = self._find_end()
        if end is None:
            return None
        line = _REQUEST_LINE.match(data, at, end)
        if line is None:
            raise self._refuse_line(data, at, end)
        name, host, path, query, major, minor = line.groups()
        self._method, is_old = (method := name.decode()), minor == b"0"
        if major != b"1" or method not in self._methods:
            raise self._refuse_line(data, at, end)
        fields = read_fields(data[line.end() : end])
        self._is_chunked = "transfer-encoding" in fields
        if "host" in fields:
            if _FIELD_HOST.fullmatch(fields["host"]) is None:  # also for two hosts
                raise HttpError(400, "the field Host is not the name of a host")
        elif not is_old:
            raise HttpError(400, "the field Host is missing")
        if self._is_chunked and fields["transfer-encoding"].lower() != "chunked":
            raise HttpError(501, "the only supported Transfer-Encoding is chunked")
        if (path or host) is None or (path == b"*" and (method != "OPTIONS" or host is not None)):
            raise HttpError(400, "the target is not a path")
        if host is not None:
            fields["host"] = host.decode()
        is_last = is_old or ("connection" in fields and "close" in _options(fields["connection"]))
        # NOTE: Python refuses to convert thousands of zeros.
        self._left = int(fields["content-length"].lstrip("0") or 0) if "content-length" in fields else 0
        request = HttpRequest(method, (path or b"/").decode(), (query or b"").decode(), fields, is_last)
        self._request, self._at, self._head_size = request, end, end - at
        if self._left > self._body_bytes:
            request.is_last = True
            raise self._too_large()
        if self._is_chunked:
            self._is_at_trailers, self._chunks = False, 0
        if "expect" in fields:
            self.awaits_invitation = not is_old and fields["expect"].lower() == "100-continue"
        return request

    def _refuse_line(self, data: bytes, at: int, end: int) -> HttpError:
        """The error of a request line that is invalid, or asks for another method or version."""
        line = _ANY_REQUEST_LINE.match(data, at, end)
        if line is None:
            return HttpError(400, "the first line is not a method, a target and a version")
        self._method = method = line[1].decode()
        if line[3] != b"1":
            return HttpError(505, "this port speaks HTTP/1.1")
        if method not in self._methods:
            return HttpError(501, f"{method[:20]} is not supported, only {', '.join(sorted(self._methods))}")
        return HttpError(400, "the target is not a path")

    def _find_end(self) -> int | None:
        """The end of the head or the trailers that begin here; ``None`` if it has not arrived."""
        match = _HEAD_END.search(self._data, self._at, self._at + MAX_HEAD_BYTES)
        size = (match.end() if match else len(self._data)) - self._at
        if size > MAX_HEAD_BYTES:
            if self._data.find(b"\n", self._at, self._at + MAX_HEAD_BYTES) < 0:
                raise HttpError(414, f"a target of more than {MAX_HEAD_BYTES} bytes")
            raise HttpError(431, f"a head of more than {MAX_HEAD_BYTES} bytes")
        if self._data.count(b"\n", self._at, self._at + size) > MAX_FIELDS + 2:
            raise HttpError(431, f"a request has {MAX_FIELDS} header fields at most")
        return match.end() if match else None

    def _read_bytes(self) -> bool:
        """Read available bytes of the body or its chunk; returns whether it is complete."""
        piece = self._data[self._at : self._at + self._left]
        self._at += len(piece)
        self._left -= len(piece)
        if not self._body:
            self._body = piece  # most bodies come in one piece, which is not copied
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece
        return not self._left

    def _read_chunks(self) -> bool:
        """Read available chunks and trailers; returns whether the body is complete."""
        while not self._is_at_trailers:
            if not (self._read_bytes() and self._read_chunk_line()):
                return False
        end = self._find_end()
        if end is None:
            return False
        read_fields(self._data[self._at + 1 : end])
        self._at = end
        return True

    def _read_chunk_line(self) -> bool:
        """Begin a chunk or the trailers; returns whether the line before it is complete."""
        data, at, until = self._data, self._at, self._at + _CHUNK_LINE_BYTES
        line = (_NEXT_CHUNK_LINE if self._chunks else _CHUNK_LINE).match(data, at, until)
        if line is None:
            if data.find(b"\n", at + 2 if self._chunks else at, until) >= 0:
                raise HttpError(400, "the line before a chunk is not a size that ends with CR LF")
            if len(data) >= until:
                raise HttpError(400, f"the line before a chunk has more than {_CHUNK_LINE_BYTES} bytes")
            return False
        self._left = int(line[1], 16)
        self._chunks += 1
        self._is_at_trailers = not self._left
        # NOTE: leave the line feed of the last one: with the empty line after it, it ends the trailers.
        self._at = line.end() - self._is_at_trailers
        if len(self._body) + self._left > self._body_bytes:
            raise self._too_large()
        if self._left and self._chunks > SMALL_CHUNKS + len(self._body) // CHUNK_BYTES:
            raise HttpError(413, f"too many chunks of fewer than {CHUNK_BYTES} bytes", "too_large")
        return True

    def _too_large(self) -> HttpError:
        if self._body_bytes:
            return HttpError(413, f"a body of more than {self._body_bytes} bytes (--max-message-bytes)", "too_large")
        return HttpError(413, "this port does not accept request bodies", "too_large")


def _options(field: str) -> set[str]:
    """The options of a Connection field."""
    return {option.strip() for option in field.lower().split(",")}


class _Fields(dict[str, str]):
    """Header fields as httptools reports them; equal names are joined."""

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode().lower(), value.decode("latin-1").rstrip(" \t")
        self[key] = f"{self[key]}, {text}" if key in self else text


def read_fields(lines: bytes) -> dict[str, str]:
    """Header fields up to the empty line, with names in lower case. Raises ``HttpError``.

    It refuses a second Content-Length or one beside Transfer-Encoding, folded lines, and blanks before a colon.
    """
    fields = _Fields()
    parser = HttpRequestParser(fields)
    # RFC 9112 2.2 allows a bare line feed; the caller checks transfer codings.
    parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_transfer_encoding=True)
    try:
        parser.feed_data(b"POST / HTTP/1.1\r\n%b" % lines)
    except HttpParserUpgrade:
        pass  # a server may ignore an upgrade
    except HttpParserError as error:
        raise HttpError(400, str(error)[:80]) from None
    return fields
