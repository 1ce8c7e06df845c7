"""Calls of many images while the models behind them change."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
from conftest import Register
from kit.backends import Echo, Gate
from kit.waits import WAIT

from torchpipe_py import UnknownNode, pipe
from torchpipe_py.methods.many import FairAdmission
from torchpipe_py.runtime.pipes import Pipes


@pytest.mark.parametrize("is_loaded_again", [False, True])
def test_images_that_wait_are_answered_when_their_model_is_unloaded(register: Register, is_loaded_again: bool) -> None:
    gate, pipes = Gate(), Pipes()
    ended, outcomes = threading.Event(), list[Any]()

    def end(given: list[Any]) -> None:
        outcomes.extend(given)
        ended.set()

    with ExitStack() as stack:
        old = stack.enter_context(pipe({"only": {"backend": register(gate.backend)}}))
        new = stack.enter_context(pipe({"only": {"backend": register(Echo)}}))
        stack.enter_context(gate)
        pipes.replace((), {"only/1": old})
        items = [{"data": number, "node_name": "only"} for number in range(8)]
        FairAdmission(pipes).gather(items, None, lambda data, error: error or data["result"], end)  # type: ignore[arg-type]
        gate.wait_entered()
        pipes.replace(["only/1"], {})
        if is_loaded_again:
            pipes.replace((), {"only/1": new})
        gate.open()
        assert ended.wait(WAIT)
    assert len(outcomes) == 8
    assert outcomes[:2] == [0, 1], "those that were in the pipe"
    assert all(type(each) in (int, UnknownNode) for each in outcomes)


def test_images_wait_for_no_place_while_no_model_is_there() -> None:
    ended = threading.Event()
    call = FairAdmission(Pipes())  # type: ignore[arg-type]
    call.gather([{"data": 1, "node_name": "only"}] * 3, None, lambda data, error: type(error), lambda _: ended.set())
    assert ended.wait(WAIT)
