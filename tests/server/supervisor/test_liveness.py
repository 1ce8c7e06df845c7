"""What the supervisor makes of a worker's signs of life and of what it says, and whom it replaces when."""

from __future__ import annotations

import array
import errno
import json
import multiprocessing
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from fakes import WAIT
from service import IDL, LIGHT, Client, Process, eventually, told_at, turn
from test_figures import ONE
from thrift.Thrift import TApplicationException
from torchpipe_server.front.journal import SLOT_BYTES, Journal, SharedMemory
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor.children import forker
from torchpipe_server.supervisor.children.child import Child
from torchpipe_server.supervisor.children.fleet import FIRST_DELAY, Fleet
from torchpipe_server.supervisor.children.forker import Forked, Forker
from torchpipe_server.supervisor.connections import Connections
from torchpipe_server.worker.channel import LINE_BYTES
from torchpipe_server.worker.heartbeat import BEAT_SECONDS, Heart, Heartbeat, Signs

STATS = {**ONE, "log_lines_dropped": 0, "gpus": []}


class Subject:
    """A `Child` whose process is a `sleep`; what a worker would say and show comes from the test."""

    def __init__(self) -> None:
        self.loop = new_loop(is_fast=False)
        self.process = subprocess.Popen(["sleep", "600"])
        ours, self.sock = socket.socketpair()
        self.heartbeat = Heartbeat()
        self.ended: list[Child] = []
        process = SimpleNamespace(pid=self.process.pid)
        read_end, self.stderr = multiprocessing.Pipe(duplex=False)
        forked = Forked(process, os.pidfd_open(process.pid), ours, self.heartbeat, read_end)
        self.child = Child(self.loop, "worker 0", forked, lambda child, message: None, self.ended.append)

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        turn(self.loop)

    def show(self, **signs: float) -> None:
        self.heartbeat.write(self.heartbeat.read()._replace(**signs))

    def look(self, times: int = 1, hang_seconds: float = 2.0) -> list[Any]:
        return [self.child.look(hang_seconds) for _ in range(times)]

    def is_ended(self) -> bool:
        turn(self.loop)
        return bool(self.ended)


@pytest.fixture
def subject() -> Iterator[Subject]:
    made = Subject()
    made.say({"type": "ready", "graph": "<svg/>"})
    assert made.child.is_ready
    yield made
    made.process.kill()
    made.process.wait(WAIT)
    made.child.close()
    made.sock.close()
    made.stderr.close()
    made.loop.close()


# -- signs of life --------------------------------------------------------------------------------------------------


def test_the_loop_is_at_one_thing_for_as_long_as_nothing_else_begins() -> None:
    loop, heartbeat = new_loop(is_fast=False), Heartbeat()
    nodes = {"a": {"instances": 2, "alive": 1, "oldest_batch_s": 0.5}, "b": {"instances": 1, "alive": 1}}
    nodes["b"]["oldest_batch_s"] = 7.0
    heart = Heart(heartbeat, loop, lambda: {"nodes": nodes})
    for _ in range(4):
        heart.beat()
    assert heartbeat.read() == Signs(4, 3 * BEAT_SECONDS, 7.0, 1)
    turn(loop)
    heart.beat()
    assert heartbeat.read().loop_s == 0.0
    loop.close()


def test_a_worker_without_a_sign_of_life_is_silent_after_hang_seconds(subject: Subject) -> None:
    subject.show(beats=1)
    assert subject.look(4) == [None, None, None, "silent"]
    subject.show(beats=2)
    assert subject.look(1) == [None]
    assert subject.look(10, hang_seconds=0.0) == [None] * 10
    assert not subject.child.responds


def test_a_busy_worker_is_not_taken_for_a_stuck_one(subject: Subject) -> None:
    for beat in range(1, 20):
        subject.show(beats=beat, loop_s=1.5)
        assert subject.look() == [None]
    assert subject.child.responds
    subject.show(beats=20, loop_s=2.5)
    assert subject.look() == ["stuck"]
    subject.show(beats=21, loop_s=BEAT_SECONDS)  # a loop that has nothing to do
    assert subject.look(hang_seconds=0.1) == [None]


def test_a_batch_is_hung_at_the_second_look(subject: Subject) -> None:
    """That of a machine that slept is over by then."""
    for beats, batch_s in ((1, 9e3), (2, 0.1), (3, 9e3)):
        subject.show(beats=beats, batch_s=batch_s)
        assert subject.look() == [None]
    subject.show(beats=4)
    assert subject.look() == ["hung_batch"]


def test_a_worker_without_its_link_gets_another_one_at_the_second_look(subject: Subject) -> None:
    child, mine = subject.child, socket.socket()
    subject.heartbeat.tell_linked(False)
    assert not child.responds
    for beats in (1, 3):
        subject.show(beats=beats)
        assert (subject.look(), child.needs_link) == ([None], False)
        subject.show(beats=beats + 1)
        assert (subject.look(), child.needs_link) == ([None], True)
        child.link(mine)
        assert not child.needs_link
    subject.heartbeat.tell_linked(True)
    assert child.responds
    subject.look(2)
    assert not child.needs_link
    mine.close()


def test_an_instance_that_is_dead_is_told_also_without_hang_seconds(subject: Subject) -> None:
    subject.show(beats=1, dead=1)
    assert subject.look(hang_seconds=0.0) == ["dead_instance"]
    subject.child.release("dead_instance")
    assert subject.look(hang_seconds=0.0) == [None], "a worker that ends loses its instances"


# -- what a worker says ---------------------------------------------------------------------------------------------


def test_what_a_worker_says_in_order_is_taken(subject: Subject) -> None:
    subject.child.connections.update({3, 4})
    subject.child.ask_stats()
    subject.say({"type": "closed", "slot": 3}, {"type": "released", "slot": 4}, {"type": "stats", "stats": STATS})
    subject.say({"type": "end", "answered": True, "stats": STATS})
    assert (subject.child.answered, subject.child.stats["inflight"]) == (True, 1)
    assert subject.process.poll() is None


def node(**changes: Any) -> dict[str, Any]:
    return {"type": "end", "answered": True, "stats": {**STATS, "nodes": {"model": STATS["nodes"]["model"] | changes}}}


HOSTILE = {
    "no JSON": b"\xff\xfe\n",
    "no object": b"[1]\n",
    "nested": b"[" * 100_000 + b"\n",
    "no type": b"{}\n",
    "a type that is none": {"type": ["ready"]},
    "unknown": {"type": "connection", "slot": 1},
    "ready again": {"type": "ready", "graph": ""},
    "failed when ready": {"type": "failed", "message": ""},
    "another's connection": {"type": "closed", "slot": 5},
    "no slot": {"type": "released"},
    "slot of a wrong type": {"type": "closed", "slot": [3]},
    "slot true": {"type": "closed", "slot": True},
    "figures nobody asked for": {"type": "stats", "stats": STATS},
    "no figures": {"type": "end", "answered": True, "stats": {}},
    "answered of a wrong type": {"type": "end", "answered": 1, "stats": STATS},
    "NaN": node(queue_ms=float("nan")),
    "infinite": node(compute_ms=float("inf")),
    "negative": node(requests=-1),
    "a short histogram": node(histograms={"queue": [], "batch_wait": [], "compute": []}),
    "a size that is none": node(batch_sizes={"x": 1}),
    "a size out of bounds": node(batch_sizes={"9" * 4000: 1}),
    "max out of bounds": node(max=2**60),
    "a line without end": b"x" * (LINE_BYTES + 2**20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_worker_that_says_what_none_says_is_ended(subject: Subject, name: str) -> None:
    said = HOSTILE[name]
    data = said if isinstance(said, bytes) else json.dumps(said).encode() + b"\n"
    subject.sock.setblocking(False)
    while data and not subject.ended:
        try:
            data = data[subject.sock.send(data) :]
        except OSError:  # full, or closed by the other side
            turn(subject.loop)
    eventually(subject.is_ended)
    assert subject.process.wait(WAIT) < 0


def test_descriptors_of_a_worker_are_not_taken(subject: Subject) -> None:
    before = psutil.Process().num_fds()
    line = json.dumps({"type": "ready", "graph": "", "descriptor": True}).encode() + b"\n"
    with open(os.devnull) as file:
        for byte in line:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 50))
            subject.sock.sendmsg([bytes([byte])], [rights])
            turn(subject.loop)
    assert psutil.Process().num_fds() <= before
    eventually(subject.is_ended)


def test_what_a_dead_worker_has_left_in_the_journal_may_be_anything() -> None:
    journal = Journal(256)
    for first in range(256):
        journal._memory.view[first * SLOT_BYTES : (first + 1) * SLOT_BYTES] = bytes([0, 1, first, 56]).ljust(
            SLOT_BYTES, b"\xff"
        )
        journal.read(first)
    journal.close()


def test_nobody_can_make_shared_memory_shorter() -> None:
    memory = SharedMemory("test", 100)
    with pytest.raises(PermissionError):
        os.ftruncate(memory._fd, 0)
    memory.close()


# -- who is replaced when -------------------------------------------------------------------------------------------


class Fleets:
    """A `Fleet` that starts nothing: `started` has the workers that it wanted to start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int = 2) -> None:
        self.loop, self.journal = new_loop(is_fast=False), Journal(1)
        watcher: Any = SimpleNamespace(died=lambda child: None, became_ready=lambda child: None)
        self.fleet = Fleet(self.loop, Options("test", workers=workers), self.journal, {}, dict, watcher)
        self.started: list[int] = []
        monkeypatch.setattr(self.fleet, "_start", lambda worker: self.started.append(worker.index))
        self.fleet._has_begun = True

    def die(self, has_served: bool) -> None:
        """The first worker dies as soon as it is ready."""
        child: Any = Dying()
        child.has_served, child.ready_at = has_served, time.monotonic()
        self.fleet.workers[0].child = child
        self.fleet._ended(child)


class Dying:
    """Stands for a worker that was ready."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] = {}
        self.failure, self.reason = "", "died"
        self.clients: set[Any] = set()


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleets]:
    made = Fleets(monkeypatch)
    yield made
    made.loop.close()
    made.journal.close()


def test_a_worker_that_served_is_replaced_at_once_however_often_it_dies(fleets: Fleets) -> None:
    """A client that keeps sending what kills a worker must not keep the others waiting."""
    for _ in range(50):
        fleets.die(has_served=True)
    assert fleets.started == [0] * 50
    assert fleets.fleet.is_recovering
    assert (fleets.fleet.workers[0].restarts, fleets.fleet.restarts) == (50, {"died": 50})


def test_a_worker_that_dies_without_a_connection_is_replaced_later(fleets: Fleets) -> None:
    fleets.die(has_served=False)
    assert fleets.started == []
    turn(fleets.loop, 2 * FIRST_DELAY)
    assert fleets.started == [0]
    assert not fleets.fleet.is_recovering


class Taker:
    """Stands for a worker that is ready."""

    def __init__(self) -> None:
        self.connections: set[int] = set()
        self.stats: dict[str, Any] = {}

    def give(self, sock: socket.socket, slot: int, is_refused: bool) -> None:
        self.connections.add(slot)


def test_new_connections_wait_for_the_next_worker_where_one_has_died() -> None:
    """What killed it may come again: those whose worker lives keep it."""
    loop, survivor, successor = new_loop(is_fast=False), Taker(), Taker()
    ready, is_recovering = [survivor], False
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connections = Connections(loop, listener, Options("test"), IDL, lambda: ready, lambda: is_recovering)  # type: ignore[arg-type, return-value]
        pairs = [socket.socketpair() for _ in range(2)]
        connections._take(pairs[0][0], "127.0.0.1")
        (old,) = survivor.connections
        is_recovering = True
        connections._take(pairs[1][0], "127.0.0.1")
        (new,) = connections._held
        connections.released(survivor, old)  # type: ignore[arg-type]
        assert (survivor.connections, set(connections._held)) == ({old}, {new})
        ready.append(successor)
        is_recovering = False
        connections.became_ready(successor)  # type: ignore[arg-type]
        assert (successor.connections, connections._held) == ({new}, {})
        connections.close()
        for _, client in pairs:
            client.close()
    loop.close()


def test_a_fork_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that workers are forked from may be stopped."""
    killed: list[int] = []
    monkeypatch.setattr(forker, "_kill_fork_server", lambda: killed.append(1))
    loop, journal = new_loop(is_fast=False), Journal(1)
    subject = Forker(loop, Options("test", hang_seconds=2.0), journal)
    subject.look(1.0)
    with subject._lock:
        for _ in range(100):
            subject.look(1.0)
        assert not killed, "it may have to import everything first"
        subject._looks, subject._has_forked = 0, True
        for _ in range(3):
            subject.look(1.0)
    assert killed == [1]
    loop.close()
    journal.close()


def none_is_left(pid: int) -> int:
    raise OSError(errno.EMFILE, "none is left")


def test_a_process_for_which_the_supervisor_has_no_descriptor_is_ended_and_its_start_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise nobody would know of it, and nobody start another one."""
    process, failed = mock.Mock(pid=1), []
    context = mock.Mock(Process=mock.Mock(return_value=process))
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: context)
    monkeypatch.setattr(os, "pidfd_open", none_is_left)
    loop, journal = new_loop(is_fast=False), Journal(1)
    before = psutil.Process().num_fds()
    subject = Forker(loop, Options("test"), journal)
    subject._fork("worker", 0, {}, lambda: True, pytest.fail, failed.append)
    turn(loop)
    assert [error.errno for error in failed] == [errno.EMFILE]
    process.kill.assert_called_once()
    failed.clear()
    context.reset_mock()
    assert psutil.Process().num_fds() <= before
    subject.close()
    loop.close()
    journal.close()


# -- a service ------------------------------------------------------------------------------------------------------

CODE = '''
import time
from pathlib import Path

import thriftpy2
from torchpipe_py import Backend, register_backend
from torchpipe_server import Handler

@register_backend
class Steered(Backend):
    """`hang` never returns."""

    def forward(self, items):
        for item in items:
            if item["data"] == b"hang":
                time.sleep(10**6)
            item["result"] = (item["data"].decode(), 1.0)

class Slow(Handler):
    service = thriftpy2.load(str(Path(__file__).with_name("slow.thrift")), "slow_thrift").InferenceService

    def ping(self):
        """Keeps the I/O thread."""
        time.sleep(0.9)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code_of_a_test.py").write_text(CODE)
    (tmp_path / "slow.thrift").write_text("service InferenceService { void ping() }\n")
    (tmp_path / "steered.toml").write_text('[node]\nbackend = "Steered"\ninstance_num = 2\n')
    return tmp_path


def serve(folder: Path, *args: str) -> Process:
    config, path = str(folder / "steered.toml"), f"{folder}{os.pathsep}{LIGHT}"
    return Process("--import", "code_of_a_test", *args, config=config, env={"PYTHONPATH": path})


def test_a_backend_that_does_not_return_has_its_worker_replaced(folder: Path) -> None:
    with serve(folder, "--hang-seconds", "3", "--http-port", "0") as process:
        port = process.wait_started().port
        address = process.process.stdout.readline().split()[0]
        before = process.workers
        with Client(port) as one, Client(port) as other, Client(port) as queued:
            waiting = [(client, client.send_batch(b"hang")) for client in (one, other)]
            waiting.append((queued, queued.send_batch(b"fine")))
            for client, seqid in waiting:
                with pytest.raises(IDL.InferenceError) as caught:
                    client.receive(seqid)
                assert caught.value.code in ("worker_died", "unavailable")
            eventually(lambda: process.workers != before and len(process.workers) == 1)
            eventually(lambda: told_at(address + "ready")[0] == 200)
            assert queued.infer_batch(b"fine") == ("fine", 1.0)
        _, metrics = told_at(address + "metrics")
        assert 'torchpipe_worker_restarts_total{reason="hung_batch"} 1.0' in metrics
        process.signal()
        assert process.wait() == 0, process.stderr


def test_a_worker_whose_loop_is_busy_is_left_alone(folder: Path) -> None:
    """Several clients keep its I/O thread for longer than `--hang-seconds`, none of them alone."""
    with serve(folder, "--hang-seconds", "4", "--handler", "code_of_a_test:Slow") as process:
        port = process.wait_started().port
        before = process.workers
        clients = [Client(port) for _ in range(5)]
        for client in clients:
            with pytest.raises(TApplicationException):
                client.call("unknown")  # the worker has the connection
        seqids = [client.send("ping") for client in clients]
        for client, seqid in zip(clients, seqids, strict=True):
            client.receive(seqid)
            client.close()
        assert process.workers == before
        assert "replacing" not in process.stderr


def test_a_worker_that_is_not_wanted_any_more_is_not_forked(monkeypatch):
    """A hundred reloads in a row leave the forks of one."""
    forked: list[int] = []
    loop, journal = new_loop(is_fast=False), Journal(4)
    subject = Forker(loop, Options("test"), journal)
    monkeypatch.setattr(subject, "_start_process", lambda role, index, tables: forked.append(index))
    with subject._lock:
        for index in range(100):
            subject.fork(
                "worker", index, {}, partial(int.__eq__, index, 99), lambda child: loop.stop(), lambda error: None
            )
        assert not forked
    loop.run_forever()
    assert forked == [99]
    for thread in threading.enumerate():
        if thread.name == "torchpipe-fork":
            thread.join(30)
    loop.close()
    journal.close()
