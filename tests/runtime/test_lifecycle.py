"""Building, closing, forgetting, forking: threads end, nothing hangs, nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from math import inf
from typing import Any

import pytest
from conftest import Register
from kit.backends import Echo, Gate
from kit.inside import runtime_of
from kit.waits import WAIT, error_of, eventually, in_threads, outcome, run, wait_queued

import torchpipe_py.runtime.runtime
from torchpipe_py import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    MapReduce,
    PipeClosed,
    SetupError,
    pipe,
)
from torchpipe_py.backends.deferred import HandedOver, HandOverBackend

Data = dict[str, Any]
Threads = Callable[[], list[threading.Thread]]


@pytest.fixture
def pipe_threads() -> Threads:
    """The threads of the pipes that this test made."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("torchpipe-")]


# -- close --------------------------------------------------------------------------------------------------------


def test_close_from_many_threads(pipe_threads: Threads) -> None:
    p = pipe({"a": {"next": "b", "instance_num": 3}, "b": {"instance_num": 3}})
    assert len(pipe_threads()) == 6
    in_threads(16, lambda index: p.close())
    assert pipe_threads() == []
    p.close()


def test_closed_pipe_refuses_calls() -> None:
    p = pipe({"backend": "Identity"})
    p.close()
    calls: list[Callable[[], Any]] = [
        lambda: p({"data": 1}),
        lambda: p([{"data": 1}]),
        lambda: p.submit({"data": 1}),
        lambda: asyncio.run(p.acall({"data": 1})),
        lambda: p.dispatch({"data": 1}, lambda data, error: None),
    ]
    for call in calls:
        with pytest.raises(PipeClosed, match="closed"):
            call()
    assert p.stats()["inflight"] == 0


@pytest.mark.parametrize(("most", "timeout"), [(1, None), (1, 2 * WAIT), (4, None)])
def test_close_while_busy(
    register: Register, monkeypatch: pytest.MonkeyPatch, most: int, timeout: float | None
) -> None:
    """What runs is finished, as long as somebody waits for it; what is queued fails, of either priority."""
    monkeypatch.setattr(torchpipe_py.runtime.runtime, "LEAVE_SECONDS", 0.0)
    gate = Gate(most)
    with pipe({"backend": register(gate.backend)}) as p, gate:
        running = p.submit({"data": "running"}, timeout=timeout)
        gate.wait_entered()
        queued = [p.submit({"data": number, "priority": number % 2}) for number in range(3)]
        wait_queued(p, 3)
        closer = threading.Thread(target=p.close)
        closer.start()
        for future in queued:
            error = error_of(future)
            assert isinstance(error, PipeClosed)
            assert "node 'node'" in str(error)
        with pytest.raises(PipeClosed):
            p({"data": 1})
        closer.join(0.1)
        assert closer.is_alive()
        assert not running.done()
        monkeypatch.setattr(torchpipe_py.runtime.runtime, "LEAVE_SECONDS", WAIT)  # what returns now may take its time
        gate.open()
        closer.join(WAIT)
        assert not closer.is_alive()
        assert outcome(running)["result"] == "running"
    assert gate.batches == [["running"]]


def test_close_of_a_backend_that_raises(register: Register, caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(Echo):
        """Raises in close."""

        def close(self) -> None:
            raise ValueError("will not close")

    with pipe({"backend": register(Stubborn), "instance_num": 2}) as p:
        p({"data": 1})
    messages = sorted(record.getMessage() for record in caplog.records if "will not close" in str(record.exc_info))
    assert messages == [
        "node 'node': close of instance 0 failed",
        "node 'node': close of instance 1 failed",
    ]


# -- threads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 4])
def test_instance_lives_on_one_thread(register: Register, most: int) -> None:
    seen: dict[int, set[int]] = {}
    order: list[str] = []

    class Owner(Echo):
        """Notes the thread of everything that happens to it."""

        def note(self, what: str) -> None:
            seen.setdefault(self.config.instance, set()).add(threading.get_ident())
            order.append(f"{what} {self.config.instance}")

        def setup(self) -> None:
            assert (self.config.instance_num, self.config.device_id) == (3, 2)
            self.note("setup")

        def forward(self, items: list[Data]) -> None:
            self.note("forward")
            super().forward(items)

        def close(self) -> None:
            self.note("close")

        def max(self) -> int:
            return most

    with pipe({"backend": register(Owner), "instance_num": 3, "device_id": 2}) as p:
        in_threads(8, lambda index: [p({"data": number}) for number in range(20)])
    assert sorted(seen) == [0, 1, 2]
    assert all(len(threads) == 1 for threads in seen.values())
    assert len(set.union(*seen.values())) == 3
    for index in range(3):
        mine = [step for step in order if step.endswith(str(index))]
        assert (mine[0], mine[-1]) == (f"setup {index}", f"close {index}")
        assert mine.count(mine[0]) == mine.count(mine[-1]) == 1


@pytest.mark.parametrize("used", ["not", "call", "submit", "submit and keep the future"])
def test_unreferenced_pipe_ends_its_threads(pipe_threads: Threads, used: str) -> None:
    p = pipe({"a": {"next": "b", "instance_num": 2}, "b": {}})
    threads, kept = pipe_threads(), []
    assert len(threads) == 3
    if used == "call":
        p({"data": 1})
    elif used != "not":
        kept.append(p.submit({"data": 1}))
        outcome(kept[0])
        if used == "submit":
            kept.clear()
    del p
    gc.collect()
    assert [thread for thread in threads if thread.is_alive()] == []


FORK = """
import os, sys, warnings
warnings.simplefilter("ignore")
from torchpipe_py import PipeClosed, pipe

p = pipe({"a": {"next": "b", "instance_num": 2}, "b": {}})
p({"data": 1})
child = os.fork()
if child == 0:
    for call in (p, p.submit):
        try:
            call({"data": 1})
        except PipeClosed as error:
            assert "fork" in str(error), error
        else:
            os._exit(3)
    p.close()
    with pipe({"backend": "Identity"}) as mine:
        data = {"data": 2}
        mine(data)
        assert data["result"] == 2
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
data = {"data": 5}
p(data)
assert data["result"] == 5
print("parent ends")
"""


TWO_CALLBACKS = """
import os, threading
from torchpipe_py import pipe

together, closed = threading.Barrier(2), threading.Semaphore(0)

def done(data, error):
    together.wait(60)
    p.close()
    closed.release()

p = pipe({"backend": "Identity", "instance_num": 2})
for number in range(2):
    p.dispatch({"data": number}, done)
ended = [closed.acquire(timeout=60) for _ in range(2)]
print(ended, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("program", "output"),
    [(FORK, "parent ends\n"), (TWO_CALLBACKS, "[True, True]\n")],
    ids=["a forked child refuses, and a pipe that nobody closes ends", "two callbacks close at once"],
)
def test_programs_that_would_hang(program: str, output: str) -> None:
    done = run(sys.executable, "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, output, "")


# -- setup --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ValueError, SetupError),
        (KeyboardInterrupt, SetupError),
        (ConfigError, ConfigError),
        (BackendUnavailable, BackendUnavailable),
    ],
)
def test_failing_setup_ends_all_threads(
    register: Register, pipe_threads: Threads, raised: type[BaseException], kind: type[BaseException]
) -> None:
    closed: list[tuple[str, int]] = []

    class Fails(Echo):
        """The last of its instances cannot be set up."""

        def setup(self) -> None:
            if self.config.instance == 2:
                raise raised("no such thing")

        def close(self) -> None:
            closed.append(("fails", self.config.instance))

    class Works(Echo):
        """Can be set up."""

        def close(self) -> None:
            closed.append(("works", self.config.instance))

    name = register(Fails)
    config = {
        "a": {"backend": register(Works), "instance_num": 2, "next": "b"},
        "b": {"backend": f"SyncTensor[{name}]", "instance_num": 3, "next": "c"},
        "c": {"backend": register(Works)},
    }
    with pytest.raises(kind) as caught:
        pipe(config)
    assert type(caught.value) is kind
    assert isinstance(caught.value, ValueError), "the C++ library raises the one"
    assert isinstance(caught.value, RuntimeError), "or the other, depending on the place"
    what = f"{raised.__name__}: " if kind is SetupError else ""
    assert str(caught.value) == f"config: node 'b': SyncTensor[{name}]: {what}no such thing"
    assert isinstance(caught.value.__cause__, raised)
    assert pipe_threads() == []
    assert sorted(closed) == [*(("fails", index) for index in range(3)), ("works", 0), ("works", 0), ("works", 1)]


@pytest.mark.parametrize(("low", "high"), [(0, 4), (5, 4), (0, 0), (1, inf), (1, 2**63), (1, "8"), (1, None), (1.0, 2)])
def test_refuses_invalid_range_of_backend(register: Register, low: Any, high: Any) -> None:
    class Range(Echo):
        """A range of nothing."""

        def max(self) -> Any:
            return high

        def min(self) -> Any:
            return low

    with pytest.raises((BackendError, ConfigError), match=rf"Range\d+ has no valid range: .* not {low} and {high}"):
        pipe({"backend": register(Range)})


# -- defects that were found once, each by the smallest thing that showed it ------------------------------------------


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


def test_jump_started_while_its_request_is_cancelled_is_cancelled(register: Callable[..., str]) -> None:
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
        inflight = runtime_of(p).inflight._requests = GivesUpBetween()
        outcome: Future[Any] = Future()
        ticket = p.dispatch({"data": [1, 2, 3], "node_name": "root"}, lambda data, error: outcome.set_result(error))
        assert entered.wait(WAIT)

        def start_children() -> None:
            given_up.set()
            gate.wait_entered()  # the first of the children runs

        inflight.before = start_children
        assert ticket.cancel()
        assert isinstance(outcome.result(WAIT), CancelledError)
        assert not runtime_of(p).inflight._inner
        gate.open()


# -- requests whose work is done elsewhere ----------------------------------------------------------------------------


def test_request_that_cannot_be_handed_over_leaves_its_node_idle(register: Register) -> None:
    class Nowhere(HandOverBackend):
        """Has no place to hand requests over to."""

        def start(self, item: Data, done: HandedOver, request: Any) -> None:
            raise ValueError("nowhere to run it")

    with pipe({"backend": register(Nowhere)}) as run:
        assert "nowhere to run it" in str(error_of(run.submit({"data": 1})))
        assert run.stats()["nodes"]["node"]["busy"] == 0
        assert run.expected_wait() == 0.0


def test_thread_leaves_callback_after_it_delivered_an_answer(register: Register) -> None:
    """Though another one began to tell its own meanwhile, and ended later: the first may close the pipe."""
    answers: list[Callable[[], object]] = []

    class Elsewhere(HandOverBackend):
        """Leaves the answers to the test."""

        def start(self, item: Data, done: HandedOver, request: Any) -> None:
            item["result"] = item["data"]
            answers.append(partial(done, None))

    entered, is_told = threading.Event(), threading.Event()
    run = pipe({"backend": register(Elsewhere)})
    first, second = (run.submit({"data": number}) for number in range(2))
    eventually(lambda: len(answers) == 2, "they are not handed over")
    other = threading.Thread(target=answers[1])
    first.add_done_callback(lambda _: (other.start(), entered.wait(WAIT)))
    second.add_done_callback(lambda _: (entered.set(), is_told.wait(WAIT)))
    answers[0]()
    is_told.set()
    other.join(WAIT)
    assert second.done()
    assert run.close()
