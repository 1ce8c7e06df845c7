"""Slots of shared memory: what is written at one end is read at the other, and large memory is given back."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.waits import WAIT

from torchpipe_py.errors import Failure
from torchpipe_py.proc import link as link_module
from torchpipe_py.proc.codec import INLINE, Packed
from torchpipe_py.proc.link import (
    DONE,
    FAILED,
    FAILURE_BYTES,
    Bell,
    GarbledError,
    Link,
    Room,
    TooLargeError,
    create_memory,
    new_bell,
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


@contextmanager
def ends_of(slot_bytes: int = 2**28, kept_bytes: int = 2**19) -> Iterator[Ends]:
    yield Ends(Room(4, slot_bytes, kept_bytes))


@pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, 64 * KIBIBYTE, 5 * MEBIBYTE])
def test_messages_of_all_sizes_there_and_back(size: int) -> None:
    message = {"bytes": bytes(size), "array": np.arange(size, dtype=np.uint8), "same": [bytearray(size)]}
    with ends_of() as ends:
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


def test_what_does_not_fit() -> None:
    with ends_of(slot_bytes=2**18) as ends:
        slot, number = ends.asker.take_slot(object())
        for size in (2**18 - FAILURE_BYTES, 2**18, 2**20):
            with pytest.raises(TooLargeError, match=r"a request of \d+ bytes is too large .* 196608 bytes are left"):
                ends.asker.ask(slot, number, Packed.of(bytes(size)), 1, 0.0, inf)
        assert not ends.answerer.has_work(), "it was sent nevertheless"
        slot, number = ends.ask(bytes(2**18 - FAILURE_BYTES - KIBIBYTE))
        with pytest.raises(TooLargeError, match=r"an answer of \d+ bytes is too large"):
            ends.answerer.answer(slot, number, Packed.of(bytes(2**17)), DONE, 0.0)
        assert not ends.asker.has_answers()
        for trace, has_trace in (("t" * 100, True), ("t" * 10**5, False)):
            ends.answerer.fail(slot, number, Failure("", "Odd", "what was wrong", trace, b""), 2.5)
            reply = ends.asker.reply(slot)
            told = ends.asker.read(slot, reply, copies=True)
            assert (reply.kind, told.name, told.message) == (FAILED, "Odd", "what was wrong")
            assert bool(told.trace) == has_trace


def test_memory_of_large_messages_is_given_back() -> None:
    with ends_of() as ends:
        empty = ends.used()
        assert empty <= 64 * KIBIBYTE
        for _ in range(3):
            slot, number = ends.ask(bytes(5 * MEBIBYTE))
            ends.answerer.answer(slot, number, Packed.of(np.zeros(MEBIBYTE)), DONE, 0.0)
            assert ends.used() > 13 * MEBIBYTE
            ends.asker.free_slot(slot)
            assert ends.used() <= empty + ends.asker.room.kept_bytes + 64 * KIBIBYTE


def test_what_is_new_comes_in_the_order_in_which_it_was_sent() -> None:
    with ends_of() as ends:
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
def test_an_answer_that_nobody_has_asked_for(slot: int) -> None:
    with ends_of() as ends:
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


def test_a_bell_wakes_who_sleeps_and_nobody_else() -> None:
    read_end, write_end = os.pipe()
    with ends_of() as ends:
        bell, ringer = (Bell(fd, end.asker_asleep) for fd, end in ((new_bell(), ends.asker), (0, ends.answerer)))
        ringer.fd = bell.fd
        poller = select.poll()
        poller.register(bell.fd, select.POLLIN)
        ringer.ring()
        assert poller.poll(0) == [], "it was rung for one who is awake"
        assert bell.sleep(poller, lambda: True) == []
        asleep = threading.Event()
        thread = threading.Thread(target=lambda: bell.sleep(poller, asleep.set, WAIT))
        thread.start()
        assert asleep.wait(WAIT)
        ringer.ring()
        thread.join(WAIT)
        assert not thread.is_alive()
        poller.register(read_end, select.POLLIN)
        os.write(write_end, b"x")
        assert bell.sleep(poller, lambda: False) == [read_end]
        for fd in (read_end, write_end, bell.fd):
            os.close(fd)
