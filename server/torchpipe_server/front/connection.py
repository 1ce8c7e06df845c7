"""One client's connection: unread input, the request in work, and unsent output."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from torchpipe_py import DeadlineExceeded, Overloaded, TorchpipeError
from torchpipe_py.serving import (
    OK,
    SMALL_BYTES,
    UNREAD,
    Call,
    CallState,
    HttpAnswer,
    HttpRequest,
    Method,
    StreamSource,
    call_from_any_thread,
    compression,
    counted,
    describe,
    log_failure,
)
from torchpipe_server.front.journal import Entry
from torchpipe_server.front.services import Service
from torchpipe_server.wire.errors import ProtocolError
from torchpipe_server.wire.http import INVITATION

logger = logging.getLogger("torchpipe_server")

READ_AHEAD_BYTES = 2**18  # while a request is in work
STREAM_BUFFER_BYTES = 2**16  # kernel buffer of a streamed answer; larger delays it
LINGER_SECONDS = 2.0
STALLED_SECONDS = 60.0  # a client that takes no part of a streamed answer for so long is disconnected
END_SECONDS = 1.0  # to answer a client that has closed its side
QUEUE_SECONDS = 0.01  # a request whose client closed its side is dropped if no instance has it by then
REFUSE_SECONDS = 1.0  # for a client over the limit to send a request, which is refused


class State(Enum):
    """The state of a connection. It only moves down this list."""

    OPEN = auto()  # messages are read and answered
    LEAVING = auto()  # the same, until the connection is idle: then this process closes it or gives it up
    CLOSING = auto()  # nothing more is read; what was read is answered
    LINGERING = auto()  # all is written; further input is discarded, so that the client reads the reply
    CLOSED = auto()  # this process no longer has the socket


class Turn(Enum):
    """The next step of a connection."""

    READING = auto()  # the rest of a message, or the first byte of one
    ANSWERING = auto()  # the answer of the request in work
    WRITING = auto()  # the client, to read the rest of a reply


OPEN, LEAVING, CLOSING, LINGERING, CLOSED = State
READING, ANSWERING, WRITING = Turn


class Connection(asyncio.BufferedProtocol):
    """Answers the requests of a connection one at a time, in order. Everything runs on the loop's thread::

        OPEN ── leave ──► LEAVING ── idle ────────────────────────────────────────────► CLOSED
         └───────┬──────────┘                                                             ▲
                 └─ last request, broken stream, end of input, drain ──► CLOSING          │
                                                  CLOSING ── answered ──► LINGERING ──────┤
        every state ── client gone, time over, defect ────────────────────────────────────┘

    In OPEN, LEAVING and CLOSING it takes turns, and only in READING does the next request begin::

        READING ── message ──► ANSWERING ── answer ──► READING, or WRITING if a part is unsent
        WRITING ── all sent ──► READING

    `leave` comes from drain, release and hand_over. ``owner`` is the `Server`, ``call`` the request in work. ``reader``
    splits the input; it is a `_NoReader` before the protocol is known and after the last message. ``entry`` is the
    connection's slot in the journal, for the process that takes over if this one dies: the transport asks for a
    buffer before bytes arrive, and that is when the entry is touched.
    """

    __slots__ = (
        "call", "ended_at", "entry", "is_reading", "is_refused", "last_active", "message_since", "owner",
        "paced_until", "reader", "service", "slot", "sock", "state", "stream", "transport", "turn",
    )  # fmt: skip

    def __init__(self, owner: Any, sock: socket.socket, slot: int, entry: Entry, is_refused: bool) -> None:
        self.owner, self.sock, self.slot, self.entry = owner, sock, slot, entry
        self.is_refused = is_refused  # over the limit: its first request is answered 'overloaded'
        self.state, self.turn = OPEN, READING
        self.transport: Any = None
        self.service: Service | None = None  # until the first bytes show the protocol
        self.reader: Any = _NoReader()
        self.call: Call | None = None
        self.stream: Stream | None = None  # the answer of the request in work, if it is in parts
        self.is_reading = True  # from the socket
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
            self.owner.schedule(self)
        elif self.owner.is_ending:
            self.leave()

    def get_buffer(self, sizehint: int) -> memoryview:
        self.entry.touch()
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
            if self.turn is READING and self in owner.scheduled:
                self.advance()  # NOTE: reads of one round that are put together are copied again and again
            elif self.turn is READING:
                owner.schedule(self)
            elif self.reader.pending_bytes > READ_AHEAD_BYTES:
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
            self._drop_unless_started(self.call)
        return True

    def pause_writing(self) -> None:
        self.owner.held_bytes += self.transport.get_write_buffer_size()
        if self.stream is not None:
            self.stream.is_full = True
        else:
            self.turn = WRITING

    def resume_writing(self) -> None:
        self.last_active = monotonic()
        if self.stream is not None:
            self.stream.resume()
        else:
            self.turn = READING
            self.entry.rest()
            # NOTE: later, since asyncio's transport ends twice if it is aborted in here.
            self.owner.schedule(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.drop()

    # -- predicates --------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a request is in work or waits, or something is not written yet."""
        return self.turn is not READING or (self.reader.pending_bytes > 0 and not self.message_since)

    @property
    def is_stalled(self) -> bool:
        """Whether a part of an answer is unsent, because the client does not read."""
        return self.turn is WRITING or (self.stream is not None and self.stream.is_full)

    @property
    def is_idle(self) -> bool:
        """Whether it is between two messages, judging by what was read."""
        return self.turn is READING and not self.reader.pending_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps in memory: unanswered input and the unsent reply."""
        unsent = self.transport.get_write_buffer_size() if self.is_stalled else 0
        size: int = self.reader.pending_bytes + unsent
        return size + (0 if self.call is None else self.call.size)

    # -- requests -----------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Close the connection after a defect; for use in an ``except`` clause."""
        logger.exception("internal error; closing the connection")
        self.drop()

    def advance(self) -> None:
        """Begin the next request if it is complete. Later ones wait until it is answered."""
        if self.state is CLOSED or self.state is LINGERING or self.turn is not READING:
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
            self.entry.clear()
            self.message_since = 0.0
        elif not self.message_since:
            self.message_since = monotonic()
        if reader.is_paused:
            self.owner.schedule(self)
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
        service, owner = self.service, self.owner
        assert service is not None
        size = message.size
        self.turn, self.call = ANSWERING, (call := Call(self, message, size))
        self.last_active = call.began
        owner.held_bytes += size  # a decoded message may take more memory than its bytes
        self.entry.begin(message, self.reader.pending_bytes > 0)
        if message.is_last:
            self.close_when_answered()
        try:
            method, args = service.decode(message)
            if self.is_refused:
                self.reader = _NoReader()
                self.close_when_answered()
                most = counted(owner.options.max_connections, "connection")
                text = f"more than {most} (--max-connections), or more of one address than its share"
                raise Overloaded(text, retry_after_ms=1000)
            inflater = service.inflater(message)
            is_inflated = inflater is None or inflater.step(SMALL_BYTES)
        except BaseException as error:
            self._refuse_call(call, error)
            return
        if inflater is None:
            self._start(call, method, args)
            return
        args.arrived = perf_counter()
        if is_inflated:
            self._start_inflated(call, method, args, inflater.take())
        else:
            call.inflating = owner.loop.create_task(self._inflate(call, method, args, inflater))

    async def _inflate(self, call: Call, method: Method, args: HttpRequest, inflater: compression.Inflater) -> None:
        """Inflate a long body, then start the method; cancelled if the client leaves."""
        try:
            await asyncio.wait_for(self.owner.inflating.finish(inflater, self._hold), self.owner.seconds_left(args))
        except asyncio.TimeoutError:
            self._refuse_call(call, DeadlineExceeded(UNREAD))
        except Exception as error:
            self._refuse_call(call, error)
        else:
            # NOTE: before Python 3.12 `wait_for` loses a cancel that comes as the body is finished.
            if call.state is CallState.WAITING:
                self._start_inflated(call, method, args, inflater.take())
        call.inflating = None

    def _start_inflated(self, call: Call, method: Method, args: HttpRequest, body: bytes) -> None:
        """Start the method of a request whose body is inflated, if there is room for the body."""
        args.inflated(body)
        try:
            self._hold(args.size)
        except Overloaded as error:
            self._refuse_call(call, error)
        else:
            self._start(call, method, args)

    def _hold(self, size: int) -> None:
        """Count ``size`` bytes as held by the request in work. Raises ``Overloaded`` if there is no room for them."""
        assert self.call is not None
        owner, limit = self.owner, self.owner.options.max_held_bytes
        owner.held_bytes += size - self.call.size
        self.call.size = size
        owner.bound_memory()
        if owner.held_bytes > limit:
            raise Overloaded(f"more than {limit} bytes of unanswered messages (--max-held-bytes)", retry_after_ms=1000)

    def _start(self, call: Call, method: Method, args: Any) -> None:
        owner = self.owner
        try:
            if method.takes_long is not None and method.takes_long(args):
                args.arrived = args.arrived or perf_counter()
                seconds, started = owner.seconds_left(args), partial(self._started, call)
                is_logged = owner.counters.is_logging
                call.start_aside(owner.loop, owner.long_messages, method, args, seconds, is_logged, started)
                return
            call.start(owner.loop, method, args, owner.counters.is_logging)
        except BaseException as error:  # a custom handler may raise ``SystemExit``, and others' requests are here
            self._refuse_call(call, error)
            return
        if method.is_streamed and call.ticket is not None:
            self.stream = Stream(self, call)
            self.stream.open()
        if self.ended_at:
            self._drop_unless_started(call)

    def _started(self, call: Call) -> None:
        """Another thread has read the request and started its method."""
        if self.ended_at:
            self._drop_unless_started(call)

    def _refuse_call(self, call: Call, error: BaseException) -> None:
        """Answer a request that no method has."""
        assert self.service is not None
        # NOTE: at once, since the other requests of this round of the loop would delay a refusal.
        self.owner.send(call, *self.service.reply(call.message, error), error)

    def _drop_unless_started(self, call: Call) -> None:
        """Drop a request that is still queued in a moment: a client that closes its side has nearly always left."""

        def drop() -> None:
            if self.call is call and call.is_queued:
                self.drop()

        self.owner.loop.call_later(max(0.0, call.began + QUEUE_SECONDS - self.ended_at), drop)

    def reply(self, call: Call, result: Any) -> None:
        """Encode the answer and pass it to the loop; for any thread."""
        assert self.service is not None
        try:
            is_long = self.service.takes_long(call.message, result)
        except Exception:  # of a handler's answer with a body that is none: `_encode` meets it again
            is_long = False
        if is_long:
            call_from_any_thread(self.owner.loop, self._reply_aside, call, result)
        else:
            self._encode(call, result)

    def _reply_aside(self, call: Call, result: HttpAnswer) -> None:
        """Have another thread encode an answer that takes long, if there is room for it until then."""
        if self.call is not call:  # the connection was closed meanwhile
            return
        try:
            size = result.held_bytes
            self._hold(call.size + size)
            call.write_aside(self.owner.writer, size, partial(self._encode, call, result))
        except Exception as error:  # `Overloaded`, `DeadlineExceeded`, or a size that is no number
            self._refuse_call(call, error)

    def _encode(self, call: Call, result: Any) -> None:
        service = self.service
        assert service is not None
        error = result if isinstance(result, BaseException) else None
        try:
            answer = service.reply(call.message, result)
        except BaseException as failure:  # without an answer the client would wait for ever
            log_failure("an answer cannot be encoded", failure)
            error = TorchpipeError(f"the answer cannot be encoded: {describe(failure)}")
            answer = service.reply(call.message, error)
        self.owner.answer(call, *answer, error)

    def answered(self, call: Call, data: bytes, now: float) -> None:
        """Write the reply of the request in work."""
        if self.call is not call:  # the connection was closed meanwhile
            return
        self.turn, self.call = READING, None
        if self.stream is not None:
            if self.stream.is_full:
                self.turn = WRITING
            self.stream = None
        call.settle()
        self.last_active = now
        self.entry.reply()
        if self.state is LEAVING:
            self._read(False)  # the client's next request is for the next process, if there is one
            self.state = CLOSING if self.owner.is_draining and not self.reader.pending_bytes else LEAVING
        if not self.transport.is_closing():
            self.transport.write(data)
        if self.turn is READING:  # all is sent
            self.entry.rest()
            pending = self.reader.pending_bytes
            if pending:
                self.owner.rest()
            if pending > READ_AHEAD_BYTES:
                self._read(False)  # until the last message of these bytes
            if pending or self.state is not OPEN or not self.is_reading:
                self.owner.schedule(self)  # NOTE: a refusal is answered in `advance`

    def refuse(self, error: ProtocolError) -> None:
        """Stop reading a broken stream: ``error`` becomes the last answer, if a request has begun."""
        self.reader.abandon(error)
        if self.turn is not READING:
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
            self.owner.close_or_hand_over(self)

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
                call.abandon()

    def _let_go(self) -> Call | None:
        self.state = CLOSED
        call, self.call, self.stream = self.call, None, None
        self.reader = _NoReader()
        if self.transport is not None:
            self.transport.abort()
        return call

    # -- the clock ----------------------------------------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """Enforce the time limits."""
        self.entry.remember(self.message_since or self.last_active)
        seconds, silent, is_late = self.owner.options.message_seconds, now - self.last_active, False
        if self.state is LINGERING:
            is_late = silent >= LINGER_SECONDS
        elif self.turn is WRITING:
            is_late = silent > seconds
        elif self.stream is not None and self.stream.is_full:
            is_late = silent > STALLED_SECONDS  # the answer loses parts for a while
        elif self.ended_at:
            is_late = now - self.ended_at >= END_SECONDS
        elif self.turn is ANSWERING:
            pass
        elif self.message_since:
            if self.is_reading and now - self.message_since > seconds:
                self.refuse(ProtocolError("too_slow", f"a message took longer than {seconds:g} s"))
        else:
            is_late = 0 < self.owner.options.idle_seconds < silent or (self.is_refused and silent > REFUSE_SECONDS)
            # NOTE: the transport may have asked for a buffer and then had no bytes for it.
            if self.state in (OPEN, LEAVING) and self.is_idle:
                self.entry.clear()
        if is_late:
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


class Stream:
    """An answer in parts, for the request in work. It ends with the connection: nothing more is read."""

    def __init__(self, connection: Connection, call: Call) -> None:
        self._connection, self._call = connection, call
        self.is_full = False  # parts are unsent

    def open(self) -> None:
        """Have the source begin the answer."""
        self._source.attach(self)

    def resume(self) -> None:
        """Have the source go on: all parts are sent."""
        self.is_full = False
        self._connection.owner.loop.call_soon(self._source.write_more)

    @property
    def _source(self) -> StreamSource:
        source: Any = self._call.ticket
        return source  # type: ignore[no-any-return]

    def begin(self, head: bytes) -> None:
        """Write the head of the answer."""
        self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BUFFER_BYTES)
        self._connection.close_when_answered()
        self.write(head)

    def write(self, data: bytes) -> bool:
        """Write a part; returns whether there is room for more."""
        connection = self._connection
        if data and connection.call is self._call and not connection.transport.is_closing():
            connection.last_active = monotonic()
            connection.transport.write(data)
        return not self.is_full

    def end(self, label: str) -> None:
        """Count the request under ``label``, and close the connection once all is written."""
        self._connection.owner.answer(self._call, b"", label, OK)


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
