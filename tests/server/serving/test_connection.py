"""A connection by itself: what its client is told once, and what never again."""

from __future__ import annotations

import socket

from torchpipe_server.front.connection import Connection
from torchpipe_server.front.journal import Journal
from torchpipe_server.wire.protocol import MessageReader
from torchpipe_server.wire.scanner import Limits, ProtocolError

UNFINISHED = b"\x80\x01\x00\x01\x00\x00\x00\x0binfer_batch\x00\x00\x00\x07\x0c\x00\x01"


def test_a_stream_that_is_broken_off_twice_has_one_last_answer() -> None:
    journal = Journal(1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(ours, MessageReader(Limits()), journal.entry(0), 0, False)
        until = connection.receive(UNFINISHED)
        for _ in range(2):
            assert connection.break_off(ProtocolError("overloaded", "too much is held"))
        message = connection.next_message(until, False)
        assert message is not None
        assert message.error is not None
        assert (message.seqid, message.error.kind) == (7, "overloaded")
        assert connection.next_message(until, False) is None
    journal.close()
