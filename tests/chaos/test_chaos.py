"""The reliability table: each event done to a service in its short form. The long forms are ``bash scripts/soak.sh``.

Times are coarser than the table's bounds: the machine may be busy.
"""

from __future__ import annotations

import pytest

from chaos import scenarios

EVENTS = {
    event.__name__.replace("_", " "): event
    for event in (
        scenarios.overload, scenarios.clients_gone, scenarios.malformed, scenarios.soak, scenarios.mixed,
        scenarios.hanging, scenarios.crash_loop, scenarios.bad_reload, scenarios.models, scenarios.supervisor_killed,
    )
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EVENTS, *scenarios.CANNOT_START])
def test_the_service_endures(name):
    {**EVENTS, **scenarios.CANNOT_START}[name]()
