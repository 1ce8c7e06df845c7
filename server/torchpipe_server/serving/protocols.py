"""What a connection may speak, told by its first bytes: each protocol is a service of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torchpipe_server.serving.http import Routes
from torchpipe_server.serving.service import Method, Reply
from torchpipe_server.wire.header import HTTP, Framing
from torchpipe_server.wire.scanner import Buffer, ProtocolError

TELLING_BYTES = 5  # no request of any protocol is shorter
_TEXT = frozenset(b"\t\r\n" + bytes(range(0x20, 0x7F)))


class Served(NamedTuple):
    """What a port answers: Thrift's methods, HTTP's routes."""

    methods: Mapping[str, Method]
    routes: Routes

    def names_with_pipe(self) -> frozenset[str]:
        """What calls that run the pipe are counted as."""
        named = [*self.methods.items(), *self.routes.methods()]
        return frozenset(name for name, method in named if method.trace_fields is not None)


class Request(Protocol):
    """A complete message of any protocol. ``error``: why it has no body, if it was not read to its end."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> int: ...
    @property
    def seqid(self) -> int: ...
    @property
    def framing(self) -> Framing: ...
    @property
    def size(self) -> int: ...
    @property
    def error(self) -> ProtocolError | None: ...
    @property
    def is_last(self) -> bool: ...
    @property
    def is_costly(self) -> bool: ...

    def without_body(self) -> Request: ...

    def refused(self, error: ProtocolError) -> Request: ...


class Reader(Protocol):
    """Cuts the bytes of one connection into requests."""

    @property
    def pending_bytes(self) -> int: ...
    @property
    def request(self) -> Request | None: ...
    @property
    def awaits_invitation(self) -> bool: ...
    @property
    def is_paused(self) -> bool: ...

    def feed(self, data: Buffer) -> Iterator[Request]: ...

    def abandon(self, error: ProtocolError) -> None: ...

    def invitation(self) -> bytes: ...


class Service(Protocol):
    """One protocol: readers, what a request calls, and replies. ``reply`` is for any thread, the rest for one."""

    @property
    def decoded_bytes(self) -> int: ...

    def reader(self) -> Reader: ...

    def method(self, request: Any) -> Method: ...

    def decode(self, request: Any) -> tuple[Method, Any]: ...

    def reply(self, request: Any, result: Any) -> Reply: ...


class Protocols:
    """The services of a port."""

    def __init__(self, thrift: Service, http: Service) -> None:
        self.thrift, self._http = thrift, http

    def of(self, request: Request) -> Service:
        """The one that the request was made to."""
        return self._http if request.framing is HTTP else self.thrift

    def told_by(self, data: Buffer) -> Service | None:
        """The one that a client means whose stream begins so; ``None`` while it may be several."""
        start = bytes(data[:TELLING_BYTES])
        if not _TEXT.issuperset(start):
            return self.thrift
        # Text is HTTP: it would be a name of 150 MB and more, or a frame, in which the fifth byte is none.
        return self._http if len(start) == TELLING_BYTES else None


class Stream:
    """The reader of a new connection, until ``told``, that of the protocol which the first bytes tell, takes over."""

    request: Request | None = None
    awaits_invitation = is_paused = False

    def __init__(self, protocols: Protocols) -> None:
        self._protocols = protocols
        self._start = b""
        self.pending_bytes = 0
        self.told: Reader | None = None

    def feed(self, data: Buffer) -> Iterator[Request]:
        self._start += data
        self.pending_bytes = len(self._start)
        service = self._protocols.told_by(self._start)
        if service is None:
            return iter(())
        self.told = service.reader()
        return self.told.feed(self._start)

    def abandon(self, error: ProtocolError) -> None:
        self._start, self.pending_bytes = b"", 0

    def invitation(self) -> bytes:
        return b""
