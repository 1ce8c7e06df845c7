"""What the supervisor does about its workers in awkward moments."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from kit.clients import IDL, Client, on_its_way
from kit.services import LIGHT, Process, told_at
from kit.waits import eventually
from thriftpy2.thrift import TApplicationException

BACKENDS = '''
import os, pathlib, subprocess, time

import thriftpy2
from torchpipe_py import Backend, register_backend
from torchpipe_server import Handler

HERE = pathlib.Path(__file__).parent

@register_backend
class Steered(Backend):
    """The data comes back as label; `block` waits for ever, `keep` leaves a process that holds all descriptors."""

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

class Slow(Handler):
    service = thriftpy2.load(str(HERE / "slow.thrift"), "slow_thrift").InferenceService

    def ping(self):
        """Keeps the I/O thread."""
        time.sleep(0.9)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steered.py").write_text(BACKENDS)
    (tmp_path / "slow.thrift").write_text("service InferenceService { void ping() }\n")
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


def test_a_backend_that_does_not_return_has_its_worker_replaced(folder):
    with serve(folder, "--hang-seconds", "3", "--http-port", "0") as process:
        port = process.wait_started().port
        address = process.process.stdout.readline().split()[0]
        before = process.workers
        with ExitStack() as stack:
            clients = [stack.enter_context(Client(port)) for _ in range(5)]
            data = [b"block"] * 4 + [b"fine"]  # which waits for an instance
            for client, seqid in [(client, client.send_batch(one)) for client, one in zip(clients, data, strict=True)]:
                with pytest.raises(IDL.InferenceError) as caught:
                    client.receive(seqid)
                assert caught.value.code in ("worker_died", "unavailable")
            eventually(lambda: process.workers != before and len(process.workers) == 1)
            eventually(lambda: told_at(address + "ready")[0] == 200)
            assert clients[-1].infer_batch(b"fine") == ("fine", 1.0)
        _, metrics = told_at(address + "metrics")
        assert 'torchpipe_worker_restarts_total{reason="hung_batch"} 1.0' in metrics
        process.signal()
        assert process.wait() == 0, process.stderr


def test_a_worker_whose_loop_is_busy_is_left_alone(folder):
    """Several clients keep its I/O thread for longer than `--hang-seconds`, none of them alone."""
    with serve(folder, "--hang-seconds", "4", "--handler", str(folder / "steered.py") + ":Slow") as process:
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
