"""Which instances sleep and which is woken: with threads, and the two gaps in which a wake-up could be lost."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
from conftest import Register

import torchpipe_py.runtime.lanes.lane
from torchpipe_py import ItemBackend, PipeClosed, pipe
from torchpipe_py.runtime.idle import IdleStack, Leadership, Sleeper

WAIT = 60.0


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Threads are switched some hundred times as often, so that gaps are hit."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def start(target: Any) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(WAIT)
    return not thread.is_alive()


def wait_until(idle: IdleStack, count: int) -> None:
    limit = perf_counter() + WAIT
    while idle.count() != count:
        assert perf_counter() < limit


def test_the_one_that_rested_last_is_woken_first() -> None:
    idle, woken = IdleStack(deque()), deque[int]()

    def rest(number: int) -> None:
        idle.sleep(Sleeper())
        woken.append(number)

    threads = []
    for number in range(3):
        threads.append(start(lambda number=number: rest(number)))
        wait_until(idle, number + 1)
    for number in range(3):
        idle.wake_one()
        assert ended(threads[2 - number])
    assert list(woken) == [2, 1, 0]
    idle.wake_one()  # nobody is left: nothing happens


def test_nobody_rests_while_there_is_work_or_after_closing() -> None:
    queue = deque([1])
    idle = IdleStack(queue)
    assert idle.sleep(Sleeper())
    queue.clear()
    thread = start(lambda: idle.sleep(Sleeper()))
    wait_until(idle, 1)
    idle.close()
    assert ended(thread)
    assert not idle.sleep(Sleeper())
    assert idle.count() == 0


def test_one_leads_and_hands_on_only_what_is_left() -> None:
    queue: deque[int] = deque([1, 2])
    idle, first, second = Leadership(queue, ()), Sleeper(), Sleeper()
    assert idle.lead(first)
    leading = threading.Event()
    thread = start(lambda: idle.lead(second) and leading.set())
    wait_until(idle, 1)
    idle.wake_one()  # there is a leader, who is awake
    assert not leading.wait(0.05)
    queue.popleft()
    idle.hand_over()
    assert leading.wait(WAIT)
    assert ended(thread)


def test_a_leader_woken_before_it_waits_does_not_wait() -> None:
    idle, leader = Leadership(deque([1]), ()), Sleeper()
    queue = idle._queue
    assert idle.lead(leader)
    queue.clear()  # type: ignore[attr-defined]
    idle.wake_leader()  # between the last look and the wait
    thread = start(lambda: idle.wait(leader, 1000.0))
    assert ended(thread)
    waiting = start(lambda: idle.wait(leader, 1000.0))  # once only
    wait_until(idle, 1)
    idle.wake_leader()
    assert ended(waiting)


def test_a_wait_ends_by_the_clock_by_work_and_by_closing() -> None:
    queue: deque[int] = deque([1])
    idle, leader = Leadership(queue, (1,)), Sleeper()
    assert idle.lead(leader)
    idle.wait(leader, 1000.0)  # there is something in the queue
    queue.clear()
    idle.wait(leader, 0.01)
    assert idle.count() == 0
    thread = start(lambda: idle.wait(leader, 1000.0))
    wait_until(idle, 1)
    idle.close()
    assert ended(thread)
    idle.wait(leader, 1000.0)
    assert not idle.lead(leader)


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("leaders", [False, True])
def test_no_piece_of_work_is_left_or_taken_twice(leaders: bool) -> None:
    queue: deque[int] = deque()
    idle = Leadership(queue, ()) if leaders else IdleStack(queue)
    total, taken = 20_000, deque[int]()
    done = threading.Event()

    def take() -> None:
        try:
            taken.append(queue.popleft())
        except IndexError:
            return
        if len(taken) >= total:
            done.set()

    def work() -> None:
        sleeper = Sleeper()
        if isinstance(idle, Leadership):
            while idle.lead(sleeper):
                idle.wait(sleeper, 1e-4)
                take()
                idle.hand_over()
        else:
            while idle.sleep(sleeper):
                take()

    def add(numbers: range) -> None:
        for number in numbers:
            queue.append(number)
            if idle.to_wake:
                idle.wake_one()

    workers = [start(work) for _ in range(4)]
    adders = [start(lambda index=index: add(range(index, total, 3))) for index in range(3)]
    assert all(ended(thread) for thread in adders)
    assert done.wait(WAIT)
    idle.close()
    assert all(ended(thread) for thread in workers)
    assert sorted(taken) == list(range(total))


class Slow(ItemBackend):
    """Result is data; takes batches."""

    def max(self) -> int:
        return 4

    def forward_item(self, item: dict[str, Any]) -> None:
        item["result"] = item["data"]


class Emptied(deque):
    """Says a few times that it holds something although another thread, which closes the node, has just taken it."""

    lies = 20

    def __len__(self) -> int:
        count = super().__len__()
        if count or not Emptied.lies:
            return count
        Emptied.lies -= 1
        return 1

    def __bool__(self) -> bool:  # Python 3.10's deque has one of its own, which asks no __len__
        return len(self) > 0


def test_a_leader_finds_the_queue_emptied(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may not end with an exception, which pytest would report."""
    monkeypatch.setattr(Emptied, "lies", 20)
    monkeypatch.setattr(torchpipe_py.runtime.lanes.lane, "deque", Emptied)
    with pipe({"backend": register(Slow), "instance_num": 2}) as run:
        for number in range(5):
            item = {"data": number}
            run(item, timeout=WAIT)
            assert item["result"] == number
    assert Emptied.lies == 0


@pytest.mark.usefixtures("busy_switching")
def test_closing_beside_a_leader_who_collects(register: Register) -> None:
    """No thread may end with an exception (pytest would report it), and every call gets its answer."""
    name = register(Slow)
    for _ in range(60):
        run = pipe({"backend": name, "instance_num": 3, "batching_timeout": 1})
        answers: deque[str] = deque()

        def call(run: Any = run, answers: deque[str] = answers) -> None:
            try:
                while True:
                    run({"data": 1})
            except PipeClosed:
                answers.append("closed")

        callers = [start(call) for _ in range(6)]
        run({"data": 1})
        run.close()
        assert all(ended(thread) for thread in callers)
        assert len(answers) == 6
