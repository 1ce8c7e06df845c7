"""The plan of a load: each client's share of the images, and the schedule of ``--arrivals``."""

from __future__ import annotations

import argparse
import csv
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path

from torchpipe_py.backends.image.files import find_images, label_of
from torchpipe_py.files import read_bytes
from torchpipe_py.tools.report import ToolError

NS_PER_S = 1_000_000_000

_LONGEST_WARMUP = 50  # calls
_WARMUP_PART = 20  # one of so many parts of the calls, and of a duration
_CLOSED_CALLS_PER_S = 50_000  # more than a client can do; bounds a closed loop whose length is in seconds
_LEAST_DELAY_S = 1.0
_LATEST_FIRST_S = 3600.0
_LATEST_S = 1e7  # for any call: the report has a row for each second
_LEAST_RATE = 1e-300  # calls per second; avoids division by zero

Times = array
"""Ascending times in ns since the start; an array of type ``q``."""


# --- images and shares


@dataclass(frozen=True)
class Payload:
    """The content of requests: a body for each image, its expected label, or None if unknown, and its file."""

    bodies: list[bytes]
    labels: list[str | None]
    paths: list[Path]


def load_images(directory: Path, labelled: bool) -> Payload:
    """The images below ``directory``, if ``labelled`` with labels from their folders or names. Raises ``ToolError``."""
    try:
        paths = find_images(directory)
    except OSError as error:
        raise ToolError(f"--img_dir {error}") from error
    labels = [label_of(path, directory) if labelled else None for path in paths]
    try:
        return Payload([path.read_bytes() for path in paths], labels, paths)
    except OSError as error:
        raise ToolError(f"{error.filename}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True)
class Plan:
    """One client's part of the run: ``share`` images, ``batch`` per call, and ``warmup`` calls before the start.

    A client cycles through the images in order, beginning at ``first_image``, which differs between clients.
    """

    index: int
    share: int
    batch: int
    warmup: int
    first_image: int

    @property
    def calls(self) -> int:
        return -(-self.share // self.batch)


def make_plans(clients: int, batch: int, total: int, images: int, warmup: int | None) -> list[Plan]:
    """One plan per client; shares differ by one at most and sum to ``total`` images.

    ``warmup`` is in calls per client; None is 5 % of its calls, at least 1 and at most 50.
    """
    plans = []
    for index in range(clients):
        share = total // clients + (index < total % clients)
        warm = min(_LONGEST_WARMUP, max(1, -(-share // batch) // _WARMUP_PART)) if warmup is None else warmup
        plans.append(Plan(index, share, batch, warm, index * images // clients))
    return plans


# --- schedules, in seconds since the start


def due_times(options: argparse.Namespace) -> Iterator[float]:
    """The times at which calls of an open loop are due. To add a pattern, add a case here and to ``ARRIVALS``."""
    rate = None if options.rate is None else max(options.rate / options.request_batch, _LEAST_RATE)
    if options.arrivals == "replay":
        times = read_replay(options.replay, options.replay_column)
        return iter(times if rate is None else rescale(times, rate))
    assert rate is not None
    return poisson_times(rate, options.seed) if options.arrivals == "poisson" else constant_times(rate)


def constant_times(rate: float) -> Iterator[float]:
    """``rate`` calls per second, evenly spaced, the first at 0."""
    return (number / rate for number in count())


def poisson_times(rate: float, seed: int) -> Iterator[float]:
    """A Poisson process of ``rate`` calls per second; the same for the same seed."""
    gaps, now = random.Random(seed), 0.0
    while True:
        now += gaps.expovariate(rate)
        yield now


def read_replay(path: Path, column: str | None) -> list[float]:
    """Ascending times from a file; ``ToolError`` names the file and the bad line.

    Without a ``column`` each line is a number, and blank lines and comments after # are ignored. With one, the file is
    CSV with column names in its first line.
    """
    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ToolError(f"--replay {path}: {why}") from error
    times: list[float] = []
    for number, text in _lines(lines) if column is None else _column(path, lines, column):
        try:
            seconds = float(text)
        except ValueError:
            seconds = float("nan")
        latest, why = times[-1] if times else 0.0, ""
        if not abs(seconds) < float("inf"):
            why = f"{text!r} is not a number of seconds"
        elif seconds < latest:
            why = f"{text} is before {latest:.15g}; times must ascend from 0"
        if why:
            raise ToolError(f"--replay {path}, line {number}: {why}")
        times.append(seconds)
    if not times:
        raise ToolError(f"--replay {path}: it contains no times; expected one send time in seconds per line")
    if times[0] > _LATEST_FIRST_S:
        raise ToolError(f"--replay {path}: the first time is {times[0]:.0f} s; times count from the start of the run")
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
            raise ToolError(f"--replay_column {column}: {path} has no such column; it has: {known}")
        for row in rows:
            yield rows.line_num, (row[column] or "").strip()
    except csv.Error as error:  # an unclosed quotation mark
        raise ToolError(f"--replay {path}, after line {rows.line_num}: {error}") from error


def rescale(times: Sequence[float], rate: float) -> list[float]:
    """Scale a pattern to a mean of ``rate`` calls per second: n calls take n / rate seconds."""
    span = times[-1] - times[0]
    factor = (len(times) - 1) / rate / span if span > 0 else math.inf
    if not factor < math.inf:
        raise ToolError("--rate: the times of --replay are all the same; a rate needs at least two that differ")
    return [time * factor for time in times]


def repeated(times: Sequence[float], count: int) -> list[float]:
    """``count`` times: the pattern again and again, with gaps of 1 in between."""
    span = times[-1] - times[0] + 1
    return [times[number % len(times)] + number // len(times) * span for number in range(count)]


def cut(times: Iterable[float], calls: int | None, seconds: float | None) -> Times:
    """The first ``calls`` times, before ``seconds``; None means no limit. ``ToolError`` if a time is too late."""

    def in_ns(time: float) -> int:
        if not time < _LATEST_S:  # or NaN, if a replay was rescaled
            days = f"{_LATEST_S / 86400:.0f} days"
            raise ToolError(f"a call is due more than {days} after the start: the rate is too low")
        return round(time * NS_PER_S)

    if seconds is not None:
        times = takewhile(lambda time: time < seconds, times)
    return array("q", map(in_ns, islice(times, calls)))


def deal(times: Times, clients: int) -> list[Times]:
    """Split the schedule: call n belongs to client n, modulo their number.

    Together, the clients follow exactly the schedule: a Poisson process stays one, a constant rate is staggered, and
    each client has as much time between its calls as possible.
    """
    return [times[client::clients] for client in range(clients)]


def rate_of(times: Sequence[int]) -> float:
    """Calls per second: the number of gaps divided by their total time; 0 for a single call."""
    span = times[-1] - times[0] if times else 0
    return (len(times) - 1) / span * NS_PER_S if span else 0.0


# --- the whole run


@dataclass(frozen=True)
class Load:
    """The plans, and for an open loop ``times``, when its calls are due.

    After ``until``, in ns since the start, nothing more is sent; for a closed loop it is the run's length, or None.
    A client that has made one warm-up call begins no other after ``warmup_s`` seconds.
    """

    plans: list[Plan]
    batch: int
    times: Times | None
    until: int | None
    warmup_s: float

    @property
    def is_open(self) -> bool:
        return self.times is not None

    @property
    def total(self) -> int | None:
        """Images that will be sent; None if time ends the run."""
        return None if self.times is None and self.until is not None else sum(plan.share for plan in self.plans)

    @property
    def offered_rate(self) -> float | None:
        """Images per second of the schedule; None for a closed loop."""
        return None if self.times is None else rate_of(self.times) * self.batch

    def offered_images(self) -> list[int]:
        """Images due in each second since the start; empty for a closed loop."""
        times = self.times or array("q")
        series = [0] * (times[-1] // NS_PER_S + 1 if times else 0)
        for due in times:
            series[due // NS_PER_S] += self.batch
        if series and self.total is not None:
            series[-1] -= len(times) * self.batch - self.total
        return series

    def unsent(self, left: int) -> int:
        """The missing images of a client that gave up with ``left`` images of its plan; 0 if only time was given."""
        return left if self.total is not None else 0


def make_load(options: argparse.Namespace, images: int) -> Load:
    """The load that the options ask for."""
    clients, batch, total = options.request_client, options.request_batch, options.total_number
    warmup_s = (options.duration or math.inf) / _WARMUP_PART if options.warmup is None else math.inf
    if options.arrivals == "closed":
        until = None if options.duration is None else round(options.duration * NS_PER_S)
        if options.duration is not None:
            total = max(1, round(options.duration * _CLOSED_CALLS_PER_S)) * batch * clients
        return Load(make_plans(clients, batch, total, images, options.warmup), batch, None, until, warmup_s)
    times = cut(due_times(options), None if total is None else -(-total // batch), options.duration)
    calls = len(times)
    total = calls * batch if total is None else min(total, calls * batch)
    plans = []
    for plan in make_plans(clients, 1, calls, images, options.warmup):
        # The last call takes the rest of the total.
        short = calls * batch - total if calls and plan.index == (calls - 1) % clients else 0
        plans.append(Plan(plan.index, plan.share * batch - short, batch, plan.warmup, plan.first_image))
    last = times[-1] if times else 0
    # An open loop gives up once it is late by half its length, but at least 1 s and at most the timeout.
    least = min(options.timeout, _LEAST_DELAY_S)
    behind = round(min(max(last / 2, least * NS_PER_S), options.timeout * NS_PER_S))
    return Load(plans, batch, times, last + behind, warmup_s)
