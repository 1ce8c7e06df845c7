"""How the service starts, stops and ends: signals, draining, wrong command lines."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Register
from fakes import WAIT, Gate
from http_client import HttpClient
from service import (
    DEMO,
    IDL,
    LIGHT,
    ROOT,
    Client,
    FakePipe,
    LocalServer,
    Process,
    connect,
    eventually,
    on_its_way,
    pack_batch,
    pack_call,
    pack_infer,
    read_all,
    serving,
)
from torchpipe_server import cli
from torchpipe_server.options import parse_options

import torchpipe_py.cores
from torchpipe_py import Backend

PLUGIN = '''
import os, pathlib, time
from torchpipe_py import Backend

HERE = pathlib.Path(__file__).parent

def wait(name):
    (HERE / name).touch()
    while not (HERE / "open").exists() and os.getppid() == PARENT:
        time.sleep(0.005)

PARENT = os.getppid()

class Blocker(Backend):
    """Blocks in `setup` or in `forward` until the file `open` exists."""

    def setup(self):
        if "BLOCK_SETUP" in os.environ:
            wait("setup")

    def forward(self, items):
        wait("forward")
        for item in items:
            item["result"] = (item["data"].decode(), 1.0)

    def max(self):
        return 4
'''


class Plugin:
    """A folder with an installed package, whose backend `Blocker` a TOML file may name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blocker_plugin.py").write_text(PLUGIN)
        info = folder / "blocker_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: blocker-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[torchpipe_py.backends]\nBlocker = blocker_plugin:Blocker\n")
        (folder / "blocker.toml").write_text('[node]\nbackend = "Blocker"\n')

    def process(self, *args: str, **env: str) -> Process:
        env = {"PYTHONPATH": f"{self.folder}{os.pathsep}{LIGHT}", **env}
        return Process(*args, config=str(self.folder / "blocker.toml"), env=env)

    def wait_entered(self, name: str) -> None:
        eventually((self.folder / name).exists, f"not in {name}")

    def open(self) -> None:
        (self.folder / "open").touch()


@pytest.fixture
def plugin(tmp_path: Path) -> Plugin:
    return Plugin(tmp_path)


def is_refused(port: int) -> bool:
    try:
        connect(port).close()
    except ConnectionError:
        return True
    return False


# -- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_lets_everything_accepted_finish(plugin: Plugin, number):
    with plugin.process() as process:
        port = process.wait_started().port
        clients: list[Any] = [Client(port, framed=index % 2 == 0, compact=index % 3 == 0) for index in range(30)]
        clients += [HttpClient(port) for _ in range(10)]
        seqids = [client.send_batch(str(index).encode()) for index, client in enumerate(clients)]
        pipelined = Client(port)
        later = [pipelined.send_batch(str(index).encode()) for index in range(10)]
        idle, halves = connect(port), [Client(port), HttpClient(port)]
        for half in halves:
            half.sock.sendall(half.pack(b"half", 7)[:-5])
        plugin.wait_entered("forward")
        with Client(port) as settled:  # what was sent before is accepted by now
            settled.ping()
        process.signal(number)
        eventually(lambda: is_refused(port), "the listener stays open")
        assert read_all(idle) == b""
        process.signal(number)  # a second one changes nothing
        assert process.process.poll() is None
        for half in halves:
            half.sock.sendall(half.pack(b"half", 7)[-5:])
        plugin.open()
        code = process.wait()
        assert (code, "Traceback" in process.stderr) == (0, False), process.stderr
        for index, client in enumerate(clients):
            assert client.receive(seqids[index]).label == str(index)
        for index, seqid in enumerate(later):
            assert pipelined.receive(seqid).label == str(index)
        for half in halves:
            assert half.receive(7).label == "half"
            assert read_all(half.sock) == b""
        for client in (*clients, pipelined, *halves):
            client.close()
        idle.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_while_loading_ends_the_process(plugin: Plugin, number):
    """A model that takes minutes to load must not keep the process from ending."""
    with plugin.process(BLOCK_SETUP="1") as process:
        plugin.wait_entered("setup")
        process.signal(number)
        assert process.wait() == 0, "it goes on loading"
        assert "Traceback" not in process.stderr


def test_a_signal_while_loading_ends_the_process_once_loaded(plugin: Plugin):
    with plugin.process(BLOCK_SETUP="1") as process:
        plugin.wait_entered("setup")
        process.signal()
        plugin.open()
        assert process.wait() == 0
        assert "Traceback" not in process.stderr


def test_a_backend_that_hangs_does_not_keep_the_process(plugin: Plugin):
    """After drain_seconds the process ends, whatever its backends do, and what they had is answered."""
    with plugin.process("--drain-seconds", "0.2") as process, Client(process.wait_started().port) as client:
        seqid = client.send_batch(b"x")
        plugin.wait_entered("forward")
        process.signal()
        with pytest.raises(IDL.InferenceError) as caught:
            client.receive(seqid)
        assert caught.value.code == "worker_died"
        assert process.wait() == 1
        (error,) = [line for line in process.stderr.splitlines() if " ERROR " in line]
        assert "node 'node': instance 0" in error
        assert "is still running" in error


def test_a_signal_with_nothing_to_do():
    with Process() as process:
        process.wait_started()
        process.signal()
        assert process.wait() == 0
        assert process.process.stdout.read() == ""


def test_options_reach_the_server():
    with Process("--max-connections", "1", "--max_message_bytes", "100", "--log-level", "error") as process:
        with Client(process.wait_started().port) as client:
            client.ping()
            client.sock.sendall(pack_batch(b"x" * 100))
            with pytest.raises(IDL.InferenceError) as caught:
                client.receive()
            assert caught.value.code == "too_large"
        process.signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.stderr == ""


# -- command lines --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("configs")
    (folder / "folder.toml").mkdir()
    (folder / "binary.toml").write_bytes(b"\xff\xfe\0")
    (folder / "broken.toml").write_text("[node\n")
    (folder / "unknown.toml").write_text('[node]\nbackend = "Nonesuch"\n')
    (folder / "model.toml").write_text('[node]\nbackend = "OnnxTensor"\nmodel = "nowhere.onnx"\n')
    (folder / "empty.toml").write_text("")
    return folder


ANYWHERE = ("--host", "127.0.0.1", "--port", "0")
WRONG_LINES = {
    "no config": ([], "config"),
    "missing file": (["nowhere.toml", *ANYWHERE], "nowhere.toml"),
    "no toml": (["idl/inference.thrift", *ANYWHERE], "inference.thrift"),
    "folder": (["{files}/folder.toml", *ANYWHERE], "folder.toml"),
    "binary": (["{files}/binary.toml", *ANYWHERE], "binary.toml"),
    "broken": (["{files}/broken.toml", *ANYWHERE], "broken.toml"),
    "unknown backend": (["{files}/unknown.toml", *ANYWHERE], "Nonesuch"),
    "missing model": (["{files}/model.toml", *ANYWHERE], "nowhere.onnx"),
    "empty": (["{files}/empty.toml", *ANYWHERE], "empty.toml"),
    "port no number": ([DEMO, "--port", "http"], "--port"),
    "port negative": ([DEMO, "--port", "-1"], "--port"),
    "port too large": ([DEMO, "--port", "70000"], "port"),
    "host unknown": ([DEMO, "--host", "no.such.host.invalid"], "no.such.host.invalid"),
    "host too long": ([DEMO, "--host", "x" * 70], "x" * 70),
    "seconds nan": ([DEMO, "--message-seconds", "nan"], "--message-seconds"),
    "zero connections": ([DEMO, "--max-connections", "0"], "--max-connections"),
    "log level": ([DEMO, "--log-level", "loud"], "--log-level"),
    "unknown flag": ([DEMO, "--nonsense", "1"], "--nonsense"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_command_line_ends_with_a_line_that_says_why(files, name, capfd, monkeypatch, restored_logging):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    args, word = WRONG_LINES[name]
    try:
        code = cli.main([arg.format(files=files) for arg in args])
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    lines = err.strip().splitlines()
    assert code in (1, 2)
    assert out == ""
    assert word in lines[-1]
    assert code == 2 or len(lines) == 1


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "torchpipe_server", DEMO, "--host", "127.0.0.1", "--port", str(port)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_signal_at_the_very_end_changes_no_exit_code():
    """A service manager may send it twice."""
    signals = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    code = (
        "import signal, sys; from torchpipe_server import cli; code = cli.main(['nowhere.toml']);"
        f"[signal.raise_signal(number) for number in {[*map(int, signals)]}]; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "nowhere.toml" in done.stderr) == (1, True)


# -- stopping, in this process --------------------------------------------------------------------------------------


def test_connections_the_system_has_accepted_are_served_at_the_stop():
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


def test_a_bad_message_unread_at_the_stop_is_answered():
    listener = socket.create_server(("127.0.0.1", 0))
    with connect(listener.getsockname()[1]) as sock:
        sock.sendall(pack_batch(b"x" * 600_000))
        eventually(lambda: on_its_way(sock) < 600_000)  # the first of it has arrived, all of it has no room
        server = LocalServer(None, listener, max_message_bytes=1000)
        server.stop()
        with server:
            assert b"too_large" in read_all(sock)


class Large(Backend):
    def forward(self, items: list[dict[str, Any]]) -> None:
        for item in items:
            item["result"] = b"r" * 2**23


def test_a_reply_half_written_at_the_stop_is_finished(register: Register):
    with serving(register(Large), drain_seconds=2 * WAIT) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(WAIT)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(pack_infer(b"x"))
        eventually(lambda: any(one.is_full for one in list(server.server._connections)))
        server.stop()
        eventually(lambda: is_refused(server.port))
        assert b"r" * 2**23 in read_all(sock)
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


class Busy(FakePipe):
    """A pipe whose `dispatch` keeps the I/O thread until it is let go, then leaves the request in work."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.finish: Callable[[], None] = lambda: None

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> Any:
        self.finish = lambda: on_done({**data, "result": ("late", 1.0)}, None)
        self.entered.set()
        assert self.go.wait(WAIT)


def test_a_connection_that_arrives_together_with_the_stop():
    """The loop learns of both at once: the listener is closed when its own event is handled."""
    run = Busy()
    with LocalServer(run) as server, Client(server.port) as client:
        seqid = client.send_batch(b"x")
        assert run.entered.wait(WAIT)
        server.stop()
        with connect(server.port):
            run.go.set()
            eventually(lambda: is_refused(server.port))
        run.finish()
        assert client.receive(seqid).label == "late"


def test_stop_before_serve_and_after_it(register: Register):
    server = LocalServer(None)
    server.stop()
    with server:
        server.thread.join(WAIT)
        server.stop()
    assert is_refused(server.port)


def test_stop_during_linger_ends_soon():
    with LocalServer(None, drain_seconds=2 * WAIT) as server, connect(server.port) as sock:
        sock.sendall(b"\0" * 100)
        assert read_all(sock) == b""
        server.stop()
        server.thread.join(WAIT)
        assert not server.thread.is_alive()


def test_drain_seconds_end_the_wait(register: Register):
    gate = Gate()
    with serving(register(gate.backend), drain_seconds=0.1) as server, gate, Client(server.port) as client:
        client.send_batch(b"x")
        gate.wait_entered()
        server.stop()
        server.thread.join(WAIT)
        assert not server.thread.is_alive()
        assert read_all(client.sock) == b""


def test_serving_again_and_again_leaves_no_descriptor(register: Register):
    name = register(Large)

    def once() -> None:
        with serving(name) as server, Client(server.port) as client:
            client.ping()

    once()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# -- one connection ---------------------------------------------------------------------------------------------------


class Payload:
    """Stands for a request's image."""


class KeepingTicket:
    deadline = None

    def __init__(self, payload: Payload) -> None:
        self.payload = payload

    def cancel(self, error: BaseException | None = None) -> bool:
        return False


class Immediate(FakePipe):
    """Finishes within `dispatch`, as a pipe does whose other thread is faster than the caller."""

    def __init__(self) -> None:
        self.payloads: list[weakref.ref[Payload]] = []

    def dispatch(self, data: Any, on_done: Any, timeout: float | None = None) -> KeepingTicket:
        payload = Payload()
        self.payloads.append(weakref.ref(payload))
        data["result"] = ("now", 1.0)
        on_done(data, None)
        return KeepingTicket(payload)


def test_a_silent_connection_keeps_nothing_of_its_last_request():
    run = Immediate()
    with LocalServer(run) as server, Client(server.port) as client, Client(server.port) as other:
        client.infer_batch(b"x")
        other.ping()
        other.ping()

        def is_free() -> bool:
            gc.collect()
            return run.payloads[0]() is None

        eventually(is_free, "the ticket of a finished request is kept")


def test_a_killed_supervisor_leaves_no_folder(tmp_path: Path) -> None:
    with Process(config=DEMO, env={"TMPDIR": str(tmp_path)}) as process:
        process.wait_started()
        assert list(tmp_path.glob("pymp-*"))
        process.signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: not list(tmp_path.glob("pymp-*")))


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
def test_workers_by_default(
    flags: str, shared: bool, has_gpu: bool, cores: int, files: int, expected: int,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(torchpipe_py.cores, "usable_cores", lambda: cores)
    monkeypatch.setattr(cli, "NVIDIA", tmp_path if has_gpu else tmp_path / "none")
    options = parse_options(["x.toml", *flags.split()])
    assert options.workers == 0
    tables = {"a": {"backend": "Identity", "shared": shared}}
    assert cli._usual_workers(options, tables, files) == expected
