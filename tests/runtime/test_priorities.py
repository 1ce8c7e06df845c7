"""Priorities: 0 is taken first, 1 fills up and ages."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.waits import outcome

from torchpipe_py import InvalidRequest, Overloaded, pipe
from torchpipe_py.runtime.admission import ComputeTimes
from torchpipe_py.runtime.batching import BatchQueue
from torchpipe_py.runtime.node import RequestQueue
from torchpipe_py.runtime.request import Request, nobody_waits


def test_low_priority_gets_half_of_the_bound(register: Register) -> None:
    """Of what may be in flight; ``test_contract`` shows that normal requests are taken first."""
    gate = Gate()
    with pipe({"backend": register(gate.backend), "max_inflight": 8}) as run, gate:
        futures = [run.submit({"data": index, "priority": priority}) for index, priority in enumerate([0, 1, 1, 1])]
        with pytest.raises(Overloaded, match="half of max_inflight = 8"):
            run.submit({"data": 1, "priority": 1})
        futures += [run.submit({"data": index, "priority": 0}) for index in range(4)]
        with pytest.raises(Overloaded, match="max_inflight = 8"):
            run.submit({"data": 1, "priority": 0})
        gate.open()
        for future in futures:
            outcome(future)


@pytest.mark.parametrize("priority", [2, -1, True, "low", None, 0.5])
def test_refuses_other_priorities(priority: Any) -> None:
    with pipe({"backend": "Identity"}) as run, pytest.raises(InvalidRequest, match="'priority': expected 0"):
        run.submit({"data": 1, "priority": priority})


def waiting(data: str, priority: int, arrived: float) -> Request:
    request = Request({"data": data}, nobody_waits)
    request.priority, request.arrived = priority, arrived
    return request


def test_fills_batches_up_with_low_priority() -> None:
    queue = BatchQueue(0.0, lambda data: None)
    for request in (waiting("old", 1, 0.0), waiting("young", 1, 1.5), waiting("new", 0, 2.0), waiting("newer", 0, 2.1)):
        queue.add(request)
    batch = queue.take(3, 2.1, True)
    assert batch is not None
    assert [request.data["data"] for request in batch] == ["new", "newer", "old"]
    assert (len(queue), queue.low) == (1, 1)
    assert [request.data["data"] for request in queue.clear()] == ["young"]
    assert queue.low == 0


def test_a_flood_of_normal_requests_lets_one_in_that_has_waited_long() -> None:
    queue = BatchQueue(0.0, lambda data: None)
    queue.add(waiting("low", 1, 0.0))
    taken = []
    for turn in range(8):
        for _ in range(2):
            queue.add(waiting("normal", 0, 2.0 + turn))
        batch = queue.take(2, 2.0 + turn, True)
        assert batch is not None
        taken.append([request.data["data"] for request in batch].count("low"))
    assert taken == [0, 0, 0, 1, 0, 0, 0, 0]


def test_batches_stay_short_for_the_next_normal_request() -> None:
    times = ComputeTimes()
    for size in (1, 2, 4, 8):
        times.add(size, 0.002 * size, 2.0)
    queue = BatchQueue(0.0, lambda data: None)
    for _ in range(24):
        queue.add(waiting("low", 1, 2.0))
    assert len(queue.take(8, 2.0, True, times=times) or ()) == 8, "no normal request came lately"
    queue.add(waiting("normal", 0, 2.0))
    assert len(queue.take(8, 2.0, True, times=times) or ()) == 2, "twice as long as it takes alone"
    assert len(queue.take(8, 2.0, True, times=times) or ()) == 4, "10 ms, which the next one may have to wait"


def test_batches_do_not_stay_long_as_only_long_ones_ran() -> None:
    times, queue, now = ComputeTimes(), BatchQueue(0.0, lambda data: None), 2.0
    sizes = []
    times.add(64, 0.640, now)
    for _ in range(500):
        queue.add(waiting("low", 1, now))
    for _ in range(5):
        queue.add(waiting("normal", 0, now))
        sizes.append(len(queue.take(64, now, True, times=times) or ()))
        times.add(sizes[-1], 0.010 * sizes[-1], now)
    assert (sizes[0], max(sizes) <= 4) == (1, True)


def test_a_queue_lets_one_in_that_has_waited_long() -> None:
    queue = RequestQueue()
    now = perf_counter()
    old, young = waiting("old", 1, now - 2 * RequestQueue.AGING), waiting("young", 1, now + 60)
    normal = [waiting("normal", 0, now) for _ in range(6)]
    queue.low.extend([old, young])
    queue.normal.extend(normal)
    assert [queue.take() for _ in range(8)] == [*normal[:3], old, *normal[3:], young]
    with pytest.raises(IndexError):
        queue.take()
