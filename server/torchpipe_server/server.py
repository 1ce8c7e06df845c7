"""The I/O loop: accepts connections, reads messages, starts their methods, and ends without losing a request.

One thread does all of it. A reply is written by the thread that finished the request; only what a socket does not take
at once comes back to the loop.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from thriftpy2.thrift import TApplicationException

from torchpipe_py import DeadlineExceeded, InvalidRequest, Overloaded
from torchpipe_server.codec import BadArgumentsError, Codec
from torchpipe_server.connection import Connection
from torchpipe_server.handler import InferenceHandler, describe_error
from torchpipe_server.options import Options
from torchpipe_server.protocol import ONEWAY, Limits, Message, MessageReader, ProtocolError

logger = logging.getLogger("torchpipe_server")

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Below malloc's threshold for mapping memory anew each time: 4 instead of 45 us for reading 66 KB.
RECEIVE_BYTES = 120 * 1024
ACCEPTS_AT_ONCE = 64
REFUSED_AT_ONCE = 128  # connections over the limit that are still told so
BACKLOG = 64  # whole messages of one connection that wait; beyond them it is not read
LINGER_SECONDS = 2.0
TICK_SECONDS = 0.5


class Server:
    """Serves a handler on a listening socket until ``stop`` is called and everything accepted is answered."""

    def __init__(self, listener: socket.socket, handler: InferenceHandler, options: Options) -> None:
        self._listener, self._handler, self._options = listener, handler, options
        self._limits = Limits(
            message_bytes=options.max_message_bytes,
            string_bytes=options.max_message_bytes,
            items=options.max_items,
            depth=options.max_depth,
        )
        self._codec = Codec(self._limits)
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._served: set[Connection] = set()  # those that count against max_connections
        self._calls: deque[Callable[[], None]] = deque()
        self._deadlines: list[tuple[float, int, Connection, int]] = []  # deadline, tie-break, connection, serial
        self._counter = itertools.count()
        self._accepting = False
        self._stopping_until: float | None = None
        self._next_tick = 0.0
        listener.setblocking(False)
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_out, READ, self._woken)

    # -- from any thread ----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop accepting, answer what was accepted, then let ``serve`` return. Safe in a signal handler."""
        self._call(self._begin_stop)

    def _call(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the I/O thread."""
        self._calls.append(function)
        try:
            self._wake_in.send(b"\0")
        except (BlockingIOError, OSError):
            pass  # full: it wakes anyway; closed: the loop is gone

    def _reply(self, connection: Connection, reply: bytes) -> None:
        connection.send(reply)
        stopping = self._stopping_until is not None
        if stopping or connection.unsent is not None or connection.closing or connection.has_next():
            self._call(partial(self._guard, connection, self._advance))

    # -- the loop -----------------------------------------------------------------------------------------------

    def serve(self) -> bool:
        """Run until stopped; whether every accepted request was answered before ``drain_seconds`` were over."""
        self._resume_accepting()
        try:
            while not self._is_finished():
                for key, events in self._selector.select(self._wait_seconds()):
                    key.data(events)
                self._expire()
                if monotonic() >= self._next_tick:
                    self._tick()
            return not any(connection.has_work() for connection in self._connections)
        finally:
            self._close_all()

    def _guard(self, connection: Connection, step: Callable[[Connection], None]) -> None:
        """Do something for a connection; a defect ends that connection and nothing else."""
        try:
            step(connection)
        except Exception:
            logger.exception("a defect; closing the connection")
            try:
                self._drop(connection)
            except Exception:
                logger.exception("closing it failed as well")

    def _is_finished(self) -> bool:
        if self._stopping_until is None:
            return False
        if not self._connections:
            return True
        if monotonic() < self._stopping_until:
            return False
        logger.warning("%d connections still busy after drain_seconds", len(self._connections))
        return True

    def _wait_seconds(self) -> float:
        if not self._deadlines:
            return TICK_SECONDS
        return min(TICK_SECONDS, max(0.0, self._deadlines[0][0] - perf_counter()))

    def _woken(self, events: int) -> None:
        try:
            self._wake_out.recv(4096)
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()()

    def _expire(self) -> None:
        """Answer requests whose deadline is over; those that are finished already ignore it."""
        now = perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, connection, serial = heapq.heappop(self._deadlines)
            late = DeadlineExceeded("not finished by its deadline")
            self._guard(connection, lambda one, serial=serial, late=late: one.cancel(serial, late))  # type: ignore[misc]

    def _tick(self) -> None:
        """Enforce the limits that are a matter of time."""
        now = monotonic()
        self._next_tick = now + TICK_SECONDS
        if self._stopping_until is None:
            self._resume_accepting()
        for connection in list(self._connections):
            self._guard(connection, self._check_time)

    def _check_time(self, connection: Connection) -> None:
        now, seconds = monotonic(), self._options.message_seconds
        if connection.linger_until:
            if now >= connection.linger_until:
                self._drop(connection)
        elif self._is_unwanted(connection, now):
            self._drop(connection)
        # While the server itself does not read, a message that is not whole is not the client's slowness.
        elif connection.events & READ and connection.message_since and now - connection.message_since > seconds:
            self._refuse(connection, ProtocolError("too_slow", f"a message took longer than {seconds:g} s"))

    def _is_unwanted(self, connection: Connection, now: float) -> bool:
        """Whether the client does not take its reply, or has been silent for too long."""
        if connection.unsent is not None:
            return now - connection.unsent_since > self._options.message_seconds
        if connection.refused and not connection.has_work():
            return now - connection.last_active > self._options.message_seconds
        idle = self._options.idle_seconds
        return bool(idle) and not connection.has_work() and now - connection.last_active > idle

    # -- connections --------------------------------------------------------------------------------------------

    def _resume_accepting(self) -> None:
        if not self._accepting:
            self._selector.register(self._listener, READ, self._accept)
            self._accepting = True

    def _pause_accepting(self) -> None:
        if self._accepting:
            self._selector.unregister(self._listener)
            self._accepting = False

    def _accept(self, events: int = READ, at_once: int = ACCEPTS_AT_ONCE) -> None:
        for _ in range(at_once):
            if not self._accepting:
                return  # paused or stopped while this event was on its way
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # gone before it was accepted
            except OSError as error:
                # Level-triggered, the listener could report ready without end: look again at the next tick.
                logger.error("cannot accept: %s", error)
                self._pause_accepting()
                return
            try:
                self._add(sock)
            except OSError:
                sock.close()  # gone before it was looked at

    def _add(self, sock: socket.socket) -> None:
        refused = len(self._served) >= self._options.max_connections
        if refused and len(self._connections) >= self._options.max_connections + REFUSED_AT_ONCE:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = Connection(sock, MessageReader(self._limits), refused)
        self._watch(connection, READ)
        self._connections.add(connection)
        if not refused:
            self._served.add(connection)

    def _watch(self, connection: Connection, events: int) -> None:
        """Ask for ``events`` of the connection's socket; 0 asks for none."""
        if events == connection.events or connection.closed:
            return
        if not connection.events:
            self._selector.register(connection.sock, events, partial(self._on_event, connection))
        elif events:
            key = self._selector.get_key(connection.sock)
            self._selector.modify(connection.sock, events, key.data)
        else:
            self._selector.unregister(connection.sock)
        connection.events = events

    def _on_event(self, connection: Connection, events: int) -> None:
        if events & WRITE:
            self._guard(connection, self._advance)
        if events & READ and not connection.closed:
            self._guard(connection, self._read)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        if connection.linger_until:
            return
        connection.last_active = monotonic()
        waiting = len(connection.backlog)
        try:
            connection.backlog.extend(connection.reader.feed(data))
        except ProtocolError as error:
            self._refuse(connection, error)
            return
        if not connection.reader.pending_bytes:
            connection.message_since = 0.0
        elif not connection.message_since or len(connection.backlog) > waiting:
            connection.message_since = connection.last_active
        self._start_next(connection)
        if connection.is_full(BACKLOG, self._limits.message_bytes):
            self._watch(connection, connection.events & ~READ)

    def _advance(self, connection: Connection) -> None:
        """Go on with a connection after a reply, a write or an error."""
        if connection.closed or connection.linger_until:
            return
        written = connection.send_rest()
        self._start_next(connection)
        if connection.closing and not connection.has_work():
            self._linger(connection)
            return
        full = connection.is_full(BACKLOG, self._limits.message_bytes)
        reading = READ if written and not full and not connection.broken else 0
        if reading and not connection.events & READ and connection.message_since:
            connection.message_since = monotonic()
        self._watch(connection, reading | (0 if written else WRITE))
        if self._stopping_until is not None:
            self._close_if_idle(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection nobody listens on any more; what it asked for and is still queued is not computed."""
        self._watch(connection, 0)
        self._connections.discard(connection)
        self._served.discard(connection)
        ticket = connection.close()
        if ticket is not None:
            ticket.cancel()

    def _refuse(self, connection: Connection, error: ProtocolError) -> None:
        """A stream that cannot be read any further: answer what came before, then the error, then close."""
        connection.message_since = 0.0
        request = connection.reader.request
        if request is None:
            logger.info("closing a connection that sent no request: %s", error)
            connection.closing = True
        else:
            connection.broken = request, error
        self._advance(connection)

    def _linger(self, connection: Connection) -> None:
        """Everything is said: a client that is still sending gets the time to read it before the reset."""
        connection.linger_until = monotonic() + LINGER_SECONDS
        self._served.discard(connection)
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(connection)
            return
        self._watch(connection, READ)

    # -- requests -----------------------------------------------------------------------------------------------

    def _start_next(self, connection: Connection) -> None:
        while connection.backlog and not connection.busy and connection.unsent is None:
            self._dispatch(connection, connection.backlog.popleft())
        if connection.broken is not None and not (connection.busy or connection.backlog or connection.unsent):
            (message, error), connection.broken = connection.broken, None
            connection.closing = True
            failure = InvalidRequest(str(error))
            failure.code = error.kind
            connection.begin()
            self._fail(connection, message, failure)

    def _dispatch(self, connection: Connection, message: Message) -> None:
        serial = connection.begin()
        connection.closing = connection.closing or connection.refused
        method = self._handler.methods.get(message.name)
        if method is None:
            self._answer_exception(
                connection, message, TApplicationException.UNKNOWN_METHOD, f"no method {message.name!r}"
            )
            return
        head = message.without_body()  # what the answer needs; the image is not kept until then
        try:
            if connection.refused:
                raise Overloaded(f"more than {self._options.max_connections} connections", retry_after_ms=1000)
            args = self._codec.decode_args(message, method.args)
            ticket = method.start(args, lambda result: self._answer(connection, head, result))
        except BadArgumentsError as error:
            self._answer_exception(connection, message, TApplicationException.PROTOCOL_ERROR, str(error))
            return
        except Exception as error:
            self._fail(connection, message, error)
            return
        if ticket is not None and connection.attach(serial, ticket) and ticket.deadline is not None:
            self._remember_deadline(ticket.deadline, connection, serial)

    def _remember_deadline(self, deadline: float, connection: Connection, serial: int) -> None:
        heapq.heappush(self._deadlines, (deadline, next(self._counter), connection, serial))
        if len(self._deadlines) > 2 * len(self._connections) + 64:
            # Each connection has one request in work at most: the rest is answered and only waits for its time.
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_working_on(entry[3])]
            heapq.heapify(self._deadlines)

    def _answer(self, connection: Connection, message: Message, result: Any) -> None:
        """Reply with a result struct; called on whichever thread finished the request."""
        try:
            reply = self._codec.encode_reply(message, result)
        except Exception as error:
            logger.exception("a result of %s cannot be encoded", message.name)
            self._answer_exception(connection, message, TApplicationException.INTERNAL_ERROR, describe_error(error))
            return
        self._reply(connection, b"" if message.type == ONEWAY else reply)

    def _fail(self, connection: Connection, message: Message, error: BaseException) -> None:
        """Reply with an error that the method declares, or with what every client understands."""
        method = self._handler.methods.get(message.name)
        try:
            if method is None:
                raise error
            result = method.fail(error)
        except BaseException:
            text = f"{type(error).__name__}: {describe_error(error)}"
            self._answer_exception(connection, message, TApplicationException.INTERNAL_ERROR, text)
            return
        self._answer(connection, message, result)

    def _answer_exception(self, connection: Connection, message: Message, kind: int, text: str) -> None:
        reply = self._codec.encode_exception(message, TApplicationException(kind, text))
        self._reply(connection, b"" if message.type == ONEWAY else reply)

    # -- the end ------------------------------------------------------------------------------------------------

    def _begin_stop(self) -> None:
        if self._stopping_until is not None:
            return
        self._accept(at_once=sys.maxsize)  # connections the system has accepted for us already
        self._stopping_until = monotonic() + self._options.drain_seconds
        self._pause_accepting()
        self._listener.close()
        for connection in list(self._connections):
            self._guard(connection, self._close_if_idle)

    def _close_if_idle(self, connection: Connection) -> None:
        """While stopping: close it once it has nothing to do, not even something that has arrived unread."""
        if connection.closed or connection.has_work() or connection.linger_until:
            return
        self._read(connection)
        if connection.closed or connection.has_work() or connection.linger_until or connection.reader.pending_bytes:
            return
        self._drop(connection)

    def _close_all(self) -> None:
        self._pause_accepting()
        self._listener.close()
        for connection in list(self._connections):
            self._guard(connection, self._drop)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
