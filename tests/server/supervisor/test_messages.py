"""Pure: what a worker may tell of its way to an engine process."""

from __future__ import annotations

from typing import Any

import pytest
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.supervisor.messages import UnexpectedMessageError, check_message

from torchpipe_py.proc.shared.client import HandOverTimes

TIMES = HandOverTimes().as_dict()


def told(**more: Any) -> dict[str, Any]:
    summary = RequestCounters("").summary()
    stats = {"inflight": 0, "nodes": {}, "requests": summary, "log_lines_dropped": 0, "gpus": [], **more}
    return {"type": "stats", "stats": stats}


def test_a_worker_with_and_one_without_shared_nodes():
    check_message(told())
    check_message(told(hand_over=TIMES))


@pytest.mark.parametrize(
    "hand_over",
    [
        *(None, [], {}, {"requests": 1}),
        *({**TIMES, "requests": "1"}, {**TIMES, "there_ms": float("nan")}, {**TIMES, "back_ms": -1.0}),
        {**TIMES, "in_engine_ms": 2.0**63},
    ],
)
def test_times_that_are_none(hand_over):
    with pytest.raises(UnexpectedMessageError, match=r"stats\.hand_over"):
        check_message(told(hand_over=hand_over))
