"""Calls of many images: their batches, and the models behind them that change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from conftest import Register
from kit.backends import Echo, Gate
from kit.waits import WAIT

from torchpipe_py import Overloaded, Registry, Status, UnknownNode, pipe
from torchpipe_py.methods.many import FairAdmission, ReplyBudget
from torchpipe_py.runtime.pipes import Pipes
from torchpipe_py.wire.errors import Bound


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


FAILING = 1500
"""Calls whose end fails, more than Python's limit of recursion."""


@pytest.mark.parametrize("kind", [ValueError, CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit])
def test_calls_behind_ones_whose_end_fails_are_answered(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Only what ends the process reaches the caller whose thread lets them all enter."""
    admission, ended = FairAdmission(Pipes(FAILING + 1)), list[str]()  # type: ignore[arg-type]

    def gather(done: Callable[[list[Any]], object]) -> None:
        admission.gather([{"data": 1, "node_name": "only"}], None, lambda data, error: type(error), done)

    def fail(outcomes: list[Any]) -> None:
        ended.append("badly")
        raise kind

    def end(outcomes: list[Any]) -> None:  # while others cannot enter
        for _ in range(FAILING):
            gather(fail)
        gather(lambda outcomes: ended.append("well"))

    raised: type[BaseException] | None = None
    try:
        gather(end)
    except BaseException as error:
        raised = type(error)
    is_last = kind in (KeyboardInterrupt, SystemExit)
    assert raised is (kind if is_last else None)
    assert (ended.count("badly"), ended.count("well")) == (FAILING, 1)
    assert {*caplog.messages} == (set() if is_last else {"a call of several images ended with an internal error"})


@pytest.mark.parametrize(
    ("priority", "text"),
    [(0, "1 request in flight, 1 more would pass max_inflight = 1"),
     (1, "1 request in flight, 1 more with priority 1 would pass half of max_inflight = 1")],
)  # fmt: skip
def test_request_beyond_those_of_all_models_names_the_limit(register: Register, priority: int, text: str) -> None:
    gate, pipes = Gate(), Pipes(1)
    with pipe({"only": {"backend": register(gate.backend)}}) as run, gate:
        pipes.replace((), {"only/1": run})
        pipes.dispatch({"data": 1, "node_name": "only"}, lambda data, error: None)
        with pytest.raises(Overloaded) as raised:
            pipes.dispatch({"data": 1, "node_name": "only", "priority": priority}, lambda data, error: None)
        assert str(raised.value) == text


def test_images_beyond_the_room_name_the_limit(register: Register) -> None:
    gate, ended, outcomes = Gate(), threading.Event(), list[Any]()

    def end(given: list[Any]) -> None:
        outcomes.extend(given)
        ended.set()

    with pipe({"max_inflight": 2, "only": {"backend": register(gate.backend)}}) as run, gate:
        items = [{"data": number} for number in range(7)]
        FairAdmission(run).gather(items, None, lambda data, error: str(error or "ok"), end)
        gate.open()
        assert ended.wait(WAIT)
    assert outcomes == ["ok"] * 4 + ["5 images would wait, with room for 2 more (max_inflight = 2)"] * 3


def listed(run: pipe, items: list[dict[str, Any]]) -> None:
    run(items)


def gathered(run: pipe, items: list[dict[str, Any]]) -> None:
    ended, gather = threading.Event(), FairAdmission(run).gather
    # NOTE: the main thread would leave the images to the executor, and not wait for them to enter.
    with ThreadPoolExecutor() as threads:
        threads.submit(gather, items, None, lambda data, error: error, lambda _: ended.set()).result(WAIT)
    assert ended.wait(WAIT)


@pytest.mark.parametrize("call", [listed, gathered])
def test_batch_waits_for_the_rest_of_a_call(register: Register, restored: Registry, call: Any) -> None:
    """Each image but the first enters after the node has found the first, and nothing else under way."""
    gate, looked = Gate(most=2), threading.Event()

    def is_due(since: float, until: float) -> bool:
        looked.set()
        return False

    def after_a_look(data: dict[str, Any]) -> Status:
        assert data["data"] == 1 or looked.wait(WAIT)
        return Status.Run

    restored.register_filter(after_a_look, "after_a_look")
    node = {"backend": register(gate.backend), "filter": "after_a_look", "batching_timeout": 1000 * WAIT}
    with pipe({"node": node}) as run, run.expecting(is_due), gate:
        gate.open()
        call(run, [{"data": 1}, {"data": 2}])
        looked.clear()
        call(run, [{"data": 1}, {"data": 2}, {"data": 3}])
    assert gate.batches == [[1, 2], [1, 2], [3]]


def test_reply_of_exactly_its_limit_is_sent_whole() -> None:
    def outcomes(most: int) -> list[str]:
        budget = ReplyBudget(Bound(most, "--most"), 0, len, "")
        budget.take_refusal("a long error")
        budget.take_refusal("an error")
        return budget.fit(["a long error", "an error"], lambda error: "x")

    assert outcomes(20) == ["a long error", "an error"]
    assert outcomes(19) == ["x", "an error"], "the largest first"
    assert outcomes(9) == ["x", "an error"]
    assert outcomes(8) == ["x", "x"]
