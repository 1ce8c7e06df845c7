"""Messages that take long to read: turns, refusals, and what is dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from kit.waits import WAIT

from torchpipe_py import Overloaded
from torchpipe_py.methods.long_messages import SHORT_BYTES, LongMessages
from torchpipe_py.serving import QueueTarget

LONG_BYTES = 2 * SHORT_BYTES


class Held:
    """A read that lasts until a test ends it."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.end.wait(WAIT)
        return "read"


@pytest.fixture
def target() -> QueueTarget:
    return QueueTarget()


@pytest.fixture
def messages(target: QueueTarget) -> Iterator[LongMessages]:
    made = LongMessages(target)
    yield made
    made.close()


def test_short_message_does_not_wait_for_long_ones(messages: LongMessages) -> None:
    held = Held()
    long = [messages.submit(LONG_BYTES, held) for _ in range(3)]
    assert held.begun.wait(WAIT)
    assert messages.submit(SHORT_BYTES, lambda: "short").result(WAIT) == "short"
    assert not any(reading.done() for reading in long)
    held.end.set()
    assert [reading.result(WAIT) for reading in long] == ["read"] * 3


def test_messages_are_read_in_order_and_errors_are_outcomes(messages: LongMessages) -> None:
    order: list[int] = []
    readings = [messages.submit(1, order.append, index) for index in range(5)]
    failing = messages.submit(1, lambda: [].pop())
    assert isinstance(failing.exception(WAIT), IndexError)
    assert [reading.result(WAIT) for reading in readings] == [None] * 5
    assert order == list(range(5))


def test_cancelled_message_is_not_read_and_delays_no_other(messages: LongMessages, target: QueueTarget) -> None:
    target.set(None)
    held, read = Held(), []
    messages.submit(LONG_BYTES, held)
    assert held.begun.wait(WAIT)
    for _ in range(100):
        assert messages.submit(LONG_BYTES, read.append, 1).cancel()
    last = messages.submit(LONG_BYTES, read.append, 2)
    held.end.set()
    last.result(WAIT)
    assert read == [2]
    assert not last.cancel()


def test_refuses_a_message_that_would_wait_beyond_the_target(messages: LongMessages, target: QueueTarget) -> None:
    target.set(None)
    held, readings = Held(), []
    for _ in range(5):  # the last waits for four others, four times as long as it takes
        messages.check(LONG_BYTES)
        readings.append(messages.submit(LONG_BYTES, held))
    with pytest.raises(Overloaded, match="to be read, and may wait") as raised:
        messages.check(LONG_BYTES)
    assert raised.value.retry_after_ms is not None
    messages.check(SHORT_BYTES)
    assert readings[-1].cancel()
    messages.check(LONG_BYTES)
    held.end.set()
    for reading in readings[:-1]:
        reading.result(WAIT)


def test_refuses_nothing_without_a_target(messages: LongMessages, target: QueueTarget) -> None:
    target.set(0.0)
    held = Held()
    readings = [messages.submit(LONG_BYTES, held) for _ in range(300)]
    messages.check(LONG_BYTES)
    held.end.set()
    assert readings[-1].result(WAIT) == "read"


def test_messages_that_end_early_leave_an_estimate(messages: LongMessages, target: QueueTarget) -> None:
    """Refused and malformed ones are read in no time, whatever their size."""
    target.set(None)
    huge = 2**40
    for _ in range(50):
        messages.submit(huge, lambda: None).result(WAIT)
    held = Held()
    readings = [messages.submit(huge, held) for _ in range(5)]
    with pytest.raises(Overloaded, match="to be read, and may wait"):
        messages.check(huge)
    for reading in readings[1:]:
        reading.cancel()
    held.end.set()
