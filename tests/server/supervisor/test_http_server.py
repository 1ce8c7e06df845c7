"""HTTP clients that are slow, many, deaf or rude, beside one that asks whether the service lives."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from fakes import WAIT
from service import connect, eventually, read_all
from torchpipe_server.supervisor import acceptor, status
from torchpipe_server.supervisor.acceptor import listen
from torchpipe_server.supervisor.http import State
from torchpipe_server.supervisor.status import StatusServer

LIVE = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
MOST = 8


class Service:
    """Answers at once; ``asked`` counts the questions. ``figures`` may be large."""

    is_ready = True
    graph = "<svg/>"

    def __init__(self, size: int = 10, hold: threading.Event | None = None) -> None:
        self.figures = {"text": "x" * size}
        self.asked = 0
        self.hold = hold

    def ping(self, answer: Callable[[], object]) -> None:
        answer()

    def ask(self, answer: Callable[[dict[str, Any]], object]) -> None:
        self.asked += 1
        if self.hold is None:
            answer(self.figures)
        else:
            threading.Thread(target=lambda: self.hold.wait(WAIT) and answer(self.figures), daemon=True).start()


@contextmanager
def serving(service: Service | None = None, host: str = "127.0.0.1") -> Iterator[StatusServer]:
    with StatusServer(listen(host, 0), service or Service(), 8888, MOST) as server:
        yield server


def is_live(server: StatusServer) -> bool:
    with connect(server.port) as sock:
        sock.sendall(LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        return read_all(sock).startswith(b"HTTP/1.1 200")


def is_closed(sock: socket.socket) -> bool:
    sock.settimeout(WAIT)
    read_all(sock)
    return True


def test_whoever_drips_gives_way():
    """Many more than it serves, each of which goes on sending."""
    with serving() as server, ExitStack() as stack:
        threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
        dripping = [stack.enter_context(connect(server.port)) for _ in range(5 * MOST)]
        for sock in dripping:
            sock.sendall(b"GET /live HTTP/1.1\r\nX: ")
        assert is_live(server)
        assert set(threading.enumerate()) <= threads
        assert len(os.listdir("/proc/self/fd")) <= files + len(dripping) + MOST
        assert all(is_closed(sock) for sock in dripping[: 4 * MOST])
        for sock in dripping:
            sock.close()
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= files, "descriptors are left")


@pytest.mark.parametrize("data", [b"", b"GET /live HTTP/1.1\r\nX: "], ids=["silent", "half"])
def test_a_whole_request_has_its_time(monkeypatch, data):
    monkeypatch.setattr(status, "REQUEST_SECONDS", 2 * WAIT)
    with serving() as server, connect(server.port) as sock:
        for seconds in (2 * WAIT, 0.5):  # the second answer is what the short time begins with
            server._server._request_seconds = seconds
            sock.sendall(LIVE)
            assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        sock.settimeout(0.02)
        until, received = time.monotonic() + WAIT, None
        while received != b"":
            assert time.monotonic() < until
            send_what_goes(sock, data)  # a byte now and then does not lengthen it
            data = data and b"a"
            try:
                received = sock.recv(4096)
            except TimeoutError:
                pass
            except ConnectionError:
                break


def test_a_client_that_does_not_read_is_dropped_and_keeps_nobody(monkeypatch):
    monkeypatch.setattr(status, "REQUEST_SECONDS", 2 * WAIT)
    with serving(Service(2**24)) as server, connect(server.port) as deaf:
        eventually(lambda: server._server._connections)
        (connection,) = server._server._connections
        server._server._request_seconds = 0.5
        deaf.sendall(b"GET /stats HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
        eventually(lambda: connection.state in (State.SENDING, State.CLOSED))
        server._server._request_seconds = 2 * WAIT
        assert is_live(server)
        eventually(lambda: len(server._server._connections) == 0)
        assert is_live(server)
        assert len(read_all(deaf)) < 2**24


def test_while_all_wait_for_an_answer_newcomers_are_closed_and_the_answers_come(monkeypatch):
    monkeypatch.setattr(status, "ANSWER_SECONDS", WAIT)
    hold = threading.Event()
    service = Service(hold=hold)
    with serving(service) as server, ExitStack() as stack:
        waiting = [stack.enter_context(connect(server.port)) for _ in range(MOST)]
        for sock in waiting:
            sock.sendall(b"GET /stats HTTP/1.0\r\n\r\n")
        # One whose request is not read yet would give way.
        eventually(lambda: [one.state for one in list(server._server._connections)] == [State.ANSWERING] * MOST)
        assert not is_live(server)
        hold.set()
        assert all(b'"text"' in read_all(sock) for sock in waiting)
        assert service.asked <= 2, "each has asked for itself"
        assert is_live(server)


def test_pipelined_requests_are_answered_in_their_order():
    with serving() as server, connect(server.port) as sock:
        names = [b"/ready", b"/nowhere", b"/live", b"/stats"] * 20
        sock.sendall(b"".join(b"GET " + name + b" HTTP/1.1\r\nHost: a\r\n\r\n" for name in names[:-1]))
        sock.sendall(b"HEAD " + names[-1] + b" HTTP/1.0\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        answers = read_all(sock).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"404", b"200", b"200"] * 20
        assert b"Connection: close" in answers[-1]
        assert answers[-1].endswith(b"\r\n\r\n")


def test_what_is_no_request_is_told_so_and_the_connection_closed():
    with serving() as server:
        for data, code in (
            (b"\x16\x03\x01", b"400"),
            (b"POST /live HTTP/1.1\r\nHost: a\r\n\r\n" + b"x" * 10**6, b"501"),
        ):
            with connect(server.port) as sock:
                threading.Thread(target=lambda sock=sock, data=data: send_what_goes(sock, data), daemon=True).start()
                answer = read_all(sock)
            assert answer.startswith(b"HTTP/1.1 " + code)
            assert b"Connection: close" in answer


def send_what_goes(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        pass


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
        answers = [ask(server, path, host) for path in ("/stats", "/", "/metrics", "/graph.svg", "/nowhere")]
        assert [answer.status for answer in answers] != [200] * 5
        assert {answer.status for answer in answers} & {200, 421} == {code}
        assert ask(server, "/live", host).status == 200, "a probe gets its answer"


def ask(server: StatusServer, path: str, host: str) -> http.client.HTTPResponse:
    """``host`` may be empty: HTTP/1.0 needs none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT)
    connection._http_vsn_str = "HTTP/1.1" if host else "HTTP/1.0"  # type: ignore[attr-defined]
    connection.putrequest("GET", path, skip_host=True)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def test_a_port_that_is_open_to_others_answers_to_any_name():
    with serving(host="0.0.0.0") as server:
        assert ask(server, "/stats", "metrics.example").status == 200


def test_a_browser_is_told_what_the_page_may_do():
    with serving() as server:
        for path in ("/", "/graph.svg", "/stats", "/nowhere"):
            answer = ask(server, path, "")
            policy = answer.getheader("Content-Security-Policy")
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.getheader("X-Content-Type-Options") == "nosniff"


def test_without_descriptors_it_waits_and_does_not_spin(monkeypatch):
    """A listener for which there is no descriptor reports ready all the time."""
    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.1)
    listener = Exhausted(listen("127.0.0.1", 0))
    with StatusServer(listener, Service(), 8888, MOST) as server, connect(server.port) as sock:  # type: ignore[arg-type]
        eventually(lambda: listener.failures >= 2)
        began, failures = time.monotonic(), listener.failures
        time.sleep(0.5)
        assert listener.failures - failures <= (time.monotonic() - began) / 0.1 + 1
        listener.has_room = True
        sock.sendall(LIVE)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_question_that_is_never_answered_is_asked_again(monkeypatch):
    """The supervisor may fail to make the figures once: a monitor sees them again."""
    monkeypatch.setattr(status, "ANSWER_SECONDS", 0.2)

    class Silent(Service):
        def ask(self, answer: Callable[[dict[str, Any]], object]) -> None:
            self.asked += 1
            if self.asked > 1:
                answer(self.figures)

    with serving(Silent()) as server, connect(server.port) as sock:
        codes = []
        for _ in range(2):
            sock.sendall(LIVE.replace(b"/live", b"/stats"))
            answer = sock.recv(4096)
            codes.append(answer.split()[1])
            assert answer.endswith((b"}", b"\n"))
        assert codes == [b"503", b"200"]


class Exhausted:
    """A listener that finds no descriptor until it has room."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.failures, self.has_room = 0, False

    def accept(self) -> Any:
        if self.has_room:
            return self._listener.accept()
        self.failures += 1
        raise OSError(24, "Too many open files")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)
