"""Which instances sleep and which is woken; items that take seconds beside items that take milliseconds."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Register
from kit.backends import EchoFour, Gate
from kit.waits import WAIT, error_of, eventually, outcome

from torchpipe_py import DeadlineExceeded, PipeClosed, pipe
from torchpipe_py.backends.image.memory import DECODING
from torchpipe_py.runtime.nodes.idle import IdleStack, Sleeper
from torchpipe_py.runtime.nodes.leadership import Leadership, LeaderState
from torchpipe_py.runtime.nodes.queues import RequestQueue
from torchpipe_py.runtime.request import Request, ignore_outcome

# -- sleep and wake-ups -----------------------------------------------------------------------------------------------


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


def request(priority: int = 0) -> Request:
    made = Request({"data": 1}, ignore_outcome)
    made.priority = priority
    return made


def test_wakes_most_recently_idle_instance() -> None:
    queue = RequestQueue()
    idle: IdleStack[Sleeper] = IdleStack(queue)
    sleepers, woken = [Sleeper() for _ in range(3)], deque[int]()

    def sleep(number: int) -> None:
        idle.sleep(sleepers[number])
        woken.append(number)

    threads = []
    for number in range(3):
        threads.append(start(lambda number=number: sleep(number)))
        eventually(lambda number=number: idle.idle_count() == number + 1)
    assert idle.borrow() is sleepers[2]
    for number in (1, 0):
        idle.wake_one()
        assert ended(threads[number])
    queue.put(request())
    idle.wake_one()  # no instance is idle: nothing happens
    idle.give_back(sleepers[2])  # there is work
    assert ended(threads[2])
    assert list(woken) == [1, 0, 2]
    assert idle.borrow() is None, "queued requests come first"


def test_instance_takes_low_priority_before_it_sleeps() -> None:
    queue = RequestQueue()
    idle: IdleStack[Sleeper] = IdleStack(queue)
    queue.put(request(priority=1))
    assert ended(start(lambda: idle.sleep(Sleeper())))
    assert idle.idle_count() == 0


def test_borrowed_instance_takes_low_priority_that_came_meanwhile() -> None:
    queue, sleeper = RequestQueue(), Sleeper()
    idle: IdleStack[Sleeper] = IdleStack(queue)
    sleeping = start(lambda: idle.sleep(sleeper))
    eventually(idle.idle_count)
    assert idle.borrow() is sleeper
    queue.put(request(priority=1))
    idle.wake_one()  # no instance is idle: nothing happens
    idle.give_back(sleeper)
    assert ended(sleeping)


@pytest.mark.parametrize("priority", [0, 1])
def test_caller_borrows_no_instance_while_normal_requests_wait(priority: int) -> None:
    queue, sleeper = RequestQueue(), Sleeper()
    idle: IdleStack[Sleeper] = IdleStack(queue)
    sleeping = start(lambda: idle.sleep(sleeper))
    eventually(idle.idle_count)
    queue.put(request(priority))
    assert idle.borrow() is (sleeper if priority else None)
    if priority:
        idle.give_back(sleeper)
    else:
        idle.wake_one()
    assert ended(sleeping)


def test_leader_does_not_sleep_if_called_before() -> None:
    queue, collected = RequestQueue(), [1]
    leadership, leader = Leadership(queue, collected), Sleeper()
    queue.put(request())
    assert leadership.lead(leader)
    leadership.wait(leader, 1000.0)  # a request is queued
    queue.clear()
    leadership.wait(leader, 0.01)
    leadership.wake_leader()  # between the last look and the wait
    assert leadership.state is LeaderState.CALLED
    leadership.wait(leader, 1000.0)
    waiting = start(lambda: leadership.wait(leader, 1000.0))  # called only once
    eventually(lambda: leadership.state is LeaderState.ASLEEP)
    leadership.close()
    assert ended(waiting)
    assert not leadership.lead(leader)


def test_instance_that_finished_last_leads_in_place_of_sleeping_leader() -> None:
    queue, collected = RequestQueue(), deque[int]()
    leadership = Leadership(queue, collected)
    first, second = Sleeper(), Sleeper()
    sleeping = start(lambda: leadership.lead(first))
    eventually(lambda: leadership.state is LeaderState.ASLEEP)
    queue.put(request())
    assert leadership.lead(second)
    assert leadership.state is LeaderState.COLLECTING
    assert leadership.idle_count() == 1
    collected.append(1)
    queue.clear()
    leadership.hand_over()  # something is left to collect
    assert ended(sleeping)
    assert leadership.state is LeaderState.COLLECTING
    leadership.hand_over()
    assert leadership.state is LeaderState.VACANT


def test_no_other_instance_leads_while_leader_waits_for_company() -> None:
    leadership = Leadership(RequestQueue(), [1])
    first, second = Sleeper(), Sleeper()
    assert leadership.lead(first)
    waiting = start(lambda: leadership.wait(first, 1000.0))
    eventually(lambda: leadership.state is LeaderState.ASLEEP)
    following = start(lambda: leadership.lead(second))
    eventually(lambda: leadership.idle_count() == 2)
    leadership.wake()
    assert ended(waiting)
    leadership.hand_over()  # something is left to collect
    assert ended(following)
    assert leadership.state is LeaderState.COLLECTING


def test_wake_up_as_the_time_ends_counts_for_that_wait_only() -> None:
    leadership, leader = Leadership(RequestQueue(), [1]), Sleeper()
    assert leadership.lead(leader)
    sleep = leader.sleep

    def wake_too_late(blocking: bool, timeout: float) -> bool:
        leader.sleep = sleep
        leadership.wake()
        return False  # the time is over

    leader.sleep = wake_too_late  # type: ignore[assignment]
    leadership.wait(leader, 1000.0)
    assert leadership.state is LeaderState.COLLECTING
    assert not leader.sleep(False), "the next sleep would end at once"


def test_only_one_instance_leads_after_close() -> None:
    leadership = Leadership(RequestQueue(), ())
    leadership.close()
    first, second = Sleeper(), Sleeper()
    assert [leadership.lead_after_close(each) for each in (first, second, first)] == [True, False, True]


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("leaders", [False, True])
def test_no_request_is_left_or_taken_twice(leaders: bool) -> None:
    queue = RequestQueue()
    idle = None if leaders else IdleStack[Sleeper](queue)
    leadership = Leadership(queue, ())
    total, taken = 5_000, deque[Request]()
    done = threading.Event()

    def take() -> None:
        each = queue.take(0.0)
        if each is not None:
            taken.append(each)
            if len(taken) >= total:
                done.set()

    def work() -> None:
        sleeper = Sleeper()
        if idle is None:
            while leadership.lead(sleeper):
                leadership.wait(sleeper, 1e-4)
                take()
                leadership.hand_over()
        else:
            while idle.sleep(sleeper):
                take()

    def stand_in() -> None:
        """Take requests in place of idle instances."""
        while idle is not None and not done.is_set():
            sleeper = idle.borrow()
            if sleeper is not None:
                take()
                idle.give_back(sleeper)

    def add(count: int) -> None:
        for _ in range(count):
            queue.put(request())
            if idle is None:
                leadership.wake()
            else:
                idle.wake_one()

    workers = [start(work) for _ in range(4)]
    others = [start(stand_in), *[start(lambda: add(total // 2)) for _ in range(2)]]
    assert done.wait(WAIT)
    assert all(ended(thread) for thread in others)
    leadership.close()
    if idle is not None:
        idle.close()
    assert all(ended(thread) for thread in workers)
    assert len(set(taken)) == len(taken) == total


@pytest.mark.usefixtures("busy_switching")
def test_close_beside_collecting_leader_answers_every_call(register: Register) -> None:
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


# -- large items ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate() -> Gate:
    """Blocks large items, and only those."""
    gate = Gate(blocks=lambda data: str(data).startswith("large"))

    class Sized(gate.backend):  # type: ignore[misc,name-defined]
        def is_large(self, item: dict[str, Any]) -> bool:
            return bool(item["data"].startswith("large"))

        def any_thread(self) -> bool:
            return True

    gate.backend = Sized
    return gate


@pytest.mark.parametrize(("form", "instances"), [("{}", 3), ("S[{},Identity]", 2), ("Torch[{}]", 2)])
def test_one_instance_is_reserved_for_small_items(register: Register, gate: Gate, instances: int, form: str) -> None:
    if form.startswith("Torch"):
        pytest.importorskip("torch")
    config = {"backend": form.format(register(gate.backend)), "instance_num": instances}
    with pipe(config) as p, gate:
        futures = [p.submit({"data": f"large {number}"}) for number in range(6)]
        gate.wait_entered(instances - 1)
        for number in range(20):
            assert outcome(p.submit({"data": f"small {number}"}))["result"] == f"small {number}"
        p(item := {"data": "small"})  # on this thread
        assert item["result"] == "small"
        assert sum(batch[0].startswith("large") for batch in gate.batches) == instances - 1
        assert p.stats()["nodes"]["node"]["queued"] == 6 - (instances - 1)
        gate.open()
        assert [outcome(future)["result"] for future in futures] == [f"large {number}" for number in range(6)]


def test_waiting_large_items_keep_their_order(register: Register, gate: Gate) -> None:
    with pipe({"backend": register(gate.backend), "instance_num": 2}) as p, gate:
        first = gate.hold(p, {"data": "large 0"})
        futures = [p.submit({"data": f"large {number}"}) for number in range(1, 5)]
        # The other instance takes it after it has put all large ones aside.
        assert outcome(p.submit({"data": "small"}))["result"] == "small"
        gate.open()
        for future in (first, *futures):
            outcome(future)
    order = [data for (data,) in gate.batches]
    assert order.index("large 1") < order.index("large 4")


def test_expired_large_item_does_not_delay_next_one(register: Register, gate: Gate) -> None:
    with pipe({"backend": register(gate.backend), "instance_num": 2}) as p, gate:
        first = gate.hold(p, {"data": "large 0"})
        late = p.submit({"data": "large 1"}, timeout=0.05)
        deadline = perf_counter() + 0.05  # no sooner than that of the request
        last = p.submit({"data": "large 2"})
        eventually(lambda: perf_counter() > deadline)
        gate.open()
        assert isinstance(error_of(late), DeadlineExceeded)
        assert outcome(first)["result"] == "large 0"
        assert outcome(last)["result"] == "large 2"


def test_failed_large_item_frees_its_place(register: Register, gate: Gate) -> None:
    class Fails(gate.backend):  # type: ignore[misc,name-defined]
        def forward(self, items: list[dict[str, Any]]) -> None:
            raise ValueError("a bug")

    with pipe({"backend": register(Fails), "instance_num": 2}) as p:
        errors = [error_of(future) for future in [p.submit({"data": "large"}) for _ in range(8)]]
    assert all("a bug" in str(error) for error in errors)


def test_close_fails_large_items_that_wait(register: Register, gate: Gate) -> None:
    p = pipe({"backend": register(gate.backend), "instance_num": 2})
    with gate:
        first = gate.hold(p, {"data": "large 0"})
        waiting = p.submit({"data": "large 1"})
        eventually(lambda: (node := p.stats()["nodes"]["node"])["busy"] == 1 and node["queued"])
        waiting.add_done_callback(lambda _: gate.open())
        p.close()
    assert isinstance(error_of(waiting), PipeClosed)
    assert outcome(first)["result"] == "large 0"


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_small_pictures_pass_large_ones_that_wait_for_memory(isolation: str) -> None:
    large, small = (bytes(cv2.imencode(".jpg", np.zeros((side, side, 3), np.uint8))[1]) for side in (1400, 690))
    limit = 8 * 1400 * 1400
    config = {"backend": "DecodeMat", "max_pixels": 1400 * 1400, "instance_num": 2, "decode_isolation": isolation}
    with pipe(config) as p, DECODING.reserved(limit, limit, is_large=True):
        futures = [p.submit({"data": large}) for _ in range(4)]
        with DECODING.reserved(limit // 4, limit):
            assert outcome(p.submit({"data": small}))["result"].shape == (690, 690, 3)
        assert isolation == "process" or not any(future.done() for future in futures)
