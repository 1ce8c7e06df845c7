"""mosec and LitServe as services that do the same work over HTTP."""

from __future__ import annotations

import http.client
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Load, Report, picture
from benchmarks.services import free_port, run_clients, started

ARGUMENTS = {
    "mosec": ["--address", "127.0.0.1", "--log-level", "warning", "--timeout", "30000", "--port"],
    "litserve": ["--port"],
}
PATHS = {"mosec": "/inference", "litserve": "/predict"}


class Peer(NamedTuple):
    """A service that accepts images at ``path``; all its processes descend from ``pid``."""

    port: int
    pid: int
    path: str

    def load(self, images: Path, clients: int, seconds: float) -> Load:
        """Load it by client processes."""
        options = ["--transport", "http", "--path", self.path, "--server_pid", str(self.pid)]
        return run_clients(self.port, images, clients, seconds, options)


def is_installed(name: str, report: Report) -> bool:
    """Whether a library can be imported; otherwise the report gets a remark."""
    if importlib.util.find_spec(name) is not None:
        return True
    report.remarks.append(f"no {name}: not installed (extra 'bench')")
    return False


@contextmanager
def serving_module(
    name: str, module: str, settings: Mapping[str, object], options: Sequence[str] = ()
) -> Iterator[Peer]:
    """A module with a service of mosec or LitServe, from when it answers an image until the block ends.

    It finds each of the ``settings`` in its environment, as ``BENCH_…``.
    """
    port, path = free_port(), PATHS[name]
    command = ["-m", module, *ARGUMENTS[name][:-1], *options, ARGUMENTS[name][-1], str(port)]
    environment = {f"BENCH_{key}": str(value) for key, value in settings.items()}
    with started(command, lambda _: port if _answers(port, path) else None, environment) as (_, pid):
        yield Peer(port, pid, path)


def _answers(port: int, path: str) -> bool:
    """Whether the service answers an image."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection, suppress(OSError):
        connection.request("POST", path, picture())
        return connection.getresponse().status == 200
    return False
