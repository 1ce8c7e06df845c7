"""HTTP/1.1: bytes become requests. No sockets, no threads, no clock.

httptools reads header fields. Where a head ends, and a body, is said here: nothing is read before it is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from torchpipe_server.wire.http import HttpError, HttpRequest
from torchpipe_server.wire.scanner import Buffer, ProtocolError

MAX_HEAD_BYTES = 8192
MAX_FIELDS = 64
SMALL_CHUNKS = 64
CHUNK_BYTES = 1024
"""A body has so many chunks that are shorter, no more: each costs the same."""

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/(\d)\.(\d)\r?\n")
_EMPTY_LINES = re.compile(rb"(?:\r?\n)+")
_HEAD_END = re.compile(rb"\n\r?\n")
_CHUNK_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,16})[ \t]*(?:;[\t -~\x80-\xff]*)?\r\n")
_NEXT_CHUNK_LINE = re.compile(rb"\r\n" + _CHUNK_LINE.pattern)  # behind the end of the chunk before it
_CHUNK_LINE_BYTES = 256


class HttpReader:
    """Cuts a byte stream into requests. One per connection, for one thread.

    ``methods`` are those that are read, ``body_bytes`` the most that a body may have.
    """

    def __init__(self, methods: frozenset[str], body_bytes: int) -> None:
        self._methods, self._body_bytes = methods, body_bytes
        self._data, self._at = b"", 0  # what was received, and where in it that begins which is not read yet
        self._request: HttpRequest | None = None  # its head is read, its body is not
        self._body: bytes | bytearray = b""
        self._left = 0  # bytes of the body, or of its chunk, that are still to be read
        self._chunks = 0  # whose lines are read
        self._is_chunked = False
        self._is_at_trailers = False
        self._broken: HttpError | None = None
        self._is_over = False  # behind a request that is the last: what follows is nobody's
        self.awaits_invitation = False
        """Whether the client sends the body of its request once it is told to (``Expect: 100-continue``)."""

    @property
    def pending_bytes(self) -> int:
        """Bytes held here that belong to no whole request yet."""
        if self._broken is not None or (self._at == len(self._data) and self._request is None):
            return 0
        head = self._request.size if self._request is not None else 0
        return head + len(self._body) + len(self._data) - self._at

    @property
    def is_paused(self) -> bool:
        """Whether the last ``feed`` ended within a request of which all is there: none takes so long."""
        return False

    @property
    def request(self) -> HttpRequest | None:
        """The unfinished request, to be answered with an error; its head may be unknown."""
        if self._request is None and (self.pending_bytes or self._broken):
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
        self._data = self._data + data if self._data else bytes(data)
        try:
            while self._at < len(self._data) and (request := self._next()) is not None:
                yield request
        except HttpError as error:
            self.abandon(error)
            raise
        self._data, self._at = self._data[self._at :], 0

    def abandon(self, error: ProtocolError) -> None:
        """Give up the unfinished request, whatever it holds; ``error`` is what a further ``feed`` raises."""
        status = error.status if isinstance(error, HttpError) else 400
        self._broken = HttpError(status, error.detail, error.kind)
        self._body, self._data, self._at = b"", b"", 0

    def invitation(self) -> bytes:
        """What tells the client to send the body."""
        self.awaits_invitation = False
        return b"HTTP/1.1 100 Continue\r\n\r\n"

    def _next(self) -> HttpRequest | None:
        """The next request; ``None`` if it is not whole."""
        if self._request is None and not self._read_head():
            return None
        request = self._request
        assert request is not None
        if self._at < len(self._data):
            self.awaits_invitation = False
        if not (self._read_chunks() if self._is_chunked else self._read_bytes()):
            return None
        self.awaits_invitation = False
        request.body = bytes(self._body)
        request.size += len(request.body)
        self._request, self._body = None, b""
        if request.is_last:
            self._is_over, self._data, self._at = True, b"", 0
        return request

    def _read_head(self) -> bool:
        """Begin a request; whether all of its head is there."""
        data, at = self._data, self._at
        if at < len(data) and data[at] < 0x21:
            if (empty := _EMPTY_LINES.match(data, at)) is not None:
                at = self._at = empty.end()
            if at < len(data) and data[at] < 0x21 and data[at:] != b"\r":
                raise HttpError(400, "no request line")
        end = self._find_end()
        if end is None:
            return False
        line = _REQUEST_LINE.match(data, at, end)
        if line is None:
            raise HttpError(400, "the first line is no method, target and version")
        self._request = request = HttpRequest(line[1].decode())
        request.size = end - at
        if line[3] != b"1":
            raise HttpError(505, "this port speaks HTTP/1.1")
        if request.method not in self._methods:
            raise HttpError(501, f"{request.method[:20]} is not served, only {', '.join(sorted(self._methods))}")
        fields = read_fields(data[line.end() : end])
        request.read_head(line, fields)
        self._at = end
        self._is_chunked, self._is_at_trailers, self._chunks = "transfer-encoding" in fields, False, 0
        self._left = int(fields.get("content-length", "").lstrip("0") or 0)  # of thousands of zeros Python makes no int
        if self._left > self._body_bytes:
            raise self._too_large()
        self.awaits_invitation = line[4] != b"0" and fields.get("expect", "").lower() == "100-continue"
        return True

    def _find_end(self) -> int | None:
        """Where the head that begins here ends, or the trailers; ``None`` while that is not there."""
        found = _HEAD_END.search(self._data, self._at, self._at + MAX_HEAD_BYTES)
        size = (found.end() if found else len(self._data)) - self._at
        if size > MAX_HEAD_BYTES:
            if self._data.find(b"\n", self._at, self._at + MAX_HEAD_BYTES) < 0:
                raise HttpError(414, f"a target of more than {MAX_HEAD_BYTES} bytes")
            raise HttpError(431, f"a head of more than {MAX_HEAD_BYTES} bytes")
        if self._data.count(b"\n", self._at, self._at + size) > MAX_FIELDS + 2:
            raise HttpError(431, f"a request has {MAX_FIELDS} header fields at most")
        return found.end() if found else None

    def _read_bytes(self) -> bool:
        """Take what is there of the body, or of its chunk; whether that is all of it."""
        piece = self._data[self._at : self._at + self._left]
        self._at += len(piece)
        self._left -= len(piece)
        if not self._body:
            self._body = piece  # most come in one piece: it is not copied again
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += piece
        return not self._left

    def _read_chunks(self) -> bool:
        """Take what is there of a body in chunks, and the trailers; whether that is all of them."""
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
        """Begin a chunk, or the trailers; whether all of the line before it is there."""
        data, at, until = self._data, self._at, self._at + _CHUNK_LINE_BYTES
        line = (_NEXT_CHUNK_LINE if self._chunks else _CHUNK_LINE).match(data, at, until)
        if line is None:
            if data.find(b"\n", at + 2 if self._chunks else at, until) >= 0:
                raise HttpError(400, "the line of a chunk is no size, or does not end with CR LF")
            if len(data) >= until:
                raise HttpError(400, f"the line of a chunk has more than {_CHUNK_LINE_BYTES} bytes")
            return False
        self._left = int(line[1], 16)
        self._chunks += 1
        self._is_at_trailers = not self._left
        # NOTE: the line feed of the last one is left: an empty line behind it ends the trailers.
        self._at = line.end() - self._is_at_trailers
        if len(self._body) + self._left > self._body_bytes:
            raise self._too_large()
        if self._left and self._chunks > SMALL_CHUNKS + len(self._body) // CHUNK_BYTES:
            raise HttpError(413, f"too many chunks of fewer than {CHUNK_BYTES} bytes", "too_large")
        return True

    def _too_large(self) -> HttpError:
        if self._body_bytes:
            return HttpError(413, f"a body of more than {self._body_bytes} bytes (--max-message-bytes)", "too_large")
        return HttpError(413, "a request has no body here", "too_large")


class _Fields(dict[str, str]):
    """Header fields, told by httptools one by one; those of one name become one."""

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.lower().decode(), value.rstrip(b" \t").decode("latin-1")
        self[key] = f"{self[key]}, {text}" if key in self else text


def read_fields(lines: bytes) -> Mapping[str, str]:
    """Lines of header fields up to the empty one, their names in lower case. Raises ``HttpError``.

    A second Content-Length, one beside Transfer-Encoding, folded lines, blanks before a colon: none of them is read.
    """
    fields = _Fields()
    parser = HttpRequestParser(fields)
    # RFC 9112 2.2 allows a line feed alone; of codings whoever asks for the fields knows more.
    parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_transfer_encoding=True)
    try:
        parser.feed_data(b"POST / HTTP/1.1\r\n")
        parser.feed_data(lines)
    except HttpParserUpgrade:
        pass  # nobody has to follow the wish
    except HttpParserError as error:
        raise HttpError(400, str(error)[:80]) from None
    return fields
