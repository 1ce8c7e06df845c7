"""Answers over HTTP that another thread encodes: their bytes, their deadlines, and clients that leave meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from typing import Any

import pytest
import torch
from conftest import Register, encode, picture
from kit.backends import returns
from kit.clients import connect
from kit.services import LocalServer, serving
from kit.waits import WAIT, eventually

from torchpipe_py.methods import http
from torchpipe_py.methods.oip import http as oip
from torchpipe_py.wire.pictures import Picture

SIZE = 200 * 150 * 3
IMAGE = encode(picture(200, 150))


class Held:
    """Holds each image that is encoded until a test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        encode = Picture.encode
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()

        def encode_later(*args: Any) -> Any:
            self.begun.release()
            assert self.go_on.wait(WAIT)
            return encode(*args)

        monkeypatch.setattr(Picture, "encode", encode_later)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.go_on.set()


def ask(stack: ExitStack, server: LocalServer, *fields: str) -> Any:
    """A connection whose request asks for an image."""
    sock = stack.enter_context(connect(server.port))
    sock.settimeout(WAIT)
    head = ["POST /infer HTTP/1.1", "Host: x", "Accept: image/png", f"Content-Length: {len(IMAGE)}", *fields]
    sock.sendall("\r\n".join([*head, "", ""]).encode() + IMAGE)
    return sock


def writing(server: LocalServer) -> int:
    return sum(one.call is not None and one.call.writing is not None for one in server.connections())


def test_images_that_wait_to_be_encoded_are_bounded_and_dropped_when_late_or_unwanted(held: Held) -> None:
    with serving("DecodeMat", max_held_bytes=3 * SIZE) as server, ExitStack() as stack:
        first = ask(stack, server)
        assert held.begun.acquire(timeout=WAIT)
        late = ask(stack, server, "X-Deadline-Ms: 500").recv(2**16)
        assert late.startswith(b"HTTP/1.1 504 ")
        assert b"deadline_exceeded" in late
        leaver = ask(stack, server)
        eventually(lambda: writing(server) == 2)
        refused = ask(stack, server).recv(2**16)
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"bytes of unanswered messages" in refused
        leaver.close()
        eventually(lambda: server.server.connections == 3)
        last = ask(stack, server)  # there is room again
        eventually(lambda: writing(server) == 2)
        held.go_on.set()
        for sock in (first, last):
            assert sock.recv(9) == b"HTTP/1.1 "
        assert held.begun.acquire(timeout=WAIT)
        assert not held.begun.acquire(blocking=False), "an image was encoded in vain"


ROW = 40_000
JSON_REQUESTS = {
    "/infer": {"inputs": {"data": "x" * 2 * ROW}},
    "/v2/models/test/infer": {"inputs": [{"name": "data", "datatype": "FP32", "shape": [1, ROW], "data": [0.5] * ROW}]},
}


@pytest.mark.parametrize("path", JSON_REQUESTS)
def test_long_json_is_encoded_while_the_only_instance_serves_others(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held_back(encode: Any) -> Any:
        def encode_later(*args: Any) -> Any:
            if threading.current_thread().name.startswith("torchpipe-writer"):
                begun.set()
                assert go_on.wait(WAIT)
            return encode(*args)

        return encode_later

    monkeypatch.setattr(http, "line_of", held_back(http.line_of))
    monkeypatch.setattr(oip, "encoded_answer", held_back(oip.encoded_answer))
    with serving("Identity") as server, ExitStack() as stack:
        long, other = (HTTPConnection("127.0.0.1", server.port, timeout=WAIT) for _ in range(2))
        for connection in (long, other):
            stack.callback(connection.close)
        stack.callback(go_on.set)
        long.request("POST", path, json.dumps(JSON_REQUESTS[path]), {"Content-Type": "application/json"})
        assert begun.wait(WAIT)
        other.request("POST", "/infer", b"x")
        assert other.getresponse().status == 200
        go_on.set()
        answer = long.getresponse()
        assert (answer.status, len(answer.read()) > 2 * ROW) == (200, True)


@pytest.mark.parametrize("path", JSON_REQUESTS)
def test_json_beyond_the_limit_of_answers_is_too_large_even_if_there_is_no_room_for_it(
    path: str, register: Register
) -> None:
    large = returns(torch.zeros(1, 2**20))
    with serving(register(large), max_reply_bytes=100_000, max_held_bytes=1_000_000) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
        with closing(connection):
            connection.request("POST", path, json.dumps(JSON_REQUESTS[path]), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())["code"]) == (413, "too_large")
