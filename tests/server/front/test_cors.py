"""Pages of other origins: which may read answers, and what their browsers ask before."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kit.clients import Response, fetch
from kit.services import serving
from torchpipe_server.front.cors import CrossOrigin, cross_origin
from torchpipe_server.front.hosts import ForbiddenError
from torchpipe_server.front.services import HttpService
from torchpipe_server.options import parse_options

from torchpipe_py.methods.routes import Routes, route
from torchpipe_py.wire.http import HttpRequest

PAGE, OTHER = "https://app.example", "https://evil.example"
ALLOWED = "access-control-allow-origin"


def preflight(port: int, path: str = "/infer", verb: str = "POST", origin: str = PAGE, **fields: str) -> Response:
    asked = {"Origin": origin, "Access_Control_Request_Method": verb, **fields}
    return fetch(port, path, "OPTIONS", b"", **asked)


def rules(answer: Response) -> dict[str, str]:
    """The fields of an answer that are for pages of other origins."""
    names = [name for name in answer.fields if name.startswith("access-control-") or name == "vary"]
    return {name.removeprefix("access-control-"): answer.fields[name] for name in names}


FOR_PAGE = {"allow-origin": PAGE, "expose-headers": "*", "vary": "Origin"}


@pytest.mark.parametrize(
    ("origins", "allowed", "refused"),
    [
        ("https://app.example", [PAGE, "HTTPS://App.Example"], [OTHER, "http://app.example", f"{PAGE}:8443", "null"]),
        (
            "https://app.example/, http://localhost:*",
            [PAGE, "http://localhost:5173"],
            ["http://localhost.evil.example:80", "http://localhost"],
        ),
        ("https://*.lab.example", ["https://a.lab.example", "https://a.b.lab.example"], ["https://lab.example", PAGE]),
        ("*", [PAGE, OTHER, "null"], []),
    ],
)
def test_origins_are_names_and_patterns(origins: str, allowed: list[str], refused: list[str]) -> None:
    rule = CrossOrigin(origins)

    def granted(origin: str) -> str | None:
        return rule.fields(HttpRequest("GET", "/", fields={"origin": origin}), {}).get("Access-Control-Allow-Origin")

    assert [granted(origin) for origin in allowed] == ["*" if origins == "*" else origin for origin in allowed]
    assert [granted(origin) for origin in refused] == [None] * len(refused)


PATTERNS = ("https://*.lab.example", "http://localhost:*", "*://app.example", "https://a?c.[ab].example")
PARTS = ["https", "http", "://", "/", "?", "#", "*", "evil.example", "app.example", "localhost", ".lab.example", ":80"]
PARTS += ["a", "abc", ".a.example", "[ab]", "@", "\\", "\n", "%2f"]


def matches(pattern: str, origin: str) -> bool:
    """Whether the stars of the pattern can stand for texts without the three characters that end an origin's part."""
    first, *rest = pattern.split("*")
    if not rest:
        return origin == first
    if not origin.startswith(first):
        return False
    left = origin[len(first) :]
    shortest = min((left.find(mark) for mark in "/?#" if mark in left), default=len(left))
    return any(matches("*".join(rest), left[size:]) for size in range(shortest + 1))


def test_star_never_leaves_its_part_of_an_origin() -> None:
    draw = random.Random(5)
    seen = {True: 0, False: 0}
    for pattern in PATTERNS:
        rule = CrossOrigin(pattern)
        stars = pattern.split("*")
        for _ in range(3000):
            if draw.random() < 0.5:  # the pattern with hostile texts in place of its stars
                texts = ["".join(draw.choices(PARTS, k=draw.randrange(4))) for _ in stars[1:]]
                origin = stars[0] + "".join(map("".join, zip(texts, stars[1:], strict=True)))
            else:
                origin = "".join(draw.choices(PARTS, k=draw.randrange(1, 7)))
            fields = rule.fields(HttpRequest("GET", "/", fields={"origin": origin}), {})
            is_allowed = "Access-Control-Allow-Origin" in fields
            assert is_allowed == matches(pattern, origin), (pattern, origin)
            if is_allowed:
                assert origin.count("/") == 2
                assert origin.count("://") == 1
                assert not {"?", "#"} & {*origin} or pattern.count("?")
            seen[is_allowed] += 1
    assert min(seen.values()) > 1000


def test_no_name_allows_no_origin() -> None:
    """As an empty variable of a deployment gives."""
    assert cross_origin(" , ") is None
    assert CrossOrigin(",").fields(HttpRequest("GET", "/", fields={"origin": PAGE}), {}) == {"Vary": "Origin"}


def test_preflight_names_method_and_headers() -> None:
    with serving("Identity", cors_origin=PAGE) as server:
        answer = preflight(server.port, Access_Control_Request_Headers="content-type,x-deadline-ms")
        assert (answer.status, answer.body) == (200, b"")
        named = {"allow-methods": "POST", "allow-headers": "content-type,x-deadline-ms", "max-age": "600"}
        assert rules(answer) == {**FOR_PAGE, **named}
        private = preflight(server.port, Access_Control_Request_Private_Network="true")
        assert rules(private)["allow-private-network"] == "true"
        for path, verb in (("/v2/models/test/infer", "POST"), ("/v2/health/live", "HEAD"), ("/v2", "GET")):
            assert preflight(server.port, path, verb).status == 200
        assert preflight(server.port, "/nowhere").status == 404
        assert preflight(server.port, verb="GET").status == 405
        assert rules(preflight(server.port, origin=OTHER)) == {"vary": "Origin"}
        assert preflight(server.port, origin=OTHER).status == 405
        assert fetch(server.port, "/infer", "OPTIONS", Origin=PAGE).status == 405


@pytest.mark.parametrize(
    ("path", "verb", "body", "fields", "status"),
    [
        ("/infer", "POST", b"x", {}, 200),
        ("/infer", "POST", b"x", {"X_Deadline_Ms": "soon"}, 400),
        ("/nowhere", "GET", b"", {}, 404),
        ("/infer", "GET", b"", {}, 405),
        ("/infer", "POST", b"x" * 2000, {}, 413),
        ("/infer", "TRACE", b"", {}, 501),
        ("/infer", "POST", b"x", {"Host": "evil.example"}, 403),
    ],
)
def test_answers_and_errors_can_be_read_by_allowed_pages(
    path: str, verb: str, body: bytes, fields: Any, status: int
) -> None:
    with serving("Identity", cors_origin=PAGE, max_message_bytes=1000) as server:
        answer = fetch(server.port, path, verb, body, Origin=PAGE, **fields)
        expected = {} if status == 501 else FOR_PAGE  # its head is not read
        assert (answer.status, rules(answer).items() >= expected.items()) == (status, True)
        assert "allow-credentials" not in rules(answer)
        other = fetch(server.port, path, verb, body, Origin=OTHER, **fields)
        assert other.status == status
        assert ALLOWED not in other.fields


def test_no_page_may_read_answers_by_default() -> None:
    with serving("Identity") as server:
        assert rules(fetch(server.port, "/infer", "POST", b"x", Origin=PAGE)) == {}
        answer = preflight(server.port)
        assert (answer.status, rules(answer)) == (405, {})


def test_any_origin_needs_no_vary() -> None:
    with serving("Identity", cors_origin="*") as server:
        answer = fetch(server.port, "/infer", "POST", b"x", Origin=OTHER)
        assert rules(answer) == {"allow-origin": "*", "expose-headers": "*"}


def test_answer_with_its_own_rule_keeps_it() -> None:
    request = HttpRequest("GET", "/", fields={"origin": PAGE})
    assert CrossOrigin(PAGE).fields(request, {"access-control-allow-origin": OTHER}) == {}


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/page", "https://", "a b://c"])
def test_option_is_an_origin(origin: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["a.toml", "--cors-origin", f"https://good.example,{origin}"])
    assert f"expected origins as https://app.example, or *, got {origin!r}" in capsys.readouterr().err


def test_no_page_may_change_the_service() -> None:
    routes = Routes([route("POST", "/load", lambda request, done: None, changes_service=True)])
    service = HttpService(routes, 0, 2**20, cors=CrossOrigin("*"))
    asked = HttpRequest("OPTIONS", "/load", fields={"origin": PAGE, "access-control-request-method": "POST"})
    with pytest.raises(ForbiddenError, match="pages of other origins load and unload nothing"):
        service.decode(asked)
