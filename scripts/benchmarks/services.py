"""Services in separate processes, measured by the load tester, ``/stats`` and the system."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any
from urllib.request import urlopen

import psutil

from benchmarks.common import REPOSITORY, Load, python
from torchpipe_py.tools.export.config import to_toml
from torchpipe_py.tools.load.judge import EXIT_FAILED, EXIT_INVALID, EXIT_OK
from torchpipe_py.tools.load.measure import HAND_OVER_TIMES, hand_over_figures, node_figures

MIB = 2**20
Tables = Mapping[str, Mapping[str, Any]]

_WARMUP = ["--warmup", "5"]  # calls per client; the default, 5 %, would be one call in so short a run
_START_SECONDS = 600.0  # engines may have to be built
_END_SECONDS = 60.0
_REPORT_SECONDS = 60.0  # for the load tester to start, to warm up and to end

# -- start and load -----------------------------------------------------------------------------------------------


@contextmanager
def serving(config: str | Tables, options: Sequence[str] = (), code: str = "") -> Iterator[int]:
    """Run ``torchpipe-serve`` on a file or tables, with the backends that ``code`` registers; yield its port."""
    with serving_process(config, options, code) as (port, _):
        yield port


@contextmanager
def serving_process(config: str | Tables, options: Sequence[str] = (), code: str = "") -> Iterator[tuple[int, int]]:
    """``serving``, with the port and the process id, whose descendants are the service's other processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "service.toml")
        if not isinstance(config, str):
            path.write_text(to_toml(config), encoding="utf-8")
        if code:
            path.with_suffix(".py").write_text(code, encoding="utf-8")
            options = [*options, "--import", str(path.with_suffix(".py"))]
        command = ["-m", "torchpipe_server", config if isinstance(config, str) else str(path), *options]
        with started([*command, "--port", "0", "--host", "127.0.0.1", "--log-level", "warning"]) as service:
            yield service


def printed_port(log: str) -> int | None:
    """The port in the line ``... on HOST:PORT ...`` that a service prints once it serves."""
    line = re.search(r" on \S+:(\d+) .*\n", log)
    return int(line[1]) if line else None


@contextmanager
def started(
    command: Sequence[str],
    port_of: Callable[[str], int | None] = printed_port,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, int]]:
    """This interpreter on ``command``, once ``port_of`` its output gives one; the port and the process id."""
    with tempfile.TemporaryFile("w+") as log:
        streams: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": REPOSITORY}
        process = python(*command, environment=environment, start_new_session=True, **streams)
        end = monotonic() + _START_SECONDS
        try:
            while (port := port_of(_text(log))) is None:
                if process.poll() is not None or monotonic() > end:
                    raise RuntimeError(f"{' '.join(command)} did not start: {_text(log).strip()[-1000:]}")
                sleep(0.05)
            yield port, process.pid
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # LitServe's children outlive it
            process.wait()


def _text(log: IO[str]) -> str:
    return os.pread(log.fileno(), 2**20, 0).decode(errors="replace")


def run_clients(port: int, images: Path, clients: int, seconds: float, options: Sequence[str] = ()) -> Load:
    """Client processes in a closed loop for about ``seconds``; ``options`` are those of the load tester."""
    return load_in(client_report(port, images, clients, seconds, options))


def client_report(port: int, images: Path, clients: int, seconds: float, options: Sequence[str] = ()) -> dict[str, Any]:
    """``run_clients``, returning the load tester's report; ``RuntimeError`` if an image has no result."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, str(REPOSITORY / "scripts" / "client_qps.py"), "--json", file.name, "--no-progress"]
        command += ["--img_dir", str(images), "--port", str(port), "--request_client", str(clients)]
        command += ["--duration", str(seconds), *_WARMUP, *options]
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, check=False, timeout=seconds + _REPORT_SECONDS, **streams)
        if done.returncode not in (EXIT_OK, EXIT_FAILED, EXIT_INVALID):
            raise RuntimeError(f"the load tester exited with {done.returncode}: {done.stderr.strip()[-300:]}")
        report: dict[str, Any] = json.loads(Path(file.name).read_text(encoding="utf-8"))
    if report["errors"] or not report.get("stable", True):
        raise RuntimeError(f"the load tester failed: {report['errors'] or report['unstable_because']}")
    return report


def load_in(report: Mapping[str, Any]) -> Load:
    """The figures of a report."""
    qps, latency = report["qps"], report["latency_ms"]
    return Load(qps, latency["p50"], latency["p99"], 10 * (report["server_cpu_percent"] or 0.0) / qps)


def free_port() -> int:
    """An unused port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


# -- observe ------------------------------------------------------------------------------------------------------


def observed(http: int, port: int, images: Path, clients: int, seconds: float) -> Load:
    """A run, with a remark about the work of nodes and machine; ``http`` is the port of ``/stats``."""
    before = stats(http)
    report = client_report(port, images, clients, seconds)
    after = stats(http)
    parts = [f"machine {100 * (report['machine_busy'] or 0):.0f}% busy"]
    for node, figures in node_figures(before, after, after["time"] - before["time"]).items():
        if figures["requests"]:
            batch = f" in {figures['mean_batch']:.1f}s" if figures["mean_batch"] > 1 else ""
            times = "+".join(f"{figures[key]:.1f}" for key in ("queue_ms", "batch_wait_ms", "compute_ms"))
            parts.append(f"{node}{batch} {times} ms")
    on_the_way = hand_over_figures(before["hand_over"], after["hand_over"])
    if on_the_way is not None:
        parts.append("slot+there+engine+back " + "+".join(f"{on_the_way[key]:.2f}" for key in HAND_OVER_TIMES) + " ms")
    return replace(load_in(report), note=", ".join(parts))


def stats(http: int) -> dict[str, Any]:
    """The answer of ``/stats``."""
    with urlopen(f"http://127.0.0.1:{http}/stats", timeout=10) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def pss_mib(pid: int) -> float:
    """Memory of a process and all its descendants in MiB; shared memory counts once."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)  # not every kernel has PSS
    return total / MIB


def gpu_mib() -> float:
    """Memory in use on the first GPU, all processes' together; 0 without ``nvidia-smi``."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0.0
    query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    words = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30).stdout.split()
    return float(words[0]) if words and words[0].isdigit() else 0.0
