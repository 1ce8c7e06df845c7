"""A server in this process or in another one."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from torchpipe_server.cli import reserve
from torchpipe_server.front.connection import CLOSED, Connection
from torchpipe_server.front.counters import log_request
from torchpipe_server.front.journal import Journal
from torchpipe_server.front.loop import every, new_loop
from torchpipe_server.front.server import Server
from torchpipe_server.front.services import services_of
from torchpipe_server.options import Options
from torchpipe_server.supervisor.acceptor import Acceptor
from torchpipe_server.supervisor.connection_limits import ConnectionLimits, slots_for
from torchpipe_server.supervisor.monitoring.figures import request_figures
from torchpipe_server.worker.service import usual_service

from kit.steered import FILE, steering
from kit.waits import WAIT, eventually
from torchpipe_py import Signature, pipe
from torchpipe_py.methods.call import call_from_any_thread
from torchpipe_py.methods.routes import Routes, Served
from torchpipe_py.methods.timing import timed

ROOT = Path(__file__).parents[2]
DEMO = "configs/demo_nodes.toml"
LIGHT = str(ROOT / "tests" / "light")
"""In ``PYTHONPATH``, a service whose pipe needs neither PyTorch nor ONNX starts without them."""


class FakePipe:
    """What a handler asks of a pipe beside ``dispatch``."""

    models = ()
    only_root = "node"
    roots: Mapping[str, str] = {}

    def arriving(self) -> Any:
        return nullcontext()

    def follow_models(self, changed: Any) -> None:
        """They never change."""

    def signature(self, node_name: str | None = None) -> Signature:
        """It declares nothing."""
        return Signature()

    def keys_read(self, node_name: str | None = None) -> None:
        """It may read any key."""

    def stats(self) -> dict[str, Any]:
        return {"max_inflight": 1000, "nodes": {"node": {"instances": 1, "max": 8}}}

    def limit_delays(self, target: float | None = None) -> None:
        """It has no queue."""

    def check_delay(self, seconds: float | None, priority: int = 0, node_name: object = None) -> None:
        """It is never late."""


class LocalServer:
    """A `Server` on a loopback socket and a thread of this process: what a worker does, with its own acceptor.

    Requests may wait for as long as a test holds them, unless ``options`` have ``queue_target_ms``.
    """

    def __init__(
        self, run: Any, listener: Any = None, make_methods: Any = None, make_served: Any = None, **options: Any
    ) -> None:
        listener = listener or socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = listener.getsockname()[1]
        usual: dict[str, Any] = {"config": "test.toml", "host": "127.0.0.1", "port": 0, "drain_seconds": 10.0}
        settings = Options(**{**usual, "queue_target_ms": 0.0, **options})
        self.run = run
        self.loop = new_loop()
        self.loop.set_exception_handler(self._note)
        self.journal = Journal(slots_for(settings.max_connections))
        self.limits = ConnectionLimits(
            settings.max_connections, settings.max_connections_per_address, lambda slots: None
        )
        self.acceptor = Acceptor(self.loop, listener, self._take, self.limits.make_room)
        if make_methods:
            served = Served(make_methods(self.loop), Routes(()))
        else:
            served = make_served(self.loop) if make_served else usual_service(settings, run or FakePipe())
        if hasattr(run, "timed"):
            served = timed(served, run, settings.server_timing == "all", settings.slow_seconds, log_request)
        services = services_of(served, settings)
        self.server = Server(self.loop, services, settings, self._gone, served.names_with_pipe())
        self.grpc_port, self.rpc, self.listens = settings.grpc_port, None, threading.Event()
        if settings.grpc_port >= 0:
            from torchpipe_server.front.rpc import RpcServer

            self._reserved = reserve(listener, settings.grpc_port)
            self.grpc_port = self._reserved.getsockname()[1]
            settings = replace(settings, grpc_port=self.grpc_port)
            server = self.server
            self.rpc = RpcServer(self.loop, served.rpcs, settings, server.counters, server.pacing, server.inflating)
        self.error: BaseException | None = None
        self.is_over = False
        self._adopted: list[Connection] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def stop(self) -> None:
        self.call(self._stop)

    def connections(self) -> list[Connection]:
        """Those that are open."""
        return [connection for connection in list(self._adopted) if connection.state is not CLOSED]

    @property
    def by_method(self) -> dict[str, dict[str, int]]:
        """The requests that were counted, by method and outcome."""
        found: dict[str, dict[str, int]] = request_figures(self.server.counters.summary())["by_method"]
        return found

    def call(self, function: Any) -> None:
        """Run it on the loop's thread."""
        call_from_any_thread(self.loop, function)

    def _note(self, loop: Any, context: Any) -> None:
        self.error = self.error or context.get("exception") or RuntimeError(context["message"])

    def _gone(self, slot: int, is_closed: bool) -> None:
        self.limits.release(slot)
        self._end_if_finished()

    def _take(self, sock: socket.socket, peer: str) -> None:
        place = self.limits.take(peer)
        if place is None:
            sock.close()
        else:
            slot, is_refused = place
            self._adopted.append(self.server.adopt(sock, slot, self.journal.entry(slot), is_refused))

    def _stop(self) -> None:
        self.acceptor.close()
        self.server.drain()
        if self.rpc is not None:
            self.rpc.drain()
        every(self.loop, 0.05, self._end_if_finished)

    def _end_if_finished(self) -> None:
        if self.server.is_finished and not self.is_over and (self.rpc is None or self.rpc.is_finished):
            self.is_over = True
            self.loop.stop()

    def _cannot_listen(self, problem: str) -> None:
        raise RuntimeError(problem)

    def _serve(self) -> None:
        try:
            self.acceptor.start()
            if self.rpc is not None:
                self.rpc.listen(self.listens.set, self._cannot_listen)
            self.loop.run_forever()
            self.acceptor.close()
            self.server.close()
            if self.rpc is not None:
                self.rpc.close()
                self._reserved.close()
            self.loop.run_until_complete(asyncio.sleep(0.01))  # in which transports close their sockets
        except BaseException as error:
            self.error = error
        finally:
            self.loop.close()
            self.journal.close()

    def __enter__(self) -> LocalServer:
        self.thread.start()
        assert self.rpc is None or self.listens.wait(WAIT)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.stop()
        self.thread.join(WAIT)
        if error is None:
            assert not self.thread.is_alive(), "the server does not stop"
            assert self.error is None, f"the I/O thread died of {self.error!r}"


def turn(loop: Any, seconds: float = 0.01) -> None:
    """Let a loop that does not run do what is due."""
    loop.run_until_complete(asyncio.sleep(seconds))


@contextmanager
def serving(config: Any, **options: Any) -> Iterator[LocalServer]:
    """A pipe and its server; `config` is what `pipe` takes, or the name of one backend."""
    if isinstance(config, str) and config.endswith(".toml"):
        options["config"] = config
    elif isinstance(config, str):
        config = {"node": {"backend": config}}
    with pipe(config) as run, LocalServer(run, **options) as server:
        yield server


@contextmanager
def steered(config: Any = "Steered", **options: Any) -> Iterator[LocalServer]:
    """``serving`` with a backend ``Steered``, which lets go at the end."""
    with steering() as backend, serving(config, **options) as server:
        try:
            yield server
        finally:
            backend.opened.set()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port at which nobody listens, and which the system gives to nobody else; servers of a test may have it."""
    with socket.socket() as sock:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # as servers do, which may bind it beside this one
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


class Process:
    """`python -m torchpipe_server` in a process of its own.

    `stderr` is a descriptor that takes its log unread. `files`: how many it may open, as many as this process if 0.
    """

    def __init__(
        self,
        *args: str,
        config: str = DEMO,
        env: dict[str, str] | None = None,
        stderr: int = subprocess.PIPE,
        files: int = 0,
        cwd: Path = ROOT,
    ) -> None:
        if not any(arg.startswith("--workers") for arg in args):
            args = ("--workers", "1", *args)
        command = [sys.executable, "-m", "torchpipe_server", config, "--host", "127.0.0.1", "--port", "0", *args]
        if env and "PYTHONPATH" in env and "PYTHONPATH" in os.environ:
            env = {**env, "PYTHONPATH": f"{env['PYTHONPATH']}{os.pathsep}{os.environ['PYTHONPATH']}"}
        if files:
            command = ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command]
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.pid = self.process.pid
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._read_stderr, daemon=True)
        self._reader.start()
        self.port = 0

    def _read_stderr(self) -> None:
        self._stderr.extend(self.process.stderr or ())

    def wait_started(self) -> Process:
        line = self.process.stdout.readline()
        match = re.search(r" on 127\.0\.0\.1:(\d+) \(pid (\d+)\)$", line.strip())
        assert match, f"{line!r} {self.stderr}"
        self.port = int(match[1])
        assert int(match[2]) == self.pid
        return self

    @property
    def workers(self) -> list[int]:
        """The processes of the workers, in the order of their starts; the fork server's children."""
        supervisor = psutil.Process(self.pid)
        while True:
            try:
                return sorted(worker.pid for server in supervisor.children() for worker in server.children())
            except psutil.NoSuchProcess:
                continue  # one has ended meanwhile

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = WAIT) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(WAIT)
        return code

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        self.process.stdout.close()
        if self.process.stderr is not None:
            self.process.stderr.close()


def told_at(address: str) -> tuple[int, str]:
    """Status and text of ``http://HOST:PORT/path``, past every proxy.

    Asked again while the supervisor takes too long to say: the machine is busy, or stood still.
    """
    answers: list[tuple[int, str]] = []
    url = urlsplit(address)

    def is_told() -> bool:
        connection = http.client.HTTPConnection(url.netloc, timeout=WAIT)
        try:
            connection.request("GET", url.path)
            answer = connection.getresponse()
            answers.append((answer.status, answer.read().decode()))
        finally:
            connection.close()
        return answers[-1] != (503, "the supervisor does not answer\n")

    eventually(is_told, "the supervisor does not answer")
    return answers[-1]


class SteeredProcess(Process):
    """A service whose node is ``kit.steered.Steered``, with ``folder`` for its files and its configuration.

    ``tables`` are other nodes than one that is called ``node``, as TOML; ``FOLDER`` in them gives the folder. Requests
    may wait for as long as the node blocks, unless ``args`` have ``--queue-target-ms``.
    """

    def __init__(self, folder: Path, *args: str, tables: str = "", files: int = 0, **env: str) -> None:
        self.folder = folder
        config = self.write(tables or '[node]\nbackend = "Steered"\ninstance_num = 1\nFOLDER\n')
        args = ("--queue-target-ms", "0", *args)
        super().__init__("--import", FILE, *args, config=str(config), env={"PYTHONPATH": LIGHT, **env}, files=files)

    def write(self, tables: str) -> Path:
        """Write the configuration, for the next SIGHUP."""
        config = self.folder / "steered.toml"
        config.write_text(tables.replace("FOLDER", f'folder = "{self.folder}"'))
        return config

    def wait_entered(self) -> None:
        """Until a request, or ``setup``, blocks; then for the next one."""
        eventually((self.folder / "entered").exists, "nothing blocks")
        (self.folder / "entered").unlink()

    def open(self) -> None:
        """Whatever blocks goes on, in ``setup`` too."""
        (self.folder / "hold").unlink(missing_ok=True)
        (self.folder / "open").touch()
