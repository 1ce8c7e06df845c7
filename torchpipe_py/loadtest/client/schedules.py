"""Pure: when the calls of an open loop are due, as ns since the start."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, takewhile

from torchpipe_py.loadtest.errors import CannotRunError

Times = array
"""Ascending times in ns since the start; an array of type `q`."""

_NS_PER_S = 1e9


def constant_times(rate: float) -> Iterator[float]:
    """Seconds: `rate` calls per second, evenly spaced, the first at 0."""
    return (number / rate for number in count())


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """Seconds: a Poisson process of `rate` calls per second; the same for the same seed."""
    gaps = random.Random(seed)
    now = 0.0
    while True:
        now += gaps.expovariate(rate)
        yield now


def rescale(times: Sequence[float], rate: float) -> list[float]:
    """The same pattern at a mean of `rate` calls per second: n calls take n / rate seconds.

    Raises `CannotRunError` when all times are the same, which no factor can spread.
    """
    span = times[-1] - times[0]
    if span <= 0:
        raise CannotRunError("--rate: the times of --replay are all the same; a rate needs at least two that differ")
    factor = (len(times) - 1) / rate / span
    return [time * factor for time in times]


def cut(times: Iterable[float], calls: int | None, seconds: float | None) -> Times:
    """The first `calls`, and of them those before `seconds`; None is no limit."""
    if seconds is not None:
        times = takewhile(lambda time: time < seconds, times)
    return array("q", (round(time * _NS_PER_S) for time in islice(times, calls)))


def deal(times: Times, clients: int) -> list[Times]:
    """Each client's share: one schedule is dealt out in turn.

    So what all clients send together is exactly the schedule, whatever their number: a Poisson process stays one, a
    constant rate is staggered. And each client has the most time between its calls that is to be had.
    """
    return [times[client::clients] for client in range(clients)]


def rate_of(times: Sequence[int]) -> float:
    """Calls per second: the number of gaps divided by the time they take; of one call, 0."""
    span = times[-1] - times[0] if times else 0
    return (len(times) - 1) / span * _NS_PER_S if span else 0.0
