"""What counts as waiting at a node: requests that are still wanted."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.waits import wait_queued

from torchpipe_py import pipe


@pytest.mark.parametrize(
    ("most", "node", "more"),
    [
        (1, {}, {}),
        (2, {"batching_timeout": 1}, {}),
        (1, {}, {"priority": 1}),
        (1, {"ordered_by": "camera"}, {"camera": "door"}),
    ],
    ids=["single", "batches", "low priority", "in order"],
)
def test_cancelled_requests_do_not_count_as_queued(
    restored: Register, most: int, node: dict[str, Any], more: dict[str, Any]
) -> None:
    gate = Gate(most, blocks=lambda data: data == 0)
    restored.register_backend(gate.backend, "Gated")
    with pipe({"backend": "Gated", **node}) as run, gate:
        held = gate.hold(run, {"data": 0, **more})
        waiting = [run.submit({"data": number, **more}) for number in range(1, 5)]
        wait_queued(run, 4)
        for future in waiting[:3]:
            assert future.cancel()
        wait_queued(run, 1)
        assert run.stats()["inflight"] == 2
        gate.open()
        assert (held.result()["result"], waiting[3].result()["result"]) == (0, 4)
    assert [number for batch in gate.batches for number in batch] == [0, 4]
