"""Deadlines: met, missed in the queue, missed while the backend runs."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.waits import WAIT, error_of, outcome

from torchpipe_py import DeadlineExceeded, ItemBackend, pipe

Data = dict[str, Any]
SOON = 0.02


def test_a_met_deadline_changes_the_dict_as_without(register: Register) -> None:
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


def test_missed_while_running_leaves_the_dict_alone(register: Register) -> None:
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
def test_a_task_waits_no_longer_than_its_timeout(register: Register, several: bool) -> None:
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


def test_no_time_at_all() -> None:
    data = {"data": 1}
    with pipe({"backend": "Identity"}) as p:
        for timeout in (0.0, -1.0):
            with pytest.raises(DeadlineExceeded):
                p(data, timeout=timeout)
    assert data == {"data": 1}


def test_a_deadline_closes_a_batch_in_time_to_meet_it(register: Register) -> None:
    """Not exactly at the deadline, when it is missed; a busy machine may miss one, and another that has more time."""
    slow_node = Gate(blocks=lambda data: data == "slow")
    batches = Gate(most=4, blocks=lambda data: False)
    config = {
        "a": {"backend": register(slow_node.backend), "instance_num": 2, "next": "b"},
        "b": {"backend": register(batches.backend), "batching_timeout": 60_000},
    }
    with pipe(config) as p, slow_node:
        slow = slow_node.hold(p, {"data": "slow"})
        timeouts = (0.1 * 1.5**number for number in range(14))
        assert any(error_of(p.submit({"data": "hurried"}, timeout=timeout)) is None for timeout in timeouts)
        assert not slow.done()
        slow_node.open()
        outcome(slow)
