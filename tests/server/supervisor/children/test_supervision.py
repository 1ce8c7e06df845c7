"""What the supervisor does about its workers in awkward moments."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from fakes import WAIT, in_threads
from service import IDL, LIGHT, Client, Process, connect, eventually, on_its_way, told_at
from thrift.Thrift import TApplicationException
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import new_loop
from torchpipe_server.options import Options
from torchpipe_server.supervisor.children.fleet import START_ATTEMPTS, Fleet, WorkerSlot
from torchpipe_server.worker.channel import Channel

BACKENDS = '''
import os, pathlib, subprocess, time
from torchpipe_py import Backend, register_backend

HERE = pathlib.Path(__file__).parent

@register_backend
class Steered(Backend):
    """The data comes back as label; `block` waits for ever, `keep` leaves a process that holds all descriptors."""

    def setup(self):
        if "BLOCK_SETUP" in os.environ and self.config.instance == 0:
            (HERE / "in-setup").touch()
            time.sleep(60)

    def forward(self, items):
        for item in items:
            data = item["data"]
            if data == b"keep":
                child = subprocess.Popen(["sleep", "60"], close_fds=False)
                (HERE / "kept").write_text(str(child.pid))
            if data == b"block":
                (HERE / f"blocked-{os.getpid()}").touch()
                time.sleep(60)
            item["result"] = (data.decode(), 1.0)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steered.py").write_text(BACKENDS)
    (tmp_path / "steered.toml").write_text('[node]\nbackend = "Steered"\ninstance_num = 4\n')
    return tmp_path


def serve(folder: Path, *args: str, **env: str) -> Process:
    env = {"PYTHONPATH": LIGHT, **env}
    return Process("--import", str(folder / "steered.py"), *args, config=str(folder / "steered.toml"), env=env)


def test_a_lost_request_is_answered_once_though_the_next_worker_dies_as_well(folder):
    """The second worker is stopped, so that it never sees the connection it is given; what the first one had noted of
    it must not be taken for the second one's."""
    with serve(folder, "--workers", "2") as process, Client(process.wait_started().port) as client:
        seqid = client.send_batch(b"block")
        eventually(lambda: list(folder.glob("blocked-*")))
        first = int(next(folder.glob("blocked-*")).name.partition("-")[2])
        (second,) = {*process.workers} - {first}
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive(seqid)
        assert caught.value.code == "worker_died"
        os.kill(second, signal.SIGKILL)
        eventually(lambda: is_pinged(client), "its connection is not served any more")
        client.ping()


def test_questions_over_http_do_not_make_a_silent_worker_a_hanging_one(folder):
    with serve(folder, "--http-port", "0", "--hang-seconds", "30") as process:
        process.wait_started()
        address = process.process.stdout.readline().split()[0]
        (worker,) = process.workers
        os.kill(worker, signal.SIGSTOP)
        try:
            in_threads(40, lambda index: told_at(address + "live"))
        finally:
            os.kill(worker, signal.SIGCONT)
        with Client(process.port) as client:
            client.ping()
        assert process.workers == [worker]


def test_the_figures_are_told_before_any_worker_has_told_its_own(folder):
    """A probe of a service whose model takes minutes to load."""
    with serve(folder, "--http-port", "0", BLOCK_SETUP="1") as process:
        eventually((folder / "in-setup").exists)
        port = http_port(process)
        figures = json.loads(told_at(f"http://127.0.0.1:{port}/stats")[1])
        assert (figures["state"], figures["workers"][0]["state"]) == ("starting", "starting")
        assert sum(figures["requests"]["latency"]["counts"]) == 0
        process.signal()
        assert process.wait() == 0


def http_port(process: Process) -> int:
    """The one of its two ports at which HTTP is answered, before it has said so. Nobody answers at the other yet."""
    listening = [each.laddr.port for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
    with ExitStack() as stack:
        ports = {stack.enter_context(connect(port)): port for port in listening}
        for sock in ports:
            sock.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        answered, _, _ = select.select(list(ports), [], [], WAIT)
        (sock,) = answered
        assert sock.recv(4) == b"HTTP"
        return ports[sock]


def test_a_worker_whose_child_holds_its_descriptors_is_replaced(folder):
    """The channel stays open then: the process's own end tells."""
    with serve(folder) as process, Client(process.wait_started().port) as client:
        client.infer_batch(b"keep")
        kept, (worker,) = int((folder / "kept").read_text()), process.workers
        try:
            os.kill(worker, signal.SIGKILL)
            eventually(lambda: is_pinged(client), "no worker comes back")
            assert process.workers != [worker]
        finally:
            os.kill(kept, signal.SIGKILL)


def test_the_process_that_workers_are_forked_from_dies(folder):
    with serve(folder) as process, Client(process.wait_started().port) as client:
        (worker,) = process.workers
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: is_served(client), "no worker comes back")
        process.signal()
        assert process.wait() == 0, process.stderr


def is_served(client: Client) -> bool:
    try:
        return client.infer_batch(b"x") == ("x", 1.0)
    except IDL.InferenceError as error:
        if error.code != "unavailable":
            raise
        return False


def is_pinged(client: Client) -> bool:
    """While a worker starts, which may take long, requests are answered with an error on the same connection."""
    try:
        client.ping()
    except TApplicationException as error:
        if "Unavailable" not in error.message:
            raise
        return False
    return True


def test_a_worker_that_is_killed_at_the_stop_with_nothing_to_answer_is_no_loss(folder):
    with serve(folder, "--workers", "2", "--log-level", "debug") as process:
        process.wait_started()
        worker, _ = process.workers
        os.kill(worker, signal.SIGSTOP)
        process.signal()
        eventually(lambda: "stopping" in process.stderr)
        os.kill(worker, signal.SIGKILL)
        assert process.wait() == 0
        assert "; requests lost: 0" in process.stderr  # the exit code as well, where the system has told it by then


def test_what_a_worker_had_not_read_when_it_was_killed_at_the_stop_is_lost(folder):
    with serve(folder, "--log-level", "debug") as process, Client(process.wait_started().port) as client:
        client.ping()
        (worker,) = process.workers
        os.kill(worker, signal.SIGSTOP)
        client.send_batch(b"unread")
        eventually(lambda: not on_its_way(client.sock))
        process.signal()
        eventually(lambda: "stopping" in process.stderr)
        os.kill(worker, signal.SIGKILL)
        assert process.wait() == 1
        assert "; requests lost: 1" in process.stderr


def test_the_last_words_are_heard_though_the_channel_was_full():
    """A worker that ends has no loop any more which would send them later."""
    ours, theirs = socket.socketpair()
    loop = new_loop(is_fast=False)
    channel = Channel(loop, ours, lambda message, descriptor: None, lambda: None)
    for number in range(5000):
        channel.send({"number": number})
    heard: list[bytes] = []
    with theirs, ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: heard.extend(theirs.makefile("rb")))
        channel.finish(WAIT)
        channel.close()
        reader.result(WAIT)
    loop.close()
    assert len(heard) == 5000


def test_reloads_one_upon_the_other_leave_no_worker_behind():
    """A worker that is forked for a reload which starts over meanwhile belongs to nobody, and has to end."""
    with Process("--workers", "2") as process, Client(process.wait_started().port) as client:
        before = process.workers
        for _ in range(4):
            process.signal(signal.SIGHUP)
            time.sleep(0.05)  # the forks of the one before are under way
        eventually(
            lambda: len(now := process.workers) == 2 and not set(now) & set(before), "more than two, or old ones"
        )
        client.ping()
        process.signal()
        assert process.wait() == 0


def test_workers_that_look_alike_are_not_the_same():
    """A worker forked for a reload that was given up would be taken for one of the next reload."""
    assert WorkerSlot(0, None) != WorkerSlot(0, None)
    assert WorkerSlot(0, None) not in [WorkerSlot(0, None)]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_start_for_which_the_system_has_nothing_left_is_no_failed_one(monkeypatch, number):
    """However often: a worker is given up for what is wrong with it."""
    loop, journal = new_loop(is_fast=False), Journal(1)
    watcher: Any = SimpleNamespace(failed=lambda problem: pytest.fail(problem))
    fleet = Fleet(loop, Options("test", workers=1), journal, {}, dict, watcher)
    error = OSError(number, os.strerror(number)) if number != errno.EAGAIN else RuntimeError("can't start new thread")

    def start(thread: threading.Thread) -> None:
        if isinstance(error, RuntimeError):
            raise error
        thread._args[-1](error)  # type: ignore[attr-defined]

    monkeypatch.setattr(threading.Thread, "start", start)
    (worker,) = fleet.workers
    for _ in range(2 * START_ATTEMPTS):
        fleet._start(worker)
        assert not worker.is_given_up
    assert worker.failures == 0
    loop.close()
    journal.close()


def test_a_link_for_which_the_supervisor_has_no_descriptor_is_made_at_the_next_look(monkeypatch) -> None:
    loop, journal = new_loop(is_fast=False), Journal(1)
    tables = {"global": {}, "model": {"backend": "Identity", "shared": True}}
    fleet = Fleet(loop, Options("test", workers=2), journal, tables, dict, mock.Mock())
    (engine,), (worker, _) = fleet.engines, fleet.workers
    engine.child, worker.child = mock.Mock(is_ready=True), mock.Mock(needs_link=False)
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", mock.Mock(side_effect=OSError(errno.EMFILE, "none is left")))
        fleet._link(worker)
    assert worker.child.needs_link
    engine.child.link.assert_not_called()
    engine.child.is_ready = False  # it has died: the next one gets a link as soon as it is ready
    fleet._link_again()
    worker.child.link.assert_not_called()
    engine.child.is_ready = True
    fleet._link_again()
    engine.child.link.assert_called_once_with(mock.ANY, worker.child)
    worker.child.link.assert_called_once()
    loop.close()
    journal.close()


def test_a_service_whose_workers_would_wait_for_ever_for_an_engine_process_ends() -> None:
    """One of two is killed whenever it starts; workers are started when both are ready."""
    loop, journal, failed = new_loop(is_fast=False), Journal(1), []
    watcher: Any = SimpleNamespace(failed=failed.append, died=lambda child: None)
    tables = {"global": {}, "model": {"backend": "Identity", "shared": True}}
    fleet = Fleet(loop, Options("test", workers=2, engines=2), journal, tables, dict, watcher)
    ready, dying = fleet.engines
    ready.child = mock.Mock(is_ready=True, clients=set())
    for _ in range(START_ATTEMPTS):
        assert failed == []
        dying.child = mock.Mock(stats={}, clients=set(), has_served=False, ready_at=0.0, failure="")
        fleet._ended(dying.child)
    assert failed == [f"engine process 1 cannot be started, after {START_ATTEMPTS} attempts"]
    loop.close()
    journal.close()


def test_a_reload_ends_when_the_engine_process_that_goes_on_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers would wait for that one for ever, and the service would not end while they do."""
    loop, journal, failed = new_loop(is_fast=False), Journal(1), []
    watcher: Any = SimpleNamespace(failed=failed.append, died=lambda child: None)
    tables = {"global": {}, "model": {"backend": "Identity", "shared": True}}
    fleet = Fleet(loop, Options("test", workers=2), journal, tables, lambda: tables, watcher)
    monkeypatch.setattr(fleet, "_start", lambda worker: None)
    (engine,) = fleet.engines
    for slot in fleet._slots:
        slot.child = mock.Mock(is_ready=True, clients=set())
    fleet._has_begun = True
    fleet.reload()
    assert fleet._next is not None
    assert fleet._next.engines == [engine]
    for _ in range(START_ATTEMPTS):
        assert (failed, fleet._next is None) == ([], False)
        engine.child = mock.Mock(stats={}, clients=set(), has_served=False, ready_at=0.0, failure="")
        fleet._ended(engine.child)
    assert fleet._next is None
    assert failed == [f"no engine process can be started, after {START_ATTEMPTS} attempts each"]
    loop.close()
    journal.close()
