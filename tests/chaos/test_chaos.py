"""The reliability table: each event done to a service in its short form. The long forms are ``bash scripts/soak.sh``.

Times are coarser than the table's bounds: the machine may be busy.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chaos import scenarios
from chaos.scenarios import Report

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


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_the_service_endures(name):
    report = ROWS[name]()
    assert not report.problems, str(report)
