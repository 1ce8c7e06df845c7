"""The cost of a run: CPU time of server, tester and machine; GPUs; a service's nodes and engine processes."""

from __future__ import annotations

import csv
import importlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from types import ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from torchpipe_py.errors import counted
from torchpipe_py.tools.load.records import CallLog
from torchpipe_py.tools.report import ToolError

try:
    psutil: ModuleType | None = importlib.import_module("psutil")
except ImportError:
    psutil = None

CLIENT_LIMIT = 0.9  # largest share of a core for a client process
MACHINE_LIMIT = 0.95  # share of all cores from which the machine is saturated
TESTER_SHARE_LIMIT = 0.5  # largest share of a saturated machine's CPU time
JUDGED_FROM_S = 0.5  # CPU clocks tick 100 times a second: shorter runs are not judged

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


# --- processors


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds in a span of ``wall`` seconds; None if unknown, as without psutil.

    ``parent`` is this process with all its threads, ``machine`` everything on the cores that it may use.
    """

    wall: float
    parent: float
    server: float | None
    machine: float | None

    def fields(self, ours: float) -> dict[str, Any]:
        """The part of the report on the machine; ``ours`` are the CPU seconds of everything in the run."""
        if self.machine is None:
            return {"other_cpu_percent": None, "machine_busy": None}
        busy = self.machine / self.wall / len(os.sched_getaffinity(0)) if self.machine else None
        return {"other_cpu_percent": 100 * max(0.0, self.machine - ours) / self.wall, "machine_busy": busy}


class CpuMeter:
    """Reads the CPU clocks twice.

    ``server`` counts with its descendants, except this process and ``not_server``.
    """

    def __init__(self, server: list[int], not_server: list[int]) -> None:
        self._server, self._not_server = server, {os.getpid(), *not_server}

    def start(self) -> None:
        """Begin the span."""
        self._before = self._clocks()

    def stop(self) -> CpuUse:
        """End the span. Of server processes that ended in it, those count that another one has waited for."""
        (started, parent, machine, before), (now, parent_now, machine_now, after) = self._before, self._clocks()
        used = ended = 0.0
        for pid, (own, children) in after.items():
            own_before, children_before = before.get(pid, (0.0, 0.0))
            used += own - own_before
            ended += children - children_before
        ended -= sum(sum(times) for pid, times in before.items() if pid not in after)
        server = used + max(0.0, ended) if after else None
        known = psutil is not None and now - started >= JUDGED_FROM_S
        return CpuUse(now - started, parent_now - parent, server, machine_now - machine if known else None)

    def _clocks(self) -> tuple[float, float, float, dict[int, tuple[float, float]]]:
        """Wall time; CPU seconds of this process, of the cores it may use (since boot), and of each server process.

        The last are its own, and those of its children that have ended.
        """
        machine, clocks = 0.0, dict[int, tuple[float, float]]()
        if psutil is not None:
            cores = psutil.cpu_times(percpu=True)
            usable = [cores[core] for core in os.sched_getaffinity(0) if core < len(cores)]
            machine = sum(getattr(times, name, 0.0) for times in usable for name in _BUSY)
            for pid in self._server:
                try:
                    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
                except psutil.Error:
                    continue
                for each in family:
                    if each not in self._not_server and (times := _cpu_times(each)):
                        clocks[each] = times.user + times.system, times.children_user + times.children_system
        return time.perf_counter(), time.process_time(), machine, clocks


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of one process, without descendants; None if unknown."""
    times = _cpu_times(pid)
    return times and float(times.user + times.system)


def _cpu_times(pid: int) -> Any:
    try:
        return psutil.Process(pid).cpu_times() if psutil else None
    except psutil.Error:  # type: ignore[union-attr]
        return None


def cpu_model() -> str:
    """The processor's name from /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return "unknown"


def cpu_fields(logs: Sequence[CallLog], use: CpuUse) -> dict[str, Any]:
    """The part of the report on CPU time of clients and server, in percent of one core."""
    clients, calls = sum(log.cpu_ns for log in logs) / 1e9, sum(log.calls_done for log in logs)
    cpu, known = clients + use.parent, use.server is not None
    busiest = max((log.cpu_ns / log.wall_ns for log in logs if log.wall_ns), default=0)
    fields = use.fields(cpu + (use.server or 0.0))
    return {
        "server_cpu_percent": 100 * use.server / use.wall if use.server is not None else None,
        "tester_cpu_percent": 100 * cpu / use.wall,
        "tester_cpu_us_per_call": clients * 1e6 / calls if calls else None,
        "tester_busiest_client_percent": 100 * busiest,
        "tester_share_of_cpu": min(1.0, cpu / use.machine) if use.machine else None,
        **fields,
        "other_cpu_percent": fields["other_cpu_percent"] if known else None,
    }


def cpu_limits(fields: dict[str, Any]) -> list[str]:
    """The reasons in ``cpu_fields`` why a run measured the tester instead of the server; empty for a valid run."""
    reasons = []
    if fields["tester_busiest_client_percent"] > 100 * CLIENT_LIMIT:
        reasons.append(f"a client process used {fields['tester_busiest_client_percent']:.0f}% of a core")
    busy, share = fields["machine_busy"], fields["tester_share_of_cpu"]
    if busy is not None and busy > MACHINE_LIMIT and share is not None and share > TESTER_SHARE_LIMIT:
        reasons.append(f"the machine's CPU is saturated and the tester took {share:.0%} of it")
    return reasons


# --- which processes are the server's


def is_local(host: str) -> bool:
    """Whether ``host`` is this machine, so that a socket can be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True


def find_server(host: str, port: int, given: int | None) -> list[int]:
    """The server's processes: the given one, or those that listen on ``port`` of this machine.

    Empty if they cannot be determined. Raises ``ToolError`` if the given one does not exist.
    """
    if psutil is None:
        return []
    if given is not None:
        if not psutil.pid_exists(given):
            raise ToolError(f"--server_pid {given}: no such process")
        return [given]

    def listens(sockets: Iterable[Any]) -> list[Any]:
        return [sock for sock in sockets if sock.status == psutil.CONN_LISTEN and sock.laddr.port == port]

    try:
        pids = {sock.pid for sock in listens(psutil.net_connections(kind="tcp")) if sock.pid} if is_local(host) else ()
    except psutil.Error:
        return []
    listening = set(pids)
    # psutil names only one of the processes that share an inherited socket: add its siblings.
    for pid in pids:
        with suppress(psutil.Error, OSError):
            parent = psutil.Process(pid).parent()
            for process in [] if parent is None else parent.children():
                ask = getattr(process, "net_connections", None) or process.connections  # psutil before 6
                if listens(ask(kind="tcp")):
                    listening.add(process.pid)
    return sorted(listening)


# --- GPUs

_QUERY = "index,name,utilization.gpu,memory.used,memory.total"
_END_S = 2.0


class GpuMeter:
    """Runs ``nvidia-smi``, if installed, which writes a sample per second to a temporary file.

    Utilisation is the share of the last sampling period in which any kernel ran.
    """

    def __init__(self, wanted: bool) -> None:
        self._program = shutil.which("nvidia-smi") if wanted else None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin the span."""
        if self._program is None:
            return
        self._samples = tempfile.TemporaryFile()  # noqa: SIM115
        command = [self._program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits", "-l", "1"]
        try:
            self._process = subprocess.Popen(command, stdout=self._samples, stderr=subprocess.DEVNULL)
        except OSError:
            self._samples.close()

    def stop(self) -> list[dict[str, Any]] | None:
        """End the span: means and maxima for each GPU; None if unknown. May be called again."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with self._samples as samples:
            samples.seek(0)
            return summarize_gpus(samples.read().decode(errors="replace").splitlines()) or None


def summarize_gpus(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Sample lines of ``nvidia-smi`` as one entry per GPU; memory in MiB, utilisation in percent.

    Values that a GPU does not report (``[N/A]``) are null; incomplete lines are ignored.
    """
    samples: defaultdict[int, list[list[str]]] = defaultdict(list)
    for row in csv.reader(lines, skipinitialspace=True):
        if len(row) == len(_QUERY.split(",")) and row[0].isdigit() and row[-1]:
            samples[int(row[0])].append(row)
    summaries = []
    for index, rows in sorted(samples.items()):
        columns = ([row[at].strip() for row in rows] for at in (2, 3, 4))
        use, memory, total = (
            [float(text) for text in texts if text.replace(".", "", 1).isdigit()] for texts in columns
        )
        figures = {"utilization_mean": sum(use) / len(use) if use else None, "utilization_max": max(use, default=None)}
        figures |= {"memory_used_max_mib": max(memory, default=None), "memory_total_mib": max(total, default=None)}
        summaries.append({"index": index, "name": rows[0][1], "samples": len(rows), **figures})
    return summaries


# --- nodes and engine processes

_FAILURES = ("failed", "expired", "shed")
_TOTALS = ("requests", "batches", *_FAILURES)
_TIMES = ("queue_ms", "batch_wait_ms", "compute_ms")
HAND_OVER_TIMES = ("slot_wait_ms", "there_ms", "in_engine_ms", "back_ms")
_ANSWER_S = 10.0
_NOT_FOUND = (
    "it answers 404, as the port that takes images does (torchpipe-serve --port); "
    "give the port of torchpipe-serve --http-port"
)


def node_figures(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, dict[str, Any]]:
    """The work of nodes between two ``stats()`` of a pipe: counts, mean batch, milliseconds per request.

    Null if nothing ran. ``compute_ms`` is the backend's time divided by the requests: a batch of 4 in 8 ms is 2 ms.
    ``busy`` is that time as a share of the instances' time in the run's ``seconds``; it may be above 1 for backends
    that wait for other nodes (``Jump``, ``MapReduce``), whose requests overlap.
    """
    figures = {}
    for name, node in after["nodes"].items():
        earlier = before["nodes"][name]
        spent = {key: node[key] - earlier[key] for key in (*_TOTALS, *_TIMES)}
        requests, batches = spent["requests"], spent["batches"]
        sizes = Counter(node["batch_sizes"])
        sizes.subtract(earlier["batch_sizes"])
        figures[name] = {
            **{key: node[key] for key in ("instances", "min", "max")},
            **{key: spent[key] for key in _TOTALS},
            "mean_batch": requests / batches if batches else None,
            "batch_sizes": {size: count for size, count in sizes.items() if count},
            **{key: spent[key] / requests if requests else None for key in _TIMES},
            "busy": spent["compute_ms"] / 1000 / (seconds * node["instances"]),
        }
    return figures


def node_rows(nodes: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Rows of the table, one for each node."""
    rows = []
    for name, node in nodes.items():
        text = f"{node['requests']} requests"
        failures = "".join(f", {node[key]} {key}" for key in _FAILURES if node[key])
        if not node["requests"]:
            rows.append((f"node {name}", text + failures))
            continue
        instances = f"{counted(node['instances'], 'instance')}, {node['busy']:.0%} busy"
        text += f", mean batch {node['mean_batch']:.2f}{failures}; {_times(node, _TIMES)}  ms each; {instances}"
        rows.append((f"node {name}", text))
    return rows


def _times(figures: dict[str, Any], keys: Iterable[str]) -> str:
    return "  ".join(f"{key.removesuffix('_ms').replace('_', ' ')} {figures[key]:.2f}" for key in keys)


class ServiceMeter:
    """Reads ``/stats`` before and after; does nothing without a port. Reads CPU time too if the service is local."""

    def __init__(self, host: str, port: int | None, is_local: bool) -> None:
        self._url = None if port is None else f"http://{f'[{host}]' if ':' in host else host}:{port}/stats"
        self._is_local = is_local

    def start(self) -> None:
        """Begin the span; ``ToolError`` if ``/stats`` cannot be read."""
        if self._url is not None:
            try:
                self._before = self._read()
            except (OSError, HTTPException, ValueError) as error:
                why = _NOT_FOUND if isinstance(error, HTTPError) and error.code == HTTPStatus.NOT_FOUND else error
                raise ToolError(f"--http-port: {self._url} does not answer with statistics: {why}") from None

    def stop(self) -> dict[str, Any] | None:
        """End the span: ``service_figures``, or None if unknown."""
        if self._url is None:
            return None
        try:
            return service_figures(self._before, self._read())
        except (OSError, HTTPException, ValueError):
            return None  # the service has ended

    def _read(self) -> dict[str, Any]:
        opener = build_opener(ProxyHandler({}))  # like the images: without a proxy
        try:
            with opener.open(self._url or "", timeout=_ANSWER_S) as answer:
                stats = json.load(answer)
        except HTTPError as error:
            error.close()  # closes the connection
            raise
        if not isinstance(stats, dict) or not {"nodes", "engines", "hand_over", "time"} <= stats.keys():
            raise ValueError("it is not a torchpipe-serve of this version")
        for engine in stats["engines"]:
            engine["cpu_s"] = cpu_seconds(engine["pid"]) if self._is_local and engine["pid"] else None
        return stats


def service_figures(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """``node_figures``, the hand-over to engine processes, and the CPU use of each engine process.

    Nodes and processes that were not there before are left out. CPU is in percent of a core; null means unknown.
    """
    seconds = after["time"] - before["time"]
    nodes = {name: node for name, node in after["nodes"].items() if name in before["nodes"]}
    earlier = {engine["pid"]: engine["cpu_s"] for engine in before["engines"]}
    engines = []
    for engine in after["engines"]:
        if engine["pid"] in earlier:
            spent = (earlier[engine["pid"]], engine["cpu_s"])
            percent = None if None in spent else 100 * (spent[1] - spent[0]) / seconds
            engines.append({"index": engine["index"], "cpu_percent": percent})
    return {
        "nodes": node_figures(before, {"nodes": nodes}, seconds),
        "hand_over": hand_over_figures(before["hand_over"], after["hand_over"]),
        "engines": engines,
    }


def hand_over_figures(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """The requests that engine processes answered, and mean milliseconds of each; None without any."""
    requests = after["requests"] - before["requests"]
    if requests <= 0:
        return None
    return {"requests": requests, **{key: (after[key] - before[key]) / requests for key in HAND_OVER_TIMES}}


def service_rows(service: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Rows of the table for each node, the hand-over and each engine process."""
    if service is None:
        return []
    rows = node_rows(service["nodes"])
    if service["hand_over"] is not None:
        times = _times(service["hand_over"], HAND_OVER_TIMES)
        rows.append(("hand-over", f"{service['hand_over']['requests']} requests; {times}  ms each"))
    for engine in service["engines"]:
        use = "n/a" if engine["cpu_percent"] is None else f"{engine['cpu_percent']:.0f} % of a core"
        rows.append((f"engine process {engine['index']}", use))
    return rows
