"""Requests over HTTP in pieces, and answers; what RFC 9112 says of single ones is in ``test_http_conformance.py``."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torchpipe_server.wire.http import MAX_FIELDS, MAX_HEAD_BYTES, SMALL_CHUNKS, HttpError, HttpReader

from torchpipe_py.wire.http import HttpAnswer, HttpRequest

GET = b"GET /stats?a=1 HTTP/1.1\r\nHost: here:80\r\nX-Y: z\r\n\r\n"
GOT = ("GET", "/stats", "a=1", "here:80", b"")
POST = b"POST /infer HTTP/1.1\r\nHost: a\r\n"
CHUNKS = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = bytes(range(256)) * 300
SIZED = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    CHUNKS
    + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (BODY[:1], BODY[1:5000], BODY[5000:]))
    + b"0\r\n\r\n"
)


def reader_of(body_bytes: int = 10) -> HttpReader:
    return HttpReader(frozenset({"GET", "HEAD", "POST"}), body_bytes)


def read(data: bytes, reader: HttpReader | None = None, size: int = 10**6) -> list[Any]:
    """The requests in the data, which comes in pieces of this size."""
    reader, requests = reader or reader_of(), []
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
        while (request := reader.next()) is not None:
            requests.append(request)
    return requests


def contents_of(requests: list[Any]) -> list[tuple[Any, ...]]:
    return [(request.method, request.path, request.query, request.host, request.body) for request in requests]


def status_of(data: bytes, reader: HttpReader | None = None) -> int:
    with pytest.raises(HttpError) as caught:
        read(data, reader)
    assert len(str(caught.value)) < 100
    return caught.value.status


# -- requests in pieces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("size", [1000, 4096, 60_000, 10**6])
def test_reads_bodies_in_any_pieces(data: bytes, size: int):
    reader = reader_of(len(BODY))
    assert contents_of(read(data * 3 + GET + b"GE", reader, size)) == [("POST", "/infer", "", "a", BODY)] * 3 + [GOT]
    assert reader.pending_bytes == 2


LONG_LINES = {
    "an extension": (b"1;" + b"a" * 300 + b"\r\nx\r\n0\r\n\r\n", 400),
    "blanks in an extension": (b"1;" + b" " * 20_000 + b"\n\r\n", 400),
    "an extension of the second": (b"1\r\nx\r\n1;" + b"a" * 300 + b"\r\nx\r\n0\r\n\r\n", 400),
    "zeros before a size": (b"0" * 300 + b"1\r\nx\r\n0\r\n\r\n", 400),
    "an extension of the last": (b"0;" + b"a" * 300 + b"\r\n\r\n", 400),
    "a folded trailer": (b"1\r\nx\r\n0\r\nA: b\r\n c\r\n\r\n", 400),
    "many trailers": (b"0\r\n" + b"A: b\r\n" * (MAX_FIELDS + 2) + b"\r\n", 431),
    "a large trailer": (b"0\r\nA: " + b"b" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    "many small chunks": (b"1\r\nx\r\n" * (SMALL_CHUNKS + 1), 413),
}


@pytest.mark.parametrize("size", [1, 2, 5, 10**6])
@pytest.mark.parametrize("name", LONG_LINES)
def test_bounds_the_lines_between_chunks(name: str, size: int):
    body, status = LONG_LINES[name]
    reader, statuses = reader_of(10**6), set()
    for start in range(0, len(CHUNKS + body), size):
        try:
            assert read((CHUNKS + body)[start : start + size], reader) == []
        except HttpError as error:
            statuses.add(error.status)
    assert statuses == {status}


COSTLY = {
    "blanks before a value": b"A:" + b" " * (MAX_HEAD_BYTES - 60) + b"\0",
    "blanks and tabs": b"A:" + b" \t" * (MAX_HEAD_BYTES // 2 - 30) + b"\0",
    "blanks in a value": b"A:" + b"a " * (MAX_HEAD_BYTES // 2 - 30) + b"\0",
    "blanks in a name": b"A" + b" " * (MAX_HEAD_BYTES - 60) + b":",
    "folds": b"A: b\r\n" + b" \r\n" * (MAX_HEAD_BYTES // 3 - 20) + b"\0",
    "commas": b"Connection: " + b"a," * (MAX_HEAD_BYTES // 2 - 40) + b"\0",
}


@pytest.mark.parametrize("name", COSTLY)
def test_reads_head_in_linear_time(name: str):
    """A pattern that goes back at each blank took a second and more."""
    data = b"GET / HTTP/1.1\r\nHost: a\r\n" + COSTLY[name] + b"\r\n\r\n"
    assert len(data) < MAX_HEAD_BYTES
    began = time.thread_time()
    assert status_of(data) in (400, 431)
    assert time.thread_time() - began < 0.2


# -- what a head says -----------------------------------------------------------------------------------------------


# -- answers --------------------------------------------------------------------------------------------------------


def test_answers():
    first, second, last = read(GET + GET.replace(b"GET", b"HEAD") + GET.replace(b"X-Y: z", b"Connection: close"))
    answer = HttpAnswer(503, "text/plain", b"no\n")
    line, _, fields = first.answer(answer, {"A": "b"}).partition(b"\r\nDate: ")
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 3"
    assert (line, fields.partition(b" GMT\r\n")[2]) == (head, b"A: b\r\n\r\nno\n")
    assert second.answer(answer, {"A": "b"}).endswith(b" GMT\r\nA: b\r\n\r\n")
    assert last.answer(answer).endswith(b" GMT\r\nConnection: close\r\n\r\nno\n")
    for status in (204, 304):
        lines = first.answer(HttpAnswer(status, "text/plain", b"yes"), {"A": "b"}).split(b"\r\n")
        assert [line.partition(b":")[0] for line in lines[1:]] == [b"Date", b"A", b"", b""]


@pytest.mark.parametrize("status", [-1, 99, 100, 101, 199, 600, 1000, "200", None])
def test_refuses_an_answer_of_a_status_that_ends_no_request(status):
    with pytest.raises(ValueError, match="expected a number from 200 to 599"):
        HttpRequest("GET", "/").answer(HttpAnswer(status, "text/plain", b""))


WRONG_FIELDS = {
    "Content-Length": "3", "transfer-encoding": "chunked", "Connection": "keep-alive", "Content-Type": "a/b", "": "x",
    "A": "b\nC: d", "A\r": "b", "A b": "c", "A:": "b", "Ä": "b", "B": "a\x00b",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_refuses_header_fields_that_change_the_end_of_an_answer(name):
    with pytest.raises(ValueError, match="header field"):
        HttpRequest("GET", "/").answer(HttpAnswer(200, "text/plain", b"", {name: WRONG_FIELDS[name]}))
    with pytest.raises(ValueError, match="control character"):
        HttpRequest("GET", "/").answer(HttpAnswer(200, "text/plain\r\nA: b", b""))
