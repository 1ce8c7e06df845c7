"""The host names that requests may be addressed to."""

from __future__ import annotations

import pytest
from kit.clients import Client, ask, fetch
from kit.services import serving
from torchpipe_server.front.hosts import ForbiddenError, HostGuard, is_loopback

from torchpipe_py.wire.http import HttpRequest

SAFE = (
    "",
    "127.0.0.1:8888",
    "10.1.2.3",
    "[::1]:8888",
    "[fe80::1]",
    "localhost",
    "LOCALHOST.:80",
    "a.localhost",
    "gpu-1",
)
UNKNOWN = (
    "evil.example",
    "EVIL.example.:8888",
    "127.0.0.1.evil.example",
    "1.2.3.4.5",
    "localhost.evil.example",
    "a.b:",
)


def is_answered(guard: HostGuard, host: str, is_change: bool = False) -> bool:
    try:
        guard.check(HttpRequest("POST", "/infer", fields={"host": host}), is_change)
    except ForbiddenError:
        return False
    return True


@pytest.mark.parametrize(
    ("address", "allowed", "is_checked"),
    [
        *((address, "", True) for address in ("127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "localhost")),
        *((address, "", False) for address in ("0.0.0.0", "::", "10.0.0.1", "fe80::1%eth0", "")),
        ("0.0.0.0", "images.example", True),
    ],
)
def test_unknown_hosts_are_refused_on_loopback_and_for_changes(address: str, allowed: str, is_checked: bool) -> None:
    guard = HostGuard(address, allowed)
    for is_change in (False, True):
        assert all(is_answered(guard, host, is_change) for host in SAFE)
        for host in UNKNOWN:
            assert is_answered(guard, host, is_change) == (not is_checked and not is_change), host


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_allowed_hosts_are_names_and_patterns(address: str) -> None:
    guard = HostGuard(address, "Images.example, *.lab.example:80")
    assert all(is_answered(guard, host, True) for host in ("images.EXAMPLE:9", "a.lab.example", "a.b.lab.example."))
    assert not any(is_answered(guard, host) for host in ("lab.example", "a.images.example", "images.example.evil"))
    assert is_answered(HostGuard(address, "*"), "any.example", True)


def test_exempt_paths_are_answered_under_any_host() -> None:
    HostGuard("127.0.0.1", exempt=frozenset({"/live"})).check(HttpRequest(path="/live", fields={"host": "a.example"}))


def test_loopback_addresses_are_recognised() -> None:
    assert not is_loopback("images.example")
    assert is_loopback("::1%lo")


def test_port_on_loopback_refuses_unknown_hosts() -> None:
    with serving("Identity", allowed_hosts="images.example") as server:
        for path, verb in (("/infer", "POST"), ("/v2", "GET"), ("/", "GET"), ("/nowhere", "GET"), ("/infer", "GET")):
            status, answer = ask(server.port, b"a", path, verb, Host="evil.example:80")
            assert (status, answer["code"]) == (403, "forbidden")
            assert "'evil.example' are not answered here; see --allowed-hosts" in answer["error"]
            assert fetch(server.port, path, verb, b"a", Host="images.example").status != 403
        absolute = b"POST http://evil.example/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\na"
        with Client(server.port) as client:
            client.sock.sendall(absolute)
            assert client.sock.recv(12) == b"HTTP/1.1 403"


def test_port_on_other_addresses_answers_under_any_host() -> None:
    with serving("Identity", host="0.0.0.0") as server:
        assert (
            ask(server.port, {"inputs": {"data": "a"}}, Host="any.example", Content_Type="application/json")[0] == 200
        )
