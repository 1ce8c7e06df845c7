"""One client's connection: unread input, the current request, and unsent output."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from enum import Enum, auto
from time import monotonic, perf_counter
from typing import Any

from torchpipe_py.errors import DeadlineExceeded, Overloaded, counted
from torchpipe_py.methods.routes import OK, Cancellable
from torchpipe_server.front.journal import CLEAN, IDLE, REPLYING, TOUCHED, Entry
from torchpipe_server.front.services import Service
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.http import INVITATION

logger = logging.getLogger("torchpipe_server")

AHEAD_BYTES = 2**18  # read ahead while a request is in work
PARTS_BYTES = 2**16  # of a streamed answer that the system buffers for a client: more would be stale when read
LINGER_SECONDS = 2.0
STALLED_SECONDS = 60.0  # that a client may take no part of a streamed answer
ENDED_SECONDS = 1.0  # to answer a client that has closed its side
QUEUED_SECONDS = 0.01  # the least time of a request before it is dropped, unstarted, because its client closed its side
REFUSED_SECONDS = 1.0  # for a client over the limit to send a request, which is refused


class State(Enum):
    """The state of a connection. It only moves down this list."""

    OPEN = auto()  # messages are read and answered
    LEAVING = auto()  # the same, until the connection is idle: then this process closes it or gives it up
    CLOSING = auto()  # nothing more is read; what was read is answered
    LINGERING = auto()  # all is written; further input is discarded, so that the client reads the reply
    CLOSED = auto()  # this process no longer has the socket


OPEN, LEAVING, CLOSING, LINGERING, CLOSED = State


class Call:
    """A request in work. ``done`` is for any thread, the rest for that of the loop."""

    __slots__ = ("began", "connection", "message", "request_id", "service", "size", "ticket", "timer")

    def __init__(self, connection: Connection, service: Service, message: Any, size: int, began: float) -> None:
        self.connection, self.service, self.message, self.size, self.began = connection, service, message, size, began
        self.request_id = ""
        self.ticket: Cancellable | None = None
        self.timer: asyncio.TimerHandle | None = None

    def done(self, result: Any) -> None:
        """Answer with the result, or with an exception."""
        error = result if isinstance(result, BaseException) else None
        self.connection.owner.answer(self, *self.service.reply(self.message, result), error)

    @staticmethod
    def of(done: Any) -> Call:
        """The call to which ``done`` belongs, for a streamed answer."""
        call: Call = done.__self__
        return call

    def begin(self, head: bytes) -> None:
        """Write the head of a streamed answer. It ends with the connection: nothing more is read."""
        self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PARTS_BYTES)
        self.connection.close_when_answered()
        self.write(head)

    def write(self, data: bytes) -> bool:
        """Write a part; returns whether there is room for more. On the loop's thread; ``write_more`` of the ticket is
        called when there is room again."""
        connection = self.connection
        if data and connection.call is self and not connection.transport.is_closing():
            connection.last_active = monotonic()
            connection.transport.write(data)
        return not connection.is_full

    def end(self, method: str) -> None:
        """The last part is written."""
        self.connection.owner.answer(self, b"", method, OK)

    def expire(self) -> None:
        """Its deadline has passed."""
        self.cancel(DeadlineExceeded("not finished by its deadline"))

    def cancel(self, error: BaseException | None = None) -> None:
        """End it if it is still in work."""
        ticket = self.ticket
        self.over()
        if ticket is not None:
            ticket.cancel(error)

    def over(self) -> None:
        """Release its timer and its ticket: it is answered or was given up."""
        if self.timer is not None:
            self.timer.cancel()
        self.ticket = self.timer = None


class Connection(asyncio.BufferedProtocol):
    """Answers the requests of a connection one at a time, in order. Everything runs on the loop's thread::

        OPEN ── drain, release, shed ──► LEAVING ── idle ─────────────────────────────────────► CLOSED
         └───────┬───────────────────────┘                                                        ▲
                 └─ last request, broken stream, end, drain ──► CLOSING ── answered ──► LINGERING ┘

    In OPEN, LEAVING and CLOSING a request is in work (``call``), or its reply is being written (``is_full``), or
    neither; only then does the next one begin. ``owner`` is the `Server`. ``entry`` is the connection's slot in the
    journal, for the process that takes over if this one dies. The transport asks for the buffer before bytes arrive,
    and that is when the journal is updated.
    """

    __slots__ = (
        "_base", "_is_scheduled", "_marks", "call", "ended_at", "entry", "is_full", "is_reading", "is_refused",
        "last_active", "message_since", "owner", "paced_until", "reader", "service", "slot", "sock", "state",
        "transport",
    )  # fmt: skip

    def __init__(self, owner: Any, sock: socket.socket, slot: int, entry: Entry, is_refused: bool) -> None:
        self.owner, self.sock, self.slot, self.entry = owner, sock, slot, entry
        self._marks, self._base = entry.view, entry.base
        self.is_refused = is_refused  # over the limit: its first request is answered 'overloaded'
        self.state = OPEN
        self.transport: Any = None
        self.service: Service | None = None  # until the first bytes show the protocol
        self.reader: Any = _NoReader()
        self.call: Call | None = None
        self.is_full = False  # part of a reply is unsent
        self.is_reading = True
        self._is_scheduled = False
        self.last_active = monotonic()  # when it was accepted, or a request began or was answered
        self.message_since = 0.0  # when an unfinished message began, 0 if there is no such message
        self.ended_at = 0.0  # when the client closed its side, else 0
        self.paced_until = 0.0  # until when a further refusal may have to wait

    # -- what the transport calls -------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        # A reply is written at once, and `pause_writing` is called if a part of it is left.
        transport.set_write_buffer_limits(0)
        if self.state is CLOSED:
            transport.abort()
        elif self.state is CLOSING:
            self.go_on()
        elif self.owner.is_ending:
            self.leave()

    def get_buffer(self, sizehint: int) -> memoryview:
        self._marks[self._base] = TOUCHED
        return self.owner.received  # type: ignore[no-any-return]

    def buffer_updated(self, nbytes: int) -> None:
        if self.state is not OPEN and self.state is not LEAVING:
            return
        owner = self.owner
        owner.held_bytes += nbytes
        try:
            self.reader.feed(bytes(owner.received[:nbytes]))
            if self.service is None:
                self._choose_service()
            if self.call is None and not self.is_full:
                self.advance()
            elif self.reader.pending_bytes > AHEAD_BYTES:
                self._read(False)
            # NOTE: now, not in the loop's next round: uvloop reads several times in one.
            if owner.held_bytes > owner.options.max_held_bytes:
                owner.bound_memory()
        except Exception:
            self.fail()

    def eof_received(self) -> bool:
        """The client closed its side. It may still read, so there is a moment to answer it."""
        if self.state is LINGERING or not self.is_busy:
            self.drop()
            return False
        self.ended_at = monotonic()
        self.close_when_answered()
        if self.call is not None:
            getattr(self.call.ticket, "client_left", bool)()  # NOTE: at once, since the answer may be due soon
            left = max(0.0, self.call.began + QUEUED_SECONDS - self.ended_at)
            self.owner.loop.call_later(left, self._end_queued, self.call)
        return True

    def _end_queued(self, call: Call) -> None:
        """Drop a request that has not started: a client that closes its side has nearly always left."""
        # NOTE: in this order, or one that ends in between is dropped with its answer on the way.
        ticket = call.ticket
        if self.call is call and not (getattr(ticket, "is_running", True) or getattr(ticket, "is_over", True)):
            self.drop()

    def pause_writing(self) -> None:
        self.is_full = True
        self.owner.held_bytes += self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        self.is_full = False
        self.last_active = monotonic()
        if self.call is None:
            self._marks[self._base + 1] = IDLE
            # NOTE: later, since asyncio's transport ends twice if it is aborted in here.
            self._go_on_soon()
        else:
            self.owner.loop.call_soon(getattr(self.call.ticket, "write_more", bool))

    def connection_lost(self, error: Exception | None) -> None:
        self.drop()

    # -- predicates --------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a request is in work or waits, or something is not written yet."""
        return self.call is not None or self.is_full or (self.reader.pending_bytes > 0 and not self.message_since)

    @property
    def is_idle(self) -> bool:
        """Whether it is between two messages, judging by what was read."""
        return self.call is None and not self.is_full and not self.reader.pending_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps in memory: unanswered input and the unsent reply."""
        unsent = self.transport.get_write_buffer_size() if self.is_full else 0
        held: int = self.reader.pending_bytes + unsent
        return held + (0 if self.call is None else self.call.size)

    # -- requests -----------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Like `advance`, but a defect closes this connection only."""
        self._is_scheduled = False
        try:
            self.advance()
        except Exception:
            self.fail()

    def _go_on_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self.owner.loop.call_soon(self.go_on)

    def fail(self) -> None:
        """Close the connection after a defect; for use in an ``except`` clause."""
        logger.exception("internal error; closing the connection")
        self.drop()

    def advance(self) -> None:
        """Begin the next request if it is complete. Later ones wait until it is answered."""
        if self.state is CLOSED or self.state is LINGERING or self.call is not None or self.is_full:
            return
        reader = self.reader
        try:
            message = reader.next()
        except ProtocolError as error:
            self.refuse(error)
            return
        if message is not None:
            self.message_since = 0.0
            self._begin(message)
            return
        if not reader.pending_bytes:
            self._marks[self._base] = CLEAN
            self.message_since = 0.0
        elif not self.message_since:
            self.message_since = monotonic()
        if reader.is_paused:
            self._go_on_soon()
        elif self.state is CLOSING:
            self._linger()
        else:
            if reader.awaits_invitation:
                reader.awaits_invitation = False
                self.transport.write(INVITATION)
            self._read(True)
            if self.state is LEAVING:
                self.leave()

    def _begin(self, message: Any) -> None:
        reader, service, owner = self.reader, self.service, self.owner
        assert service is not None
        # NOTE: the call keeps only what the answer needs, not the image.
        self.call = call = Call(self, service, message, message.size, monotonic())
        self.last_active = call.began
        owner.held_bytes += message.size  # a decoded message may take more memory than its bytes
        self.entry.begin(message)
        if not reader.pending_bytes:
            self._marks[self._base] = CLEAN
        if message.is_last:
            self.close_when_answered()
        try:
            method, args = service.decode(message)
            if self.is_refused:
                self.reader = _NoReader()
                self.close_when_answered()
                most = counted(owner.options.max_connections, "connection")
                raise Overloaded(f"more than {most}", retry_after_ms=1000)
            if owner.counters.is_logging:
                call.request_id = method.request_id(args)
            ticket = method.start(args, call.done)
        except BaseException as error:  # a custom handler may raise ``SystemExit``, and others' requests are here
            # NOTE: at once, since the other requests of this round of the loop would delay a refusal.
            owner.send(call, *service.reply(call.message, error), error)
            return
        if ticket is not None:
            call.ticket, deadline = ticket, ticket.deadline
            if deadline is not None:
                call.timer = owner.loop.call_later(max(0.0, deadline - perf_counter()), call.expire)

    def answered(self, call: Call, data: bytes, now: float) -> None:
        """Write the reply of the request in work."""
        if self.call is not call:  # the connection was closed meanwhile
            return
        self.call = None
        call.over()
        self.last_active = now
        marks, work = self._marks, self._base + 1
        marks[work] = REPLYING
        if self.state is LEAVING:
            self._read(False)  # the client's next request is for the next process, if there is one
            self.state = CLOSING if self.owner.is_draining and not self.reader.pending_bytes else LEAVING
        if not self.transport.is_closing():
            self.transport.write(data)
        if not self.is_full:
            marks[work] = IDLE
            if self.reader.pending_bytes or self.state is not OPEN or not self.is_reading:
                self._go_on_soon()  # NOTE: a refusal is answered in `advance`

    def refuse(self, error: ProtocolError) -> None:
        """Stop reading a broken stream: ``error`` becomes the last answer, if a request has begun."""
        self.reader.abandon(error)
        if self.call is not None or self.is_full:
            self.close_when_answered()  # and `next` raises it once the requests before it are answered
            return
        request, self.reader = self.reader.request, _NoReader()
        self.message_since = 0.0
        self.close_when_answered()
        if request is None:
            logger.info("closing a connection that sent no request: %s", error)
            self._linger()
        else:
            self._begin(request.refused(error))

    # -- ending -------------------------------------------------------------------------------------------------

    def close_when_answered(self) -> None:
        """Read nothing more; close the connection after the last reply."""
        if self.state in (OPEN, LEAVING):
            self.state = CLOSING

    def leave(self) -> None:
        """Close the connection, or give it up, as soon as it is idle."""
        if self.state is OPEN:
            self.state = LEAVING
        if self.state is LEAVING and self.transport is not None and self.is_idle:
            self.owner.let_leave(self)

    def _linger(self) -> None:
        """Everything is written: give the client time to read it before the reset."""
        if self.ended_at or self.transport.is_closing():
            self.drop()
            return
        self.state, self.last_active = LINGERING, monotonic()
        try:
            self.transport.write_eof()
        except OSError:
            self.drop()
            return
        self._read(True)

    def drop(self) -> None:
        """Close the connection because the client is gone; a queued request is dropped."""
        if self.state is CLOSED:
            return
        with suppress(OSError):  # the client was faster
            self.sock.shutdown(socket.SHUT_RDWR)  # other processes hold copies of it
        call = self._let_go()
        if call is not None:
            call.cancel()
        self.owner.forget(self, True)

    def abandon(self) -> None:
        """Close this process's copy of the socket, which another one serves; a reply that is still made is dropped."""
        if self.state is not CLOSED:
            call = self._let_go()
            if call is not None:
                call.over()

    def _let_go(self) -> Call | None:
        self.state = CLOSED
        call, self.call = self.call, None
        self.reader = _NoReader()
        if self.transport is not None:
            self.transport.abort()
        return call

    # -- the clock ----------------------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """Enforce the time limits."""
        self.entry.remember(self.message_since or self.last_active)
        seconds, silent, is_over = self.owner.options.message_seconds, now - self.last_active, False
        if self.state is LINGERING:
            is_over = silent >= LINGER_SECONDS
        elif self.is_full:
            # The client does not read its reply. A streamed one loses parts for a while.
            is_over = silent > (seconds if self.call is None else STALLED_SECONDS)
        elif self.ended_at:
            is_over = now - self.ended_at >= ENDED_SECONDS
        elif self.call is not None:
            pass
        elif self.message_since:
            if self.is_reading and now - self.message_since > seconds:
                self.refuse(ProtocolError("too_slow", f"a message took longer than {seconds:g} s"))
        else:
            is_over = 0 < self.owner.options.idle_seconds < silent or (self.is_refused and silent > REFUSED_SECONDS)
            # NOTE: the transport may have asked for a buffer and then had no bytes for it.
            if self._marks[self._base] == TOUCHED and self.state in (OPEN, LEAVING) and self.is_idle:
                self._marks[self._base] = CLEAN
        if is_over:
            self.drop()

    # -- small parts --------------------------------------------------------------------------------------------

    def _choose_service(self) -> None:
        """Choose the protocol by the first bytes once there are enough."""
        start = self.reader.data
        self.service = self.owner.services.of(start)
        if self.service is not None:
            self.reader = self.service.reader()
            self.reader.feed(start)

    def _read(self, is_wanted: bool) -> None:
        if is_wanted is not self.is_reading and self.transport is not None and not self.transport.is_closing():
            self.is_reading = is_wanted
            if is_wanted:
                self.transport.resume_reading()
                if self.message_since:
                    self.message_since = monotonic()
            else:
                self.transport.pause_reading()


class _NoReader:
    """The reader of a connection whose protocol is unknown, or on which nothing more is read."""

    request = None
    awaits_invitation = is_paused = False

    def __init__(self) -> None:
        self.data = b""

    @property
    def pending_bytes(self) -> int:
        return len(self.data)

    def feed(self, data: bytes) -> None:
        self.data += data

    def next(self) -> None:
        """There is no message."""

    def abandon(self, error: ProtocolError) -> None:
        self.data = b""
