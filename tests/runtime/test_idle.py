"""Which instances sleep and which is woken, and that no wake-up is lost."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Register
from kit.backends import EchoFour
from kit.waits import WAIT, eventually

from torchpipe_py import PipeClosed, pipe
from torchpipe_py.runtime.idle import IdleStack, Leadership, Sleeper


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


def test_the_one_that_rested_last_is_woken_first_and_a_borrowed_one_is_not_woken() -> None:
    queue: deque[int] = deque()
    idle, sleepers, woken = IdleStack(queue), [Sleeper() for _ in range(3)], deque[int]()

    def rest(number: int) -> None:
        idle.sleep(sleepers[number])
        woken.append(number)

    threads = []
    for number in range(3):
        threads.append(start(lambda number=number: rest(number)))
        eventually(lambda number=number: len(idle.to_wake) == number + 1)
    assert idle.borrow() is sleepers[2]
    for number in (1, 0):
        idle.wake_one()
        assert ended(threads[number])
    queue.append(1)
    idle.wake_one()  # nobody is left: nothing happens
    idle.give_back(sleepers[2])  # there is work
    assert ended(threads[2])
    assert list(woken) == [1, 0, 2]
    assert idle.borrow() is None, "what is queued comes first"


def test_a_leader_that_is_woken_before_it_waits_does_not_wait() -> None:
    queue: deque[int] = deque([1])
    idle, leader = Leadership(queue, (), ()), Sleeper()
    assert idle.lead(leader)
    idle.wait(leader, 1000.0)  # there is something in the queue
    queue.clear()
    idle.wait(leader, 0.01)
    idle.wake_leader()  # between the last look and the wait
    idle.wait(leader, 1000.0)
    waiting = start(lambda: idle.wait(leader, 1000.0))  # once only
    eventually(lambda: idle.to_wake)
    idle.close()
    assert ended(waiting)
    assert not idle.lead(leader)


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("leaders", [False, True])
def test_no_piece_of_work_is_left_or_taken_twice(leaders: bool) -> None:
    queue: deque[int] = deque()
    idle = Leadership(queue, (), ()) if leaders else IdleStack(queue)
    total, taken = 5_000, deque[int]()
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


@pytest.mark.usefixtures("busy_switching")
def test_closing_beside_a_leader_that_collects(register: Register) -> None:
    """No thread may end with an exception (pytest would report it), and every call gets its answer."""

    name = register(EchoFour)
    for _ in range(15):
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
