"""A backend whose answer tells the question, for workers: ``--import``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from torchpipe_py import Backend, Param, register_backend


@register_backend
class ChaosEcho(Backend):
    """``(data, its length)``, ``service_ms`` after each batch began; keeps ``leak_bytes`` of each request.

    It holds ``held_mib`` of memory, as a model does.
    """

    most = Param(int, 8, doc="largest batch")
    service_ms = Param(float, 0.0, doc="time of a batch")
    leak_bytes = Param(int, 0, doc="a planted leak")
    held_mib = Param(int, 0, doc="memory from setup on")
    fault = Param(str, "", doc="of setup: raises, crashes, crashes once ready")

    def setup(self) -> None:
        self._held = b"x" * (self.held_mib * 2**20)
        self._kept: list[bytes] = []
        if self.fault == "raises":
            raise RuntimeError("a planted failure of setup")
        if self.fault == "crashes":
            os._exit(3)
        if self.fault == "crashes once ready":
            _crash_once_ready()

    def forward(self, items: list[dict[str, Any]]) -> None:
        time.sleep(self.service_ms / 1000)
        for item in items:
            if self.leak_bytes:
                self._kept.append(os.urandom(self.leak_bytes))
            item["result"] = (bytes(item["data"]).decode(), float(len(item["data"])))

    def max(self) -> int:
        return self.most


def _crash_once_ready() -> None:
    """End this process right after it has said that it is ready."""
    from torchpipe_server.worker.worker import SupervisorClient

    def serve(client: SupervisorClient, graph: str, problems: Mapping[str, str]) -> None:
        client.send({"type": "ready", "graph": graph, "problems": dict(problems)})
        os._exit(3)

    SupervisorClient.serve = serve  # type: ignore[method-assign]
