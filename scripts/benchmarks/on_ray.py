"""The demo on Ray Serve, by each ingress, beside a deployment without work, ``torchpipe-serve``, and a replica killed.

Ray's flags are read when its processes start, so each ingress is a cluster of its own, and runs alone on the machine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.common import REPOSITORY, Report, Subject, image_folder, python
from benchmarks.peers import is_installed
from benchmarks.services import free_port, run_clients, serving

FAST = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
INGRESSES: dict[str, dict[str, str]] = {
    "Serve's proxy": {},
    "HAProxy": FAST,
    "HAProxy, retrying": {
        **FAST,
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2**18),
    },
}
LOADED = ("Serve's proxy", "HAProxy")
CLIENTS = 10
IMAGE = REPOSITORY / "configs/demo/images/ring_00.jpg"
KILL_CALLS = 3000
MOST_TRIES = 20


def on_ray(args: argparse.Namespace) -> Report:
    """Requests per second of each ingress with two replicas, and what a killed replica costs."""
    report = Report("on_ray: two replicas of the demo, 13 KB JPEG over HTTP, client processes on the same cores")
    if not is_installed("ray", report):
        report.is_open = True
        return report
    options = ["--transport", "http"]
    with image_folder(IMAGE.read_bytes()) as images:
        for name in LOADED:
            for _ in range(args.rounds):
                with cluster(INGRESSES[name]) as ray:
                    demo = partial(run_clients, ray.port, images, options=options)
                    none = partial(run_clients, ray.port, images, options=[*options, "--path", "/none"])
                    subjects = [Subject(f"no work, {name}", none), Subject(f"demo, {name}", demo)]
                    report.measure(subjects, (CLIENTS,), args.seconds, 1)
        with serving(str(REPOSITORY / "configs/demo.toml")) as port:
            subject = Subject("demo, torchpipe-serve", partial(run_clients, port, images, options=options))
            report.measure([subject], (CLIENTS,), args.seconds, args.rounds)
    demos = [report.median(f"demo, {name}", CLIENTS).qps for name in LOADED]
    report.require("HAProxy against Serve's proxy", demos[1] / demos[0], low=3.0)
    for name in LOADED:
        ratio = report.ratio((f"demo, {name}", CLIENTS), (f"no work, {name}", CLIENTS))
        report.remarks.append(f"{name}: the demo has {ratio:.2f} of the rate without work")
    for name, flags in INGRESSES.items():
        for what, nodes in (("kill", 1), ("kill node", 2)):
            with cluster(flags, nodes) as ray:
                outcomes, lost, tries = killed(ray, what)
            report.remarks.append(f"{name}, {what}: {outcomes}; most tries {tries}")
            report.require(f"lost although retried, {name}, {what}", lost, high=1)
    return report


class RunningRay:
    """A cluster in a process of its own, which obeys lines."""

    def __init__(self, port: int, process: Any) -> None:
        self.port, self._process = port, process

    def tell(self, line: str) -> Any:
        """The process ids of the demo's replicas after it; ``kill``, ``kill node`` or ``pids``."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        while answer and not answer.startswith("["):  # Ray prints there, too
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the cluster ended on {line!r}")
        return json.loads(answer)


@contextmanager
def cluster(flags: Mapping[str, str], nodes: int = 1) -> Iterator[RunningRay]:
    """Ray Serve with the demo, until the block ends."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w", encoding="utf-8") as log:
        places = {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        }
        module = ["-m", "benchmarks.peers.ray_service", str(port), "2", str(nodes)]
        process = python(*module, environment={**places, **flags}, stdin=-1, stdout=-1, stderr=log)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            while line and not line.startswith("serving on"):
                line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"Ray did not start: {Path(log.name).read_text(encoding='utf-8')[-2000:]}")
            _wait_until_served(port, nodes)
            yield RunningRay(port, process)
        finally:
            process.stdin.close()
            process.wait(60)


def _wait_until_served(port: int, nodes: int) -> None:
    end = monotonic() + 60
    for path in ("/infer", "/none") if nodes == 1 else ("/infer",):
        while _asked(port, path) != "200":
            if monotonic() > end:
                raise RuntimeError(f"{path} is not served")
            sleep(0.2)


def _asked(port: int, path: str) -> str:
    """The outcome of a request on a connection of its own."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        return _outcome(connection, path)


def _outcome(connection: http.client.HTTPConnection, path: str) -> str:
    """A status, with the code of an error, or the name of what broke the connection."""
    try:
        connection.request("POST", path, IMAGE.read_bytes())
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return type(error).__name__
    if answer.status == 200:
        return "200"
    is_typed = "json" in answer.headers.get("content-type", "")
    return f"{answer.status} {json.loads(text)['code'] if is_typed else text[:40].decode(errors='replace')}"


def killed(ray: RunningRay, what: str) -> tuple[dict[str, int], int, int]:
    """First outcomes of requests while a replica or a node is killed, how many no retry answered, the most tries."""
    outcomes: Counter[str] = Counter()
    tries, lock = [1], threading.Lock()
    left = iter(range(KILL_CALLS))
    lost: list[str] = []

    def client() -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", ray.port, timeout=30)) as connection:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                first = last = _outcome(connection, "/infer")
                count = 1
                while last != "200" and count < MOST_TRIES:
                    sleep(0.1 * count)
                    last, count = _outcome(connection, "/infer"), count + 1
                with lock:
                    outcomes[first] += 1
                    tries.append(count)
                    if last != "200":
                        lost.append(last)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    while outcomes.total() < KILL_CALLS // 3:
        sleep(0.01)
    ray.tell(what)
    for thread in threads:
        thread.join()
    return dict(outcomes), len(lost), max(tries)
