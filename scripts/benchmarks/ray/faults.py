"""What clients of Ray Serve see when a replica dies or hangs, when there is too much, on a reload, at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import REPOSITORY, Report, Row, load_of, python
from benchmarks.ray.cluster import (
    DEMO,
    PORT,
    SLEEP,
    SLEEP_TOML,
    cluster,
    deployed,
    http_load,
    is_missing,
    is_running,
    replicas,
    wait_for,
)

CLIENTS = 20
WARM_SECONDS = 4.0


def ray_faults(seconds: float, rounds: int) -> Report:
    """Each while 20 clients ask over HTTP."""
    report = Report(f"Ray Serve: {CLIENTS} clients over HTTP while something happens")
    if is_missing(report):
        return report
    with tempfile.TemporaryDirectory() as folder:
        code, config = Path(folder, "sleep_backend.py"), Path(folder, "sleep.toml")
        code.write_text(SLEEP, encoding="utf-8")
        config.write_text(SLEEP_TOML, encoding="utf-8")
        sleeping = {"config": str(config), "import": str(code)}
        with cluster() as address:
            _killed(report, sleeping, seconds)
            _reloaded(report, sleeping, seconds, Path(folder, "serve.yaml"), address)
            _full(report, sleeping, seconds)
            _ended(report, sleeping, seconds)
            _hung(report, sleeping)
        _two_nodes(report)
    return report


@contextmanager
def _under_load(report: Report, what: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The body happens once the load has gone on for a while; a row says what the clients saw."""
    seen: dict[str, Any] = {}
    with http_load(PORT, CLIENTS, WARM_SECONDS + seconds) as outcome:
        time.sleep(WARM_SECONDS)
        yield seen
        seen.update(outcome())
    load = load_of(seen["latencies"] or [0.0], WARM_SECONDS + seconds)
    failed = seen["failed_at"]
    note = f"{seen['statuses']}, longest {1000 * seen['longest']:.0f} ms"
    if failed:
        note += f", others within {max(failed) - min(failed):.2f} s"
    report.rows.append(Row(what, load.qps, load.p50, load.p99, note))


def _killed(report: Report, args: Mapping[str, Any], seconds: float) -> None:
    """One of two replicas, by SIGKILL."""
    deployed(**args, replicas=2)
    with _under_load(report, "a replica of two is killed", seconds + 10.0) as seen:
        one, other = replicas()
        os.kill(one.pid, signal.SIGKILL)
        again = wait_for(lambda: len({p.pid for p in replicas()} - {one.pid, other.pid}) == 1 and is_running(2))
    lost = sum(count for status, count in seen["statuses"].items() if status != "200")
    report.remarks.append(f"two replicas run again {again:.1f} s after one was killed")
    report.require("requests that fail, of those the killed replica had", lost, high=CLIENTS + 1)


def _reloaded(report: Report, args: Mapping[str, Any], seconds: float, file: Path, address: str) -> None:
    """``serve deploy`` of a file with another ``user_config``; before, it deploys the application."""
    application = {"name": "default", "import_path": "torchpipe_py.ray:app", "args": dict(args)}

    def deploy(timeout: int) -> None:
        deployment = {"name": "PipeDeployment", "user_config": {"global.batching_timeout": timeout}}
        content = {"applications": [{**application, "deployments": [deployment]}]}
        file.write_text(json.dumps(content), encoding="utf-8")  # which is YAML, too
        command = "from ray.serve.scripts import cli; cli()"
        process = python("-c", command, "deploy", str(file), "-a", address, stdout=subprocess.DEVNULL)
        if process.wait(60):
            raise subprocess.SubprocessError("serve deploy")

    deploy(1)
    wait_for(lambda: is_running(1))
    before = {process.pid for process in replicas()}
    with _under_load(report, "user_config changes the pipe", seconds + 4.0) as seen:
        deploy(4)
    report.require("answers that are not 200 during the change", len(seen["failed_at"]), high=1)
    report.require("replicas that were started anew for it", len({p.pid for p in replicas()} - before), high=1)


def _full(report: Report, args: Mapping[str, Any], seconds: float) -> None:
    deployed(**args, **{"global.max_inflight": 4})
    with _under_load(report, "max_inflight = 4", seconds) as seen:
        pass
    others = {status for status in seen["statuses"] if status not in ("200", "429")}
    report.require("kinds of answers other than 200 and 429", len(others), high=1)


def _ended(report: Report, args: Mapping[str, Any], seconds: float) -> None:
    """``serve.delete`` while requests are on their way: what was accepted is answered."""
    from ray import serve

    deployed(**args)
    with _under_load(report, "the application is deleted", seconds + 2.0) as seen:
        serve.delete("default")
    others = {status for status in seen["statuses"] if status not in ("200", "404", "503")}
    report.require("kinds of answers other than 200, and 404 or 503 afterwards", len(others), high=1)


def _hung(report: Report, args: Mapping[str, Any]) -> None:
    """A batch that does not end: the replica is unhealthy, and Serve replaces it."""
    deployed(**args, hang_seconds=2, drain_seconds=2)
    before = {process.pid for process in replicas()}

    def hang() -> None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/infer", b"hang")
        except (urllib.error.URLError, OSError) as error:
            report.remarks.append(f"the client whose batch hung was told: {error}")

    client = threading.Thread(target=hang)
    client.start()
    again = wait_for(lambda: bool({p.pid for p in replicas()} - before) and is_running(1))
    client.join()
    report.remarks.append(f"a replica with a batch that hangs is replaced after {again:.1f} s (hang_seconds = 2)")


def _two_nodes(report: Report) -> None:
    """Two raylets of two CPUs each on this machine: a replica on each, one node goes, the other answers."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    os.chdir(REPOSITORY)
    system = {"worker_niceness": 0}
    head = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "_system_config": system}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    second = nodes.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    try:
        ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
        serve.start(http_options={"port": PORT})
        handle = deployed(config=DEMO, replicas=2)
        image = (REPOSITORY / "configs/demo/images/ring_00.jpg").read_bytes()
        report.require("nodes of two that have a replica", len({replica.ppid() for replica in replicas()}), low=2)
        nodes.remove_node(second)
        failed, answered = 0, 0
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                answered += handle.remote(image).result(timeout_s=30)[0] == "ring"
            except Exception as error:
                failed += 1
                report.remarks.append(f"with one node of two gone: {type(error).__name__}")
        report.remarks.append(f"with one node of two gone: {answered} requests by handle answered, {failed} failed")
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()
