"""mosec with a stage of processes that decode and one of processes that have the engine: JPEG in, label out.

The environment sets ``BENCH_SETTING``, a ``Setting`` of ``mosec.py``; ``BENCH_NODE``, a node of a configuration
that takes Mats of ``BENCH_SIDE`` squared and whose result is ``(label, score)``; both as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from mosec import Server, ValidationError, Worker

SIDE = int(os.environ["BENCH_SIDE"])


class Decode(Worker):
    """JPEG to the bytes of a small RGB image."""

    def __init__(self) -> None:
        super().__init__()
        from torchpipe_py.malloc import keep_freed_memory

        cv2.setNumThreads(1)
        keep_freed_memory()  # as the service's workers do

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> Any:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB) if data else None
        if image is None:
            raise ValidationError("no readable image")
        return cv2.resize(image, (SIDE, SIDE))

    def serialize_ipc(self, data: Any) -> bytes:
        content: bytes = data.tobytes()  # mosec's default, a pickle, is slower
        return content


class Classify(Worker):
    """Images to labels, by the project's own backend without a pipe around it."""

    def __init__(self) -> None:
        super().__init__()
        from torchpipe_py.cores import limit_threads
        from torchpipe_py.plan.build import plan_pipeline
        from torchpipe_py.runtime.nodes.instance import creator

        limit_threads()
        (plan,) = plan_pipeline(json.loads(os.environ["BENCH_NODE"])).plans.values()
        self.backend = creator(plan)(0)
        self.backend.setup()

    def deserialize_ipc(self, data: bytes) -> Any:
        return np.frombuffer(data, np.uint8).reshape(SIDE, SIDE, 3)

    def forward(self, data: Sequence[Any]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = [{"data": mat, "color": "rgb"} for mat in data]
        self.backend.forward(items)
        return [{"label": str(item["result"][0]), "score": float(item["result"][1])} for item in items]


if __name__ == "__main__":
    decoders, owners, most, wait_ms = json.loads(os.environ["BENCH_SETTING"])
    server = Server()
    server.append_worker(Decode, num=decoders)
    server.append_worker(Classify, num=owners, max_batch_size=most, max_wait_time=wait_ms)
    server.run()
