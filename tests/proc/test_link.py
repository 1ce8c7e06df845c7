"""The link: messages in shared memory, in order, bounded, and checked."""

from __future__ import annotations

import platform
from math import inf
from time import perf_counter

import numpy as np
import pytest
from kit.ends import Ends

from torchpipe_py import BackendUnavailable, pipe
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.proc.codec import INLINE, Packed
from torchpipe_py.proc.engine import EngineServer
from torchpipe_py.proc.link import DONE, GarbledError, Room

KIBIBYTE, MEBIBYTE = 2**10, 2**20


@pytest.fixture
def ends() -> Ends:
    return Ends(Room(4, 2**28, 2**19))


@pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, 64 * KIBIBYTE, 5 * MEBIBYTE])
def test_message_of_any_size_arrives_unchanged_both_ways(ends: Ends, size: int) -> None:
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


def test_releases_memory_of_large_messages(ends: Ends) -> None:
    empty = ends.used()
    assert empty <= 64 * KIBIBYTE
    for _ in range(3):
        slot, number = ends.ask(bytes(5 * MEBIBYTE))
        ends.there.answer(slot, number, Packed.of(np.zeros(MEBIBYTE)), DONE, 0.0)
        assert ends.used() > 13 * MEBIBYTE
        ends.link.free_slot(slot)
        assert ends.used() <= empty + ends.link.room.kept_bytes + 64 * KIBIBYTE


def test_time_of_a_call_begins_when_the_one_before_ended(ends: Ends) -> None:
    assert ends.link.since == 0.0
    began = perf_counter()
    (first, _), (second, _) = ends.ask(1), ends.ask(2)
    ended = perf_counter()
    assert began <= ends.link.since <= ended
    ends.link.free_slot(first)
    assert ends.link.since >= ended
    ends.link.free_slot(second)
    assert ends.link.since == 0.0


def test_takes_calls_in_the_order_of_sending_and_notices_abandoned_ones(ends: Ends) -> None:
    ends.link._numbers[:] = [2**32 - 2] * 4
    calls = [ends.link.take_slot(object()) for _ in range(4)]
    for sent, (slot, number) in enumerate(reversed(calls)):
        ends.link.ask(slot, number, Packed.of(sent), 1, sent, inf)
    ends.link.abandon(*calls[2])
    asked, abandoned = ends.there.take()
    assert [(slot, number) for _, slot, number in asked] == calls[::-1]
    assert (abandoned, ends.there.take()) == ([calls[2]], ([], []))
    assert ends.there.is_abandoned(*calls[2])
    slot, number = calls[0]
    ends.there.begin(slot, number)
    assert [ends.link.has_begun(*call) for call in calls] == [True, False, False, False]
    ends.there.answer(slot, number, Packed.of(1), DONE, 0.0)
    ends.link.free_slot(slot)
    assert ends.link.take_slot(object()) == (slot, 1), "numbers start over after 2**32 - 1"


@pytest.mark.parametrize("slot", [0, 3, 100])
def test_refuses_answers_without_a_request(ends: Ends, slot: int) -> None:
    ends.there._answered[slot] = 7
    assert ends.link.take_answered() == [slot]
    with pytest.raises(GarbledError, match="an answer without a request"):
        ends.link.answered_call(slot)
    with pytest.raises(GarbledError, match="not in their slot"):
        ends.link.content(0, 2**28, 1)


@pytest.mark.parametrize(
    "config", [{"backend": "Process[Identity]"}, {"backend": "DecodeMat", "decode_isolation": "process"}]
)
def test_other_processes_are_refused_on_other_machines_than_x86_64(
    config: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(BackendUnavailable, match="needs Linux on x86-64, not linux on aarch64"):
        pipe(config)


def test_engine_process_is_refused_on_other_machines_than_x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(BackendUnavailable, match="an engine process needs Linux on x86-64"):
        EngineServer(plan_pipeline({"a": {"backend": "Identity", "shared": True}}))
