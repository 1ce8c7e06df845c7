"""Several runs: one for each point of a sweep, or as many as a search for the highest rate needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torchpipe_py.loadtest.errors import CannotRunError

from .search import TOLERANCE, Found, search_rate
from .sweeps import Sweep
from .verdict import EXIT_INTERRUPTED, EXIT_OK, EXIT_SLO_MISSED, worst

Run = Callable[[argparse.Namespace], dict[str, Any]]
"""Runs what the options say and returns the report."""

Announce = Callable[[str, dict[str, Any]], None]
"""Is told of each run that has ended: its name and its report."""


class _Interrupted(Exception):
    """Someone ended the run that was under way, and so all of them."""


def changed(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """The same options but for some."""
    return argparse.Namespace(**{**vars(options), **changes})


def run_sweep(run: Run, options: argparse.Namespace, sweep: Sweep, announce: Announce) -> dict[str, Any]:
    """A run for each point; an interrupt ends the sweep with what is done."""
    runs: list[dict[str, Any]] = []
    for value in sweep.values:
        report = run(changed(options, **{sweep.option: value}))
        report["point"] = f"{sweep.name} {value:g}"
        runs.append(report)
        announce(report["point"], report)
        if report["interrupted"]:
            break
    return {
        "kind": "sweep",
        "sweep": {"name": sweep.name, "values": sweep.values},
        "runs": runs,
        "exit_status": worst(report["exit_status"] for report in runs),
    }


class Probing:
    """Runs the probes of a search and keeps their reports."""

    def __init__(self, run: Run, options: argparse.Namespace, announce: Announce) -> None:
        self.runs: list[dict[str, Any]] = []
        self._run, self._options, self._announce = run, options, announce

    def closed_loop(self) -> float:
        """The throughput in images per second without a rate, to look around."""
        report = self._do("closed loop", arrivals="closed", rate=None, slo_p99=None)
        if not report["images_ok"]:
            raise CannotRunError(f"--search: no image has a result in a closed loop: {report['errors']}")
        goodput: float = report["goodput"]
        return goodput

    def holds(self, rate: float) -> bool:
        """Whether a run at `rate` meets the SLO, stable and without an error."""
        report = self._do(f"rate {rate:.4g}", rate=rate)
        return report["exit_status"] == EXIT_OK

    def _do(self, name: str, **changes: Any) -> dict[str, Any]:
        report = self._run(changed(self._options, **changes))
        report["point"] = name
        self.runs.append(report)
        self._announce(name, report)
        if report["interrupted"]:
            raise _Interrupted
        return report


def run_search(run: Run, options: argparse.Namespace, announce: Announce) -> dict[str, Any]:
    """The highest rate that holds the SLO; an interrupt ends the search without a result."""
    probing = Probing(run, options, announce)
    found, interrupted = Found(), False
    try:
        found = search_rate(probing.holds, probing.closed_loop())
    except _Interrupted:
        interrupted = True
    status = EXIT_INTERRUPTED if interrupted else EXIT_SLO_MISSED if found.best is None else EXIT_OK
    return {
        "kind": "search",
        "search": {
            "slo_p99_ms": options.slo_p99,
            "arrivals": options.arrivals,
            "best_rate": found.best,
            "lowest_rate_that_failed": found.too_much,
            "tolerance": TOLERANCE,
            "valid": all(report["valid"] for report in probing.runs),
            "interrupted": interrupted,
        },
        "runs": probing.runs,
        "exit_status": status,
    }
