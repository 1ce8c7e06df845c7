"""What a process's death leaves in the journal, at every step of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from torchpipe_server.front.connection import ANSWERING, Connection
from torchpipe_server.front.journal import Entry, Journal
from torchpipe_server.wire.thrift import Framing, Message

from torchpipe_py.methods.call import Call

NOTHING = (None, False)


def plain(request: Any, is_lost: bool) -> tuple[Any, bool]:
    """The request in values that can be compared, and whether the connection is lost."""
    return None if request is None else (request.name, request.seqid, request.protocol), is_lost


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal(3)
    yield made
    made.close()


FIRST, SECOND = (
    Message("first", False, 1, Framing(False, "binary")),
    Message("second", False, -2, Framing(True, "compact")),
)
STEPS: list[tuple[str, Callable[[Entry], None], Message | None, bool]] = [
    # a step, and what a death before the next one leaves
    ("bytes are about to be taken", Entry.touch, None, True),
    ("the message is complete, its work begins", lambda entry: entry.begin(FIRST, True), FIRST, True),
    ("nothing else was taken", Entry.clear, FIRST, False),
    ("part of the next message is taken", Entry.touch, FIRST, True),
    ("the reply is about to be written", Entry.reply, None, True),
    ("all of it is written", Entry.rest, None, True),  # the next message's first bytes were taken
    ("the next one is complete, and nothing more", lambda entry: entry.begin(SECOND, False), SECOND, False),
    ("its reply", Entry.reply, None, True),
    ("is written", Entry.rest, None, False),
]


@pytest.mark.parametrize("count", range(1, len(STEPS) + 1), ids=[step[0] for step in STEPS])
def test_journal_names_request_after_death_at_each_step(journal: Journal, count: int) -> None:
    entry = journal.entry(1)
    assert journal.read(1) == NOTHING
    for _, step, _, _ in STEPS[:count]:
        step(entry)
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
    entries[2].touch()
    assert idle() == [[1, 0], []]
    entries[2].clear()
    for work in (Entry.reply, lambda entry: entry.begin(FIRST, False)):
        work(entries[2])
        assert idle() == [[1, 0], []]
    for entry in entries[1:]:
        entry.begin(FIRST, False)
        entry.rest()
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


def test_leaving_connection_reads_nothing_after_its_answer(journal: Journal) -> None:
    """The next request waits in the socket for the next process: perhaps it is for a model that was just loaded."""
    transport, owner = Mock(), Mock(is_ending=False, is_draining=False)
    transport.is_closing.return_value = False
    connection = Connection(owner, Mock(), 1, journal.entry(1), False)
    connection.connection_made(transport)
    connection.turn, connection.call = ANSWERING, Call(connection, FIRST, 1)
    connection.leave()
    assert not owner.close_or_hand_over.called
    connection.answered(connection.call, b"loaded", 0.0)
    steps = [name for name, *_ in transport.mock_calls if name in ("pause_reading", "write", "resume_reading")]
    assert steps == ["pause_reading", "write"]
    connection.advance()
    owner.close_or_hand_over.assert_called_once_with(connection)


def test_late_answer_of_closed_connection_leaves_its_slot_to_the_next(journal: Journal) -> None:
    transport = Mock()
    connection = Connection(Mock(is_ending=False), Mock(), 1, journal.entry(1), False)
    connection.connection_made(transport)
    call = Call(connection, FIRST, 1)
    connection.turn, connection.call = ANSWERING, call
    connection.drop()
    journal.entry(1).begin(SECOND, False)
    connection.answered(call, b"late", 0.0)
    assert plain(*journal.read(1)) == plain(SECOND, False)


def test_begins_requests_after_the_round_and_reads_long_messages_in_it(journal: Journal) -> None:
    owner = Mock(is_ending=False, scheduled={}, received=memoryview(bytearray(9)), held_bytes=0)
    owner.options.max_held_bytes = 100
    connection = Connection(owner, Mock(), 1, journal.entry(1), False)
    connection.connection_made(Mock())
    connection.service, connection.reader = Mock(), Mock(pending_bytes=9, is_paused=False)
    connection.reader.next.return_value = None
    connection.buffer_updated(9)
    owner.schedule.assert_called_once_with(connection)
    assert not connection.reader.next.called
    owner.scheduled[connection] = None
    connection.buffer_updated(9)
    assert connection.reader.next.call_count == 1
    owner.schedule.assert_called_once_with(connection)
