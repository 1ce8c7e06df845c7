"""Messages that take long to read: turns, refusals, and what is dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from kit.waits import WAIT

from torchpipe_py import Overloaded
from torchpipe_py.methods.reader import SHORT_BYTES, Reader
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
def reader(target: QueueTarget) -> Iterator[Reader]:
    made = Reader(target)
    yield made
    made.close()


def test_short_message_does_not_wait_for_long_ones(reader: Reader) -> None:
    held = Held()
    long = [reader.submit(LONG_BYTES, held) for _ in range(3)]
    assert held.begun.wait(WAIT)
    assert reader.submit(SHORT_BYTES, lambda: "short").result(WAIT) == "short"
    assert not any(reading.done() for reading in long)
    held.end.set()
    assert [reading.result(WAIT) for reading in long] == ["read"] * 3


def test_messages_are_read_in_order_and_errors_are_outcomes(reader: Reader) -> None:
    order: list[int] = []
    readings = [reader.submit(1, order.append, index) for index in range(5)]
    failing = reader.submit(1, lambda: [].pop())
    assert isinstance(failing.exception(WAIT), IndexError)
    assert [reading.result(WAIT) for reading in readings] == [None] * 5
    assert order == list(range(5))


def test_cancelled_message_is_not_read_and_delays_no_other(reader: Reader, target: QueueTarget) -> None:
    target.set(None)
    held, read = Held(), []
    reader.submit(LONG_BYTES, held)
    assert held.begun.wait(WAIT)
    for _ in range(100):
        assert reader.submit(LONG_BYTES, read.append, 1).cancel()
    last = reader.submit(LONG_BYTES, read.append, 2)
    held.end.set()
    last.result(WAIT)
    assert read == [2]
    assert not last.cancel()


def test_refuses_a_message_that_would_wait_beyond_the_target(reader: Reader, target: QueueTarget) -> None:
    target.set(None)
    held, readings = Held(), []
    for _ in range(5):  # the last waits for four others, four times as long as it takes
        reader.check(LONG_BYTES)
        readings.append(reader.submit(LONG_BYTES, held))
    with pytest.raises(Overloaded, match="to be read, and may wait") as raised:
        reader.check(LONG_BYTES)
    assert raised.value.retry_after_ms is not None
    reader.check(SHORT_BYTES)
    assert readings[-1].cancel()
    reader.check(LONG_BYTES)
    held.end.set()
    for reading in readings[:-1]:
        reading.result(WAIT)


def test_refuses_nothing_without_a_target(reader: Reader, target: QueueTarget) -> None:
    target.set(0.0)
    held = Held()
    readings = [reader.submit(LONG_BYTES, held) for _ in range(300)]
    reader.check(LONG_BYTES)
    held.end.set()
    assert readings[-1].result(WAIT) == "read"


def test_messages_that_end_early_leave_an_estimate(reader: Reader, target: QueueTarget) -> None:
    """Refused and malformed ones are read in no time, whatever their size."""
    target.set(None)
    huge = 2**40
    for _ in range(50):
        reader.submit(huge, lambda: None).result(WAIT)
    held = Held()
    readings = [reader.submit(huge, held) for _ in range(5)]
    with pytest.raises(Overloaded, match="to be read, and may wait"):
        reader.check(huge)
    for reading in readings[1:]:
        reading.cancel()
    held.end.set()
