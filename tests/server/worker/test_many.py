"""Calls of many images: they enter the pipe in turns, and each image is answered once, whatever ends its call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from conftest import Register
from kit.backends import Gate
from kit.clients import IDL, Client
from kit.services import FakePipe, serving
from kit.waits import eventually
from torchpipe_server.methods.many import ROUNDS, Turns

from torchpipe_py import Overloaded


def images(data: bytes, count: int) -> list[Any]:
    return [IDL.InferenceParams(uuid="x", data=data) for _ in range(count)]


def test_what_others_send_does_not_wait_for_all_images_of_a_call(register: Register):
    gate = Gate()
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client, Client(server.port) as other:
        large = client.send("infer_many", params=images(b"large", 256))
        gate.wait_entered()
        single = other.send_batch(b"single")
        eventually(lambda: server.run.stats()["admitted"] == ROUNDS + 1)
        gate.open()
        with pytest.raises(IDL.InferenceError):  # bytes are no label
            other.receive(single)
        assert len(client.receive(large)) == 256
    assert len(gate.batches) == 257
    assert gate.batches.index([b"single"]) == ROUNDS


def test_what_waits_ends_with_its_call(register: Register):
    gate = Gate()
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client, Client(server.port) as leaving:
        leaving.send("infer_many", params=images(b"abandoned", 256))
        gate.wait_entered()
        assert {one.error.code for one in client.infer_many([b"late"] * 256, deadline_ms=100)} == {"deadline_exceeded"}
        leaving.close()
        eventually(lambda: server.run.stats()["inflight"] == 0)
        gate.open()
        assert len(client.infer_many([b"y"] * 256)) == 256
    assert Counter(batch[0] for batch in gate.batches) == {b"abandoned": 1, b"y": 256}


class Answers:
    """What becomes of each image of a call: its error, or what it was."""

    def __init__(self, turns: Turns, count: int) -> None:
        self.all: dict[int, Any] = {}
        items = [{"data": index} for index in range(count)]
        self.call = turns.gather(items, None, self._finish, lambda outcomes: None)

    def _finish(self, data: dict[str, Any], error: BaseException | None) -> None:
        assert data["data"] not in self.all, "answered twice"
        self.all[data["data"]] = error or data["data"]


class Ticket:
    """A request that nothing but ``finish`` ends."""

    deadline = None

    def __init__(self, data: Any, on_done: Any) -> None:
        self.finish, self.cancelled = lambda: on_done(data, None), False

    def cancel(self, error: BaseException | None = None) -> None:
        self.cancelled = True


class Stuck(FakePipe):
    """Finishes what the test wants."""

    def __init__(self) -> None:
        self.inside: list[Ticket] = []

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        self.inside.append(Ticket(data, on_done))
        return self.inside[-1]


def test_so_many_images_wait_as_may_be_in_flight():
    run = Stuck()
    turns = Turns(run)  # type: ignore[arg-type]
    answers = Answers(turns, 1500)
    most = len(run.inside)
    assert most == ROUNDS * 8
    assert sorted(answers.all) == list(range(most + 1000, 1500))
    assert all(isinstance(error, Overloaded) for error in answers.all.values())
    assert len(Answers(turns, 3).all) == 3
    run.inside[0].finish()
    assert len(run.inside) == most + 1
    assert not Answers(turns, 1).all, "there is room for one again"
    answers.call.cancel(KeyError("gone"))
    assert Counter(map(type, answers.all.values())) == {Overloaded: 500 - most, int: 1, KeyError: 1000 - 1}
    assert all(ticket.cancelled for ticket in run.inside)
