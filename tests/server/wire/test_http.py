"""Requests, whole, in pieces and wrong; what an answer looks like."""

from __future__ import annotations

import random
import time

import pytest
from torchpipe_server.wire.http import MAX_FIELDS, MAX_HEAD_BYTES, HttpAnswer, HttpError, HttpRequest, read_request
from torchpipe_server.wire.http import write_answer as write

GET = b"GET /stats?a=1 HTTP/1.1\r\nHost: here:80\r\nX-Y: z\r\n\r\n"


def read(data: bytes) -> HttpRequest | None:
    return read_request(bytearray(data))


def status_of(data: bytes) -> int:
    with pytest.raises(HttpError) as caught:
        read(data)
    assert len(str(caught.value)) < 100
    return caught.value.status


def test_a_request_in_any_pieces():
    for size in range(1, len(GET)):
        received = bytearray()
        found = []
        for start in range(0, len(GET), size):
            received += GET[start : start + size]
            found.append(read_request(received))
        assert found[-1] == HttpRequest("GET", "/stats", "here:80", True)
        assert not any(found[:-1])
        assert not received


def test_requests_one_behind_the_other():
    received = bytearray(b"\r\n" + GET + b"HEAD / HTTP/1.0\n\nGE")
    assert read_request(received) == HttpRequest("GET", "/stats", "here:80", True)
    assert read_request(received) == HttpRequest("HEAD", "/", "", False)
    assert read_request(received) is None
    assert received == b"GE"


@pytest.mark.parametrize(
    ("head", "path"),
    [
        (b"GET http://evil.example/live HTTP/1.1", "/live"),
        (b"GET //live HTTP/1.1", "//live"),
        (b"GET /a%00b HTTP/1.1", "/a%00b"),
        (b"GET * HTTP/1.1", "*"),
    ],
)
def test_targets(head: bytes, path: str):
    request = read(head + b"\r\n\r\n")
    assert request is not None
    assert request.path == path


@pytest.mark.parametrize(
    ("field", "keeps_alive"),
    [(b"Connection: close", False), (b"connection: keep-alive, Close", False), (b"Connection: x", True)],
)
def test_who_wants_to_go_on(field: bytes, keeps_alive: bool):
    request = read(b"GET / HTTP/1.1\r\n" + field + b"\r\n\r\n")
    assert request is not None
    assert request.keeps_alive is keeps_alive


WRONG = {
    "http/0.9": (b"GET /\r\n\r\n", 400),
    "no target": (b"GET\r\n\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\n\r\n", 400),
    "a nul": (b"GET /\0 HTTP/1.1\r\n\r\n", 400),
    "a nul in a field": (b"GET / HTTP/1.1\r\nA: \0\r\n\r\n", 400),
    "a lone carriage return": (b"GET / HTTP/1.1\r\nA: b\rC: d\r\n\r\n", 400),
    "not ascii": ("GET /größe HTTP/1.1\r\n\r\n".encode(), 400),
    "lower case": (b"get / HTTP/1.1\r\n\r\n", 400),
    "tls": (b"\x16\x03\x01\x02\x00", 400),
    "thrift": (b"\x80\x01\x00\x01", 400),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a space before the colon": (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    "a folded field": (b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", 400),
    "a field without a name": (b"GET / HTTP/1.1\r\n: b\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "a body": (b"GET / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody", 413),
    "two lengths": (b"GET / HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 4\r\n\r\n", 413),
    "a length that is none": (b"GET / HTTP/1.1\r\nContent-Length: +0\r\n\r\n", 413),
    "chunks": (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
    "both": (b"GET / HTTP/1.1\r\ncontent-length: 0\r\ntransfer-encoding: x\r\n\r\n", 413),
    "another method": (b"POST / HTTP/1.1\r\n\r\n", 501),
    "a tunnel": (b"CONNECT here:80 HTTP/1.1\r\n\r\n", 400),
    "a long line": (b"GET /" + b"a" * MAX_HEAD_BYTES, 431),
    "large fields": (b"GET / HTTP/1.1\r\nA: " + b"a" * MAX_HEAD_BYTES, 431),
    "many fields": (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (MAX_FIELDS + 1) + b"\r\n", 431),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str):
    data, status = WRONG[name]
    assert status_of(data) == status


COSTLY = {
    "blanks before a value": b"A:" + b" " * (MAX_HEAD_BYTES - 60) + b"\0",
    "blanks and tabs": b"A:" + b" \t" * (MAX_HEAD_BYTES // 2 - 30) + b"\0",
    "blanks in a value": b"A:" + b"a " * (MAX_HEAD_BYTES // 2 - 30) + b"\0",
    "blanks in a name": b"A" + b" " * (MAX_HEAD_BYTES - 60) + b":",
    "folds": b"A: b\r\n" + b" \r\n" * (MAX_HEAD_BYTES // 3 - 20) + b"\0",
    "commas": b"Connection: " + b"a," * (MAX_HEAD_BYTES // 2 - 40) + b"\0",
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_head_costs_linear_time(name: str):
    """Of a thread that others wait for: a pattern that goes back at each blank took a second and more."""
    data = b"GET / HTTP/1.1\r\nHost: a\r\n" + COSTLY[name] + b"\r\n\r\n"
    assert len(data) < MAX_HEAD_BYTES
    began = time.thread_time()
    assert status_of(data) in (400, 431)
    assert time.thread_time() - began < 0.2


def test_mutants_are_read_or_refused():
    rng = random.Random(16)
    statuses = set()
    for _ in range(5000):
        data = bytearray(GET * 2)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        try:
            while (request := read_request(data)) is not None:
                assert request.path.isascii()
                assert request.path.isprintable()
        except HttpError as error:
            statuses.add(error.status)
    assert statuses == {400, 501, 505}


def test_answers():
    answer = HttpAnswer(503, "text/plain", b"no\n")
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nA: b\r\n"
    assert write(answer, True, False, {"A": "b"}) == head + b"\r\nno\n"
    assert write(answer, False, True, {"A": "b"}) == head + b"Connection: close\r\n\r\n"
