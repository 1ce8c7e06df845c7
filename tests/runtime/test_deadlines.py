"""Deadlines: met, missed in the queue, missed while it runs. Priorities: 0 is taken first, 1 fills up and ages."""

from __future__ import annotations

import asyncio
from math import inf
from queue import SimpleQueue
from typing import Any

import pytest
from conftest import Register
from kit.backends import Company, Gate
from kit.waits import WAIT, error_of, in_threads, outcome

from torchpipe_py import DeadlineExceeded, InvalidRequest, ItemBackend, Overloaded, pipe
from torchpipe_py.aging import Aging
from torchpipe_py.runtime.admission import ComputeTimes
from torchpipe_py.runtime.nodes.queues import BatchQueue, RequestQueue
from torchpipe_py.runtime.request import Request, ignore_outcome

# -- deadlines --------------------------------------------------------------------------------------------------------


Data = dict[str, Any]
SOON = 0.02


def test_call_with_met_deadline_changes_dict_as_without_deadline(register: Register) -> None:
    class Rename(ItemBackend):
        """Drops one key, changes one, adds one."""

        def forward_item(self, item: Data) -> None:
            del item["dropped"]
            item["changed"] = "new"
            item["result"] = item["data"]

    outcomes = []
    with pipe({"a": {"next": "b"}, "b": {"backend": register(Rename)}}) as p:
        for timeout in (None, WAIT, inf):
            data = {"data": 1, "dropped": 1, "changed": "old", "mine": 1, "error": "stale"}
            p(data, timeout=timeout)
            outcomes.append(data)
    assert outcomes == [{"data": 1, "changed": "new", "mine": 1, "result": 1}] * 3


def test_deadline_missed_while_running_leaves_dict_unchanged(register: Register) -> None:
    gate = Gate()
    data: Data = {"data": "slow", "mine": 1}
    timeout = 0.1
    with pipe({"a": {"backend": register(gate.backend), "next": "b"}, "b": {}}) as p, gate:
        while not gate.batches:  # on a busy machine the time may be over before it is run
            with pytest.raises(TimeoutError, match=f"not finished within {timeout} s|passed while queued") as caught:
                p(data, timeout=timeout)
            assert type(caught.value) is DeadlineExceeded
            timeout *= 2
        gate.wait_entered()
        gate.open()
        p({"data": "last"})
        assert p.stats()["inflight"] == 0
    assert gate.batches == [["slow"], ["last"]]
    assert data == {"data": "slow", "mine": 1}


@pytest.mark.parametrize("several", [False, True])
def test_task_waits_no_longer_than_its_timeout(register: Register, several: bool) -> None:
    gate = Gate()
    items: list[Data] = [{"data": "slow"}, {"data": "queued"}] if several else [{"data": "slow"}]

    async def work() -> None:
        # Where the machine is busy, the instance may see it first that the time is over.
        with pytest.raises(DeadlineExceeded, match=f"not finished within {SOON} s|deadline passed while queued"):
            await p.acall(items if several else items[0], timeout=SOON)

    with pipe({"backend": register(gate.backend)}) as p, gate:
        asyncio.run(work())
        assert not gate.opened.is_set()
        assert p.stats()["inflight"] == 0
        errors = [item.pop("error", None) for item in items]
        gate.open()
    assert [type(error) for error in errors] == [DeadlineExceeded if several else type(None)] * len(items)
    assert [item.keys() for item in items] == [{"data"}] * len(items)  # nobody touches them any more


def test_timeout_of_zero_or_less_is_exceeded_at_once() -> None:
    data = {"data": 1}
    with pipe({"backend": "Identity"}) as p:
        for timeout in (0.0, -1.0):
            with pytest.raises(DeadlineExceeded):
                p(data, timeout=timeout)
    assert data == {"data": 1}


def test_batch_closes_in_time_to_meet_a_deadline(register: Register) -> None:
    """Not exactly at the deadline, when it is missed; a busy machine may miss one, and another that has more time."""
    company = Company(register)
    with pipe(company.nodes) as p, company.gate:
        slow = company.gate.hold(p, {"data": "slow"})
        timeouts = (0.1 * 1.5**number for number in range(14))
        assert any(error_of(p.submit({"data": "hurried"}, timeout=timeout)) is None for timeout in timeouts)
        assert not slow.done()
        company.gate.open()
        outcome(slow)


# -- priorities -------------------------------------------------------------------------------------------------------


def test_low_priority_is_admitted_up_to_half_of_max_inflight(register: Register) -> None:
    """Of what may be in flight; ``test_contract`` shows that normal requests are taken first."""
    gate = Gate()
    with pipe({"backend": register(gate.backend), "max_inflight": 8}) as run, gate:
        futures = [run.submit({"data": index, "priority": priority}) for index, priority in enumerate([0, 1, 1, 1])]
        with pytest.raises(Overloaded, match="1 more with priority 1 would pass half of max_inflight = 8"):
            run.submit({"data": 1, "priority": 1}).result()
        futures += [run.submit({"data": index, "priority": 0}) for index in range(4)]
        with pytest.raises(Overloaded, match="max_inflight = 8"):
            run.submit({"data": 1, "priority": 0}).result()
        gate.open()
        for future in futures:
            outcome(future)


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_refusal_is_the_outcome_of_a_started_request(register: Register, on_main_thread: bool) -> None:
    gate = Gate()
    outcomes: SimpleQueue[tuple[Any, Any]] = SimpleQueue()

    def start_two() -> None:
        outcomes.put(("submit", type(run.submit({"data": 1}, timeout=WAIT).exception())))
        run.dispatch({"data": 2}, lambda data, error: outcomes.put((data["data"], type(error))), WAIT)

    with pipe({"backend": register(gate.backend), "max_inflight": 1}) as run, gate:
        held = run.submit({"data": 0})
        gate.wait_entered()
        if on_main_thread:
            start_two()
        else:
            in_threads(1, lambda number: start_two())
        assert [outcomes.get(timeout=WAIT) for _ in range(2)] == [("submit", Overloaded), (2, Overloaded)]
        gate.open()
        outcome(held)


def test_low_priority_is_admitted_where_one_request_is_allowed() -> None:
    with pipe({"backend": "Identity", "max_inflight": 1}) as run:
        assert outcome(run.submit({"data": 1, "priority": 1}))["result"] == 1


@pytest.mark.parametrize("priority", [2, -1, True, "low", None, 0.5])
def test_refuses_other_priorities(priority: Any) -> None:
    with pipe({"backend": "Identity"}) as run, pytest.raises(InvalidRequest, match="'priority': expected 0"):
        run.submit({"data": 1, "priority": priority})


def waiting(data: str, priority: int, arrived: float) -> Request:
    request = Request({"data": data}, ignore_outcome)
    request.priority, request.arrived = priority, arrived
    return request


def test_low_priority_fills_up_batches() -> None:
    queue = BatchQueue(0.0, lambda data: None)
    for request in (waiting("old", 1, 0.0), waiting("young", 1, 1.5), waiting("new", 0, 2.0), waiting("newer", 0, 2.1)):
        queue.put(request)
    batch = queue.take(3, 2.1, True)
    assert batch is not None
    assert [request.data["data"] for request in batch] == ["new", "newer", "old"]
    assert (len(queue), queue.low) == (1, 1)
    assert [request.data["data"] for request in queue.clear()] == ["young"]
    assert queue.low == 0


def test_aged_low_priority_request_joins_each_fourth_full_batch() -> None:
    queue = BatchQueue(0.0, lambda data: None)
    queue.put(waiting("low", 1, 0.0))
    taken = []
    for turn in range(8):
        for _ in range(2):
            queue.put(waiting("normal", 0, 2.0 + turn))
        batch = queue.take(2, 2.0 + turn, True)
        assert batch is not None
        taken.append([request.data["data"] for request in batch].count("low"))
    assert taken == [0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(("more", "waited", "filled"), [(1.0, 0.0, 1), (1.0, 1.5, 2), (0.01, 0.0, 8)])
def test_low_priority_lengthens_batches_little(more: float, waited: float, filled: int) -> None:
    """Each further request takes ``more`` times as long as the first one, 2 ms."""
    times = ComputeTimes()
    for size in (1, 2, 4, 8):
        times.add(size, 0.002 * (1 + more * (size - 1)), 2.0)
    queue = BatchQueue(0.0, lambda data: None)
    for _ in range(32):
        queue.put(waiting("low", 1, 2.0 - waited))
    assert len(queue.take(8, 2.0, True, times=times) or ()) == 8, "no normal request came lately"
    queue.put(waiting("normal", 0, 2.0))
    assert len(queue.take(8, 2.0, True, times=times) or ()) == filled, "little longer than alone, until they age"
    assert len(queue.take(8, 2.0, True, times=times) or ()) == (4 if more == 1 else 8), "10 ms, for the next one"


def test_batches_shrink_although_only_long_ones_ran() -> None:
    times, queue, now = ComputeTimes(), BatchQueue(0.0, lambda data: None), 2.0
    sizes = []
    times.add(64, 0.640, now)
    for _ in range(500):
        queue.put(waiting("low", 1, now))
    for _ in range(5):
        queue.put(waiting("normal", 0, now))
        sizes.append(len(queue.take(64, now, True, times=times) or ()))
        times.add(sizes[-1], 0.010 * sizes[-1], now)
    assert (sizes[0], max(sizes) <= 4) == (1, True)


def test_aged_low_priority_request_gets_each_fourth_turn() -> None:
    queue, now = RequestQueue(), 100.0
    old, young = waiting("old", 1, now - 2 * Aging.SECONDS), waiting("young", 1, now)
    normal = [waiting("normal", 0, now) for _ in range(6)]
    for request in (old, young, *normal):
        queue.put(request)
    assert [queue.take(now) for _ in range(9)] == [*normal[:3], old, *normal[3:], young, None]


def test_request_that_is_put_back_is_next() -> None:
    queue = RequestQueue()
    first, second, low = waiting("first", 0, 0.0), waiting("second", 0, 0.0), waiting("low", 1, 0.0)
    for request in (low, second):
        queue.put(request)
    queue.put_back(first)
    assert (len(queue), queue.clear(), len(queue)) == (3, [first, second, low], 0)
