"""The event loop on its own: handlers, calls of other threads, steps, errors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import WAIT
from torchpipe_server.serving import loop as module
from torchpipe_server.serving.loop import READ, WRITE, Loop


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def run_until_stopped(loop: Loop) -> None:
    guard = threading.Timer(WAIT, loop.stop)
    guard.daemon = True
    guard.start()
    loop.run()
    assert guard.is_alive(), "nothing has stopped it"
    guard.cancel()


def test_a_handler_is_called_with_what_is_ready(loop, pair):
    seen: list[int] = []

    def ready(events: int) -> None:
        seen.append(events)
        if events & READ:
            pair[0].recv(10)
            loop.stop()
        else:
            pair[1].send(b"x")
            loop.watch(pair[0], READ, ready)

    loop.watch(pair[0], READ | WRITE, ready)
    run_until_stopped(loop)
    assert seen == [WRITE, READ]


def test_the_last_handler_counts_and_none_after_the_end(loop, pair):
    wrong: list[int] = []
    loop.watch(pair[0], READ, wrong.append)
    loop.watch(pair[0], READ, lambda events: loop.stop())
    loop.watch(pair[1], READ, wrong.append)
    loop.watch(pair[1], 0, wrong.append)
    loop.watch(pair[1], 0, wrong.append)  # a second end is none
    pair[0].send(b"x")
    pair[1].send(b"x")
    run_until_stopped(loop)
    assert wrong == []


def test_calls_come_in_order_from_any_thread(loop):
    seen: list[int] = []

    def call_all() -> None:
        for index in range(5000):  # far more than the wake-up socket holds
            loop.call(lambda index=index: seen.append(index))
        loop.call(loop.stop)

    thread = threading.Thread(target=call_all)
    thread.start()
    run_until_stopped(loop)
    thread.join(WAIT)
    assert seen == list(range(5000))


def test_a_call_may_call(loop):
    loop.call(lambda: loop.call(lambda: loop.call(loop.stop)))
    run_until_stopped(loop)


def test_calls_that_call_again_leave_sockets_their_turn(loop, pair):
    def again() -> None:
        if not loop._is_stopped:
            loop.call(again)

    again()
    loop.watch(pair[0], READ, lambda events: loop.stop())
    pair[1].send(b"x")
    run_until_stopped(loop)


def test_urgent_sources_come_first(loop):
    pairs = [socket.socketpair() for _ in range(6)]
    rounds: list[list[int]] = []

    def ready(index: int) -> None:
        if not rounds or len(rounds[-1]) == len(pairs):
            rounds.append([])
        rounds[-1].append(index)
        if len(rounds) == 3 and len(rounds[-1]) == len(pairs):
            loop.stop()

    for index, (one, other) in enumerate(pairs):
        loop.watch(one, READ, lambda events, index=index: ready(index), is_urgent=index == 4)
        other.send(b"x")
    run_until_stopped(loop)
    for one, other in pairs:
        loop.watch(one, 0, print)
        one.close()
        other.close()
    assert [seen[0] for seen in rounds] == [4, 4, 4]


def test_stop_before_run(loop):
    loop.stop()
    run_until_stopped(loop)


def test_calls_after_the_end_do_nothing():
    loop = Loop()
    loop.close()
    loop.call(lambda: pytest.fail("called"))
    loop.stop()


def test_a_call_wakes_a_waiting_loop(loop, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_WAIT", 2 * WAIT)
    waiting = threading.Event()

    def step() -> float:
        waiting.set()
        return 1e9

    loop.steps.append(step)

    def wake() -> None:
        assert waiting.wait(WAIT)
        loop.call(loop.stop)

    thread = threading.Thread(target=wake)
    thread.start()
    run_until_stopped(loop)
    thread.join(WAIT)


def test_the_shortest_wait_of_all_steps_counts(loop, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_WAIT", 2 * WAIT)
    rounds: list[int] = []

    def often() -> float:
        rounds.append(1)
        if len(rounds) == 20:
            loop.stop()
        return 0.001

    loop.steps += [lambda: 1e9, often, lambda: -3.0 if len(rounds) > 10 else 1e9]
    run_until_stopped(loop)


def test_an_error_ends_run_where_nobody_takes_it(loop):
    def fail() -> None:
        raise KeyError("a defect")

    loop.call(fail)
    with pytest.raises(KeyError):
        loop.run()


def fail_in_a_handler(loop: Loop, sock: socket.socket, fail: Callable[..., Any]) -> None:
    loop.watch(sock, WRITE, fail)


def fail_in_a_step(loop: Loop, sock: socket.socket, fail: Callable[..., Any]) -> None:
    loop.steps.append(fail)


def fail_in_a_call(loop: Loop, sock: socket.socket, fail: Callable[..., Any]) -> None:
    loop.call(fail)
    loop.call(fail)
    loop.call(fail)


@pytest.mark.parametrize("where", [fail_in_a_handler, fail_in_a_step, fail_in_a_call])
def test_errors_are_told_and_it_goes_on(pair, where):
    told: list[Exception] = []

    def hear(error: Exception) -> None:
        told.append(error)
        if len(told) == 3:
            loop.stop()

    def fail(*_: Any) -> float:
        raise KeyError("a defect")

    loop = Loop(hear)
    where(loop, pair[0], fail)
    run_until_stopped(loop)
    loop.close()
    assert [repr(error) for error in told] == ["KeyError('a defect')"] * 3
