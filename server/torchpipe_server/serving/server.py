"""Serves connections: reads messages, starts their methods, and ends without losing a request.

One thread, that of the loop, does all of it. A reply is written by the thread that finished the request; only what a
socket does not take at once comes back to the loop.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Protocol

from thriftpy2.thrift import TApplicationException

from torchpipe_py.errors import DeadlineExceeded, InvalidRequest, Overloaded, TorchpipeError
from torchpipe_server.options import Options
from torchpipe_server.serving.connection import Connection
from torchpipe_server.serving.ledger import Ledger
from torchpipe_server.serving.loop import READ, WRITE, Loop
from torchpipe_server.serving.method import Method, describe_error
from torchpipe_server.serving.slots import Mark
from torchpipe_server.wire.codec import BadArgumentsError, Codec
from torchpipe_server.wire.protocol import ONEWAY, Limits, Message, MessageReader, ProtocolError

logger = logging.getLogger("torchpipe_server")

# Below malloc's threshold for mapping memory anew each time: 4 instead of 45 us for reading 66 KB.
# NOTE: Python gives up the GIL around each socket call. Calls that keep it (ctypes.PyDLL) serve 2 to 20 % fewer
# requests: the threads that decode wait longer for it.
RECEIVE_BYTES = 120 * 1024
BACKLOG = 64  # whole messages of one connection that wait; beyond them it is not read
LINGER_SECONDS = 2.0
TICK_SECONDS = 0.5

_KINDS = {
    TApplicationException.PROTOCOL_ERROR: "bad_arguments",
    TApplicationException.UNKNOWN_METHOD: "unknown_method",
}


class Handler(Protocol):
    """What is served: a method for each name that a message may have."""

    @property
    def methods(self) -> Mapping[str, Method]: ...


class Server:
    """Serves a handler's methods to the connections that it is given.

    ``drain`` answers what was accepted and closes each connection then. ``release`` and ``shed`` let go of connections
    between two of their messages, unclosed, for another process to go on with. ``on_gone(slot, is_closed)`` is called
    for each connection that was closed or let go of. All of it, but for the replies, is for the thread of the loop.
    """

    def __init__(self, loop: Loop, handler: Handler, options: Options, on_gone: Callable[[int, bool], object]) -> None:
        self._loop, self._handler, self._options, self._on_gone = loop, handler, options, on_gone
        self._limits = Limits(
            message_bytes=options.max_message_bytes,
            string_bytes=options.max_message_bytes,
            items=options.max_items,
            depth=options.max_depth,
        )
        self.ledger = Ledger(options.log_requests)
        self._codec = Codec(self._limits)
        self._connections: set[Connection] = set()
        self._deadlines: list[tuple[float, int, Connection, int]] = []  # deadline, tie-break, connection, serial
        self._counter = itertools.count()
        self._held_bytes = 0  # at least what the connections hold
        self._ending_until: float | None = None
        self._is_draining = False
        self._next_tick = 0.0
        loop.steps.append(self._step)

    # -- life ---------------------------------------------------------------------------------------------------

    def adopt(self, sock: socket.socket, slot: int, mark: Mark, refused: bool = False) -> None:
        """Serve the connection, a socket that does not block, from now on."""
        connection = Connection(sock, MessageReader(self._limits), refused, slot, mark)
        connection.leaving = self._ending_until is not None
        self._connections.add(connection)
        self._watch(connection, READ)
        if connection.leaving:
            self._guard(connection, self._end_if_idle)

    def drain(self) -> None:
        """Answer everything that was accepted, for ``drain_seconds`` at most, and close."""
        if not self._is_draining:
            self._is_draining = True
            self._end()

    def release(self) -> None:
        """Let go of every connection as soon as it is between two messages; those that are not in time, are closed."""
        if self._ending_until is None:
            self._end()

    def _end(self) -> None:
        self._ending_until = monotonic() + self._options.drain_seconds
        self.shed(len(self._connections))

    def shed(self, count: int) -> None:
        """Let go of so many connections, each as soon as it is between two messages."""
        for connection in list(itertools.islice(self._connections, count)):
            connection.leaving = True
            self._guard(connection, self._end_if_idle)

    @property
    def is_finished(self) -> bool:
        """Whether it was told to end, and has, or its time for that is over."""
        if self._ending_until is None:
            return False
        return not self._connections or monotonic() >= self._ending_until

    @property
    def connections(self) -> int:
        """How many it serves."""
        return len(self._connections)

    def close(self) -> bool:
        """Close every connection there is; whether none of them still had a request to be answered."""
        busy = sum(connection.has_work() for connection in self._connections)
        if busy:
            logger.warning("%d connections still busy after drain_seconds", busy)
        for connection in list(self._connections):
            self._guard(connection, self._drop)
        self._loop.steps.remove(self._step)
        self.ledger.settle()
        return not busy

    def _end_if_idle(self, connection: Connection) -> None:
        """Of one that is to leave: end it once it has nothing to do; when draining not even something unread."""
        if connection.closed or connection.has_work() or connection.linger_until:
            return
        if self._is_draining:
            self._read(connection)
        if connection.closed or connection.has_work() or connection.linger_until or connection.reader.pending_bytes:
            return
        if self._is_draining or connection.closing:
            self._drop(connection)
            return
        self._watch(connection, 0)
        self._connections.discard(connection)
        connection.leave()
        self._on_gone(connection.slot, False)

    # -- the clock ----------------------------------------------------------------------------------------------

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

    def _step(self) -> float:
        self._expire()
        if monotonic() >= self._next_tick:
            self._tick()
        return TICK_SECONDS if not self._deadlines else self._deadlines[0][0] - perf_counter()

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
        self.ledger.settle()
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

    def _watch(self, connection: Connection, events: int) -> None:
        """Ask for ``events`` of the connection's socket; 0 asks for none."""
        if events == connection.events or connection.closed:
            return
        self._loop.watch(connection.sock, events, partial(self._on_event, connection))
        connection.events = events

    def _on_event(self, connection: Connection, events: int) -> None:
        if events & WRITE:
            self._guard(connection, self._advance)
        if events & READ and not connection.closed:
            self._guard(connection, self._read)

    def _read(self, connection: Connection) -> None:
        connection.mark.touch()
        try:
            data = connection.sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            self._settle(connection)
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
        self._held_bytes += len(data)
        if self._held_bytes > self._options.max_held_bytes:
            self._bound_memory(connection)

    def _bound_memory(self, connection: Connection) -> None:
        """Refuse what has just arrived, where all connections together really hold too much."""
        self._held_bytes = sum(one.held_bytes() for one in self._connections)
        if self._held_bytes > self._options.max_held_bytes and not connection.is_settled():
            limit = self._options.max_held_bytes
            self._refuse(connection, ProtocolError(Overloaded.code, f"more than {limit} bytes of unanswered messages"))

    def _settle(self, connection: Connection) -> None:
        if connection.is_settled():
            connection.mark.settle()

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
        if connection.leaving:
            self._end_if_idle(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection nobody listens on any more; what it asked for and is still queued is not computed."""
        if connection not in self._connections:
            return
        self._watch(connection, 0)
        self._connections.discard(connection)
        ticket = connection.close()
        if ticket is not None:
            ticket.cancel()
        self._on_gone(connection.slot, True)

    def _refuse(self, connection: Connection, error: ProtocolError) -> None:
        """A stream that cannot be read any further: answer what came before, then the error, then close."""
        connection.message_since = 0.0
        connection.reader.abandon(error)
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
        try:
            connection.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(connection)
            return
        self._watch(connection, READ)

    # -- requests -----------------------------------------------------------------------------------------------

    def _start_next(self, connection: Connection) -> None:
        if connection.backlog and connection.busy:
            connection.await_reply()
        while connection.backlog and not connection.busy and connection.unsent is None:
            self._dispatch(connection, connection.backlog.popleft())
        if connection.broken is not None and not (connection.busy or connection.backlog or connection.unsent):
            (message, error), connection.broken = connection.broken, None
            connection.closing = True
            failure: TorchpipeError = InvalidRequest(str(error))
            if error.kind == Overloaded.code:
                failure = Overloaded(error.detail, retry_after_ms=1000)
            failure.code = error.kind
            connection.begin(message)
            self._fail(connection, message, failure)
        self._settle(connection)

    def _dispatch(self, connection: Connection, message: Message) -> None:
        serial = connection.begin(message)
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
            if self.ledger.is_logging:
                connection.request_id = method.request_id(args)
            ticket = method.start(args, lambda result: self._finish(connection, head, method, result))
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

    def _finish(self, connection: Connection, message: Message, method: Method, result: Any) -> None:
        """Called on whichever thread finished the request."""
        if isinstance(result, BaseException):
            self._fail(connection, message, result)
        else:
            self._answer(connection, message, result, method.outcome(result))

    def _answer(self, connection: Connection, message: Message, result: Any, outcome: str) -> None:
        try:
            reply = self._codec.encode_reply(message, result)
        except Exception as error:
            logger.exception("a result of %s cannot be encoded", message.name)
            self._answer_exception(connection, message, TApplicationException.INTERNAL_ERROR, describe_error(error))
            return
        self._reply(connection, b"" if message.type == ONEWAY else reply, message.name, outcome)

    def _fail(self, connection: Connection, message: Message, error: BaseException) -> None:
        """Reply with an error that the method declares, or with what every client understands."""
        method = self._handler.methods.get(message.name)
        try:
            if method is None:
                raise error
            result = method.fail(error)
        except BaseException:
            text = f"{type(error).__name__}: {describe_error(error)}"
            outcome = "cancelled" if isinstance(error, CancelledError) else getattr(error, "code", "internal")
            self._answer_exception(connection, message, TApplicationException.INTERNAL_ERROR, text, str(outcome))
            return
        self._answer(connection, message, result, method.outcome(result))

    def _answer_exception(
        self, connection: Connection, message: Message, kind: int, text: str, outcome: str = "internal"
    ) -> None:
        reply = self._codec.encode_exception(message, TApplicationException(kind, text))
        # NOTE: what a client makes up must not become a name among the counters.
        name = message.name if message.name in self._handler.methods else "unknown"
        self._reply(connection, b"" if message.type == ONEWAY else reply, name, _KINDS.get(kind, outcome))

    def _reply(self, connection: Connection, reply: bytes, name: str, outcome: str) -> None:
        """From any thread."""
        spent, request_id = connection.send(reply)
        self.ledger.add(name, outcome, spent, request_id)
        if connection.leaving or connection.unsent is not None or connection.closing or connection.has_next():
            self._loop.call(partial(self._guard, connection, self._advance))
