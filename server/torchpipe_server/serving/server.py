"""Serves connections: reads messages, starts their methods, and ends without losing a request.

One thread, that of the loop, does all of it. A reply is written by the thread that finished the request; only what a
socket does not take at once comes back to the loop.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import socket
from collections.abc import Callable
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from torchpipe_py.errors import DeadlineExceeded, Overloaded, counted
from torchpipe_server.options import Options
from torchpipe_server.serving.connection import (
    CLOSED,
    CLOSING,
    LEAVING,
    LINGERING,
    RUNNING,
    SENDING,
    TURN_SECONDS,
    Connection,
)
from torchpipe_server.serving.counters import RequestCounters
from torchpipe_server.serving.http import HttpService
from torchpipe_server.serving.journal import Entry
from torchpipe_server.serving.loop import READ, WRITE, Loop
from torchpipe_server.serving.protocols import Protocols, Request, Served, Service, Stream
from torchpipe_server.serving.service import ThriftService
from torchpipe_server.wire.scanner import Limits, ProtocolError

logger = logging.getLogger("torchpipe_server")

# Below malloc's threshold for mapping memory anew each time: 4 instead of 45 us for reading 66 KB.
# NOTE: Python gives up the GIL around each socket call. Calls that keep it (ctypes.PyDLL) serve 2 to 20 % fewer
# requests: the threads that decode wait longer for it.
RECEIVE_BYTES = 120 * 1024
LINGER_SECONDS = 2.0
ENDED_SECONDS = 1.0  # after a client's last byte; what is still queued then is not computed
TICK_SECONDS = 0.5

# Of each connection that has something to read, a round does a turn. What is left of it, and costly messages, wait in
# line until all have had theirs; then as many as fit have one more, and go to the end of the line.
ROUND_SECONDS = 0.01  # for the line, in each round


def limits_of(options: Options) -> Limits:
    """What a Thrift message may hold."""
    return Limits(
        message_bytes=options.max_message_bytes,
        string_bytes=options.max_message_bytes,
        text_bytes=options.max_text_bytes,
        items=options.max_items,
        depth=options.max_depth,
    )


class Server:
    """Serves methods to the connections that it is given.

    ``drain`` answers what was accepted and closes each connection then. ``release`` and ``shed`` let go of connections
    between two of their messages, unclosed, for another process to go on with. ``on_gone(slot, is_closed)`` is called
    for each connection that was closed or let go of. All of it, but for the replies, is for the thread of the loop.
    """

    def __init__(self, loop: Loop, served: Served, options: Options, on_gone: Callable[[int, bool], object]) -> None:
        self._loop, self._options, self._on_gone = loop, options, on_gone
        self._protocols = Protocols(
            ThriftService(served.methods, limits_of(options), options.max_reply_bytes),
            HttpService(served.routes, options.max_message_bytes, options.max_reply_bytes),
        )
        self.counters = RequestCounters(options.log_requests, served.names_with_pipe())
        self._connections: set[Connection] = set()
        self._deadlines: list[tuple[float, int, Connection, int]] = []  # deadline, tie-break, connection, serial
        self._counter = itertools.count()
        self._held_bytes = 0  # at least what the connections hold
        self._turns: dict[Connection, None] = {}  # the line
        self._ending_until: float | None = None
        self._is_draining = False
        self._next_tick = 0.0
        loop.steps.append(self._step)

    # -- life ---------------------------------------------------------------------------------------------------

    def adopt(self, sock: socket.socket, slot: int, journal: Entry, is_refused: bool = False) -> None:
        """Serve the connection, a socket that does not block, from now on."""
        connection = Connection(sock, Stream(self._protocols), journal, slot, is_refused)
        self._connections.add(connection)
        self._watch(connection, READ)
        if self._ending_until is not None:
            self._leave_when_idle(connection)

    def see_off(self, sock: socket.socket, slot: int, journal: Entry) -> None:
        """Close the connection, whose last answer is written, once its client has had the time to read it."""
        connection = Connection(sock, Stream(self._protocols), journal, slot, is_refused=False)
        self._connections.add(connection)
        connection.end_after_replies()
        self._guard(connection, self._advance)

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
            self._leave_when_idle(connection)

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
        """End every connection there is; whether none of them still had a request to be answered.

        One whose request is in work is let go of: whoever holds its socket as well answers when this process has ended.
        """
        busy = sum(connection.has_work for connection in self._connections)
        if busy:
            logger.warning("%s still busy after drain_seconds", counted(busy, "connection"))
        for connection in list(self._connections):
            self._guard(connection, self._abandon if connection.work is RUNNING else self._drop)
        self._loop.steps.remove(self._step)
        self.counters.settle()
        return not busy

    def _leave_when_idle(self, connection: Connection) -> None:
        connection.leave_when_idle()
        self._guard(connection, self._leave)

    def _leave(self, connection: Connection) -> None:
        """End the connection if it is idle; when draining, not before what it has sent already is answered."""
        if self._is_draining and connection.is_idle:
            self._read(connection)
        if not connection.is_idle:
            return
        if self._is_draining:
            self._drop(connection)
            return
        self._abandon(connection)
        self._on_gone(connection.slot, False)

    def _abandon(self, connection: Connection) -> None:
        """Close this process's copy of the socket, and nothing else."""
        self._watch(connection, 0)
        self._connections.discard(connection)
        connection.let_go()

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
        if self._turns:
            self._take_turns()
        if self._held_bytes > self._options.max_held_bytes:
            self._bound_memory()
        if self._deadlines:
            self._expire()
        is_tick = monotonic() >= self._next_tick
        if is_tick or self.counters.is_due:
            self.counters.settle()
        if is_tick:
            self._next_tick = monotonic() + TICK_SECONDS
            for connection in list(self._connections):
                self._guard(connection, self._check_time)
        if self._turns:
            return 0.0
        return TICK_SECONDS if not self._deadlines else self._deadlines[0][0] - perf_counter()

    def _take_turns(self) -> None:
        """Go on with connections that wait in line, for a while; the rest is the first in the next round."""
        until = monotonic() + ROUND_SECONDS
        for connection in list(self._turns):
            del self._turns[connection]
            self._guard(connection, partial(self._advance, takes_costly=True))
            if monotonic() > until:
                break

    def _expire(self) -> None:
        """Answer requests whose deadline is over; those that are finished already ignore it."""
        now = perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, connection, serial = heapq.heappop(self._deadlines)
            late = DeadlineExceeded("not finished by its deadline")
            self._guard(connection, partial(Connection.cancel, serial=serial, error=late))

    def _check_time(self, connection: Connection) -> None:
        """Enforce the limits that are a matter of time."""
        connection.journal.remember(connection.last_active)
        now, seconds = monotonic(), self._options.message_seconds
        silent = now - connection.last_active
        if connection.state is LINGERING:
            is_over = silent >= LINGER_SECONDS
        elif connection.work is SENDING:
            is_over = silent > seconds  # the client does not take its reply
        elif connection.ended_at:
            is_over = now - connection.ended_at >= ENDED_SECONDS
        elif connection.has_work:
            is_over = False
        else:
            is_over = 0 < self._options.idle_seconds < silent or (connection.is_refused and silent > seconds)
        if is_over:
            self._drop(connection)
        # While the server itself does not read, a message that is not whole is not the client's slowness.
        elif connection.events & READ and connection.message_since and now - connection.message_since > seconds:
            self._refuse(connection, ProtocolError("too_slow", f"a message took longer than {seconds:g} s"))

    # -- connections --------------------------------------------------------------------------------------------

    def _watch(self, connection: Connection, events: int) -> None:
        """Ask for ``events`` of the connection's socket; 0 asks for none."""
        if events == connection.events or connection.state is CLOSED:
            return
        self._loop.watch(connection.sock, events, partial(self._on_event, connection))
        connection.events = events

    def _on_event(self, connection: Connection, events: int) -> None:
        if events & WRITE:
            self._guard(connection, self._advance)
        if events & READ and connection.state is not CLOSED:
            self._guard(connection, self._read)

    def _read(self, connection: Connection) -> None:
        connection.journal.touch()
        try:
            data = connection.sock.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            connection.settle()
            return
        except OSError:
            self._drop(connection)
            return
        if not data:
            self._hear_end(connection)
            return
        if connection.state is LINGERING:
            return
        # NOTE: before messages are cut. The client may answer a reply that its thread is still at, and need not call.
        has_replies = connection.begin_turn()
        try:
            until = connection.receive(data)
        except ProtocolError as error:
            connection.end_turn(has_replies)
            self._refuse(connection, error)
            return
        is_settled = self._start_next(connection, until, has_replies)
        if not is_settled and connection.is_full(self._options.max_message_bytes):
            self._watch(connection, connection.events & ~READ)
        self._held_bytes += len(data)

    def _hear_end(self, connection: Connection) -> None:
        """The client sends nothing more. Nobody can see whether it still reads: it has a moment to be answered in."""
        if connection.state is LINGERING or not connection.has_work:
            self._drop(connection)
            return
        connection.settle()
        connection.end_after_replies()
        connection.ended_at = monotonic()
        self._watch(connection, connection.events & ~READ)

    def _bound_memory(self) -> None:
        """Where all connections together really hold too much, those end that hold most, until it fits again.

        A reply that its client does not take is dropped, a message that is not whole or waits is refused. What is in
        work stays.
        """
        limit = self._options.max_held_bytes
        held = {connection: connection.held_bytes() for connection in self._connections}
        self._held_bytes = sum(held.values())
        largest = sorted(held, key=held.__getitem__, reverse=True) if self._held_bytes > limit else []
        for connection in largest:
            if self._held_bytes <= limit:
                break
            if connection.work is SENDING:
                self._guard(connection, self._drop)
            elif not connection.is_settled:
                error = ProtocolError(Overloaded.code, f"more than {limit} bytes of unanswered messages")
                self._guard(connection, partial(self._refuse, error=error))
            self._held_bytes -= held[connection] - (0 if connection.state is CLOSED else connection.held_bytes())

    def _advance(self, connection: Connection, takes_costly: bool = False) -> None:
        """Go on with a connection after a reply, a write or an error."""
        if connection.state in (LINGERING, CLOSED):
            return
        if connection.is_gone:
            self._drop(connection)
            return
        is_written = connection.send_rest()
        if is_written:
            self._start_next(connection, monotonic() + TURN_SECONDS, connection.begin_turn(), takes_costly)
        unsent = connection.unsent
        if unsent is not None:
            self._held_bytes += len(unsent)
        if connection.state is CLOSING:
            if connection.has_work:
                self._watch(connection, 0 if is_written else WRITE)
            elif connection.linger():
                self._watch(connection, READ)
            else:
                self._drop(connection)
            return
        is_full = connection.is_full(self._options.max_message_bytes)
        reading = READ if is_written and not is_full else 0
        if reading and not connection.events & READ and connection.message_since:
            connection.message_since = monotonic()
        self._watch(connection, reading | (0 if is_written else WRITE))
        if connection.state is LEAVING:
            self._leave(connection)

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
        self._break_off(connection, error)
        self._advance(connection)

    def _break_off(self, connection: Connection, error: ProtocolError) -> None:
        if not connection.break_off(error):
            logger.info("closing a connection that sent no request: %s", error)

    # -- requests -----------------------------------------------------------------------------------------------

    def _start_next(self, connection: Connection, until: float, has_replies: bool, takes_costly: bool = False) -> bool:
        """Begin the messages that wait, until the turn ends; the rest waits in line for another one.

        ``has_replies`` is what ``begin_turn`` said. Whether everything that was read has begun.
        """
        if connection in self._turns:
            connection.end_turn(has_replies)
            return False
        is_settled = False
        try:
            while message := connection.next_message(until, takes_costly):
                has_replies = True
                is_settled = self._start(connection, message)
                if is_settled or monotonic() > until:
                    break
        except ProtocolError as error:
            self._break_off(connection, error)
            has_replies = True
        if connection.reader.awaits_invitation:
            connection.invite()
        if connection.end_turn(has_replies):
            self._turns[connection] = None
        return is_settled or connection.settle()

    def _start(self, connection: Connection, message: Request) -> bool:
        """Begin a request; whether it was the last of what was read."""
        is_settled, began, request_id = connection.begin(message), monotonic(), ""
        head, service = message, self._protocols.of(message)
        if message.is_last:
            connection.end_after_replies()
        try:
            if connection.is_refused:
                connection.end_after_replies()
                service.method(message)  # what is wrong with the message itself comes first
                most = counted(self._options.max_connections, "connection")
                raise Overloaded(f"more than {most}", retry_after_ms=1000)
            method, args = service.decode(message)
            head = message.without_body()  # what the answer needs; the image is not kept until then
            decoded_bytes = service.decoded_bytes
            connection.working_bytes += decoded_bytes
            self._held_bytes += decoded_bytes
            if self.counters.is_logging:
                request_id = method.request_id(args)
            ticket = method.start(args, partial(self._finish, connection, service, head, began, request_id))
        except BaseException as error:  # code of the user's own may raise ``SystemExit``, and others' requests are here
            self._finish(connection, service, head, began, request_id, error)
            return is_settled
        if ticket is not None and connection.attach(ticket) and ticket.deadline is not None:
            self._remember_deadline(ticket.deadline, connection, connection.serial)
        return is_settled

    def _remember_deadline(self, deadline: float, connection: Connection, serial: int) -> None:
        heapq.heappush(self._deadlines, (deadline, next(self._counter), connection, serial))
        if len(self._deadlines) > 2 * len(self._connections) + 64:
            # Each connection has one request in work at most: the rest is answered and only waits for its time.
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_working_on(entry[3])]
            heapq.heapify(self._deadlines)

    def _finish(
        self, connection: Connection, service: Service, message: Request, began: float, request_id: str, result: Any
    ) -> None:
        """Answer a request, on whichever thread finished it."""
        data, method, outcome = service.reply(message, result)
        now, calls_loop = connection.send(data)
        self.counters.add(method, outcome, now - began, request_id)
        if calls_loop:
            self._loop.call(partial(self._guard, connection, self._advance))
