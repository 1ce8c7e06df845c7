"""A request over HTTP, read, and its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from time import time
from typing import Any, NamedTuple

SMALL_BYTES = 2**16
"""Bytes of a body that are read, inflated or compressed on any thread; more takes milliseconds, and is done aside."""
NAME_CHARACTERS = 48
UNROUTED = "http"
"""The label of a request without a route: a client's invented path must not become a counter."""

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})
_FRAMING = frozenset({"connection", "content-length", "content-type", "transfer-encoding"})
"""Header fields that an answer has already: a second one would let its reader find another end."""
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def joined_fields(pairs: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Header fields or metadata by name; values of equal names are joined, binary ones are left out."""
    fields: dict[str, str] = {}
    for name, value in pairs:
        if isinstance(value, str):
            fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


class HttpAnswer(NamedTuple):
    """An answer: ``kind`` is the body's content type; ``headers`` are sent in addition to type and length.

    If making the body takes long, give ``make`` in its place: it returns the body, and is called on another thread than
    the event loop's. ``size`` is the number of bytes that it keeps in memory until then.
    """

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = {}
    make: Callable[[], bytes] | None = None
    size: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps in memory."""
        return self.size + len(self.body)

    def made(self) -> HttpAnswer:
        """The answer with its body. Raises what ``make`` raises."""
        return self if self.make is None else self._replace(body=self.make(), make=None, size=0)


class HttpRequest:
    """One request.

    method, path: visible ASCII, the path without the query. fields: the headers, their names in lower case.
    parameters: the parts of the path that its route has in braces. error: why the request was not read to its end.
    is_last: whether the connection ends after its answer. arrived: when it was complete, in seconds of
    ``perf_counter``, if it waits for a thread that reads it. is_left: whether its client left since.
    name: method and path, cut if they are long. label: the
    route that it takes, as it is counted. model: ``NAME/VERSION`` of the one that it asks, once that is known.
    """

    __slots__ = (
        "arrived",
        "body",
        "error",
        "fields",
        "is_last",
        "is_left",
        "label",
        "method",
        "model",
        "name",
        "parameters",
        "path",
        "query",
    )

    is_oneway, seqid, protocol = False, 0, "http"

    def __init__(
        self, method: str = "", path: str = "", query: str = "", fields: Mapping[str, str] | None = None,
        is_last: bool = False,
    ) -> None:  # fmt: skip
        self.method, self.path, self.query, self.is_last = method, path, query, is_last
        self.fields: Mapping[str, str] = {} if fields is None else fields
        self.parameters: Mapping[str, str] = {}
        self.body = b""
        self.arrived: float | None = None
        self.is_left = False
        self.error: Exception | None = None
        self.name = f"{method} {path}"[:NAME_CHARACTERS]
        self.model = ""
        self.label = UNROUTED

    @classmethod
    def named(cls, name: str) -> HttpRequest:
        """A request of which only ``name`` is known; its answer is the connection's last."""
        method, _, path = name.partition(" ")
        return cls(method, path, is_last=True)

    def take_body(self) -> bytes:
        """Remove and return the body, so that it is not kept until the request is answered."""
        body, self.body = self.body, b""
        return body

    def check_client(self) -> None:
        """Raise ``CancelledError`` if the client left while the request was read."""
        if self.is_left:
            raise CancelledError()

    def inflated(self, body: bytes) -> None:
        """Put ``body`` in place of the compressed one."""
        self.body = body
        self.fields = {name: value for name, value in self.fields.items() if name != "content-encoding"}

    def refused(self, error: Exception) -> HttpRequest:
        """Mark the request as not read to its end because of ``error``; nothing after it is read."""
        self.error, self.is_last = error, True
        return self

    @property
    def host(self) -> str:
        """The Host field; empty without one."""
        return self.fields.get("host", "")

    @property
    def is_of_other_page(self) -> bool:
        """Whether a page of another origin had a browser send it, which can do harm without reading the answer."""
        origin = self.fields.get("origin")
        return origin is not None and origin.partition("://")[2] != self.host

    @property
    def kind(self) -> str:
        """The type of the body, in lower case and without parameters."""
        return self.fields.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def size(self) -> int:
        """The number of bytes of the body."""
        return len(self.body)

    def answer(self, answer: HttpAnswer, more: Mapping[str, str] | None = None) -> bytes:
        """The bytes of the answer, for HEAD without its body. ``more`` are header fields besides its own.

        Raises ``ValueError`` for what is no HTTP: a status that ends no request, or a header field that would end its
        line, is not Latin-1, or is one of ``_FRAMING``.
        """
        status, kind, body, own = answer[:4]
        start, date = _start_of_head(status, kind), _date(int(time()))
        if status in _WITHOUT_BODY:  # these have no Content-Length, either (RFC 9110 8.6)
            head = b"%bDate: %b\r\n" % (start, date)
        else:
            head = b"%bContent-Length: %d\r\nDate: %b\r\n" % (start, len(body), date)
        for fields in (own, more):
            if fields:
                for name, value in fields.items():
                    head += _line(name, str(value))
        if self.is_last:
            head += b"Connection: close\r\n"
        if self.method == "HEAD" or status in _WITHOUT_BODY:
            return head + b"\r\n"
        return b"%b\r\n%b" % (head, body)

    def head_of_parts(self, kind: str, headers: Mapping[str, str]) -> bytes:
        """The head of an answer that comes in parts, and ends with the connection."""
        self.is_last = True
        lines = {"Date": _date(int(time())).decode(), "Content-Type": kind, **headers, "Connection": "close"}
        return "".join(["HTTP/1.1 200 OK\r\n", *(f"{name}: {lines[name]}\r\n" for name in lines), "\r\n"]).encode()


@lru_cache(maxsize=64)
def _start_of_head(status: int, kind: str) -> bytes:
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise ValueError(f"the status of the answer is {status!r}; expected a number from 200 to 599")
    if _CONTROL.search(kind) is not None:
        raise ValueError(f"the Content-Type of the answer has a control character: {kind!r}")
    line = f"HTTP/1.1 {int(status)} {_PHRASES.get(status, '')}\r\n"
    return (line if status in _WITHOUT_BODY else f"{line}Content-Type: {kind}\r\n").encode("latin-1")


def _line(name: str, value: str) -> bytes:
    """A header field of an answer."""
    if _NAME.fullmatch(name) is None or _CONTROL.search(value) is not None:
        raise ValueError(f"a header field of the answer is not valid: {f'{name}: {value}'!r}")
    if name.lower() in _FRAMING:
        raise ValueError(f"the service itself sends the header field {name!r} of an answer")
    return f"{name}: {value}\r\n".encode("latin-1")


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
