"""Clients that send too much, too slowly, nonsense, or do not listen, while others are served."""

from __future__ import annotations

import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torchpipe_server.front.connection
from kit.clients import (
    IDL,
    Client,
    HttpClient,
    connect,
    every_client,
    framed,
    is_served,
    narrow,
    pack_batch,
    pack_call,
    pack_infer,
    pack_string,
    read_all,
)
from kit.monitored import cpu_seconds
from kit.services import LocalServer, Process, SteeredProcess, steered
from kit.steered import Steered
from kit.waits import WAIT, eventually
from torchpipe_server.front.connection import READ_AHEAD_BYTES, STALLED_SECONDS
from torchpipe_server.front.pacing import PACED_SECONDS, REFUSAL_SECONDS, REFUSALS_AT_ONCE, RefusalPacing
from torchpipe_server.front.server import TICK_SECONDS
from torchpipe_server.logs.handler import REQUESTS
from torchpipe_server.wire.thrift_reader import ThriftReader

import torchpipe_py.methods.call
from torchpipe_py import Overloaded
from torchpipe_py.methods.routes import AnswerStream, Routes, Served, StreamSource, route
from torchpipe_py.wire.errors import restated
from torchpipe_py.wire.http import HttpRequest

LIMIT = 2**16


def batch_of(size: int) -> bytes:
    """An infer_batch message of exactly so many bytes."""
    return pack_batch(b"x" * (size - len(pack_batch(b""))))


def assert_dies(sock: socket.socket) -> bytes:
    """The server closes the connection; what it said before."""
    sock.settimeout(WAIT)
    return read_all(sock)


# -- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_framed", [False, True], ids=["buffered", "framed"])
def test_serves_largest_message(is_framed):
    """A larger one is refused by name, after the requests before it; a client that reads only then reads the reason."""
    wrap = framed if is_framed else bytes
    with steered(max_message_bytes=LIMIT) as server, Client(server.port, framed=is_framed) as client:
        client.sock.sendall(wrap(batch_of(LIMIT)) + wrap(pack_call("ping", seqid=2)) + wrap(batch_of(400 * LIMIT)))
        assert client.receive().score == LIMIT - len(pack_batch(b""))
        client.receive(2)
        with pytest.raises(IDL.InferenceError, match="--max-message-bytes") as caught:
            client.receive()
        assert caught.value.code == "too_large"
        assert read_all(client.sock) == b""


GARBAGE = {
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": bytes.fromhex("16030102000100 01fc0303") + bytes(range(256)),
    "zeros": b"\0" * 100,
    "text": b"hello, world\r\n\r\n",
    "huge frame": b"\x7f\xff\xff\xff\x80\x01\0\x01\0\0\0\x04ping\0\0\0\x01",
    "frame with more": framed(pack_call("ping") + b"\0"),
}


def test_garbage_closes_only_its_own_connection():
    with steered() as server, Client(server.port) as other:
        for data in GARBAGE.values():
            with connect(server.port) as sock:
                sock.sendall(data)
                assert_dies(sock)
            other.ping()


# -- speed ----------------------------------------------------------------------------------------------------------


@every_client
@pytest.mark.parametrize("trickles", [False, True], ids=["silent", "trickle"])
def test_refuses_message_that_never_ends(client_type, trickles):
    """Bytes that keep coming do not restart the clock of a message."""
    message = client_type.pack(b"x" * 100_000)
    with (
        steered(message_seconds=0.3) as server,
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


def test_waiting_for_a_busy_pipe_is_not_the_clients_slowness():
    """The server stops reading at 64 waiting requests; what it does not read is not late."""
    with steered(message_seconds=0.3) as server, Client(server.port) as client:
        count = 100
        requests = [pack_call("ping", seqid=index + 2) for index in range(count)]
        client.sock.sendall(pack_batch(b"block", 1))
        assert Steered.entered.acquire(timeout=WAIT)
        client.sock.sendall(b"".join(requests)[:-1])
        wait_ticks(server, 3)
        client.sock.sendall(requests[-1][-1:])
        Steered.opened.set()
        assert client.receive(1).label == "block"
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


def costly(uuid: str, texts: int) -> bytes:
    """An infer message with so many empty texts in a field that is declared, of which reading takes some time."""
    inputs = struct.pack(">bhbbi", 13, 2, 11, 12, 0)
    outputs = struct.pack(">bhbi", 15, 5, 11, texts) + bytes(4 * texts)
    return pack_call("infer", struct.pack(">bh", 12, 1) + pack_string(1, uuid.encode()) + inputs + outputs + b"\0\0")


@pytest.mark.parametrize("count", [1, 5])
def test_pipelined_costly_messages_take_turns_with_other_connections(count, caplog):
    """All of it is there when the first round begins. A cheap message of another connection comes before them."""
    caplog.set_level("INFO", REQUESTS)
    with steered(log_requests="all") as server, ExitStack() as stack:
        socks = [stack.enter_context(connect(server.port)) for _ in range(5)]
        eventually(lambda: server.server.connections == 5)
        with holding(server):
            for sock in socks[1:]:
                sock.sendall(b"".join(costly(str(number), 4000 // count) for number in range(count)))
            socks[0].sendall(pack_call("ping"))
        eventually(lambda: len(caplog.records) == 4 * count + 1)
    uuids = [record.getMessage().split()[0].strip('"') for record in caplog.records]
    assert uuids == ["", *(str(number) for number in range(count) for _ in socks[1:])]


def held_bytes(server: LocalServer) -> int:
    connections = [one for one in server.connections() if one.transport is not None]
    return sum(one.transport.get_write_buffer_size() for one in connections)


@pytest.mark.parametrize("pack", [pack_infer, HttpClient.pack], ids=["thrift", "http"])
def test_stops_computing_for_client_that_does_not_read(pack):
    """Replies pile up in the server only as far as one does not fit the socket."""
    with steered(message_seconds=60) as server, narrow(server.port) as sock, Client(server.port) as other:
        sock.sendall(b"".join(pack(b"large", index) for index in range(30)))
        eventually(lambda: held_bytes(server) > 0)
        for _ in range(50):
            other.ping()
        wait_ticks(server, 1)
        assert len(Steered.seen) < 20, f"{len(Steered.seen)} computed, {held_bytes(server)} bytes held"
        with sock.makefile("rb") as file:
            assert len(file.read(30 * 2**20)) == 30 * 2**20, "all of it arrives when it reads at last"


def test_drops_client_that_sends_without_reading():
    """Small replies without end; each must not renew the client's time."""
    pings = pack_call("no_such_method" * 10) * 200
    with steered(message_seconds=0.5) as server, narrow(server.port) as sock:
        sock.settimeout(0.1)

        def is_dropped() -> bool:
            assert held_bytes(server) < 4 * 2**20, "bytes are held for a client that reads nothing"
            try:
                sock.sendall(pings)
            except TimeoutError:
                pass
            except ConnectionError:
                return True
            return False

        eventually(is_dropped, seconds=2 * WAIT)  # replies fill the buffers first


# -- connections ----------------------------------------------------------------------------------------------------


class Clock:
    """A monotonic clock that tests set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (torchpipe_server.front.server, torchpipe_server.front.connection, torchpipe_py.methods.call):
        monkeypatch.setattr(module, "monotonic", made)
    return made


@every_client
def test_silent_connections_are_closed_after_idle_seconds(clock, client_type):
    with (
        steered(idle_seconds=10_000) as server,
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


class Endless(StreamSource):
    """An answer in parts, without an end."""

    is_left = threading.Event()

    def __init__(self, request: HttpRequest, done: Any) -> None:
        self.head = request.head_of_parts("text/plain", {})

    def attach(self, stream: AnswerStream) -> None:
        self.stream = stream
        stream.begin(self.head)
        self.write_more()

    def write_more(self) -> None:
        while self.stream.write(bytes(2**16)):
            pass

    def cancel(self, error: BaseException | None = None) -> None:
        self.is_left.set()


def test_drops_client_that_stalls_a_streamed_answer(clock):
    def is_left() -> bool:
        clock.ahead += STALLED_SECONDS
        return Endless.is_left.wait(TICK_SECONDS)

    served = Served({}, Routes([route("GET", "/endless", Endless, is_streamed=True)]))
    with (
        LocalServer(None, make_served=lambda loop: served, message_seconds=1) as server,
        narrow(server.port) as sock,
    ):
        sock.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(9) == b"HTTP/1.1 "
        clock.ahead = STALLED_SECONDS / 4
        wait_ticks(server, 2)
        assert not Endless.is_left.is_set()
        eventually(is_left)


@every_client
def test_client_is_silent_for_long_after_a_message_in_two_parts(clock, client_type):
    message = client_type.pack(b"ring")
    with steered(message_seconds=100) as server, client_type(server.port) as client:
        client.sock.sendall(message[:20])
        eventually(lambda: any(one.message_since for one in server.connections()))
        client.sock.sendall(message[20:])
        assert client.receive().label == "ring"
        clock.ahead = 200
        wait_ticks(server, 2)
        client.ping()


def test_reading_goes_on_after_the_last_of_many_unread_requests():
    with steered() as server, Client(server.port) as client:
        client.send_batch(b"block")
        assert Steered.entered.acquire(timeout=WAIT)
        client.sock.sendall(batch_of(READ_AHEAD_BYTES + 1))
        (connection,) = server.connections()
        eventually(lambda: not connection.is_reading)
        Steered.opened.set()
        assert client.receive().label == "block"
        client.receive()
        client.ping()


@every_client
def test_client_that_closed_its_side_gets_the_answer_of_a_running_request(client_type, monkeypatch):
    monkeypatch.setattr(torchpipe_server.front.connection, "END_SECONDS", WAIT)
    with steered() as server, client_type(server.port) as client:
        client.send_batch(b"block")
        assert Steered.entered.acquire(timeout=WAIT)
        (connection,) = server.connections()
        client.sock.shutdown(socket.SHUT_WR)
        eventually(lambda: connection.ended_at)
        wait_ticks(server, 1)
        Steered.opened.set()
        assert client.receive().label == "block"


def test_room_is_made_by_a_connection_without_a_request_in_work():
    def make_room(server: LocalServer) -> bool:
        outcomes: SimpleQueue[bool] = SimpleQueue()
        server.call(lambda: outcomes.put(server.server.close_slowest()))
        return outcomes.get(timeout=WAIT)

    with steered() as server, Client(server.port) as busy, Client(server.port) as idle:
        busy.send_batch(b"block")
        assert Steered.entered.acquire(timeout=WAIT)
        idle.ping()
        assert make_room(server)
        assert idle.sock.recv(1) == b""
        assert not make_room(server)
        Steered.opened.set()
        assert busy.receive().label == "block"


@every_client
def test_waiting_client_is_not_idle(clock, client_type):
    with steered(idle_seconds=100) as server, client_type(server.port) as client:
        client.send_batch(b"block")
        assert Steered.entered.acquire(timeout=WAIT)
        clock.ahead = 200
        wait_ticks(server, 1)
        Steered.opened.set()
        assert client.receive().label == "block"
        wait_ticks(server, 2)
        client.ping()


def test_refusals_do_not_wait_for_the_next_round_and_come_in_order(monkeypatch) -> None:
    head = b"GET /%s HTTP/1.1\r\nHost: test\r\n%s\r\n"
    with steered() as server, connect(server.port) as sock:
        monkeypatch.setattr(server.server, "answer", lambda *answer: None)  # takes answers for the next round
        sock.sendall(
            b"".join(head % (name, b"") for name in (b"one", b"two")) + head % (b"end", b"Connection: close\r\n")
        )
        answer = b"".join(iter(lambda: sock.recv(2**16), b""))
    assert [answer.count(b"no /" + name) for name in (b"one", b"two", b"end")] == [1, 1, 1]
    assert answer.index(b"/one") < answer.index(b"/two") < answer.index(b"/end")


def test_paces_refusals_of_clients_that_retry_at_once() -> None:
    """The first refusal of each waits for nothing, and neither do some of the next."""
    with steered() as server:
        newcomer, retrying, patient = (SimpleNamespace(paced_until=0.0) for _ in range(3))
        pace = server.server.pacing.delay
        assert max(pace(retrying, 100.0) for _ in range(REFUSALS_AT_ONCE + 1)) < REFUSAL_SECONDS / 2
        waits = [pace(retrying, 100.0) for _ in range(1000)]
        assert waits[:2] == pytest.approx([REFUSAL_SECONDS, 2 * REFUSAL_SECONDS])
        assert max(waits) == pytest.approx(PACED_SECONDS)
        assert pace(newcomer, 100.0) == pace(patient, 100.0) == pace(patient, 101.0) == 0.0
        server.server.drain()
        assert pace(retrying, 100.0) == 0.0


def test_paced_refusal_ends_before_a_short_drain() -> None:
    with steered(drain_seconds=0.4) as server:
        retrying = SimpleNamespace(paced_until=0.0)
        assert max(server.server.pacing.delay(retrying, 100.0) for _ in range(1000)) == pytest.approx(0.2)


def test_drain_answers_no_later_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that send the next one at once would keep the service to its end, when what waits is lost."""
    with steered() as server, Client(server.port) as client:
        request = client.send_batch(b"block")
        assert Steered.entered.acquire(timeout=WAIT)
        monkeypatch.setattr(torchpipe_server.front.server, "has_unread", lambda sock: client.send_batch(b"next") > 0)
        server.stop()
        eventually(lambda: server.server.is_draining)
        Steered.opened.set()
        assert client.receive(request) is not None
        assert client.sock.recv(1) == b""


def test_paced_refusal_is_sent_before_the_deadline(monkeypatch) -> None:
    """One of a node as well as one at the entry."""
    for name, value in (("REFUSALS_AT_ONCE", 0), ("REFUSAL_SECONDS", 2 * WAIT), ("PACED_SECONDS", 2 * WAIT)):
        monkeypatch.setattr(torchpipe_server.front.pacing, name, value)
    config = {"global": {"max_inflight": 1}, "node": {"backend": "Steered"}}
    with steered(config, drain_seconds=8 * WAIT) as server, Client(server.port) as client, Client(server.port) as other:
        Steered.values = {"busy": Overloaded("busy")}
        request = IDL.InferRequest(uuid="x", inputs={"data": IDL.Value(bytes=b"error busy")}, deadline_ms=500)
        refusals = [client.error_of("infer", request=request).message for _ in range(2)]
        other.send_batch(b"block")
        assert Steered.entered.acquire(timeout=WAIT)
        refusals.append(client.error_of("infer", request=request).message)
        assert refusals == ["busy", "busy", "1 request in flight, 1 more would pass max_inflight = 1"]


def test_paced_refusal_keeps_its_turn_and_ends_with_its_client(monkeypatch) -> None:
    monkeypatch.setattr(torchpipe_server.front.pacing, "REFUSALS_AT_ONCE", 0)
    with steered() as server, Client(server.port) as client, connect(server.port) as leaver:
        Steered.values = {"busy": Overloaded("busy", retry_after_ms=1)}
        leaver.sendall(5 * pack_batch(b"error busy"))
        leaver.close()
        for data in (*5 * [b"error busy"], b"ring"):
            client.send_batch(data)
        for _ in range(5):
            with pytest.raises(IDL.InferenceError, match="overloaded"):
                client.receive()
        assert client.receive().label == "ring"
        eventually(lambda: server.server.connections == 1)


def test_paces_refusals_with_another_text(monkeypatch) -> None:
    """As over the Open Inference Protocol, where the text may explain ``timeout``."""
    paced: list[object] = []
    monkeypatch.setattr(RefusalPacing, "delay", lambda *asked: paced.append(asked) or 0.0)
    with steered() as server, Client(server.port) as client:
        Steered.values = {"busy": restated(Overloaded("busy"), "busy for long")}
        request = IDL.InferRequest(uuid="x", inputs={"data": IDL.Value(bytes=b"error busy")})
        assert client.error_of("infer", request=request).message == "busy for long"
    assert len(paced) == 1


def test_paced_refusal_releases_its_message_and_delays_no_results(monkeypatch) -> None:
    monkeypatch.setattr(RefusalPacing, "delay", lambda *asked: 2 * WAIT)
    name = "x" * LIMIT
    with steered() as server, Client(server.port) as client, Client(server.port) as other:
        Steered.values = {name: Overloaded("busy")}
        client.send_batch(f"error {name}".encode())
        eventually(lambda: "infer_batch" in server.by_method)
        (connection,) = (one for one in server.connections() if one.call is not None)
        assert connection.held_bytes == 0
        refused, answered = other.infer_many([f"error {name}".encode(), b"ring"])
        assert (refused.error.code, answered.result.label) == ("overloaded", "ring")
        server.call(connection.drop)


# -- what must not end the I/O thread -------------------------------------------------------------------------------


def test_defect_ends_its_connection_only(monkeypatch):
    feed = ThriftReader.feed

    def failing(self: Any, data: bytes) -> Any:
        if b"\x80poison" in data:
            raise RuntimeError("a defect")
        return feed(self, data)

    monkeypatch.setattr(ThriftReader, "feed", failing)
    with steered() as server, Client(server.port) as other:
        other.ping()
        with connect(server.port) as sock:
            sock.sendall(b"\x80poison")
            assert_dies(sock)
        other.ping()


# -- a process of its own -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with SteeredProcess(tmp_path_factory.mktemp("service")) as process:
        yield process.wait_started()


@pytest.mark.parametrize("whose", ["supervisor", "worker"])
def test_without_descriptors_the_server_waits_and_recovers(service, whose):
    pid = service.pid if whose == "supervisor" else service.workers[0]
    with Client(service.port) as client:
        client.ping()
        used = psutil.Process(pid).num_fds()
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, before[1]))
        try:
            rest = [connect(service.port) for _ in range(20)]
            client.ping()
            before_wait = cpu_seconds(pid)
            threading.Event().wait(1.0)
            assert cpu_seconds(pid) - before_wait < 0.3
            client.ping()
            for sock in rest:
                sock.close()
            eventually(lambda: is_served(service.port), "no connection is served any more")
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


# -- bytes held for all connections together ------------------------------------------------------------------------

HELD = 4 * 2**20


@every_client
def test_half_sent_messages_of_many_connections_are_bounded(client_type):
    """Each is far below the limit of a message; together they are not."""
    options = {"max_held_bytes": HELD, "message_seconds": 60}
    with steered(**options) as server, Client(server.port) as normal:
        socks = [connect(server.port) for _ in range(40)]
        message = client_type.pack(b"none " + b"x" * (2**20 - 105))
        most = 0
        for sock in socks:
            sock.sendall(message[: 2**19])
            normal.ping()
            most = max(most, held_by_connections(server))
        assert most < HELD + 2**20, f"{most} bytes are held"
        # Every byte has been looked at.
        eventually(lambda: held_by_connections(server) == 2**19 * sum(not is_readable(sock) for sock in socks))
        refused = [sock for sock in socks if is_readable(sock)]
        assert abs(len(refused) - len(socks) + HELD // 2**19) <= 2
        for sock in refused:
            assert b"overloaded" in assert_dies(sock)
        for sock in socks:
            sock.close()
        eventually(lambda: held_by_connections(server) == 0)
        normal.ping()


def held_by_connections(server: LocalServer) -> int:
    return sum(one.held_bytes for one in server.connections())


def is_readable(sock: socket.socket, seconds: float = 0) -> bool:
    return bool(select.select([sock], [], [], seconds)[0])


@every_client
def test_refuses_request_beyond_max_held_bytes(client_type):
    with steered(max_held_bytes=2**18) as server, client_type(server.port) as client:
        assert client.infer_batch(b"x" * 2**16)[1] == 2**16
        client.sock.sendall(client_type.pack(b"x" * 2**20))
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive()
        assert (caught.value.code, caught.value.retry_after_ms) == ("overloaded", 1000)
