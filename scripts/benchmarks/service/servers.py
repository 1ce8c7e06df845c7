"""Services in processes of their own, and the load tester as a process that measures them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread, Timer
from typing import Any

from benchmarks.common import REPOSITORY, Load, python

SCRIPTS = REPOSITORY / "scripts"
_WARMUP = ["--warmup", "5"]  # the default, 50 calls of each client, takes longer than a slice of a second
_START_SECONDS = 600.0  # engines may have to be built
_END_SECONDS = 30.0
_REPORT_SECONDS = 60.0  # for the load tester to start, to warm up and to end


@contextmanager
def serving(config: str, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """``torchpipe-serve`` on ``config``; the port it listens on."""
    command = ["-m", "torchpipe_server", config, "--port", "0", "--host", "127.0.0.1", "--log-level", "warning"]
    with started([*command, *options], environment or {}) as port:
        yield port


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[int]:
    """This interpreter on ``command``, which prints ``... on HOST:PORT ...`` when it serves; the port."""
    process = python(*command, stdout=subprocess.PIPE, cwd=REPOSITORY, environment=environment)
    watchdog = Timer(_START_SECONDS, process.kill)
    watchdog.daemon = True
    watchdog.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        if not line:
            raise RuntimeError(f"{' '.join(command)} did not start")
        Thread(target=deque, args=(process.stdout, 0), daemon=True).start()  # a full pipe would stop who writes to it
        yield int(line.rsplit(" on ")[-1].split(" ")[0].rsplit(":", 1)[1])
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def run_clients(port: int, images: Path, clients: int, seconds: float, options: Sequence[str] = ()) -> Load:
    """Client processes in a closed loop for about ``seconds``; ``options`` are the load tester's."""
    return load_in(client_report(port, images, clients, seconds, options))


def client_report(
    port: int, images: Path, clients: int, seconds: float, options: Sequence[str] = (), statuses: Sequence[int] = (0,)
) -> dict[str, Any]:
    """The load tester's report of that; ``statuses`` are those that it may exit with."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        args = [*_WARMUP, "--img_dir", str(images), "--port", str(port), "--request_client", str(clients), *options]
        command = [sys.executable, str(SCRIPTS / "client_qps.py"), *args, "--duration", str(seconds), "--no-progress"]
        done = subprocess.run(
            [*command, "--json", file.name],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=seconds + _REPORT_SECONDS,
        )
        if done.returncode not in statuses:
            raise RuntimeError(f"the load tester exited with {done.returncode}: {done.stderr.strip()[-300:]}")
        report: dict[str, Any] = json.loads(Path(file.name).read_text(encoding="utf-8"))
    return report


def load_in(report: Mapping[str, Any]) -> Load:
    """The figures of a report."""
    qps, latency = report["qps"], report["latency_ms"]
    return Load(qps, latency["p50"], latency["p99"], 10 * (report["server_cpu_percent"] or 0.0) / qps)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
