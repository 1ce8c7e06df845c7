"""What a process's death leaves in its slots, at every step."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest
from torchpipe_server.front.journal import SLOT_BYTES, Entry, Journal, LastState
from torchpipe_server.wire.header import CALL, ONEWAY, Framing
from torchpipe_server.wire.protocol import Message

FRAMINGS = [Framing(framed, name) for framed in (False, True) for name in ("binary", "binary_old", "compact")]
NAMES = ["x", "infer_batch", "n" * 56, "größe", "ü" * 28]


def call(name: str = "infer_batch", framing: Framing = FRAMINGS[0], seqid: int = 7, type_: int = CALL) -> Message:
    return Message(name, type_, seqid, framing, b"the whole message", 3, 17)


def without_body(message: Message) -> Message:
    return message._replace(buffer=b"", start=0, end=0)


@pytest.fixture
def journal() -> Any:
    made = Journal(3)
    yield made
    made.close()


IDLE, LOST = LastState(None, False), LastState(None, True)
FIRST, SECOND = call("first", seqid=1), call("second", seqid=2)
STEPS = [
    # what is said, and how a death before the next step looks
    ("nothing", (), IDLE),
    ("bytes are about to be taken", ("touch",), LOST),
    ("the message is whole, its work begins", ("begin", FIRST), LastState(without_body(FIRST), True)),
    ("nothing else was taken", ("settle",), LastState(without_body(FIRST), False)),
    ("part of the next message is taken", ("touch",), LastState(without_body(FIRST), True)),
    ("the reply is about to be written", ("reply",), LOST),
    ("all of it is written", ("end",), LOST),  # the next message's first bytes were taken
    ("the next one is whole", ("begin", SECOND), LastState(without_body(SECOND), True)),
    ("and nothing more", ("settle",), LastState(without_body(SECOND), False)),
    ("its reply", ("reply",), LOST),
    ("is written", ("end",), IDLE),
]


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[step[0] for step in STEPS])
def test_what_a_death_after_each_step_leaves(journal: Journal, count: int) -> None:
    entry = journal.entry(1)
    for _, said, _ in STEPS[:count]:
        if said:
            getattr(entry, said[0])(*said[1:])
    assert journal.read(1) == STEPS[count - 1][2]
    assert [journal.read(index) for index in (0, 2)] == [IDLE, IDLE], "its neighbours"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framing", FRAMINGS, ids=str)
@pytest.mark.parametrize("seqid", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_a_request_comes_back_as_it_was(journal: Journal, name: str, framing: Framing, seqid: int) -> None:
    message = call(name, framing, seqid)
    entry = journal.entry(0)
    entry.touch()
    entry.begin(message)
    entry.settle()
    assert journal.read(0) == LastState(without_body(message), False)


@pytest.mark.parametrize("framing", FRAMINGS, ids=str)
def test_a_oneway_request_is_not_to_be_answered(journal: Journal, framing: Framing) -> None:
    entry = journal.entry(0)
    entry.touch()
    entry.begin(call(framing=framing, type_=ONEWAY))
    assert journal.read(0) == LOST
    entry.settle()
    assert journal.read(0) == IDLE


@pytest.mark.parametrize("name", ["n" * 57, "ü" * 29, "n" * 255])
def test_a_name_that_has_no_room_cannot_be_answered(journal: Journal, name: str) -> None:
    entry = journal.entry(0)
    entry.begin(call(name))
    assert journal.read(0) == LOST
    entry.reply()
    entry.end()
    entry.begin(call("short"))
    assert journal.read(0) == LastState(without_body(call("short")), False), "nothing of the long one is left"


def test_a_new_owner_finds_a_wiped_slot(journal: Journal) -> None:
    entry = journal.entry(2)
    entry.touch()
    entry.begin(call())
    entry.reply()
    assert journal.read(2) == LOST
    journal.entry(2)
    assert journal.read(2) == IDLE


def test_a_step_at_the_edge_of_the_journal(journal: Journal) -> None:
    journal.entry(2).begin(call("n" * 56))
    assert journal.read(2).request == without_body(call("n" * 56))
    with pytest.raises((ValueError, IndexError)):
        Entry(memoryview(bytearray(2 * SLOT_BYTES)), 2 * SLOT_BYTES).wipe()


def _die(journal: Journal) -> None:
    entry = journal.entry(0)
    entry.touch()
    entry.begin(call("of the child", seqid=5))
    entry.settle()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_killed_process_wrote_is_there(journal: Journal, method: Any) -> None:
    process = multiprocessing.get_context(method).Process(target=_die, args=(journal,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert journal.read(0) == LastState(without_body(call("of the child", seqid=5)), False)


def test_who_is_idle_and_for_how_long(journal: Journal) -> None:
    entries = []
    for index, now in enumerate((30.0, 20.0, 10.0)):
        journal.begin(index, now)
        entries.append(journal.entry(index))

    def idle(indexes: Iterable[int] = range(3)) -> list[list[int]]:
        return [list(journal.idle(indexes, has_asked)) for has_asked in (False, True)]

    assert idle() == [[2, 1, 0], []]
    assert idle({0, 1}) == [[1, 0], []]
    entries[2].touch()
    assert idle() == [[1, 0], []], "half a message is no silence"
    entries[2].begin(FIRST)
    entries[2].settle()
    assert idle() == [[1, 0], []], "nor is a request in work"
    entries[2].reply()
    assert idle() == [[1, 0], []]
    entries[2].end()
    assert idle() == [[1, 0], [2]]
    entries[1].begin(SECOND)
    entries[1].end()
    entries[1].remember(5.0)
    assert idle() == [[0], [1, 2]]
    journal.entry(1)
    assert idle() == [[0], [1, 2]], "another process goes on with it"
    journal.begin(1, 50.0)
    assert idle() == [[0, 1], [2]], "a new connection"


def test_who_is_in_use_again_is_left_out(journal: Journal) -> None:
    entries = []
    for index in range(3):
        journal.begin(index, index)
        entries.append(journal.entry(index))
    slots = journal.idle(range(3), has_asked=False)
    assert next(slots) == 0
    entries[1].remember(9.0)
    entries[2].touch()
    assert list(slots) == []
