"""What ``Dispatcher`` does where threads, worker processes and ``close`` meet in an order that is seldom seen."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fakes import WAIT, eventually

from torchpipe_py.errors import WorkerDied
from torchpipe_py.proc.process.child import AHEAD, Answer, Call, WorkerMemory, WorkerProcess
from torchpipe_py.proc.process.dispatcher import Dispatcher
from torchpipe_py.proc.shared import codec
from torchpipe_py.proc.shared.link import Slots
from torchpipe_py.proc.shared.memory import DONE, NOT_RUN, Bell

Data = dict[str, Any]


class Still(WorkerProcess):
    """One without a process: the test gives its answers."""

    def __init__(self) -> None:
        Slots.__init__(self, WorkerMemory.create())
        self._label, self.instance = "Still", 0
        self.is_open, self.is_shared, self.has_large = True, False, False
        self.since, self.room = 0.0, AHEAD
        self._read_in_place, self._dropped, self._fresh = {}, deque(), None
        ends, rings, sleeps = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3))
        self._fds, self.watched = [self.memory.fd, ends, rings, sleeps], [ends]
        self.bell = Bell(self.memory.asker_asleep, rings)
        self._its_bell = Bell(self.memory.answerer_asleep, sleeps)
        self.answers_at_death: list[int] = []

    def asked(self) -> list[int]:
        """The slots with calls that are written and not answered."""
        asked = np.frombuffer(self.memory.from_asker(), np.uint32)
        answered = np.frombuffer(self.memory.from_answerer(), np.uint32)
        return [slot for slot in range(self.memory.slots) if asked[slot] != answered[slot]]

    def answer(self, slot: int, kind: int = DONE, result: Any = None) -> None:
        self.memory.answer(slot, self._numbers[slot], codec.pack({"result": result}, {}), kind, 1.0, 2.0)
        self.bell.ring()

    def die(self) -> None:
        os.eventfd_write(self.watched[0], 1)

    def died(self) -> WorkerDied:
        for slot in self.answers_at_death:
            self.answer(slot)
        self.is_open = False
        return WorkerDied("died")


class Asking:
    """A dispatcher with worker processes that stand still, and the answers that calls got."""

    def __init__(self, workers: int, in_place: bool = False) -> None:
        self.dispatcher = Dispatcher(workers, 0.0, in_place)
        self.workers = [Still() for _ in range(workers)]
        self.answers: dict[Call, list[Answer]] = {}
        for index, worker in enumerate(self.workers):
            assert self.dispatcher.enter(index, worker, lambda: None)

    def ask(self, done: Callable[[Answer], object] = lambda answer: None) -> Call:
        def tell(answer: Answer) -> None:
            self.answers[call].append(answer)
            done(answer)

        call = Call(codec.pack({"data": 1}), done=tell)
        self.answers[call] = []
        self.dispatcher.ask(call)
        return call

    def answered(self, call: Call) -> None:
        eventually(lambda: self.answers[call])

    def end(self) -> None:
        """Let each worker process say that it has not run what it still has, and leave."""
        self.dispatcher.close()
        for index, worker in enumerate(self.workers):
            if worker.is_open:
                for slot in worker.asked():
                    worker.answer(slot, NOT_RUN)
                eventually(lambda worker=worker: not any(worker.calls))
            self.dispatcher.leave(index)


@pytest.fixture
def asking() -> Iterator[Callable[..., Asking]]:
    made: list[Asking] = []

    def make(workers: int, in_place: bool = False) -> Asking:
        made.append(Asking(workers, in_place))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_call_that_is_not_written_yet_stays_where_it_is(
    asking: Callable[..., Asking], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = asking(2)
    first, second = a.workers
    a.ask()
    other = a.ask()
    assert [len(worker.asked()) for worker in a.workers] == [1, 1]

    writes, may_write, write = threading.Event(), threading.Event(), WorkerProcess.write

    def write_late(worker: WorkerProcess, *call: Any) -> None:
        if threading.current_thread() is late:
            writes.set()
            assert may_write.wait(WAIT)
        write(worker, *call)

    monkeypatch.setattr(WorkerProcess, "write", write_late)
    calls: list[Call] = []
    late = threading.Thread(target=lambda: calls.append(a.ask()))
    late.start()
    assert writes.wait(WAIT)
    second.answer(*second.asked())
    a.answered(other)  # by now the second one has looked for a call of the first
    assert not second.asked()
    may_write.set()
    late.join()
    # Once it is written, it goes to the one that is idle, and its slot is free when it was answered.
    [call] = calls
    assert call.worker is second
    second.answer(*second.asked())
    a.answered(call)
    assert len(first.asked()) == 2


def test_the_last_answers_of_one_that_dies_take_nothing_from_the_others(asking: Callable[..., Asking]) -> None:
    a = asking(3)
    calls = [a.ask() for _ in range(9)]
    dies, *others = a.workers
    assert [len(worker.asked()) for worker in a.workers] == [3, 3, 3]
    held = [worker.asked() for worker in others]
    dies.answers_at_death = dies.asked()
    dies.die()
    for call in calls[::3]:
        a.answered(call)
    assert [worker.asked() for worker in others] == held
    assert all(call.worker in others for call in calls if not a.answers[call])


def test_nothing_that_an_answer_is_told_to_ends_the_thread(asking: Callable[..., Asking]) -> None:
    a = asking(1)

    def leave(answer: Answer) -> None:
        raise SystemExit

    for done in (leave, lambda answer: None):
        call = a.ask(done)
        a.workers[0].answer(*a.workers[0].asked())
        a.answered(call)


def _as_error(array: np.ndarray) -> Exception:
    try:
        raise ValueError({"result": array})
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda array: array[::2].T[1:].view(), lambda kept: kept),
        (torch.from_numpy, lambda kept: kept.numpy()),
        (lambda array: torch.from_numpy(array)[3:].reshape(-1), lambda kept: kept.numpy()),
        (memoryview, np.asarray),
        (lambda array: array.view(np.recarray)[5:], np.asarray),
        (_as_error, lambda kept: kept.args[0]["result"]),
        (lambda array: np.frombuffer(array, np.uint32), lambda kept: kept),
        (torch.utils.dlpack.from_dlpack, lambda kept: kept.numpy()),
    ],
    ids=["view", "tensor", "tensor of tensor", "memoryview", "subclass", "error", "buffer", "dlpack"],
)
def test_an_answer_read_in_place_is_not_written_over(asking: Callable[..., Asking], form: Any, read: Any) -> None:
    a = asking(1, in_place=True)
    [worker] = a.workers
    kept = []
    for number in range(40):
        call = a.ask(lambda answer: kept or kept.append(form(answer.outcomes[0]["result"])))
        [slot] = worker.asked()
        worker.answer(slot, result=np.full((64, 64), number + 1, np.uint8))
        a.answered(call)
        a.answers.pop(call)
    assert set(np.asarray(read(kept[0])).view(np.uint8).ravel().tolist()) == {1}
    assert len(worker._read_in_place) < 4
    kept.clear()
