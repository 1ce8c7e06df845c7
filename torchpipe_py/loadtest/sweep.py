"""Several runs: one for each point of ``--sweep``, or as many as a ``--search`` for the highest rate needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.measure.verdict import (
    EXIT_CANNOT_RUN,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SLO_MISSED,
    worst,
)

VARIABLES = {"clients": "request_client", "rate": "rate"}
MOST_POINTS = 1000

TOLERANCE = 0.03  # the rate that was found and the next one tried that fails differ by no more
MOST_PROBES = 20

_VALID = "clients=1,2,5 or rate=100:400:100 (start:stop:step, stop included)"

_FIRST = 0.8  # of the estimate
_UP = 1.25
_DOWN = 0.5
_LOWEST = 1 / 256  # of the estimate: below it nothing is looked for


# --- pure: the points of a sweep


@dataclass(frozen=True)
class Sweep:
    """One run for each value of an option; `name` is what the command line calls it."""

    name: str
    values: list[float]

    @property
    def option(self) -> str:
        return VARIABLES[self.name]


def parse_sweep(text: str) -> Sweep:
    """`NAME=VALUES`; raises `CannotRunError`. Clients are whole numbers, from 1 to 10 000; rates are above 0."""
    name, _, values = text.partition("=")
    try:
        points = [point for part in values.split(",") for point in _points(part)] if name in VARIABLES else []
    except (ValueError, OverflowError):
        points = []
    if not points:
        raise CannotRunError(f"--sweep {text}: valid are {_VALID}")
    if len(points) > MOST_POINTS:
        raise CannotRunError(f"--sweep {text}: {len(points)} points; 1 to {MOST_POINTS} are valid")
    return Sweep(name, [_checked(name, point) for point in points])


def _points(part: str) -> list[float]:
    if ":" not in part:
        return [float(part)]
    start, stop, step = map(float, part.split(":"))
    if step <= 0 or stop < start:
        raise ValueError(part)
    count = int((stop - start) / step + 1e-9) + 1
    if count > MOST_POINTS:
        raise OverflowError(part)
    return [start + index * step for index in range(count)]


def _checked(name: str, point: float) -> float:
    if name == "rate":
        if not 0 < point < 1e6:
            raise CannotRunError(f"--sweep rate={point:g}: must be more than 0 and less than a million")
        return point
    if point != int(point) or not 1 <= point <= 10_000:
        raise CannotRunError(f"--sweep clients={point:g}: must be a whole number between 1 and 10000")
    return int(point)


# --- pure: the highest rate that holds, found with few runs


@dataclass
class Search:
    """`best` is the highest rate that held, None where none did; `too_much` the lowest that did not.

    `probes` are all rates tried, in their order, and whether they held.
    """

    best: float | None = None
    too_much: float | None = None
    probes: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def is_close(self) -> bool:
        """Whether the two bounds are so near that another probe would say nothing."""
        return self.best is not None and self.too_much is not None and self.too_much <= self.best * (1 + TOLERANCE)

    def next_rate(self, rate: float) -> float:
        """What to try after `rate`."""
        if self.best is None:
            return rate * _DOWN
        return rate * _UP if self.too_much is None else (self.best + self.too_much) / 2


def search_rate(holds: Callable[[float], bool], estimate: float) -> Search:
    """Brackets the limit from `estimate`, in images per second, then halves the bracket until it is `TOLERANCE` wide.

    `holds(rate)` runs a probe. It is noisy near the limit: the highest rate that held is the answer, and no rate is
    tried twice.
    """
    search = Search()
    rate = estimate * _FIRST
    while len(search.probes) < MOST_PROBES and not search.is_close and rate >= estimate * _LOWEST:
        held = holds(rate)
        search.probes.append((rate, held))
        if held:
            search.best = rate
        else:
            search.too_much = rate
        rate = search.next_rate(rate)
    return search


# --- the runs

Run = Callable[[argparse.Namespace], dict[str, Any]]
"""Runs what the options say and returns the report."""

Announce = Callable[[str, dict[str, Any]], None]
"""Is told of each run that has ended: its name and its report."""


class Stopped(Exception):
    """Nothing more is run: someone ended the run that was under way, or a later one could not start."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class Series:
    """Runs of the same options but for some, and their reports. What ends a run early ends them all."""

    def __init__(self, run: Run, options: argparse.Namespace, announce: Announce) -> None:
        self.reports: list[dict[str, Any]] = []
        self._run, self._options, self._announce = run, options, announce

    def run(self, name: str, **changes: Any) -> dict[str, Any]:
        """One more run. Raises `Stopped`; and what the first run raises, for there is nothing to report then."""
        try:
            report = self._run(argparse.Namespace(**{**vars(self._options), **changes}))
        except (KeyboardInterrupt, CannotRunError) as error:
            if not self.reports:
                raise
            by_hand = isinstance(error, KeyboardInterrupt)
            why, status = ("interrupted", EXIT_INTERRUPTED) if by_hand else (str(error), EXIT_CANNOT_RUN)
            raise Stopped(f"{why} before {name}", status) from error
        report["point"] = name
        self.reports.append(report)
        self._announce(name, report)
        if report["interrupted"]:
            raise Stopped(f"interrupted at {name}", EXIT_INTERRUPTED)
        return report

    def fields(self, status: int, stopped: Stopped | None) -> dict[str, Any]:
        """The report's part that a sweep and a search have in common; `status` is that of one that was not stopped."""
        if stopped is None:
            return {"runs": self.reports, "stopped": None, "exit_status": status}
        return {"runs": self.reports, "stopped": str(stopped), "exit_status": stopped.status}


def run_sweep(run: Run, options: argparse.Namespace, sweep: Sweep, announce: Announce) -> dict[str, Any]:
    """A run for each point; one that is interrupted, or cannot start, ends the sweep with what is done."""
    series, stopped = Series(run, options, announce), None
    try:
        for value in sweep.values:
            series.run(f"{sweep.name} {value:g}", **{sweep.option: value})
    except Stopped as error:
        stopped = error
    status = EXIT_OK if stopped else worst(report["exit_status"] for report in series.reports)
    about = {"kind": "sweep", "sweep": {"name": sweep.name, "values": sweep.values}}
    return about | series.fields(status, stopped)


def run_search(run: Run, options: argparse.Namespace, announce: Announce) -> dict[str, Any]:
    """The highest rate that holds the SLO; a search that is stopped has no result, but its runs."""
    series, search, stopped = Series(run, options, announce), Search(), None

    def holds(rate: float) -> bool:
        """Whether a run at `rate` meets the SLO, stable and without an error."""
        return bool(series.run(f"rate {rate:.4g}", rate=rate)["exit_status"] == EXIT_OK)

    try:
        closed = series.run("closed loop", arrivals="closed", rate=None, slo_p99=None)
        if not closed["images_ok"]:
            raise CannotRunError(f"--search: no image has a result in a closed loop: {closed['errors']}")
        search = search_rate(holds, closed["goodput"])
    except Stopped as error:
        stopped = error
    about = {
        "slo_p99_ms": options.slo_p99,
        "arrivals": options.arrivals,
        "best_rate": search.best,
        "lowest_rate_that_failed": search.too_much,
        "tolerance": TOLERANCE,
        "valid": all(report["valid"] for report in series.reports),
    }
    status = EXIT_SLO_MISSED if search.best is None else EXIT_OK
    return {"kind": "search", "search": about} | series.fields(status, stopped)
