"""Defects that were found once, each by the smallest thing that showed it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from fakes import WAIT, Gate, outcome

from torchpipe_py import NoResult, PipeClosed, pipe


class Token:
    """Something a weak reference can watch."""


def test_close_from_a_callback_loses_no_request_of_an_earlier_node(register: Callable[..., str]) -> None:
    gate, closed = Gate(blocks=lambda data: data == "held"), threading.Event()

    def close(data: dict[str, Any], error: BaseException | None) -> None:
        p.close()
        closed.set()

    p = pipe({"a": {"backend": register(gate.backend), "instance_num": 2, "next": "b"}, "b": {"backend": "Identity"}})
    with gate:
        held = p.submit({"data": "held"})
        gate.wait_entered()
        p.dispatch({"data": "free"}, close)
        assert closed.wait(WAIT)
    with pytest.raises(PipeClosed):
        outcome(held)
    assert p.close()


def test_a_finished_request_is_freed_without_the_collector() -> None:
    token = Token()
    alive = weakref.ref(token)
    with pipe({"backend": "Identity"}) as p:
        gc.disable()
        try:
            outcome(p.submit({"data": token}))
            del token
            p({"data": None})  # the instance has let go of the request before
            assert alive() is None
        finally:
            gc.enable()


def test_a_timeout_of_ages_is_a_timeout(register: Callable[..., str]) -> None:
    upstream, batching = Gate(blocks=lambda data: data == 1), Gate(most=4, blocks=lambda data: False)
    config = {
        "global": {"batching_timeout": 1e16},
        "a": {"backend": register(upstream.backend), "instance_num": 2, "next": "b"},
        "b": {"backend": register(batching.backend)},
    }
    with pipe(config) as p, upstream:
        held = p.submit({"data": 1})
        upstream.wait_entered()
        waiting = p.submit({"data": 0})
        assert batching.arrived.wait(WAIT)
        upstream.open()
        assert [outcome(future)["result"] for future in (waiting, held)] == [0, 1]


@pytest.mark.parametrize("filter_name", ["skip", "break"])
def test_a_request_that_no_backend_saw_says_why_it_has_no_result(filter_name: str) -> None:
    with pipe({"backend": "Identity", "filter": filter_name}) as p:
        data: dict[str, Any] = {"data": 1}
        p(data)
    assert "result" not in data
    assert isinstance(data["error"], NoResult)
