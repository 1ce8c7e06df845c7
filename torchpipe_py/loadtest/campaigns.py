"""Several runs: one for each point of a sweep, or as many as a search for the highest rate needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.report.verdict import (
    EXIT_CANNOT_RUN,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SLO_MISSED,
    worst,
)
from torchpipe_py.loadtest.search import TOLERANCE, Found, search_rate
from torchpipe_py.loadtest.sweeps import Sweep

Run = Callable[[argparse.Namespace], dict[str, Any]]
"""Runs what the options say and returns the report."""

Announce = Callable[[str, dict[str, Any]], None]
"""Is told of each run that has ended: its name and its report."""


class Stopped(Exception):
    """Nothing more is run: someone ended the run that was under way, or a later one could not start."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class Log:
    """The reports of the runs that are done. What ends a run early ends them all, but does not take those away."""

    def __init__(self, run: Run, announce: Announce) -> None:
        self.runs: list[dict[str, Any]] = []
        self._run, self._announce = run, announce

    def run(self, name: str, options: argparse.Namespace) -> dict[str, Any]:
        """One more run. Raises `Stopped`; and what the first run raises, for there is nothing to report then."""
        try:
            report = self._run(options)
        except (KeyboardInterrupt, CannotRunError) as error:
            if not self.runs:
                raise
            by_hand = isinstance(error, KeyboardInterrupt)
            why, status = ("interrupted", EXIT_INTERRUPTED) if by_hand else (str(error), EXIT_CANNOT_RUN)
            raise Stopped(f"{why} before {name}", status) from error
        report["point"] = name
        self.runs.append(report)
        self._announce(name, report)
        if report["interrupted"]:
            raise Stopped(f"interrupted at {name}", EXIT_INTERRUPTED)
        return report


def changed(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """The same options but for some."""
    return argparse.Namespace(**{**vars(options), **changes})


def run_sweep(run: Run, options: argparse.Namespace, sweep: Sweep, announce: Announce) -> dict[str, Any]:
    """A run for each point; one that is interrupted, or cannot start, ends the sweep with what is done."""
    log, stopped = Log(run, announce), None
    try:
        for value in sweep.values:
            log.run(f"{sweep.name} {value:g}", changed(options, **{sweep.option: value}))
    except Stopped as error:
        stopped = error
    return {
        "kind": "sweep",
        "sweep": {"name": sweep.name, "values": sweep.values},
        "runs": log.runs,
        "stopped": None if stopped is None else str(stopped),
        "exit_status": worst(report["exit_status"] for report in log.runs) if stopped is None else stopped.status,
    }


class Probing:
    """The probes of a search."""

    def __init__(self, log: Log, options: argparse.Namespace) -> None:
        self._log, self._options = log, options

    def closed_loop(self) -> float:
        """The throughput in images per second without a rate, to look around."""
        report = self._log.run("closed loop", changed(self._options, arrivals="closed", rate=None, slo_p99=None))
        if not report["images_ok"]:
            raise CannotRunError(f"--search: no image has a result in a closed loop: {report['errors']}")
        goodput: float = report["goodput"]
        return goodput

    def holds(self, rate: float) -> bool:
        """Whether a run at `rate` meets the SLO, stable and without an error."""
        report = self._log.run(f"rate {rate:.4g}", changed(self._options, rate=rate))
        return bool(report["exit_status"] == EXIT_OK)


def run_search(run: Run, options: argparse.Namespace, announce: Announce) -> dict[str, Any]:
    """The highest rate that holds the SLO; a search that is stopped has no result, but its runs."""
    log, found, stopped = Log(run, announce), Found(), None
    probing = Probing(log, options)
    try:
        found = search_rate(probing.holds, probing.closed_loop())
    except Stopped as error:
        stopped = error
    status = EXIT_SLO_MISSED if found.best is None else EXIT_OK
    return {
        "kind": "search",
        "search": {
            "slo_p99_ms": options.slo_p99,
            "arrivals": options.arrivals,
            "best_rate": found.best,
            "lowest_rate_that_failed": found.too_much,
            "tolerance": TOLERANCE,
            "valid": all(report["valid"] for report in log.runs),
        },
        "runs": log.runs,
        "stopped": None if stopped is None else str(stopped),
        "exit_status": status if stopped is None else stopped.status,
    }
