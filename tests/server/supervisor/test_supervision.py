"""What the supervisor does about its workers in awkward moments."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from kit.clients import IDL, Client, on_its_way
from kit.monitored import Monitored
from kit.services import SteeredProcess
from kit.waits import eventually
from thriftpy2.thrift import TApplicationException


class Service(Monitored, SteeredProcess):
    pass


def is_pinged(client: Client) -> bool:
    """While a worker starts, which may take long, requests are answered with an error on the same connection."""
    try:
        client.ping()
    except TApplicationException as error:
        if "Unavailable" not in error.message:
            raise
        return False
    return True


def test_a_lost_request_is_answered_once_though_the_next_worker_dies_as_well(tmp_path: Path) -> None:
    """The second worker is stopped, so that it never sees the connection it is given; what the first one had noted of
    it must not be taken for the second one's."""
    with Service(tmp_path, "--workers", "2") as service, Client(service.wait_started().port) as client:
        seqid = client.send_batch(b"block")
        service.wait_entered()
        eventually(lambda: service.inflight)
        (first,) = [worker["pid"] for worker in service.stats["workers"] if worker["inflight"]]
        (second,) = {*service.workers} - {first}
        os.kill(second, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive(seqid)
        assert caught.value.code == "worker_died"
        os.kill(second, signal.SIGKILL)
        eventually(lambda: is_pinged(client), "its connection is not served any more")
        client.ping()


def test_the_process_that_workers_are_forked_from_dies(tmp_path: Path) -> None:
    with Service(tmp_path) as service, Client(service.wait_started().port) as client:
        (worker,) = service.workers
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: is_pinged(client), "no worker comes back")
        service.signal()
        assert service.wait() == 0, service.stderr


def test_what_a_worker_had_not_read_when_it_was_killed_at_the_stop_is_lost(tmp_path: Path) -> None:
    with Service(tmp_path, "--log-level", "debug") as service, Client(service.wait_started().port) as client:
        client.ping()
        (worker,) = service.workers
        os.kill(worker, signal.SIGSTOP)
        client.send_batch(b"unread")
        eventually(lambda: not on_its_way(client.sock))
        service.signal()
        eventually(lambda: "stopping" in service.stderr)
        os.kill(worker, signal.SIGKILL)
        assert service.wait() == 1
        assert "; requests lost: 1" in service.stderr


def test_reloads_one_upon_the_other_leave_no_worker_behind(tmp_path: Path) -> None:
    """A worker that is forked for a reload which starts over meanwhile belongs to nobody, and has to end."""
    with Service(tmp_path, "--workers", "2") as service, Client(service.wait_started().port) as client:
        before = service.workers
        for _ in range(4):
            service.signal(signal.SIGHUP)
            time.sleep(0.05)  # the forks of the one before are under way
        eventually(
            lambda: len(now := service.workers) == 2 and not set(now) & set(before), "more than two, or old ones"
        )
        client.ping()
        service.signal()
        assert service.wait() == 0
