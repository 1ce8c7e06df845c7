"""Items that take seconds, in a node with items that take milliseconds."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import Register
from kit.backends import Gate
from kit.waits import error_of, eventually, outcome

from torchpipe_py import DeadlineExceeded, PipeClosed, pipe
from torchpipe_py.backends.image.memory import DECODING


@pytest.fixture
def gate() -> Gate:
    """Blocks large items, and only those."""
    gate = Gate(blocks=lambda data: str(data).startswith("large"))

    class Sized(gate.backend):  # type: ignore[misc,name-defined]
        def is_large(self, item: dict[str, Any]) -> bool:
            return bool(item["data"].startswith("large"))

        def any_thread(self) -> bool:
            return True

    gate.backend = Sized
    return gate


@pytest.mark.parametrize(("form", "instances"), [("{}", 3), ("S[{},Identity]", 2), ("Torch[{}]", 2)])
def test_one_instance_is_kept_for_the_others(register: Register, gate: Gate, instances: int, form: str) -> None:
    if form.startswith("Torch"):
        pytest.importorskip("torch")
    config = {"backend": form.format(register(gate.backend)), "instance_num": instances}
    with pipe(config) as p, gate:
        futures = [p.submit({"data": f"large {number}"}) for number in range(6)]
        gate.wait_entered(instances - 1)
        for number in range(20):
            assert outcome(p.submit({"data": f"small {number}"}))["result"] == f"small {number}"
        p(item := {"data": "small"})  # on this thread
        assert item["result"] == "small"
        assert sum(batch[0].startswith("large") for batch in gate.batches) == instances - 1
        assert p.stats()["nodes"]["node"]["queued"] == 6 - (instances - 1)
        gate.open()
        assert [outcome(future)["result"] for future in futures] == [f"large {number}" for number in range(6)]


def test_those_that_are_over_keep_nobody_waiting(register: Register, gate: Gate) -> None:
    with pipe({"backend": register(gate.backend), "instance_num": 2}) as p, gate:
        first = gate.hold(p, {"data": "large 0"})
        late = p.submit({"data": "large 1"}, timeout=0.05)
        deadline = perf_counter() + 0.05  # no sooner than that of the request
        last = p.submit({"data": "large 2"})
        eventually(lambda: perf_counter() > deadline)
        gate.open()
        assert isinstance(error_of(late), DeadlineExceeded)
        assert outcome(first)["result"] == "large 0"
        assert outcome(last)["result"] == "large 2"


def test_a_defect_gives_its_place_back(register: Register, gate: Gate) -> None:
    class Fails(gate.backend):  # type: ignore[misc,name-defined]
        def forward(self, items: list[dict[str, Any]]) -> None:
            raise ValueError("a bug")

    with pipe({"backend": register(Fails), "instance_num": 2}) as p:
        errors = [error_of(future) for future in [p.submit({"data": "large"}) for _ in range(8)]]
    assert all("a bug" in str(error) for error in errors)


def test_closing_ends_those_that_wait(register: Register, gate: Gate) -> None:
    p = pipe({"backend": register(gate.backend), "instance_num": 2})
    with gate:
        first = gate.hold(p, {"data": "large 0"})
        waiting = p.submit({"data": "large 1"})
        eventually(lambda: (node := p.stats()["nodes"]["node"])["busy"] == 1 and node["queued"])
        waiting.add_done_callback(lambda _: gate.open())
        p.close()
    assert isinstance(error_of(waiting), PipeClosed)
    assert outcome(first)["result"] == "large 0"


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_small_pictures_pass_large_ones_that_wait_for_memory(isolation: str) -> None:
    large, small = (bytes(cv2.imencode(".jpg", np.zeros((side, side, 3), np.uint8))[1]) for side in (1400, 690))
    limit = 8 * 1400 * 1400
    config = {"backend": "DecodeMat", "max_pixels": 1400 * 1400, "instance_num": 2, "decode_isolation": isolation}
    with pipe(config) as p, DECODING.reserved(limit, limit, is_large=True):
        futures = [p.submit({"data": large}) for _ in range(4)]
        with DECODING.reserved(limit // 4, limit):
            assert outcome(p.submit({"data": small}))["result"].shape == (690, 690, 3)
        assert isolation == "process" or not any(future.done() for future in futures)
