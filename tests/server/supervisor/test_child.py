"""A worker's heartbeat and messages, seen from the supervisor; their channel; the placement of connections."""

from __future__ import annotations

import array
import json
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import psutil
import pytest
from kit.clients import IDL
from kit.figures import ONE
from kit.services import turn
from kit.waits import WAIT, eventually
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor import child as module
from torchpipe_server.supervisor import connections as connections_module
from torchpipe_server.supervisor.child import Child
from torchpipe_server.supervisor.connections import Connections
from torchpipe_server.supervisor.forker import Forked
from torchpipe_server.supervisor.messages import Prepared
from torchpipe_server.worker import channel as channel_module
from torchpipe_server.worker.channel import LINE_BYTES, Channel
from torchpipe_server.worker.heartbeat import Heartbeat

from torchpipe_py.proc.child import ChildProcess

MEBIBYTE = 2**20


class Subject:
    """A `Child` whose process is a `sleep`; the test sends its messages and heartbeats."""

    def __init__(self) -> None:
        self.loop = new_loop(is_fast=False)
        self.process = subprocess.Popen(["sleep", "600"])
        ours, self.sock = socket.socketpair()
        self.heartbeat = Heartbeat()
        self.ended: list[Child] = []
        self.heard: list[Any] = []
        process = ChildProcess("worker 0", self.process)
        read_end, self.stderr = multiprocessing.Pipe(duplex=False)
        forked = Forked(process, ours, self.heartbeat, read_end)
        self.child = Child(
            self.loop, "worker 0", forked, lambda child, message: self.heard.append(message), self.ended.append
        )

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        turn(self.loop)

    def show(self, **signs: float) -> None:
        self.heartbeat.write(self.heartbeat.read()._replace(**signs))

    def is_ended(self) -> bool:
        turn(self.loop)
        return bool(self.ended)


@pytest.fixture
def starting() -> Iterator[Subject]:
    made = Subject()
    yield made
    made.process.kill()
    made.process.wait(WAIT)
    made.child.close()
    made.sock.close()
    made.stderr.close()
    made.loop.close()


@pytest.fixture
def subject(starting: Subject) -> Subject:
    starting.say({"type": "ready", "graph": "<svg/>"})
    assert starting.child.is_ready
    return starting


# -- signs of life --------------------------------------------------------------------------------------------------


LOOKS: dict[str, tuple[float, list[tuple[dict[str, float], str | None]]]] = {  # --hang-seconds, signs, what is wrong
    "silent": (2, [({"beats": 1}, None), ({}, None), ({}, None), ({}, "silent"), ({"beats": 2}, None)]),
    "no limit": (0, [({"beats": 1}, None)] + 10 * [({}, None)]),
    "stuck": (2, [({"beats": 1, "loop_s": 1.5}, None), ({"beats": 2}, None), ({"beats": 3, "loop_s": 2.5}, "stuck")]),
    # A batch counts at the second look: that of a machine that slept is over by then.
    "hung batch": (2, [({"beats": 1, "batch_s": 9e3}, None), ({"beats": 2, "batch_s": 0.1}, None),
                       ({"beats": 3, "batch_s": 9e3}, None), ({"beats": 4}, "hung_batch")]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_heartbeats_show_silent_stuck_and_hung_workers(subject: Subject, name: str) -> None:
    hang_seconds, looks = LOOKS[name]
    for signs, problem in looks:
        subject.show(**signs)
        assert subject.child.problem(hang_seconds, 0.0) == problem


def test_dead_instance_is_a_problem_without_hang_seconds(subject: Subject) -> None:
    """Its worker may finish what it can, then it is killed; a worker that ends loses its instances."""
    subject.show(beats=1, dead=1)
    subject.child.connections.add(3)
    subject.child.look(0.0, 0.0)
    assert (subject.child.state, subject.child.reason) == ("draining", "dead_instance")
    assert subject.child.problem(0.0, 0.0) is None
    eventually(subject.is_ended)
    assert subject.process.wait(WAIT) < 0


def test_ends_a_worker_that_is_not_ready_in_time(starting: Subject) -> None:
    child = starting.child
    assert [child.problem(1.0, 2.0) for _ in range(3)] == [None, None, "slow_start"]
    assert child.problem(1.0, 0.0) is None  # without a limit
    child.look(1.0, 2.0)
    assert (child.reason, child.failure) == ("slow_start", "worker 0 is not ready after 2 s (--start-seconds)")
    eventually(starting.is_ended)


def test_worker_may_start_for_long_and_then_serve(starting: Subject) -> None:
    assert starting.child.problem(1.0, 1.0) is None
    starting.say({"type": "ready", "graph": ""})
    starting.show(beats=1)
    assert [starting.child.problem(0.0, 1.0) for _ in range(3)] == [None] * 3


# -- what a worker says ---------------------------------------------------------------------------------------------


def test_each_answer_to_a_change_is_taken_once(subject: Subject) -> None:
    answers = [{"type": "prepared", "change": number, "problem": "", "graph": ""} for number in (1, 2)]
    subject.child.ask_change("prepare", 1)
    subject.child.ask_change("prepare", 2)
    subject.say(answers[1], answers[0])
    assert [message.change for message in subject.heard if isinstance(message, Prepared)] == [2, 1]
    subject.say(answers[0])
    eventually(subject.is_ended)
    assert subject.child.reason == "misbehaved"


def test_takes_messages_in_order(subject: Subject) -> None:
    subject.child.connections.update({3, 4})
    subject.child.ask_stats()
    for slot in (3, 4):
        subject.say({"type": "gone", "slot": slot, "is_closed": slot == 3})
    subject.say({"type": "stats", "stats": ONE})
    subject.child.has_streams = True
    subject.say(CONTROL, EVENT)
    subject.say({"type": "end", "answered": True, "stats": ONE})
    assert (subject.child.answered, subject.child.stats["inflight"]) == (True, 1)
    assert subject.process.poll() is None


CONTROL = {"type": "control", "id": 0, "action": "index", "name": ""}
EVENT = {"type": "event", "stream": "yard", "data": "{}", "missed": 0}
HOSTILE = {
    "no JSON": b"\xff\xff\n",
    "ready again": b'{"type": "ready", "graph": ""}\n',
    "failed when ready": b'{"type": "failed", "message": ""}\n',
    "another's connection": b'{"type": "gone", "slot": 5, "is_closed": true}\n',
    "figures nobody asked for": json.dumps({"type": "stats", "stats": ONE}).encode() + b"\n",
    "an event without streams": json.dumps(EVENT).encode() + b"\n",
    "a snapshot without streams": b'{"type": "snapshot", "stream": "yard", "jpeg": "", "problem": ""}\n',
    "a line without end": b"x" * (LINE_BYTES + MEBIBYTE),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_kills_a_worker_that_sends_an_invalid_message(
    subject: Subject, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = memoryview(HOSTILE[name])
    subject.sock.setblocking(False)
    while data and not subject.ended:
        try:
            data = data[subject.sock.send(data) :]
        except OSError:  # full, or closed by the other side
            turn(subject.loop)
    eventually(subject.is_ended)
    assert (subject.process.wait(WAIT) < 0, subject.child.reason) == (True, "misbehaved")
    if name == "ready again":
        assert caplog.messages[-1].endswith("invalid message: unexpected 'ready' while the process is ready")


@pytest.mark.parametrize(("state", "unread"), [("starting", 0), ("ready", 1000)])
def test_kills_a_worker_that_sends_a_control_message_too_early_or_unread(
    subject: Subject, state: module.State, unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker that serves nobody yet, and of one that reads no answers."""
    monkeypatch.setattr(module, "MOST_UNREAD", 100)
    subject.child.state = state
    for _ in range(unread):
        subject.child.send("outcome", id=0, status=200, body={"models": ["x" * 1000]})
    subject.say(CONTROL)
    eventually(subject.is_ended)
    assert (subject.process.wait(WAIT) < 0, subject.child.reason) == (True, "misbehaved")


def test_kills_a_worker_that_closes_its_channel(subject: Subject) -> None:
    subject.sock.close()
    eventually(subject.is_ended)
    assert (subject.process.wait(WAIT) < 0, subject.child.reason) == (True, "misbehaved")


@pytest.mark.parametrize("closes_first", [True, False])
def test_worker_that_was_killed_from_outside_has_died(subject: Subject, closes_first: bool) -> None:
    """Whether the end of its channel or its own end is noticed first."""
    assert subject.child.reason is None
    subject.process.kill()
    os.waitid(os.P_PID, subject.process.pid, os.WEXITED | os.WNOWAIT)
    if closes_first:
        subject.sock.close()
        subject.child._channel.drain()
    eventually(subject.is_ended)
    assert subject.child.reason == "died"


def test_worker_that_sends_much_leaves_time_for_others(subject: Subject) -> None:
    rounds: list[int] = []
    subject.heard.clear()

    def count() -> None:
        rounds.append(len(subject.heard))
        subject.loop.call_soon(count)

    subject.loop.call_soon(count)
    subject.sock.sendall((json.dumps(CONTROL).encode() + b"\n") * 1000)
    eventually(lambda: (turn(subject.loop), len(subject.heard) == 1000)[1])
    assert max(after - before for before, after in pairwise(rounds)) < 300


def test_takes_no_descriptors_of_a_worker(subject: Subject) -> None:
    before = psutil.Process().num_fds()
    with open(os.devnull) as file:
        for byte in b'+{"type": "ready", "graph": ""}\n':
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 50))
            subject.sock.sendmsg([bytes([byte])], [rights])
            turn(subject.loop)
    assert psutil.Process().num_fds() <= before
    eventually(subject.is_ended)


# -- their channel --------------------------------------------------------------------------------------------------


class End:
    """One side: what it has heard, and the text that each descriptor leads to."""

    def __init__(self, loop: Any, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.heard: list[tuple[Any, str | None]] = []
        self.channel = Channel(loop, sock, self._hear, lambda: None)

    def send(self, number: int, text: str | None, padding: int) -> None:
        message = {"number": number, "padding": "ö" * padding}
        if text is None:
            self.channel.send(message)
            return
        descriptor = os.memfd_create("text")
        os.write(descriptor, text.encode())
        self.channel.send(message, descriptor)
        os.close(descriptor)  # the other side has a copy

    def _hear(self, line: bytes, descriptor: int) -> None:
        text = None
        if descriptor >= 0:
            text = os.pread(descriptor, 100, 0).decode()
            os.close(descriptor)
        self.heard.append((json.loads(line)["number"], text))


def test_each_descriptor_arrives_with_its_message() -> None:
    """Messages of all sizes, those larger than the socket's buffer too."""
    loop = new_loop(is_fast=False)
    ends = [End(loop, sock) for sock in socket.socketpair()]
    before = psutil.Process().num_fds()
    wanted = [(number, str(number) if number % 3 else None) for number in range(40)]
    for end in ends:
        for number, text in wanted:
            end.send(number, text, 2**14 if number % 20 == 1 else number)
    eventually(lambda: (turn(loop, 0), all(len(end.heard) == 40 for end in ends))[1])
    assert [end.heard for end in ends] == [wanted] * 2
    assert psutil.Process().num_fds() <= before, "descriptors are left"
    for end in ends:
        end.channel.close()
    loop.close()


def test_messages_after_one_whose_handler_raises_arrive_with_their_descriptors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All of them are read at once; the one that raises has a descriptor of its own, or none."""
    loop, heard, ended = new_loop(is_fast=False), list[tuple[str, str]](), list[bool]()
    ours, theirs = socket.socketpair()

    def hear(line: bytes, descriptor: int) -> None:
        text = ""
        if descriptor >= 0:
            text = os.pread(descriptor, 100, 0).decode()
            os.close(descriptor)
        name = json.loads(line)["name"]
        if name.startswith("bad"):
            raise RuntimeError("can't start new thread")
        heard.append((name, text))

    sender = Channel(loop, ours, lambda line, descriptor: None, lambda: None)
    receiver = Channel(loop, theirs, hear, lambda: ended.append(True))
    before = psutil.Process().num_fds()
    for name, text in [("bad", ""), ("a", ""), ("b", "of b"), ("bad with one", "lost"), ("c", ""), ("d", "of d")]:
        descriptor = os.memfd_create("text") if text else -1
        if text:
            os.write(descriptor, text.encode())
        sender.send({"name": name}, descriptor)
        if text:
            os.close(descriptor)
    sender.send({"name": "bad at the end"})
    sender.close()
    receiver.drain()
    assert heard == [("a", ""), ("b", "of b"), ("c", ""), ("d", "of d")]
    assert caplog.messages == ["internal error while a message was handled"] * 3
    assert ended == [True]
    assert psutil.Process().num_fds() == before - 2, "descriptors are left"
    loop.close()


class SlowSocket:
    """Each send takes ``seconds`` of the clock that it sets, for ``takes`` bytes; without any it times out."""

    def __init__(self, clock: list[float], takes: int, seconds: float) -> None:
        self.clock, self.takes, self.seconds = clock, takes, seconds
        self.timeout, self.timeouts = 0.0, list[float]()

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def sendmsg(self, data: list[memoryview], extra: Any) -> int:
        if not self.timeout:
            raise BlockingIOError
        self.timeouts.append(round(self.timeout, 3))
        self.clock[0] += self.seconds if self.takes else self.timeout
        if not self.takes:
            raise TimeoutError
        return self.takes

    def fileno(self) -> int:
        return 0

    def setblocking(self, is_blocking: bool) -> None:
        self.timeout = 0.0


@pytest.mark.parametrize(
    ("takes", "timeouts"), [(0, [2.0]), (1, [2.0, 1.25, 0.5])], ids=["nothing", "a byte at a time"]
)
def test_last_messages_have_one_time_limit_together(
    takes: int, timeouts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side is stopped, or reads slowly: what is left then counts as unsent."""
    clock = [100.0]
    monkeypatch.setattr(channel_module, "monotonic", lambda: clock[0])
    sock: Any = SlowSocket(clock, takes, 0.75)
    channel = Channel(mock.Mock(), sock, lambda line, descriptor: None, lambda: None)
    for number in range(256):
        channel.send({"number": number})
    channel.finish(2.0)
    assert (sock.timeouts, channel.unsent) == (timeouts, 256)


# -- who gets connections -------------------------------------------------------------------------------------------


class Taker:
    """Stands for a worker that is ready."""

    def __init__(self) -> None:
        self.connections: set[int] = set()
        self.stats: dict[str, Any] = {}

    def give(self, sock: socket.socket, slot: int, is_refused: bool) -> None:
        self.connections.add(slot)


def test_new_connections_wait_for_the_replacement_of_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """What killed it may come again: those whose worker lives keep it."""
    monkeypatch.setattr(connections_module, "HOLD_SECONDS", WAIT)
    loop, survivor, successor = new_loop(is_fast=False), Taker(), Taker()
    ready: list[Any] = [survivor]
    is_recovering = False
    listener = socket.create_server(("127.0.0.1", 0))
    connections = Connections(loop, listener, Options("test"), IDL, lambda: ready, lambda: is_recovering)
    connections.open()

    def connect() -> socket.socket:
        count = connections.figures()[0]["open"]
        client = socket.create_connection(listener.getsockname())
        eventually(lambda: turn(loop) or connections.figures()[0]["open"] > count)
        return client

    clients = [connect()]
    (old,) = survivor.connections
    is_recovering = True
    clients.append(connect())
    connections.gone(ready[0], old, False)
    assert survivor.connections == {old}
    ready.append(successor)
    is_recovering = False
    connections.became_ready(ready[1])
    assert len(successor.connections - {old}) == len(successor.connections) == 1
    connections.drain()
    connections.close()
    for client in clients:
        client.close()
    turn(loop)
    loop.close()
