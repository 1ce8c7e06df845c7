"""Calls to other processes: ``Pool``, whose calls the test answers, the link below it, ``Process`` on top of it."""

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
import process_backends
import pytest
import torch
from conftest import Register
from kit.waits import WAIT, error_of, eventually, outcome

from torchpipe_py import DeadlineExceeded, ItemBackend, PipeClosed, WorkerDied, pipe
from torchpipe_py.proc.codec import INLINE, Packed, pack
from torchpipe_py.proc.link import DONE, NOT_RUN, Bell, GarbledError, Link, Room, create_memory, new_bell
from torchpipe_py.proc.pool import LOSSES, Call, Pool

Data = dict[str, Any]
Start = Callable[..., pipe]

ROOM = Room(8, 2**20, 2**20)


class Ends:
    """A link, and the end of it that answers, each with a mapping of its own."""

    def __init__(self, room: Room = ROOM) -> None:
        fd = create_memory(room)
        self.link, self.there = Link(fd, room, [fd, new_bell(), new_bell()]), Link(os.dup(fd))
        self.there.fds = []
        self.link.bell = Bell(self.link.fds[1], self.link.asker_asleep)
        self.link.other = Bell(self.link.fds[2], self.link.answerer_asleep)
        self.asked: list[tuple[int, int]] = []

    def take(self) -> int:
        """Calls that are written and not answered."""
        self.asked += [(slot, number) for _, slot, number in self.there.take()[0]]
        return len(self.asked)

    def ask(self, message: Any) -> tuple[int, int]:
        """Slot and number of a call, as the other end has taken it."""
        slot, number = self.link.take_slot(object())
        self.link.ask(slot, number, Packed.of(message), 3, 1.5, inf)
        [(header, *taken)], _ = self.there.take()
        assert (header.kind, header.first, header.second, taken) == (3, 1.5, inf, [slot, number])
        return slot, number

    def used(self) -> int:
        """Bytes of memory that are taken."""
        return os.stat(self.link.fds[0]).st_blocks * 512

    def answer(self, kind: int = DONE, result: Any = None) -> None:
        """The call that came first."""
        self.take()
        slot, number = self.asked.pop(0)
        self.there.answer(slot, number, pack({"result": result}, {}), kind, 1.0)


class Asking:
    """A pool of links, and what calls got."""

    def __init__(self, links: int, **more: Any) -> None:
        self.pool, self.ends = Pool(**more), [Ends() for _ in range(links)]
        for ends in self.ends:
            self.pool.add(ends.link)
        self.told: dict[Call, list[Any]] = {}

    def ask(self, done: Callable[[Any], object] = lambda outcome: None, deadline: float | None = None) -> Call:
        def tell(error: BaseException | None, outcome: Any) -> None:
            self.told[call].append(error or "done")
            done(outcome)

        call = Call(pack({"data": 1}), 1, tell, deadline)
        self.told[call] = []
        self.pool.ask(call)
        return call

    def take(self) -> None:
        for ends in self.ends:
            self.pool.take(ends.link)


def test_what_waits_behind_another_is_taken_back_once_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Asking(2)
    first, second = a.ends
    calls = [a.ask(), a.ask()]
    assert [ends.take() for ends in a.ends] == [1, 1]
    writes, may_write, ask = threading.Event(), threading.Event(), Link.ask

    def ask_late(link: Link, *given: Any) -> None:
        writes.set()
        assert may_write.wait(WAIT)
        ask(link, *given)

    monkeypatch.setattr(Link, "ask", ask_late)
    late = threading.Thread(target=lambda: calls.append(a.ask()))
    late.start()
    assert writes.wait(WAIT)
    second.answer()
    a.take()  # and the second one has looked for a call of the first
    assert second.take() == 0
    may_write.set()
    late.join()
    assert second.take() == 1
    first.answer()
    second.answer()
    first.answer(NOT_RUN)
    a.take()
    assert list(a.told.values()) == 3 * [["done"]]
    assert a.pool.pending() == 0


@pytest.mark.parametrize("how", ["lost", "not run"])
def test_a_call_that_is_never_begun_fails_at_last(how: str) -> None:
    a = Asking(0)
    a.ask()
    for _ in range(1 if how == "not run" else LOSSES):
        assert list(a.told.values()) == [[]]
        ends = Ends()
        a.pool.add(ends.link)
        if how == "not run":
            for _ in range(LOSSES):
                ends.answer(NOT_RUN)
                a.pool.take(ends.link)
        else:
            a.pool.lose(ends.link, WorkerDied("died"))
    ((error,),) = a.told.values()
    assert isinstance(error, WorkerDied)


def test_a_call_whose_deadline_has_passed_is_not_sent_again() -> None:
    a = Asking(1)
    a.ask(deadline=perf_counter())
    a.ends[0].answer(NOT_RUN)
    a.take()
    ((error,),) = a.told.values()
    assert isinstance(error, DeadlineExceeded)


def test_close_fails_what_has_not_begun_and_nothing_that_is_told_ends_the_thread() -> None:
    def leave(outcome: Any) -> None:
        raise RuntimeError

    a = Asking(1)
    calls = [a.ask(leave) for _ in range(4)]
    [ends] = a.ends
    ends.take()
    ends.there.begin(*ends.asked[0])
    a.pool.close()
    calls.append(a.ask())
    ends.answer()
    ends.answer(NOT_RUN)
    a.take()
    assert [type(a.told[call][0]) for call in calls] == [str, *4 * [PipeClosed]]
    assert not ends.link.under_way


def as_error(array: np.ndarray) -> Exception:
    try:
        raise ValueError(array)
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda array: array[::2].T[1:].view(np.recarray), np.asarray),
        (lambda array: torch.from_numpy(array)[3:].reshape(-1), lambda kept: kept.numpy()),
        (memoryview, np.asarray),
        (as_error, lambda kept: kept.args[0]),
        (torch.utils.dlpack.from_dlpack, lambda kept: kept.numpy()),
    ],
    ids=["view", "tensor", "memoryview", "error", "dlpack"],
)
def test_an_answer_read_in_place_is_not_written_over(form: Any, read: Any) -> None:
    a = Asking(1, in_place=True)
    kept: list[Any] = []
    for number in range(20):
        a.ask(lambda outcome: kept or kept.append(form(outcome[0]["result"])))
        a.ends[0].answer(result=np.full((64, 64), number + 1, np.uint8))
        a.take()
    assert set(read(kept[0]).ravel().tolist()) == {1}
    assert len(a.ends[0].link._read_in_place) < 4


KIBIBYTE, MEBIBYTE = 2**10, 2**20


@pytest.fixture
def ends() -> Ends:
    return Ends(Room(4, 2**28, 2**19))


@pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, 64 * KIBIBYTE, 5 * MEBIBYTE])
def test_messages_of_all_sizes_there_and_back(ends: Ends, size: int) -> None:
    message = {"bytes": bytes(size), "array": np.arange(size, dtype=np.uint8), "same": [bytearray(size)]}
    for _ in range(6):
        slot, number = ends.ask(message)
        found = ends.there.read(slot, ends.there.request(slot), copies=True)
        ends.there.answer(slot, number, Packed.of(found), DONE, 2.5)
        assert ends.link.take_answered() == [slot]
        reply = ends.link.reply(slot)
        assert (reply.kind, reply.first) == (DONE, 2.5)
        back = ends.link.read(slot, reply, copies=True)
        ends.link.free_slot(slot)
        np.testing.assert_array_equal(back.pop("array"), message["array"], strict=True)
        assert back == {"bytes": message["bytes"], "same": message["same"]}


def test_memory_of_large_messages_is_given_back(ends: Ends) -> None:
    empty = ends.used()
    assert empty <= 64 * KIBIBYTE
    for _ in range(3):
        slot, number = ends.ask(bytes(5 * MEBIBYTE))
        ends.there.answer(slot, number, Packed.of(np.zeros(MEBIBYTE)), DONE, 0.0)
        assert ends.used() > 13 * MEBIBYTE
        ends.link.free_slot(slot)
        assert ends.used() <= empty + ends.link.room.kept_bytes + 64 * KIBIBYTE


def test_what_is_new_comes_in_the_order_in_which_it_was_sent(ends: Ends) -> None:
    ends.link._numbers[:] = [2**32 - 2] * 4
    calls = [ends.link.take_slot(object()) for _ in range(4)]
    for sent, (slot, number) in enumerate(reversed(calls)):
        ends.link.ask(slot, number, Packed.of(sent), 1, sent, inf)
    ends.link.give_up(*calls[2])
    asked, given_up = ends.there.take()
    assert [(slot, number) for _, slot, number in asked] == calls[::-1]
    assert (given_up, ends.there.take()) == ([calls[2]], ([], []))
    assert ends.there.is_given_up(*calls[2])
    slot, number = calls[0]
    ends.there.begin(slot, number)
    assert [ends.link.has_begun(*call) for call in calls] == [True, False, False, False]
    ends.there.answer(slot, number, Packed.of(1), DONE, 0.0)
    ends.link.free_slot(slot)
    assert ends.link.take_slot(object()) == (slot, 1), "the numbers begin anew"


@pytest.mark.parametrize("slot", [0, 3, 100])
def test_an_answer_that_nobody_has_asked_for(ends: Ends, slot: int) -> None:
    ends.there._answered[slot] = 7
    assert ends.link.take_answered() == [slot]
    with pytest.raises(GarbledError, match="nobody has asked for"):
        ends.link.answered_call(slot)
    with pytest.raises(GarbledError, match="not in their slot"):
        ends.link.content(0, 2**28, 1)


# -- ``Process``: which worker process has which request, and what happens to those that wait --------------------------


@pytest.fixture
def start(register: Register) -> Start:
    name = register(process_backends.Single)
    return lambda instances=1, **more: pipe({"backend": f"Process[{name}]", "instance_num": instances, **more})


class Held:
    """A request that a worker process is at until the gate is opened."""

    def __init__(self, p: pipe, folder: Path, **more: Any) -> None:
        self._file, self._gate = folder / f"{id(self)}", folder / f"{id(self)}.gate"
        os.mkfifo(self._gate)
        self.future: Future[Data] = p.submit({"data": "hold", "file": str(self._file), "gate": str(self._gate), **more})

    def wait_begun(self) -> Held:
        eventually(lambda: self.pid)
        return self

    @property
    def pid(self) -> int:
        """Of the worker process; 0 where it has not begun."""
        return int(self._file.read_text(encoding="utf-8") or 0) if self._file.exists() else 0

    def open(self) -> None:
        self._gate.write_bytes(b"")


def test_what_waits_behind_another_goes_to_the_one_that_is_idle(start: Start, tmp_path: Path) -> None:
    with start(2) as p:
        held = Held(p, tmp_path).wait_begun()
        pids = {outcome(future)["result"][0] for future in [p.submit({"data": "x"}) for _ in range(12)]}
        assert held.pid not in pids
        assert len(pids) == 1
        assert not held.future.done()
        held.open()
        outcome(held.future)
        eventually(lambda: not p.stats()["nodes"]["node"]["busy"])  # which ends behind the answer
        node = p.stats()["nodes"]["node"]
        assert (node["requests"], node["failed"], node["queued"]) == (13, 0, 0)
        assert all(node["instance_compute_ms"])


def test_close_ends_what_runs_and_fails_what_waits(start: Start, tmp_path: Path) -> None:
    p = start()
    held = Held(p, tmp_path).wait_begun()
    others = [p.submit({"data": "x"}) for _ in range(9)]
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


def test_a_pipe_that_is_collected_on_the_thread_that_takes_answers_ends(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection may come anywhere. Whoever ends the pipe waits for answers that this thread has to take."""
    read = Link.read

    def collect_first(self: Link, *given: Any, **more: Any) -> Any:
        gc.collect()
        return read(self, *given, **more)

    monkeypatch.setattr(Link, "read", collect_first)
    gc.disable()  # elsewhere
    try:
        p = start()
        runtime, held = p._runtime, Held(p, tmp_path).wait_begun()
        vars(p)["itself"] = p
        del p
        held.open()
        outcome(held.future)
        eventually(lambda: not any(instance.is_alive for instance in runtime.nodes["node"].instances))
    finally:
        gc.enable()


def test_a_callback_may_close_the_pipe(start: Start) -> None:
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


class Keep(ItemBackend):
    """Keeps the arrays that came."""

    def setup(self) -> None:
        self.kept: list[np.ndarray] = []
        kept_by.append(self.kept)

    def forward_item(self, item: Data) -> None:
        self.kept.append(item["data"])
        item["result"] = item["data"] = int(item["data"][0, 0])


kept_by: list[list[np.ndarray]] = []


def lies_in_a_slot(array: np.ndarray) -> bool:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is not None


def test_the_next_node_reads_answers_where_they_lie(register: Register) -> None:
    first, second = register(process_backends.Fill), register(Keep)
    with pipe({"a": {"backend": f"Process[{first}]", "next": "b"}, "b": {"backend": second}}) as p:
        kept = kept_by.pop()
        for times in range(2):
            kept.clear()
            for number in range(20):
                assert p({"data": number})["result"] == number
            # Those that are kept stay as they are, and are copies where too many are kept.
            assert [int(array.max()) for array in kept] == [int(array.min()) for array in kept] == [*range(20)]
            assert [lies_in_a_slot(array) for array in kept] == [True] * 14 + [False] * 6, times


def test_a_caller_gets_copies(register: Register) -> None:
    with pipe({"backend": f"Process[{register(process_backends.Fill)}]"}) as p:
        assert not lies_in_a_slot(p({"data": 1})["result"])


class LeavingCall(Call):
    """A call whose client leaves, on another thread, when the pool looks at its time for the first time."""

    leave: Callable[[], object] = staticmethod(lambda: None)

    @property
    def until(self) -> float:
        return inf

    @until.setter
    def until(self, value: float) -> None:
        leave, self.leave = self.leave, lambda: None
        leave()


def test_a_client_that_leaves_while_a_process_dies_loses_no_call_of_others() -> None:
    ends, pool = Ends(), Pool(ahead=2, loses=True)
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
        leaving.append(threading.Thread(target=pool.give_up, args=(calls[-1],)))
        leaving[0].start()
        eventually(lambda: (7, "CancelledError") in outcomes)

    calls[3].leave = leave  # type: ignore[attr-defined]
    pool.lose(ends.link, WorkerDied("the engine process died"))
    leaving[0].join(WAIT)
    assert sorted(outcomes) == [(0, "WorkerDied"), (1, "WorkerDied"), (7, "CancelledError")]
    assert pool.pending() == 5
    pool.close()
