"""A blocked caller stands in for an idle instance: when it does, when it does not, and that nothing else changes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from conftest import Register
from kit.backends import EchoFour, Gate
from kit.waits import WAIT, all_idle, error_of, eventually, in_threads, outcome, wait_queued

from torchpipe_py import BackendError, ItemBackend, PipeClosed, Registry, Status, pipe

Data = dict[str, Any]


class Where(ItemBackend):
    """Result is the list of threads that worked on the request so far, this one last."""

    anywhere = True

    def setup(self) -> None:
        self.home = threading.current_thread()

    def forward_item(self, item: Data) -> None:
        if item["data"] == "interrupt":
            raise KeyboardInterrupt
        seen = item["data"] if isinstance(item["data"], list) else []
        item["result"] = [*seen, threading.current_thread()]

    def close(self) -> None:
        assert threading.current_thread() is self.home

    def any_thread(self) -> bool:
        return self.anywhere


class AtHome(Where):
    """The same, but bound to its thread."""

    anywhere = False


class Anywhere(Gate):
    """A gate whose backend any thread may run; data ``slow`` blocks."""

    def __init__(self) -> None:
        super().__init__(blocks=lambda data: data == "slow")
        self.backend = type("Anywhere", (self.backend,), {"any_thread": lambda self: True})


def call(p: pipe, data: Any) -> None:
    """Call the pipe in another thread than the main thread."""
    in_threads(1, lambda index: p(data))


def calling(p: pipe, data: Any) -> threading.Thread:
    thread = threading.Thread(target=all_idle(p), args=(data,))
    thread.start()
    return thread


def chain(*names: str) -> dict[str, Any]:
    """Nodes 0, 1, 2, … in a row."""
    nodes = {str(index): {"backend": name, "next": str(index + 1)} for index, name in enumerate(names)}
    del nodes[str(len(names) - 1)]["next"]
    return nodes


def test_blocked_caller_runs_backends_that_any_thread_may_run(register: Register) -> None:
    free, bound = register(Where), register(AtHome)
    with pipe(chain(free, f"S[{free},Identity]", bound, f"S[{free},{bound}]")) as p:
        call(all_idle(p), data := {"data": 1})
        names = [thread.name for thread in data["result"]]
        assert names[0] == names[1] != threading.current_thread().name
        assert names[2:] == ["torchpipe-2-0", "torchpipe-3-0", "torchpipe-3-0"]
        assert [node["requests"] for node in p.stats()["nodes"].values()] == [1, 1, 1, 1]
        nodes = all_idle(p).stats()["nodes"].values()
        assert all(not node["busy"] and not node["queued"] for node in nodes)


def test_main_thread_runs_no_backend(register: Register) -> None:
    """A signal handler may raise there at any time, so another thread stands in for an idle instance."""
    with pipe({"backend": register(Where)}) as p:
        all_idle(p)(data := {"data": 1})
    assert [thread.name for thread in data["result"]] == ["MainThread-torchpipe"]


def test_caller_with_timeout_or_several_requests_runs_nothing(register: Register) -> None:
    with pipe({"backend": register(Where)}) as p:
        call(p, several := [{"data": 1}, {"data": 2}])
        p(timed := {"data": 1}, timeout=WAIT)
        submitted = outcome(p.submit({"data": 1}))
    for item in (*several, timed, submitted):
        assert [thread.name for thread in item["result"]] == ["torchpipe-node-0"]


def test_no_more_callers_at_once_than_instances(register: Register) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    class Counting(Where):
        """Counts how many run at once."""

        def forward_item(self, item: Data) -> None:
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            item["result"] = sum(range(200)) + item["data"]
            with lock:
                running[0] -= 1

    with pipe({"backend": register(Counting), "instance_num": 2}) as p:

        def work(index: int) -> None:
            for number in range(300):
                p(data := {"data": 1000 * index + number})
                assert data["result"] == 19900 + 1000 * index + number

        in_threads(8, work)
        assert p.stats()["nodes"]["node"]["requests"] == 2400
    assert most[0] <= 2


def test_caller_does_not_overtake_queued_requests(register: Register) -> None:
    gate = Anywhere()
    with pipe({"backend": register(gate.backend)}) as p, gate:
        standing_in = calling(p, {"data": "slow"})
        gate.wait_entered()
        assert p.stats()["nodes"]["node"]["busy"] == 1
        assert p.stats()["nodes"]["node"]["oldest_batch_s"] > 0.0
        second = p.submit({"data": 2})
        wait_queued(p, 1)
        caller = threading.Thread(target=p, args=({"data": 3},))
        caller.start()
        eventually(lambda: p.stats()["inflight"] == 3)
        gate.open()
        outcome(second)
        for thread in (standing_in, caller):
            thread.join(WAIT)
        assert gate.batches == [["slow"], [2], [3]]


def test_close_waits_for_a_caller_that_stands_in(register: Register) -> None:
    gate = Anywhere()
    p = pipe({"backend": register(gate.backend)})
    with gate:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                all_idle(p)({"data": "slow"})
            except PipeClosed as error:
                errors.append(error)

        caller = threading.Thread(target=work)
        caller.start()
        gate.wait_entered()
        queued = p.submit({"data": 2})
        assert p.close(timeout=0.01) is False
        assert isinstance(error_of(queued), PipeClosed)
        assert p.stats()["inflight"] == 0
    caller.join(WAIT)
    assert len(errors) == 1
    assert p.close()


@pytest.mark.parametrize("alone", [True, False])
def test_keyboard_interrupt_raised_by_backend_is_a_defect(register: Register, alone: bool) -> None:
    with pipe({"only": {"backend": register(Where)}}) as p:
        for _ in range(3):
            with pytest.raises(BackendError, match="KeyboardInterrupt"):
                call(all_idle(p), {"data": "interrupt"} if alone else [{"data": "interrupt"}, {"data": 1}])
            call(p, data := {"data": 3})
            assert "result" in data
        assert p.stats()["inflight"] == 0
        assert p.stats()["nodes"]["only"]["failed"] == 3


def test_leader_waits_for_request_on_callers_thread(register: Register) -> None:
    gate, second = Anywhere(), Gate(most=4, blocks=lambda data: False)
    nodes = {
        "a": {"backend": register(gate.backend), "instance_num": 2, "next": "b"},
        "b": {"backend": register(second.backend), "batching_timeout": 60_000},
    }
    with pipe(nodes) as p, gate:
        caller = calling(p, slow := {"data": "slow"})
        gate.wait_entered()
        quick = p.submit({"data": 1})
        eventually(lambda: p.stats()["nodes"]["b"]["queued"])
        gate.open()
        assert outcome(quick)["result"] == 1
        caller.join(WAIT)
        assert slow["result"] == "slow"
    assert [len(batch) for batch in second.batches] == [2]


def test_caller_that_stands_in_may_close_the_pipe(register: Register, restored: Registry) -> None:
    def closing(data: Data) -> Status:
        p.close()
        return Status.Run

    restored.register_filter(closing, "closing")
    name = register(Where)
    p = pipe({"a": {"backend": name, "next": "b"}, "b": {"backend": name, "filter": "closing"}})
    with pytest.raises(PipeClosed):
        call(all_idle(p), {"data": 1})
    assert p.close()


def test_items_that_a_close_ends_before_they_enter_keep_their_error(restored: Registry) -> None:
    def closing(data: Data) -> Status:
        thread = threading.Thread(target=p.close, args=(0.0,))
        thread.start()
        thread.join(WAIT)
        return Status.Run

    restored.register_filter(closing, "closing")
    p = pipe({"a": {"backend": "Identity", "filter": "closing"}})
    items: list[Data] = [{"data": number} for number in range(3)]
    with pytest.raises(PipeClosed):
        p(items)
    assert [type(item.get("error")) for item in items] == [PipeClosed] * 3


@pytest.mark.parametrize(
    "nodes",
    [
        {"a": {}},
        {"a": {"backend": "Echo"}},
        {"a": {"next": "b,c"}, "b": {"next": "d"}, "c": {"next": "d"}, "d": {"map": "b[result:data],c[result:x]"}},
    ],
    ids=["one node", "batches", "branches"],
)
def test_finished_request_is_freed_without_garbage_collection(restored: Registry, nodes: dict[str, Any]) -> None:
    class Payload:
        """Something that can be referred to weakly."""

    restored.register_backend(EchoFour, "Echo")
    with pipe(nodes) as p:
        gc.collect()
        gc.disable()
        try:
            payload = Payload()
            known = weakref.ref(payload)
            call(p, {"data": payload})
            p({"data": payload})
            outcome(p.submit({"data": payload}))
            del payload
            all_idle(p)
            eventually(lambda: known() is None)
        finally:
            gc.enable()
