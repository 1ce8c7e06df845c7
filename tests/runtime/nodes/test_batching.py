"""When a batch closes, by a clock that only the test moves and inside a pipe; who collects it; the counters."""

from __future__ import annotations

from concurrent.futures import wait as wait_for
from time import perf_counter
from typing import Any

import pytest
import torch
from conftest import Register
from hypothesis import given
from hypothesis import strategies as st
from kit.backends import EchoFour, Gate
from kit.waits import WAIT, all_idle, error_of, eventually, outcome, wait_queued

from torchpipe_py import pipe
from torchpipe_py.backends.current import CURRENT
from torchpipe_py.runtime.nodes.queues import BatchQueue
from torchpipe_py.runtime.request import Request

# -- the queue --------------------------------------------------------------------------------------------------------


def request(arrived: float, key: object = 0, deadline: float | None = None) -> Request:
    made = Request({"data": key}, lambda data, error: None, deadline=deadline)
    made.arrived = arrived
    return made


def batcher(timeout: float = 10.0, *requests: Request) -> BatchQueue:
    made = BatchQueue(timeout, lambda data: data["data"])
    for each in requests:
        made.put(each)
    return made


def test_full_batch_closes_at_once() -> None:
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
def test_batch_closes_at_timeout_or_before_deadline(deadline: float | None, lead_time: float, closes: float) -> None:
    requests = [request(3.0), request(4.0, deadline=deadline)]
    waiting = batcher(10.0, *requests)
    assert waiting.next_close(4, lead_time) == closes
    assert waiting.take(4, closes - 0.1, quiet=False, lead_time=lead_time) is None
    assert waiting.take(4, closes, quiet=False, lead_time=lead_time) == requests


def test_deadline_beyond_the_limit_does_not_close_the_batch() -> None:
    waiting = batcher(10.0, request(0.0), request(0.0, deadline=1.0))
    assert waiting.next_close(limit=1) == 10.0


def test_bucket_with_oldest_request_closes_first() -> None:
    late, early, late_too = request(5.0, "first in"), request(4.0, "second in"), request(6.0, "first in")
    waiting = batcher(10.0, late, early, late_too)
    assert [waiting.take(4, 6.0, quiet=True) for _ in range(2)] == [[early], [late, late_too]]


adds = st.tuples(st.just("add"), st.integers(0, 2), st.none() | st.integers(0, 20))
takes = st.tuples(st.just("take"), st.integers(1, 4), st.booleans())
steps = st.tuples(st.just("step"), st.integers(0, 5), st.none())


@given(st.lists(adds | takes | steps, max_size=40), st.integers(0, 8), st.integers(0, 3))
def test_each_request_is_in_one_batch(actions: list[tuple[str, int, Any]], timeout: int, lead_time: int) -> None:
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
            waiting.put(added[-1])
        elif action == "take":
            take(number, extra)
        else:
            now += number
    while take(3, quiet=True):
        pass
    assert sorted(map(id, taken)) == sorted(map(id, added))
    for key in range(3):
        assert [out for out in taken if out.data["data"] == key] == [put for put in added if put.data["data"] == key]


# -- inside a pipe ----------------------------------------------------------------------------------------------------


Data = dict[str, Any]

HANGS = 60_000
"""A batching_timeout in ms: a request that waits for it, hangs."""


# -- the in-flight rule -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("instance_num", [1, 2])
def test_lone_request_does_not_wait_for_company(register: Register, nodes: int, instance_num: int) -> None:
    name = register(EchoFour)
    config: dict[str, Any] = {"batching_timeout": HANGS, "instance_num": instance_num}
    for index in range(nodes):
        config[str(index)] = {"backend": name, **({"next": str(index + 1)} if index + 1 < nodes else {})}
    with pipe(config) as p:
        for number in range(20):
            assert outcome(p.submit({"data": number}))["result"] == number
        items = [{"data": number} for number in range(10)]
        outcome(p.submit(items))


@pytest.mark.parametrize(
    ("slow", "timeout", "batches"),
    [
        ("slow", HANGS, [["quick", "slow"]]),
        ("none", HANGS, [["quick"]]),
        ("defect", HANGS, [["quick"]]),
        ("cancelled", HANGS, [["quick"]]),
        ("slow", 20, [["quick"], ["slow"]]),
        ("slow", 0, [["quick"], ["slow"]]),
    ],
)
def test_leader_waits_for_request_on_its_way(
    register: Register, slow: str, timeout: int, batches: list[list[Any]]
) -> None:
    """Until that has come, has ended elsewhere, or the time is over."""
    gate, second = Gate(blocks=lambda data: data == slow), Gate(most=4, blocks=lambda data: False)

    class Ends(gate.backend):  # type: ignore[name-defined, misc]
        """Gives ``none`` no result, and raises for ``defect``."""

        def forward(self, items: list[Data]) -> None:
            super().forward(items)
            if items[0]["data"] == "defect":
                raise ValueError("a defect")
            if items[0]["data"] == "none":
                del items[0]["result"]

    nodes = {
        "a": {"backend": register(Ends), "instance_num": 2, "next": "b"},
        "b": {"backend": register(second.backend), "batching_timeout": timeout},
    }
    with pipe(nodes) as p, gate:
        held = gate.hold(p, {"data": slow})
        quick = p.submit({"data": "quick"})
        assert second.arrived.wait(WAIT)
        if timeout < HANGS:
            outcome(quick)
            assert not held.done()
        else:
            assert not wait_for([quick], timeout=0.1).done
        if slow == "cancelled":
            held.cancel()
        gate.open()
        assert outcome(quick)["result"] == "quick"
        wait_for([held], WAIT)
    assert second.batches == batches


def test_nodes_that_reach_each_other_do_not_wait_for_each_other(register: Register) -> None:
    """A request at each could still come to the other one: nobody else is under way."""
    gate = Gate(most=4, blocks=lambda data: data == "first")
    config = {
        "batching_timeout": HANGS,
        "a": {"backend": register(gate.backend), "next": "b"},
        "b": {"backend": register(EchoFour), "next": "a.again"},
        "a.again": {},
    }
    with pipe(config) as p, gate:
        first = gate.hold(p, {"data": "first"})
        second = p.submit({"data": "second"})
        gate.open()
        assert [outcome(each)["data"] for each in (first, second)] == ["first", "second"]


def test_nodes_of_a_graph_run_twice_do_not_wait_for_each_other(register: Register) -> None:
    name = register(EchoFour)
    config = {
        "batching_timeout": HANGS,
        "once": {"backend": "MapReduce", "jump": "a", "next": "again"},
        "again": {"backend": "MapReduce", "jump": "a"},
        "a": {"backend": "Identity", "next": "short,long"},
        "short": {"backend": name, "next": "end"},
        "long": {"backend": "Identity", "next": "longer"},
        "longer": {"backend": name, "next": "longest"},
        "longest": {"backend": name, "next": "end"},
        "end": {"backend": name, "map": "short[result:data],longest[result:other]"},
    }
    with pipe(config) as p:
        for number in range(50):
            assert outcome(p.submit({"data": [number] * 3}))["result"] == [number] * 3


# -- instances ----------------------------------------------------------------------------------------------------


def test_instance_is_busy_again_once_its_jump_is_over(register: Register) -> None:
    gate = Gate()
    nodes = {
        "outer": {"backend": f"S[Jump,{register(gate.backend)}]", "jump": "inner"},
        "inner": {"backend": "Identity"},
    }
    with pipe(nodes) as p, gate:
        held = gate.hold(p, {"data": 1, "node_name": "outer"})
        assert p.stats()["nodes"]["outer"]["busy"] == 1
        eventually(lambda: p.stats()["nodes"]["outer"]["oldest_batch_s"] > 0.0)
        gate.open()
        assert outcome(held)["result"] == 1


@pytest.mark.parametrize(("timeouts", "is_limited"), [([WAIT, None], False), ([WAIT, 2 * WAIT], True)])
def test_batch_may_wait_until_its_last_deadline(
    register: Register, timeouts: list[float | None], is_limited: bool
) -> None:
    gate = Gate(most=2, blocks=lambda data: data == "first")
    deadlines: list[float | None] = []

    class Waits(gate.backend):  # type: ignore[name-defined, misc]
        """Records until when it may wait for memory to decode in."""

        def forward(self, items: list[Data]) -> None:
            super().forward(items)
            deadlines.append(CURRENT.instance.deadline if CURRENT.instance else None)

    with pipe({"backend": register(Waits)}) as p, gate:
        held = gate.hold(p, {"data": "first"})
        since = perf_counter()
        both = [p.submit({"data": 1}, timeout=timeout) for timeout in timeouts]
        wait_queued(p, 2)
        gate.open()
        for future in (held, *both):
            outcome(future)
    assert list(map(len, gate.batches)) == [1, 2]
    assert (deadlines[1] is not None and deadlines[1] >= since + 2 * WAIT) is is_limited
    assert (deadlines[1] is None) is not is_limited


def test_leader_hands_over_before_it_computes(register: Register) -> None:
    gate = Gate(most=4)
    with pipe({"backend": register(gate.backend), "instance_num": 3, "batching_timeout": HANGS}) as p, gate:
        futures = []
        for number in range(3):
            futures.append(p.submit({"data": number}))
            gate.wait_entered()
        futures += [p.submit({"data": number}) for number in range(3, 9)]
        wait_queued(p, 6)
        gate.open()
        assert [outcome(future)["result"] for future in futures] == list(range(9))
    assert gate.batches[:3] == [[0], [1], [2]]
    assert sorted(map(len, gate.batches[3:])) == [2, 4]


@pytest.mark.parametrize("low", [2, 4])
def test_batch_is_padded_to_backend_minimum(register: Register, low: int) -> None:
    sizes: list[int] = []

    class AtLeast(EchoFour):
        """Takes ``low`` to four."""

        def forward(self, items: list[Data]) -> None:
            sizes.append(len(items))
            super().forward(items)

        def min(self) -> int:
            return low

    with pipe({"backend": register(AtLeast)}) as p:
        p({"data": 1})
    assert min(sizes) >= low


# -- buckets ------------------------------------------------------------------------------------------------------


def test_tensors_of_different_shapes_never_share_a_batch(register: Register) -> None:
    gate = Gate(most=4)
    shapes = [(1, 3, 8, 8), (1, 3, 4, 4), (1, 3, 8, 8), (3, 8, 8), (1, 3, 4, 4)]
    values: list[Any] = [torch.zeros(shape) for shape in shapes]
    values += [torch.zeros(1, 3, 4, 4, dtype=torch.uint8), [torch.zeros(1), torch.zeros(2)], [torch.zeros(1)] * 2]
    with pipe({"backend": register(gate.backend)}) as p, gate:
        first = gate.hold(p, {"data": "first"})
        futures = [p.submit({"data": value}) for value in values]
        wait_queued(p, len(values))
        gate.open()
        for future in [first, *futures]:
            outcome(future)
    numbers = [
        [next(i for i, value in enumerate(values) if value is data) for data in batch] for batch in gate.batches[1:]
    ]
    assert numbers == [[0, 2], [1, 4], [3], [5], [6], [7]]


def test_failing_batch_key_fails_one_request(register: Register) -> None:
    class Picky(EchoFour):
        """Has no key for what is no string."""

        def batch_key(self, item: Data) -> str:
            return item["data"].lower()  # type: ignore[no-any-return]

    with pipe({"backend": register(Picky)}) as p:
        futures = [p.submit({"data": data}) for data in ("a", 3, "A")]
        assert "has no attribute 'lower'" in str(error_of(futures[1]))
        assert [outcome(future)["result"] for future in (futures[0], futures[2])] == ["a", "A"]


# -- counters -----------------------------------------------------------------------------------------------------


def test_stats(register: Register) -> None:
    gate = Gate(most=4, blocks=lambda data: data == "first")
    config = {"max_inflight": 7, "a": {"next": "b"}, "b": {"backend": register(gate.backend)}}
    with pipe(config) as p, gate:
        first = gate.hold(p, {"data": "first"})
        stats = p.stats()
        assert (stats["inflight"], stats["nodes"]["b"]["busy"], stats["nodes"]["b"]["queued"]) == (1, 1, 0)
        futures = [p.submit({"data": number}) for number in range(5)]
        futures.append(p.submit({"data": "late"}, timeout=0.0))
        assert error_of(futures[-1]) is not None
        gate.open()
        for future in [first, *futures[:-1]]:
            outcome(future)
        stats = all_idle(p).stats()
    a, b = stats.pop("nodes").values()
    assert stats == {"inflight": 0, "max_inflight": 7, "admitted": 7, "rejected": 0, "metrics": {}}
    counts = {"instances": 1, "alive": 1, "min": 1, "max": 1, "queued": 0, "busy": 0, "requests": 6, "batches": 6}
    assert {**a, **counts, "failed": 0, "expired": 1, "shed": 0, "batch_sizes": {1: 6}, "oldest_batch_s": 0.0} == a
    assert (b["requests"], b["max"], sum(size * count for size, count in b["batch_sizes"].items())) == (6, 4, 6)
    assert b["batches"] == sum(b["batch_sizes"].values()) >= 3
    assert all(node[key] >= 0 for node in (a, b) for key in ("queue_ms", "batch_wait_ms", "compute_ms"))
    assert b["queue_ms"] > 0


def test_batch_waits_for_due_requests_only(register: Register) -> None:
    gate = Gate(most=4)
    asked: list[tuple[float, float]] = []
    due = [True]

    def is_due(since: float, until: float) -> bool:
        asked.append((since, until))
        return due[0]

    with pipe({"backend": register(gate.backend), "batching_timeout": 1000 * WAIT}) as run, gate:
        gate.open()
        with run.expecting(is_due):
            first = run.submit({"data": 1})
            eventually(lambda: bool(asked))
            assert not first.done()
            due[0] = False
            second = run.submit({"data": 2})
            assert [future.result(WAIT)["result"] for future in (first, second)] == [1, 2]
        run({"data": 3})
    assert gate.batches == [[1, 2], [3]]
    assert all(since == -WAIT and 0 < until <= WAIT for since, until in asked)
