"""HTTP/1.1: what a request holds, and how an answer becomes bytes. No sockets, no threads, no clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

from torchpipe_server.wire.header import CALL, HTTP
from torchpipe_server.wire.protocol import COSTLY_BYTES
from torchpipe_server.wire.scanner import ProtocolError

NAME_CHARACTERS = 48
COSTLY_JSON_BYTES = 2**13
COSTLY_QUERY_BYTES = 2**10
_OIP_PATHS, _OIP_JSON_LENGTH, _LENGTH = "/v2/", "inference-header-content-length", re.compile(r"[0-9]{1,12}")

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+;=%-]*)(?::\d*)?"
_FIELD_HOST = re.compile(_HOST, re.ASCII)
# Groups: the host, the path, the query.
_TARGET = re.compile(rf"(?:(?i:https?)://(?![/?:]|$)({_HOST})(?=[/?]|$))?(/[^?#]*|\*)?(?:\?([^#]*))?", re.ASCII)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


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
    kind: of the body, in lower case, without parameters. size: bytes of the head and of the body. route: what it is
    counted as. error: why there is no body, of a request that was not read to its end. is_last: whether the connection
    ends behind its answer.
    """

    __slots__ = (
        "body", "error", "fields", "is_last", "kind", "method", "parameters", "path", "query", "route", "size",
    )  # fmt: skip

    framing, type, seqid = HTTP, CALL, 0

    def __init__(self, method: str = "", path: str = "", is_last: bool = False) -> None:
        self.method, self.path, self.query, self.is_last = method, path, "", is_last
        self.parameters: Mapping[str, str] = {}  # what its route calls parts of the path
        self.fields: Mapping[str, str] = {}
        self.kind, self.body, self.size = "", b"", 0
        self.route = "http"  # NOTE: what a client makes up must not become a name among the counters.
        self.error: ProtocolError | None = None

    @classmethod
    def named(cls, name: str) -> HttpRequest:
        """What is left of one whose ``name`` alone is known; its answer is the connection's last."""
        method, _, path = name.partition(" ")
        return cls(method, path, is_last=True)

    @property
    def name(self) -> str:
        """Method and path, cut where they are long."""
        return f"{self.method} {self.path}"[:NAME_CHARACTERS]

    @property
    def host(self) -> str:
        """What the client calls this service; empty where it is not said."""
        return self.fields.get("host", "")

    @property
    def json_bytes(self) -> int:
        """How many bytes of the body are JSON, as the head says."""
        if self.path.startswith(_OIP_PATHS):  # whose clients may name another kind, or none
            length = self.fields.get(_OIP_JSON_LENGTH, "")
            return min(int(length), len(self.body)) if _LENGTH.fullmatch(length) else len(self.body)
        return len(self.body) if self.kind == "application/json" else 0

    @property
    def is_costly(self) -> bool:
        """Whether it may take milliseconds to decode it."""
        body, query = len(self.body), len(self.query)
        return body > COSTLY_BYTES or self.json_bytes > COSTLY_JSON_BYTES or query > COSTLY_QUERY_BYTES

    def without_body(self) -> HttpRequest:
        """What an answer needs."""
        head = HttpRequest(self.method, self.path, self.is_last)
        head.route = self.route
        return head

    def refused(self, error: ProtocolError) -> HttpRequest:
        """The same, not read to its end because of ``error``; nothing behind it is read."""
        self.error, self.is_last = error, True
        return self

    def answer(self, answer: HttpAnswer, headers: Mapping[str, str] | None = None, is_last: bool = False) -> bytes:
        """The bytes of the answer, for HEAD without its body; ``is_last``: no other request is read.

        Raises ``ValueError`` for a header that would end its line, or is not Latin-1.
        """
        status, kind, body, own = answer
        head = f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        lines = 4  # with the empty one
        for fields in (own, headers):
            if fields:
                for name, value in fields.items():
                    head += f"{name}: {value}\r\n"
                lines += len(fields)
        head += "Connection: close\r\n\r\n" if is_last or self.is_last else "\r\n"
        lines += is_last or self.is_last
        if not lines == head.count("\r") == head.count("\n"):
            raise ValueError(f"a header of the answer has a line break: {head!r}")
        if self.method == "HEAD" or status in _WITHOUT_BODY:
            return head.encode("latin-1")
        return head.encode("latin-1") + body

    def read_head(self, line: re.Match[bytes], fields: Mapping[str, str]) -> None:
        """Take what the head says. Raises ``HttpError``."""
        self.fields = fields
        if line[4] != b"0" and "host" not in fields:
            raise HttpError(400, "no Host")
        if fields.get("transfer-encoding", "chunked").lower() != "chunked":
            raise HttpError(501, "a body comes in chunks or as it is, in no other Transfer-Encoding")
        self._read_target(line[2].decode())
        self.kind = fields.get("content-type", "").partition(";")[0].strip().lower()
        self.is_last = line[4] == b"0"
        if "connection" in fields:
            self.is_last |= "close" in {option.strip().lower() for option in fields["connection"].split(",")}

    def _read_target(self, text: str) -> None:
        target = _TARGET.fullmatch(text)
        if target is None or (target[1] is None and target[2] is None):
            raise HttpError(400, "the target is not a path")
        host, path, query = target.groups()
        if path == "*" and (self.method != "OPTIONS" or host is not None):
            raise HttpError(400, f"the target * is for OPTIONS, not {self.method}")
        if _FIELD_HOST.fullmatch(self.host) is None:  # two of them, too
            raise HttpError(400, "the field Host is no name of a host")
        if host is not None:
            self.fields = {**self.fields, "host": host}
        self.path, self.query = path or "/", query or ""
