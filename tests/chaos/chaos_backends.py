"""Backends whose answer tells the question, for workers: ``--import-code``. Plants the fault that CHAOS_FAULT names."""

from __future__ import annotations

import os
import time
from typing import Any

import faults

from torchpipe_py import Backend, register_backend
from torchpipe_py.backends.params import Param
from torchpipe_py.values import to_bool, to_float, to_int, to_str

Data = dict[str, Any]

faults.plant_in_worker(os.environ.get("CHAOS_FAULT", ""))


@register_backend
class ChaosEcho(Backend):
    """``(data, its length)``, ``service_ms`` after each batch began, and once there is a file called ``gate``, if that
    is given; keeps ``leak_bytes`` of each request."""

    most = Param(to_int, 8, doc="largest batch")
    service_ms = Param(to_float, 0.0, doc="time of a batch")
    leak_bytes = Param(to_int, 0, doc="a planted leak")
    gate = Param(to_str, "", doc="path of a file")

    def setup(self) -> None:
        self._kept: list[bytes] = []

    def forward(self, items: list[Data]) -> None:
        if self.service_ms:
            time.sleep(self.service_ms / 1000)
        while self.gate and not os.path.exists(self.gate):
            time.sleep(0.005)
        for item in items:
            if self.leak_bytes:
                self._kept.append(os.urandom(self.leak_bytes))
            item["result"] = (bytes(item["data"]).decode(), float(len(item["data"])))

    def max(self) -> int:
        return self.most


@register_backend
class ChaosCrash(ChaosEcho):
    """Ends its process: in ``setup``, or right after its worker has said that it is ready."""

    once_ready = Param(to_bool, False, doc="not in setup")

    def setup(self) -> None:
        super().setup()
        if not self.once_ready:
            os._exit(3)
        from torchpipe_server.worker.worker import Worker

        def serve(worker: Worker) -> None:
            worker._post.send({"type": "ready", "graph": ""})
            os._exit(3)

        Worker.serve = serve  # type: ignore[assignment, method-assign]


@register_backend
class ChaosRaise(ChaosEcho):
    """Cannot be set up."""

    def setup(self) -> None:
        raise RuntimeError("a planted failure of setup")
