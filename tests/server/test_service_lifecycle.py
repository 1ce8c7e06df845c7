"""How the service starts, stops and ends: signals, draining, wrong command lines."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conftest import Register
from kit.backends import returns
from kit.clients import (
    IDL,
    Client,
    HttpClient,
    ask,
    connect,
    fetch,
    narrow,
    on_its_way,
    pack_call,
    pack_infer,
    read_all,
)
from kit.services import DEMO, LocalServer, SteeredProcess, reserved_port, serving
from kit.waits import WAIT, eventually
from torchpipe_server import cli
from torchpipe_server.options import parse_options
from torchpipe_server.supervisor.forker import prepare_fork_server

import torchpipe_py.serving
from torchpipe_py import ConfigError


def is_refused(port: int) -> bool:
    try:
        connect(port).close()
    except ConnectionError:
        return True
    return False


INFER = IDL.InferRequest(uuid="", inputs={"data": IDL.Value(text="a")})

# -- signals --------------------------------------------------------------------------------------------------------


SHARED = '[node]\nbackend = "Steered"\nshared = true\nFOLDER\n'


@pytest.mark.parametrize(("workers", "tables"), [("1", ""), ("2", SHARED)], ids=["one worker", "an engine process"])
def test_accepted_requests_finish_after_a_signal(tmp_path: Path, workers: str, tables: str):
    with SteeredProcess(tmp_path, "--workers", workers, tables=tables) as process:
        port = process.wait_started().port
        clients: list[Any] = [Client(port, framed=index % 2 == 0, compact=index % 3 == 0) for index in range(30)]
        clients += [HttpClient(port) for _ in range(10)]
        seqids = [client.send_batch(b"block %d" % index) for index, client in enumerate(clients)]
        pipelined = Client(port)
        later = [pipelined.send_batch(b"block %d" % index) for index in range(10)]
        idle, halves = connect(port), [Client(port), HttpClient(port)]
        for half in halves:
            half.sock.sendall(half.pack(b"half", 7)[:-5])
        process.wait_entered()
        with Client(port) as one, Client(port) as other:  # what was sent before is accepted by now, by each worker
            one.ping()
            other.ping()
        process.signal()
        eventually(lambda: is_refused(port), "the listener stays open")
        assert read_all(idle) == b""
        process.signal()  # a second one changes nothing
        assert process.process.poll() is None
        for half in halves:
            half.sock.sendall(half.pack(b"half", 7)[-5:])
        process.open()
        assert (process.wait(), "Traceback" in process.stderr) == (0, False), process.stderr
        for index, client in enumerate(clients):
            assert client.receive(seqids[index]).label == f"block {index}"
        for index, seqid in enumerate(later):
            assert pipelined.receive(seqid).label == f"block {index}"
        for half in halves:
            assert half.receive(7).label == "half"
            assert read_all(half.sock) == b""
        for client in (*clients, pipelined, *halves):
            client.close()
        idle.close()


def test_health_is_answered_while_models_load(tmp_path: Path):
    """Probes must not wait for a model that takes minutes to load."""
    (tmp_path / "hold").touch()
    with reserved_port() as port, SteeredProcess(tmp_path, "--workers", "2", "--port", str(port)) as process:
        process.wait_entered()
        with HttpClient(port) as kept:
            kept.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert kept.read().status == 200
            assert ask(port, b"", "/v2/health/live", "GET") == (200, {"live": True})
            refusals = [fetch(port, path) for path in ("/v2/health/ready", "/v2", "/metrics")]
            refusals += [fetch(port, "/infer", "POST", b"x"), fetch(port, "/v2/models/a/infer", "POST", b"{}")]
            assert [(each.status, each.fields["retry-after"]) for each in refusals] == [(503, "1")] * 5
            with Client(port) as client:
                assert client.error_of("infer", request=INFER).code == "unavailable"
            process.open()
            process.wait_started()
            kept.send(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert kept.read().status == 200, "a worker has the connection now"


@pytest.mark.parametrize(("number", "is_loaded"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_signal_while_loading_ends_the_process(tmp_path: Path, number, is_loaded):
    """A model that takes minutes to load must not keep the process from ending."""
    (tmp_path / "hold").touch()
    with SteeredProcess(tmp_path) as process:
        process.wait_entered()
        process.signal(number)
        if is_loaded:
            process.open()
        assert (process.wait(), "Traceback" in process.stderr) == (0, False)


def test_hung_backend_does_not_keep_the_process(tmp_path: Path):
    """After drain_seconds the process ends, whatever its backends do, and what they had is answered."""
    with SteeredProcess(tmp_path, "--drain-seconds", "0.2") as process, Client(process.wait_started().port) as client:
        seqid = client.send_batch(b"block")
        process.wait_entered()
        process.signal()
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive(seqid)
        assert (caught.value.code, process.wait()) == ("worker_died", 1)
        (error,) = [line for line in process.stderr.splitlines() if " ERROR " in line]
        assert "node 'node': instance 0" in error
        assert "is still running" in error


# -- command lines --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A folder of files that make no service, and a port that is taken."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "folder.toml").mkdir()
    (folder / "broken.toml").write_text("[node\n")
    (folder / "unknown.toml").write_text('[node]\nbackend = "Nonesuch"\n')
    (folder / "model.toml").write_text('[node]\nbackend = "OnnxTensor"\nmodel = "nowhere.onnx"\n')
    (folder / "empty.toml").write_text("")
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        yield {"files": folder, "taken": taken.getsockname()[1]}


ANYWHERE = ("--host", "127.0.0.1", "--port", "0")
WRONG_LINES = {
    "no config": ([], "CONFIG"),
    "missing file": (["nowhere.toml", *ANYWHERE], "nowhere.toml"),
    "folder": (["{files}/folder.toml", *ANYWHERE], "folder.toml"),
    "broken": (["{files}/broken.toml", *ANYWHERE], "broken.toml"),
    "unknown backend": (["{files}/unknown.toml", *ANYWHERE], "Nonesuch"),
    "missing model": (["{files}/model.toml", *ANYWHERE], "nowhere.onnx"),
    "empty": (["{files}/empty.toml", *ANYWHERE], "empty.toml"),
    "unknown flag": ([DEMO, "--nonsense", "1"], "--nonsense"),
    "port in use": ([DEMO, "--port", "{taken}"], "127.0.0.1:{taken}"),
    "gRPC port in use": ([DEMO, *ANYWHERE, "--grpc-port", "{taken}"], "127.0.0.1:{taken} (--grpc-port): Address alr"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_invalid_command_line_ends_with_one_line(places, name, capfd, monkeypatch, restored_logging):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the service would set it for good
    args, word = WRONG_LINES[name]
    try:
        code = cli.main([arg.format(**places) for arg in args])
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    lines = err.strip().splitlines()
    assert code in (1, 2)
    assert out == ""
    assert word.format(**places) in lines[-1]
    assert code == 2 or len(lines) == 1


LONG = "/tmp/" + 100 * "a"


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (
            mock.Mock(return_value=LONG),
            f"{LONG}: too long for the socket between processes: set TMPDIR to a shorter path",
        ),
        (
            mock.Mock(side_effect=FileNotFoundError("No usable temporary directory")),
            "the socket between processes needs a folder to write to: set TMPDIR (No usable temporary directory)",
        ),
    ],
)
def test_socket_between_processes_without_a_folder_ends_the_start(
    folder: mock.Mock, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.util, "get_temp_dir", folder)
    with pytest.raises(ConfigError) as caught:
        prepare_fork_server([])
    assert str(caught.value) == reason


START = "from torchpipe_server.supervisor.forker import prepare_fork_server as p; p([]); print(flush=True); input()"


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts what a supervisor does before it forks, with `tmp_path` for temporary files."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", START]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_start_removes_the_folders_of_killed_services_alone(
    tmp_path: Path, starts: Callable[[], subprocess.Popen[str]]
) -> None:
    (tmp_path / "pymp-other").mkdir()
    killed = starts()
    (left,) = set(tmp_path.iterdir()) - {tmp_path / "pymp-other"}
    killed.kill()
    killed.wait(WAIT)
    starts()
    assert not left.exists()
    running = set(tmp_path.iterdir())
    starts()
    assert set(tmp_path.iterdir()) > running
    assert len(running) == 2


# -- stopping, in this process --------------------------------------------------------------------------------------


def test_connections_in_the_backlog_are_served_at_a_stop():
    """More than one round of `accept` takes."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    socks = [connect(listener.getsockname()[1]) for _ in range(300)]
    for sock in socks:
        sock.sendall(pack_call("ping"))
    eventually(lambda: not any(map(on_its_way, socks)))
    server = LocalServer(None, listener)
    server.stop()
    with server:
        lost = [index for index, sock in enumerate(socks) if not read_all(sock)]
    for sock in socks:
        sock.close()
    assert lost == [], f"{len(lost)} of {len(socks)} requests lost"


def test_half_written_reply_is_finished_at_a_stop(register: Register):
    large = register(returns(b"r" * 2**23))
    with serving(large, drain_seconds=2 * WAIT) as server, narrow(server.port) as sock:
        sock.sendall(pack_infer(b"x"))
        eventually(lambda: any(one.is_stalled for one in server.connections()))
        server.stop()
        eventually(lambda: is_refused(server.port))
        assert b"r" * 2**23 in read_all(sock)
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


@pytest.mark.parametrize(
    ("flags", "shared", "has_gpu", "cores", "files", "expected"),
    [
        ("", False, False, 2, 4096, 2),
        ("", False, False, 64, 4096, 8),
        ("--handler=my:Own", False, False, 64, 4096, 1),
        ("", False, True, 64, 4096, 1),  # each would have models of its own on the GPU
        ("", True, True, 64, 4096, 8),
        ("", False, False, 64, 128, 1),  # descriptors are for connections first
    ],
)
def test_default_number_of_workers(
    flags: str, shared: bool, has_gpu: bool, cores: int, files: int, expected: int,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(torchpipe_py.serving, "usable_cores", lambda: cores)
    monkeypatch.setattr(cli, "NVIDIA", tmp_path if has_gpu else tmp_path / "none")
    options = parse_options(["x.toml", *flags.split()])
    assert options.workers == 0
    tables = {"a": {"backend": "Identity", "shared": shared}}
    assert cli._usual_workers(options, tables, files) == expected
