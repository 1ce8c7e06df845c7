"""CPU time of the server, of the load tester and of the machine over a run. Without psutil, only of this process."""

from __future__ import annotations

import importlib
import os
import socket
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torchpipe_py.loadtest.errors import CannotRunError
from torchpipe_py.loadtest.records import Outcome

try:
    psutil: ModuleType | None = importlib.import_module("psutil")
except ImportError:
    psutil = None

CLIENT_LIMIT = 0.9  # of a core, for one client process
MACHINE_LIMIT = 0.95  # of all cores: saturated
TESTER_SHARE_LIMIT = 0.5  # of the CPU time a saturated machine spent
JUDGED_FROM_S = 0.5  # the machine's clock ticks 100 times a second: shorter runs say nothing

_BUSY = ("user", "nice", "system", "irq", "softirq")


# --- clocks


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds between ``start`` and ``stop``, a span of ``wall`` seconds; None where it is not known.

    ``parent`` is this process with all its threads, ``machine`` all there is.
    """

    wall: float
    parent: float
    server: float | None
    machine: float | None

    @property
    def machine_busy(self) -> float | None:
        """The share of all cores that was in use."""
        return self.machine / self.wall / (os.cpu_count() or 1) if self.machine else None

    def others(self, ours: float) -> float | None:
        """What was not ``ours``, in seconds, of one core."""
        return None if self.machine is None else max(0.0, self.machine - ours) / self.wall


class CpuMeter:
    """Reads the CPU clocks twice.

    ``server`` counts with its descendants, but for this process and those ``not_server``, whoever their ancestors are.
    """

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
        spent = None if machine is None or before is None or wall < JUDGED_FROM_S else machine - before
        clocks = self._server_clocks()
        server = sum(seconds - self._server_before.get(pid, 0.0) for pid, seconds in clocks.items())
        return CpuUse(wall, parent, server if clocks else None, spent)

    def _server_clocks(self) -> dict[int, float]:
        """CPU seconds of each process of the server, descendants included."""
        clocks: dict[int, float] = {}
        if psutil is None:
            return clocks
        for pid in self._server:
            try:
                root = psutil.Process(pid)
                family = [root, *root.children(recursive=True)]
            except psutil.Error:
                continue
            for process in family:
                if process.pid not in self._not_server:
                    seconds = cpu_seconds(process.pid)
                    if seconds is not None:
                        clocks[process.pid] = seconds
        return clocks


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of one process, without its descendants; None where they are not known."""
    if psutil is None:
        return None
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


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


# --- the load tester's own


@dataclass(frozen=True)
class TesterCost:
    """What the load tester itself took: `cpu` in seconds, `busiest` client of one core, `share` of all CPU time spent.

    `others` is what processes that are neither server nor tester took, of one core; None where that is not known.
    """

    cpu: float
    us_per_call: float | None
    busiest: float
    share: float | None
    machine_busy: float | None
    others: float | None

    @property
    def limits(self) -> list[str]:
        """The reasons why this run measured the tester and not the server; empty for a valid run."""
        reasons = []
        if self.busiest > CLIENT_LIMIT:
            reasons.append(f"a client process used {self.busiest:.0%} of a core")
        saturated = self.machine_busy is not None and self.machine_busy > MACHINE_LIMIT
        if saturated and self.share is not None and self.share > TESTER_SHARE_LIMIT:
            reasons.append(f"the machine's CPU is saturated and the tester took {self.share:.0%} of it")
        return reasons


def tester_cost(outcome: Outcome, use: CpuUse) -> TesterCost:
    """Adds up the CPU time of clients and parent during the run."""
    clients = sum(log.cpu_ns for log in outcome.logs) / 1e9
    calls = sum(log.calls_done for log in outcome.logs)
    cpu = clients + use.parent
    return TesterCost(
        cpu=cpu,
        us_per_call=clients * 1e6 / calls if calls else None,
        busiest=max((log.cpu_ns / log.wall_ns for log in outcome.logs if log.wall_ns), default=0.0),
        share=min(1.0, cpu / use.machine) if use.machine else None,
        machine_busy=use.machine_busy,
        others=None if use.server is None else use.others(use.server + cpu),
    )


def cpu_fields(cost: TesterCost, use: CpuUse) -> dict[str, Any]:
    """The report's part about CPU time, in percent of one core."""
    return {
        "server_cpu_percent": None if use.server is None else 100 * use.server / use.wall,
        "tester_cpu_percent": 100 * cost.cpu / use.wall,
        "tester_cpu_us_per_call": cost.us_per_call,
        "tester_busiest_client_percent": 100 * cost.busiest,
        "tester_share_of_cpu": cost.share,
        "other_cpu_percent": None if cost.others is None else 100 * cost.others,
        "machine_busy": cost.machine_busy,
    }


# --- which processes are the server's


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
    if not is_local(host):
        return []
    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return []
    pids = {sock.pid for sock in sockets if _listens(sock, port) and sock.pid}
    return sorted(pids | {sibling for pid in pids for sibling in _siblings(pid, port)})


def _listens(sock: Any, port: int) -> bool:
    assert psutil is not None
    return bool(sock.status == psutil.CONN_LISTEN and sock.laddr.port == port)


def _siblings(pid: int, port: int) -> list[int]:
    """Processes with the same parent that listen too: of workers that inherited one socket, psutil names only one."""
    assert psutil is not None
    try:
        parent = psutil.Process(pid).parent()
        family = [] if parent is None else parent.children()
    except psutil.Error:
        return []
    listening = []
    for process in family:
        try:
            ask = getattr(process, "net_connections", None) or process.connections  # psutil before 6
            if any(_listens(sock, port) for sock in ask(kind="tcp")):
                listening.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return listening
