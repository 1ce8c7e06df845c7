"""A request in work, over any protocol: its state, its deadline, and what it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from enum import Enum, auto
from time import monotonic, perf_counter
from typing import Any, Protocol

from torchpipe_py.errors import DeadlineExceeded
from torchpipe_py.methods.long_messages import Job, LongMessages
from torchpipe_py.methods.routes import Cancellable, Method
from torchpipe_py.wire.http import HttpRequest


class CallState(Enum):
    """The state of a call."""

    WAITING = auto()  # no method has it yet; its message is being read
    RUNNING = auto()  # a method has it, and answers from any thread
    ANSWERED = auto()  # its client's side has the answer
    DROPPED = auto()  # its client left, or another process answers: an answer that still arrives is discarded


WAITING, RUNNING, ANSWERED, DROPPED = CallState

UNREAD = "not read by its deadline"

Loop = asyncio.AbstractEventLoop


def call_from_any_thread(loop: Loop, function: Callable[..., object], *args: Any) -> None:
    """Call the function on the loop's thread; does nothing once the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed
        pass


class Caller(Protocol):
    """The client's side of a call."""

    def reply(self, call: Call, result: Any) -> None:
        """Encode the result, or the exception in its place, and pass it to the loop; for any thread."""


class Call:
    """One request, from its message to its answer::

        WAITING ──── start ────► RUNNING ── settle ──► ANSWERED
           │                        │                      ▲
           ├── settle (refused) ────┼──────────────────────┘
           └── cancel, abandon ─────┴── cancel, abandon ──► DROPPED

    ``done`` is for any thread, the rest for the loop's. ``message`` is what the answer needs of the request. ``size``
    is the number of bytes that it keeps in memory, ``began`` the time by ``monotonic`` when its message was complete.
    ``inflating`` is there while its body is inflated aside, ``reading`` while another thread has to read it, ``ticket``
    while it runs, ``writing`` once another thread has to encode its answer, and ``timer`` while it has a deadline.
    """

    __slots__ = (
        "began", "caller", "inflating", "message", "reading", "request_id", "size", "state", "ticket", "timer",
        "writing",
    )  # fmt: skip

    def __init__(self, caller: Caller, message: Any = None, size: int = 0) -> None:
        self.caller, self.message, self.size = caller, message, size
        self.state = WAITING
        self.began = monotonic()
        self.request_id = ""
        self.inflating: asyncio.Task[None] | None = None
        self.reading: Job | None = None
        self.ticket: Cancellable | None = None
        self.writing: Job | None = None
        self.timer: asyncio.TimerHandle | None = None

    def start(self, loop: Loop, method: Method, args: Any, is_logged: bool) -> None:
        """Start the method; raises what it raises. ``is_logged``: whether the request's id is needed."""
        if is_logged:
            self.request_id = method.request_id(args)
        self._run(loop, method.start(args, self.done))

    @property
    def is_queued(self) -> bool:
        """Whether its message still has to be read, or it waits in the pipe; a momentary answer."""
        if self.inflating is not None or self.reading is not None:
            return True
        return self.ticket is not None and self.ticket.is_queued

    def start_aside(
        self, loop: Loop, long_messages: LongMessages, method: Method, args: HttpRequest, seconds: float | None,
        is_logged: bool, started: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Start the method on a thread of ``long_messages``: its request takes long to read. Then call ``started``.

        An error is the answer; so is ``DeadlineExceeded`` if the request still waits after ``seconds``. Raises
        ``Overloaded`` for one without such a deadline that would wait too long, ``DeadlineExceeded`` for a late one.
        """
        if is_logged:
            self.request_id = method.request_id(args)
        if seconds is None:
            long_messages.check(args.size)
        elif seconds <= 0:
            raise DeadlineExceeded(UNREAD)
        else:
            self.timer = loop.call_later(seconds, self._expire_unread)
        self.reading = long_messages.submit(args.size, self._start_aside, loop, method, args, started)

    def _start_aside(self, loop: Loop, method: Method, args: Any, started: Callable[[], object] | None) -> None:
        try:
            ticket = method.start(args, self.done)
        except BaseException as error:  # others' requests are here
            self.done(error)
        else:
            call_from_any_thread(loop, self._run, loop, ticket, started)

    def _expire_unread(self) -> None:
        self.timer = None
        # NOTE: of one that is being read, its method finds out that it is late.
        if self.reading is not None and self.reading.cancel():
            self.reading = None
            self.done(DeadlineExceeded(UNREAD))

    def _run(self, loop: Loop, ticket: Cancellable | None, started: Callable[[], object] | None = None) -> None:
        """A method has the request."""
        self.reading = None
        if self.state is not WAITING:  # it was answered, or its client left, while another thread read it
            if self.state is DROPPED and ticket is not None:
                ticket.cancel()
            return
        self.state = RUNNING
        if ticket is not None:
            self.ticket, deadline = ticket, ticket.deadline
            if self.timer is not None:  # until which it had to be read
                self.timer.cancel()
                self.timer = None
            if deadline is not None:
                self.timer = loop.call_later(max(0.0, deadline - perf_counter()), self._expire)
        if started is not None:
            started()

    def done(self, result: Any) -> None:
        """Answer with the result, or with an exception."""
        self.caller.reply(self, result)

    def write_aside(self, writer: Executor, size: int, encode: Callable[[], None]) -> None:
        """Encode an answer made of ``size`` bytes on the thread of ``writer``.

        ``DeadlineExceeded`` is the answer if it still waits there at the call's deadline, and raised after it.
        """
        if self.ticket is not None and self.ticket.deadline is not None and perf_counter() >= self.ticket.deadline:
            raise _late()
        self.writing = Job(size, encode)
        with suppress(RuntimeError):  # after ``close``, when another process answers
            writer.submit(self.writing.run)

    def settle(self) -> None:
        """Release the ticket and the timer: the client's side has the answer."""
        if self.timer is not None:
            self.timer.cancel()
        self.reading = self.ticket = self.writing = self.timer = None
        self.state = ANSWERED

    def cancel(self) -> None:
        """End the request in the pipe: the client has left. Does nothing after the answer."""
        ticket = self.ticket
        self.abandon()
        if ticket is not None:
            is_late = ticket.deadline is not None and perf_counter() >= ticket.deadline
            ticket.cancel(_late() if is_late else None)

    def abandon(self) -> None:
        """Discard the answer that the pipe is going to give: another process answers the client."""
        for pending in (self.inflating, self.timer, self.writing):
            if pending is not None:
                pending.cancel()
        self.inflating = self.ticket = self.writing = self.timer = None
        if self.state is not ANSWERED:
            self.state = DROPPED
        if self.reading is not None:
            if not self.reading.cancel():
                self.message.is_left = True  # for the thread that reads it
            self.reading = None

    def _expire(self) -> None:
        ticket, writing, self.timer = self.ticket, self.writing, None
        if writing is not None:
            if writing.cancel():
                self.done(_late())
        elif ticket is not None:
            ticket.cancel(_late())


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("not finished by its deadline")
