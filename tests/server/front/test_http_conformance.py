"""HTTP/1.1 at the socket: what each request of ``http_rules`` is answered with, and what becomes of its connection.

Behind its bytes comes another request: on a connection that is kept it is answered as the last, on one that is closed
it is nobody's.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Sequence

import pytest
from http_rules import CASES, LIMIT, PROBE, TWO, Answer, Case, chunked, get, post, sized
from kit.clients import HttpClient, Response
from kit.services import LocalServer, serving


@pytest.fixture(scope="module")
def echo() -> Iterator[LocalServer]:
    with serving("Identity", max_message_bytes=LIMIT) as server:
        yield server


def converse(port: int, sent: bytes, size: int, answers: Sequence[Answer], is_kept: bool) -> None:
    """Send it in pieces of that size, and compare."""
    with HttpClient(port) as client:
        client.send(sent, size)
        for index, answer in enumerate(answers):
            response = client.read(is_head=index == 0 and sent.startswith(b"HEAD "))
            check(response, answer, is_last=not is_kept and index == len(answers) - 1)
        if is_kept:
            client.sock.shutdown(socket.SHUT_WR)
        client.end()


def check(response: Response, answer: Answer, is_last: bool) -> None:
    if isinstance(answer, bytes):
        assert (response.status, echoed(response)) == (200, answer)
    else:
        assert response.status in (answer if isinstance(answer, tuple) else (answer,)), response
    assert response.fields["date"].endswith(" GMT"), "RFC 9110 6.6.1"
    assert ("allow" in response.fields) == (response.status == 405), "RFC 9110 15.5.6"
    assert (response.fields.get("connection") == "close") == is_last, "RFC 9112 9.6"
    if response.status >= 400 and response.body:
        assert set(json.loads(response.body)) <= {"error", "code", "retry_after_ms"}


def echoed(response: Response) -> bytes:
    return base64.b64decode(json.loads(response.body)["result"]["b64"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"RFC {case.paragraph}: {case.what}")
def test_what_is_answered_and_what_becomes_of_the_connection(echo: LocalServer, case: Case):
    answers = (*case.answers, b"probe") if case.is_kept else case.answers
    sent = case.sent + PROBE
    for size in (len(sent), 7) if len(sent) < 1000 else (len(sent),):
        converse(echo.port, sent, size, answers, case.is_kept)


def test_all_rules_hold_one_behind_the_other(echo: LocalServer):
    """What one request leaves behind must not change how the next one is read."""
    cases = [case for case in CASES if case.is_kept and not case.sent.startswith(b"HEAD ")]
    answers = [answer for case in cases for answer in case.answers]
    converse(echo.port, b"".join(case.sent for case in cases), 1000, answers, is_kept=True)


# -- clients that wait -------------------------------------------------------------------------------------------------

EXPECTING = b"Expect: 100-continue"


@pytest.mark.parametrize("expectation", [EXPECTING, b"expect: 100-Continue"])
@pytest.mark.parametrize("fields", [b"Content-Length: 2", b"Transfer-Encoding: chunked"])
def test_rfc_9110_10_1_1_a_client_is_told_to_send_its_body(echo: LocalServer, expectation: bytes, fields: bytes):
    body = b"ok" if fields.startswith(b"Content") else TWO
    with HttpClient(echo.port) as client:
        for _ in range(2):
            client.send(post(fields, expectation, body=b""), 7)
            assert client.read().status == 100
            client.send(body, 1)
            check(client.read(), b"ok", is_last=False)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (post(b"Content-Length: 9999", EXPECTING, body=b""), 413),
        (post(b"Content-Length: 2", b"Transfer-Encoding: chunked", EXPECTING, body=b""), 400),
        (post(b"Content-Length: 2", EXPECTING, b"Host: b", body=b""), 400),
    ],
)
def test_rfc_9110_10_1_1_an_error_comes_in_place_of_the_invitation(echo: LocalServer, sent: bytes, status: int):
    with HttpClient(echo.port) as client:
        client.send(sent)
        check(client.read(), status, is_last=True)
        client.end()


def test_rfc_9112_8_half_a_message_is_no_request(echo: LocalServer):
    """Neither is one of chunks that ends without the last one."""
    for half in (sized()[:-1], chunked(b"2\r\nok\r\n"), get()[:-2], get()[:9]):
        with HttpClient(echo.port) as client:
            client.send(sized() + half)
            check(client.read(), b"ok", is_last=False)
            client.sock.shutdown(socket.SHUT_WR)
            client.end()


def test_rfc_9112_9_6_what_comes_behind_the_last_request_does_not_reset_the_answer(echo: LocalServer):
    with HttpClient(echo.port) as client:
        client.send(sized(b"Connection: close"))
        for _ in range(20):
            client.send(bytes(10_000))
        check(client.read(), b"ok", is_last=True)
        client.end()
