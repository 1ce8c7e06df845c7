"""The gRPC port is guarded as the main port is: memory, time and room are bounded, and neighbours are served."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import threading
from collections import Counter
from concurrent.futures import Executor, Future
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from kit import http2
from kit.clients import connect
from kit.contract import Asked, as_rpc
from kit.services import LocalServer, serving, steered
from kit.steered import Steered
from kit.waits import WAIT, eventually
from torchpipe_server.front import rpc_limits
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.loop import new_loop
from torchpipe_server.front.peers import Peers
from torchpipe_server.options import Options

from torchpipe_py import Overloaded
from torchpipe_py.methods.routes import Method, Rpc
from torchpipe_py.wire.compression import InflateQueue

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
rpc = pytest.importorskip("torchpipe_server.front.rpc")

SERVICE = "/inference.GRPCInferenceService"
INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
HEALTH = ["/grpc.health.v1.Health/Check", f"{SERVICE}/ServerLive", f"{SERVICE}/ServerReady"]
GOOD = as_rpc(Asked()).SerializeToString()
RELEASE = tuple(map(int, grpc.__version__.split(".")[:2]))


def channel(port: int) -> Any:
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])


def call(on: Any, path: str = INFER, data: bytes = GOOD, **options: Any) -> Any:
    return on.unary_unary(path)(data, timeout=WAIT, **options)


def counts(server: LocalServer, name: str) -> dict[str, int]:
    """The requests of this name by outcome."""
    return server.by_method.get(f"gRPC {name}", {})


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_unfinished_messages_count_against_max_held_bytes(path: str) -> None:
    size, clients, limit = 50_000, 8, 2**18
    with (
        serving("Identity", grpc_port=0, max_message_bytes=2**16, max_held_bytes=limit) as server,
        ExitStack() as stack,
    ):
        for _ in range(clients):
            sock = stack.enter_context(connect(server.grpc_port))
            sock.sendall(http2.opening() + http2.head(path, 1) + http2.message(1, bytes(size), size + 1))
        name = path.rpartition("/")[2]
        least = clients - limit // size
        eventually(lambda: counts(server, name).get("overloaded", 0) >= least, "they hold more than the limit")
        with channel(server.grpc_port) as on:
            assert call(on)
        assert counts(server, name)["overloaded"] < clients


@pytest.mark.parametrize("first", [b"", GOOD])
def test_ends_stream_whose_message_does_not_arrive(first: bytes) -> None:
    with serving("Identity", grpc_port=0, message_seconds=0.2) as server, channel(server.grpc_port) as on:
        idle = on.stream_stream(STREAM)
        asked = SimpleQueue[bytes]()
        asked.put(GOOD)
        answers = idle(iter(asked.get, b""), timeout=WAIT)
        assert next(answers)
        with connect(server.grpc_port) as sock:
            whole = http2.message(1, first) if first else b""
            sock.sendall(http2.opening() + http2.head(STREAM, 1) + whole + http2.message(1, bytes(30_000), 30_001))
            eventually(lambda: counts(server, "ModelStreamInfer").get("deadline_exceeded", 0) == 1, "it is not ended")
        asked.put(GOOD)
        assert next(answers), "a stream that waits for no message was ended"
        asked.put(b"")


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_newcomers_replace_silent_calls(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_limits, "SILENT_SECONDS", 0.0)
    with serving("Identity", grpc_port=0, max_connections=4) as server, ExitStack() as stack:
        for _ in range(2):
            sock = stack.enter_context(connect(server.grpc_port))
            sock.sendall(http2.opening() + http2.head(path, 1) + http2.head(path, 3))
        eventually(lambda: len(server.rpc.limits.calls) == 4)
        with channel(server.grpc_port) as on:
            for _ in range(3):
                assert call(on)
        eventually(lambda: counts(server, path.rpartition("/")[2]).get("overloaded") == 1)


def test_newcomers_replace_silent_connections(caplog: pytest.LogCaptureFixture) -> None:
    with serving("Identity", grpc_port=0, max_connections=4) as server, ExitStack() as stack:
        for opening in [b"", http2.opening()] * 4:
            stack.enter_context(connect(server.grpc_port)).sendall(opening)
        with channel(server.grpc_port) as on:
            assert call(on, wait_for_ready=True)
            assert call(on)
        assert "called nothing and made room for others: disconnected" in caplog.text
        assert counts(server, "connection")["overloaded"] >= 4


def test_health_checks_find_room_if_all_calls_are_taken() -> None:
    blocked = as_rpc(Asked(b"block")).SerializeToString()
    with steered(grpc_port=0, max_connections=2) as server, ExitStack() as stack:
        channels = [stack.enter_context(channel(server.grpc_port)) for _ in range(3)]
        held = [on.unary_unary(INFER).future(blocked, timeout=WAIT) for on in channels[:2]]
        eventually(lambda: server.run.stats()["inflight"] == 2)
        for path in HEALTH:
            assert call(channels[2], path, b"") == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as raised:
            call(channels[2])
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        Steered.opened.set()
        assert all(each.result(WAIT) for each in held)


@pytest.mark.skipif(RELEASE < (1, 84), reason="this grpcio has one queue for all methods")
@pytest.mark.parametrize("path", HEALTH)
def test_health_checks_do_not_wait_for_inference_of_others(path: str) -> None:
    """grpc passes on calls one by one, in the order in which they came; health checks have queues of their own."""
    connections, calls = 8, 64
    begun, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert goes_on.wait(WAIT)

    with serving("Identity", grpc_port=0) as server, ExitStack() as stack:
        ready = stack.enter_context(channel(server.grpc_port))
        others = [stack.enter_context(channel(server.grpc_port)) for _ in range(connections)]
        for on in (ready, *others):
            assert call(on)
        server.call(hold)
        assert begun.wait(WAIT)
        infers = [on.unary_unary(INFER).future(GOOD, timeout=WAIT) for on in others for _ in range(calls)]
        check = ready.unary_unary(path).future(b"", timeout=WAIT)
        before: list[int] = []
        check.add_done_callback(lambda _: before.append(sum(each.done() for each in infers)))
        goes_on.set()
        assert check.result(WAIT) == b"\x08\x01"
        assert all(each.result(WAIT) for each in infers)
        assert before[0] < len(infers) / 2


def test_numbers_are_bounded_in_all_their_pieces_together() -> None:
    piece = b"\x1a\xd0\x0f" + b"\x01" * 2000  # a part of the shape, within the limit
    tensor = b"\x0a\x04data\x12\x04FP32" + 3 * piece
    data = b"\x0a\x04test\x2a" + bytes([len(tensor) & 127 | 128, len(tensor) >> 7 & 127 | 128, len(tensor) >> 14])
    with serving("Identity", grpc_port=0, max_text_bytes=2**12) as server, channel(server.grpc_port) as on:
        failed = on.unary_unary(INFER).future(data + tensor, timeout=WAIT)
        assert "4000 numbers up to shape; the limit is 2048" in failed.exception(WAIT).details()


@pytest.mark.parametrize("names", [["model_name"], ["model_name", "id"], ["id", "model_version"]])
def test_text_is_bounded_in_all_fields_together(names: list[str]) -> None:
    limit = 2**12
    with serving("Identity", grpc_port=0, max_text_bytes=limit) as server, channel(server.grpc_port) as on:
        asked = as_rpc(Asked(bytes(limit)))
        assert call(on, data=asked.SerializeToString()), "bytes are not text"
        for name in names:
            setattr(asked, name, "x" * (limit // len(names)))
        failed = on.unary_unary(INFER).future(asked.SerializeToString(), timeout=WAIT).exception(WAIT)
        assert re.search(r"bytes of text in \w+; the limit is 4096 \(--max-text-bytes\)", failed.details())


@pytest.mark.parametrize(
    ("channels", "calls"),
    [(2, 150), *(pytest.param(*load, marks=pytest.mark.slow) for load in [(1, 1500), (4, 500)])],
)
def test_calls_at_once_are_all_answered(channels: int, calls: int) -> None:
    """gRPC's own limits, beyond which it resets calls, are above those of the service."""
    with serving("Identity", grpc_port=0) as server, ExitStack() as stack:
        opened = [stack.enter_context(channel(server.grpc_port)) for _ in range(channels)]
        for _ in range(2):
            ended = [on.unary_unary(INFER).future(GOOD, timeout=WAIT) for _ in range(calls) for on in opened]
            assert Counter(map(outcome_of, ended)) == {"ok": channels * calls}


@pytest.mark.parametrize("channels", [1, 6])
def test_calls_beyond_the_room_are_refused_with_a_time(channels: int) -> None:
    blocked, most = as_rpc(Asked(b"block")).SerializeToString(), 8
    with steered(grpc_port=0, max_connections=most) as server, ExitStack() as stack:
        opened = [stack.enter_context(channel(server.grpc_port)) for _ in range(2 + channels)]
        each = most // 2  # a connection has no more calls at a time
        held = [on.unary_unary(INFER).future(blocked, timeout=WAIT) for on in opened[:2] for _ in range(each)]
        eventually(lambda: server.run.stats()["inflight"] == most)
        ended = [on.unary_unary(INFER).future(GOOD, timeout=WAIT) for on in opened[2:] for _ in range(each)]
        assert Counter(map(outcome_of, ended)) == {"RESOURCE_EXHAUSTED, to be sent again": channels * each}
        Steered.opened.set()
        assert Counter(map(outcome_of, held)) == {"ok": most}


@pytest.mark.parametrize("path", [INFER, STREAM])
def test_a_connection_has_few_requests_in_work_and_loses_none(path: str) -> None:
    blocked = as_rpc(Asked(b"block")).SerializeToString()
    with steered(grpc_port=0, max_calls_per_connection=2) as server, ExitStack() as stack:
        on, other = (stack.enter_context(channel(server.grpc_port)) for _ in range(2))
        if path == INFER:
            answers = [on.unary_unary(path).future(blocked, timeout=WAIT) for _ in range(5)]
        else:
            streams = [on.stream_stream(path)(iter([blocked] * 3), timeout=WAIT) for _ in range(2)]
        eventually(lambda: server.run.stats()["inflight"] == 2)
        assert call(other, HEALTH[0], b"") == b"\x08\x01"
        assert server.run.stats()["inflight"] == 2
        Steered.opened.set()
        if path == INFER:
            assert all(each.result(WAIT) for each in answers)
        else:
            assert [len(list(each)) for each in streams] == [3, 3]
        eventually(lambda: server.rpc.limits.held_bytes == 0)


def test_answers_that_are_not_read_hold_no_other_stream_back() -> None:
    """A client that opens several streams may read one after the other."""
    large = as_rpc(Asked(b"large")).SerializeToString()
    with steered(grpc_port=0, max_calls_per_connection=2) as server, channel(server.grpc_port) as on:
        unread = on.stream_stream(STREAM)(iter([large] * 8), timeout=WAIT)
        eventually(lambda: len(Steered.seen) == 8)
        assert len(list(on.stream_stream(STREAM)(iter([GOOD] * 3), timeout=WAIT))) == 3
        assert len(list(unread)) == 8


def test_left_streams_leave_their_room() -> None:
    blocked = as_rpc(Asked(b"block")).SerializeToString()
    with steered(grpc_port=0, max_calls_per_connection=2) as server, channel(server.grpc_port) as on:
        left = on.stream_stream(STREAM)(iter([blocked] * 8), timeout=WAIT)
        eventually(lambda: server.run.stats()["inflight"] == 2)
        left.cancel()
        eventually(lambda: len(server.rpc.limits.calls) == 0)
        Steered.opened.set()
        assert len(list(on.stream_stream(STREAM)(iter([GOOD] * 3), timeout=WAIT))) == 3
        eventually(lambda: server.rpc.limits.held_bytes == 0)


class AtOnce(Executor):
    """Runs everything at once, so that each test takes the same rounds of the loop."""

    def submit(self, function: Any, *args: Any, **keys: Any) -> Any:
        future: Any = Future()
        future.set_result(function(*args, **keys))
        return future


class FakeContext:
    """What grpc passes for a call that sends these messages; each step takes a round of the loop."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)
        self.written = 0

    async def read(self) -> Any:
        await asyncio.sleep(0)
        return self._messages.pop(0) if self._messages else grpc.aio.EOF

    async def write(self, data: bytes) -> None:
        await asyncio.sleep(0)
        self.written += 1

    async def abort(self, *status: Any) -> None:
        await asyncio.sleep(0)
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_compression(self, coding: Any) -> None:
        pass

    def disable_next_message_compression(self) -> None:
        pass


LONG = gzip.compress(bytes(2**18))
CANCELLED = {
    "call": (GOOD, {}, 16),
    "compressed call": (LONG, {}, 24),
    "refused call": (b"refuse", {}, 16),
    "stream": (GOOD, {"is_stream": True}, 30),
    "compressed stream": (LONG, {"is_stream": True}, 60),
    "refused stream": (b"refuse", {"is_stream": True}, 24),
    "watch": (GOOD, {"is_watch": True}, 40),
}


@pytest.mark.parametrize("name", CANCELLED)
def test_a_call_that_is_cancelled_at_any_moment_holds_no_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, kind, moments = CANCELLED[name]
    monkeypatch.setattr(rpc, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(rpc, "parse_message", lambda kind, data, most, text: data)
    loop, answers = new_loop(is_fast=False), [0]

    def start(request: Any, done: Any) -> None:
        answers[0] += 1
        written = b"answer %d" % answers[0]
        answer: Any = SimpleNamespace(message=SimpleNamespace(SerializeToString=lambda: written), headers={})
        if request.message == b"refuse":
            answer = Overloaded("refused", 1000)
        loop.call_soon(loop.call_soon, done, answer)

    def turn_once() -> None:
        loop.call_soon(loop.stop)
        loop.run_forever()

    path, pacing = "/test.Test/Test", SimpleNamespace(delay=lambda *_: 1e-6)
    server = rpc.RpcServer(
        loop, [Rpc(path, Method(bytes, start), **kind)], Options("test"), RequestCounters(""), pacing,
        InflateQueue(AtOnce()),
    )  # fmt: skip
    handler = server.service(SimpleNamespace(method=path))
    serve, most_held, written, has_ended = handler.stream_stream or handler.stream_unary, 0, 0, False
    for moment in range(moments):
        context = FakeContext(data, data) if handler.stream_stream else FakeContext(data)
        task = loop.create_task(serve(None, context))
        for _ in range(moment):
            turn_once()
            most_held = max(most_held, server.limits.held_bytes)
        has_ended = task.done()
        task.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AbortError):
            loop.run_until_complete(task)
        for _ in range(5):
            turn_once()
        limits = server.limits
        assert (limits.held_bytes, limits.calls, limits.reading) == (0, set(), {}), f"after {moment} rounds"
        written = max(written, context.written)
    assert most_held >= len(data)
    assert written > 2 if name == "watch" else has_ended, "there are later moments"
    loop.close()


def outcome_of(future: Any) -> str:
    failed = future.exception(WAIT)
    if failed is None:
        return "ok"
    name = failed.code().name
    is_repeatable = any(key == "grpc-retry-pushback-ms" for key, _ in failed.trailing_metadata() or ())
    return f"{name}, to be sent again" if is_repeatable else f"{name}: {failed.details()}"


def test_connection_that_grpc_closes_meanwhile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, sock = Peers(1, 1), socket.socket()
    gone = sock.fileno()
    sock.close()
    monkeypatch.setattr(peers, "_sockets_now", lambda: [(gone, (0, socket.AF_INET, ("127.0.0.1", 1)))])
    assert peers.look([], 1, 0.0) == []
    assert peers.connections == 0
