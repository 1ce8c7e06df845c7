"""A service in processes of its own, with a port for monitoring, seen from outside: signals, ``/stats``, ``/proc``."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import psutil

from kit.services import Process, SteeredProcess, told_at
from kit.waits import is_alive


class Monitored(Process):
    """Leaving the ``with`` block ends every process that there was ever seen."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, "--http-port", "0", **more)
        self.address = ""
        self._seen: set[psutil.Process] = set()

    def wait_started(self) -> Monitored:
        super().wait_started()
        self.address = self.process.stdout.readline().split()[0]
        self.processes()
        return self

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a path of the monitoring port, given without its slash."""
        return told_at(self.address + path)

    @property
    def http_port(self) -> int:
        return int(self.address.split(":")[2].strip("/"))

    @property
    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("stats")[1])
        return found

    @property
    def is_ready(self) -> bool:
        return self.get("ready")[0] == 200

    @property
    def inflight(self) -> int:
        return int(self.stats["requests"]["inflight"])

    @property
    def open_connections(self) -> int:
        return int(self.stats["connections"]["open"])

    def pids(self, kind: str = "workers") -> list[int]:
        """Of the workers, or engines, that are ready."""
        return [one["pid"] for one in self.stats[kind] if one["state"] == "ready"]

    def processes(self) -> list[psutil.Process]:
        """The supervisor's and all below it."""
        try:
            supervisor = psutil.Process(self.pid)
            found = [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._seen.update(found)
        return found

    def alive(self) -> list[psutil.Process]:
        """Of those that were ever seen."""
        return [one for one in self._seen if is_alive(one)]

    def __exit__(self, *error: Any) -> None:
        self.processes()
        for one in sorted(self.alive(), key=lambda process: process.pid):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        super().__exit__(*error)


class SteeredService(Monitored, SteeredProcess):
    """Both."""


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, user's and system's."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
