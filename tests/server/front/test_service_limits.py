"""Clients that send too much, too slowly, nonsense, or do not listen, while others are served."""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psutil
import pytest
import torchpipe_server.front.connection
from conftest import Register
from fakes import WAIT, Gate
from http_client import HttpClient, every_client
from service import (
    IDL,
    Client,
    FakePipe,
    LocalServer,
    Process,
    connect,
    eventually,
    framed,
    narrow,
    pack_batch,
    pack_call,
    pack_infer,
    pack_string,
    read_all,
    serving,
)
from thrift.Thrift import TApplicationException
from thrift.transport.TTransport import TTransportException
from torchpipe_server.front.server import TICK_SECONDS
from torchpipe_server.methods.thrift import InferenceHandler
from torchpipe_server.wire.thrift import ThriftReader

from torchpipe_py import Backend, pipe

KIBIBYTE = 1024
LIMIT = 64 * KIBIBYTE


class Length(Backend):
    """(label, score): the data's length."""

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = (str(len(item["data"])), 1.0)


@pytest.fixture
def length(register: Register) -> str:
    return register(Length)


def batch_of(size: int) -> bytes:
    """An infer_batch message of exactly so many bytes."""
    return pack_batch(b"x" * (size - len(pack_batch(b""))))


def assert_dies(sock: socket.socket) -> bytes:
    """The server closes the connection; what it said before."""
    sock.settimeout(WAIT)
    return read_all(sock)


def assert_typed_error(reply: bytes, code: bytes) -> None:
    assert reply[:4] == b"\x80\x01\x00\x02", reply
    assert struct.pack(">I", len(code)) + code in reply


# -- size -----------------------------------------------------------------------------------------------------------


def test_the_largest_message_is_served(length):
    with serving(length, max_message_bytes=LIMIT) as server:
        for wrap in (bytes, framed):
            with connect(server.port) as sock:
                sock.sendall(wrap(batch_of(LIMIT)))
                assert sock.recv(4)
            with connect(server.port) as sock:
                sock.sendall(wrap(batch_of(LIMIT + 1)))
                reply = assert_dies(sock)
                assert_typed_error(reply[4:] if wrap is framed else reply, b"too_large")


def test_the_default_limit(length):
    with serving(length) as server, Client(server.port, framed=True) as client:
        size = 16 * KIBIBYTE**2
        client.sock.sendall(framed(batch_of(size)))
        assert client.receive().label == str(size - len(pack_batch(b"")))
        client.sock.sendall(framed(batch_of(size + 1)))
        with pytest.raises(IDL.InferenceError, match="--max-message-bytes") as caught:
            client.receive()
        assert caught.value.code == "too_large"


@pytest.mark.parametrize("wrap", [bytes, framed], ids=["buffered", "framed"])
def test_too_large_is_said_while_the_client_still_sends(length, wrap):
    """The client blocks in send far beyond the limit, and only then reads."""
    message = wrap(batch_of(400 * LIMIT))
    with serving(length, max_message_bytes=LIMIT) as server, connect(server.port) as sock, Client(server.port) as other:
        sock.sendall(message)
        reply = read_all(sock)
        assert_typed_error(reply[4:] if wrap is framed else reply, b"too_large")
        assert b"--max-message-bytes" in reply
        other.ping()


def test_too_large_is_said_though_the_frames_length_comes_alone(length):
    """As clients send it that write the four bytes first."""
    message = framed(batch_of(2 * LIMIT))
    with serving(length, max_message_bytes=LIMIT) as server, connect(server.port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(message[:4])
        sock.settimeout(0.3)  # enough for a server that closes; one that waits for the header is right
        with pytest.raises(TimeoutError):
            assert sock.recv(1), "closed without a word"
        sock.settimeout(WAIT)
        sock.sendall(message[4:])
        assert_typed_error(read_all(sock)[4:], b"too_large")


def test_requests_before_the_one_that_is_too_large_are_answered(length):
    with serving(length, max_message_bytes=LIMIT) as server, Client(server.port) as client:
        client.sock.sendall(pack_batch(b"abc", 1) + pack_call("ping", seqid=2) + batch_of(LIMIT + 1))
        assert client.receive(1).label == "3"
        client.receive(2)
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive()
        assert caught.value.code == "too_large"
        assert read_all(client.sock) == b""


def test_a_broken_message_behind_a_request_in_work_is_answered_and_closed(register: Register):
    """The reply of the first finishes on another thread; nothing but that can wake the connection."""
    gate = Gate()
    options = {"max_message_bytes": LIMIT, "drain_seconds": 1}
    with (
        serving(register(gate.backend), **options) as server,
        gate,
        Client(server.port) as client,
        Client(server.port) as other,
    ):
        seqid = client.send_infer({"data": IDL.Value(text="first")})
        gate.wait_entered()
        client.sock.sendall(batch_of(LIMIT + 1))
        other.ping()
        other.ping()
        gate.open()
        assert client.receive(seqid).outputs["result"].text == "first"
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive()
        assert caught.value.code == "too_large"
        assert read_all(client.sock) == b""


BROKEN_BODIES = {
    "negative string": struct.pack(">bhi", 11, 1, -1),
    "huge string": struct.pack(">bhi", 11, 1, 2**31 - 1),
    "negative list": struct.pack(">bhbi", 15, 1, 12, -5),
    "huge list": struct.pack(">bhbi", 15, 1, 3, 2**31 - 1),
    "huge list of nothing": struct.pack(">bhbi", 15, 1, 12, 2**20) + b"\0" * 2**20,
    "huge map": struct.pack(">bhbbi", 13, 1, 3, 3, 2**31 - 1),
    "bad type": struct.pack(">bh", 99, 1),
    "too deep": struct.pack(">bh", 12, 1) * 65 + b"\0" * 66,
    "very deep": struct.pack(">bh", 12, 1) * 20000,
    "deep lists": struct.pack(">bh", 15, 1) + struct.pack(">bi", 15, 1) * 5000,
}


@pytest.mark.parametrize("body", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
@pytest.mark.parametrize("method", ["infer_batch", "ping", "no_such_method"])
def test_broken_bodies_are_answered_by_name_and_closed(length, body, method):
    with serving(length) as server, connect(server.port) as sock, Client(server.port) as other:
        sock.sendall(pack_call(method, body))
        reply = assert_dies(sock)
        assert reply[:3] == b"\x80\x01\x00"
        assert reply[3] == (2 if method == "infer_batch" else 3)
        other.ping()


def test_the_deepest_message_is_served(length):
    """64 structs, the arguments the first, in a field that nobody knows."""
    with serving(length) as server, Client(server.port) as client:
        client.sock.sendall(pack_call("ping", struct.pack(">bh", 12, 9) * 63 + b"\0" * 64))
        client.receive(1)


HELLO = bytes.fromhex("16030102000100") + b"\x01\xfc\x03\x03" + bytes(range(256))
GARBAGE = {
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": HELLO,
    "zeros": b"\0" * 100,
    "ones": b"\xff" * 100,
    "text": b"hello, world\r\n\r\n",
    "huge frame": b"\x7f\xff\xff\xff\x80\x01\0\x01\0\0\0\x04ping\0\0\0\x01",
    "negative frame": b"\xff\xff\xff\xf0\x80\x01\0\x01",
    "empty name": struct.pack(">III", 0x80010001, 0, 1) + b"\0",
    "reply": b"\x80\x01\0\x02" + pack_call("ping")[4:],
    "empty frame": framed(pack_call("ping")) + b"\0\0\0\0",
    "frame with more": framed(pack_call("ping") + b"\0"),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_closes_only_its_own_connection(length, data):
    with serving(length) as server, connect(server.port) as sock, Client(server.port) as other:
        sock.sendall(data)
        assert_dies(sock)
        assert other.infer_batch(b"abc") == ("3", 1.0)


def test_random_bytes_and_mutated_messages_harm_nobody(length):
    rng = random.Random(11)
    whole = pack_batch(b"data") + pack_call("ping") + pack_call("infer", struct.pack(">bh", 12, 1) + b"\0\0")
    with serving(length) as server, Client(server.port) as other:
        for round_ in range(300):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            wrapped = framed(bytes(data)) if round_ % 2 else bytes(data)
            with connect(server.port) as sock:
                sock.sendall(rng.randbytes(60) if round_ % 10 == 0 else wrapped)
            if round_ % 20 == 0:
                assert other.infer_batch(b"abc") == ("3", 1.0)
        assert other.infer_batch(b"abc") == ("3", 1.0)
        eventually(lambda: len(server.server._connections) == 1)
    assert server.error is None


# -- speed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [bytes, framed], ids=["buffered", "framed"])
def test_one_byte_at_a_time_finishes(length, wrap):
    with serving(length) as server, Client(server.port, framed=wrap is framed) as client:
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in wrap(pack_batch(b"abc") + b"") + wrap(pack_call("ping", seqid=2)):
            client.sock.sendall(bytes([byte]))
        assert client.receive(1).label == "3"
        client.receive(2)


@every_client
def test_a_message_that_never_ends_is_refused(length, client_type):
    with (
        serving(length, message_seconds=0.3) as server,
        client_type(server.port) as silent,
        connect(server.port) as mute,
    ):
        mute.sendall(pack_batch(b"abc")[:5])  # not even a name
        silent.sock.sendall(client_type.pack(b"abc")[:-1])
        assert code_of_next(silent) == "too_slow"
        assert assert_dies(silent.sock) == b""
        assert assert_dies(mute) == b""


def code_of_next(client: Any) -> str:
    """That of the error which comes next."""
    with pytest.raises(IDL.InferenceError) as caught:
        client.receive()
    return caught.value.code


@every_client
def test_a_trickle_is_refused_as_well(length, client_type):
    """Bytes that keep coming do not restart the clock of a message."""
    with serving(length, message_seconds=0.3) as server, client_type(server.port) as client:
        client.sock.sendall(client_type.pack(b"x" * 100_000)[:100])
        deadline = time.monotonic() + WAIT
        while not select.select([client.sock], [], [], 0.02)[0] and time.monotonic() < deadline:
            client.sock.sendall(b"x")
        assert code_of_next(client) == "too_slow"


def test_waiting_for_a_busy_pipe_is_not_the_clients_slowness(register: Register):
    """The server stops reading at 64 waiting requests; what it does not read is not late."""
    gate = Gate(blocks=lambda data: data == b"block")
    with serving(register(gate.backend), message_seconds=0.3) as server, gate, Client(server.port) as client:
        count = 100
        requests = [pack_call("ping", seqid=index + 2) for index in range(count)]
        client.sock.sendall(pack_batch(b"block", 1))
        gate.wait_entered()
        client.sock.sendall(b"".join(requests)[:-1])
        wait_ticks(server, 3)
        client.sock.sendall(requests[-1][-1:])
        gate.open()
        with pytest.raises(IDL.InferenceError):
            client.receive(1)
        for index in range(count):
            client.receive(index + 2)


def wait_ticks(server: LocalServer, count: int) -> None:
    """Wait until the server's clock has enforced its limits so many times."""
    for _ in range(count):
        ticked = threading.Event()
        server.call(lambda ticked=ticked: server.loop.call_later(TICK_SECONDS, ticked.set))
        assert ticked.wait(WAIT)
        assert server.error is None, f"the I/O thread died of {server.error!r}"


@contextmanager
def holding(server: LocalServer) -> Iterator[None]:
    """The server's loop stands still: all that is sent meanwhile is there when its next round begins."""
    entered, go_on = threading.Event(), threading.Event()
    server.call(lambda: (entered.set(), go_on.wait(WAIT)))
    assert entered.wait(WAIT)  # else the round that holds it may have a part of what is sent
    try:
        yield
    finally:
        go_on.set()


def test_many_messages_in_one_piece_wait_for_the_other_connections(length):
    """Thousands of pings fit in one read."""
    began: list[str] = []

    def noting(loop: Any) -> Any:
        methods = InferenceHandler(run, IDL).methods

        def note(name: str) -> Any:
            start = methods[name].start
            return methods[name]._replace(start=lambda args, done: (began.append(name), start(args, done))[1])

        return {name: note(name) for name in methods}

    with (
        pipe({"node": {"backend": length}}) as run,
        LocalServer(run, make_methods=noting) as server,
        connect(server.port) as sock,
        Client(server.port) as other,
    ):
        other.ping()
        with holding(server):
            sock.sendall(pack_call("ping") * 6000)
            seqid = other.send_batch(b"abc")
        assert other.receive(seqid).label == "3"
        replies = len(pack_call("ping")) * 6000
        while replies > 0:
            replies -= len(sock.recv(2**16))
    assert began.index("infer_batch") < 3000
    assert len(began) == 6002


def test_a_message_that_takes_long_to_read_begins_after_those_of_other_connections():
    """Each is of one connection, so that no connection has more than its turn."""
    began: list[str] = []

    def noting(loop: Any) -> Any:
        def ping(args: Any, done: Any) -> None:
            began.append("ping")
            done(IDL.InferenceService.ping_result())

        def infer(args: Any, done: Any) -> None:
            began.append("infer")
            done(IDL.InferenceService.infer_result())

        methods = InferenceHandler(run, IDL).methods
        return {
            "ping": methods["ping"]._replace(start=ping),
            "infer": methods["infer"]._replace(start=infer, outcome=lambda result: "ok"),
        }

    empty_texts = struct.pack(">bhbi", 15, 9, 11, 4000) + bytes(4 * 4000) + b"\0"
    with ExitStack() as stack:
        run = stack.enter_context(pipe({"node": {"backend": "Identity"}}))
        server = stack.enter_context(LocalServer(run, make_methods=noting))
        socks = [stack.enter_context(connect(server.port)) for _ in range(9)]
        eventually(lambda: server.server.connections == 9)
        with holding(server):
            for sock in socks[:8]:
                sock.sendall(pack_call("infer", empty_texts))
            socks[8].sendall(pack_call("ping"))
        eventually(lambda: len(began) == 9)
        for sock in socks:
            assert sock.recv(1)
    assert began[0] == "ping"


def test_connections_with_costly_messages_take_turns_whatever_they_pipeline():
    """All of it is there when the first round begins."""
    began: list[str] = []

    def noting(loop: Any) -> Any:
        def infer(args: Any, done: Any) -> None:
            began.append(args.request.uuid)
            done(IDL.InferenceService.infer_result())

        methods = InferenceHandler(run, IDL).methods
        return {"infer": methods["infer"]._replace(start=infer, outcome=lambda result: "ok")}

    def costly(uuid: str) -> bytes:
        inputs = struct.pack(">bhbbi", 13, 2, 11, 12, 0)
        outputs = struct.pack(">bhbi", 15, 5, 11, 1000) + bytes(4 * 1000)
        request = pack_string(1, uuid.encode()) + inputs + outputs + b"\0"
        return pack_call("infer", struct.pack(">bh", 12, 1) + request + b"\0")

    with ExitStack() as stack:
        run = stack.enter_context(pipe({"node": {"backend": "Identity"}}))
        server = stack.enter_context(LocalServer(run, make_methods=noting))
        socks = [stack.enter_context(connect(server.port)) for _ in range(4)]
        eventually(lambda: server.server.connections == 4)
        with holding(server):
            for index, sock in enumerate(socks):
                sock.sendall(b"".join(costly(f"{number} of {index}") for number in range(5)))
        eventually(lambda: len(began) == 20)
    assert [uuid.split()[0] for uuid in began] == [str(number) for number in range(5) for _ in socks]


class Large(Backend):
    """Answers a mebibyte, and counts."""

    started = 0

    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            type(self).started += 1
            item["result"] = b"r" * 2**20


@pytest.fixture
def large(register: Register) -> str:
    Large.started = 0
    return register(Large)


every_pack = pytest.mark.parametrize("pack", [pack_infer, HttpClient.pack], ids=["thrift", "http"])


def held_bytes(server: LocalServer) -> int:
    connections = [one for one in list(server.server._connections) if one.transport is not None]
    return sum(one.transport.get_write_buffer_size() for one in connections)


@every_pack
def test_a_client_that_does_not_read_is_not_computed_for(large, pack):
    """Replies pile up in the server only as far as one does not fit the socket."""
    with serving(large, message_seconds=60) as server, narrow(server.port) as sock, Client(server.port) as other:
        sock.sendall(b"".join(pack(b"x", index) for index in range(60)))
        eventually(lambda: held_bytes(server) > 0)
        for _ in range(50):
            other.ping()
        wait_ticks(server, 1)
        assert Large.started < 20, f"{Large.started} computed, {held_bytes(server)} bytes held"
        received = 0
        while received < 60 * 2**20:  # and all of it arrives when it reads at last
            piece = sock.recv(2**20)
            assert piece
            received += len(piece)


@every_pack
def test_a_client_that_does_not_read_is_dropped(large, pack):
    with serving(large, message_seconds=0.3) as server, narrow(server.port) as sock:
        sock.sendall(b"".join(pack(b"x", index) for index in range(20)))
        eventually(lambda: Large.started)
        eventually(lambda: not server.server._connections, "still there")


@pytest.mark.parametrize(
    "ping", [pack_call("no_such_method" * 10), b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["thrift", "http"]
)
def test_a_client_that_does_not_read_but_keeps_sending_is_dropped(length, ping):
    """Small replies without end; each must not renew the client's time."""
    pings = ping * 200
    with serving(length, message_seconds=0.5) as server, narrow(server.port) as sock:
        sock.settimeout(0.1)
        most = 0
        deadline = time.monotonic() + 2 * WAIT  # replies fill the buffers first
        try:
            while time.monotonic() < deadline:
                most = max(most, held_bytes(server))
                assert most < 4 * 2**20, f"{most} bytes held for a client that reads nothing"
                try:
                    sock.sendall(pings)
                except TimeoutError:
                    continue
            raise AssertionError("not dropped")
        except ConnectionError:
            pass


def test_a_reader_by_the_byte_gets_everything(large):
    with serving(large) as server, narrow(server.port) as sock:
        sock.sendall(pack_infer(b"x") + pack_call("ping", seqid=2))
        reply = b""
        while len(reply) < 2**20:
            reply += sock.recv(3000)
        while not reply.endswith(pack_call("ping", seqid=2)[4:]):
            reply += sock.recv(3000)
        assert reply.count(b"r" * 2**20) == 1


# -- connections ----------------------------------------------------------------------------------------------------


def assert_overloaded(client: Any) -> None:
    error = client.error_of("infer_batch", params=IDL.InferenceParams(uuid="x", data=b"abc"))
    assert error.code == "overloaded"
    assert error.retry_after_ms >= 1


@every_client
def test_the_connection_beyond_the_limit_is_told_and_a_freed_place_is_usable(length, client_type):
    with serving(length, max_connections=2) as server:
        first, second = client_type(server.port), client_type(server.port)
        first.ping()
        second.ping()
        for _ in range(3):
            with client_type(server.port) as third:
                assert_overloaded(third)
                assert read_all(third.sock) == b""
        first.close()
        eventually(lambda: len(server.server._connections) == 1)
        with client_type(server.port) as third:
            assert third.infer_batch(b"abc") == ("3", 1.0)
        second.close()


@every_client
def test_refused_connections_do_not_take_the_places_of_served_ones(length, client_type):
    """Clients that were told 'overloaded' and have not closed yet."""
    with serving(length, max_connections=2) as server:
        clients = [client_type(server.port) for _ in range(5)]
        for client in clients[:2]:
            client.ping()
        assert_overloaded(clients[2])  # lingers; the others have said nothing so far
        clients[0].close()
        eventually(lambda: len(server.server._connections) <= 4)
        with client_type(server.port) as late:
            late.send_batch(b"abc")
            for client in clients:
                client.close()
            assert late.receive().label == "3"


def test_ping_and_unknown_methods_beyond_the_limit_are_answered_and_closed(length):
    with serving(length, max_connections=1) as server, Client(server.port) as first:
        first.ping()
        for method in ("ping", "no_such_method"):
            with Client(server.port) as second:
                with pytest.raises(TApplicationException):
                    second.call(method)
                assert read_all(second.sock) == b""


def test_connections_far_beyond_the_limit_are_closed(length):
    with serving(length, max_connections=1) as server, Client(server.port) as first:
        first.ping()
        rest = [connect(server.port) for _ in range(200)]
        first.ping()
        eventually(lambda: len(server.server._connections) <= 129)
        for sock in rest:
            sock.close()
        eventually(lambda: len(server.server._connections) == 1)
        first.ping()


@every_client
def test_two_hundred_abandoned_connections_leave_nothing(register: Register, client_type):
    pack = client_type.pack
    gate = Gate(blocks=lambda data: data == b"block")
    with serving(register(gate.backend)) as server, gate, Client(server.port) as client:
        client.send_batch(b"block")
        gate.wait_entered()
        process = psutil.Process()
        descriptors, threads = process.num_fds(), set(threading.enumerate())
        for index in range(200):
            with connect(server.port) as sock:
                if index % 4 == 1:
                    sock.sendall(pack(b"x")[:20])
                elif index % 4 == 2:
                    sock.sendall(pack(b"x") * 3)
                elif index % 4 == 3:
                    sock.sendall(pack(b"x"))
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        eventually(lambda: len(server.server._connections) == 1)
        eventually(lambda: server.run.stats()["inflight"] == 1)
        eventually(lambda: process.num_fds() <= descriptors, "descriptors are left")
        assert set(threading.enumerate()) <= threads
        gate.open()


def test_connections_reset_before_they_are_accepted(length):
    """The server starts after they are gone."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    for _ in range(20):
        sock = connect(listener.getsockname()[1])
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    with LocalServer(None, listener) as server, Client(server.port) as client:
        client.ping()
        eventually(lambda: len(server.server._connections) == 1)


class Clock:
    """A monotonic clock that tests set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(torchpipe_server.front.server, "monotonic", made)
    monkeypatch.setattr(torchpipe_server.front.connection, "monotonic", made)
    return made


@every_client
def test_silent_connections_are_closed_after_idle_seconds(length, clock, client_type):
    with (
        serving(length, idle_seconds=10_000) as server,
        client_type(server.port) as silent,
        client_type(server.port) as busy,
    ):
        silent.ping()
        clock.ahead = 9_900
        busy.ping()
        wait_ticks(server, 1)
        clock.ahead = 10_100
        busy.ping()
        assert read_all(silent.sock) == b""
        busy.ping()


@every_client
def test_a_client_is_not_idle_while_it_waits_for_its_answer(register: Register, clock, client_type):
    gate = Gate()
    with serving(register(gate.backend), idle_seconds=100) as server, gate, client_type(server.port) as client:
        client.send_batch(b"long")
        gate.wait_entered()
        clock.ahead = 200
        wait_ticks(server, 1)
        gate.open()
        with suppress(IDL.InferenceError):  # bytes are no label
            client.receive()
        wait_ticks(server, 2)
        client.ping()


@every_client
def test_a_connection_that_is_shed_is_let_go_of_between_two_messages(register: Register, client_type):
    """What was read of a message is in this process alone: no other one could go on with it."""
    gate = Gate(blocks=lambda data: data == b"block")
    message = client_type.pack(b"half")
    with serving(register(gate.backend)) as server, gate, client_type(server.port) as client:
        client.sock.sendall(client_type.pack(b"block") + message[:-2])
        gate.wait_entered()
        eventually(lambda: held_by_connections(server) >= len(message) - 2)
        server.call(lambda: server.server.shed(1))
        gate.open()
        with suppress(IDL.InferenceError):  # bytes are no label
            client.receive()
        wait_ticks(server, 1)
        assert server.server.connections == 1
        client.sock.sendall(message[-2:])
        with suppress(IDL.InferenceError):
            client.receive()
        assert gate.batches == [[b"block"], [b"half"]]
        eventually(lambda: server.server.connections == 0)


# -- what must not end the I/O thread -------------------------------------------------------------------------------


class FailingListener:
    """A listener whose `accept` fails with each of the errors once, then works."""

    def __init__(self, errors: list[int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._errors = errors

    def accept(self) -> Any:
        if self._errors:
            number = self._errors.pop()
            raise OSError(number, os.strerror(number))
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


@pytest.mark.parametrize("number", [errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EMFILE])
def test_an_error_of_accept_does_not_end_the_server(number):
    """accept(2): pending network errors of the new socket are returned as its own."""
    with LocalServer(None, FailingListener([number])) as server, Client(server.port) as client:
        client.ping()


def test_a_defect_in_one_connection_does_not_end_the_server(length, monkeypatch):
    feed = ThriftReader.feed

    def failing(self: Any, data: bytes) -> Any:
        if b"\x80poison" in data:
            raise RuntimeError("a defect")
        return feed(self, data)

    monkeypatch.setattr(ThriftReader, "feed", failing)
    with serving(length) as server, Client(server.port) as other:
        other.ping()
        with connect(server.port) as sock:
            sock.sendall(b"\x80poison")
            assert_dies(sock)
        other.ping()


class BadTicket:
    """A ticket whose `cancel` fails."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline

    def cancel(self, error: BaseException | None = None) -> bool:
        raise RuntimeError("a defect")


class BadTickets(FakePipe):
    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        return BadTicket(None if timeout is None else time.perf_counter() + timeout)


@pytest.mark.parametrize("deadline_ms", [None, 1], ids=["disconnect", "deadline"])
def test_a_ticket_that_fails_to_cancel_does_not_end_the_server(deadline_ms):
    with LocalServer(BadTickets(), drain_seconds=0.1) as server, Client(server.port) as other:
        other.ping()
        with Client(server.port) as client:
            client.send_infer({"data": IDL.Value(text="x")}, deadline_ms=deadline_ms)
            client.send("ping")
            wait_ticks(server, 1)
        other.ping()
        wait_ticks(server, 1)
        other.ping()


# -- a process of its own -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[Process]:
    with Process() as process:
        yield process.wait_started()


def cpu_share(pid: int, until: Callable[[], object]) -> float:
    """CPU seconds per second of the process until `until` returns."""
    process = psutil.Process(pid)
    times, began = process.cpu_times(), time.monotonic()
    until()
    after = process.cpu_times()
    return (after.user + after.system - times.user - times.system) / (time.monotonic() - began)


def test_an_idle_server_uses_no_cpu(demo):
    with connect(demo.port) as half, Client(demo.port) as client, connect(demo.port) as refused:
        client.ping()
        half.sendall(pack_batch(b"abc")[:10])
        refused.sendall(GARBAGE["zeros"])
        assert max(cpu_share(pid, lambda: threading.Event().wait(1.0)) for pid in (demo.pid, *demo.workers)) < 0.2


@pytest.mark.parametrize("whose", ["supervisor", "worker"])
def test_without_descriptors_the_server_waits_and_recovers(demo, whose):
    pid = demo.pid if whose == "supervisor" else demo.workers[0]
    with Client(demo.port) as client:
        client.ping()
        used = psutil.Process(pid).num_fds()
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, before[1]))
        try:
            rest = [connect(demo.port) for _ in range(20)]
            client.ping()
            assert cpu_share(pid, lambda: threading.Event().wait(1.0)) < 0.3
            client.ping()
            for sock in rest:
                sock.close()
            eventually(lambda: answers(demo.port), "no connection is served any more")
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def answers(port: int) -> bool:
    try:
        with Client(port) as other:
            other.ping()
    except (OSError, TTransportException, EOFError):
        return False
    return True


def test_malformed_bytes_take_no_memory(demo):
    process = psutil.Process(demo.workers[0])
    with Client(demo.port) as client:
        client.ping()
        before = process.memory_info().rss
        socks = [connect(demo.port) for _ in range(50)]
        for sock in socks:
            sock.sendall(framed(pack_call("infer_batch"))[:30].replace(b"\0\0\0\x1c", b"\0\xff\xff\xff"))
            sock.sendall(pack_call("ping", struct.pack(">bhi", 11, 1, 2**24 - 1000) + b"x"))
        client.ping()
        assert process.memory_info().rss - before < 16 * 2**20
        for sock in socks:
            sock.close()


# -- bytes held for all connections together ------------------------------------------------------------------------

HELD = 4 * 2**20


@every_client
def test_half_sent_messages_of_many_connections_are_bounded(length, client_type):
    """Each is far below the limit of a message; together they are not."""
    options = {"max_held_bytes": HELD, "message_seconds": 60}
    with serving(length, **options) as server, Client(server.port) as normal:
        socks = [connect(server.port) for _ in range(40)]
        message = client_type.pack(b"x" * (2**20 - 100))
        most = 0
        for sock in socks:
            sock.sendall(message[: 2**19])
            eventually(lambda: normal.infer_batch(b"abc") == ("3", 1.0))
            most = max(most, held_by_connections(server))
        assert most < HELD + 2**20, f"{most} bytes are held"
        # Every byte has been looked at.
        eventually(lambda: held_by_connections(server) == 2**19 * sum(not is_readable(sock) for sock in socks))
        refused = [sock for sock in socks if is_readable(sock)]
        assert len(socks) - HELD // 2**19 - 2 <= len(refused) <= len(socks) - HELD // 2**19 + 2
        for sock in refused:
            assert b"overloaded" in assert_dies(sock)
        kept = [sock for sock in socks if sock not in refused]
        for sock in kept:
            sock.settimeout(WAIT)
        for sock in refused + kept[:2]:
            sock.close()
        eventually(lambda: held_by_connections(server) == 2**19 * (len(kept) - 2))
        for sock in kept[2:]:  # there is room for the rest of one, which is the end of what it holds
            sock.sendall(message[2**19 :])
            assert b"overloaded" not in sock.recv(4096)
            sock.close()
        assert normal.infer_batch(b"abc") == ("3", 1.0)
        eventually(lambda: held_by_connections(server) == 0)


def held_by_connections(server: LocalServer) -> int:
    return sum(one.held_bytes for one in list(server.server._connections))


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


@every_client
def test_messages_that_wait_for_their_turn_count_as_well(register: Register, client_type):
    gate = Gate()
    with (
        serving(register(gate.backend), max_held_bytes=3 * 2**17) as server,
        gate,
        client_type(server.port) as client,
        client_type(server.port) as other,
    ):
        count = 8
        client.sock.sendall(b"".join(client_type.pack(b"x" * 2**18, seqid) for seqid in range(1, count + 1)))
        gate.wait_entered()
        eventually(lambda: held_by_connections(server) <= 2**18 + 4096, "what waits is held")
        other.ping()
        gate.open()
        codes = []
        for _ in range(count):
            try:
                client.receive()
                codes.append("ok")
            except IDL.InferenceError as error:
                codes.append(error.code)
            except EOFError:
                break
            if codes[-1] == "overloaded":
                break
        assert codes[-1] == "overloaded"
        assert set(codes[:-1]) == {"no_result" if client_type is Client else "ok"}  # bytes are no label
        assert read_all(client.sock) == b""
        other.ping()


@every_client
def test_a_request_larger_than_all_that_may_be_held_is_refused(length, client_type):
    with serving(length, max_held_bytes=2**18) as server, client_type(server.port) as client:
        assert client.infer_batch(b"x" * 2**16) == (str(2**16), 1.0)
        client.sock.sendall(client_type.pack(b"x" * 2**20))
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive()
        assert (caught.value.code, caught.value.retry_after_ms) == ("overloaded", 1000)
