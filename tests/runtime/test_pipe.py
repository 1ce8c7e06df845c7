"""What a caller sees: requests, lists, outcomes, futures, cancellation."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Register
from kit.backends import Echo, EchoFour, Gate
from kit.waits import WAIT, eventually, outcome

from torchpipe_py import BackendError, InvalidRequest, ItemBackend, ModelUnavailable, UnknownNode, parse_folder, pipe
from torchpipe_py.plan.folder import UNLOADED
from torchpipe_py.runtime.pipes import Pipes

Data = dict[str, Any]

SAME = {"data": 1}


# -- calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize(
    "call",
    [
        lambda p, items, timeout: p(items, timeout),
        lambda p, items, timeout: p.submit(items, timeout).result(WAIT),
        lambda p, items, timeout: asyncio.run(p.acall(items, timeout)),
    ],
)
def test_each_item_of_a_list_has_its_own_outcome(register: Register, call: Any, timeout: float | None) -> None:
    """Whichever way the pipe is called: a fork, so that some fail after a node has given them a result."""
    nodes = {"a": {"next": "b,c"}, "b": {"backend": register(Echo)}, "c": {"backend": "Identity"}}
    items: list[Data] = [{"data": ValueError(name) if name else 1} for name in ("x", "", "y", "z")]
    with pipe(nodes) as p, pytest.raises(BackendError, match="ValueError: x"):
        call(p, items, timeout)
    assert [(str(item.get("error"))[-3:], item.get("result")) for item in items] == [
        (": x", None),
        ("one", 1),
        (": y", None),
        (": z", None),
    ]


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_call_returns_its_argument(timeout: float | None) -> None:
    data, bad = {"data": 1}, {"data": b"no image"}
    with pipe({"a": {"backend": "Identity", "next": "b,c"}, "b": {}, "c": {}}) as p:
        assert p(data, timeout) is data
        assert outcome(p.submit(data, timeout)) is data
        assert asyncio.run(p.acall(data, timeout)) is data
    with pipe({"backend": "DecodeMat"}) as p:
        assert p(bad, timeout)["error"].as_dict()["code"] == "decode_error"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (3, "expected a dict or a list of dicts, got int"),
        ("text", "expected a dict or a list of dicts, got str"),
        (None, "expected a dict or a list of dicts, got NoneType"),
        ([{"data": 1}, 3], "item [1]: expected a dict, got int"),
        ([[{"data": 1}]], "item [0]: expected a dict, got list"),
        ({}, "a request needs the key 'data'; found none"),
        ({"dat": 1}, "a request needs the key 'data'; found 'dat'"),
        ([{"data": 1}, {"result": 1}], "a request needs the key 'data'; found 'result'"),
        ([SAME, {"data": 1}, SAME], "a dict occurs twice in the list; each request needs its own"),
    ],
)
def test_refuses_invalid_requests(data: Any, problem: str) -> None:
    with pipe({"backend": "Identity"}) as p:
        for call in (p, p.submit):
            with pytest.raises(InvalidRequest) as caught:
                call(data)
            assert str(caught.value) == problem
        assert (p.stats()["admitted"], p.stats()["inflight"]) == (0, 0)


# -- futures ------------------------------------------------------------------------------------------------------


async def cancelled_task(p: pipe) -> None:
    task = asyncio.create_task(p.acall({"data": "cancelled"}))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def cancelled_ticket(p: pipe, error: Exception | None) -> None:
    calls: list[tuple[Data, BaseException | None]] = []
    ticket = p.dispatch({"data": "dropped"}, lambda *call: calls.append(call))
    assert [ticket.cancel(error), ticket.cancel(error)] == [True, False]
    ((data, raised),) = calls
    assert "result" not in data
    assert raised is error if error else isinstance(raised, CancelledError)


CANCELS: dict[str, Callable[[pipe], object]] = {
    "a future": lambda p: p.submit({"data": "a"}).cancel(),
    "a future of several": lambda p: p.submit([{"data": "a"}, {"data": "b"}]).cancel(),
    "a task": lambda p: asyncio.run(cancelled_task(p)),
    "a ticket": lambda p: cancelled_ticket(p, None),
    "a ticket, with an error": lambda p: cancelled_ticket(p, ValueError("gone away")),
}


@pytest.mark.parametrize("cancel", CANCELS.values(), ids=CANCELS)
def test_cancelled_queued_request_is_dropped(register: Register, cancel: Callable[[pipe], object]) -> None:
    gate = Gate()
    with pipe({"backend": register(gate.backend)}) as p, gate:
        running = gate.hold(p, {"data": "running"})
        cancel(p)
        assert p.stats()["inflight"] == 1
        gate.open()
        outcome(running)
        p({"data": "last"})
    assert gate.batches == [["running"], ["last"]]


def test_cancelled_request_is_dropped_on_each_branch(register: Register) -> None:
    gate = Gate(blocks=lambda data: data == "running")
    nodes = {
        "fork": {"next": "left,right"},
        "left": {},
        "right": {"backend": register(gate.backend)},
    }
    with pipe(nodes) as p, gate:
        running = gate.hold(p, {"data": "running"})
        cancelled = p.submit({"data": "cancelled"})
        eventually(lambda: p.stats()["nodes"]["right"]["queued"] == 1)
        assert cancelled.cancel()
        gate.open()
        outcome(running)
        outcome(p.submit({"data": "last"}))
    assert gate.batches == [["running"], ["last"]]


@pytest.mark.parametrize("root", ["a", "c"])
def test_backend_that_would_wait_for_itself_is_refused(register: Register, root: str) -> None:
    class Waits(ItemBackend):
        """Waits for another request of its own pipe."""

        def forward_item(self, item: Data) -> None:
            item["result"] = p({"node_name": item["root"], "data": item["data"]})["result"]

    config = {"a": {"next": "b"}, "b": {"backend": register(Waits)}, "c": {"backend": "Jump", "jump": "a"}, "d": {}}
    with pipe(config) as p:
        assert p({"node_name": "a", "data": 1, "root": "d"})["result"] == 1
        with pytest.raises(BackendError, match=r"backend of node 'b'.* would wait for itself"):
            p({"node_name": "a", "data": 1, "root": root})


def test_callback_that_would_wait_for_its_thread_is_refused(register: Register) -> None:
    gate = Gate()
    told: list[BaseException] = []
    again: Future[Data] = Future()

    def call_back(future: object) -> None:
        try:
            p({"data": 2})
        except RuntimeError as error:
            told.append(error)
        p.submit({"data": 3}).add_done_callback(lambda future: again.set_result(future.result()))

    with pipe({"backend": register(gate.backend)}) as p, gate:
        gate.hold(p, {"data": 1}).add_done_callback(call_back)
        gate.open()
        assert outcome(again)["result"] == 3
    assert ["would wait for itself: submit() does not wait" in str(error) for error in told] == [True]


# -- dispatch -----------------------------------------------------------------------------------------------------


def test_dispatch_calls_back(register: Register) -> None:
    gate = Gate()
    calls: list[tuple[Data, BaseException | None]] = []
    data: Data = {"data": 1}
    with pipe({"backend": register(gate.backend)}) as p, gate:
        ticket = p.dispatch(data, lambda *call: calls.append(call))
        assert calls == []
        gate.open()
        p({"data": 2})
        assert calls == [(data, None)]
        assert data["result"] == 1
        assert not ticket.cancel()
    assert len(calls) == 1


def test_ticket_is_queued_until_an_instance_has_its_request(register: Register) -> None:
    gate, answered = Gate(), threading.Event()
    with pipe({"backend": register(gate.backend)}) as run, gate:
        first = run.dispatch({"data": 1}, lambda data, error: None)
        gate.wait_entered()
        second = run.dispatch({"data": 2}, lambda data, error: answered.set())
        assert (first.is_queued, second.is_queued) == (False, True)
        gate.open()
        assert answered.wait(WAIT)
        assert (first.is_queued, second.is_queued) == (False, False)


def test_exception_in_callback_is_logged_only(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()

    def complain(data: Data, error: BaseException | None) -> None:
        raise ValueError("a bad callback")

    with pipe({"a": {"backend": register(gate.backend), "next": "b"}, "b": {"backend": register(EchoFour)}}) as p, gate:
        p.dispatch({"data": 1}, complain)
        others = [p.submit({"data": number}) for number in range(4)]
        gate.open()
        assert [outcome(other)["result"] for other in others] == [0, 1, 2, 3]
    assert "a bad callback" in caplog.text


# -- description --------------------------------------------------------------------------------------------------


def test_repr_shows_the_graph(register: Register) -> None:
    gate = Gate(most=4)
    name = register(gate.backend)
    with pipe({"a": {"next": "b", "instance_num": 2}, "b": {"backend": f"S[Identity,{name}]"}}) as p, gate:
        running = gate.hold(p, {"data": 1})
        assert repr(p) == f"pipe(config, 1 in flight)\n  a: Identity x2 [1..1] -> b\n  b: S[Identity,{name}] x1 [1..4]"
        assert (p.max(), p.min()) == (4, 1)
        gate.open()
        outcome(running)
    assert repr(p).startswith("pipe(config, closed)\n")


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pipe_cannot_be_copied_or_pickled(duplicate: Callable[[pipe], object]) -> None:
    with pipe({"backend": "Identity"}) as run:
        with pytest.raises(TypeError, match="a pipe has threads, which cannot be pickled or copied: build another"):
            duplicate(run)
        assert run({"data": 1})["result"] == 1


# -- filters at a node's entry and inside ``sequential`` --------------------------------------------------------------


class Mark(ItemBackend):
    """Appends a mark to data; data that ends with ``-`` gives no result."""

    def forward_item(self, item: Data) -> None:
        if not item["data"].endswith("-"):
            item["result"] = item["data"] + "+"


@pytest.mark.parametrize("works_by_item", [True, False])
def test_items_of_one_batch_take_different_routes(register: Register, works_by_item: bool) -> None:
    class Eight(ItemBackend):
        """result = data + "!"; takes eight at once."""

        def forward_item(self, item: Data) -> None:
            item["result"] = item["data"] + "!"

        def max(self) -> int:
            return 8

        def forward_one(self) -> Callable[[Data], object] | None:
            return super().forward_one() if works_by_item else None

    name = register(Mark)
    items = [{"data": text} for text in ("a", "-", "b", "c-", "d")]
    with pipe({"backend": f"S[{name},{register(Eight)},(skip){name}]"}) as p:
        p(items)
    assert [item.get("result") for item in items] == ["a+!", None, "b+!", None, "d+!"]


def test_refused_list_leaves_every_dict_unchanged() -> None:
    with pipe({"backend": "Identity"}) as run:
        first: dict[str, Any] = {"data": 1}
        run(first)
        first["error"] = "of a handler"
        for refused in ({}, {"data": 2, "node_name": "nowhere"}, {"data": 2, "priority": "urgent"}):
            with pytest.raises((InvalidRequest, IndexError)):
                run([first, refused])
        with pytest.raises(InvalidRequest):
            run(first | {"priority": "urgent"})
        assert first == {"data": 1, "result": 1, "error": "of a handler"}


def test_roots_of_a_folder_are_listed_once(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for file in ("a.toml", "b/1.toml", "b/2.toml"):
        (tmp_path / file).write_text('[m]\nbackend = "Identity"\n')
    with pipe(parse_folder(tmp_path)) as run:
        for name, said in ((None, "must name one of the roots: a, b/1, b"), ("xyz", "'xyz'; valid: a, b, b/1")):
            with pytest.raises(UnknownNode) as raised:
                run({"data": 1, "node_name": name})
            assert str(raised.value).endswith(said)


def test_names_of_models_that_are_not_loaded_have_their_reason() -> None:
    pipes = Pipes()
    with pipe({"c": {"backend": "Identity"}}) as run:
        pipes.replace((), {"c/2": run}, {"a/1": "no memory", "b/2": UNLOADED, "b/3": "no file"})
        reasons = {
            **dict.fromkeys(("a", "a/1", "a.root", "a.root/1"), "could not be loaded: no memory"),
            **{"b/2": "is not loaded", "b/3": "could not be loaded: no file"},
        }
        for name, reason in reasons.items():
            for ask in (pipes.signature, pipes.check_loaded, lambda name: pipes.dispatch({"node_name": name}, print)):
                with pytest.raises(ModelUnavailable) as raised:
                    ask(name)
                assert (str(raised.value), raised.value.code) == (f"model {name!r} {reason}", "unavailable")
        for name in ("a/2", "b/1", "d", "", "/", "a/", "/1"):
            pipes.check_loaded(name)
            with pytest.raises(UnknownNode) as unknown:
                pipes.signature(name)
            assert unknown.value.code == "unknown_node"
        pipes.replace((), {})
        with pytest.raises(UnknownNode, match="no root 'a'"):
            pipes.signature("a")


def test_many_roots_are_listed_in_part() -> None:
    with (
        pipe({f"r{index:02}": {"backend": "Identity"} for index in range(20)}) as run,
        pytest.raises(UnknownNode, match=r"must name one of the roots: r00, r01, .*, r15 and 4 more$"),
    ):
        run({"data": 1})


def test_node_name_none_means_the_only_root() -> None:
    with pipe({"backend": "Identity"}) as run:
        assert run({"data": 1, "node_name": None})["result"] == 1
    with (
        pipe({"a": {"backend": "Identity"}, "b": {"backend": "Identity"}}) as run,
        pytest.raises(IndexError, match="must name one of the roots: a, b"),
    ):
        run({"data": 1, "node_name": None})


@pytest.mark.parametrize(
    ("timeout", "shown", "kind"),
    [(float("nan"), "nan", ValueError), ("5", "'5'", TypeError), ([5], r"\[5\]", TypeError)],
)
def test_refuses_other_timeouts_before_the_request_starts(timeout: Any, shown: str, kind: type) -> None:
    with pipe({"backend": "Identity"}) as run:
        for call in (run, run.submit, lambda data, timeout: asyncio.run(run.acall(data, timeout))):
            with pytest.raises(kind, match=f"timeout is a number of seconds, or None, got {shown}"):
                call({"data": 1}, timeout=timeout)
        assert run.stats()["inflight"] == 0
        assert run({"data": 1}, timeout=np.float32(60))["result"] == 1
