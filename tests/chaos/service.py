"""A service in processes of its own, seen from outside: signals, ``/stats``, ``/proc``."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIGHT = HERE.parent / "light"
BACKENDS = str(HERE / "chaos_backends.py")
DEMO = "configs/demo.toml"
WAIT = 60.0
MEBIBYTE = 2**20
ENVIRONMENT = dict(os.environ)
"""As it was in the main thread: pytest changes ``os.environ`` between tests, while other threads start services."""


def eventually(is_true: Callable[[], object], seconds: float = WAIT) -> bool:
    """Whether it comes true in that time."""
    until = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Service:
    """``torchpipe-serve`` with a backend of ``chaos_backends`` (``node`` says how), or a ``config`` of the project's.

    Leaving the ``with`` block ends every process there is still.
    """

    def __init__(self, *args: str, config: str = "", **node: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self.config = Path(ROOT / config) if config else Path(self._folder.name) / "chaos.toml"
        if not config:
            self.write(**node)
        flags = ["--host", "127.0.0.1", "--port", "0", "--http-port", "0", "--log-level", "warning", "--workers", "1"]
        light = os.pathsep.join(filter(None, [str(LIGHT), ENVIRONMENT.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchpipe_server", self.config, *flags, "--import", BACKENDS, *args],
            cwd=ROOT,
            env=ENVIRONMENT if config else {**ENVIRONMENT, "PYTHONPATH": light},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        self.port = self._http = 0
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=lambda: self._stderr.extend(self.process.stderr or ()), daemon=True)
        self._reader.start()
        self._seen: set[psutil.Process] = set()

    def write(self, backend: str = "ChaosEcho", **node: Any) -> None:
        """Write the configuration."""
        keys = {"backend": backend, **node}
        self.config.write_text("[node]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))

    def ready(self) -> Service:
        assert self.process.stdout is not None
        ports = []
        for _ in range(2):
            line = self.process.stdout.readline()
            found = re.search(r":(\d+)[ /]", line)
            if found is None:
                raise RuntimeError(f"it does not start: {line!r} {self.stderr}")
            ports.append(int(found[1]))
        self.port, self._http = ports
        self.processes()
        return self

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = WAIT) -> int | None:
        """The exit code, ``None`` if it has not ended by then."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stats(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def is_told() -> bool:
            """The supervisor may take too long to say: the machine is busy, or stood still."""
            connection = http.client.HTTPConnection("127.0.0.1", self._http, timeout=WAIT)
            try:
                connection.request("GET", "/stats")
                answer = connection.getresponse()
                found.extend([json.load(answer)] if answer.status == 200 else [])
            finally:
                connection.close()
            return bool(found)

        assert eventually(is_told), "/stats is not answered"
        return found[0]

    @property
    def inflight(self) -> int:
        return int(self.stats()["requests"]["inflight"])

    @property
    def open_connections(self) -> int:
        return int(self.stats()["connections"]["open"])

    @property
    def workers(self) -> list[int]:
        """Of those that are ready."""
        return [one["pid"] for one in self.stats()["workers"] if one["state"] == "ready"]

    def processes(self) -> list[psutil.Process]:
        """The supervisor's and all below it."""
        try:
            supervisor = psutil.Process(self.pid)
            found = [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._seen.update(found)
        return found

    def shared_files(self) -> list[str]:
        """The files in ``/dev/shm`` that its processes have open, or mapped, but those of a Python that lies there."""
        files = {each.path for process in self.processes() for each in [*process.open_files(), *process.memory_maps()]}
        own = (sys.prefix, sys.base_prefix, str(ROOT))
        return sorted(file for file in files if file.startswith("/dev/shm/") and not file.startswith(own))

    def alive(self) -> list[psutil.Process]:
        """Of those that were ever seen."""
        return [one for one in self._seen if _is_alive(one)]

    def sum(self, figure: str) -> int:
        """``rss`` in bytes, ``num_fds`` or ``num_threads`` of the supervisor and the workers."""
        total = 0
        for process in map(psutil.Process, (self.pid, *self.workers)):
            total += process.memory_info().rss if figure == "rss" else getattr(process, figure)()
        return total

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes()
        for one in sorted(self.alive(), key=lambda process: process.pid):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait(WAIT)
        self._reader.join(WAIT)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self._folder.cleanup()
