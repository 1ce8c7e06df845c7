"""Both clients: each call has a connection to itself, and no answer is another call's."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from kit.peer import (
    BlockingClient,
    ScriptedServer,
    answer_and_hang_up,
    label,
    other,
    pauses,
    reply,
    sends,
    stall,
)
from kit.waits import WAIT, in_threads, run
from torchpipe_client import AsyncClient, BadReply, Client, NotConnected
from torchpipe_client.contract import decode_reply

# -- broken answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (other, "number 2 in place of infer_batch number 1"),
        (sends(b"HTTP/1.1 400 Bad Request\r\n"), r"b'HTTP/1.1 400 .* --port\?"),
        (sends(b"\0\0\0\4what"), "not a message of the contract"),
        (sends(b"\xff\xff\xff\xff"), "not a Thrift frame"),
        (sends(b"\0\0\0\0\0"), "not a Thrift frame"),
        (lambda server, sock, call: sock.sendall(reply(call)), "neither a result nor an error"),
    ],
)
def test_invalid_reply_is_an_error_and_ends_its_connection(make, step, text):
    with ScriptedServer(step) as server, make(server.address) as client:
        with pytest.raises(BadReply, match=text):
            label(client)
        assert label(client, "b") == "b"
        assert [call.connection for call in server.calls] == [1, 2]


# -- connections ----------------------------------------------------------------------------------------------------


def test_a_connection_that_the_service_closed_while_it_was_idle_is_noticed(make):
    with ScriptedServer(answer_and_hang_up) as server, make(server.address, retries=0) as client:
        assert label(client) == "a"
        assert server.connections_ended.acquire(timeout=WAIT)
        if isinstance(client, BlockingClient):
            client.run(asyncio.sleep(0))  # a round of its loop, which sees what has arrived
        assert label(client, "b") == "b"
        assert server.connections == 2


def test_each_call_under_way_has_a_connection_to_itself(make):
    with ScriptedServer() as server, make(server.address, max_connections=8) as client:

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


def test_both_clients_have_the_same_calls():
    names = {name for name in vars(Client) if not name.startswith("_")}
    assert names == {name for name in vars(AsyncClient) if not name.startswith("_")}
    for name in ["__init__", *names]:
        assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(AsyncClient, name))


# -- ways of ending that are no answers -----------------------------------------------------------------------------


def test_an_interrupted_call_gives_its_connection_up():
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(server: ScriptedServer, sock: socket.socket, call: Any) -> None:
        signal.pthread_kill(main, signal.SIGINT)
        stall(server, sock, call)

    with ScriptedServer(interrupt) as server, Client(server.address, max_connections=1) as client:
        with pytest.raises(KeyboardInterrupt):
            label(client)
        assert label(client, "b") == "b"
        assert [call.connection for call in server.calls] == [1, 2]


def test_a_cancelled_call_gives_its_connection_up():
    async def work(server: ScriptedServer) -> None:
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

    with ScriptedServer(stall) as server:
        asyncio.run(work(server))
        assert [(call.args.params.data, call.connection) for call in server.calls] == [(b"a", 1), (b"b", 2), (b"d", 2)]


def test_an_asyncio_client_is_used_by_one_event_loop():
    with ScriptedServer() as server:
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
    with ScriptedServer() as server:
        assert run(sys.executable, "-W", "error", "-c", FORKS, server.address).returncode == 0
        assert server.connections == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls(make, tmp_path: Path):
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=me"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    ours = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    with ScriptedServer(tls=theirs) as server:
        with make(server.address, tls=ours) as client:
            assert [label(client, text) for text in "abc"] == ["a", "b", "c"]
            assert server.connections == 1
        stranger = make(server.address, tls=ssl.create_default_context(), retries=0)
        with stranger as client, pytest.raises(NotConnected, match=r"CERTIFICATE_VERIFY_FAILED|certificate"):
            client.ping()


# -- answers of a server that means harm: each ends in BadReply, and soon ---------------------------------------------


VOID, STRING, STRUCT, MAP, LIST = 1, 11, 12, 13, 15


def infer_reply(fields: bytes) -> bytes:
    return struct.pack(">HHI", 0x8001, 2, 5) + b"infer" + struct.pack(">i", 1) + fields


def field(kind: int, number: int = 9) -> bytes:
    return struct.pack(">bh", kind, number)


def listed(kind: int, size: int) -> bytes:
    return struct.pack(">bi", kind, size)


WRONG = {
    "elements of no bytes": (field(LIST) + listed(VOID, 2**22) + b"\0", "more than 262144 values"),
    "a few of them": (field(LIST) + listed(VOID, 2) + b"\0", "a value of type 1"),
    "pairs of no bytes": (field(MAP) + struct.pack(">bbi", VOID, VOID, 2**22) + b"\0", "more than 262144 values"),
    "empty structs": (field(LIST) + listed(STRUCT, 300_000) + bytes(300_000) + b"\0", "more than 262144 values"),
    "many fields": ((field(2) + b"\0") * 300_000 + b"\0", "more than 262144 values"),
    "a negative size": (field(LIST) + listed(STRUCT, -1) + b"\0", "a size of -1"),
    "a negative length": (field(STRING) + struct.pack(">i", -1) + b"\0", "a size of -1"),
    "deep": (field(STRUCT) * 100 + bytes(101), "nested more than 32 deep"),
    "deeper": (field(STRUCT) * 10_000 + bytes(10_001), "nested more than 32 deep"),
    "a type that is none": (field(99) + b"\0", "a value of type 99"),
    "cut off": (field(LIST) + listed(STRUCT, 9), "index out of range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_oversized_and_malformed_replies(name: str):
    fields, said = WRONG[name]
    with pytest.raises(BadReply, match=said):
        decode_reply("infer", 1, infer_reply(fields))
