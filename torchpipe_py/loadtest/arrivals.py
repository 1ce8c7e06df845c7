"""When clients send: the load patterns of ``--arrivals``.

A pattern gives the seconds at which calls are due: a case of `due_times`, and a name in `options.ARRIVALS`.
`make_load` cuts such a schedule to the run's length and deals it out to the clients.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from typing import NamedTuple, Protocol

from torchpipe_py.files import read_bytes
from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.plans import Plan, make_plans

HEAD_START_NS = 100_000_000  # from the opening of the gate to the start, for all clients to be awake by then
HEAD_START_EACH_NS = 1_000_000  # and for each of them

_CLOSED_CALLS_PER_S = 50_000  # more than one client can do: room for a closed loop whose length is given in seconds
_LEAST_DELAY_S = 1.0
_LATEST_FIRST_S = 3600.0
_LATEST_S = 1e7  # for any call: the report has figures for each second
_LEAST_RATE = 1e-300  # of calls that can be reckoned with; any after the first is refused
_LOOK_S = 0.25
_NS_PER_S = 1_000_000_000

Times = array
"""Ascending times in ns since the start; an array of type `q`."""


# --- schedules: pure, in seconds since the start


def due_times(options: argparse.Namespace) -> Iterator[float]:
    """When the calls of an open loop are due; raises `CannotRunError` for a replay that is none."""
    rate = None if options.rate is None else max(options.rate / options.request_batch, _LEAST_RATE)
    if options.arrivals == "replay":
        times = read_replay(options.replay, options.replay_column)
        return iter(times if rate is None else rescale(times, rate))
    assert rate is not None
    if options.arrivals == "constant":
        return constant_times(rate)
    if options.arrivals == "poisson":
        return poisson_times(rate, options.seed)
    raise ValueError(f"no schedule for --arrivals {options.arrivals}")


def constant_times(rate: float) -> Iterator[float]:
    """`rate` calls per second, evenly spaced, the first at 0."""
    return (number / rate for number in count())


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """A Poisson process of `rate` calls per second; the same for the same seed."""
    gaps = random.Random(seed)
    now = 0.0
    while True:
        now += gaps.expovariate(rate)
        yield now


def read_replay(path: Path, column: str | None) -> list[float]:
    """Ascending times of a file; `CannotRunError` names the file and the line that is wrong.

    Without a `column` each line is a number; blank ones and what follows a # do not count. With one, the file is a CSV
    file whose first line names the columns.
    """
    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise CannotRunError(f"--replay {path}: {why}") from error
    times: list[float] = []
    for number, text in _lines(lines) if column is None else _column(path, lines, column):
        try:
            seconds = float(text)
        except ValueError:
            seconds = float("nan")
        if not abs(seconds) < float("inf"):
            raise CannotRunError(f"--replay {path}, line {number}: {text!r} is not a number of seconds")
        latest = times[-1] if times else 0.0
        if seconds < latest:
            why = f"{text} is before {latest:.15g}; times must ascend from 0"
            raise CannotRunError(f"--replay {path}, line {number}: {why}")
        times.append(seconds)
    if not times:
        raise CannotRunError(f"--replay {path}: no time in it; one send time in seconds per line is needed")
    if times[0] > _LATEST_FIRST_S:
        why = f"the first time is {times[0]:.0f} s; times count from the start of the run"
        raise CannotRunError(f"--replay {path}: {why}")
    return times


def _lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        if text := line.partition("#")[0].strip():
            yield number, text


def _column(path: Path, lines: Iterable[str], column: str) -> Iterator[tuple[int, str]]:
    rows = csv.DictReader(lines)
    try:
        if column not in (rows.fieldnames or ()):
            known = ", ".join(rows.fieldnames or ()) or "none"
            raise CannotRunError(f"--replay_column {column}: {path} has no such column; it has: {known}")
        for row in rows:
            yield rows.line_num, (row[column] or "").strip()
    except csv.Error as error:  # a quotation mark that nothing closes
        raise CannotRunError(f"--replay {path}, after line {rows.line_num}: {error}") from error


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
    """The first `calls`, and of them those before `seconds`; None is no limit. `CannotRunError`: it is too long."""
    if seconds is not None:
        times = takewhile(lambda time: time < seconds, times)
    return array("q", (_ns(time) for time in islice(times, calls)))


def _ns(time: float) -> int:
    if not time < _LATEST_S:  # or no number, where a replay is rescaled
        raise CannotRunError(
            f"a call is due more than {_LATEST_S / 86400:.0f} days after the start: the rate is too low"
        )
    return round(time * _NS_PER_S)


def deal(times: Times, clients: int) -> list[Times]:
    """Each client's share: call n is client n's, modulo their number.

    So what all clients send together is exactly the schedule, whatever their number: a Poisson process stays one, a
    constant rate is staggered. And each client has the most time between its calls that is to be had.
    """
    return [times[client::clients] for client in range(clients)]


def rate_of(times: Sequence[int]) -> float:
    """Calls per second: the number of gaps divided by the time they take; of one call, 0."""
    span = times[-1] - times[0] if times else 0
    return (len(times) - 1) / span * _NS_PER_S if span else 0.0


# --- what a client follows


class CallTime(NamedTuple):
    """A call's times, in ns of `perf_counter_ns`: when it was due, from which its latency counts, and when it goes."""

    due: int
    sent: int


class Arrivals(Protocol):
    """One client's policy; used by one process."""

    is_open: bool
    """Whether calls are due at times that do not depend on the answers."""

    def wait_next(self) -> CallTime | None:
        """Blocks until the next call is due; None when there is no point in sending another one."""


class ClosedLoop:
    """The next call is due when the previous one is answered, until the time `until`, in ns of `perf_counter_ns`."""

    is_open = False

    def __init__(self, until: int | None) -> None:
        self._until = until

    def wait_next(self) -> CallTime | None:
        now = time.perf_counter_ns()
        return None if self._until is not None and now >= self._until else CallTime(now, now)


class OpenLoop:
    """Calls are due at `times`, in ns since `start`, whatever became of those before; after `until` none is sent.

    A call whose time passed while the one before it was under way is sent at once, late.
    """

    is_open = True

    def __init__(self, times: Sequence[int], start: int, until: int, is_stopping: Callable[[], bool]) -> None:
        self._times, self._start, self._until = iter(times), start, until
        self._is_stopping = is_stopping

    def wait_next(self) -> CallTime | None:
        time_due = next(self._times, None)
        if time_due is None:
            return None
        due = self._start + time_due
        while (now := time.perf_counter_ns()) < due:
            if self._is_stopping():
                return None
            time.sleep(min((due - now) / 1e9, _LOOK_S))
        return None if now >= self._until else CallTime(due, now)


class LagMeter:
    """Tells how much of a late send is its own fault, be it that of an earlier call that still lasts."""

    def __init__(self) -> None:
        self._free = 0
        self._lag = 0

    def sent(self, call: CallTime) -> tuple[int, int]:
        """How late a send was, and by how much a client that always gets CPU at once would have been earlier; in ns.

        The delay after the time when the client was free and the call due is added to what is left of earlier ones: a
        client cannot be further behind the ideal one than it is behind its schedule.
        """
        late = call.sent - call.due
        self._lag = min(late, self._lag + call.sent - max(call.due, self._free))
        return late, self._lag

    def free(self, now: int) -> None:
        """The client is done with a call; `now` in ns of `perf_counter_ns`."""
        self._free = now


# --- the whole run


@dataclass(frozen=True)
class Load:
    """The plans, and for an open loop `times`, when its calls are due.

    After `until`, in ns since the start, nothing is sent any more; for a closed loop it is the run's length, or None.
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

    def offered_images(self) -> list[int]:
        """Images due in each second since the start; empty for a closed loop."""
        times = self.times or array("q")
        series = [0] * (times[-1] // _NS_PER_S + 1 if times else 0)
        for due in times:
            series[due // _NS_PER_S] += self.batch
        if series and self.total is not None:
            series[-1] -= len(times) * self.batch - self.total
        return series

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
    clients, batch, total = options.request_client, options.request_batch, options.total_number
    if options.arrivals == "closed":
        until = None if options.duration is None else round(options.duration * _NS_PER_S)
        if options.duration is not None:
            total = max(1, round(options.duration * _CLOSED_CALLS_PER_S)) * batch * clients
        return Load(make_plans(clients, batch, total, images, options.warmup), batch, None, until)
    times = cut(due_times(options), None if total is None else -(-total // batch), options.duration)
    calls = len(times)
    total = calls * batch if total is None else min(total, calls * batch)
    plans = []
    for plan in make_plans(clients, 1, calls, images, options.warmup):
        # The last call takes what is left of the total.
        short = calls * batch - total if calls and plan.index == (calls - 1) % clients else 0
        plans.append(Plan(plan.index, plan.share * batch - short, batch, plan.warmup, plan.first_image))
    last = times[-1] if times else 0
    return Load(plans, batch, times, last + _longest_delay(last, options.timeout))


def _longest_delay(last: int, timeout: float) -> int:
    """How far an open loop may fall behind before it gives up: half its length, but 1 s to `timeout`; in ns."""
    least = min(timeout, _LEAST_DELAY_S)
    return round(min(max(last / 2, least * _NS_PER_S), timeout * _NS_PER_S))
