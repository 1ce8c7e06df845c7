"""Each request is counted under its model, protocol and outcome, whichever door it came through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit.doors import DOORS, Asked, House, house
from kit.waits import eventually

from torchpipe_py import NoResult, register_backend
from torchpipe_py.serving import protocol_of

CONFIG = {"first": {"backend": "Identity"}, "second": {"backend": "Python[Nothing]"}}
PROTOCOLS = {
    **{"thrift": "thrift", "thrift_many": "thrift", "infer": "http", "oip": "http", "oip_binary": "http"},
    "grpc": "grpc",
}


class Nothing:
    """Gives no result."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["error"] = NoResult("nothing")


@pytest.fixture(scope="module")
def opened() -> Iterator[House]:
    register_backend(Nothing, "Nothing")
    with house(CONFIG) as found:
        yield found


def counted(opened: House) -> dict[tuple[str, str, str], int]:
    """Requests by model, protocol and outcome."""
    found: dict[tuple[str, str, str], int] = {}
    for model, methods in opened.server.server.counters.summary()["by_model"].items():
        for method, each in methods.items():
            for outcome, count in each["outcomes"].items():
                key = model, protocol_of(method), outcome
                found[key] = found.get(key, 0) + count
    return found


@pytest.mark.parametrize("door", [door for door in DOORS if door in PROTOCOLS])
@pytest.mark.parametrize(
    ("root", "model", "outcome"),
    [("first", "first/1", "ok"), ("second", "second/1", "no_result"), ("third", "", "unknown_node")],
)
def test_counts_requests_under_model_protocol_and_outcome(
    opened: House, door: str, root: str, model: str, outcome: str
) -> None:
    before = counted(opened)
    answer = DOORS[door](opened, Asked(root, {"data": np.zeros((1, 1), np.float32)}, ["result"]))
    assert answer.code == outcome
    wanted = {(model, PROTOCOLS[door], answer.code): 1}

    def grown() -> dict[tuple[str, str, str], int]:
        return {key: count - before.get(key, 0) for key, count in counted(opened).items() if count != before.get(key)}

    eventually(lambda: grown() == wanted)
