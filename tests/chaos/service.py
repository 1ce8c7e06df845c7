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
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LIGHT = HERE.parent / "light"
DEMO = "configs/demo.toml"
WAIT = 60.0
MEBIBYTE = 2**20
ENVIRONMENT = dict(os.environ)
"""As it was in the main thread: pytest changes ``os.environ`` between tests, while other threads start services."""
SHARED = bool(ENVIRONMENT.get("CHAOS_SHARED"))
"""By hand: all nodes are shared, and a service has two workers where nothing else is asked for."""


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

    ``fault`` is one of ``faults``. Leaving the ``with`` block ends every process there is still.
    """

    def __init__(self, *args: str, config: str = "", fault: str = "", **node: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        try:
            self._start(*args, config=config, fault=fault, **node)
        except BaseException:
            self._folder.cleanup()
            raise

    def _start(self, *args: str, config: str, fault: str, **node: Any) -> None:
        self.config = Path(ROOT / config) if config else Path(self._folder.name) / "chaos.toml"
        if not config:
            self.write(**node)
        elif SHARED:
            text = "shared = true\n" + self.config.read_text()
            self.config = Path(self._folder.name) / self.config.name
            self.config.write_text(text)
        if "--workers" not in args:
            args = ("--workers", "2" if SHARED else "1", *args)
        program = [str(HERE / "faults.py"), fault] if fault else ["-m", "torchpipe_server"]
        flags = ["--host", "127.0.0.1", "--port", "0", "--http-port", "0", "--log-level", "warning"]
        paths = [str(LIGHT), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]
        light = {} if config else {"PYTHONPATH": os.pathsep.join(paths)}
        backends = ["--import", str(HERE / "chaos_backends.py")]
        self.process = subprocess.Popen(
            [sys.executable, *program, str(self.config), *flags, *backends, *args],
            cwd=ROOT,
            env={**ENVIRONMENT, **light, "CHAOS_FAULT": fault},
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
        keys = {"backend": backend, **({"shared": True} if SHARED else {}), **node}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        self.config.write_text("[node]\n" + text)

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
        """Asked again while the supervisor takes too long to say: the machine is busy, or stood still."""
        until = time.monotonic() + WAIT
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._http, timeout=WAIT)
            try:
                connection.request("GET", "/stats")
                answer = connection.getresponse()
                if answer.status == 200:
                    found: dict[str, Any] = json.load(answer)
                    return found
                text = answer.read()
            finally:
                connection.close()
            if time.monotonic() > until:
                raise RuntimeError(f"/stats: {answer.status} {text!r}")

    @property
    def inflight(self) -> int:
        return int(self.stats()["requests"]["inflight"])

    @property
    def open_connections(self) -> int:
        return int(self.stats()["connections"]["open"])

    @property
    def workers(self) -> list[int]:
        """Of those that are ready."""
        return self._ready("workers")

    @property
    def children(self) -> list[int]:
        """The workers and the engine processes that are ready."""
        return self._ready("workers", "engines")

    def _ready(self, *kinds: str) -> list[int]:
        stats = self.stats()
        return [one["pid"] for kind in kinds for one in stats[kind] if one["state"] == "ready"]

    def processes(self) -> list[psutil.Process]:
        """The supervisor's and all below it."""
        try:
            supervisor = psutil.Process(self.pid)
            found = [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._seen.update(found)
        return found

    def known_workers(self) -> set[int]:
        """Those that the supervisor holds for alive."""
        return {row["pid"] for row in self.stats()["workers"]}

    def shared_files(self) -> list[str]:
        """The files in ``/dev/shm`` that its processes have open, or mapped, but those of a Python that lies there."""
        files = set()
        for process in self.processes():
            files.update(each.path for each in [*process.open_files(), *process.memory_maps()])
        own = (sys.prefix, sys.base_prefix, str(ROOT))
        return sorted(file for file in files if file.startswith("/dev/shm/") and not file.startswith(own))

    def alive(self) -> list[psutil.Process]:
        """Of those that were ever seen."""
        return [one for one in self._seen if _is_alive(one)]

    def memory(self) -> int:
        """Bytes that are resident, of the supervisor and its children."""
        return sum(psutil.Process(pid).memory_info().rss for pid in (self.pid, *self.children))

    def descriptors(self) -> int:
        return sum(psutil.Process(pid).num_fds() for pid in (self.pid, *self.children))

    def threads(self) -> int:
        # The page's threads, one for each question, come and go.
        return sum(psutil.Process(pid).num_threads() for pid in self.children)

    @property
    def stderr(self) -> str:
        return "".join(self._stderr)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.processes()
        for one in sorted(self.alive(), key=lambda process: process.pid):
            try:
                one.kill()
            except psutil.NoSuchProcess:
                pass
        self.process.wait(WAIT)
        self._reader.join(WAIT)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self._folder.cleanup()
