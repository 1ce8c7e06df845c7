"""Clients that send too much, too slowly, nonsense, or do not listen, while others are served."""

from __future__ import annotations

import errno
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar

import psutil
import pytest
import torchpipe_server.front.connection
from conftest import Register
from kit.backends import Gate
from kit.clients import (
    IDL,
    Client,
    HttpClient,
    connect,
    every_client,
    framed,
    narrow,
    pack_batch,
    pack_call,
    pack_infer,
    pack_string,
    read_all,
)
from kit.services import LocalServer, Process, serving
from kit.waits import WAIT, eventually
from thriftpy2.thrift import TApplicationException
from thriftpy2.transport import TTransportException
from torchpipe_server.front.server import TICK_SECONDS
from torchpipe_server.methods.thrift import InferenceHandler
from torchpipe_server.wire.thrift_reader import ThriftReader

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


# -- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [LIMIT, None], ids=["option", "default"])
@pytest.mark.parametrize("is_framed", [False, True], ids=["buffered", "framed"])
def test_the_largest_message_is_served(length, limit, is_framed):
    """A larger one is refused by name, after the requests before it; a client that reads only then reads the reason."""
    wrap, size = framed if is_framed else bytes, limit or 16 * KIBIBYTE**2
    options = {} if limit is None else {"max_message_bytes": limit}
    with serving(length, **options) as server, Client(server.port, framed=is_framed) as client:
        largest = wrap(batch_of(size + 1)) if limit is None else wrap(batch_of(400 * limit))
        client.sock.sendall(wrap(batch_of(size)) + wrap(pack_call("ping", seqid=2)) + largest)
        assert client.receive().label == str(size - len(pack_batch(b"")))
        client.receive(2)
        with pytest.raises(IDL.InferenceError, match="--max-message-bytes") as caught:
            client.receive()
        assert caught.value.code == "too_large"
        assert read_all(client.sock) == b""


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
        reply = read_all(sock)[4:]
        assert reply[:4] == b"\x80\x01\x00\x02"
        assert b"\0\0\0\x09too_large" in reply


def test_a_broken_message_after_a_request_in_work_is_answered_and_closed(register: Register):
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
        assert code_of_next(client) == "too_large"
        assert read_all(client.sock) == b""


@pytest.mark.parametrize(("method", "kind"), [("infer_batch", 2), ("ping", 3), ("no_such_method", 3)])
def test_broken_bodies_are_answered_by_name_and_closed(length, method, kind):
    """Which bodies are broken is in ``wire/test_thrift_wire.py``."""
    with serving(length) as server, Client(server.port) as other:
        for body in (struct.pack(">bhi", 11, 1, -1), struct.pack(">bh", 12, 1) * 20000):
            with connect(server.port) as sock:
                sock.sendall(pack_call(method, body))
                assert assert_dies(sock)[:4] == bytes([0x80, 1, 0, kind])
        other.ping()


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


# -- speed ----------------------------------------------------------------------------------------------------------


@every_client
@pytest.mark.parametrize("trickles", [False, True], ids=["silent", "trickle"])
def test_a_message_that_never_ends_is_refused(length, client_type, trickles):
    """Bytes that keep coming do not restart the clock of a message."""
    message = client_type.pack(b"x" * 100_000)
    with (
        serving(length, message_seconds=0.3) as server,
        client_type(server.port) as client,
        connect(server.port) as mute,
    ):
        mute.sendall(pack_batch(b"abc")[:5])  # not even a name
        client.sock.sendall(message[:100])
        deadline = time.monotonic() + WAIT
        while trickles and not is_readable(client.sock, 0.02) and time.monotonic() < deadline:
            client.sock.sendall(b"x")
        assert code_of_next(client) == "too_slow"
        assert assert_dies(mute) == b""


def code_of_next(client: Any) -> str:
    """That of the error which comes next."""
    with pytest.raises(IDL.InferenceError) as caught:
        client.receive()
    return caught.value.code


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


@contextmanager
def noting(backend: str, *real: str) -> Iterator[tuple[LocalServer, list[str]]]:
    """A server, and the uuids, else the names, of the calls that it has begun; the pipe gets ``real`` ones only."""
    began: list[str] = []

    def methods(loop: Any) -> Any:
        made = dict(InferenceHandler(run, IDL).methods)

        def note(name: str, method: Any) -> Any:
            def start(args: Any, done: Any) -> Any:
                began.append(getattr(getattr(args, "request", None), "uuid", None) or name)
                if name in real:
                    return method.start(args, done)
                return done(getattr(IDL.InferenceService, f"{name}_result")())

            return method._replace(start=start, outcome=lambda result: "ok")

        return {name: note(name, method) for name, method in made.items()}

    with pipe({"node": {"backend": backend}}) as run, LocalServer(run, make_methods=methods) as server:
        yield server, began


def costly(uuid: str, texts: int) -> bytes:
    """An infer message with so many empty texts in a field that is declared, of which reading takes some time."""
    inputs = struct.pack(">bhbbi", 13, 2, 11, 12, 0)
    outputs = struct.pack(">bhbi", 15, 5, 11, texts) + bytes(4 * texts)
    return pack_call("infer", struct.pack(">bh", 12, 1) + pack_string(1, uuid.encode()) + inputs + outputs + b"\0\0")


def test_many_messages_in_one_piece_wait_for_the_other_connections(length):
    """Thousands of pings fit in one read."""
    with noting(length, "infer_batch") as (server, began), connect(server.port) as sock, Client(server.port) as other:
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


@pytest.mark.parametrize("count", [1, 5])
def test_connections_with_costly_messages_take_turns_whatever_they_pipeline(count):
    """All of it is there when the first round begins. A cheap message of another connection comes before them."""
    with noting("Identity") as (server, began), ExitStack() as stack:
        socks = [stack.enter_context(connect(server.port)) for _ in range(5)]
        eventually(lambda: server.server.connections == 5)
        with holding(server):
            for sock in socks[1:]:
                sock.sendall(b"".join(costly(str(number), 4000 // count) for number in range(count)))
            socks[0].sendall(pack_call("ping"))
        eventually(lambda: len(began) == 4 * count + 1)
    assert began == ["ping", *(str(number) for number in range(count) for _ in socks[1:])]


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


class FailingListener(socket.socket):
    """Its first `accept` fails, as accept(2) says: pending network errors of the new socket are returned as its own."""

    errors: ClassVar = [errno.EPROTO, errno.EHOSTUNREACH, errno.EMFILE]

    def accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(), "failed")
        return super().accept()


def test_errors_of_accept_do_not_end_the_server():
    listener = FailingListener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    with LocalServer(None, listener) as server, Client(server.port) as client:
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


def is_readable(sock: socket.socket, seconds: float = 0) -> bool:
    return bool(select.select([sock], [], [], seconds)[0])


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
