"""What the service is measured against, doing the same work over HTTP: mosec and LitServe."""

from __future__ import annotations

import http.client
import importlib.util
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from benchmarks.common import Load, Report, python, test_jpeg
from benchmarks.service.servers import free_port, run_clients

CLIENTS = 10
SAME_BATCH = 8  # of configs/demo.toml, with its timeout
SAME_TIMEOUT_MS = 2
WORKERS = 2
_START_SECONDS = 150  # processes with an engine import PyTorch and capture CUDA graphs


class Peer(NamedTuple):
    """A service that takes images at ``path``; all its processes descend from ``pid``."""

    port: int
    pid: int
    path: str

    @property
    def options(self) -> list[str]:
        """What tells the load tester so."""
        return ["--transport", "http", "--path", self.path, "--server_pid", str(self.pid)]


def mosec_subjects(
    stack: ExitStack, settings: Mapping[str, str], folder: Path, seconds: float, report: Report
) -> dict[str, Callable[[], Load]]:
    """mosec without and with batches, for many clients and for one; nothing but a remark where it is not installed."""
    if not is_installed("mosec", report):
        return {}
    subjects: dict[str, Callable[[], Load]] = {}
    for batch in (1, SAME_BATCH):
        peer = stack.enter_context(mosec(settings, batch))
        for clients in (CLIENTS, 1):
            name = f"mosec, {WORKERS} workers, batch {batch}, {clients} clients"
            subjects[name] = partial(run_clients, peer.port, folder, clients, seconds, peer.options)
    return subjects


def is_installed(name: str, report: Report) -> bool:
    """Whether it is; the report says where it is not."""
    if importlib.util.find_spec(name) is not None:
        return True
    report.remarks.append(f"no {name}: not installed (extra 'bench')")
    return False


@contextmanager
def mosec(work: Mapping[str, str], batch: int, workers: int = WORKERS) -> Iterator[Peer]:
    """mosec; ``work`` is what ``mosec_service.py`` is to do."""
    port = free_port()
    command = ["benchmarks.service.mosec_service", *mosec_options(port)]
    with started(command, {**work, **_settings(batch, workers)}, port, ["/inference"]) as peer:
        yield peer


def mosec_options(port: int) -> list[str]:
    """Of its command line."""
    return ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning"]


@contextmanager
def litserve(work: Mapping[str, str], batch: int, workers: int = WORKERS) -> Iterator[Peer]:
    """LitServe; ``work`` is what ``litserve_service.py`` is to do."""
    port = free_port()
    settings = {**work, **_settings(batch, workers), "BENCH_PORT": str(port)}
    with started(["benchmarks.service.litserve_service"], settings, port, ["/predict"]) as peer:
        yield peer


def _settings(batch: int, workers: int) -> dict[str, str]:
    return {"BENCH_BATCH": str(batch), "BENCH_WAIT_MS": str(SAME_TIMEOUT_MS), "BENCH_WORKERS": str(workers)}


@contextmanager
def started(command: Sequence[str], environment: Mapping[str, str], port: int, paths: Sequence[str]) -> Iterator[Peer]:
    """A module of this interpreter with its options, once it answers at all the paths; asked at the first of them."""
    with tempfile.TemporaryFile("w+") as log:
        process = python("-m", *command, environment=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            end = monotonic() + _START_SECONDS
            if not all(_answers(process, port, path, end) for path in paths):
                log.seek(0)
                raise RuntimeError(f"{command[0]} did not start: {log.read().strip()[-1000:]}")
            yield Peer(port, process.pid, paths[0])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=60)
                os.killpg(process.pid, signal.SIGKILL)  # LitServe's children outlive it


def _answers(process: subprocess.Popen[str], port: int, path: str, end: float) -> bool:
    """Wait until it answers an image; not when it has ended, or at the ``end``."""
    while process.poll() is None and monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("POST", path, test_jpeg())
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        finally:
            connection.close()
        sleep(0.2)
    return False
