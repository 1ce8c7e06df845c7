"""Recent compute times and the queue target, by a clock that is an argument; an overloaded pipe."""

from __future__ import annotations

import math
from concurrent.futures import Future
from time import perf_counter
from typing import Any

import pytest
from conftest import Register
from kit.backends import Echo, Gate
from kit.inside import node_of
from kit.waits import WAIT, eventually, outcome, wait_queued

from torchpipe_py import DeadlineExceeded, Overloaded, pipe
from torchpipe_py.runtime import admission, request, routes
from torchpipe_py.runtime.admission import (
    COMPUTES,
    RECENT,
    REMEMBERED,
    TARGET,
    ComputeTimes,
    Deadlines,
    Door,
    Path,
    QueueTarget,
)
from torchpipe_py.runtime.nodes import node, single


def test_expected_time_is_of_nearest_recent_size() -> None:
    times = ComputeTimes()
    assert times.expected(1, 0.0) == 0.0
    times.add(8, 0.08, 0.0)
    assert [times.expected(size, 0.0) for size in (1, 8, 15, 64)] == [0.08] * 4
    times.add(1, 0.02, 0.0)
    assert (times.expected(1, 0.0), times.expected(9, 0.0)) == (0.02, 0.08)
    assert times.expected(1, RECENT + 0.01) == 0.0


def test_time_of_slow_batch_lasts_until_the_next_one_can_end() -> None:
    times = ComputeTimes()
    times.add(1, 3.0, 0.0)
    assert times.expected(1, 5.9) == times.expected(2, 5.9) == 3.0
    assert times.expected(1, 6.1) == 0.0
    times.add(1, 4.0, 5.9)
    assert times.expected(1, 5.9) == pytest.approx(3.1)  # a mean, since the time before it had not expired


def test_batch_size_fits_its_time() -> None:
    times = ComputeTimes()
    for size, seconds in ((1, 0.01), (2, 0.02), (4, 0.04), (8, 0.08)):
        times.add(size, seconds, 0.0)
    assert [times.fitting(8, seconds, 0.0) for seconds in (0.1, 0.05, 0.025, 0.001)] == [8, 4, 2, 1]
    for now, fits in ((2 * RECENT, 4), (REMEMBERED + 0.01, 8)):
        times.add(4, 0.04, now)
        assert times.expected(8, now) == 0.04
        assert times.fitting(8, 0.05, now) == fits, "a size that was too large is tried again, but not each second"


@pytest.mark.parametrize(
    ("target", "longest"),
    [(None, {0.01: TARGET, 0.05: COMPUTES * 0.05}), (0.3, {0.01: 0.3, 0.5: 0.3}), (0.0, {0.01: math.inf})],
    ids=["default", "configured", "off"],
)
def test_target_bounds_wait_by_compute_time_of_path(target: float | None, longest: dict[float, float]) -> None:
    limit = QueueTarget()
    assert not limit.is_on
    assert limit.seconds(0.01) == math.inf, "requests of programs are not limited"
    limit.set(target)
    assert limit.is_on
    assert {compute: limit.seconds(compute) for compute in longest} == longest
    for compute, seconds in longest.items():  # a node allows one computation more, which may have begun
        assert not limit.is_exceeded(seconds + compute, compute)
        assert limit.is_exceeded(seconds + compute + 0.001, compute) is (seconds < math.inf)


def test_expected_wait_counts_running_and_queued_requests() -> None:
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
        self._times = wait, compute

    def expected(self, now: float, priority: int = 0, is_exact: bool = False) -> tuple[float, float]:
        return self._times


def test_path_is_as_long_as_its_longest_branch() -> None:
    lanes = {"a": Lane(0.1, 0.01), "b": Lane(0.2, 0.01), "c": Lane(0.0, 0.05), "d": Lane(0.0, 0.02)}
    path = Path(lanes, {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")})
    assert path.expected(0.0) == pytest.approx((0.3, 0.04))


def test_path_includes_slowest_graph_that_a_node_jumps_to() -> None:
    inner = [Path({"x": Lane(0.1, 0.01)}, {"x": ()}), Path({"y": Lane(0.2, 0.02)}, {"y": ()})]
    path = Path({"a": Lane(0.01, 0.0), "b": Lane(0.0, 0.01)}, {"a": (), "b": ("a",)}, {"a": inner})
    assert path.expected(0.0) == pytest.approx((0.21, 0.03))


def door(wait: float, compute: float, target: float | None) -> Door:
    limit = QueueTarget()
    limit.set(target)
    return Door({"a": Path({"a": Lane(wait, compute)}, {"a": ()})}, limit)


@pytest.mark.parametrize(
    ("wait", "compute", "target", "seconds", "message"),
    [
        (0.09, 0.02, None, None, ""),
        (0.11, 0.02, None, None, "a request waits 110 ms now, and may wait 100 ms"),
        (0.19, 0.05, None, None, ""),
        (0.21, 0.05, None, None, "a request waits 210 ms now, and may wait 200 ms"),
        (0.05, 0.02, 0.04, None, "a request waits 50 ms now, and may wait 40 ms"),
        (9.0, 0.02, 0.0, None, ""),
        (9.0, 0.02, None, 10.0, ""),
        (0.05, 0.02, None, 0.06, "a request takes 70 ms now, its deadline is 60 ms"),
        (0.0, 0.02, None, 0.01, ""),
    ],
)
def test_door_refuses_request_that_would_wait_too_long(
    wait: float, compute: float, target: float | None, seconds: float | None, message: str
) -> None:
    checked = door(wait, compute, target)
    assert not checked.is_refusing
    if not message:
        checked.check(seconds, "a")
        assert not checked.is_refusing
        return
    with pytest.raises(Overloaded, match=message) as caught:
        checked.check(seconds, "a")
    assert caught.value.retry_after_ms == round(1000 * wait)
    assert checked.is_refusing


def test_door_lets_low_priority_wait() -> None:
    door(9.0, 0.02, None).check(None, "a", priority=1)


# -- a pipe -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine stands still."""
    monkeypatch.setattr(admission, "RECENT", WAIT)
    monkeypatch.setattr(admission, "REFUSING", WAIT)


def dispatched(run: pipe, data: Any = 1, seconds: float | None = None, priority: int = 0) -> Future[Any]:
    future: Future[Any] = Future()
    given = {"data": data, "priority": priority}
    run.dispatch(given, lambda data, error: future.set_result(error), seconds)
    return future


@pytest.mark.usefixtures("nothing_is_forgotten")
def test_node_drops_requests_that_waited_longer_than_the_target(register: Register) -> None:
    gate = Gate(blocks=lambda data: data == "first")
    with pipe({"backend": register(gate.backend)}) as run, gate:
        run.limit_delays(0.01)
        began = perf_counter()
        assert outcome(dispatched(run, "warm")) is None
        first = dispatched(run, "first")
        gate.wait_entered()
        since = perf_counter()
        late = [dispatched(run, "late") for _ in range(2)]
        kept = [dispatched(run, "low", priority=1), dispatched(run, "deadline", seconds=10 * WAIT)]
        # Longer than the target and the mean compute time together, however slow the machine is.
        eventually(lambda: perf_counter() - since > max(0.05, 3 * (since - began)))
        gate.open()
        assert outcome(first) is None
        assert [type(outcome(future)) for future in late] == [Overloaded, Overloaded]
        assert [outcome(future) for future in kept] == [None, None]
        node = run.stats()["nodes"]["node"]
        assert (node["shed"], node["expired"]) == (2, 0), "no deadline passed"


def test_node_computes_late_request_if_no_other_waits(register: Register) -> None:
    gate = Gate(blocks=lambda data: data == "first")
    with pipe({"backend": register(gate.backend)}) as run, gate:
        run.limit_delays(1e-9)
        first = dispatched(run, "first")
        gate.wait_entered()
        late = dispatched(run, "late")
        gate.open()
        assert [outcome(first), outcome(late)] == [None, None]


@pytest.mark.usefixtures("nothing_is_forgotten")
def test_request_without_deadline_is_refused_at_once_behind_a_long_queue(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend)}) as run, gate:
        futures = [dispatched(run) for _ in range(20)]
        gate.wait_entered()
        wait_queued(run, 19)
        run.limit_delays(None)
        node_of(run).times.add(1, 0.5, perf_counter())
        with pytest.raises(Overloaded, match="may wait 2000 ms") as caught:
            run.check_delay(None)
        assert caught.value.retry_after_ms is not None
        with pytest.raises(Overloaded, match="its deadline is 1 ms") as timed:
            run.check_delay(0.001)
        assert timed.value.deadline
        assert run.is_refusing
        run.check_delay(None, priority=1)
        run.limit_delays(0.0)
        run.check_delay(None)
        gate.open()
        assert [outcome(future) for future in futures] == [None] * 20


def test_queued_requests_of_clients_that_left_refuse_no_other(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend)}) as run, gate:
        first = run.dispatch({"data": 0}, lambda data, error: None)
        gate.wait_entered()
        left = [run.dispatch({"data": 0}, lambda data, error: None) for _ in range(40)]
        wait_queued(run, 40)
        run.limit_delays(None)
        node_of(run).times.add(1, 0.5, perf_counter())
        for seconds in (None, 2.0):
            with pytest.raises(Overloaded):
                run.check_delay(seconds)
        for ticket in left:
            ticket.cancel()
        for seconds in (None, 2.0):
            run.check_delay(seconds)
        assert not first.is_over
        gate.open()


def test_elements_of_a_request_are_not_dropped_by_the_target(register: Register) -> None:
    """They wait for each other, not for other requests."""

    class Slow(Echo):
        def forward_item(self, item: dict[str, Any]) -> None:
            since = perf_counter()
            eventually(lambda: perf_counter() - since > 0.005)
            super().forward_item(item)

    config = {"all": {"backend": "MapReduce", "jump": "each"}, "each": {"backend": register(Slow)}}
    with pipe(config) as run:
        run.limit_delays(0.001)
        assert outcome(dispatched(run, [1] * 30)) is None


def test_requests_of_programs_are_never_dropped(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend)}) as run, gate:
        since = perf_counter()
        futures = [dispatched(run) for _ in range(5)]
        gate.wait_entered()
        eventually(lambda: perf_counter() - since > 2 * TARGET)
        run.check_delay(None)
        gate.open()
        assert [outcome(future) for future in futures] == [None] * 5


def test_request_at_an_idle_instance_is_computed_although_it_seems_too_slow(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = perf_counter()
    for module in (admission, node, request, routes, single):  # NOTE: one that came there late would be dropped
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    with pipe({"backend": register(Echo)}) as run:
        run.limit_delays(0.0)
        node_of(run).times.add(1, 100 * WAIT, now)
        assert outcome(dispatched(run, seconds=WAIT)) is None


@pytest.mark.parametrize(
    ("longest_ms", "asked", "seconds"),
    [
        (0.0, None, None),
        (0.0, -1.0, None),
        (0.0, 20.0, 0.02),
        (50.0, None, 0.05),
        (50.0, 0.0, 0.05),
        (50.0, -1.0, 0.05),
        (50.0, 20.0, 0.02),
        (50.0, 70.0, 0.05),
    ],
)
def test_deadline_is_never_longer_than_the_longest(
    longest_ms: float, asked: float | None, seconds: float | None
) -> None:
    with pipe({"backend": "Identity"}) as run:
        assert Deadlines(run, longest_ms).admit(asked) == seconds


@pytest.mark.usefixtures("nothing_is_forgotten")
def test_request_that_cannot_meet_its_deadline_is_not_computed(register: Register) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend)}) as run, gate:
        run.limit_delays(0.0)
        first = dispatched(run)
        gate.wait_entered()
        node_of(run).times.add(1, 100 * WAIT, perf_counter())
        late = dispatched(run, seconds=WAIT)
        wait_queued(run, 1)
        since = perf_counter()
        eventually(lambda: perf_counter() - since > 0.01)  # one that comes to an idle instance is tried
        gate.open()
        assert outcome(first) is None
        assert isinstance(outcome(late), DeadlineExceeded)
        assert len(gate.batches) == 1
