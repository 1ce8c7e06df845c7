"""When a batch closes, by a clock that only the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchpipe_py.runtime.batching import BatchQueue
from torchpipe_py.runtime.request import Request


def request(arrived: float, key: object = 0, deadline: float | None = None) -> Request:
    made = Request({"data": key}, lambda data, error: None, deadline=deadline)
    made.arrived = arrived
    return made


def batcher(timeout: float = 10.0, *requests: Request) -> BatchQueue:
    made = BatchQueue(timeout, lambda data: data["data"])
    for each in requests:
        made.add(each)
    return made


def test_a_full_batch_closes_at_once_and_leaves_the_rest() -> None:
    requests = [request(0.0) for _ in range(5)]
    waiting = batcher(10.0, *requests)
    assert waiting.take(4, 0.0, quiet=False) == requests[:4]
    assert len(waiting) == 1
    assert waiting.take(4, 0.0, quiet=False) is None


@pytest.mark.parametrize(
    ("deadline", "lead_time", "closes"),
    [(None, 0.0, 13.0), (5.0, 0.0, 5.0), (5.0, 2.0, 3.0)],
    ids=["the timeout counts from the oldest arrival", "a deadline hurries", "early enough to compute"],
)
def test_a_batch_closes_at_its_time(deadline: float | None, lead_time: float, closes: float) -> None:
    requests = [request(3.0), request(4.0, deadline=deadline)]
    waiting = batcher(10.0, *requests)
    assert waiting.next_close(4, lead_time) == closes
    assert waiting.take(4, closes - 0.1, quiet=False, lead_time=lead_time) is None
    assert waiting.take(4, closes, quiet=False, lead_time=lead_time) == requests


def test_a_deadline_beyond_the_limit_does_not_hurry_the_batch_before_it() -> None:
    waiting = batcher(10.0, request(0.0), request(0.0, deadline=1.0))
    assert waiting.next_close(limit=1) == 10.0


def test_a_bucket_for_each_key_of_which_the_oldest_goes_first() -> None:
    late, early, late_too = request(5.0, "first in"), request(4.0, "second in"), request(6.0, "first in")
    waiting = batcher(10.0, late, early, late_too)
    assert [waiting.take(4, 6.0, quiet=True) for _ in range(2)] == [[early], [late, late_too]]


adds = st.tuples(st.just("add"), st.integers(0, 2), st.none() | st.integers(0, 20))
takes = st.tuples(st.just("take"), st.integers(1, 4), st.booleans())
steps = st.tuples(st.just("step"), st.integers(0, 5), st.none())


@given(st.lists(adds | takes | steps, max_size=40), st.integers(0, 8), st.integers(0, 3))
def test_every_request_comes_out_once(actions: list[tuple[str, int, Any]], timeout: int, lead_time: int) -> None:
    waiting, now, added, taken = batcher(float(timeout)), 0.0, [], []

    def take(limit: int, quiet: bool) -> bool:
        held, close = len(waiting), waiting.next_close(limit, lead_time)
        batch = waiting.take(limit, now, quiet, lead_time)
        if batch is None:
            assert held == 0 or (not quiet and close is not None and close > now)
            return False
        assert 1 <= len(batch) <= limit
        assert len({each.data["data"] for each in batch}) == 1
        assert len(waiting) == held - len(batch)
        taken.extend(batch)
        return True

    for action, number, extra in actions:
        if action == "add":
            added.append(request(now, number, None if extra is None else now + extra))
            waiting.add(added[-1])
        elif action == "take":
            take(number, extra)
        else:
            now += number
    while take(3, quiet=True):
        pass
    assert sorted(map(id, taken)) == sorted(map(id, added))
    for key in range(3):
        assert [out for out in taken if out.data["data"] == key] == [put for put in added if put.data["data"] == key]
