"""What ``Pool`` does where threads and links meet in an order that is seldom seen: the test answers the calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kit.waits import WAIT

from torchpipe_py.errors import PipeClosed, WorkerDied
from torchpipe_py.proc.codec import pack
from torchpipe_py.proc.link import DONE, NOT_RUN, Bell, Link, Room, create_memory, new_bell
from torchpipe_py.proc.pool import LOSSES, Call, Pool

ROOM = Room(8, 2**20, 2**20)


class Ends:
    """A link, and the end of it that answers."""

    def __init__(self) -> None:
        fd = create_memory(ROOM)
        self.link, self.there = Link(fd, ROOM, [fd, new_bell(), new_bell()]), Link(os.dup(fd))
        self.there.fds = []
        self.link.bell = Bell(self.link.fds[1], self.link.asker_asleep)
        self.link.other = Bell(self.link.fds[2], self.link.answerer_asleep)
        self.asked: list[tuple[int, int]] = []

    def take(self) -> int:
        """Calls that are written and not answered."""
        self.asked += [(slot, number) for _, slot, number in self.there.take()[0]]
        return len(self.asked)

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

    def ask(self, done: Callable[[Any], object] = lambda outcome: None) -> Call:
        def tell(error: BaseException | None, outcome: Any) -> None:
            self.told[call].append(error or "done")
            done(outcome)

        call = Call(pack({"data": 1}), 1, tell)
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
