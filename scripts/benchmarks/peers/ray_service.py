"""Two applications of Ray Serve on one node: the demo at /, and one at /none that answers without any work.

``python -m benchmarks.peers.ray_service PORT REPLICAS [nodes]`` prints where it serves, and then obeys lines from its
standard input: ``kill`` ends the process of a replica of the demo, ``kill node`` a node, ``pids`` prints process ids.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.common import REPOSITORY
from torchpipe_py.ray import app

ANSWER = b'{"label": "ring", "score": 0.9954093098640442}'


class NoWork:
    """Reads a body and answers as the demo does."""

    async def __call__(self, request: Request) -> Response:
        await request.body()
        return Response(ANSWER, media_type="application/json")


def main(port: int, replicas: int, nodes: int = 1) -> None:
    """Serve until the standard input ends. With several nodes there is a replica on each, and nothing else."""
    store = 100 << 20
    cpus = 4 if nodes == 1 else 1
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus, "object_store_memory": store, "include_dashboard": True},
    )
    others = [cluster.add_node(num_cpus=cpus, object_store_memory=store) for _ in range(nodes - 1)]
    ray.init(address=cluster.address, log_to_driver=False)
    # One proxy, since those of several nodes cannot have one port on the same machine.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    demo = {"config": str(REPOSITORY / "configs/demo.toml"), "replicas": replicas}
    serve.run(app(demo), name="demo", route_prefix="/")
    if nodes == 1:
        options = {"max_ongoing_requests": 1000, "num_replicas": replicas, "ray_actor_options": {"num_cpus": 0.5}}
        serve.run(serve.deployment(NoWork).options(**options).bind(), name="none", route_prefix="/none")
    print(f"serving on 127.0.0.1:{port} ", flush=True)
    for line in sys.stdin:
        if line == "kill node\n":
            cluster.remove_node(others.pop(), allow_graceful=False)
        elif line == "kill\n":
            os.kill(replica_processes()[0], signal.SIGKILL)
        print(json.dumps(replica_processes()), flush=True)


def replica_processes() -> list[int]:
    """The process ids of the demo's replicas."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "PipeDeployment" in "".join(process.cmdline()):
                found.append(process.pid)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
