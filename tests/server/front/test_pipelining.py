"""Connections that pipeline take turns with the others, and with the pipe's threads."""

from __future__ import annotations

import threading

import pytest
from kit.clients import Client, connect, pack_call, read_all
from kit.services import serving
from kit.waits import WAIT
from torchpipe_server.front import server as front
from torchpipe_server.front.connection import READ_AHEAD_BYTES
from torchpipe_server.wire.http import HttpReader

LAST = b"GET /nowhere HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
UNKNOWN = b"GET /nowhere/%s HTTP/1.1\r\nHost: a\r\n\r\n" % (b"x" * 1000)


def test_reads_ahead_no_more_than_its_bound_of_requests_that_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pending: list[int] = []
    feed = HttpReader.feed

    def recorded(self: HttpReader, data: bytes) -> None:
        feed(self, data)
        pending.append(self.pending_bytes)

    monkeypatch.setattr(HttpReader, "feed", recorded)
    with serving("Identity") as server, connect(server.port) as sock:
        sender = threading.Thread(target=sock.sendall, args=(UNKNOWN * 2000 + LAST,))
        sender.start()
        assert read_all(sock).count(b"404 Not Found") == 2001
        sender.join(WAIT)
    assert max(pending) <= READ_AHEAD_BYTES + front.RECEIVE_BYTES


def test_requests_that_are_pipelined_leave_time_to_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(front, "sleep", rests.append)
    with serving("Identity") as server, Client(server.port) as client:
        client.ping()
        assert not rests
        client.sock.sendall(pack_call("ping") * 100)
        for _ in range(100):
            client.receive()
    assert rests
