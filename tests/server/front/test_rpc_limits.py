"""The limits of gRPC, asked without grpc: the time and the clients' connections are the test's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from kit.virtual_loop import VirtualLoop
from torchpipe_server.front import rpc_limits
from torchpipe_server.front.counters import RequestCounters
from torchpipe_server.front.peers import Peer, Peers, Seen
from torchpipe_server.front.rpc_limits import (
    HEALTH_CALLS,
    LOOK_SECONDS,
    NEWCOMERS_SHARE,
    SILENT_SECONDS,
    TICK_SECONDS,
    RpcLimits,
)
from torchpipe_server.options import Options

from torchpipe_py import DeadlineExceeded, Overloaded
from torchpipe_py.serving import Method, Rpc

MOST, SECONDS = 32, 10.0


class FakeCall:
    """A call of a client, and whether its wait for a message was cancelled."""

    def __init__(self, name: str = "ModelInfer", **kind: bool) -> None:
        self.rpc = Rpc(f"/test.Test/{name}", Method(bytes, lambda request, done: None), **kind)
        self.peer: Peer | None = None
        self.answered_at = 0.0
        self.refusal: BaseException | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakePeers(Peers):
    """Clients that have sent as many bytes as the test says, by port."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.sent: dict[int, int] = {}
        self.disconnected: list[tuple[int, str]] = []

    def _connections(self) -> Iterator[Seen]:
        for port, sent in self.sent.items():
            yield Seen(("127.0.0.1", port), port, sent, 0)

    def disconnect(self, clients: Collection[Peer | Seen], why: str) -> None:
        self.disconnected += [(client.address[1], why.split(" (")[0]) for client in clients]


class Front:
    """Limits, and what a test does in place of grpc."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.peers = VirtualLoop(), FakePeers()
        options = Options(
            "test", max_connections=MOST, max_message_bytes=2**20, max_held_bytes=2**24, message_seconds=SECONDS
        )
        loop: Any = self.loop
        self.limits = RpcLimits(loop, options, RequestCounters(""), self.peers)
        monkeypatch.setattr(rpc_limits, "monotonic", lambda: self.loop.time)

    def enter(self, call: FakeCall, port: int = 1, is_read: bool = True) -> FakeCall:
        """Admit the call, whose message is there or not."""
        self.peers.sent.setdefault(port, 0)
        self.limits.enter(call, f"ipv4:127.0.0.1:{port}")
        if not is_read:
            self.limits.begin_reading(call, call.cancel)
        return call

    def is_full(self, call: FakeCall, port: int = 1) -> bool:
        try:
            self.enter(call, port)
        except Overloaded:
            return True
        return False

    def tick(self, seconds: float = TICK_SECONDS, is_ending: bool = False) -> None:
        self.loop.advance(seconds)
        self.limits.enforce(is_ending)


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    return Front(monkeypatch)


def test_calls_beyond_the_room_are_refused_until_one_leaves(front: Front) -> None:
    call, *_ = [front.enter(FakeCall()) for _ in range(MOST)]
    assert front.is_full(FakeCall())
    front.limits.leave(call)
    assert not front.is_full(FakeCall())


def test_health_checks_find_room_beside_all_others_and_newcomers(front: Front) -> None:
    for port in range(1, 2 * MOST):
        if front.is_full(FakeCall(), port):
            break
    assert len(front.limits.calls) == MOST + MOST // NEWCOMERS_SHARE
    checks = [front.is_full(FakeCall("Check"), port=99) for _ in range(HEALTH_CALLS + 1)]
    assert checks == [False] * HEALTH_CALLS + [True]


def test_a_watch_that_is_refused_replaces_no_call(front: Front) -> None:
    for _ in range(MOST // 2):
        front.enter(FakeCall("Watch", is_watch=True))
    silent = [front.enter(FakeCall(), is_read=False) for _ in range(MOST // 2)]
    front.loop.advance(SILENT_SECONDS)
    assert front.is_full(FakeCall("Watch", is_watch=True))
    assert not any(call.is_cancelled for call in silent)


def test_a_connection_without_a_call_finds_room_beside_one_that_has_all(front: Front) -> None:
    for _ in range(MOST):
        front.enter(FakeCall())
    ports = range(2, 2 + MOST // NEWCOMERS_SHARE)
    for port in ports:
        assert not front.is_full(FakeCall(), port)
        assert front.is_full(FakeCall(), port), "it has a call"
    assert front.is_full(FakeCall(), ports.stop), "that room is taken, too"


def test_a_replaced_call_frees_its_room_once(front: Front) -> None:
    first, *_ = [front.enter(FakeCall(), port=port, is_read=False) for port in range(1, MOST + 1)]
    front.loop.advance(SILENT_SECONDS)
    front.enter(FakeCall(), port=MOST + 1)
    front.limits.leave(first)
    assert len(front.limits.calls) == MOST
    assert first.peer is not None
    assert first.peer.calls == 0


def test_watches_take_half_of_the_room(front: Front) -> None:
    for _ in range(MOST // 2):
        front.enter(FakeCall("Watch", is_watch=True))
    assert front.is_full(FakeCall("Watch", is_watch=True))
    assert not front.is_full(FakeCall())


def test_a_newcomer_replaces_the_call_that_is_silent_longest(front: Front) -> None:
    first, *others = [front.enter(FakeCall(), is_read=False) for _ in range(MOST)]
    assert front.is_full(FakeCall()), "it has only begun"
    front.loop.advance(SILENT_SECONDS)
    assert not front.is_full(FakeCall())
    assert first.is_cancelled
    assert isinstance(first.refusal, Overloaded)
    assert not any(call.is_cancelled for call in others)
    for call in others:
        front.limits.end_reading(call)
    assert front.is_full(FakeCall()), "all others have their messages"


def test_held_bytes_leave_no_room(front: Front) -> None:
    front.limits.hold(2**24)
    front.limits.check_room()
    front.limits.hold(1)
    with pytest.raises(Overloaded, match="more than 16777216 bytes of unanswered messages"):
        front.limits.check_room()
    front.limits.hold(-1)
    front.limits.check_room()


def test_unread_bytes_are_refused_beginning_with_the_client_that_has_most(front: Front) -> None:
    small, large = (front.enter(FakeCall(), port, is_read=False) for port in (1, 2))
    front.enter(FakeCall(), 3)  # grpc has its next message, which no call waits for
    front.limits.hold(2**24 - 2**20)
    front.tick()
    front.peers.sent = {1: 2**18, 2: 2**19, 3: 2**20}
    front.tick()
    assert (small.is_cancelled, large.is_cancelled) == (False, False), "the client without a waiting call had enough"
    assert front.peers.disconnected == [(3, "sent more than there is room for")]
    front.limits.hold(2**20)
    front.peers.sent.pop(3)
    front.tick()
    assert (small.is_cancelled, large.is_cancelled) == (True, True)
    assert isinstance(large.refusal, Overloaded)


@pytest.mark.parametrize("held", [0, 2**24 - 2**20])
def test_memory_is_looked_at_between_ticks_if_much_may_arrive(front: Front, held: int) -> None:
    front.limits.hold(held)
    call = front.enter(FakeCall(), is_read=False)
    front.enter(FakeCall(), is_read=False)
    front.loop.advance(LOOK_SECONDS)
    front.peers.sent[1] = 2**20
    front.loop.advance(LOOK_SECONDS)
    assert call.is_cancelled == (held > 0)


def test_a_message_that_does_not_arrive_ends_its_call(front: Front) -> None:
    late, idle, slow = (front.enter(FakeCall(is_stream=port > 1), port, is_read=False) for port in (1, 2, 3))
    front.tick()
    front.peers.sent[3] = 2**16
    front.tick()
    front.tick(SECONDS - TICK_SECONDS)
    assert (late.is_cancelled, idle.is_cancelled, slow.is_cancelled) == (True, False, False)
    front.tick(2 * TICK_SECONDS)
    assert (idle.is_cancelled, slow.is_cancelled) == (False, True)
    assert isinstance(late.refusal, DeadlineExceeded)
    assert isinstance(slow.refusal, DeadlineExceeded)


def test_clients_that_take_no_answers_are_disconnected_if_room_is_scarce(front: Front) -> None:
    front.enter(FakeCall(), 1).answered_at = front.loop.time
    front.tick(SECONDS + 1)
    assert front.peers.disconnected == []
    for _ in range(MOST // 2 - 1):
        front.enter(FakeCall(), 2)
    front.tick()
    assert front.peers.disconnected == [(1, "took no answers")]


def test_the_end_of_the_service_waits_for_no_watch_that_is_not_read(front: Front) -> None:
    for port in (1, 2):
        front.enter(FakeCall("Watch", is_watch=True), port).answered_at = front.loop.time
    front.enter(FakeCall(), 2)
    front.tick(2 * TICK_SECONDS)
    assert front.peers.disconnected == []
    front.tick(is_ending=True)
    assert front.peers.disconnected == [(1, "took no answers")], "the other client has a call in work"


def test_idle_connections_beyond_the_limit_are_disconnected(front: Front) -> None:
    front.enter(FakeCall(), 1)
    front.peers.sent |= dict.fromkeys(range(2, MOST + 2), 0)
    front.tick()
    closed = [port for port, _ in front.peers.disconnected]
    assert len(closed) == 1 + MOST // 8
    assert 1 not in closed
