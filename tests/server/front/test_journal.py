"""What a process's death leaves in the journal, at every step of a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from torchpipe_server.front.connection import Call, Connection
from torchpipe_server.front.journal import BUSY, CLEAN, IDLE, REPLYING, TOUCHED, Entry, Journal
from torchpipe_server.wire.thrift import Framing, Message

NOTHING = (None, False)


def plain(request: Any, is_lost: bool) -> tuple[Any, bool]:
    """The request in values that can be compared, and whether the connection is lost."""
    return None if request is None else (request.name, request.seqid, request.protocol), is_lost


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal(3)
    yield made
    made.close()


def mark(entry: Entry, stream: int | None = None, work: int | None = None) -> None:
    if stream is not None:
        entry.view[entry.base] = stream
    if work is not None:
        entry.view[entry.base + 1] = work


FIRST, SECOND = (
    Message("first", False, 1, Framing(False, "binary")),
    Message("second", False, -2, Framing(True, "compact")),
)
STEPS = [  # a step, and what a death before the next one leaves
    ("bytes are about to be taken", {"stream": TOUCHED}, None, True),
    ("the message is whole, its work begins", FIRST, FIRST, True),
    ("nothing else was taken", {"stream": CLEAN}, FIRST, False),
    ("part of the next message is taken", {"stream": TOUCHED}, FIRST, True),
    ("the reply is about to be written", {"work": REPLYING}, None, True),
    ("all of it is written", {"work": IDLE}, None, True),  # the next message's first bytes were taken
    ("the next one is whole", SECOND, SECOND, True),
    ("and nothing more", {"stream": CLEAN}, SECOND, False),
    ("its reply", {"work": REPLYING}, None, True),
    ("is written", {"work": IDLE}, None, False),
]


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[step[0] for step in STEPS])
def test_a_death_after_each_step(journal: Journal, count: int) -> None:
    entry = journal.entry(1)
    assert journal.read(1) == NOTHING
    for _, step, _, _ in STEPS[:count]:
        if isinstance(step, Message):
            entry.begin(step)
        else:
            mark(entry, **step)
    _, _, request, is_lost = STEPS[count - 1]
    assert plain(*journal.read(1)) == plain(request, is_lost)
    assert [journal.read(index) for index in (0, 2)] == [NOTHING, NOTHING], "its neighbours"
    journal.entry(1)
    assert journal.read(1) == NOTHING, "another process goes on with it"


def test_lists_idle_connections_the_longest_idle_first(journal: Journal) -> None:
    entries = []
    for index, now in enumerate((30.0, 20.0, 10.0)):
        journal.begin(index, now)
        entries.append(journal.entry(index))

    def idle(indexes: Iterable[int] = range(3)) -> list[list[int]]:
        return [list(journal.idle(indexes, has_asked)) for has_asked in (False, True)]

    assert idle() == [[2, 1, 0], []]
    assert idle({0, 1}) == [[1, 0], []]
    for stream, work in ((TOUCHED, IDLE), (CLEAN, BUSY), (CLEAN, REPLYING)):
        mark(entries[2], stream, work)
        assert idle() == [[1, 0], []]
    for entry in entries[1:]:
        entry.begin(FIRST)
        mark(entry, work=IDLE)
    entries[1].remember(5.0)
    assert idle() == [[0], [1, 2]]
    journal.entry(1)
    assert idle() == [[0], [1, 2]], "another process goes on with it"
    journal.begin(1, 50.0)
    assert idle() == [[0, 1], [2]], "a new connection"
    slots = journal.idle(range(2), has_asked=False)
    assert next(slots) == 0
    entries[1].remember(90.0)
    assert list(slots) == [], "in use again"


def test_a_leaving_connection_reads_nothing_after_its_answer(journal: Journal) -> None:
    """The next request waits in the socket for the next process: perhaps it is for a model that was just loaded."""
    transport, owner = Mock(), Mock(is_ending=False, is_draining=False)
    transport.is_closing.return_value = False
    connection = Connection(owner, Mock(), 1, journal.entry(1), False)
    connection.connection_made(transport)
    connection.call = Call(connection, Mock(), FIRST, 1, 0.0)
    connection.leave()
    assert not owner.let_leave.called
    connection.answered(connection.call, b"loaded", 0.0)
    steps = [name for name, *_ in transport.mock_calls if name in ("pause_reading", "write", "resume_reading")]
    assert steps == ["pause_reading", "write"]
    connection.go_on()
    owner.let_leave.assert_called_once_with(connection)
