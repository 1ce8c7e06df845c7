"""A request in work, over any protocol: its state, its deadline, and what it holds."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from enum import Enum, auto
from time import monotonic, perf_counter
from typing import Any, Protocol

from torchpipe_py import DeadlineExceeded
from torchpipe_py.serving import Cancellable, HttpRequest, Method
from torchpipe_server.front.loop import Loop, call_from_any_thread


class CallState(Enum):
    """The state of a call."""

    WAITING = auto()  # no method has it yet; its message is being read
    RUNNING = auto()  # a method has it, and answers from any thread
    ANSWERED = auto()  # its client's side has the answer
    DROPPED = auto()  # its client left, or another process answers: an answer that still arrives is discarded


WAITING, RUNNING, ANSWERED, DROPPED = CallState


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
    ``inflating`` is there while its body is inflated aside, ``ticket`` and ``timer`` while it runs.
    """

    __slots__ = ("began", "caller", "inflating", "message", "request_id", "size", "state", "ticket", "timer")

    def __init__(self, caller: Caller, message: Any = None, size: int = 0) -> None:
        self.caller, self.message, self.size = caller, message, size
        self.state = WAITING
        self.began = monotonic()
        self.request_id = ""
        self.inflating: asyncio.Task[None] | None = None
        self.ticket: Cancellable | None = None
        self.timer: asyncio.TimerHandle | None = None

    def start(self, loop: Loop, method: Method, args: Any, is_logged: bool) -> None:
        """Start the method; raises what it raises. ``is_logged``: whether the request's id is needed."""
        if is_logged:
            self.request_id = method.request_id(args)
        self._run(loop, method.start(args, self.done))

    def start_aside(self, loop: Loop, reader: Executor, method: Method, args: HttpRequest, is_logged: bool) -> None:
        """Start the method on a thread of ``reader``, since its request takes long to read. An error is the answer."""
        if is_logged:
            self.request_id = method.request_id(args)
        args.arrived = args.arrived or perf_counter()
        reader.submit(self._start_aside, loop, method, args)

    def _start_aside(self, loop: Loop, method: Method, args: Any) -> None:
        if self.state is not WAITING:  # its client left
            return
        try:
            ticket = method.start(args, self.done)
        except BaseException as error:  # others' requests are here
            self.done(error)
        else:
            call_from_any_thread(loop, self._run, loop, ticket)

    def _run(self, loop: Loop, ticket: Cancellable | None) -> None:
        """A method has the request."""
        if self.state is not WAITING:  # it was answered, or its client left, while another thread read it
            if self.state is DROPPED and ticket is not None:
                ticket.cancel()
            return
        self.state = RUNNING
        if ticket is not None:
            self.ticket, deadline = ticket, ticket.deadline
            if deadline is not None:
                self.timer = loop.call_later(max(0.0, deadline - perf_counter()), self._expire)

    def done(self, result: Any) -> None:
        """Answer with the result, or with an exception."""
        self.caller.reply(self, result)

    def settle(self) -> None:
        """Release the ticket and the timer: the client's side has the answer."""
        if self.timer is not None:
            self.timer.cancel()
        self.ticket = self.timer = None
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
        for pending in (self.inflating, self.timer):
            if pending is not None:
                pending.cancel()
        self.inflating = self.ticket = self.timer = None
        if self.state is not ANSWERED:
            self.state = DROPPED

    def _expire(self) -> None:
        ticket, self.timer = self.ticket, None
        if ticket is not None:
            ticket.cancel(_late())


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("not finished by its deadline")
