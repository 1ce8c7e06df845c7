"""Recent compute times, standing queues, clients' timeouts: by a clock that is an argument; and an overloaded pipe."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from time import perf_counter
from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.waits import WAIT, eventually, outcome

from torchpipe_py import DeadlineExceeded, Overloaded, pipe
from torchpipe_py.runtime import admission
from torchpipe_py.runtime.admission import (
    CALM,
    INTERVAL,
    LEAST_TARGET,
    RECENT,
    REMEMBERED,
    ClientTimeout,
    ComputeTimes,
    ControlledDelay,
    Path,
)


def test_expects_the_nearest_size_that_ran_and_forgets() -> None:
    times = ComputeTimes()
    assert times.expected(1, 0.0) == 0.0
    times.add(8, 0.08, 0.0)
    assert [times.expected(size, 0.0) for size in (1, 8, 15, 64)] == [0.08] * 4
    times.add(1, 0.02, 0.0)
    assert (times.expected(1, 0.0), times.expected(9, 0.0)) == (0.02, 0.08)
    assert times.expected(1, RECENT + 0.01) == 0.0


def test_a_batch_is_no_larger_than_its_time_allows() -> None:
    times = ComputeTimes()
    for size, seconds in ((1, 0.01), (2, 0.02), (4, 0.04), (8, 0.08)):
        times.add(size, seconds, 0.0)
    assert [times.fitting(8, seconds, 0.0) for seconds in (0.1, 0.05, 0.025, 0.001)] == [8, 4, 2, 1]
    for now, fits in ((2 * RECENT, 4), (REMEMBERED + 0.01, 8)):
        times.add(4, 0.04, now)
        assert times.expected(8, now) == 0.04
        assert times.fitting(8, 0.05, now) == fits, "a size that was too large is tried again, but not each second"


def waits(delay: ControlledDelay, seconds: float, since: float, until: float) -> list[bool]:
    """What becomes of requests that leave the queue every 10 ms, each after so long, where one takes 20 ms."""
    return [delay.took(seconds, 0.02, since + step / 100) for step in range(int((until - since) * 100))]


def test_a_burst_loses_nothing() -> None:
    delay = ControlledDelay(None)
    assert not any(waits(delay, 0.5, 1.0, 1.0 + INTERVAL))
    assert not any(waits(delay, 0.01, 1.2, 1.3))
    assert not any(waits(delay, 0.5, 1.3, 1.3 + INTERVAL))


def test_a_queue_that_stands_is_shed_until_nothing_is_refused_for_a_while() -> None:
    delay = ControlledDelay(None)
    assert delay.calm_wait == LEAST_TARGET
    assert waits(delay, 0.5, 1.0, 2.0)[-1]
    assert delay.is_shedding(2.0)
    assert not any(waits(delay, 0.01, 2.0, 2.1))
    assert delay.calm_wait == 0.0, "each is judged until the queue is calm again"
    assert not any(waits(delay, delay.longest(0.02) - 0.021, 2.0, 2.5)), "what is in time is not shed"
    assert not delay.is_shedding(2.0 + CALM)
    assert not any(waits(delay, 0.1, 4.0, 5.0)), "less than twice the target"
    assert not any(waits(delay, 0.01, 5.0, 5.1))
    assert delay.calm_wait == LEAST_TARGET


def test_queues_may_be_longer_while_nobody_leaves() -> None:
    timeout = ClientTimeout()
    delay, configured = ControlledDelay(None, timeout), ControlledDelay(0.05, timeout)
    assert not any(waits(delay, 0.5, 1.0, 2.0))
    assert any(waits(delay, 1.7, 3.0, 4.0))
    assert any(waits(configured, 0.5, 1.0, 2.0)), "what is configured holds whatever clients do"
    for window in range(ClientTimeout.WINDOWS):
        timeout.left(0.05)
        timeout.bound(float(window))
    assert not timeout.is_endless
    assert delay.longest(0.02) == ClientTimeout.MARGIN * 0.05, "no longer than clients wait"
    assert any(waits(delay, 0.5, 9.0, 10.0))


def judged(timeout: ClientTimeout, window: int, left: int = 0, stayed: int = 0) -> float:
    """What is known after the window, in which clients left after 50 to 70 ms, or were answered after 80."""
    for place in range(left):
        timeout.left(0.05 + 0.01 * (place % 3))
    for _ in range(stayed):
        timeout.answered(0.08)
    return timeout.bound(1.1 * ClientTimeout.WINDOW * window)


def test_a_timeout_is_learnt_from_those_that_left_and_those_that_waited_as_long() -> None:
    timeout = ClientTimeout()
    assert not timeout.is_learning
    leaving = [3, 0, *[3] * (ClientTimeout.WINDOWS - 1)]
    windows = [judged(timeout, window, left, stayed=20) for window, left in enumerate(leaving)]
    assert windows == [math.inf] * len(leaving), "most of those that waited so long stayed"
    for window in range(ClientTimeout.APART + 1):
        judged(timeout, 20 + window)
    assert not timeout.is_learning
    windows = [judged(timeout, 50 + window, left, stayed=1) for window, left in enumerate(leaving[:-1])]
    assert windows == [math.inf] * len(leaving[:-1]), "they may have been closed at once"
    assert timeout.is_learning
    assert judged(timeout, 60, left=3) == 0.05, "it is not known who stays how long, so the shortest"


@pytest.mark.parametrize(("priority", "learns"), [(0, True), (1, False)])
def test_requests_of_low_priority_show_no_timeout(priority: int, learns: bool) -> None:
    with pipe({"backend": "Identity"}) as run:
        run.limit_delays(None)
        assert run._runtime.door.client_timeout is not None
        run.dispatch({"data": 1, "priority": priority}, lambda data, error: None).client_left()
        assert run._runtime.door.client_timeout.is_learning == learns


def test_clients_that_leave_now_and_then_show_nothing() -> None:
    timeout = ClientTimeout()
    for window in range(20 * ClientTimeout.APART):
        assert judged(timeout, window, left=2 if window % (ClientTimeout.APART + 1) == 0 else 0) == math.inf


def test_load_testers_that_end_show_nothing_after_a_lighter_load() -> None:
    """They leave while the queue is long; who waits less, stays less long."""
    timeout = ClientTimeout()
    for window in range(20 * ClientTimeout.APART):
        for _ in range(40 if window % (2 * ClientTimeout.APART) in (0, 1) else 0):
            timeout.left(0.013)
        for _ in range(60):
            timeout.answered(0.006)
        assert timeout.bound(1.1 * ClientTimeout.WINDOW * window) == math.inf


def test_few_times_are_kept_while_nobody_judges_them() -> None:
    """Requests that are not checked at the door, such as frames of streams, lead to no judging."""
    timeout = ClientTimeout()
    for _ in range(ClientTimeout.KEPT):
        timeout.left(0.05)
        timeout.answered(0.08)
    assert len(timeout._ends) == ClientTimeout.KEPT


def known() -> ClientTimeout:
    """A timeout of 60 ms."""
    timeout = ClientTimeout()
    for window in range(ClientTimeout.WINDOWS):
        judged(timeout, window, left=3)
        timeout.left(0.06)
    timeout.answered(0.051)
    return timeout


def test_a_known_timeout_holds_then_grows_fast_until_clients_leave_again() -> None:
    timeout = known()
    known_at = timeout.bound(0.0)
    windows = [judged(timeout, 10 + window) for window in range(ClientTimeout.HELD + 5)]
    assert windows[ClientTimeout.HELD - 10 :] == sorted(windows[ClientTimeout.HELD - 10 :])
    assert set(windows[: ClientTimeout.HELD - 10]) == {known_at}, "its answers are in time: none is risked"
    assert windows[-1] > known_at
    timeout.left(0.06)
    assert judged(timeout, 1000) == known_at
    assert judged(timeout, 1001, left=3) == known_at, "it is lowered by what is shorter only"


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_known_timeout_is_forgotten_once_few_leave(leaving: int) -> None:
    """One of ten clients may go on to leave early: the other nine must not be refused for minutes."""
    timeout = ClientTimeout()
    for window in range(ClientTimeout.WINDOWS):
        timeout.left(0.01)
        timeout.bound(1.1 * ClientTimeout.WINDOW * window)
    assert not timeout.is_endless
    for window in range(ClientTimeout.HELD, 3 * ClientTimeout.HELD):
        for _ in range(leaving):
            timeout.left(0.01)
        judged(timeout, window, stayed=9)
    assert timeout.is_endless


@pytest.mark.parametrize("answered", [0, 8])
def test_a_few_that_leave_early_do_not_shorten_the_timeout_of_the_others(answered: int) -> None:
    timeout = ClientTimeout()
    for window in range(100):
        timeout.left(0.01 if window % 8 == 0 else 0.06)
        for _ in range(answered):
            timeout.answered(0.05)
        timeout.bound(1.1 * ClientTimeout.WINDOW * window)
    assert timeout.bound(1000.0) == 0.06


def test_a_newcomer_waits_for_what_runs_and_for_what_is_before_it() -> None:
    times = ComputeTimes()
    times.add(1, 0.02, 1.0)
    remaining = [times.remaining(1, started, 1.0) for started in (0.995, 0.99, 0.0)]
    assert remaining == pytest.approx([0.015, 0.01, 0.01])
    assert times.remaining(1, 0.9, 1.0) == pytest.approx(0.002), "any moment, but not at once"
    assert times.remaining(0, 0.0, 1.0) == 0.0
    assert [times.wait(waiting, [0.015, 0.01], 1, 1.0) for waiting in range(5)] == pytest.approx(
        [0.01, 0.015, 0.03, 0.035, 0.05]
    )


class Lane:
    def __init__(self, wait: float, compute: float) -> None:
        self._wait, self._compute = wait, compute

    def expected_wait(self, now: float, priority: int = 0) -> float:
        return self._wait

    def expected_compute(self, now: float) -> float:
        return self._compute


def test_a_path_is_as_long_as_its_longest_branch() -> None:
    lanes = {"a": Lane(0.1, 0.01), "b": Lane(0.2, 0.01), "c": Lane(0.0, 0.05), "d": Lane(0.0, 0.02)}
    path = Path(lanes, {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")})
    assert path.expected(0.0) == pytest.approx((0.3, 0.04))


# -- a pipe -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine stands still."""
    monkeypatch.setattr(admission, "RECENT", WAIT)
    monkeypatch.setattr(admission, "CALM", WAIT)


def dispatched(run: pipe, data: Any = 1, seconds: float | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    run.dispatch({"data": data}, lambda data, error: future.set_result(error), seconds)
    return future


@pytest.mark.usefixtures("nothing_is_forgotten")
def test_what_stands_too_long_is_refused_and_the_rest_is_computed(register: Register) -> None:
    gate = Gate(blocks=lambda data: data == "held")

    class Slow(gate.backend):  # type: ignore[name-defined, misc]
        """30 ms for each request."""

        def forward(self, items: list[dict[str, Any]]) -> None:
            threading.Event().wait(0.03)
            super().forward(items)

    with pipe({"backend": register(Slow)}) as run, gate:
        run.limit_delays(0.001)
        errors = [outcome(future) for future in [dispatched(run) for _ in range(20)]]
        refused = [error for error in errors if error is not None]
        assert errors[0] is None
        assert refused
        assert {type(error) for error in refused} == {Overloaded}
        assert all(error.retry_after_ms >= 1 for error in refused)
        assert run.stats()["nodes"]["node"]["expired"] == len(refused)
        waiting = [dispatched(run, "held", seconds=WAIT), *[dispatched(run) for _ in range(8)]]
        gate.wait_entered()
        assert not run.is_refusing
        with pytest.raises(Overloaded, match="more come than can be taken"):
            run.check_delay(None)
        with pytest.raises(Overloaded, match="its deadline is 1 ms") as caught:
            run.check_delay(0.001)
        assert run.is_refusing
        assert caught.value.deadline
        gate.open()
        for future in waiting:
            outcome(future)


def test_requests_of_programs_are_never_shed(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend)}) as run, gate:
        futures = [dispatched(run) for _ in range(5)]
        gate.wait_entered()
        threading.Event().wait(3 * INTERVAL)
        gate.open()
        assert [outcome(future) for future in futures] == [None] * 5


@pytest.mark.usefixtures("nothing_is_forgotten")
def test_what_cannot_meet_its_deadline_any_more_is_not_computed(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend)}) as run, gate:
        run.limit_delays(0.0)
        first = dispatched(run)
        gate.wait_entered()
        run._runtime.nodes["node"].times.add(1, 100 * WAIT, perf_counter())
        late, since = dispatched(run, seconds=WAIT), perf_counter()
        eventually(lambda: perf_counter() - since > 0.01)  # one that comes to an idle instance is tried
        gate.open()
        assert outcome(first) is None
        assert isinstance(outcome(late), DeadlineExceeded)
        assert len(gate.batches) == 1
