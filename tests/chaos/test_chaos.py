"""The reliability table: each event done to a service in its short form. The long forms are ``bash scripts/soak.sh``.

Times are coarser than the table's bounds: the machine may be busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from chaos import scenarios
from chaos.clients import Tally, answered, closed_by_kills
from chaos.scenarios import Report

AT_ONCE = 4

ROWS: dict[str, Callable[[], Report]] = {
    "overload": scenarios.overload,
    "clients gone": scenarios.clients_gone,
    "malformed bytes": scenarios.malformed,
    "soak": scenarios.soak,
    "mixed": scenarios.mixed,
    "hang": scenarios.hanging,
    "cannot start: raises": lambda: scenarios.cannot_start("ChaosRaise", "planted failure"),
    "cannot start: crashes": lambda: scenarios.cannot_start("ChaosCrash", "given up after 5 attempts"),
    "crash loop": scenarios.crash_loop,
    "bad reload": scenarios.bad_reload,
    "models": scenarios.models,
    "supervisor killed": scenarios.supervisor_killed,
}


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Report]]]:
    """Of the tests that were chosen; a few at a time, since each mostly waits."""
    ours = [one for one in request.session.items if one.path == Path(__file__) and hasattr(one, "callspec")]
    chosen = [name for one in ours if (name := one.callspec.params.get("name")) in ROWS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(ROWS[name]) for name in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", ROWS)
def test_the_service_endures(reports, name):
    report = reports[name].result()
    assert not report.problems, str(report)


def test_a_leak_is_found():
    assert "resident memory" in "".join(scenarios.soak(3.0, leak_bytes=2**16).problems)


def test_what_is_wrong_with_answers():
    tally = Tally()
    for end in ("ok", "abandoned", "worker_died", "connection_lost"):
        tally.add(end, 0.0)
    assert answered(Tally(tally.ends), 1.0, ("ok", "worker_died")) == []
    assert answered(Tally(tally.ends), 1.0) == ["answers {'worker_died': 1}"]
    assert len(answered(tally, 1.0, ("ok", "worker_died"))) == 1, "they took longer"
    assert answered(Tally(), 1.0) == ["no request was served"]
    assert closed_by_kills([(9.0, 10.5), (11.0, 99.0)], [(10.0, 13.0)]) == []
    assert len(closed_by_kills([(9.0, 9.9), (13.1, 14.0)], [(10.0, 13.0)])) == 1
