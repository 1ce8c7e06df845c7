"""One client's connection: what has arrived, what waits for its turn, what is still to be written."""

from __future__ import annotations

import socket
import threading
from collections import deque
from time import monotonic

from torchpipe_server.serving.method import Cancellable
from torchpipe_server.serving.slots import Mark
from torchpipe_server.wire.protocol import Message, MessageReader, ProtocolError


class Connection:
    """Requests of a connection are answered one after the other, in their order.

    The I/O thread owns everything but the sending side of the socket, ``busy``, ``ticket`` and ``unsent``, which
    whoever finishes a request touches under ``lock``. The socket is closed under that lock as well, so that no reply
    can go out on a descriptor that belongs to another connection by then. ``mark`` says meanwhile, for whoever goes on
    after a sudden death of this process, what is being done.
    """

    __slots__ = (
        "answered", "backlog", "begun", "broken", "busy", "closed", "closing", "events", "last_active", "leaving",
        "linger_until", "lock", "mark", "message_since", "reader", "refused", "request_id", "serial", "slot", "sock",
        "ticket", "unsent", "unsent_since", "working_bytes",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, reader: MessageReader, refused: bool, slot: int, mark: Mark) -> None:
        self.sock = sock
        self.reader = reader
        self.slot, self.mark = slot, mark
        self.refused = refused  # over the limit: its first request is answered 'overloaded'
        self.lock = threading.Lock()
        self.backlog: deque[Message] = deque()
        self.broken: tuple[Message, ProtocolError] | None = None  # what the stream broke off in, after the backlog
        self.busy = False  # a request is being answered, its reply not yet handed to the socket
        self.serial = self.answered = 0  # of the last request begun, of the last one answered
        self.begun = 0.0  # when the last request did
        self.request_id = ""  # the client's name for it, if somebody asks for that
        self.working_bytes = 0  # of its message
        self.ticket: Cancellable | None = None
        self.unsent: memoryview | None = None
        self.unsent_since = 0.0
        self.message_since = 0.0  # when an unfinished message began, 0 if there is none
        self.last_active = monotonic()
        self.events = 0
        self.leaving = False  # this process is to let go of it, or to close it, when there is nothing to do
        self.closing = False  # to be closed as soon as everything is written
        self.linger_until = 0.0  # after an error: discarding what the client still sends, so that it reads the reply
        self.closed = False

    def begin(self, message: Message) -> int:
        """A request's work begins; returns its serial number."""
        self.mark.begin(message)
        self.busy = True
        self.begun = monotonic()
        self.request_id = ""
        self.working_bytes = message.end - message.start
        self.serial += 1
        return self.serial

    def attach(self, serial: int, ticket: Cancellable) -> bool:
        """Keep what can end the request; ``False`` if it is answered already."""
        with self.lock:
            if self.answered >= serial:
                return False
            self.ticket = ticket
            return True

    def is_working_on(self, serial: int) -> bool:
        """Whether the request of that number still waits for its answer."""
        return not self.closed and self.answered < serial

    def is_full(self, most_messages: int, most_bytes: int) -> bool:
        """Whether so much waits that no more should be read."""
        waiting = len(self.backlog)
        return waiting > most_messages or (waiting > 1 and self._backlog_bytes() > most_bytes)

    def held_bytes(self) -> int:
        """What the connection keeps in memory: messages unfinished, waiting and in work, and the unsent reply."""
        unsent = self.unsent
        held = self.reader.pending_bytes + self._backlog_bytes() + (self.working_bytes if self.busy else 0)
        return held + (0 if unsent is None else len(unsent))

    def _backlog_bytes(self) -> int:
        return sum(message.end - message.start for message in self.backlog)

    def is_settled(self) -> bool:
        """Whether all bytes taken from the socket belong to requests that have begun."""
        return not (self.reader.pending_bytes or self.backlog or self.broken)

    def send(self, reply: bytes) -> tuple[float, str]:
        """Write the reply to the request in work, which ends with it; what the socket does not take stays unsent.

        Returns the seconds since the request began, and the client's name for it.
        """
        with self.lock:
            self.last_active = monotonic()
            spent, request_id = self.last_active - self.begun, self.request_id
            if not self.closed:
                self.mark.reply()
                self._write(memoryview(reply), self.last_active)
            self.answered = self.serial
            self.ticket = None
            # NOTE: last, since the I/O thread takes it for the end of the request.
            self.busy = False
        return spent, request_id

    def await_reply(self) -> None:
        """Let a reply that is being written end its request: the client has read it, and sent the next one, already."""
        with self.lock:
            pass

    def send_rest(self) -> bool:
        """Write what remained; ``False`` if something still does."""
        with self.lock:
            if self.closed or self.unsent is None:
                return True
            rest, self.unsent = self.unsent, None
            self._write(rest, self.unsent_since)
            return self.unsent is None

    def cancel(self, serial: int, error: BaseException) -> None:
        """End the request of that number, if it is still in work."""
        with self.lock:
            ticket = self.ticket if self.serial == serial else None
        if ticket is not None:
            ticket.cancel(error)

    def close(self) -> Cancellable | None:
        """End the connection; the work that nobody waits for any more, if any, to be cancelled outside the lock."""
        with self.lock:
            if self.closed:
                return None
            self.closed = True
            try:
                self.sock.shutdown(socket.SHUT_RDWR)  # others hold copies of it
            except OSError:
                pass  # the client was faster
            self.sock.close()
            ticket, self.ticket = self.ticket, None
            return ticket

    def leave(self) -> None:
        """Let go of the socket, on which another process goes on. There is no work then."""
        with self.lock:
            self.closed = True
            self.sock.close()

    def has_work(self) -> bool:
        """Whether a request is being answered or waits, or something is not written yet."""
        return self.busy or self.unsent is not None or self.has_next()

    def has_next(self) -> bool:
        """Whether something waits for the request in work to be answered."""
        return bool(self.backlog) or self.broken is not None

    def _write(self, data: memoryview, since: float) -> None:
        try:
            sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # the client is gone; the I/O thread learns it from its own read
        if sent < len(data):
            self.unsent, self.unsent_since = data[sent:], since
        else:
            self.mark.end()
