"""Defects that were found once, each by the smallest thing that showed it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from fakes import WAIT, Gate, outcome

from torchpipe_py import MapReduce, PipeClosed, pipe


def test_close_from_a_callback_loses_no_request_of_an_earlier_node(register: Callable[..., str]) -> None:
    gate, closed = Gate(blocks=lambda data: data == "held"), threading.Event()

    def close(data: dict[str, Any], error: BaseException | None) -> None:
        p.close()
        closed.set()

    p = pipe({"a": {"backend": register(gate.backend), "instance_num": 2, "next": "b"}, "b": {"backend": "Identity"}})
    with gate:
        held = gate.hold(p, {"data": "held"})
        p.dispatch({"data": "free"}, close)
        assert closed.wait(WAIT)
    with pytest.raises(PipeClosed):
        outcome(held)
    assert p.close()


class GivesUpBetween(set):
    """Requests in flight; once, what is done to the first that is removed comes before its removal."""

    before: Callable[[], None] | None = None

    def remove(self, request: Any) -> None:
        before, self.before = self.before, None
        if before is not None and request in self:
            before()
        super().remove(request)


def test_a_jump_that_starts_while_its_request_is_given_up_leaves_nothing_running(register: Callable[..., str]) -> None:
    """``complete`` had looked for what the request's jumps had started before they did."""
    gate = Gate()
    entered, given_up = threading.Event(), threading.Event()

    class Late(MapReduce):
        def split(self, data: Any) -> Any:
            entered.set()
            assert given_up.wait(WAIT)
            return super().split(data)

    each = {"backend": register(gate.backend)}
    with pipe({"root": {"backend": register(Late), "jump": "each"}, "each": each}) as p, gate:
        inflight = p._runtime.inflight._requests = GivesUpBetween()
        outcome: Future[Any] = Future()
        ticket = p.dispatch({"data": [1, 2, 3], "node_name": "root"}, lambda data, error: outcome.set_result(error))
        assert entered.wait(WAIT)

        def start_children() -> None:
            given_up.set()
            gate.wait_entered()  # the first of the children runs

        inflight.before = start_children
        assert ticket.cancel()
        assert isinstance(outcome.result(WAIT), CancelledError)
        assert not p._runtime.inflight._inner
        gate.open()
