"""Slots of shared memory: what is written at one end is read at the other, and large memory is given back."""

from __future__ import annotations

import os
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchpipe_py.proc import link as link_module
from torchpipe_py.proc.codec import INLINE, Packed
from torchpipe_py.proc.link import (
    DONE,
    GarbledError,
    Link,
    Room,
    create_memory,
)

KIBIBYTE, MEBIBYTE = 2**10, 2**20


class Ends:
    """Both ends of a link, each with a mapping of its own."""

    def __init__(self, room: Room) -> None:
        fd = create_memory(room)
        self.asker, self.answerer = Link(fd, room, [fd]), Link(fd)

    def ask(self, message: Any) -> tuple[int, int]:
        """Slot and number of a call, as the other end has taken it."""
        slot, number = self.asker.take_slot(object())
        self.asker.ask(slot, number, Packed.of(message), 3, 1.5, inf)
        [(header, *taken)], _ = self.answerer.take()
        assert (header.kind, header.first, header.second, taken) == (3, 1.5, inf, [slot, number])
        return slot, number

    def used(self) -> int:
        """Bytes of memory that are taken."""
        return os.stat(self.asker.fds[0]).st_blocks * 512


@pytest.fixture
def ends() -> Ends:
    return Ends(Room(4, 2**28, 2**19))


@pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, 64 * KIBIBYTE, 5 * MEBIBYTE])
def test_messages_of_all_sizes_there_and_back(ends: Ends, size: int) -> None:
    message = {"bytes": bytes(size), "array": np.arange(size, dtype=np.uint8), "same": [bytearray(size)]}
    for _ in range(6):
        slot, number = ends.ask(message)
        found = ends.answerer.read(slot, ends.answerer.request(slot), copies=True)
        ends.answerer.answer(slot, number, Packed.of(found), DONE, 2.5)
        assert ends.asker.take_answered() == [slot]
        reply = ends.asker.reply(slot)
        assert (reply.kind, reply.first) == (DONE, 2.5)
        back = ends.asker.read(slot, reply, copies=True)
        ends.asker.free_slot(slot)
        np.testing.assert_array_equal(back.pop("array"), message["array"], strict=True)
        assert back == {"bytes": message["bytes"], "same": message["same"]}


def test_memory_of_large_messages_is_given_back(ends: Ends) -> None:
    empty = ends.used()
    assert empty <= 64 * KIBIBYTE
    for _ in range(3):
        slot, number = ends.ask(bytes(5 * MEBIBYTE))
        ends.answerer.answer(slot, number, Packed.of(np.zeros(MEBIBYTE)), DONE, 0.0)
        assert ends.used() > 13 * MEBIBYTE
        ends.asker.free_slot(slot)
        assert ends.used() <= empty + ends.asker.room.kept_bytes + 64 * KIBIBYTE


def test_what_is_new_comes_in_the_order_in_which_it_was_sent(ends: Ends) -> None:
    ends.asker._numbers[:] = [2**32 - 2] * 4
    calls = [ends.asker.take_slot(object()) for _ in range(4)]
    for sent, (slot, number) in enumerate(reversed(calls)):
        ends.asker.ask(slot, number, Packed.of(sent), 1, sent, inf)
    ends.asker.give_up(*calls[2])
    asked, given_up = ends.answerer.take()
    assert [(slot, number) for _, slot, number in asked] == calls[::-1]
    assert (given_up, ends.answerer.take()) == ([calls[2]], ([], []))
    assert ends.answerer.is_given_up(*calls[2])
    slot, number = calls[0]
    ends.answerer.begin(slot, number)
    assert [ends.asker.has_begun(*call) for call in calls] == [True, False, False, False]
    ends.answerer.answer(slot, number, Packed.of(1), DONE, 0.0)
    ends.asker.free_slot(slot)
    assert ends.asker.take_slot(object()) == (slot, 1), "the numbers begin anew"


@pytest.mark.parametrize("slot", [0, 3, 100])
def test_an_answer_that_nobody_has_asked_for(ends: Ends, slot: int) -> None:
    ends.answerer._answered[slot] = 7
    assert ends.asker.take_answered() == [slot]
    with pytest.raises(GarbledError, match="nobody has asked for"):
        ends.asker.answered_call(slot)
    with pytest.raises(GarbledError, match="not in their slot"):
        ends.asker.content(0, 2**28, 1)


class CountedLock:
    """Notes how often any of it is taken."""

    taken = 0

    def __enter__(self) -> None:
        CountedLock.taken += 1

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.parametrize(("machine", "in_fence", "in_barrier"), [("x86_64", 0, 1), ("aarch64", 2, 2)])
def test_locks_keep_order_where_the_processor_does_not(
    monkeypatch: pytest.MonkeyPatch, machine: str, in_fence: int, in_barrier: int
) -> None:
    monkeypatch.setattr(link_module, "threading", SimpleNamespace(Lock=CountedLock))
    monkeypatch.setattr(link_module, "_MACHINE", machine)
    for keep_order, taken in ((link_module.fence, in_fence), (link_module.barrier, in_barrier)):
        monkeypatch.setattr(CountedLock, "taken", 0)
        keep_order()
        assert CountedLock.taken == taken
