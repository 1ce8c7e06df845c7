"""A service whose workers share an engine process: what dies, hangs or is reloaded costs what it had."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos.clients import Answer, Load
from kit.clients import IDL, Client
from kit.monitored import Monitored
from kit.services import SteeredProcess
from kit.waits import eventually, is_alive

TABLES = """
[own]
backend = "Identity"
next = "model"

[model]
backend = "Steered"
most = 8
mark = "{mark}"
{shared}
FOLDER
"""

TOLD = "shared nodes (model) run in 1 engine process for 2 workers: engine process 0"


class Service(Monitored, SteeredProcess):
    """Two workers and, where a node is shared, an engine process."""

    def __init__(self, folder: Path, *args: str, mark: str = "") -> None:
        tables = TABLES.format(mark=mark, shared="shared = true")
        super().__init__(folder, "--workers", "2", *args, tables=tables)

    def write(self, mark: str = "", shared: str = "shared = true") -> None:
        tables = TABLES.format(mark=mark, shared=shared).replace("FOLDER", f'folder = "{self.folder}"')
        (self.folder / "steered.toml").write_text(tables)

    @property
    def engine(self) -> int:
        (pid,) = self.pids("engines")
        return pid

    def clear(self) -> None:
        for name in ("hold", "open", "entered"):
            (self.folder / name).unlink(missing_ok=True)

    def code_of(self, client: Client, data: bytes) -> str:
        code: str = client.error_of("infer_batch", params=IDL.InferenceParams(uuid="u", data=data)).code
        return code


def load(service: Service) -> Load:
    """Clients that call again and again; answers count as ``ok`` and the mark that the label has."""

    def judge(answer: Answer, expected: Answer) -> str:
        return "ok" + answer[0].removeprefix(expected[0]) if answer[0].startswith(expected[0]) else "crossed"

    return Load(service.port, 6, judge=judge)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("engine")) as service:
        service.wait_started()
        yield service


@pytest.fixture
def service(one: Service) -> Service:
    """Ready, with the first configuration."""
    one.clear()
    eventually(lambda: one.is_ready and len(one.pids("workers")) == 2)
    return one


def test_an_engine_process_is_killed_under_load(service: Service) -> None:
    with load(service) as clients:
        for _ in range(2):
            eventually(clients.served())
            before = service.engine
            os.kill(before, signal.SIGKILL)
            eventually(lambda killed=before: service.pids("engines") not in ([], [killed]))
            eventually(clients.served(), "it is not served any more")
    assert set(clients.tally.ends) <= {"ok", "worker_died", "unavailable"}
    assert len(service.pids("workers")) == 2


def test_nothing_is_ready_without_an_engine_process(service: Service) -> None:
    """What it had is lost; what comes meanwhile is refused after a moment."""
    before, workers = service.engine, service.pids("workers")
    with Client(service.port) as client:
        seqid = client.send_batch(b"block")
        service.wait_entered()
        (service.folder / "hold").touch()
        os.kill(before, signal.SIGKILL)
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive(seqid)
        assert (caught.value.code, caught.value.message) == (
            "worker_died",
            "the engine process died while it had the request",
        )
        eventually(lambda: service.get("ready") != (200, "ready\n"))
        assert service.code_of(client, b"x") == "unavailable"
        assert not service.is_ready
        (service.folder / "hold").unlink()
        eventually(lambda: service.is_ready)
        assert client.infer_batch(b"x") == ("x", 1.0)
    assert service.pids("workers") == workers
    assert service.stats["restarts_by_reason"]["died"] >= 1


def test_reloads_lose_nothing(service: Service) -> None:
    """Another shared node, none, and one again."""
    told = service.stderr.count(TOLD)
    with load(service) as clients:
        for mark, shared in (
            ("-two", "shared = true"),
            ("-none", ""),
            ("-three", "shared = true"),
            ("", "shared = true"),
        ):
            engines = service.pids("engines")
            service.write(mark, shared)
            service.signal(signal.SIGHUP)
            eventually(clients.served("ok" + mark), f"nothing of {mark!r}")
            assert bool(service.pids("engines")) == bool(shared)
            assert not {*service.pids("engines")} & {*engines}
            told += bool(shared)
            eventually(lambda count=told: service.stderr.count(TOLD) == count)
            eventually(lambda old=engines: not any(map(psutil.pid_exists, old)), "an engine process stays")
    assert set(clients.tally.ends) == {"ok", "ok-two", "ok-none", "ok-three"}


def test_a_signal_lets_what_was_accepted_finish(tmp_path: Path) -> None:
    with Service(tmp_path, "--log-level", "debug") as service:
        service.wait_started()
        clients = [Client(service.port) for _ in range(20)]
        seqids = [client.send_batch(f"block {index}".encode()) for index, client in enumerate(clients)]
        eventually(lambda: service.stats["requests"]["inflight"] == 20)
        processes = [psutil.Process(pid) for pid in (service.engine, *service.pids("workers"))]
        service.signal()
        eventually(lambda: "stopping: answering what was accepted" in service.stderr)
        service.open()
        for index, (client, seqid) in enumerate(zip(clients, seqids, strict=True)):
            assert client.receive(seqid).label == f"block {index}"
            client.close()
        assert service.wait() == 0, service.stderr
        assert not any(map(is_alive, processes))
        assert "Traceback" not in service.stderr


def test_an_engine_process_that_does_not_end_is_named_and_killed(tmp_path: Path) -> None:
    with Service(tmp_path, "--drain-seconds", "0.1") as service:
        service.wait_started()
        engine = psutil.Process(service.engine)
        engine.suspend()
        service.signal()
        service.wait()
        assert "killing what did not end: engine process" in service.stderr
        assert not is_alive(engine)


def test_an_engine_process_that_hangs_is_replaced_and_all_end_with_the_supervisor(tmp_path: Path) -> None:
    with Service(tmp_path, "--hang-seconds", "3") as service:
        service.wait_started()
        with Client(service.port) as client:
            before = service.engine
            assert service.code_of(client, b"block") == "worker_died"
            eventually(lambda: service.pids("engines") not in ([], [before]))
            eventually(lambda: service.is_ready)
            eventually(lambda: "has a batch that does not end: replacing it" in service.stderr)
            assert client.infer_batch(b"x") == ("x", 1.0)
            supervisor = psutil.Process(service.pid)
            processes = supervisor.children(recursive=True)
            assert len(processes) >= 4
        supervisor.kill()
        eventually(lambda: not any(map(is_alive, processes)))


def test_a_shared_node_that_cannot_be_set_up_ends_the_start(tmp_path: Path) -> None:
    with Service(tmp_path, mark="fail") as process:
        assert process.wait() == 1
        assert process.process.stdout.read() == ""
        error = f"{tmp_path}/steered.toml: node 'model': Steered: OSError: no such model"
        assert [line for line in process.stderr.splitlines() if "no such model" in line] == [
            f"torchpipe-serve: {error}"
        ]
