"""How an instance waits for its stream: by a clock and a stream that are made up."""

from __future__ import annotations

import pytest

from torchpipe_py.backends.cuda import LONG_SECONDS, LONGEST_SLEEP, SPIN_SECONDS, StreamWait

SLOW = SPIN_SECONDS + LONGEST_SLEEP  # in one sleep


class Gpu:
    """A clock, and a stream on it: work takes a while; a sleep may last longer than they should."""

    def __init__(self) -> None:
        self.now, self.done_at, self.late = 0.0, 0.0, 0.0
        self.sleeps: list[float] = []
        self.spins = 0
        self.stream_wait = StreamWait(self.sleep, lambda: self.now)

    def query(self) -> bool:
        return self.now >= self.done_at

    def synchronize(self) -> None:
        self.spins += 1
        self.now = max(self.now, self.done_at)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds + self.late

    def work(self, seconds: float, batch: int = 1) -> float:
        """A batch of that length; how long it was waited for."""
        began = self.now
        self.done_at = began + seconds
        self.stream_wait.wait(self, batch)
        assert self.query()
        return self.now - began


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def test_short_work_is_spun_for(gpu):
    for _ in range(5):
        assert gpu.work(0.9 * LONG_SECONDS) == pytest.approx(0.9 * LONG_SECONDS)
    assert (gpu.sleeps, gpu.spins) == ([], 5)


def test_long_work_is_slept_through_but_for_its_end(gpu):
    waits = [gpu.work(SLOW) for _ in range(5)]
    assert waits == pytest.approx([SLOW] * 5)
    assert gpu.sleeps == pytest.approx([SLOW - SPIN_SECONDS] * 4)


def test_each_batch_size_has_its_time(gpu):
    gpu.work(SLOW, batch=8)
    gpu.work(SPIN_SECONDS, batch=1)
    gpu.work(SLOW, batch=8)
    gpu.work(SPIN_SECONDS, batch=1)
    assert gpu.sleeps == pytest.approx([SLOW - SPIN_SECONDS])


def test_work_that_becomes_quick_is_slept_through_ever_shorter(gpu):
    """One wait in a thousand that was slow must not make the next ones slow."""
    gpu.work(1000 * SLOW)
    waits = [gpu.work(SLOW) for _ in range(60)]
    assert max(waits) <= SLOW + LONGEST_SLEEP
    assert max(waits[20:]) == pytest.approx(SLOW)


def test_a_machine_that_oversleeps_stops_sleeping(gpu):
    gpu.late = 2 * SPIN_SECONDS
    waits = [gpu.work(SLOW) for _ in range(200)]
    assert max(waits) <= SLOW + gpu.late
    late = [wait for wait in waits[100:] if wait > SLOW * 1.01]
    assert len(late) < 50
