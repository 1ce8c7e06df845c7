"""What the supervisor does about its workers in awkward moments."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from chaos.clients import Answer, Load
from kit.clients import FRAMINGS, IDL, Client, HttpClient, is_answered, on_its_way
from kit.monitored import Monitored, SteeredService
from kit.services import LocalServer
from kit.waits import eventually, is_alive
from thriftpy2.thrift import TApplicationException
from torchpipe_server.options import Options
from torchpipe_server.supervisor.fallback import Fallback


def test_lost_request_is_answered_once_though_the_next_worker_dies_too(tmp_path: Path) -> None:
    """The second worker is stopped, so that it never sees the connection it is given; what the first one had noted of
    it must not be taken for the second one's."""
    with (
        SteeredService(tmp_path, "--workers", "2") as service,
        Client(service.wait_started().port, framed=True, compact=True) as client,
    ):
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
        eventually(lambda: is_answered(client), "its connection is not served any more")
        client.ping()


def test_workers_start_after_the_fork_server_has_died(tmp_path: Path) -> None:
    with SteeredService(tmp_path) as service, Client(service.wait_started().port) as client:
        (worker,) = service.workers
        os.kill(psutil.Process(worker).ppid(), signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: is_answered(client), "no worker comes back")
        service.signal()
        assert service.wait() == 0, service.stderr


def test_workers_start_and_reload_after_the_working_directory_was_deleted(tmp_path: Path) -> None:
    config, here = tmp_path / "my.toml", tmp_path / "here"
    config.write_text('[node]\nbackend = "Identity"\n')
    here.mkdir()
    with Monitored(config=str(config), cwd=here) as service, Client(service.wait_started().port) as client:
        (worker,) = service.workers
        here.rmdir()
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: is_answered(client), "no worker comes back")
        assert "the working directory was deleted: relative paths are now of /" in service.stderr
        service.signal(signal.SIGHUP)
        eventually(lambda: "reloaded" in service.stderr, "it does not reload")
        config.unlink()
        service.signal(signal.SIGHUP)
        eventually(lambda: "my.toml: no such file (working directory: /)" in service.stderr, "no reason is given")
        service.signal()
        assert service.wait() == 0, service.stderr


def test_unread_request_of_a_worker_killed_at_the_stop_counts_as_lost(tmp_path: Path) -> None:
    with SteeredService(tmp_path, "--log-level", "debug") as service, Client(service.wait_started().port) as client:
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


def test_interrupted_reloads_leave_no_worker_behind(tmp_path: Path) -> None:
    """A worker that is forked for a reload which starts over meanwhile belongs to nobody, and has to end."""
    with SteeredService(tmp_path, "--workers", "2") as service, Client(service.wait_started().port) as client:
        before = service.workers
        for _ in range(4):
            known = set(service.workers)
            service.signal(signal.SIGHUP)
            eventually(lambda known=known: set(service.workers) - known, "no worker is forked")
        eventually(
            lambda: len(now := service.workers) == 2 and not set(now) & set(before), "more than two, or old ones"
        )
        client.ping()
        service.signal()
        assert service.wait() == 0


# -- workers that share an engine process -----------------------------------------------------------------------------


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


def tables(mark: str = "", shared: str = "shared = true") -> str:
    return TABLES.format(mark=mark, shared=shared)


def sharing(folder: Path, *args: str, mark: str = "") -> SteeredService:
    """Two workers and an engine process."""
    return SteeredService(folder, "--workers", "2", *args, tables=tables(mark))


def judge(answer: Answer, expected: Answer) -> str:
    """``ok`` and the mark that the label has."""
    return "ok" + answer[0].removeprefix(expected[0]) if answer[0].startswith(expected[0]) else "crossed"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredService]:
    with sharing(tmp_path_factory.mktemp("engine")) as service:
        yield service.wait_started()


def test_not_ready_without_an_engine_process(service: SteeredService) -> None:
    """What it had is lost; what comes meanwhile is refused after a moment."""
    (engine,), workers = service.pids("engines"), service.pids()
    with Client(service.port) as client:
        seqid = client.send_batch(b"block")
        service.wait_entered()
        (service.folder / "hold").touch()
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(IDL.InferenceError, match="the engine process died while it had the request") as caught:
            client.receive(seqid)
        assert caught.value.code == "worker_died"
        eventually(lambda: service.get("ready") != (200, "ready\n"))
        params = IDL.InferenceParams(uuid="u", data=b"x")
        assert client.error_of("infer_batch", params=params).code == "unavailable"
        assert not service.is_ready
        (service.folder / "hold").unlink()
        eventually(lambda: service.is_ready)
        assert client.infer_batch(b"x") == ("x", 1.0)
    assert service.pids() == workers
    assert service.stats["restarts_by_reason"]["died"] >= 1


def test_reloads_lose_no_request(service: SteeredService) -> None:
    """Another shared node, none, and one again."""
    eventually(lambda: TOLD in service.stderr)  # of its start, which may be read later
    told = service.stderr.count(TOLD)
    with Load(service.port, 6, judge=judge) as clients:
        for mark, *shared in (("-two",), ("-none", ""), ("-three",), ("",)):
            engines = service.pids("engines")
            service.write(tables(mark, *shared))
            service.signal(signal.SIGHUP)
            eventually(clients.served("ok" + mark), f"nothing of {mark!r}")
            assert bool(service.pids("engines")) == (mark != "-none")
            assert not {*service.pids("engines")} & {*engines}
            told += mark != "-none"
            eventually(lambda count=told: service.stderr.count(TOLD) == count)
            eventually(lambda old=engines: not any(map(psutil.pid_exists, old)), "an engine process stays")
    assert set(clients.tally.ends) == {"ok", "ok-two", "ok-none", "ok-three"}


def test_engine_process_that_does_not_end_is_named_and_killed(tmp_path: Path) -> None:
    with sharing(tmp_path, "--drain-seconds", "0.1") as service:
        service.wait_started()
        (engine,) = map(psutil.Process, service.pids("engines"))
        engine.suspend()
        service.signal()
        service.wait()
        assert "killing what did not end: engine process" in service.stderr
        assert not is_alive(engine)


def test_engine_process_finishes_accepted_requests_after_a_signal(tmp_path: Path) -> None:
    with sharing(tmp_path) as service, ExitStack() as stack:
        service.wait_started()
        clients = [stack.enter_context(Client(service.port)) for _ in range(8)]
        seqids = [client.send_batch(b"block %d" % index) for index, client in enumerate(clients)]
        eventually(lambda: service.inflight == len(clients))
        service.signal()
        eventually(lambda: service.get("ready")[0] == 503)
        service.open()
        labels = [client.receive(seqid).label for client, seqid in zip(clients, seqids, strict=True)]
        assert labels == [f"block {index}" for index in range(len(clients))]
        assert service.wait() == 0, service.stderr


def test_hung_engine_process_is_replaced_and_all_end_with_the_supervisor(tmp_path: Path) -> None:
    with sharing(tmp_path, "--hang-seconds", "4") as service, Client(service.wait_started().port) as client:
        before = service.pids("engines")
        assert client.error_of("infer_batch", params=IDL.InferenceParams(uuid="u", data=b"block")).code == "worker_died"
        eventually(lambda: service.is_ready and service.pids("engines") not in ([], before))
        assert client.infer_batch(b"x") == ("x", 1.0)
        assert "has a batch that does not end: replacing it" in service.stderr
        processes = psutil.Process(service.pid).children(recursive=True)
        assert len(processes) >= 4
        service.process.kill()
        eventually(lambda: not any(map(is_alive, processes)))


def test_shared_node_that_cannot_be_set_up_ends_the_start(tmp_path: Path) -> None:
    with sharing(tmp_path, mark="fail") as process:
        assert process.wait() == 1
        assert process.process.stdout.read() == ""
        error = f"{tmp_path}/steered.toml: node 'model': Steered: OSError: no such model"
        assert [line for line in process.stderr.splitlines() if "no such model" in line] == [
            f"torchpipe-serve: {error}"
        ]


# -- what clients are told while no worker is there -------------------------------------------------------------------


INFER = IDL.InferRequest(uuid="x", inputs={})
CALLS = {
    "infer_batch": {"params": IDL.InferenceParams(uuid="x", data=b"x")},
    "infer_many": {"params": [IDL.InferenceParams(uuid="x", data=b"x")]},
    "infer": {"request": INFER},
}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    made = LocalServer(None)
    made.server.services = Fallback(made.loop, IDL, Options("test")).services
    with made:
        yield made


@pytest.mark.parametrize(("framed", "compact"), FRAMINGS)
def test_fallback_gives_each_method_its_declared_error(server, framed, compact):
    with Client(server.port, framed, compact) as client:
        for method, args in CALLS.items():
            error = client.error_of(method, **args)
            assert (error.code, error.retry_after_ms) == ("unavailable", 500)
            assert error.message


def test_fallback_over_http_gives_retry_after_and_keeps_the_connection(server):
    with HttpClient(server.port) as client:
        for path in (b"POST /infer", b"GET /openapi.json", b"GET /v2/health/ready", b"HEAD /infer"):
            client.send(path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nok")
            response = client.read(is_head=path.startswith(b"HEAD"))
            assert (response.status, response.fields["retry-after"]) == (503, "1")
            assert response.fields.get("connection") is None
        error = client.error_of("infer_batch", params=IDL.InferenceParams(data=b"x"))
        assert (error.code, error.retry_after_ms) == ("unavailable", 500)


@pytest.mark.parametrize("method", ["ping", "no_such_method"])
def test_undeclared_exception_becomes_an_application_exception(server, method):
    with Client(server.port) as client:
        for _ in range(2):
            with pytest.raises(TApplicationException, match="Unavailable: no worker is ready"):
                client.call(method)
        assert client.error_of("infer", request=INFER).code == "unavailable"
