"""``Pool``: which call gets which link, and how each call ends, answered by the test; ``Process`` on top of it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from conftest import Register
from kit import process_backends
from kit.ends import ROOM, Ends
from kit.inside import runtime_of
from kit.waits import WAIT, error_of, eventually, outcome

from torchpipe_py import DeadlineExceeded, PipeClosed, WorkerDied, pipe
from torchpipe_py.aging import Aging
from torchpipe_py.proc.codec import Packed, pack
from torchpipe_py.proc.link import NOT_RUN, GarbledError, Link, TooLargeError
from torchpipe_py.proc.pool import LOSSES, Call, Pool

Data = dict[str, Any]
Start = Callable[..., pipe]


class Asking:
    """A pool of links, and the outcomes of its calls."""

    def __init__(self, links: int, **more: Any) -> None:
        self.pool, self.ends = Pool(**more), [Ends() for _ in range(links)]
        for ends in self.ends:
            self.pool.add(ends.link)
        self.outcomes: dict[Call, list[Any]] = {}

    def ask(
        self,
        done: Callable[[Any], object] = lambda outcome: None,
        deadline: float | None = None,
        values: Data | None = None,
        **more: Any,
    ) -> Call:
        def finish(error: BaseException | None, outcome: Any) -> None:
            self.outcomes[call].append(error or "done")
            done(outcome)

        call = Call(pack(values or {"data": 1}), 1, finish, deadline, **more)
        self.outcomes[call] = []
        self.pool.ask(call)
        return call

    def take(self) -> None:
        for ends in self.ends:
            self.pool.take(ends.link)

    def ended(self) -> list[Call]:
        return [call for call, outcomes in self.outcomes.items() if outcomes]


def test_each_link_has_one_call_and_the_next_one_goes_to_the_first_that_answers() -> None:
    a = Asking(2)
    calls = [a.ask() for _ in range(4)]
    assert [ends.take() for ends in a.ends] == [1, 1]
    a.ends[1].answer()
    a.take()
    assert [ends.take() for ends in a.ends] == [1, 1]
    a.ends[1].answer()
    a.take()
    assert a.ended() == [calls[1], calls[2]]
    assert a.pool.pending() == 2


def test_large_calls_leave_one_link_to_the_others() -> None:
    a = Asking(2)
    first, second, small = a.ask(is_large=True), a.ask(is_large=True), a.ask()
    a.ends[1].answer()
    a.take()
    assert a.ended() == [small]
    assert [ends.take() for ends in a.ends] == [1, 0]
    a.ends[0].answer()
    a.take()
    assert a.ended() == [first, small]
    a.ends[0].answer()
    a.take()
    assert second in a.ended()


def test_call_of_low_priority_gets_a_turn_once_it_has_waited() -> None:
    a = Asking(1)
    a.ask()
    low = a.ask(priority=1)
    others = [a.ask() for _ in range(3 * Aging.TURNS)]
    low.asked -= 2 * Aging.SECONDS
    order: list[Call] = []
    while len(order) < 1 + len(others):
        a.ends[0].answer()
        a.take()
        order += [call for call in a.ended() if call not in order]
        if low in order:
            break
    assert 1 <= len(set(order) & set(others)) <= Aging.TURNS + 1


def test_call_of_low_priority_waits_for_the_others_before() -> None:
    a = Asking(1)
    a.ask()
    low = a.ask(priority=1)
    for _ in range(3 * Aging.TURNS):
        a.ask()
    for _ in range(1 + 3 * Aging.TURNS):
        assert low not in a.ended()
        a.ends[0].answer()
        a.take()
    a.ends[0].answer()
    a.take()
    assert low in a.ended()


def test_call_that_cannot_be_written_fails_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Asking(1)
    ask, waiting = Link.ask, list[Call]()

    def ask_late(link: Link, *given: Any) -> None:
        if not waiting:
            waiting.append(a.ask())  # of another thread, meanwhile
        ask(link, *given)

    monkeypatch.setattr(Link, "ask", ask_late)
    too_large = a.ask(values={"data": np.zeros(2 * ROOM.slot_bytes, np.uint8)})
    assert isinstance(a.outcomes[too_large][0], TooLargeError)
    assert a.outcomes[too_large][0].code == "too_large"
    a.ends[0].answer()
    a.take()
    assert a.outcomes[waiting[0]] == ["done"]
    assert a.pool.pending() == 0


def test_call_never_begun_fails_after_several_deaths() -> None:
    a = Asking(0)
    call = a.ask()
    for _ in range(LOSSES):
        assert not a.ended()
        ends = Ends()
        a.pool.add(ends.link)
        a.pool.lose(ends.link, WorkerDied("died"))
    assert isinstance(a.outcomes[call][0], WorkerDied)


def test_call_begun_in_a_dead_process_fails_and_others_run_elsewhere() -> None:
    a = Asking(2)
    begun, other, waiting = a.ask(), a.ask(), a.ask()
    first, second = a.ends
    first.take()
    first.there.begin(*first.asked[0])
    a.pool.lose(first.link, WorkerDied("died"))
    assert isinstance(a.outcomes[begun][0], WorkerDied)
    for _ in range(2):
        second.answer()
        a.pool.take(second.link)
    assert a.outcomes[other] == a.outcomes[waiting] == ["done"]


def test_call_of_a_dead_process_goes_to_an_idle_one_at_once() -> None:
    a = Asking(2)
    call = a.ask()
    dead, idle = a.ends if a.ends[0].take() else reversed(a.ends)
    a.pool.lose(dead.link, WorkerDied("died"))
    idle.answer()
    a.pool.take(idle.link)
    assert a.outcomes[call] == ["done"]


def test_call_of_a_dead_process_is_the_first_of_the_next_one() -> None:
    a = Asking(1)
    first, second = a.ask(), a.ask()
    a.pool.lose(a.ends[0].link, WorkerDied("died"))
    ends = Ends()
    a.pool.add(ends.link)
    for ended in ([first], [first, second]):
        ends.answer()
        a.pool.take(ends.link)
        assert a.ended() == ended


def test_call_with_a_passed_deadline_is_not_sent_again() -> None:
    a = Asking(1)
    call = a.ask(deadline=perf_counter())
    a.ends[0].answer(NOT_RUN)
    a.take()
    assert isinstance(a.outcomes[call][0], DeadlineExceeded)
    assert a.ends[0].take() == 0


def test_process_that_refuses_a_call_without_a_reason_is_refused() -> None:
    a = Asking(1)
    a.ask()
    a.ends[0].answer(NOT_RUN)
    with pytest.raises(GarbledError, match="without having run the call"):
        a.take()


def test_abandoned_call_keeps_its_slot_until_it_is_answered() -> None:
    a = Asking(1)
    abandoned, waiting = a.ask(), a.ask()
    a.pool.abandon(abandoned)
    assert [type(error).__name__ for error in a.outcomes[abandoned]] == ["CancelledError"]
    assert a.ends[0].take() == 1
    a.ends[0].answer(NOT_RUN)
    a.take()
    a.ends[0].answer()
    a.take()
    assert a.outcomes[waiting] == ["done"]


def test_close_fails_waiting_calls_and_an_error_in_a_callback_is_survived() -> None:
    def leave(outcome: Any) -> None:
        raise RuntimeError

    a = Asking(1)
    calls = [a.ask(leave) for _ in range(4)]
    a.pool.close()
    calls.append(a.ask())
    a.ends[0].answer()
    a.take()
    assert [type(a.outcomes[call][0]) for call in calls] == [str, *4 * [PipeClosed]]
    said = {str(a.outcomes[call][0]) for call in calls[1:]}
    assert said == {"the pipe was closed while the request waited for another process"}
    assert not a.ends[0].link.under_way


class LeavingCall(Call):
    """A call whose client leaves, on another thread, while the pool handles the death of a process."""

    leave: Callable[[], object] = staticmethod(lambda: None)

    @property
    def until(self) -> float:
        return inf

    @until.setter
    def until(self, value: float) -> None:
        leave, self.leave = self.leave, lambda: None
        leave()


def test_client_leaving_while_a_process_dies_loses_no_other_call() -> None:
    ends, pool = Ends(), Pool(most=2, loses=True)
    pool.add(ends.link)
    outcomes: list[tuple[int, str]] = []
    calls = [
        (LeavingCall if index == 3 else Call)(
            Packed.of(None), 1, lambda error, _, index=index: outcomes.append((index, type(error).__name__))
        )
        for index in range(8)
    ]
    for call in calls:
        pool.ask(call)
    leaving: list[threading.Thread] = []

    def leave() -> None:
        leaving.append(threading.Thread(target=pool.abandon, args=(calls[-1],)))
        leaving[0].start()
        eventually(lambda: (7, "CancelledError") in outcomes)

    calls[3].leave = leave  # type: ignore[attr-defined]
    pool.lose(ends.link, WorkerDied("the engine process died"))
    leaving[0].join(WAIT)
    assert sorted(outcomes) == [(0, "WorkerDied"), (1, "WorkerDied"), (7, "CancelledError")]
    assert pool.pending() == 5
    pool.close()


# -- ``Process`` on top of a pool -------------------------------------------------------------------------------------


@pytest.fixture
def start(register: Register) -> Start:
    name = register(process_backends.Single)
    return lambda instances=1, **more: pipe({"backend": f"Process[{name}]", "instance_num": instances, **more})


class Held:
    """A request that keeps its worker process busy until the gate is opened."""

    def __init__(self, p: pipe, folder: Path, **more: Any) -> None:
        self._file, self._gate = folder / f"{id(self)}", folder / f"{id(self)}.gate"
        os.mkfifo(self._gate)
        self.future: Future[Data] = p.submit({"data": "hold", "file": str(self._file), "gate": str(self._gate), **more})

    def wait_begun(self) -> Held:
        eventually(lambda: self.pid)
        return self

    @property
    def pid(self) -> int:
        """The worker process that runs it; 0 before that."""
        return int(self._file.read_text(encoding="utf-8") or 0) if self._file.exists() else 0

    def open(self) -> None:
        self._gate.write_bytes(b"")


def test_requests_pass_a_busy_worker_process(start: Start, tmp_path: Path) -> None:
    with start(2) as p:
        held = Held(p, tmp_path).wait_begun()
        pids = {outcome(future)["result"][0] for future in [p.submit({"data": "x"}) for _ in range(12)]}
        assert held.pid not in pids
        assert len(pids) == 1
        assert not held.future.done()
        held.open()
        outcome(held.future)
        eventually(lambda: not p.stats()["nodes"]["node"]["busy"])  # which ends after the answer
        node = p.stats()["nodes"]["node"]
        assert (node["requests"], node["failed"], node["queued"]) == (13, 0, 0)
        assert all(node["instance_compute_ms"])


def test_next_request_of_a_key_waits_for_one_whose_client_left(start: Start, tmp_path: Path) -> None:
    with start(2, ordered_by="camera") as p:
        first = Held(p, tmp_path, camera="door").wait_begun()
        second = Held(p, tmp_path, camera="door")
        assert first.future.cancel()
        assert outcome(p.submit({"data": "x", "camera": "yard"}))["result"][0] != first.pid
        assert not second.pid
        first.open()
        second.wait_begun().open()
        outcome(second.future)


def test_close_finishes_running_requests_and_fails_waiting_ones(start: Start, tmp_path: Path) -> None:
    p = start()
    held = Held(p, tmp_path).wait_begun()
    others = [p.submit({"data": "x"}) for _ in range(9)]
    eventually(lambda: p.stats()["inflight"] == 10)
    closing = threading.Thread(target=p.close)
    closing.start()
    for future in others:
        error = error_of(future)
        assert isinstance(error, PipeClosed)
        assert "while the request was queued at node 'node'" in str(error)
    assert not held.future.done()
    held.open()
    assert outcome(held.future)["result"][0] == held.pid
    closing.join(WAIT)
    assert not closing.is_alive()


def test_pipe_collected_on_the_thread_that_takes_answers_ends(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection may come anywhere; the thread that ends the pipe waits for answers that this thread takes."""
    read = Link.read

    def collect_first(self: Link, *given: Any, **more: Any) -> Any:
        gc.collect()
        return read(self, *given, **more)

    monkeypatch.setattr(Link, "read", collect_first)
    gc.disable()  # elsewhere
    try:
        p = start()
        runtime, held = runtime_of(p), Held(p, tmp_path).wait_begun()
        vars(p)["itself"] = p
        del p
        held.open()
        outcome(held.future)
        eventually(lambda: not any(instance.is_alive for instance in runtime.nodes["node"].instances))
    finally:
        gc.enable()


def test_callback_may_close_the_pipe(start: Start) -> None:
    p = start()
    closed = threading.Event()

    def close(future: Future[Data]) -> None:
        p.close()
        closed.set()

    p.submit({"data": "x"}).add_done_callback(close)
    assert closed.wait(WAIT)
    eventually(lambda: not p.stats()["nodes"]["node"]["alive"])
    assert p.stats()["nodes"]["node"]["oldest_batch_s"] == 0.0


def test_large_items_leave_one_process_to_the_others(start: Start, tmp_path: Path) -> None:
    with start(2) as p:
        first, second = Held(p, tmp_path, large=True), Held(p, tmp_path, large=True)
        first.wait_begun()
        for _ in range(5):
            outcome(p.submit({"data": "x"}))
        assert not second.pid
        first.open()
        second.wait_begun().open()
        outcome(first.future), outcome(second.future)
