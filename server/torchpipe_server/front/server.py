"""Serves connections: starts their requests and writes the answers that other threads produce."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, perf_counter, sleep

from torchpipe_py import Overloaded, TorchpipeError
from torchpipe_py.serving import (
    Call,
    HttpRequest,
    LongMessages,
    QueueTarget,
    compression,
    counted,
    deadline_ms_of,
    errors,
    limited_ms,
)
from torchpipe_server.front.connection import CLOSED, Connection
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.journal import Entry
from torchpipe_server.front.loop import Inbox, Loop, every, take_each
from torchpipe_server.front.pacing import RefusalPacing
from torchpipe_server.front.services import Services
from torchpipe_server.options import Options
from torchpipe_server.wire.errors import ProtocolError

logger = logging.getLogger("torchpipe_server")

# Below malloc's threshold for mapping memory. It also bounds what one round of the loop reads of a connection.
RECEIVE_BYTES = 120 * 1024
TICK_SECONDS = 0.5
TURN_SECONDS, REST_SECONDS = 0.001, 0.0001  # of pipelined requests, and for other threads after it


class Server:
    """Serves the connections that it is given.

    ``drain`` answers accepted requests, then closes each connection. ``release`` and ``hand_over`` give connections
    between two messages without closing them, for another process to serve. ``on_gone(slot, is_closed)`` is called for
    each connection that was closed or handed over. Everything but ``answer`` is for the loop's thread.
    """

    def __init__(
        self, loop: Loop, services: Services, options: Options, on_gone: Callable[[int, bool], object],
        timed: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.loop, self.services, self.options, self._on_gone = loop, services, options, on_gone
        self.counters = RequestCounters(options.log_requests, timed)
        self.pacing = RefusalPacing(options.drain_seconds)
        self.received = memoryview(bytearray(RECEIVE_BYTES))  # into which every connection reads
        self.held_bytes = 0  # an upper bound of what the connections hold
        self._connections: set[Connection] = set()
        self._adopting: set[asyncio.Task] = set()
        self.scheduled: dict[Connection, None] = {}  # in order
        self._rested_at = 0.0  # when other threads last had time between pipelined requests
        self.answer = Inbox(loop, self.send).put
        """Takes a call, the bytes of its answer, method and outcome to count, and its error; for any thread."""
        target = QueueTarget()
        target.set(None if options.queue_target_ms < 0 else options.queue_target_ms / 1000)
        self.long_messages = LongMessages(target)
        self.inflating = compression.InflateQueue(self.long_messages.executor)
        self.writer = ThreadPoolExecutor(1, "torchpipe-writer")  # so that images and compression take one core at most
        self._ending_until: float | None = None
        self.is_draining = False
        self._stop_ticks = every(loop, TICK_SECONDS, self._tick)

    # -- connections ----------------------------------------------------------------------------------------------

    def adopt(
        self, sock: socket.socket, slot: int, entry: Entry, is_refused: bool = False, is_answered: bool = False
    ) -> Connection:
        """Serve a connection, given as a non-blocking socket, and return it.

        If ``is_answered``, it is closed once its client has had time to read the last answer.
        """
        connection = Connection(self, sock, slot, entry, is_refused)
        if is_answered:
            connection.close_when_answered()
        self._connections.add(connection)
        task = self.loop.create_task(self._connect(connection))
        self._adopting.add(task)  # the loop keeps no strong reference
        task.add_done_callback(self._adopting.discard)
        return connection

    async def _connect(self, connection: Connection) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: connection, connection.sock)
        except OSError:
            connection.drop()

    def forget(self, connection: Connection, is_closed: bool) -> None:
        """Drop a connection that is no longer served."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._on_gone(connection.slot, is_closed)

    def close_or_hand_over(self, connection: Connection) -> None:
        """Close an idle connection in a drain; otherwise hand it over to another process."""
        if not self.is_draining:
            connection.abandon()
            self.forget(connection, False)
        elif not has_unread(connection.sock):  # NOTE: unread input is read in a moment and answered
            connection.drop()

    def close_slowest(self) -> bool:
        """Close the connection that has waited longest for its client; ``False`` if all have a request in work."""
        waiting = [connection for connection in self._connections if connection.call is None]
        if waiting:
            min(waiting, key=lambda connection: connection.message_since or connection.last_active).drop()
        return bool(waiting)

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._connections)

    def send(self, call: Call, data: bytes, method: str, outcome: str, error: BaseException | None = None) -> None:
        """Like ``answer``, but at once; for the loop's thread. Only a repeated refusal may have to wait."""
        now, wait, connection = monotonic(), 0.0, call.caller
        assert isinstance(connection, Connection)
        seconds = now - call.began  # without the wait of a refusal
        self.counters.add(method, outcome, seconds, call.request_id, call.message.model)
        # NOTE: results beside a refusal, as of infer_many, are not an error and do not wait.
        if isinstance(error, TorchpipeError) and errors.code_of(error) == Overloaded.code:  # also one that was restated
            deadline = getattr(error, "deadline", None) if call.ticket is None else call.ticket.deadline
            wait = self.pacing.delay(connection, now, deadline)
        if wait > 0.0:
            call.settle()
            call.size = 0  # its message is gone
            call.timer = self.loop.call_later(wait, connection.answered, call, data, now + wait)
        else:
            connection.answered(call, data, now)

    def seconds_left(self, request: HttpRequest) -> float | None:
        """Seconds to the request's deadline, as far as that is known before its body is read."""
        limit = limited_ms(deadline_ms_of(request), self.options.deadline_ms)
        return None if limit is None else limit / 1000 - (perf_counter() - (request.arrived or 0.0))

    def schedule(self, connection: Connection) -> None:
        """Have the connection advance once all connections with input have been read.

        Requests of one round start together, so that instances wake up once for all of them.
        """
        if not self.scheduled:
            self.loop.call_soon(self._advance)
        self.scheduled[connection] = None

    def rest(self) -> None:
        """Leave time to other threads: a connection has its next request already, and the loop would not pause.

        NOTE: system calls release the GIL too shortly for a waiting thread, whose wait each of them begins anew.
        """
        if (now := monotonic()) > self._rested_at + TURN_SECONDS:
            sleep(REST_SECONDS)
            self._rested_at = now + REST_SECONDS

    def _advance(self) -> None:
        scheduled, self.scheduled = self.scheduled, {}
        take_each(scheduled, lambda connection: connection.advance(), lambda connection: connection.fail())

    # -- ending -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Answer accepted requests, for at most ``drain_seconds``, and close."""
        if not self.is_draining:
            self.is_draining = True
            self._end()

    def release(self) -> None:
        """Hand over every connection as soon as it is between two messages; close those that are late."""
        if self._ending_until is None:
            self._end()

    def _end(self) -> None:
        self._ending_until = monotonic() + self.options.drain_seconds
        self.pacing.stop()
        self.hand_over(len(self._connections))

    def hand_over(self, count: int) -> None:
        """Hand over ``count`` connections, each as soon as it is between two messages."""
        for connection in list(itertools.islice(self._connections, count)):
            connection.leave()

    @property
    def is_ending(self) -> bool:
        """Whether it is draining or releasing."""
        return self._ending_until is not None

    @property
    def is_finished(self) -> bool:
        """Whether no connection is left, or the time to drain or release is over."""
        until = self._ending_until
        return until is not None and (not self._connections or monotonic() >= until)

    def close(self) -> bool:
        """Close all connections; returns whether none of them had an unanswered request.

        One with a request in work is abandoned: the supervisor, which also holds its socket, answers it.
        """
        busy = sum(connection.is_busy for connection in self._connections)
        if busy:
            logger.warning("%s still busy after drain_seconds", counted(busy, "connection"))
        for connection in list(self._connections):
            if connection.call is None:
                connection.drop()
            else:
                connection.abandon()
                self._connections.discard(connection)
        self._stop_ticks()
        self.long_messages.close()
        self.writer.shutdown(wait=False, cancel_futures=True)
        return not busy

    # -- the clock ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = monotonic()

        def check(connection: Connection) -> None:
            connection.check_time(now)
            if self.is_ending:
                connection.leave()

        take_each(list(self._connections), check, lambda connection: connection.fail())

    def bound_memory(self) -> None:
        """If all connections together hold too much, free the memory of those that hold most.

        This drops connections with an unsent reply, and refuses messages that are incomplete or waiting. Requests in
        work stay.
        """
        limit = self.options.max_held_bytes
        if self.held_bytes <= limit:
            return
        sizes = {connection: connection.held_bytes for connection in self._connections}
        self.held_bytes = sum(sizes.values())
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True) if self.held_bytes > limit else []
        for connection in largest:
            if self.held_bytes <= limit:
                break
            if connection.is_stalled:
                connection.drop()
            elif connection.reader.pending_bytes:
                text = f"more than {limit} bytes of unanswered messages (--max-held-bytes)"
                connection.refuse(ProtocolError(Overloaded.code, text))
            self.held_bytes -= sizes[connection] - (0 if connection.state is CLOSED else connection.held_bytes)


def has_unread(sock: socket.socket) -> bool:
    """Whether unread bytes of the client are waiting."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
