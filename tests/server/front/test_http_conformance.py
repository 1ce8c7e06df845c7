"""HTTP/1.1 at the socket: rules of RFC 9112 (messages) and RFC 9110 (semantics), paragraph by paragraph.

Each case says what is answered and whether the connection is kept; where a paragraph leaves a choice, several statuses.
Behind its bytes comes another request: on a connection that is kept it is answered as the last, on one that is closed
it is nobody's.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from kit.clients import HttpClient, Response
from kit.services import LocalServer, serving

LIMIT = 5000  # bytes of a body
GET = b"GET /openapi.json HTTP/1.1"
TWO = b"2\r\nok\r\n0\r\n\r\n"
PROBE = b"POST /infer HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nprobe"
BAD = (400, 501)

Answer = int | tuple[int, ...] | bytes
"""A status, one of several, or what the body of a 200 carries back."""


class Case(NamedTuple):
    paragraph: str
    what: str
    sent: bytes
    answers: tuple[Answer, ...]
    is_kept: bool


def kept(paragraph: str, what: str, sent: bytes, *answers: Answer) -> Case:
    return Case(paragraph, what, sent, answers, True)


def closed(paragraph: str, what: str, sent: bytes, *answers: Answer) -> Case:
    return Case(paragraph, what, sent, answers, False)


def get(line: bytes = GET, *fields: bytes, host: bytes | None = b"Host: a") -> bytes:
    return b"\r\n".join([line, *([] if host is None else [host]), *fields, b"", b""])


def post(*fields: bytes, body: bytes = b"ok", line: bytes = b"POST /infer HTTP/1.1") -> bytes:
    """Without a length of its own."""
    return get(line, *fields) + body


def sized(*fields: bytes, body: bytes = b"ok") -> bytes:
    return post(b"Content-Length: %d" % len(body), *fields, body=body)


def chunked(body: bytes, *fields: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", *fields, body=body)


LINES = [
    kept("9112 2.2", "an empty line before the request", b"\r\n" + sized(), b"ok"),
    kept("9112 2.2", "an empty line between requests", sized() + b"\r\n" + sized(), b"ok", b"ok"),
    kept("9112 2.2", "an empty line with a line feed alone", sized() + b"\n" + sized(), b"ok", b"ok"),
    kept("9112 2.2", "many empty lines", b"\r\n" * 5000),
    kept("9112 2.2", "line feeds alone end lines", sized().replace(b"\r\n", b"\n"), b"ok"),
    closed("9112 2.2", "a bare CR in the request line", get(b"GET /\ropenapi.json HTTP/1.1"), 400),
    closed("9112 2.2", "a bare CR in a field", sized(b"A: b\rc"), 400),
    closed("9112 2.2", "bare CRs end lines", sized().replace(b"\r\n", b"\r") + b"\r\n\r\n", 400),
    closed("9112 2.2", "a blank before the first field", b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    closed("9112 2.2", "a NUL in the request line", get(b"GET /\0 HTTP/1.1"), 400),
    kept("9112 2.3", "a later minor version", get(b"GET /openapi.json HTTP/1.9"), 200),
    closed("9112 2.3", "another major version", get(b"GET /openapi.json HTTP/2.0"), 505),
    closed("9112 2.3", "the name of the version in lower case", get(b"GET /openapi.json http/1.1"), 400),
    closed("9112 2.3", "a version of two digits", get(b"GET /openapi.json HTTP/1.10"), 400),
    closed("9112 2.3", "no minor version", get(b"GET /openapi.json HTTP/1"), 400),
    closed("9112 3", "no version", get(b"GET /openapi.json"), 400),
    closed("9112 3", "no target", get(b"GET HTTP/1.1"), 400),
    closed("9112 3", "two spaces", get(b"GET  /openapi.json HTTP/1.1"), 400),
    closed("9112 3", "a tab between", get(b"GET\t/openapi.json HTTP/1.1"), 400),
    closed("9112 3", "a blank in the target", get(b"GET /open api.json HTTP/1.1"), 400),
    closed("9112 3", "a blank behind the version", get(b"GET /openapi.json HTTP/1.1 "), 400),
    closed("9112 3", "a blank before the method", sized() + get(b" GET /openapi.json HTTP/1.1"), b"ok", 400),
    closed("9112 3", "a target that is too long", get(b"GET /" + b"a" * 20_000 + b" HTTP/1.1"), 414),
    closed("9112 3.1", "a method that is no token", get(b"GE(T /openapi.json HTTP/1.1"), 400),
    closed("9110 9.1", "a method in lower case", get(b"get /openapi.json HTTP/1.1"), 501),
    closed("9110 9.1", "an unknown method", get(b"BREW /openapi.json HTTP/1.1"), 501),
    closed("9110 9.3.6", "a tunnel", get(b"CONNECT a:80 HTTP/1.1"), 501),
    closed("9110 9.3.8", "TRACE", get(b"TRACE / HTTP/1.1"), 501),
]

TARGETS = [
    kept("9112 3.2.1", "a query", get(b"GET /openapi.json?a=b?/c HTTP/1.1"), 200),
    kept("9112 3.2.1", "no such path", get(b"GET /nothing HTTP/1.1"), 404),
    closed("9112 3.2.1", "a fragment", get(b"GET /openapi.json#a HTTP/1.1"), 400),
    closed("9112 3.2.1", "no slash", get(b"GET openapi.json HTTP/1.1"), 400),
    closed("9112 3.2.1", "bytes beyond ASCII", get(b"GET /openapi.json\xc3\xa9 HTTP/1.1"), 400),
    kept("9112 3.2.2", "absolute form", get(b"GET http://b:80/openapi.json HTTP/1.1"), 200),
    kept("9112 3.2.2", "absolute form, another case of the scheme", get(b"GET HTTP://b/openapi.json HTTP/1.1"), 200),
    kept("9110 4.2.3", "absolute form without a path", get(b"GET http://b HTTP/1.1"), 200),
    kept("9110 4.2.3", "absolute form, a query without a path", get(b"GET http://b?a=b HTTP/1.1"), 200),
    closed("9110 4.2.1", "absolute form without a host", get(b"GET http:///openapi.json HTTP/1.1"), 400),
    closed("9110 4.2.4", "absolute form with a user", get(b"GET http://u:p@b/openapi.json HTTP/1.1"), 400),
    closed("9110 7.4", "another scheme", get(b"GET ftp://b/openapi.json HTTP/1.1"), (400, 421)),
    closed("9112 3.2.3", "authority form", get(b"GET a:80 HTTP/1.1"), 400),
    kept("9112 3.2.4", "asterisk form", get(b"OPTIONS * HTTP/1.1"), 404),
    closed("9112 3.2.4", "asterisk form of another method", get(b"GET * HTTP/1.1"), 400),
    closed("9112 3.2.4", "an asterisk and more", get(b"OPTIONS *a HTTP/1.1"), 400),
    closed("9112 3.2", "no host", get(host=None), 400),
    closed("9112 3.2", "no host beside an absolute form", get(b"GET http://a/ HTTP/1.1", host=None), 400),
    closed("9112 3.2", "two hosts", get(GET, b"Host: b"), 400),
    closed("9112 3.2", "two equal hosts", get(GET, b"Host: a"), 400),
    kept("9112 3.2", "an empty host", get(host=b"Host:"), 200),
    kept("9112 3.2", "a host with a port", get(host=b"Host: a_c.b-c.localhost:8080"), 200),
    kept("9112 3.2", "an address of IPv6", get(host=b"Host: [::1]:80"), 200),
    kept("9112 3.2", "the name in upper case", get(host=b"HOST: a"), 200),
    *(
        closed("9112 3.2", f"the host {host.decode()!r}", get(host=b"Host: " + host), 400)
        for host in (b"a b", b"a/b", b"u@a", b"a,b", b"a:b", b"a:1:2", b"[::1", b"a?b", b"a#b", b"http://a")
    ),
    closed("9112 C.2.1", "HTTP/1.0 without a host", get(b"GET /openapi.json HTTP/1.0", host=None), 200),
]

FIELDS = [
    kept("9112 5", "no blank behind the colon", sized(b"A:b"), b"ok"),
    kept("9112 5", "blanks around a value", sized(b"A: \t b \t"), b"ok"),
    kept("9112 5", "an empty value", sized(b"A:"), b"ok"),
    kept("9110 5.1", "names in any case", post(b"cOnTeNt-LeNgTh: 2"), b"ok"),
    kept("9110 5.5", "bytes beyond ASCII in a value", sized(b"A: \xe9\xff"), b"ok"),
    closed("9110 5.5", "a NUL in a value", sized(b"A: \0"), 400),
    *(
        closed("9112 5.1", f"{blank!r} before the colon", post(b"Content-Length" + blank + b": 2"), 400)
        for blank in (b" ", b"\t", b"\x0b", b"\r")
    ),
    closed("9110 5.1", "a name that is no token", sized(b"A(b): c"), 400),
    closed("9110 5.1", "a name beyond ASCII", sized(b"\xe9: c"), 400),
    closed("9112 5", "no name", sized(b": c"), 400),
    closed("9112 5", "no colon", sized(b"A"), 400),
    closed("9112 5.2", "a folded field", sized(b"A: b", b" c"), 400),
    closed("9112 5.2", "a field folded by a tab", sized(b"A: b", b"\tc"), 400),
    closed("9112 5.2", "a folded field of blanks", sized(b"A: b", b" "), 400),
    closed("9112 5.4", "a field that is too large", sized(b"A: " + b"b" * 20_000), 431),
    closed("9112 5.4", "too many fields", sized(*[b"A: b"] * 500), 431),
]

LENGTHS = [
    kept("9112 6.3", "neither length nor chunks: no body", post(body=b""), b""),
    kept("9112 6.3", "a body of a method that has no use for it", get(GET, b"Content-Length: 2") + b"ok", 200),
    kept("9112 6.3", "a body of a path that is not there", sized().replace(b"/infer", b"/nothing"), 404),
    kept("9110 8.6", "a length of 0", sized(body=b""), b""),
    kept("9110 8.6", "leading zeros", post(b"Content-Length: 0002"), b"ok"),
    closed("9110 8.6", "a length beyond the limit", post(b"Content-Length: %d" % (LIMIT + 1)), 413),
    closed("9110 8.6", "a length beyond 64 bits", post(b"Content-Length: 18446744073709551618"), (400, 413)),
    closed("9110 8.6", "a length of 5000 digits", post(b"Content-Length: " + b"9" * 5000), (400, 413)),
    *(
        closed("9110 8.6", f"a length of {length!r}", post(b"Content-Length: " + length), 400)
        for length in (b"", b"+2", b"-2", b"2 3", b"0x2", b"2.0", b"2a", b"2;", b",", b"\xb2", b"1_0", b'"2"', b"2\x0b")
    ),
    closed("9112 6.3", "two lengths", post(b"Content-Length: 2", b"Content-Length: 3"), 400),
    closed("9112 6.3", "a list of lengths", post(b"Content-Length: 2, 3"), 400),
    closed("9112 6.3", "a length, then none", post(b"Content-Length: 2", b"Content-Length: x"), 400),
    closed("9112 6.3", "a length and chunks", post(b"Content-Length: 2", b"Transfer-Encoding: chunked"), 400),
    closed("9112 6.3", "chunks and a length", post(b"Transfer-Encoding: chunked", b"Content-Length: 2"), 400),
    closed("9112 6.3", "a length and another coding", post(b"Content-Length: 2", b"Transfer-Encoding: identity"), BAD),
]

CHUNKS = [
    kept("9112 7.1", "chunks", chunked(b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n"), b"ok"),
    kept("9112 7.1", "no chunk but the last", chunked(b"0\r\n\r\n"), b""),
    kept(
        "9112 7.1",
        "sizes in either case",
        chunked(b"a\r\n0123456789\r\nA\r\n0123456789\r\n0\r\n\r\n"),
        b"0123456789" * 2,
    ),
    kept("9112 7.1", "leading zeros", chunked(b"0002\r\nok\r\n0000\r\n\r\n"), b"ok"),
    kept("9112 7.1", "a chunk that looks like the end of a head", chunked(b"4\r\n\r\n\r\n\r\n0\r\n\r\n"), b"\r\n\r\n"),
    kept("9110 7.6", "the coding in upper case", post(b"Transfer-Encoding: CHUNKED", body=TWO), b"ok"),
    kept("9112 7.1.1", "extensions", chunked(b'2;a;b=c;d="e;f"\r\nok\r\n0;g\r\n\r\n'), b"ok"),
    closed(
        "9112 7.1.1", "an extension without end", chunked(b"2;" + b"a" * 20_000 + b"\r\nok\r\n0\r\n\r\n"), (400, 431)
    ),
    closed("9112 2.2", "a bare CR in an extension", chunked(b"2;a\rb\r\nok\r\n0\r\n\r\n"), 400),
    closed("9112 2.2", "a bare CR in the last extension", chunked(b"2\r\nok\r\n0;a\rb\r\n\r\n"), 400),
    *(
        closed("9112 7.1", f"a size of {size!r}", chunked(size + b"\r\nok\r\n0\r\n\r\n"), 400)
        for size in (b"", b"0x2", b"+2", b"-2", b" 2", b"2 2", b"g", b"2_", b"2\0", b"\xb2", b"2\x0b", b";a", b"2\n")
    ),
    closed("9112 7.1", "a size beyond 64 bits", chunked(b"10000000000000002\r\nok\r\n0\r\n\r\n"), (400, 413)),
    closed("9112 7.1", "a size of many digits", chunked(b"f" * 100 + b"\r\nok\r\n0\r\n\r\n"), (400, 413)),
    closed("9112 7.1", "a line feed alone behind a size", chunked(b"2\nok\r\n0\r\n\r\n"), 400),
    closed("9112 7.1", "a CR alone behind a size", chunked(b"2\rok\r\n0\r\n\r\n"), 400),
    closed("9112 7.1", "a chunk longer than its size", chunked(b"2\r\noka\r\n0\r\n\r\n"), 400),
    closed("9112 7.1", "a chunk shorter than its size", chunked(b"3\r\nok\r\n0\r\n\r\n"), 400),
    closed("9112 7.1", "no line behind a chunk", chunked(b"2\r\nok0\r\n\r\n"), 400),
    closed("9112 7.1", "a line feed alone behind a chunk", chunked(b"2\r\nok\n0\r\n\r\n"), 400),
    closed("9112 7.1", "chunks beyond the limit", chunked(b"1000\r\n%s\r\n" % bytes(4096) * 2), 413),
    kept("9112 7.1.2", "trailers", chunked(b"2\r\nok\r\n0\r\nA: b\r\nC: d\r\n\r\n"), b"ok"),
    kept(
        "9110 6.5.1",
        "trailers that would say how long it is",
        chunked(b"2\r\nok\r\n0\r\nContent-Length: 9\r\nHost: b\r\n\r\n"),
        b"ok",
    ),
    closed("9112 7.1.2", "a trailer without a colon", chunked(b"2\r\nok\r\n0\r\nA\r\n\r\n"), 400),
    closed("9112 5.1", "a blank before a trailer's colon", chunked(b"2\r\nok\r\n0\r\nA : b\r\n\r\n"), 400),
    closed("9112 5.2", "a folded trailer", chunked(b"2\r\nok\r\n0\r\nA: b\r\n c\r\n\r\n"), 400),
    closed("9110 6.5", "a trailer that is too large", chunked(b"0\r\nA: " + b"b" * 20_000 + b"\r\n\r\n"), (400, 431)),
    *(
        closed("9112 6.1", f"the coding {coding!r}", post(b"Transfer-Encoding: " + coding, body=TWO), BAD)
        for coding in (
            b"",
            b"gzip",
            b"gzip, chunked",
            b"chunked, gzip",
            b"chunked, chunked",
            b"identity",
            b"xchunked",
            b"chunkedx",
            b"chunked;a=b",
            b'"chunked"',
            b"\x0bchunked",
            b"chunked\x0b",
            b"chunked,",
            b",chunked",
        )
    ),
    closed(
        "9112 6.1",
        "two fields of codings",
        post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", body=TWO),
        BAD,
    ),
    closed(
        "9112 6.1",
        "chunks in HTTP/1.0",
        post(b"Transfer-Encoding: chunked", body=TWO, line=b"POST /infer HTTP/1.0"),
        (200, *BAD),
    ),
]

CONNECTIONS = [
    kept("9112 9.3", "HTTP/1.1 keeps it", sized(), b"ok"),
    kept("9112 9.3", "keep-alive", sized(b"Connection: keep-alive"), b"ok"),
    kept("9112 9.3", "an option that nobody knows", sized(b"Connection: closed, x-close"), b"ok"),
    kept("9112 9.3", "an empty option", sized(b"Connection: ,"), b"ok"),
    closed("9112 9.6", "close", sized(b"Connection: close"), b"ok"),
    closed("9110 7.6.1", "close in any case", sized(b"connection: CLOSE"), b"ok"),
    closed("9110 7.6.1", "close among others", sized(b"Connection: x ,\tclose\t, y"), b"ok"),
    closed("9110 7.6.1", "close in a second field", sized(b"Connection: keep-alive", b"Connection: close"), b"ok"),
    closed("9112 9.6", "close with an error", sized(b"Connection: close").replace(b"/infer", b"/nothing"), 404),
    closed("9112 9.3", "HTTP/1.0", sized().replace(b"HTTP/1.1", b"HTTP/1.0"), b"ok"),
    closed("9112 C.2.2", "HTTP/1.0 keep-alive", sized(b"Connection: keep-alive").replace(b"1.1", b"1.0"), b"ok"),
    kept("9110 7.8", "an upgrade that is not made", sized(b"Connection: Upgrade", b"Upgrade: websocket"), b"ok"),
    kept(
        "9110 7.8",
        "an upgrade to HTTP/2",
        sized(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
        b"ok",
    ),
    kept(
        "9110 7.8",
        "an upgrade to HTTP/2 with chunks",  # Java's HttpClient offers it with its first request, whatever its body
        chunked(TWO, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"),
        b"ok",
    ),
    kept(
        "9112 9.3.2",
        "requests sent ahead",
        b"".join(sized(body=b"%d" % index) for index in range(20)),
        *(b"%d" % index for index in range(20)),
    ),
    kept(
        "9112 9.3.2",
        "sent ahead, errors among them",
        sized() + get(b"GET /nothing HTTP/1.1") + get(b"GET /infer HTTP/1.1") + chunked(b"0\r\n\r\n") + get(),
        b"ok",
        404,
        405,
        b"",
        200,
    ),
    closed("9112 9.3.2", "sent ahead, the last one broken", sized() * 2 + get(host=None), b"ok", b"ok", 400),
    kept("9110 9.3.2", "HEAD", get(b"HEAD /openapi.json HTTP/1.1"), 200),
    kept("9110 9.3.2", "HEAD of what is not there", get(b"HEAD /nothing HTTP/1.1"), 404),
    closed(
        "9110 9.3.2",
        "HEAD that is refused by its fields",
        get(b"HEAD /openapi.json HTTP/1.1", b"Content-Length: 9999"),
        413,
    ),
    kept("9110 9.3.2", "HEAD of a path for POST", get(b"HEAD /infer HTTP/1.1"), 405),
    kept("9110 9.3.7", "OPTIONS", get(b"OPTIONS /infer HTTP/1.1"), 405),
    kept("9110 15.5.6", "a method that the path has not", get(b"DELETE /infer HTTP/1.1"), 405),
    kept("9110 10.1.1", "an expectation without a body", get(GET, b"Expect: 100-continue"), 200),
    closed("9110 10.1.1", "an expectation in HTTP/1.0", sized(b"Expect: 100-continue").replace(b"1.1", b"1.0"), b"ok"),
]

CASES = [*LINES, *TARGETS, *FIELDS, *LENGTHS, *CHUNKS, *CONNECTIONS]


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
def test_status_and_connection_follow_the_rfc(echo: LocalServer, case: Case):
    answers = (*case.answers, b"probe") if case.is_kept else case.answers
    sent = case.sent + PROBE
    for size in (len(sent), 7) if len(sent) < 1000 else (len(sent),):
        converse(echo.port, sent, size, answers, case.is_kept)


def test_rules_hold_for_pipelined_requests(echo: LocalServer):
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
def test_rfc_9110_10_1_1_error_replaces_100_continue(echo: LocalServer, sent: bytes, status: int):
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


def test_rfc_9112_9_6_bytes_after_last_request_do_not_reset_the_answer(echo: LocalServer):
    with HttpClient(echo.port) as client:
        client.send(sized(b"Connection: close"))
        for _ in range(20):
            client.send(bytes(10_000))
        check(client.read(), b"ok", is_last=True)
        client.end()
