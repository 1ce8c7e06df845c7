"""The monitoring port and clients that are slow, many, deaf or rude, beside one that asks whether the service lives."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from kit.clients import connect, read_all
from kit.services import turn
from kit.waits import WAIT, eventually
from torchpipe_server.front.loop import call_from_any_thread, new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import listen
from torchpipe_server.supervisor.monitoring.status import StatusServer

LIVE = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
MOST = 8


class Supervisor:
    """What the port asks. ``figures`` may be large; with ``hold`` they are given once that is called."""

    is_ready = True
    graph = "<svg/>"
    repository = None

    def __init__(self, figures: Any = None, hold: bool = False) -> None:
        self.figures = {"text": "x"} if figures is None else figures
        self.is_held = hold
        self.waiting: list[Callable[[dict[str, Any]], object]] = []

    def ask(self, answer: Callable[[dict[str, Any]], object]) -> None:
        if self.is_held:
            self.waiting.append(answer)
        else:
            answer(self.figures)

    def release(self) -> None:
        self.is_held = False
        for answer in self.waiting:
            answer(self.figures)


class Port:
    """A `StatusServer` on a thread of its own."""

    def __init__(self, supervisor: Any, listener: Any) -> None:
        self.loop, self.port = new_loop(is_fast=False), listener.getsockname()[1]
        self.status = StatusServer(self.loop, listener, supervisor, 8888, Options("test"), MOST)

    def call(self, function: Callable[[], object]) -> None:
        call_from_any_thread(self.loop, function)

    @property
    def connections(self) -> int:
        return self.status._server.connections

    def is_live(self) -> bool:
        with connect(self.port) as sock:
            sock.sendall(LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            return read_all(sock).startswith(b"HTTP/1.1 200")

    def ask(self, path: str, host: str = "") -> http.client.HTTPResponse:
        """``host`` may be empty: HTTP/1.0 needs none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        connection._http_vsn_str = "HTTP/1.1" if host else "HTTP/1.0"  # type: ignore[attr-defined]
        connection.putrequest("GET", path, skip_host=True)
        if host:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        answer.text = answer.read().decode()  # type: ignore[attr-defined]
        connection.close()
        return answer


@contextmanager
def serving(supervisor: Supervisor | None = None, host: str = "127.0.0.1", listener: Any = None) -> Iterator[Port]:
    made = Port(supervisor or Supervisor(), listener or listen(host, 0))
    thread = threading.Thread(target=made.loop.run_forever)
    thread.start()
    try:
        yield made
    finally:
        made.call(made.status.close)
        made.call(made.loop.stop)
        thread.join(WAIT)
        turn(made.loop)  # in which transports close their sockets
        made.loop.close()


def test_whoever_drips_gives_way():
    """Many more than it serves, each of which goes on sending."""
    with serving() as server, ExitStack() as stack:
        threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        dripping = [stack.enter_context(connect(server.port)) for _ in range(5 * MOST)]
        for sock in dripping:
            sock.sendall(b"GET /live HTTP/1.1\r\nX: ")
        assert server.is_live()
        assert set(threading.enumerate()) <= threads
        assert len(os.listdir("/proc/self/fd")) <= files + len(dripping) + MOST
        for sock in dripping[: 4 * MOST]:
            read_all(sock)
            sock.close()
        for sock in dripping:
            sock.close()
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= files, "descriptors are left")


def test_closes_newcomers_while_all_wait_for_an_answer_which_comes():
    supervisor = Supervisor(hold=True)
    with serving(supervisor) as server, ExitStack() as stack:
        waiting = [stack.enter_context(connect(server.port)) for _ in range(MOST)]
        for sock in waiting:
            sock.sendall(b"GET /stats HTTP/1.0\r\n\r\n")
        # One whose request is not read yet would give way.
        eventually(lambda: [one.call is not None for one in [*server.status._server._connections]] == [True] * MOST)
        assert not server.is_live()
        server.call(supervisor.release)
        assert all(b'"text"' in read_all(sock) for sock in waiting)
        assert server.is_live()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        *((host, 200) for host in ("127.0.0.1:80", "localhost:8080", "[::1]:80", "torchpipe:80", "a.localhost", "")),
        *((host, 421) for host in ("evil.example", "EVIL.example.:8080", "127.0.0.1.evil.example", "1.2.3.4.5:80")),
    ],
)
def test_a_page_of_another_name_reads_nothing(host: str, code: int):
    """DNS rebinding: a name that somebody else owns leads to this machine."""
    with serving() as server:
        answers = [server.ask(path, host) for path in ("/stats", "/", "/graph.svg", "/nowhere")]
        assert [answer.status for answer in answers] == ([421] * 4 if code == 421 else [200, 200, 200, 404])
        assert server.ask("/live", host).status == 200, "a probe gets its answer"


def test_a_browser_is_told_what_the_page_may_do():
    with serving() as server:
        for path in ("/", "/graph.svg", "/stats", "/nowhere"):
            answer = server.ask(path)
            policy = answer.getheader("Content-Security-Policy") or ""
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.getheader("X-Content-Type-Options") == "nosniff"


def test_a_defect_is_answered_and_logged_once(caplog):
    with serving(Supervisor({"no": "figures"})) as server:
        assert server.ask("/metrics").status == 500
        assert server.ask("/live").status == 200
    (record,) = caplog.records
    assert record.getMessage() == "internal error in /metrics"
    assert record.exc_info is not None
