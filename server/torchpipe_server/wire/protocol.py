"""Cuts the bytes of a connection into Thrift messages. No sockets, no threads, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from torchpipe_server.wire.header import HEADER_BYTES, Framing, Header, detect, read_header
from torchpipe_server.wire.scanner import Buffer, Limits, ProtocolError, Scanner, endless

COSTLY_BYTES = 2**18
COSTLY_ITEMS = 64

_i32_at = Struct(">i").unpack_from


class Message(NamedTuple):
    """A complete message; its arguments struct lies in `buffer[start:end]` and has passed the limits.

    name: of the method. type: `CALL` or `ONEWAY`. seqid: signed, 32 bits.
    buffer: belongs to whoever fed the bytes if they were fed in one piece; decode it before reusing that memory.
    error: why there is no body, of a message that was not read to its end.
    items: fields, elements and entries in it.
    """

    name: str
    type: int
    seqid: int
    framing: Framing
    buffer: Buffer = b""
    start: int = 0
    end: int = 0
    error: ProtocolError | None = None
    items: int = 0

    @property
    def is_costly(self) -> bool:
        """Whether it may take milliseconds to decode it and to begin its work."""
        return self.items > COSTLY_ITEMS or self.end - self.start > COSTLY_BYTES

    @property
    def size(self) -> int:
        """Bytes of the arguments struct."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether the connection ends behind its answer: Thrift's never does."""
        return False

    def without_body(self) -> Message:
        """What an answer needs."""
        return Message(self.name, self.type, self.seqid, self.framing)

    def refused(self, error: ProtocolError) -> Message:
        """The same, not read to its end because of ``error``."""
        return self._replace(error=error)

    def __repr__(self) -> str:
        return f"Message({self.name!r}, type={self.type}, seqid={self.seqid}, {self.framing}, {self.size} bytes)"


class MessageReader:
    """Cuts a byte stream into messages. One per connection, for one thread.

    ``pending_bytes`` are held here and belong to no message yet: at most `Limits.message_bytes` and what one `feed`
    brought. ``awaits_invitation``: whether the client sends the rest of a message once it is told to; Thrift's never
    waits for that.
    """

    awaits_invitation = False

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._framing: Framing | None = None
        self._scanner = Scanner(limits, is_compact=False)
        self._held = bytearray()  # an unfinished message, from its first byte
        self.pending_bytes = 0
        self._header: Header | None = None  # of that message
        self._broken: tuple[str, str] | None = None  # not the exception: its traceback would keep the buffers

    @property
    def framing(self) -> Framing | None:
        """None until the first bytes have told."""
        return self._framing

    @property
    def request(self) -> Message | None:
        """The unfinished message without its body, once its header has arrived: an error can be answered by name."""
        if self._header is None or self._framing is None:
            return None
        name, type_, seqid, _ = self._header
        return Message(name, type_, seqid, self._framing)

    @property
    def is_paused(self) -> bool:
        """Whether the last `feed` ended within a message of many items: `feed(b"")` goes on."""
        return self._scanner.is_paused

    def feed(self, data: Buffer) -> Iterator[Message]:
        """The messages completed by `data`, in order, each cut when it is asked for. Exhaust it before the next `feed`.

        Raises `ProtocolError` behind the last whole message of a broken stream, and for everything fed after it.
        """
        if self._broken is not None:
            raise ProtocolError(*self._broken)
        buffer: Buffer = data
        if self._held:
            self._held += data
            buffer = self._held
        start, end = 0, len(buffer)
        try:
            while start < end:
                message = self._next(buffer, start, end)
                if message is None:
                    break
                start = message.end
                self.pending_bytes = end - start
                yield message
        except ProtocolError as error:
            self.abandon(error)
            raise
        if start < end or self._held:
            self._hold(buffer, start, end)

    def invitation(self) -> bytes:
        """What tells it."""
        return b""

    def abandon(self, error: ProtocolError) -> None:
        """Give up the unfinished message, whatever it holds; ``error`` is what a further ``feed`` raises."""
        self._broken = error.kind, error.detail
        self._held = bytearray()
        self.pending_bytes = 0

    def _hold(self, buffer: Buffer, start: int, end: int) -> None:
        self.pending_bytes = end - start
        if start == end:
            self._held = bytearray()  # never cleared: messages may refer to the old one
        elif start > 0:
            self._held = bytearray(memoryview(buffer)[start:end])
            self._scanner.shift(start)
            if self._header is not None:
                name, type_, seqid, body = self._header
                self._header = name, type_, seqid, body - start
        elif buffer is not self._held:
            self._held = bytearray(buffer)

    def _next(self, buffer: Buffer, start: int, end: int) -> Message | None:
        header = self._header
        if header is None:
            header = self._begin(buffer, start, end)
            if header is None:
                return None
        scanner, framing = self._scanner, self._framing
        if not scanner.advance(buffer, end):
            return None
        if framing.framed and scanner.pos != scanner.limit:  # type: ignore[union-attr]
            raise ProtocolError("bad_frame", "the frame goes on after its message")
        self._header = None
        assert framing is not None
        name, type_, seqid, body = header
        return Message(name, type_, seqid, framing, buffer, body, scanner.pos, None, scanner.items)

    def _begin(self, buffer: Buffer, start: int, end: int) -> Header | None:
        """Read what precedes the arguments, None if it is not all there yet, and prepare the scanner."""
        framing = self._framing or self._detect(buffer, start, end)
        if framing is None:
            return None
        size, limit, beyond = 0, start + self._limits.message_bytes, "too_large"
        if framing.framed:
            if end - start < 4:
                return None
            start += 4
            size = _i32_at(buffer, start - 4)[0]
            if size <= 0:
                raise ProtocolError("negative_size" if size else "bad_frame", f"a frame of {size} bytes")
            limit, beyond = start + size, "bad_frame"
        header = read_header(framing.protocol, buffer, start, min(end, limit))
        self._header = header
        if size > self._limits.message_bytes:
            if header is None and end - start < HEADER_BYTES:
                return None  # with its name and number, the refusal can be answered
            most = self._limits.message_bytes
            raise ProtocolError("too_large", f"a frame of {size} bytes; the limit is {most} (--max-message-bytes)")
        if header is None:
            if end >= limit:
                raise endless(beyond, self._limits)
            return None
        self._scanner.start_struct(header[3], limit, beyond)
        return header

    def _detect(self, buffer: Buffer, start: int, end: int) -> Framing | None:
        framing = detect(buffer, start, end)
        if framing is not None:
            self._framing = framing
            self._scanner = Scanner(self._limits, framing.protocol == "compact")
        return framing
