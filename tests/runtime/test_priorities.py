"""Priorities: 0 is taken first, 1 fills up and ages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import chain
from time import perf_counter
from typing import Any, ClassVar

import pytest
from conftest import Register
from kit.waits import WAIT

from torchpipe_py import Backend, InvalidRequest, Overloaded, pipe
from torchpipe_py.runtime.admission import ComputeTimes
from torchpipe_py.runtime.batching import BatchQueue
from torchpipe_py.runtime.node import RequestQueue
from torchpipe_py.runtime.request import Request, nobody_waits


class Gated(Backend):
    """Notes what it runs, once the gate is open."""

    gate, started = threading.Event(), threading.Event()
    ran: ClassVar[list[list[Any]]] = []

    def forward(self, items: list[dict[str, Any]]) -> None:
        self.started.set()
        assert self.gate.wait(WAIT)
        self.ran.append([item["data"] for item in items])
        for item in items:
            item["result"] = item["data"]


class GatedOne(Gated):
    def max(self) -> int:
        return 1


class GatedThree(Gated):
    def max(self) -> int:
        return 3


@pytest.fixture(params=[GatedOne, GatedThree])
def run(request: pytest.FixtureRequest, register: Register) -> Iterator[pipe]:
    """A pipe whose only instance is kept busy until the gate is open."""
    Gated.gate.clear()
    Gated.started.clear()
    Gated.ran.clear()
    with pipe({"backend": register(request.param), "max_inflight": 8}) as built:
        busy = built.submit({"data": "busy"})
        assert Gated.started.wait(WAIT)
        yield built
        Gated.gate.set()
        busy.result(WAIT)


def submit(run: pipe, data: str, priority: int) -> Future[Any]:
    return run.submit({"data": data, "priority": priority})


def test_takes_normal_requests_first(run: pipe) -> None:
    futures = [submit(run, *each) for each in (("l1", 1), ("l2", 1), ("n1", 0), ("n2", 0))]
    Gated.gate.set()
    assert [future.result(WAIT)["result"] for future in futures] == ["l1", "l2", "n1", "n2"]
    assert list(chain(*Gated.ran[1:])) == ["n1", "n2", "l1", "l2"]
    if run.max() == 3:
        assert Gated.ran[1:] == [["n1", "n2", "l1"], ["l2"]]


def test_low_priority_gets_half_of_the_bound(run: pipe) -> None:
    futures = [submit(run, f"l{index}", 1) for index in range(3)]
    with pytest.raises(Overloaded, match="half of max_inflight = 8"):
        submit(run, "l4", 1)
    futures += [submit(run, f"n{index}", 0) for index in range(4)]
    with pytest.raises(Overloaded, match="max_inflight = 8"):
        submit(run, "n5", 0)
    Gated.gate.set()
    for future in futures:
        future.result(WAIT)


@pytest.mark.parametrize("priority", [2, -1, True, "low", None, 0.5])
def test_refuses_other_priorities(run: pipe, priority: Any) -> None:
    with pytest.raises(InvalidRequest, match="'priority': expected 0"):
        run.submit({"data": 1, "priority": priority})


def test_closing_fails_what_waits_with_low_priority(register: Register) -> None:
    Gated.gate.clear()
    Gated.started.clear()
    with pipe({"backend": register(GatedOne)}) as built:
        busy = built.submit({"data": "busy"})
        assert Gated.started.wait(WAIT)
        low = submit(built, "low", 1)
        assert built.stats()["nodes"]["node"]["queued"] == 1
        closer = threading.Thread(target=built.close)
        closer.start()
        assert "closed" in str(low.exception(WAIT))
        Gated.gate.set()
        closer.join(WAIT)
        busy.exception(WAIT)


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
        times.add(size, 0.006 * size, 2.0)
    queue = BatchQueue(0.0, lambda data: None)
    for _ in range(16):
        queue.add(waiting("low", 1, 2.0))
    assert len(queue.take(8, 2.0, True, times=times) or ()) == 8, "no normal request came lately"
    queue.add(waiting("normal", 0, 2.0))
    assert len(queue.take(8, 2.0, True, times=times) or ()) == 2


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
