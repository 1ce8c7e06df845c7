"""Requests, whole, in pieces and wrong."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from torchpipe_server.wire.http import HttpAnswer, HttpError, HttpRequest
from torchpipe_server.wire.http_reader import MAX_FIELDS, MAX_HEAD_BYTES, SMALL_CHUNKS, HttpReader

OK = HttpAnswer(200, "text/plain", b"yes\n")
HOST = b"\r\nHost: a\r\n"
GET = b"GET /stats?a=1 HTTP/1.1\r\nHost: here:80\r\nX-Y: z\r\n\r\n"
METHODS = frozenset({"GET", "HEAD"})


def read(data: bytes, reader: HttpReader | None = None) -> list[HttpRequest]:
    return list((reader or HttpReader(METHODS, 0)).feed(data))


def told(requests: list[HttpRequest]) -> list[tuple[str, str, str, str, bytes]]:
    return [(request.method, request.path, request.query, request.host, request.body) for request in requests]


def status_of(data: bytes, reader: HttpReader | None = None) -> int:
    with pytest.raises(HttpError) as caught:
        read(data, reader)
    assert len(str(caught.value)) < 100
    return caught.value.status


def test_a_request_in_any_pieces():
    for size in range(1, len(GET)):
        reader = HttpReader(METHODS, 0)
        found = []
        for start in range(0, len(GET), size):
            assert found == []
            found += told(read(GET[start : start + size], reader))
            assert bool(reader.pending_bytes) is not bool(found)
        assert found == [("GET", "/stats", "a=1", "here:80", b"")]


def test_requests_one_behind_the_other():
    reader = HttpReader(METHODS, 0)
    found = told(read(GET + b"HEAD / HTTP/1.1\nHost: a\n\nGE", reader))
    assert found == [("GET", "/stats", "a=1", "here:80", b""), ("HEAD", "/", "", "a", b"")]
    assert reader.pending_bytes == 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10**6])
def test_empty_lines_between_requests_are_nothing(size: int):
    stream, reader, found = b"\r\n" + GET + b"\n\r\n" + GET + b"\r\n\r\n", HttpReader(METHODS, 0), []
    for start in range(0, len(stream), size):
        found += told(read(stream[start : start + size], reader))
    assert found == [("GET", "/stats", "a=1", "here:80", b"")] * 2
    assert reader.pending_bytes == 0
    assert reader.request is None


BODY = bytes(range(256)) * 300
POST = b"POST /infer HTTP/1.1\r\nHost: a\r\n"
SIZED = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    POST
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (BODY[:1], BODY[1:5000], BODY[5000:]))
    + b"0\r\n\r\n"
)


@pytest.mark.parametrize("data", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("size", [1000, 4096, 60_000, 10**6])
def test_bodies_in_any_pieces(data: bytes, size: int):
    stream, reader, found = data * 3 + GET, HttpReader(frozenset({"GET", "POST"}), len(BODY)), []
    for start in range(0, len(stream), size):
        found += told(read(stream[start : start + size], reader))
    assert found == [("POST", "/infer", "", "a", BODY)] * 3 + [("GET", "/stats", "a=1", "here:80", b"")]
    assert reader.pending_bytes == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
def test_trailers_are_read_and_forgotten(size: int):
    ends = (b"0\r\nA: b\r\nC: d\r\n\r\n", b"00;a=b\r\n\r\n", b"0\r\n\r\n")
    one = b"".join(POST + b"Transfer-Encoding: chunked\r\n\r\n1;x\r\ny\r\n" + end for end in ends)
    stream, reader, found = one * 2 + GET * 70, HttpReader(frozenset({"GET", "POST"}), 10), []
    for start in range(0, len(stream), size):
        found += told(read(stream[start : start + size], reader))
    assert found == [("POST", "/infer", "", "a", b"y")] * 6 + [("GET", "/stats", "a=1", "here:80", b"")] * 70


LONG_LINES = {
    "an extension": (b"1;" + b"a" * 300 + b"\r\nx\r\n0\r\n\r\n", 400),
    "blanks in an extension": (b"1;" + b" " * 20_000 + b"\n\r\n", 400),
    "an extension of the second": (b"1\r\nx\r\n1;" + b"a" * 300 + b"\r\nx\r\n0\r\n\r\n", 400),
    "zeros before a size": (b"0" * 300 + b"1\r\nx\r\n0\r\n\r\n", 400),
    "an extension of the last": (b"0;" + b"a" * 300 + b"\r\n\r\n", 400),
    "a folded trailer": (b"1\r\nx\r\n0\r\nA: b\r\n c\r\n\r\n", 400),
    "many trailers": (b"0\r\n" + b"A: b\r\n" * (MAX_FIELDS + 2) + b"\r\n", 431),
    "a large trailer": (b"0\r\nA: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
}


@pytest.mark.parametrize("size", [1, 2, 5, 10**6])
@pytest.mark.parametrize("name", LONG_LINES)
def test_lines_between_chunks_are_bounded_as_a_head_is(name: str, size: int):
    """The patterns that they are read with took seconds for 20 KB of blanks."""
    body, status = LONG_LINES[name]
    stream = POST + b"Transfer-Encoding: chunked\r\n\r\n" + body
    reader = HttpReader(frozenset({"POST"}), 10)
    statuses = set()
    for start in range(0, len(stream), size):
        try:
            assert read(stream[start : start + size], reader) == []
        except HttpError as error:
            statuses.add(error.status)
    assert statuses == {status}


def test_requests_that_wait_do_not_hold_what_came_behind_them():
    reader = HttpReader(METHODS, 0)
    tracemalloc.start()
    try:
        requests = reader.feed(GET * 2000)
        waiting = [next(requests) for _ in range(64)]
        assert tracemalloc.get_traced_memory()[0] < 2**20, "64 copies of 100 KB"
    finally:
        tracemalloc.stop()
    assert sum(request.size for request in waiting) == 64 * len(GET), "their heads are memory as well"


@pytest.mark.parametrize("data", [SIZED, CHUNKED], ids=["sized", "chunked"])
def test_a_body_of_the_limit_and_of_one_byte_more(data: bytes):
    assert len(read(data, HttpReader(frozenset({"POST"}), len(BODY)))) == 1
    assert status_of(data, HttpReader(frozenset({"POST"}), len(BODY) - 1)) == 413


def test_a_body_that_is_too_large_is_refused_before_it_comes():
    head = POST + b"Content-Length: 1000001\r\nExpect: 100-continue\r\n\r\n"
    assert status_of(head, HttpReader(frozenset({"POST"}), 10**6)) == 413


@pytest.mark.parametrize("zeros", [15, 40, 240])
def test_zeros_before_a_size_mean_nothing(zeros: int):
    sized = POST + b"Content-Length: " + b"0" * zeros + b"5\r\n\r\nabcde"
    chunked = (
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * zeros + b"5\r\nabcde\r\n" + b"0" * zeros + b"\r\n\r\n"
    )
    reader = HttpReader(frozenset({"POST"}), 5)
    assert told(read(sized + chunked, reader)) == [("POST", "/infer", "", "a", b"abcde")] * 2


def test_many_small_chunks_are_refused():
    """Each costs the I/O thread the same time, however little it brings: those behind the last allowed are not read."""
    chunks = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * (SMALL_CHUNKS + 1)
    assert status_of(chunks, HttpReader(frozenset({"POST"}), 10**6)) == 413


def test_chunks_are_read_where_another_protocol_is_offered():
    """Java's HttpClient offers HTTP/2 with its first request, whatever its body."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    stream = CHUNKED.replace(b"Host: a\r\n", b"Host: a\r\n" + upgrade) + SIZED
    found = read(stream, HttpReader(frozenset({"POST"}), len(BODY)))
    assert [request.body for request in found] == [BODY, BODY]


def test_nobody_is_asked_for_a_body_that_there_is_none_of():
    reader = HttpReader(METHODS, 0)
    assert len(read(b"GET / HTTP/1.1" + HOST + b"Expect: 100-continue\r\n\r\n", reader)) == 1
    assert not reader.awaits_invitation


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_nobody_is_asked_for_a_body_that_has_come(version: bytes):
    head = POST.replace(b"1.1", version) + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    reader = HttpReader(frozenset({"POST"}), 10)
    assert read(head + b"x", reader) == []
    assert not reader.awaits_invitation
    assert len(read(b"y", reader)) == 1


def test_a_client_that_waits_is_asked_for_its_body():
    reader = HttpReader(frozenset({"POST"}), 10)
    assert read(POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n", reader) == []
    assert reader.awaits_invitation
    assert reader.invitation().startswith(b"HTTP/1.1 100 ")
    assert not reader.awaits_invitation
    assert told(read(b"xy", reader)) == [("POST", "/infer", "", "a", b"xy")]


@pytest.mark.parametrize(
    ("target", "host", "path", "query"),
    [
        (b"http://b.example:80/live", "b.example:80", "/live", ""),
        (b"https://[::1]?a", "[::1]", "/", "a"),
        (b"http://b", "b", "/", ""),
        (b"//live", "a", "//live", ""),
        (b"/http://b/", "a", "/http://b/", ""),
        (b"/a%00b??", "a", "/a%00b", "?"),
    ],
)
def test_targets(target: bytes, host: str, path: str, query: str):
    """The host of the target stands for that of the field: RFC 9112, 3.2.2."""
    (request,) = read(b"GET " + target + b" HTTP/1.1" + HOST + b"\r\n")
    assert (request.host, request.path, request.query) == (host, path, query)


@pytest.mark.parametrize(
    ("head", "keeps_alive"),
    [
        (b"GET / HTTP/1.1" + HOST + b"Connection: x", True),
        (b"GET / HTTP/1.1" + HOST + b"Connection: close", False),
        (b"GET / HTTP/1.1" + HOST + b"connection: keep-alive, Close", False),
        (b"GET / HTTP/1.1" + HOST + b"Connection: x\r\nConnection: close", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.1" + HOST + b"Upgrade: h2c", True),
    ],
)
def test_who_wants_to_go_on(head: bytes, keeps_alive: bool):
    first, *others = read(head + b"\r\n\r\n" + GET)
    assert bool(others) is keeps_alive, "what follows the last request is nobody's"
    assert (b"Connection: close" in first.answer(OK)) is not keeps_alive
    assert first.is_last is not keeps_alive


def test_a_length_may_begin_with_zeros():
    """Python makes no integer of more than 4300 digits, whatever they are."""
    stream = POST + b"Content-Length: " + b"0" * 5000 + b"2\r\n\r\nxy" + POST + b"Content-Length: 000\r\n\r\n"
    found = read(stream, HttpReader(frozenset({"POST"}), 10))
    assert [request.body for request in found] == [b"xy", b""]


WRONG = {
    "http/0.9": (b"GET /\r\n\r\n", 400),
    "no target": (b"GET\r\n\r\n", 400),
    "two spaces": (b"GET  / HTTP/1.1\r\n\r\n", 400),
    "a nul": (b"GET /\0 HTTP/1.1\r\n\r\n", 400),
    "a nul in a field": (b"GET / HTTP/1.1" + HOST + b"A: \0\r\n\r\n", 400),
    "a lone carriage return": (b"GET / HTTP/1.1" + HOST + b"A: b\rC: d\r\n\r\n", 400),
    "not ascii": ("GET /größe HTTP/1.1\r\n\r\n".encode(), 400),
    "lower case": (b"get / HTTP/1.1" + HOST + b"\r\n", 501),
    "tls": (b"\x16\x03\x01\x02\x00", 400),
    "thrift": (b"\x00\x00\x00\x40\x80\x01\x00\x01", 400),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "a space before the colon": (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    "a folded field": (b"GET / HTTP/1.1" + HOST + b"A: b\r\n c\r\n\r\n", 400),
    "a field without a name": (b"GET / HTTP/1.1" + HOST + b": b\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "a body": (b"GET / HTTP/1.1" + HOST + b"Content-Length: 4\r\n\r\nbody", 413),
    "two equal lengths": (b"GET / HTTP/1.1" + HOST + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n", 400),
    "a control character": (b"GET / HTTP/1.1" + HOST + b"A: \x01\r\n\r\n", 400),
    "chunks twice": (b"GET / HTTP/1.1" + HOST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n", 501),
    "two lengths": (b"GET / HTTP/1.1" + HOST + b"Content-Length: 0\r\nContent-Length: 4\r\n\r\n", 400),
    "a length that is none": (b"GET / HTTP/1.1" + HOST + b"Content-Length: +0\r\n\r\n", 400),
    "chunks": (b"GET / HTTP/1.1" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", 413),
    "both": (b"GET / HTTP/1.1" + HOST + b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    "another method": (b"POST / HTTP/1.1" + HOST + b"\r\n", 501),
    "a tunnel": (b"CONNECT here:80 HTTP/1.1" + HOST + b"\r\n", 501),
    "a long line": (b"GET /" + b"a" * MAX_HEAD_BYTES, 414),
    "large fields": (b"GET / HTTP/1.1\r\nA: " + b"a" * MAX_HEAD_BYTES, 431),
    "many fields": (b"GET / HTTP/1.1" + HOST + b"a:\r\n" * MAX_FIELDS + b"\r\n", 431),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "another coding": (b"GET / HTTP/1.1" + HOST + b"transfer-encoding: x\r\n\r\n", 501),
    "a long length": (b"GET / HTTP/1.1" + HOST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "a target that is none": (b"GET here HTTP/1.1" + HOST + b"\r\n", 400),
    "an asterisk": (b"GET * HTTP/1.1" + HOST + b"\r\n", 400),
    "a carriage return before the request": (b"\r" + GET, 400),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str):
    data, status = WRONG[name]
    assert status_of(data) == status


@pytest.mark.parametrize("name", WRONG)
def test_whoever_is_refused_is_told_so_and_nothing_more_is_read(name: str):
    reader = HttpReader(METHODS, 0)
    with pytest.raises(HttpError) as caught:
        read(WRONG[name][0], reader)
    assert reader.request is not None
    request = reader.request.refused(caught.value)
    answer = request.answer(HttpAnswer(caught.value.status, "text/plain", b"no\n"))
    assert answer.startswith(b"HTTP/1.1 %d " % caught.value.status)
    assert b"Connection: close" in answer
    assert answer.endswith(b"\r\n\r\nno\n")
    assert status_of(GET, reader) == caught.value.status


def test_a_half_request_is_answered():
    reader = HttpReader(METHODS, 0)
    assert read(GET[:9], reader) == []
    assert reader.request is not None
    answer = reader.request.answer(HttpAnswer(408, "text/plain", b"late\n"), is_last=True)
    assert answer.endswith(b"\r\n\r\nlate\n")


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
    for _ in range(2000):
        data = bytearray(GET * 2)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        reader = HttpReader(METHODS, 0)
        try:
            for request in reader.feed(data):
                assert request.path.isascii()
                assert request.path.isprintable()
                request.answer(OK)
        except HttpError as error:
            statuses.add(error.status)
            assert reader.request is not None
            reader.request.answer(HttpAnswer(error.status, "text/plain", b"no\n"), is_last=True)
    assert statuses == {400, 501}
