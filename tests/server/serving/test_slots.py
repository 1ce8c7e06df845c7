"""What a process's death leaves in its slots, at every step."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
from fakes import WAIT
from torchpipe_server.serving.slots import SLOT_BYTES, Found, Mark, SlotTable
from torchpipe_server.wire.protocol import CALL, ONEWAY, Framing, Message

FRAMINGS = [Framing(framed, name) for framed in (False, True) for name in ("binary", "binary_old", "compact")]
NAMES = ["x", "infer_batch", "n" * 56, "größe", "ü" * 28]


def call(name: str = "infer_batch", framing: Framing = FRAMINGS[0], seqid: int = 7, type_: int = CALL) -> Message:
    return Message(name, type_, seqid, framing, b"the whole message", 3, 17)


def without_body(message: Message) -> Message:
    return message._replace(buffer=b"", start=0, end=0)


@pytest.fixture
def table() -> Any:
    made = SlotTable(3)
    yield made
    made.close()


IDLE, LOST = Found(None, False), Found(None, True)
FIRST, SECOND = call("first", seqid=1), call("second", seqid=2)
STEPS = [
    # what is said, and how a death before the next step looks
    ("nothing", (), IDLE),
    ("bytes are about to be taken", ("touch",), LOST),
    ("the message is whole, its work begins", ("begin", FIRST), Found(without_body(FIRST), True)),
    ("nothing else was taken", ("settle",), Found(without_body(FIRST), False)),
    ("part of the next message is taken", ("touch",), Found(without_body(FIRST), True)),
    ("the reply is about to be written", ("reply",), LOST),
    ("all of it is written", ("end",), LOST),  # the next message's first bytes were taken
    ("the next one is whole", ("begin", SECOND), Found(without_body(SECOND), True)),
    ("and nothing more", ("settle",), Found(without_body(SECOND), False)),
    ("its reply", ("reply",), LOST),
    ("is written", ("end",), IDLE),
]


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[step[0] for step in STEPS])
def test_what_a_death_after_each_step_leaves(table: SlotTable, count: int) -> None:
    mark = table.mark(1)
    for _, said, _ in STEPS[:count]:
        if said:
            getattr(mark, said[0])(*said[1:])
    assert table.find(1) == STEPS[count - 1][2]
    assert [table.find(index) for index in (0, 2)] == [IDLE, IDLE], "its neighbours"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framing", FRAMINGS, ids=str)
@pytest.mark.parametrize("seqid", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_a_request_comes_back_as_it_was(table: SlotTable, name: str, framing: Framing, seqid: int) -> None:
    message = call(name, framing, seqid)
    mark = table.mark(0)
    mark.touch()
    mark.begin(message)
    mark.settle()
    assert table.find(0) == Found(without_body(message), False)


@pytest.mark.parametrize("framing", FRAMINGS, ids=str)
def test_a_oneway_request_is_not_to_be_answered(table: SlotTable, framing: Framing) -> None:
    mark = table.mark(0)
    mark.touch()
    mark.begin(call(framing=framing, type_=ONEWAY))
    assert table.find(0) == LOST
    mark.settle()
    assert table.find(0) == IDLE


@pytest.mark.parametrize("name", ["n" * 57, "ü" * 29, "n" * 255])
def test_a_name_that_has_no_room_cannot_be_answered(table: SlotTable, name: str) -> None:
    mark = table.mark(0)
    mark.begin(call(name))
    assert table.find(0) == LOST
    mark.reply()
    mark.end()
    mark.begin(call("short"))
    assert table.find(0) == Found(without_body(call("short")), False), "nothing of the long one is left"


def test_a_new_owner_finds_a_wiped_slot(table: SlotTable) -> None:
    mark = table.mark(2)
    mark.touch()
    mark.begin(call())
    mark.reply()
    assert table.find(2) == LOST
    table.mark(2)
    assert table.find(2) == IDLE


def test_a_step_at_the_edge_of_the_table(table: SlotTable) -> None:
    table.mark(2).begin(call("n" * 56))
    assert table.find(2).request == without_body(call("n" * 56))
    with pytest.raises((ValueError, IndexError)):
        Mark(memoryview(bytearray(2 * SLOT_BYTES)), 2 * SLOT_BYTES).wipe()


def _die(table: SlotTable) -> None:
    mark = table.mark(0)
    mark.touch()
    mark.begin(call("of the child", seqid=5))
    mark.settle()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_a_killed_process_wrote_is_there(table: SlotTable, method: Any) -> None:
    process = multiprocessing.get_context(method).Process(target=_die, args=(table,))
    process.start()
    process.join(WAIT)
    assert process.exitcode == -signal.SIGKILL
    assert table.find(0) == Found(without_body(call("of the child", seqid=5)), False)
