"""Connections of a real service: more than there is room for, silent ones, few descriptors, addresses of both kinds."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from kit.clients import IDL, Client, connect, every_client, is_answered, is_served, on_its_way, read_all
from kit.monitored import SteeredService, cpu_seconds
from kit.services import DEMO
from kit.waits import eventually
from torchpipe_server import cli
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import Acceptor, listen
from torchpipe_server.supervisor.connection_limits import most_connections

from torchpipe_py import ConfigError

DATA = b"ring"
FILES = 64
MOST = most_connections(FILES, 1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredService]:
    """A service that may open few files."""
    with SteeredService(tmp_path_factory.mktemp("small"), "--message-seconds", "600", files=FILES) as process:
        yield process.wait_started()


def has_read_all(port: int) -> bool:
    """Whether nothing waits in the sockets of that port, on the service's side."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return not any(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(f":{port:04X}"))


def test_open_files_bound_connections_and_a_warning_says_so(small: SteeredService):
    assert 4 <= MOST <= 16
    line = f"--max-connections is {MOST} instead of 1024: only {FILES} files may be open (ulimit -n)"
    eventually(lambda: line in small.stderr)


def test_too_few_files_are_told():
    with pytest.raises(ConfigError, match="only 40 files may be open"):
        cli._fit(Options(DEMO), 40)


@every_client
def test_silent_connections_give_way_and_a_client_that_asked_keeps_its_own(small: SteeredService, client_type):
    with client_type(small.port) as client, ExitStack() as stack:
        client.infer_batch(DATA)
        silent = [stack.enter_context(connect(small.port)) for _ in range(60)]
        with client_type(small.port) as newcomer:
            newcomer.infer_batch(DATA)
        client.infer_batch(DATA)
        assert read_all(silent[0]) == b"", "the oldest is still there"
    eventually(lambda: psutil.Process(small.pid).num_fds() < FILES / 2)


@every_client
def test_newcomer_is_overloaded_if_no_connection_is_idle(small: SteeredService, client_type):
    message = client_type.pack(DATA)
    eventually(lambda: small.open_connections == 0)  # one that has just ended would take a place, and leave it
    with ExitStack() as stack:
        half = [stack.enter_context(connect(small.port)) for _ in range(MOST)]
        for sock in half:
            sock.sendall(message[:20])
        eventually(lambda: not any(map(on_its_way, half)) and has_read_all(small.port))  # until then they are idle
        with client_type(small.port) as client:
            error = client.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=DATA))
        assert error.code == "overloaded"
        for sock in half:
            sock.sendall(message[20:])
            assert sock.recv(4)
    eventually(lambda: is_served(small.port))


def test_two_floods_at_once_cost_no_processor_and_a_dead_worker_is_replaced(small: SteeredService):
    with ExitStack() as stack:
        dripping = [stack.enter_context(connect(small.http_port)) for _ in range(100)]
        for sock in [*dripping, *(stack.enter_context(connect(small.port)) for _ in range(100))]:
            try:
                sock.sendall(b"GET / HTTP/1.1\r\nX: " if sock in dripping else b"")
            except OSError:
                pass
        before = cpu_seconds(small.pid)
        threading.Event().wait(1.0)
        assert cpu_seconds(small.pid) - before < 0.3
        assert psutil.Process(small.pid).num_threads() < 8
        assert small.get("live")[0] == 200
        client = stack.enter_context(Client(small.port))
        client.ping()
        (worker,) = small.workers
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: small.workers not in ([], [worker]))
        eventually(lambda: is_answered(client), "no worker is ready again")
        assert is_served(small.port)
    assert "cannot be started" not in small.stderr


# -- addresses ------------------------------------------------------------------------------------------------------

HOSTS = [
    ("127.0.0.1", "127.0.0.1", socket.AF_INET, True),
    ("localhost", "127.0.0.1", socket.AF_INET, True),
    ("0.0.0.0", "0.0.0.0", socket.AF_INET, False),
    ("::1", "[::1]", socket.AF_INET6, True),
    ("::", "[::]", socket.AF_INET6, False),
]


def has_ipv6() -> bool:
    """Python may have it where the machine has no such address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("host", "shown", "family", "is_local"), HOSTS, ids=[host[0] for host in HOSTS])
def test_start_line_shows_addresses(host, shown, family, is_local):
    if family == socket.AF_INET6 and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    with listen(host, 0) as listener, listen("127.0.0.1", 0) as http:
        assert listener.family == family
        port = listener.getsockname()[1]
        line, second = cli._start_lines(Options("x.toml", host=host), listener, http)
        assert line.startswith("serving x.toml ")
        assert line.endswith(f" on {shown}:{port} (pid {os.getpid()})")
        assert ("--host 0.0.0.0" in line) is is_local
        assert second == f"http://127.0.0.1:{http.getsockname()[1]}/ is the status page (--http-host 0.0.0.0 opens it)"
        if host == "::":
            connect(port).close()  # over IPv4


NO_HOSTS = {
    **dict.fromkeys(
        ["", "x" * 70, "no.such.host.invalid"], "neither an address nor a name that has one; valid: 0.0.0.0, 127"
    ),
    **dict.fromkeys(["127.0.0.l", "127.0.0.1 ", "127.0.0.1:80"], "one; did you mean '127.0.0.1'?"),
    **{"256.0.0.1": "did you mean", "[::1]": "did you mean '::1'?", "locahost": "did you mean 'localhost'?"},
    **{"0": "not a full address; did you mean '0.0.0.0'?", "0x0": "'0.0.0.0'?", "127.1": "'127.0.0.1'?"},
    "010.0.0.1": "not a full address; did you mean '8.0.0.1'?",
}


@pytest.mark.parametrize("host", NO_HOSTS, ids=repr)
def test_refuses_invalid_address_and_names_nearest(host):
    with pytest.raises(OSError, match=re.escape(NO_HOSTS[host])):
        listen(host, 0)


def test_detects_vanished_peer():
    taken: list[socket.socket] = []
    loop = new_loop()
    with listen("127.0.0.1", 0) as listener:
        acceptor = Acceptor(loop, listener, lambda sock, peer: taken.append(sock), lambda: None)
        acceptor.start()
        with connect(listener.getsockname()[1]):
            acceptor.close()
        (sock,) = taken
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for option in (socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_USER_TIMEOUT):
            assert sock.getsockopt(socket.IPPROTO_TCP, option) > 0
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
        assert not sock.getblocking() or sock.gettimeout() == 0
        sock.close()
    loop.close()
