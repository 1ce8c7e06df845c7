"""One client's connection: what has arrived, what waits for its answer, what is still to be written."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from time import monotonic

from torchpipe_server.serving.journal import Entry
from torchpipe_server.serving.protocols import Reader, Request, Stream
from torchpipe_server.serving.service import Cancellable
from torchpipe_server.wire.scanner import ProtocolError

BACKLOG = 64  # whole messages that wait; beyond them no more is read, nor cut out of what was
TURN_SECONDS = 0.0005  # of the I/O thread's time for one connection, until the others have had theirs


class State(Enum):
    """Of a connection. It only ever goes on to a state further down."""

    OPEN = auto()  # messages are read and answered
    LEAVING = auto()  # the same, until the connection is idle: then this process closes it, or lets go of it
    CLOSING = auto()  # nothing more is read; what was accepted is answered
    LINGERING = auto()  # all is written; what the client still sends is discarded, so that it reads the reply
    CLOSED = auto()  # the socket is not ours any more


class Work(Enum):
    """What is being done for the request that was begun last."""

    NONE = auto()
    RUNNING = auto()  # its answer is being made
    SENDING = auto()  # a part of its reply is still to be written


OPEN, LEAVING, CLOSING, LINGERING, CLOSED = State
NONE, RUNNING, SENDING = Work


class Connection:
    """Requests of a connection are answered one after the other, in their order.

    The I/O thread owns everything but the sending side of the socket, ``work``, ``ticket`` and ``unsent``, which
    whoever finishes a request touches under ``lock``. The socket is closed under that lock as well, so that no reply
    can go out on a descriptor that belongs to another connection by then. ``journal`` says meanwhile, for whoever goes
    on after a sudden death of this process, what is being done.
    """

    __slots__ = (
        "backlog", "ended_at", "events", "has_turn", "is_gone", "is_refused", "journal", "last_active", "lock",
        "message_since", "reader", "serial", "slot", "sock", "state", "ticket", "uncut", "unsent", "work",
        "working_bytes",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, reader: Reader, journal: Entry, slot: int, is_refused: bool) -> None:
        self.sock, self.reader, self.journal, self.slot = sock, reader, journal, slot
        self.is_refused = is_refused  # over the limit: its first request is answered 'overloaded'
        self.state = OPEN
        self.events = 0  # that the loop watches for
        self.last_active = monotonic()
        self.message_since = 0.0  # when an unfinished message began, 0 if there is none
        self.ended_at = 0.0  # when the client said that it sends nothing more, 0 if it has not
        self.backlog: deque[Request] = deque()
        self.uncut: Iterator[Request] | None = None  # the messages in what was read, those behind the backlog
        self.lock = threading.Lock()
        self.work = NONE
        self.has_turn = False  # the I/O thread is at its messages, and looks at what became of them afterwards
        self.is_gone = False  # the client does not take its replies any more
        self.serial = 0  # of the last request begun
        self.working_bytes = 0  # of its message
        self.ticket: Cancellable | None = None
        self.unsent: memoryview | None = None

    # -- what it is -----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is being answered or waits, or something is not written yet."""
        return self.work is not NONE or self.has_messages

    @property
    def has_messages(self) -> bool:
        """Whether messages wait, or bytes that may be some."""
        return bool(self.backlog) or self.uncut is not None

    @property
    def is_idle(self) -> bool:
        """Whether it is between two messages, as far as it was read."""
        return self.state in (OPEN, LEAVING) and not self.has_work and not self.reader.pending_bytes

    @property
    def is_settled(self) -> bool:
        """Whether all bytes taken from the socket belong to requests that have begun."""
        # NOTE: asked twice for each request: nothing is called that need not be.
        return self.uncut is None and not self.backlog and not self.reader.pending_bytes

    @property
    def waits_for_loop(self) -> bool:
        """Whether the I/O thread has to go on with it once its request is answered."""
        if self.state is not OPEN:
            return self.state is not CLOSED
        # NOTE: asked for each request: nothing is called that need not be.
        return bool(
            self.backlog
            or self.uncut is not None
            or self.work is SENDING
            or self.is_gone
            or self.reader.awaits_invitation
        )

    def is_full(self, most_bytes: int) -> bool:
        """Whether so much waits that no more should be read."""
        waiting = len(self.backlog)
        return self.uncut is not None or waiting >= BACKLOG or (waiting > 1 and self._backlog_bytes() > most_bytes)

    def is_working_on(self, serial: int) -> bool:
        """Whether the request of that number still waits for its answer."""
        return self.state is not CLOSED and self.serial == serial and self.work is RUNNING

    def held_bytes(self) -> int:
        """What the connection keeps in memory: messages unfinished, waiting and in work, and the unsent reply."""
        unsent = self.unsent
        held = self.reader.pending_bytes + self._backlog_bytes() + (self.working_bytes if self.work is RUNNING else 0)
        return held + (0 if unsent is None else len(unsent))

    def _backlog_bytes(self) -> int:
        return sum(message.size for message in self.backlog)

    # -- the I/O thread -------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> float:
        """Take what was read, and cut messages out of it; when its turn ends, in which it does that.

        Raises ``ProtocolError`` behind the last whole message of a broken stream.
        """
        self.last_active = now = monotonic()
        self.uncut = self.reader.feed(data)
        if isinstance(self.reader, Stream) and self.reader.told is not None:
            self.reader = self.reader.told
        until = now + TURN_SECONDS
        self._cut(until)
        return until

    def _cut(self, until: float) -> None:
        """Cut messages out of what was read: one, and more for as long as the turn and as the backlog has room.

        Of one with many items it is only a part.
        """
        assert self.uncut is not None
        for message in self.uncut:
            self.backlog.append(message)
            self.message_since = 0.0
            if self.reader.pending_bytes and (len(self.backlog) >= BACKLOG or monotonic() > until):
                return
        self.uncut = None
        if not self.reader.pending_bytes:
            self.message_since = 0.0
            return
        if self.reader.is_paused:
            self.uncut = self.reader.feed(b"")
        if not self.message_since:
            self.message_since = monotonic()

    def next_message(self, until: float, takes_costly: bool) -> Request | None:
        """What may begin now: the next message, once the one before it is answered and its reply written.

        Raises ``ProtocolError`` as ``receive`` does.
        """
        if self.is_gone:
            return None
        if self.uncut is not None and len(self.backlog) < BACKLOG:
            self._cut(until)
        if not self.backlog or (self.backlog[0].is_costly and not takes_costly):
            return None
        if self.work is RUNNING:
            with self.lock:
                pass  # a reply that is being written ends its request: the client has read it and sent the next one
        return self.backlog.popleft() if self.work is NONE else None

    def invite(self) -> None:
        """Tell a client that waits for it to send the rest of its message, once all before it is answered."""
        with self.lock:
            if self.work is NONE and not self.has_messages and self.state in (OPEN, LEAVING):
                self._write(memoryview(self.reader.invitation()))

    def begin_turn(self) -> bool:
        """From now on replies do not call the I/O thread, which is there; whether one may be made meanwhile."""
        with self.lock:
            self.has_turn = True
            return self.work is RUNNING

    def end_turn(self, has_replies: bool) -> bool:
        """Whether the I/O thread has to go on, after a turn in which a reply may have been made."""
        with self.lock:
            self.has_turn = False
            # Behind messages that are still to be cut out it is seen that the client is gone.
            if (self.uncut is not None and len(self.backlog) < BACKLOG) or (self.work is NONE and self.backlog):
                return True
            return has_replies and self.work is not RUNNING and self.waits_for_loop

    def begin(self, message: Request) -> bool:
        """A request's work begins, under the next ``serial``; whether all that was taken has begun with it."""
        self.journal.begin(message)
        is_settled = self.settle()
        self.working_bytes = message.size
        self.serial += 1
        self.work = RUNNING
        return is_settled

    def settle(self) -> bool:
        """Whether all that was taken has begun, which the journal is told."""
        is_settled = self.is_settled
        if is_settled:
            self.journal.settle()
        return is_settled

    def attach(self, ticket: Cancellable) -> bool:
        """Keep what can end the request begun last; ``False`` if it is answered already."""
        with self.lock:
            if self.work is not RUNNING:
                return False
            self.ticket = ticket
            return True

    def cancel(self, serial: int, error: BaseException) -> None:
        """End the request of that number, if it is still in work."""
        with self.lock:
            ticket = self.ticket if self.serial == serial else None
        if ticket is not None:
            ticket.cancel(error)

    def leave_when_idle(self) -> None:
        """This process is to end it, or to let go of it, as soon as it is idle."""
        if self.state is OPEN:
            self.state = LEAVING

    def end_after_replies(self) -> None:
        """Read nothing more, and close it behind the last reply."""
        self.message_since = 0.0
        if self.state in (OPEN, LEAVING):
            self.state = CLOSING

    def break_off(self, error: ProtocolError) -> bool:
        """The stream cannot be read any further: ``error`` is the last answer, if there is a request for it.

        Whether the client is told, now or by an earlier call.
        """
        is_first = self.state in (OPEN, LEAVING)
        request = self.reader.request if is_first else None
        self.uncut = None
        self.reader.abandon(error)
        if request is not None:
            self.backlog.append(request.refused(error))
        self.end_after_replies()
        return request is not None or not is_first

    def linger(self) -> bool:
        """Everything is said: the client gets the time to read it before the reset. ``False`` if it is gone."""
        self.state, self.last_active = LINGERING, monotonic()
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def close(self) -> Cancellable | None:
        """End the connection; the work that nobody waits for any more, if any, to be cancelled outside the lock."""
        with self.lock:
            if self.state is CLOSED:
                return None
            self.state = CLOSED
            try:
                self.sock.shutdown(socket.SHUT_RDWR)  # others hold copies of it
            except OSError:
                pass  # the client was faster
            self.sock.close()
            ticket, self.ticket = self.ticket, None
            self.unsent = None  # the clock may know the connection for as long as its deadlines run
            self.backlog.clear()
            self.uncut = None
            return ticket

    def let_go(self) -> None:
        """Close this process's copy of the socket, on which another one goes on: a reply that is made is not sent."""
        with self.lock:
            self.state = CLOSED
            self.sock.close()

    # -- any thread -----------------------------------------------------------------------------------------------

    def send(self, reply: bytes) -> tuple[float, bool]:
        """Write the reply to the request in work, which ends with it; what the socket does not take stays unsent.

        Returns the time, as ``monotonic``, and whether the I/O thread is to be called to go on.
        """
        with self.lock:
            now = self.last_active = monotonic()
            self.ticket = None
            # NOTE: ``work`` is set last, since the I/O thread takes it for the end of the request.
            if self.state is CLOSED:
                self.work = NONE
            else:
                self.journal.reply()
                self._write(memoryview(reply))
            # NOTE: under the lock, so that either this call or the end of the turn sees that there is more to do.
            return now, self.waits_for_loop and not self.has_turn

    def send_rest(self) -> bool:
        """Write what remained; ``False`` if something still does."""
        with self.lock:
            if self.work is SENDING and self.state is not CLOSED:
                self._write(self.unsent)
            return self.work is not SENDING

    def _write(self, data: memoryview | None) -> None:
        assert data is not None
        try:
            sent = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.is_gone = True
            self.unsent, self.work = None, NONE
            return
        if sent < len(data):
            self.unsent, self.work = data[sent:], SENDING
        else:
            self.journal.end()
            self.unsent, self.work = None, NONE
