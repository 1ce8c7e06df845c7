"""CPU time of the server, of the load tester and of the machine over a run. Without psutil, only the tester's own."""

from __future__ import annotations

import importlib
import os
import socket
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .errors import CannotRunError

try:
    psutil: ModuleType | None = importlib.import_module("psutil")
except ImportError:
    psutil = None

_BUSY = ("user", "nice", "system", "irq", "softirq")


def is_local(host: str) -> bool:
    """Whether `host` names an address of this machine: one that a socket can be bound to."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def find_server(host: str, port: int, given: int | None) -> list[int]:
    """The processes whose CPU time is the server's: the given one, or those that listen on `port` of this machine.

    Empty when they cannot be found out. Raises `CannotRunError` when the given one does not exist.
    """
    if psutil is None:
        return []
    if given is not None:
        if not psutil.pid_exists(given):
            raise CannotRunError(f"--server_pid {given}: no such process")
        return [given]
    return _listeners(port) if is_local(host) else []


def _listeners(port: int) -> list[int]:
    assert psutil is not None
    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return []
    found = {s.pid for s in sockets if s.status == psutil.CONN_LISTEN and s.laddr.port == port and s.pid}
    return sorted(found)


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds between `start` and `stop`, a span of `wall` seconds; None where it is not known."""

    wall: float
    parent: float
    server: float | None
    machine: float | None


class CpuMeter:
    """Reads the CPU clocks twice. `not_server` are processes that count for the tester, whoever their ancestors are."""

    def __init__(self, server: list[int], not_server: list[int]) -> None:
        self._server = server
        self._not_server = {os.getpid(), *not_server}

    def start(self) -> None:
        """The span begins."""
        self._server_before = self._server_clocks()
        self._machine_before = _machine_clock()
        self._parent_before = time.process_time()
        self._started = time.perf_counter()

    def stop(self) -> CpuUse:
        """The span ends. Of a server process that ended in it, nothing is counted."""
        wall = time.perf_counter() - self._started
        parent = time.process_time() - self._parent_before
        machine, before = _machine_clock(), self._machine_before
        spent = None if machine is None or before is None else machine - before
        return CpuUse(wall, parent, self._server_spent(), spent)

    def _server_spent(self) -> float | None:
        after = self._server_clocks()
        if not after:
            return None
        return sum(seconds - self._server_before.get(pid, 0.0) for pid, seconds in after.items())

    def _server_clocks(self) -> dict[int, float]:
        """CPU seconds of each process of the server, descendants included."""
        clocks: dict[int, float] = {}
        for root in self._server:
            for process in _family(root):
                if process.pid not in self._not_server:
                    _read_clock(process, clocks)
        return clocks


def _family(pid: int) -> list[Any]:
    assert psutil is not None
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _read_clock(process: Any, clocks: dict[int, float]) -> None:
    assert psutil is not None
    try:
        times = process.cpu_times()
    except psutil.Error:
        return
    clocks[process.pid] = times.user + times.system


def _machine_clock() -> float | None:
    """CPU seconds that all cores together have been busy since boot."""
    if psutil is None:
        return None
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in _BUSY)


def cpu_model() -> str:
    """The processor's name as Linux gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"
