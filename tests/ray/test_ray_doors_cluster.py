"""The table of ``tests/doors`` through Ray Serve on a cluster of two nodes, of which one is killed at the end."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from doors.test_table import MISTAKES, NAMES, Table, kinds_in
from kit import doors
from kit.doors import DOORS, LIMITS
from kit.waits import WAIT, eventually

from torchpipe_py.tools.export.config import to_toml

serve = pytest.importorskip("ray.serve")  # not "ray", which might be the folder of these tests
ray: Any = importlib.import_module("ray")
ray_service = importlib.import_module("benchmarks.peers.ray_service")
replica_processes: Callable[[], list[int]] = ray_service.replica_processes
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CLIENTS = 8
CODE = """
from doors.test_table import Detects, Nested
from torchpipe_py import register_backend

register_backend(Nested, "Nested")
register_backend(Detects, "Detects")
"""


class Running(NamedTuple):
    table: Table
    """Its doors lead to Serve's proxy."""
    cluster: Any
    others: list[Any]
    """Nodes beside the first one."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    from ray.cluster_utils import Cluster

    from torchpipe_py.ray import app

    folder = tmp_path_factory.mktemp("kinds")
    kinds = kinds_in(folder)
    nodes = {name.removesuffix("_given").removesuffix("_left_out"): kind.node for name, kind in kinds.items()}
    (folder / "kinds.toml").write_text(to_toml(nodes), encoding="utf-8")
    (folder / "kinds_of_tests.py").write_text(CODE, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = SimpleNamespace(port=one.getsockname()[1], grpc_port=other.getsockname()[1])
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    others = [cluster.add_node(**node)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "server", ROOT / "tests")))
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    serve.start(
        proxy_location="HeadOnly",  # the ports of two nodes would be on the same machine
        http_options={"host": "127.0.0.1", "port": ports.port},
        grpc_options={"port": ports.grpc_port, "grpc_servicer_functions": ["torchpipe_py.ray:add_inference"]},
    )
    arguments = {"config": str(folder / "kinds.toml"), "import": str(folder / "kinds_of_tests.py"), "replicas": 2}
    serve.run(app({**arguments, **LIMITS, "num_cpus": 1}))
    house: Any = SimpleNamespace(server=ports, seconds=WAIT)
    house.connect = partial(doors.House.connect, house)
    yield Running(Table(house, kinds), cluster, others)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


every_door = pytest.mark.parametrize(
    "door", ["infer", "oip", "oip_binary", "infer_gzip", "oip_binary_deflate", "grpc", "grpc_gzip"]
)


@every_door
def test_good_request_has_the_same_result(running: Running, door: str) -> None:
    for name in NAMES:
        answer = DOORS[door](running.table.house, running.table.asked(name))
        expected = running.table.kinds[name].outputs
        assert (answer.code, answer.message) == ("ok", ""), name
        assert answer.values.keys() == expected.keys(), name
        assert all(doors.same(answer.values[output], value) for output, value in expected.items()), (name, answer)


@every_door
def test_wrong_inputs_are_invalid(running: Running, door: str) -> None:
    for name in NAMES:
        kind = running.table.kinds[name]
        for mistake, made in MISTAKES.items():
            inputs = None if kind.is_custom else made(kind)
            if inputs is not None:
                answer = DOORS[door](running.table.house, running.table.asked(name, inputs))
                assert (answer.code, answer.values) == ("invalid_request", {}), (name, mistake, answer)


@every_door
def test_limits_hold(running: Running, door: str) -> None:
    table = running.table
    inputs = {"x": np.zeros((1, LIMITS["max_message_bytes"] // 4 + 1), "f4")}
    assert DOORS[door](table.house, table.asked("wide", inputs)).code == "too_large"
    assert DOORS[door](table.house, table.asked("large_reply")).code == "too_large"
    answer = DOORS[door](table.house, table.asked("fp32")._replace(model="fp23"))
    assert answer.code == "unknown_node"
    assert "fp32" in answer.message


# -- replicas and nodes that are killed -----------------------------------------------------------------------------


class Clients:
    """Clients that ask again and again, and retry what fails."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        self.answered = 0
        self.wrong: list[Any] = []

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        asked = self._table.asked("fp32")
        while not self._stop.is_set():
            try:
                answer = DOORS["infer"](self._table.house, asked)
            except (OSError, ValueError):  # the connection broke, or Serve's 500 is not JSON: it is asked again
                continue
            if answer.code == "ok" and doors.same(answer.values["y"], asked.inputs["x"]):
                self.answered += 1
            elif answer.code != "overloaded":
                self.wrong.append(answer)

    def wait_for_more(self) -> None:
        """Until each of them has had answers that were asked for after now."""
        before = self.answered
        eventually(lambda: self.answered > before + 5 * CLIENTS)


def test_killed_replica_loses_no_request_that_is_retried(running: Running) -> None:
    eventually(lambda: len(replica_processes()) == 2)
    with Clients(running.table) as clients:
        clients.wait_for_more()
        killed = replica_processes()[0]
        os.kill(killed, signal.SIGKILL)
        clients.wait_for_more()
        eventually(lambda: len(set(replica_processes()) - {killed}) == 2, "Serve starts another replica")
        clients.wait_for_more()
    assert clients.wrong == []


def test_killed_node_loses_no_request_that_is_retried(running: Running) -> None:
    with Clients(running.table) as clients:
        clients.wait_for_more()
        running.cluster.remove_node(running.others.pop(), allow_graceful=False)
        clients.wait_for_more()
    assert clients.wrong == []
