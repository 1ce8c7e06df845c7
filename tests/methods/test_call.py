"""The states of a call, and what each transition does to its request."""

from __future__ import annotations

import weakref
from concurrent.futures import CancelledError
from time import perf_counter
from typing import Any
from unittest.mock import Mock

import pytest

from torchpipe_py import DeadlineExceeded, InvalidRequest
from torchpipe_py.methods.call import ANSWERED, DROPPED, RUNNING, WAITING, Call
from torchpipe_py.methods.long_messages import Job, LongMessages
from torchpipe_py.methods.routes import Cancellable, Method
from torchpipe_py.wire.http import HttpRequest


class Ticket(Cancellable):
    """Records how it was cancelled."""

    deadline: float | None = None

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline
        self.errors: list[BaseException | None] = []

    def cancel(self, error: BaseException | None = None) -> None:
        self.errors.append(error)


def started(ticket: Ticket | None, loop: Any = None) -> Call:
    call = Call(Mock())
    call.start(loop or Mock(), Method(object, lambda args, done: ticket, request_id=str), "args", True)
    return call


def test_start_records_ticket_and_request_id() -> None:
    ticket = Ticket()
    call = started(ticket)
    assert (call.state, call.ticket, call.timer, call.request_id) == (RUNNING, ticket, None, "args")


def test_failed_start_leaves_it_waiting() -> None:
    def refuse(args: Any, done: Any) -> None:
        raise InvalidRequest("no")

    call = Call(Mock())
    with pytest.raises(InvalidRequest):
        call.start(Mock(), Method(object, refuse), None, False)
    assert (call.state, call.request_id) == (WAITING, "")
    call.settle()
    assert call.state is ANSWERED


def test_done_passes_result_to_its_caller() -> None:
    call = started(None)
    call.done(7)
    call.caller.reply.assert_called_once_with(call, 7)  # type: ignore[attr-defined]


def test_settled_call_is_not_cancelled() -> None:
    ticket, loop = Ticket(perf_counter() + 60), Mock()
    call = started(ticket, loop)
    call.settle()
    loop.call_later.return_value.cancel.assert_called_once_with()
    for end in (call.cancel, call.abandon, call.settle):
        end()
        assert (call.state, call.ticket, call.timer, ticket.errors) == (ANSWERED, None, None, [])


def test_cancel_drops_request() -> None:
    ticket = Ticket(perf_counter() + 60)
    call = started(ticket)
    call.cancel()
    call.cancel()
    assert (call.state, ticket.errors) == (DROPPED, [None])


def test_cancel_after_deadline_reports_the_deadline() -> None:
    ticket = Ticket(perf_counter() - 1)
    started(ticket).cancel()
    assert [type(error) for error in ticket.errors] == [DeadlineExceeded]


def test_abandon_leaves_request_in_the_pipe() -> None:
    ticket = Ticket()
    call = started(ticket)
    call.abandon()
    assert (call.state, call.ticket, ticket.errors) == (DROPPED, None, [])


def test_deadline_ends_request_and_its_answer_still_counts() -> None:
    ticket, loop = Ticket(perf_counter() + 60), Mock()
    call = started(ticket, loop)
    seconds, expire = loop.call_later.call_args[0]
    assert 0 < seconds <= 60
    expire()
    assert [type(error) for error in ticket.errors] == [DeadlineExceeded]
    assert call.state is RUNNING
    call.settle()
    assert call.state is ANSWERED


class SteeredMessages(LongMessages):
    """Reads what it is given when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[Job] = []

    def check(self, size: int) -> None:
        """It refuses nothing."""

    def submit(self, size: int, read: Any, *args: Any) -> Job:
        self.waiting.append(Job(size, lambda: read(*args)))
        return self.waiting[-1]

    def run(self) -> None:
        self.waiting.pop().run()


def read_aside(start: Any, seconds: float | None = None) -> tuple[Call, SteeredMessages, Mock]:
    request = HttpRequest()
    request.body = b"{}"
    call, messages, loop = Call(Mock(), request), SteeredMessages(), Mock()
    loop.call_soon_threadsafe = lambda function, *args: loop.later.append(lambda: function(*args))
    loop.later = []
    call.start_aside(loop, messages, Method(object, start), request, seconds, False, loop.started)
    return call, messages, loop


def test_call_waits_until_its_message_is_read() -> None:
    ticket = Ticket(perf_counter() + 60)
    call, messages, loop = read_aside(lambda args, done: ticket)
    assert (call.state, call.ticket) == (WAITING, None)
    messages.run()
    loop.later.pop()()
    assert (call.state, call.ticket, call.timer) == (RUNNING, ticket, loop.call_later.return_value)
    loop.started.assert_called_once_with()


def test_error_of_a_message_that_is_read_aside_is_its_answer() -> None:
    def refuse(args: Any, done: Any) -> None:
        raise InvalidRequest("no")

    call, messages, _ = read_aside(refuse)
    messages.run()
    (_, error), _ = call.caller.reply.call_args  # type: ignore[attr-defined]
    assert isinstance(error, InvalidRequest)


def test_message_of_a_client_that_left_is_not_read() -> None:
    started: list[Any] = []
    call, messages, _ = read_aside(lambda args, done: started.append(args))
    call.cancel()
    messages.run()
    assert (call.state, started) == (DROPPED, [])


def test_client_that_leaves_while_its_message_is_read_cancels_it() -> None:
    ticket = Ticket()
    call, messages, loop = read_aside(lambda args, done: ticket)
    messages.run()
    call.cancel()
    loop.later.pop()()
    assert (call.state, ticket.errors) == (DROPPED, [None])


def test_answer_before_its_ticket_is_known_settles_the_call() -> None:
    ticket = Ticket()
    call, messages, loop = read_aside(lambda args, done: ticket)
    messages.run()
    call.settle()
    loop.later.pop()()
    assert (call.state, call.ticket, ticket.errors) == (ANSWERED, None, [])


def test_message_of_a_client_that_left_is_freed_at_once() -> None:
    class Watched(HttpRequest):
        """A request that weak references may refer to."""

    for end in ("cancel", "abandon"):
        request = Watched()
        kept = weakref.ref(request)
        call, messages, loop = Call(Mock()), SteeredMessages(), Mock()
        call.start_aside(loop, messages, Method(object, lambda args, done: None), request, None, False, Mock())
        del request
        assert kept() is not None
        getattr(call, end)()
        assert kept() is None, end
        messages.run()


def test_deadline_of_a_message_that_waits_is_its_answer() -> None:
    started: list[Any] = []
    call, messages, loop = read_aside(lambda args, done: started.append(args), 60)
    seconds, expire = loop.call_later.call_args[0]
    assert 0 < seconds <= 60
    expire()
    (_, error), _ = call.caller.reply.call_args  # type: ignore[attr-defined]
    assert isinstance(error, DeadlineExceeded)
    messages.run()
    assert (started, call.is_queued) == ([], False)


def test_deadline_of_a_message_that_is_being_read_is_left_to_its_method() -> None:
    expired: list[Any] = []

    def start(args: Any, done: Any) -> None:
        loop.call_later.call_args[0][1]()
        expired.append(call.caller.reply.call_args)  # type: ignore[attr-defined]

    call, messages, loop = read_aside(start, 60)
    messages.run()
    assert expired == [None]


def test_late_message_is_not_read() -> None:
    with pytest.raises(DeadlineExceeded, match="not read by its deadline"):
        read_aside(lambda args, done: None, -1)


def test_method_learns_that_its_client_left_while_it_read() -> None:
    def start(args: Any, done: Any) -> None:
        call.cancel()
        args.check_client()

    call, messages, _ = read_aside(start)
    messages.run()
    (_, error), _ = call.caller.reply.call_args  # type: ignore[attr-defined]
    assert (call.state, type(error)) == (DROPPED, CancelledError)


def test_message_is_queued_until_it_is_read() -> None:
    call, messages, loop = read_aside(lambda args, done: None)
    assert call.is_queued
    messages.run()
    assert call.is_queued
    loop.later.pop()()
    assert not call.is_queued
