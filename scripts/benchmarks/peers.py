"""mosec and LitServe as services that do the same work over HTTP."""

from __future__ import annotations

import http.client
import importlib.util
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from benchmarks.common import Load, Report, picture, python
from benchmarks.services import free_port, run_clients

_START_SECONDS = 150  # processes with an engine import PyTorch and capture CUDA graphs
ARGUMENTS = {
    "mosec": ["--address", "127.0.0.1", "--log-level", "warning", "--timeout", "30000", "--port"],
    "litserve": ["--port"],
}
PATHS = {"mosec": "/inference", "litserve": "/predict"}


class Peer(NamedTuple):
    """A service that takes images at ``path``; all its processes descend from ``pid``."""

    port: int
    pid: int
    path: str

    def load(self, images: Path, clients: int, seconds: float) -> Load:
        """What client processes measure."""
        options = ["--transport", "http", "--path", self.path, "--server_pid", str(self.pid)]
        return run_clients(self.port, images, clients, seconds, options)


def is_installed(name: str, report: Report) -> bool:
    """Whether a library can be imported; if it cannot, the report has a remark."""
    if importlib.util.find_spec(name) is not None:
        return True
    report.remarks.append(f"no {name}: not installed (extra 'bench')")
    return False


def serving_classifier(
    name: str, model: str, size: int, workers: int, batch: int, wait_ms: int
) -> AbstractContextManager[Peer]:
    """mosec or LitServe with the benchmark's classifier."""
    settings = {"MODEL": model, "SIZE": size, "WORKERS": workers, "BATCH": batch, "WAIT_MS": wait_ms}
    environment = {f"BENCH_{key}": str(value) for key, value in settings.items()}
    return serving_module(name, f"benchmarks.{name}_service", environment)


@contextmanager
def serving_module(
    name: str, module: str, environment: Mapping[str, str], options: Sequence[str] = ()
) -> Iterator[Peer]:
    """A module with a service of mosec or LitServe, from when it answers an image until the block ends."""
    port = free_port()
    command = ["-m", module, *ARGUMENTS[name][:-1], *options, ARGUMENTS[name][-1], str(port)]
    with tempfile.TemporaryFile("w+") as log:
        process = python(*command, environment=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            if not _answers(process, port, PATHS[name]):
                log.seek(0)
                raise RuntimeError(f"{module} did not start: {log.read().strip()[-1000:]}")
            yield Peer(port, process.pid, PATHS[name])
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=60)
                os.killpg(process.pid, signal.SIGKILL)  # LitServe's children outlive it


def _answers(process: subprocess.Popen[str], port: int, path: str) -> bool:
    """Wait until it answers an image. ``False`` if it ended, or took too long."""
    end = monotonic() + _START_SECONDS
    while process.poll() is None and monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with suppress(OSError):
            connection.request("POST", path, picture())
            if connection.getresponse().status == 200:
                return True
        connection.close()
        sleep(0.2)
    return False
