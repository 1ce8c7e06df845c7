"""Requests over HTTP that another thread reads: their deadlines, and clients that leave meanwhile."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kit.clients import HttpClient, connect
from kit.services import steered
from kit.waits import WAIT, eventually

import torchpipe_py.methods.http
from torchpipe_py.serving import SMALL_BYTES

LONG = json.dumps({"inputs": {"data": {"b64": ""}}}).encode() + b" " * SMALL_BYTES


class Held:
    """Holds each request that is read until a test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read = torchpipe_py.methods.http.read_request
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()

        def read_later(*args: Any) -> Any:
            self.begun.release()
            assert self.go_on.wait(WAIT)
            return read(*args)

        monkeypatch.setattr(torchpipe_py.methods.http, "read_request", read_later)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go_on.set()


def request(*fields: str) -> bytes:
    head = [
        "POST /infer HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(LONG)}",
        *fields,
    ]
    return "\r\n".join([*head, "", ""]).encode() + LONG


def test_deadline_ends_a_request_that_waits_to_be_read(held: Held) -> None:
    with steered() as server, connect(server.port) as first, connect(server.port) as late:
        first.sendall(request())
        assert held.begun.acquire(timeout=WAIT)
        late.sendall(request("X-Deadline-Ms: 200"))
        late.settimeout(WAIT)
        answer = late.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 504 ")
        assert b"deadline_exceeded" in answer
        assert not held.begun.acquire(blocking=False)
        held.go_on.set()
        first.settimeout(WAIT)
        assert first.recv(9) == b"HTTP/1.1 "


@pytest.mark.parametrize("how", [socket.SHUT_WR, socket.SHUT_RDWR])
def test_request_of_a_client_that_left_while_it_was_read_does_not_start(held: Held, how: int) -> None:
    with steered() as server, connect(server.port) as leaver, HttpClient(server.port) as other:
        leaver.sendall(request())
        assert held.begun.acquire(timeout=WAIT)
        leaver.shutdown(how)
        eventually(lambda: server.server.connections == 1)
        before = server.run.stats()["admitted"]
        held.go_on.set()
        eventually(lambda: "POST /infer" in server.by_method)
        assert server.by_method["POST /infer"] == {"cancelled": 1}
        assert server.run.stats()["admitted"] == before
        other.ping()


def test_bytes_of_clients_that_left_before_their_turn_are_not_read(held: Held) -> None:
    with steered() as server, connect(server.port) as first:
        first.sendall(request())
        assert held.begun.acquire(timeout=WAIT)
        leavers = [connect(server.port) for _ in range(20)]
        for leaver in leavers:
            leaver.sendall(request())
        eventually(lambda: sum(one.call is not None for one in server.connections()) == 21)
        for leaver in leavers:
            leaver.close()
        eventually(lambda: server.server.connections == 1)
        held.go_on.set()
        first.settimeout(WAIT)
        assert first.recv(9) == b"HTTP/1.1 "
        assert not held.begun.acquire(blocking=False)
