"""A backend that does not return: the figures tell."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conftest import Register
from fakes import Gate, outcome

from torchpipe_py import pipe


def node_of(p: pipe) -> dict[str, Any]:
    node: dict[str, Any] = p.stats()["nodes"]["node"]
    return node


@pytest.mark.parametrize("most", [1, 4])
def test_the_figures_tell_how_long_the_oldest_batch_runs(register: Register, most: int) -> None:
    gate = Gate(most)
    with pipe({"backend": register(gate.backend), "instance_num": 2}) as p, gate:
        assert (node_of(p)["alive"], node_of(p)["oldest_batch_s"]) == (2, 0.0)
        first = gate.hold(p, {"data": 1})
        before = node_of(p)["oldest_batch_s"]
        second = gate.hold(p, {"data": 2})
        assert node_of(p)["oldest_batch_s"] > before > 0.0, "that of the oldest grows on"
        gate.open()
        outcome(first)
        outcome(second)
        while node_of(p)["busy"]:
            pass
        assert node_of(p)["oldest_batch_s"] == 0.0
    assert node_of(p)["alive"] == 0


def test_what_a_caller_runs_counts_as_well(register: Register) -> None:
    gate = Gate()

    class Anywhere(gate.backend):  # type: ignore[name-defined, misc]
        def any_thread(self) -> bool:
            return True

    with pipe({"backend": register(Anywhere)}) as p, gate:
        caller = threading.Thread(target=p, args=({"data": 1},))
        caller.start()
        gate.wait_entered()
        assert node_of(p)["oldest_batch_s"] > 0.0
        gate.open()
        caller.join()
        assert node_of(p)["oldest_batch_s"] == 0.0
