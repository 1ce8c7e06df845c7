"""The reliability table: each event done to a service in its short form, and each judge shown to fail.

The long forms are ``bash scripts/soak.sh``. With ``CHAOS_SHARED=1`` set, two workers share all nodes.
Times are the table's bounds, or coarser ones where the machine is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from pathlib import Path

import pytest

from chaos import scenarios
from chaos.service import MEBIBYTE
from chaos.tally import Report

AT_ONCE = 4

ROWS: dict[str, Callable[[], Report]] = {
    "overload": lambda: scenarios.overload(p99=20.0, share=0.2, within=60.0, more_seconds=60.0),
    "worker killed, one of one": lambda: scenarios.worker_killed(1, kills=1, within=60.0, answer_within=60.0),
    "worker killed, one of two": lambda: scenarios.worker_killed(
        2, kills=2, every=1.2, within=60.0, answer_within=60.0
    ),
    "clients gone": lambda: scenarios.clients_gone(within=60.0),
    "malformed bytes": scenarios.malformed,
    "oversize": scenarios.oversize,
    "SIGTERM": lambda: scenarios.stopped(within=60.0),
    "SIGTERM with a thousand idle clients": lambda: scenarios.stopped(requests=20, idle=900, within=60.0),
    "corrupt item": scenarios.corrupt_item,
    "soak": lambda: scenarios.soak(4.0, most=4 * MEBIBYTE),
    "concurrency": scenarios.concurrency,
    "mixed": lambda: scenarios.mixed(within=60.0),
    "hang": lambda: scenarios.hanging(3.0, answer_within=60.0),
    "cannot start: raises": lambda: scenarios.cannot_start("ChaosRaise", within=150.0, word="planted failure"),
    "cannot start: crashes": lambda: scenarios.cannot_start(
        "ChaosCrash", within=150.0, word="given up after 5 attempts"
    ),
    "crash loop": scenarios.crash_loop,
    "bad reload": lambda: scenarios.bad_reload(60.0),
    "supervisor killed": lambda: scenarios.supervisor_killed(within=60.0),
}

CONTROLS: dict[str, tuple[Callable[[], Report], str]] = {
    "no limit": (lambda: scenarios.overload(1.0, limit=1000), "nothing was rejected"),
    "deaths forgotten": (
        lambda: scenarios.worker_killed(1, kills=1, every=0.5, answer_within=1.5, fault="forget_deaths"),
        "without an answer",
    ),
    "nobody in place of the dead": (
        lambda: scenarios.worker_killed(1, kills=1, every=0.5, answer_within=1.5, fault="leave_workers_dead"),
        "no request was served",
    ),
    "connections kept": (
        lambda: scenarios.clients_gone(200, fault="keep_connections", within=1.0),
        "connections open is",
    ),
    "death by garbage": (lambda: scenarios.malformed(200, fault="die_of_garbage"), "the workers is"),
    "garbage kept": (lambda: scenarios.malformed(2000, fault="keep_garbage"), "memory, MiB is"),
    "limit off by one": (lambda: scenarios.oversize(served_limit=MEBIBYTE - 1), "the answers is"),
    "hasty stop": (lambda: scenarios.stopped(fault="drain_hastily"), "the exit code is"),
    "neighbours spoiled": (
        lambda: scenarios.corrupt_item(positions=[3], fault="spoil_neighbours"),
        "positions [3] change",
    ),
    "leak": (lambda: scenarios.soak(3.0, most=4 * MEBIBYTE, leak_bytes=2**16), "resident memory grew"),
    "results crossed": (lambda: scenarios.concurrency(fault="cross_results"), "another request's"),
    # A worker that is replaced before its 200th reply loses none.
    "replies lost": (
        lambda: scenarios.mixed(1000, 1.0, kill_every=inf, reload_every=inf, within=1.0, fault="lose_replies"),
        "without an answer",
    ),
    "replies repeated": (
        lambda: scenarios.mixed(1000, 1.0, kill_every=inf, reload_every=inf, fault="repeat_replies"),
        "a second one",
    ),
    "no look for hangs": (lambda: scenarios.hanging(0, answer_within=2.0), "without an answer"),
    "starts after all": (lambda: scenarios.cannot_start("ChaosEcho", within=1.0), "the exit code is"),
    "restarts without end": (lambda: scenarios.crash_loop(60.0, fault="restart_without_end"), "attempts is"),
    "reloads anything": (lambda: scenarios.bad_reload(0.5, fault="reload_anything"), "the workers is"),
    "orphans stay": (
        lambda: scenarios.supervisor_killed(fault="outlive_the_supervisor", within=1.0),
        "processes left behind is",
    ),
}


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Report]]]:
    """Of the tests that were chosen; a few at a time, since each mostly waits."""
    runs = {**ROWS, **{name: run for name, (run, _) in CONTROLS.items()}}
    chosen = [one.callspec.params["name"] for one in request.session.items if one.path == Path(__file__)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(runs[name]) for name in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", ROWS)
def test_the_service_endures(reports, name):
    report = reports[name].result()
    assert not report.problems, str(report)


@pytest.mark.parametrize("name", CONTROLS)
def test_the_judge_finds_a_planted_fault(reports, name):
    report = reports[name].result()
    assert any(CONTROLS[name][1] in one for one in report.problems), str(report)
