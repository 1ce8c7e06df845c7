"""Both clients against a server that fails in every way: each call has one outcome, and no answer is another call's."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fakes import WAIT, in_threads
from flaky import (
    CLIENTS,
    BlockingClient,
    FlakyServer,
    answer_and_hang_up,
    fails,
    fails_items,
    fails_undeclared,
    half,
    hang_up,
    other,
    pauses,
    reply,
    reset,
    sends,
    stall,
    trickle,
)
from torchpipe_client import (
    AsyncClient,
    BackendError,
    BadReply,
    Client,
    ClientClosed,
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    InferenceError,
    InvalidRequest,
    NotConnected,
    Overloaded,
    TimedOut,
    Unavailable,
    UnknownNode,
    WorkerDied,
)


@pytest.fixture(params=CLIENTS)
def make(request: pytest.FixtureRequest) -> Any:
    """Client, or the same calls of AsyncClient."""
    return CLIENTS[request.param]


def label(client: Any, text: str = "a", **options: Any) -> str:
    return str(client.infer_batch(text.encode(), **options).label)


# -- errors of the service ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "also"),
    [
        ("decode_error", DecodeError, ValueError),
        ("unknown_node", UnknownNode, IndexError),
        ("invalid_request", InvalidRequest, ValueError),
        ("backend_error", BackendError, InferenceError),
        ("deadline_exceeded", DeadlineExceeded, TimeoutError),
        ("a_new_one", InferenceError, ClientError),
    ],
)
def test_an_error_of_the_service_is_raised_once_and_not_repeated(make, code, kind, also):
    with FlakyServer(fails(code)) as server, make(server.address) as client:
        with pytest.raises(also, match=r"^on purpose$") as raised:
            label(client)
        assert (type(raised.value), raised.value.code) == (kind, code)
        assert label(client) == "a"
        assert len(server.calls) == 2


@pytest.mark.parametrize("code", ["overloaded", "unavailable"])
def test_what_was_not_begun_is_repeated_after_the_time_that_the_service_names(make, code):
    with FlakyServer(fails(code, 60), fails(code)) as server, make(server.address, idempotent=False) as client:
        assert label(client) == "a"
        first, second, _ = [call.at for call in server.calls]
        assert second - first >= 0.06
        assert server.connections == 1


def test_delays_grow_and_are_not_the_same_for_all(make, monkeypatch):
    with pauses(monkeypatch) as delays:
        for _ in range(2):
            with FlakyServer(*[fails("overloaded", 1000)] * 4) as server, make(server.address) as client:
                with pytest.raises(Overloaded) as raised:
                    label(client)
                assert (raised.value.retry_after_ms, len(server.calls)) == (1000, 4)
    assert len(set(delays)) == 6
    for first, second, third in (delays[:3], delays[3:]):
        assert 1.025 <= first <= 1.05 <= second <= 1.1 <= third <= 1.2


def test_nobody_waits_for_a_repetition_that_would_come_too_late(make):
    with FlakyServer(fails("overloaded", 60_000)) as server, make(server.address) as client:
        with pytest.raises(Overloaded):
            label(client)
        server.script = [fails("overloaded", 500)]
        with pytest.raises(Overloaded):
            client.infer({"data": b"a"}, deadline_ms=400)
        assert len(server.calls) == 2


def test_no_repetitions_where_none_are_wanted(make):
    with FlakyServer(fails("unavailable", 1)) as server, make(server.address, retries=0) as client:
        with pytest.raises(Unavailable):
            label(client)
        assert len(server.calls) == 1


def test_a_call_that_killed_two_workers_gets_no_third(make, monkeypatch):
    with pauses(monkeypatch), FlakyServer(*[fails("worker_died")] * 3) as server, make(server.address) as client:
        with pytest.raises(WorkerDied):
            label(client)
        assert len(server.calls) == 2


@pytest.mark.parametrize("step", [fails("worker_died"), hang_up, reset, half])
def test_what_was_perhaps_begun_is_repeated_only_if_it_may_be(make, step):
    with FlakyServer(step) as server, make(server.address) as client:
        assert label(client) == "a"
        assert len(server.calls) == 2
    with FlakyServer(step) as server, make(server.address, idempotent=False) as client:
        with pytest.raises((WorkerDied, ConnectionLost)) as raised:
            label(client)
        assert raised.value.code in ("worker_died", "connection_lost")
        assert label(client, "b") == "b"
        assert len(server.calls) == 2


def test_ping_knows_what_it_does_not_declare(make):
    steps = [fails_undeclared("Unavailable: no worker"), fails_undeclared("ValueError: a defect")]
    with FlakyServer(*steps) as server, make(server.address) as client:
        with pytest.raises(InferenceError, match=r"^ValueError: a defect$") as raised:
            client.ping()
        assert (raised.value.code, len(server.calls)) == ("internal", 2)
        client.ping()


# -- many -----------------------------------------------------------------------------------------------------------


def test_only_the_images_that_were_refused_are_sent_again(make):
    steps = [fails_items(None, "overloaded", "decode_error", "overloaded"), fails_items(None, "overloaded")]
    with FlakyServer(*steps) as server, make(server.address) as client:
        first, second, third, fourth = client.infer_many(image for image in (b"a", b"b", b"c", b"d"))
        assert [one.label for one in (first, second, fourth)] == ["a", "b", "d"]
        assert isinstance(third, DecodeError)
        assert [[one.data for one in call.args.params] for call in server.calls] == [
            [b"a", b"b", b"c", b"d"],
            [b"b", b"d"],
            [b"d"],
        ]


def test_an_attempt_that_fails_takes_nothing_from_those_before_it(make, monkeypatch):
    steps = [fails_items(None, "overloaded"), *[hang_up] * 3]
    with pauses(monkeypatch), FlakyServer(*steps) as server, make(server.address) as client:
        first, second = client.infer_many([b"a", b"b"])
        assert (first.label, type(second), len(server.calls)) == ("a", Overloaded, 4)


def test_no_image_has_an_outcome_where_the_call_has_none(make):
    with FlakyServer(hang_up) as server, make(server.address, retries=0) as client:
        with pytest.raises(ConnectionLost):
            client.infer_many([b"a", b"b"])
        assert client.infer_many([]) == []


# -- broken answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (other, "number 2 in place of infer_batch number 1"),
        (sends(b"HTTP/1.1 400 Bad Request\r\n"), r"b'HTTP/1.1 400 .* --port\?"),
        (sends(b"\0\0\0\4what"), "no message of the contract"),
        (sends(b"\xff\xff\xff\xff"), "no frame of Thrift"),
        (sends(b"\0\0\0\0\0"), "no frame of Thrift"),
        (lambda server, sock, call: sock.sendall(reply(call)), "neither a result nor an error"),
    ],
)
def test_what_is_no_answer_is_told_and_the_connection_used_no_more(make, step, text):
    with FlakyServer(step) as server, make(server.address) as client:
        with pytest.raises(BadReply, match=text):
            label(client)
        assert label(client, "b") == "b"
        assert [call.connection for call in server.calls] == [1, 2]


def test_an_answer_that_nobody_asked_for_ends_the_connection(make):
    with FlakyServer() as server, make(server.address) as client:
        server.script = [lambda server, sock, call: sock.sendall(2 * reply(call))]
        with pytest.raises(BadReply):
            client.ping()
        client.ping()
        assert server.connections == 2


# -- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [stall, trickle])
def test_a_call_that_takes_too_long_gives_its_connection_up(make, step):
    with FlakyServer(step) as server, make(server.address, timeout=WAIT) as client:
        with pytest.raises(TimedOut, match=r"^no answer within 0.05 s$"):
            label(client, timeout=0.05)
        assert label(client, "b") == "b"
        assert [call.connection for call in server.calls] == [1, 2]


def test_the_service_is_told_how_much_time_is_left(make, monkeypatch):
    with pauses(monkeypatch), FlakyServer(hang_up) as server, make(server.address, timeout=5) as client:
        client.infer({"data": b"a"}, deadline_ms=4000)
        client.infer({"data": b"a"})
        client.infer({"data": b"a"}, deadline_ms=9000)
        client.infer_many([b"a"], timeout=0.5)
        told = [getattr(call.args, "request", call.args).deadline_ms for call in server.calls]
        assert 0 < told[1] <= told[0] <= 4000
        assert all(4000 < one <= 5000 for one in told[2:4])
        assert 0 < told[4] <= 500


def test_a_call_waits_for_a_connection_no_longer_than_for_its_answer(make):
    with FlakyServer(stall) as server, make(server.address, max_connections=1, retries=0) as client:
        errors: list[BaseException] = []

        def call() -> None:
            try:
                label(client)
            except ClientError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        assert server.has_stalled.wait(WAIT)
        with pytest.raises(TimedOut, match=r"all 1 connections were in use for 0.05 s \(max_connections\)"):
            label(client, timeout=0.05)
        server.ended.set()
        thread.join(WAIT)
        assert (errors, server.connections) == ([], 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"timeout": 0}, "timeout"),
        ({"connect_timeout": -1}, "connect_timeout"),
        ({"retries": -1}, "retries"),
        ({"max_connections": 0}, "max_connections"),
    ],
)
def test_options_that_make_no_sense(options, text):
    for cls in (Client, AsyncClient):
        with pytest.raises(ValueError, match=f"^{text} must be"):
            cls("127.0.0.1:8888", **options)


def test_times_of_a_call_that_make_no_sense(make):
    with make("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"^timeout must be greater than 0, not 0"):
            client.ping(timeout=0)
        with pytest.raises(ValueError, match=r"^deadline_ms must be greater than 0, not -1"):
            client.infer({}, deadline_ms=-1)


# -- connections ----------------------------------------------------------------------------------------------------


def test_a_connection_that_the_service_closed_while_it_was_idle_is_noticed(make):
    with FlakyServer(answer_and_hang_up) as server, make(server.address, retries=0) as client:
        assert label(client) == "a"
        assert server.connections_ended.acquire(timeout=WAIT)
        if isinstance(client, BlockingClient):
            client.run(asyncio.sleep(0))  # a round of its event loop
        assert label(client, "b") == "b"
        assert server.connections == 2


def test_a_connection_that_was_idle_for_long_is_not_used(make, monkeypatch):
    with FlakyServer() as server, make(server.address) as client:
        client.ping()
        client.ping()
        monkeypatch.setattr("torchpipe_client.connection.IDLE_SECONDS", -1)
        monkeypatch.setattr("torchpipe_client.aio.IDLE_SECONDS", -1)
        client.ping()
        assert [call.connection for call in server.calls] == [1, 1, 2]


def test_each_call_under_way_has_a_connection_to_itself(make):
    with FlakyServer() as server, make(server.address, max_connections=8) as client:

        def work(index: int) -> None:
            for turn in range(5):
                assert label(client, f"{index} {turn}") == f"{index} {turn}"

        in_threads(50, work)
        assert len(server.calls) == 250
        assert server.connections <= 8


def test_nobody_listens(make, monkeypatch):
    with socket.socket() as bound, pauses(monkeypatch) as delays:
        bound.bind(("127.0.0.1", 0))
        with make(f"127.0.0.1:{bound.getsockname()[1]}", idempotent=False) as client:
            with pytest.raises(NotConnected, match=r"^cannot connect to 127\.0\.0\.1:") as raised:
                client.ping()
            assert (raised.value.code, len(delays)) == ("not_connected", 3)
            assert isinstance(raised.value, ConnectionError)


def test_a_service_that_comes_meanwhile_is_found(make, monkeypatch):
    with FlakyServer() as server, ExitStack() as stack:
        port = server.port
        server.stop()

        def start() -> None:
            stack.enter_context(FlakyServer(port=port))

        with pauses(monkeypatch, start) as delays, make(f"127.0.0.1:{port}") as client:
            assert label(client) == "a"
            assert len(delays) == 1


def test_a_host_without_an_address(make):
    with make("no-such-host.invalid:8888", retries=0) as client, pytest.raises(NotConnected, match="no-such-host"):
        client.ping()


@pytest.mark.parametrize(
    "address", ["localhost", "localhost:", ":8888", "localhost:http", "::1:8888", "a:0", "a:70000"]
)
def test_addresses_that_are_none(address):
    for cls in (Client, AsyncClient):
        with pytest.raises(ValueError, match=r"expected host:port, as 127.0.0.1:8888"):
            cls(address)


def test_a_client_says_where_its_service_is(make):
    with make("[::1]:8888") as client:
        assert repr(client).endswith("Client('[::1]:8888')")


def test_after_the_end_there_are_no_calls(make):
    with FlakyServer() as server, make(server.address) as client:
        client.ping()
        client.close()
        client.close()
        with pytest.raises(ClientClosed):
            client.ping()
        assert len(server.calls) == 1


def test_a_call_under_way_ends_as_it_would_and_its_connection_with_it(make):
    with FlakyServer(stall) as server, make(server.address) as client:
        labels: list[str] = []
        thread = threading.Thread(target=lambda: labels.append(label(client)))
        thread.start()
        assert server.has_stalled.wait(WAIT)
        client.close()
        server.ended.set()
        thread.join(WAIT)
        assert labels == ["a"]
        assert server.connections_ended.acquire(timeout=WAIT)


def test_both_clients_have_the_same_calls():
    names = {name for name in vars(Client) if not name.startswith("_")}
    assert names == {name for name in vars(AsyncClient) if not name.startswith("_")}
    for name in ["__init__", *names]:
        assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(AsyncClient, name))


# -- ways of ending that are no answers -----------------------------------------------------------------------------


def test_an_interrupted_call_gives_its_connection_up():
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(server: FlakyServer, sock: socket.socket, call: Any) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        stall(server, sock, call)

    with FlakyServer(interrupt) as server, Client(server.address, max_connections=1) as client:
        with pytest.raises(KeyboardInterrupt):
            label(client)
        assert label(client, "b") == "b"
        assert [call.connection for call in server.calls] == [1, 2]


def test_a_cancelled_call_gives_its_connection_up():
    async def work(server: FlakyServer) -> None:
        async with AsyncClient(server.address, max_connections=1) as client:
            call = asyncio.ensure_future(client.infer_batch(b"a"))
            await asyncio.get_running_loop().run_in_executor(None, server.has_stalled.wait, WAIT)
            waiting = asyncio.ensure_future(client.infer_batch(b"b"))
            given_up = asyncio.ensure_future(client.infer_batch(b"c"))
            await asyncio.sleep(0)
            given_up.cancel()
            call.cancel()
            assert (await waiting).label == "b"
            assert call.cancelled()
            assert given_up.cancelled()
            assert (await client.infer_batch(b"d")).label == "d"

    with FlakyServer(stall) as server:
        asyncio.run(work(server))
        assert [(call.args.params.data, call.connection) for call in server.calls] == [(b"a", 1), (b"b", 2), (b"d", 2)]


def test_an_asyncio_client_is_used_by_one_event_loop():
    with FlakyServer() as server:
        client = AsyncClient(server.address)

        async def work() -> None:
            async with client:
                await client.ping()

        asyncio.run(work())
        with pytest.raises(RuntimeError, match="make one for each loop"):
            asyncio.run(client.ping())


FORKS = """
import os, sys
from torchpipe_client import Client
with Client(sys.argv[1]) as client:
    client.ping()
    is_child = os.fork() == 0
    for turn in range(100):
        text = f"{is_child} {turn}"
        assert client.infer_batch(text.encode()).label == text
    if is_child:
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_process_that_was_forked_has_connections_of_its_own():
    with FlakyServer() as server:
        command = [sys.executable, "-W", "error", "-c", FORKS, server.address]
        subprocess.run(command, timeout=WAIT, check=True)
        assert server.connections == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls(make, tmp_path: Path):
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=me"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    ours = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with FlakyServer(tls=theirs) as server:
        with make(server.address, tls=ours) as client:
            assert [label(client, text) for text in "abc"] == ["a", "b", "c"]
            assert server.connections == 1
        stranger = make(server.address, tls=ssl.create_default_context(), retries=0)
        with stranger as client, pytest.raises(NotConnected, match=r"CERTIFICATE_VERIFY_FAILED|certificate"):
            client.ping()
