"""What a run sends: each client's share, and when its calls are due."""

from __future__ import annotations

import argparse
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torchpipe_py.loadtest.client.arrivals import Arrivals, ClosedLoop, OpenLoop
from torchpipe_py.loadtest.client.replay import read_replay
from torchpipe_py.loadtest.client.schedules import Times, constant_times, cut, deal, poisson_times, rate_of, rescale
from torchpipe_py.loadtest.plans import Plan, make_plans

DEFAULT_TOTAL = 10_000
HEAD_START_NS = 100_000_000  # from the opening of the gate to the start, for all clients to be awake by then
HEAD_START_EACH_NS = 1_000_000  # and for each of them

_CLOSED_CALLS_PER_S = 50_000  # more than one client can do: room for a closed loop whose length is given in seconds
_SHORTEST_PATIENCE_S = 1.0
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Load:
    """The plans, and for an open loop `times`, when its calls are due; `seconds` is the length of a closed loop.

    After `until`, in ns since the start, nothing is sent any more.
    """

    plans: list[Plan]
    batch: int
    times: Times | None
    until: int | None

    @property
    def is_open(self) -> bool:
        return self.times is not None

    @property
    def head_start(self) -> int:
        """In ns."""
        return HEAD_START_NS + HEAD_START_EACH_NS * len(self.plans) if self.is_open else 0

    @property
    def total(self) -> int | None:
        """Images that will be sent; None where only time tells."""
        return None if self.times is None and self.until is not None else sum(plan.share for plan in self.plans)

    @property
    def offered_rate(self) -> float | None:
        """Images per second that the schedule asks for."""
        return None if self.times is None else rate_of(self.times) * self.batch

    def arrivals(self, client: int, start: int, is_stopping: Callable[[], bool]) -> Arrivals:
        """In a client, its policy; `start` in ns of `perf_counter_ns`."""
        if self.times is None:
            return ClosedLoop(None if self.until is None else start + self.until)
        assert self.until is not None
        share = deal(self.times, len(self.plans))[client]
        return OpenLoop(share, start, start + self.until, is_stopping)

    def unsent(self, left: int) -> int:
        """Of a client that gave up with `left` images of its plan: those it owes. None where it had only time."""
        return left if self.total is not None else 0


def make_load(options: argparse.Namespace, images: int) -> Load:
    """The load that the options ask for; raises `CannotRunError` for a replay that is none."""
    if options.arrivals == "closed":
        return _closed_load(options, images)
    batch, total = options.request_batch, options.total_number
    calls = None if total is None else -(-total // batch)
    times = cut(_times(options), calls, options.duration)
    plans = _dealt_plans(times, options, images)
    last = times[-1] if times else 0
    return Load(plans, batch, times, last + _patience(last, options.timeout))


def _closed_load(options: argparse.Namespace, images: int) -> Load:
    clients, batch, seconds = options.request_client, options.request_batch, options.duration
    if seconds is None:
        return Load(make_plans(clients, batch, options.total_number, images, options.warmup), batch, None, None)
    room = max(1, round(seconds * _CLOSED_CALLS_PER_S)) * batch * clients
    plans = make_plans(clients, batch, room, images, options.warmup)
    return Load(plans, batch, None, round(seconds * _NS_PER_S))


def _times(options: argparse.Namespace) -> Iterator[float]:
    """Seconds at which calls are due."""
    rate = None if options.rate is None else options.rate / options.request_batch
    if options.arrivals == "replay":
        times = read_replay(options.replay, options.replay_column)
        return iter(times if rate is None else rescale(times, rate))
    assert rate is not None
    return constant_times(rate) if options.arrivals == "constant" else poisson_times(rate, options.seed)


def _dealt_plans(times: Times, options: argparse.Namespace, images: int) -> list[Plan]:
    """A plan for each client's part of the schedule; the last call takes what is left of `--total_number`."""
    clients, batch, calls = options.request_client, options.request_batch, len(times)
    total = calls * batch if options.total_number is None else min(options.total_number, calls * batch)
    plans = []
    for plan in make_plans(clients, 1, calls, images, options.warmup):
        short = calls * batch - total if calls and plan.index == (calls - 1) % clients else 0
        plans.append(Plan(plan.index, plan.share * batch - short, batch, plan.warmup, plan.first_image))
    return plans


def _patience(last: int, timeout: float) -> int:
    """How far an open loop may fall behind before it gives up: half its length, but 1 s to `timeout`; in ns."""
    shortest = min(timeout, _SHORTEST_PATIENCE_S)
    return round(min(max(last / 2, shortest * _NS_PER_S), timeout * _NS_PER_S))


def offered_images(load: Load) -> list[int]:
    """Images due in each second since the start; empty for a closed loop."""
    times = load.times or array("q")
    series = [0] * (times[-1] // _NS_PER_S + 1 if times else 0)
    for time in times:
        series[time // _NS_PER_S] += load.batch
    if series and load.total is not None:
        series[-1] -= len(times) * load.batch - load.total
    return series
