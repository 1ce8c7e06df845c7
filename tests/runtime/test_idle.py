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
from torchpipe_py.runtime.nodes.idle import IdleStack, Leadership, Sleeper

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
def test_one_instance_is_kept_for_the_others(register: Register, gate: Gate, instances: int, form: str) -> None:
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


def test_those_that_are_over_keep_nobody_waiting(register: Register, gate: Gate) -> None:
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


def test_a_defect_gives_its_place_back(register: Register, gate: Gate) -> None:
    class Fails(gate.backend):  # type: ignore[misc,name-defined]
        def forward(self, items: list[dict[str, Any]]) -> None:
            raise ValueError("a bug")

    with pipe({"backend": register(Fails), "instance_num": 2}) as p:
        errors = [error_of(future) for future in [p.submit({"data": "large"}) for _ in range(8)]]
    assert all("a bug" in str(error) for error in errors)


def test_closing_ends_those_that_wait(register: Register, gate: Gate) -> None:
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
