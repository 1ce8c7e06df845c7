"""Backends whose answer tells the question, for workers: ``--import``."""

from __future__ import annotations

import os
import time
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

    def setup(self) -> None:
        self._held = b"x" * (self.held_mib * 2**20)
        self._kept: list[bytes] = []

    def forward(self, items: list[dict[str, Any]]) -> None:
        time.sleep(self.service_ms / 1000)
        for item in items:
            if self.leak_bytes:
                self._kept.append(os.urandom(self.leak_bytes))
            item["result"] = (bytes(item["data"]).decode(), float(len(item["data"])))

    def max(self) -> int:
        return self.most


@register_backend
class ChaosCrash(ChaosEcho):
    """Ends its process: in ``setup``, or right after its worker has said that it is ready."""

    once_ready = Param(bool, False, doc="not in setup")

    def setup(self) -> None:
        super().setup()
        if not self.once_ready:
            os._exit(3)
        from torchpipe_server.worker.worker import Post

        def run(post: Post, graph: str) -> None:
            post.send({"type": "ready", "graph": graph})
            os._exit(3)

        Post.run = run  # type: ignore[method-assign]


@register_backend
class ChaosRaise(ChaosEcho):
    """Cannot be set up."""

    def setup(self) -> None:
        raise RuntimeError("a planted failure of setup")
