"""What a request holds, and what an answer to it looks like."""

from __future__ import annotations

import pytest
from torchpipe_server.wire.http import HttpAnswer, HttpRequest
from torchpipe_server.wire.http_reader import HttpReader

OK = HttpAnswer(200, "text/plain", b"yes\n")
GET = b"GET /stats?a=1 HTTP/1.1\r\nHost: here:80\r\n\r\n"


def read(data: bytes, body_bytes: int = 0) -> list[HttpRequest]:
    return list(HttpReader(frozenset({"GET", "HEAD", "POST"}), body_bytes).feed(data))


def test_a_large_body_is_costly_and_one_of_json_sooner():
    def is_costly(size: int, kind: str) -> bool:
        head = f"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n"
        (request,) = read(head.encode() + bytes(size), 2**20)
        return request.is_costly

    assert not is_costly(60_000, "image/jpeg")
    assert is_costly(2**18 + 1, "image/jpeg")
    assert not is_costly(1000, "application/json")
    assert is_costly(60_000, "Application/JSON; charset=utf-8")
    (request,) = read(GET.replace(b"a=1", b"%" * 2000))
    assert request.is_costly, "so is a long query"


def test_what_of_a_body_is_json():
    def json_bytes(path: str, **fields: str) -> int:
        request = HttpRequest("POST", path)
        request.body, request.fields = b"x" * 9000, {name.replace("_", "-"): text for name, text in fields.items()}
        request.kind = fields.get("content_type", "")
        return request.json_bytes

    assert json_bytes("/infer") == 0
    assert json_bytes("/infer", content_type="application/json") == 9000
    assert json_bytes("/v2/models/x/infer", content_type="application/octet-stream") == 9000
    assert json_bytes("/v2/models/x/infer", inference_header_content_length="100") == 100
    assert json_bytes("/v2/models/x/infer", inference_header_content_length="9" * 12) == 9000, "no more than there is"
    assert json_bytes("/v2/models/x/infer", inference_header_content_length="1" * 5000) == 9000
    assert json_bytes("/v2/models/x/infer", inference_header_content_length="9" * 12) == 9000


def test_answers():
    first, second = read(GET + GET.replace(b"GET", b"HEAD"))
    answer = HttpAnswer(503, "text/plain", b"no\n")
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nA: b\r\n"
    assert first.answer(answer, {"A": "b"}) == head + b"\r\nno\n"
    assert second.answer(answer, {"A": "b"}, is_last=True) == head + b"Connection: close\r\n\r\n"


def test_a_header_that_would_end_its_line_is_not_sent():
    (request,) = read(GET)
    for kind, headers in (("text/plain\r\nA: b", {}), ("text/plain", {"A": "b\nC: d"}), ("text/plain", {"A\r": "b"})):
        with pytest.raises(ValueError, match="line break"):
            request.answer(HttpAnswer(200, kind, b"", headers))


@pytest.mark.parametrize("status", [204, 304])
def test_answers_that_have_no_body(status: int):
    (request,) = read(GET)
    assert request.answer(HttpAnswer(status, "text/plain", b"yes")).endswith(b"\r\n\r\n")


def test_the_answer_to_a_request_of_which_only_the_name_is_known():
    (request,) = read(GET)
    answer = HttpRequest.named(request.name).answer(OK)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Connection: close" in answer
    assert HttpRequest.named("HEAD /stats").answer(OK).endswith(b"\r\n\r\n")
