"""A local Ray cluster with Serve, and load on it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import psutil

from benchmarks.common import REPOSITORY, Report, python

DEMO = "configs/demo.toml"
IMAGE = REPOSITORY / "configs/demo/images/ring_00.jpg"
PORT = 8000
QUIET = {"log_level": "ERROR", "enable_access_log": False}
# Takes the time of a batch on an accelerator, and no core. With the text "hang" it does not end.
SLEEP = '''
import threading, time
from torchpipe_py import Backend, Param, register_backend
from torchpipe_py.values import to_int

class Sleep(Backend):
    """Batches of eight, 20 ms each, or ``milliseconds``."""

    milliseconds = Param(to_int, 20, low=1, doc="of a batch")

    def max(self):
        return 8

    def forward(self, items):
        if any(item["data"] == b"hang" for item in items):
            threading.Event().wait()
        time.sleep(self.milliseconds / 1000)
        for item in items:
            item["result"] = ("slept", 1.0)

register_backend(Sleep, "Sleep")
'''
SLEEP_TOML = 'batching_timeout = 2\n[sleep]\nbackend = "Sleep"\ninstance_num = 2\n'


def is_missing(report: Report) -> bool:
    """Whether Ray is not installed; a remark says so then."""
    if not (find_spec("ray") and find_spec("ray.serve")):
        report.remarks.append("Ray is not installed: pip install -e '.[ray]'")
        return True
    return False


@contextmanager
def cluster(cpus: int = 8) -> Iterator[str]:
    """One node with so many logical CPUs, ended by its own means; its address for ``serve deploy``."""
    import ray
    from ray import serve

    os.chdir(REPOSITORY)
    # NOTE: the niceness of workers is 15 otherwise: whatever else runs would hold up Ray's side alone.
    context = ray.init(
        address="local", num_cpus=cpus, object_store_memory=100 * 2**20, include_dashboard=True,
        logging_level="ERROR", log_to_driver=False, _system_config={"worker_niceness": 0},
    )  # fmt: skip
    try:
        serve.start(http_options={"port": PORT})
        yield f"http://{context.dashboard_url}"
    finally:
        serve.shutdown()
        ray.shutdown()


def deployed(**args: Any) -> Any:
    """A handle to ``app(args)``, once it runs."""
    from ray import serve

    from torchpipe_py.ray import app

    return serve.run(app(args), logging_config=QUIET)


@contextmanager
def http_load(port: int, clients: int, seconds: float, rate: float = 0) -> Iterator[Callable[[], dict[str, Any]]]:
    """Started; what is given waits for its outcome."""
    args = ("-m", "benchmarks.ray.http_load", str(port), str(IMAGE), str(clients), str(seconds), str(rate))
    process = python(*args, stdout=subprocess.PIPE, cwd=REPOSITORY)

    def outcome() -> dict[str, Any]:
        out, _ = process.communicate(timeout=seconds + 60)
        result: dict[str, Any] = json.loads(out)
        return result

    yield outcome
    process.wait(timeout=60)


def replicas() -> list[psutil.Process]:
    """The replicas' processes."""
    return [process for process in psutil.Process().children(recursive=True) if "ServeReplica" in _title(process)]


def wait_for(done: Callable[[], bool], seconds: float = 120.0) -> float:
    """Seconds until it is; ``TimeoutError`` after so many."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > seconds:
            raise TimeoutError
        time.sleep(0.05)
    return time.monotonic() - began


def is_running(count: int) -> bool:
    """Whether Serve has so many replicas, and all are healthy."""
    from ray import serve

    application = serve.status().applications.get("default")
    deployment = application and application.deployments.get("PipeDeployment")  # none while it is built
    return bool(
        application and deployment and application.status == "RUNNING" and deployment.status == "HEALTHY"
        and dict(deployment.replica_states) == {"RUNNING": count}
    )  # fmt: skip


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """What they have used so far."""
    used = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        used += times.user + times.system
    return used


def mean_batch(before: Mapping[int, int], after: Mapping[int, int]) -> float:
    """Of the batches between two looks at ``batch_sizes``."""
    more = {
        int(size): count - {int(k): v for k, v in before.items()}.get(int(size), 0) for size, count in after.items()
    }
    return sum(size * count for size, count in more.items()) / max(1, sum(more.values()))


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
