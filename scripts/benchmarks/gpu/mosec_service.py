"""mosec with a stage of processes that decode and one of processes that have the engine: JPEG in, label out.

``BENCH_SPLIT`` in the environment is a ``Split`` as JSON. Every pair of its stages has a route of its own, so that one
server can be asked with many settings. What nobody asks is idle.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from mosec import Server, ValidationError, Worker

from benchmarks.gpu.mosec_split import read_split, route


class Decode(Worker):
    """JPEG to the bytes of a small RGB image."""

    def __init__(self) -> None:
        super().__init__()
        from torchpipe_py.malloc import keep_freed_memory

        cv2.setNumThreads(1)
        keep_freed_memory()  # as the service's workers do
        self.side = read_split(os.environ["BENCH_SPLIT"]).side

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes) -> Any:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB) if data else None
        if image is None:
            raise ValidationError("no readable image")
        return cv2.resize(image, (self.side, self.side))

    def serialize_ipc(self, data: Any) -> bytes:
        content: bytes = data.tobytes()
        return content


class DecodeAndPickle(Decode):
    """The same, to a pickle of it."""

    def serialize_ipc(self, data: Any) -> bytes:
        return pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)


class Classify(Worker):
    """Images to labels, by the project's own backend without a pipe around it."""

    def __init__(self) -> None:
        super().__init__()
        from torchpipe_server.worker.worker import limit_threads

        from torchpipe_py.plan.build import plan_pipeline
        from torchpipe_py.runtime.node import creators

        limit_threads()
        split = read_split(os.environ["BENCH_SPLIT"])
        (plan,) = plan_pipeline(split.node).plans.values()
        self.shape = split.side, split.side, 3
        self.backend = creators(plan, None)[0](0)  # type: ignore[arg-type]  # no graphs: it is alone
        self.backend.setup()

    def deserialize_ipc(self, data: bytes) -> Any:
        is_raw = len(data) == np.prod(self.shape)
        return np.frombuffer(data, np.uint8).reshape(self.shape) if is_raw else pickle.loads(data)

    def forward(self, data: Sequence[Any]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = [{"data": mat, "color": "rgb"} for mat in data]
        self.backend.forward(items)
        return [{"label": str(item["result"][0]), "score": float(item["result"][1])} for item in items]


def main() -> None:
    """Serve until SIGTERM."""
    split = read_split(os.environ["BENCH_SPLIT"])
    server = Server()
    for decoders in split.decoders:
        stage = DecodeAndPickle if decoders.is_pickled else Decode
        routes = [route(decoders, batching) for batching in split.batchings]
        server.append_worker(stage, num=decoders.processes, route=routes)
    for batching in split.batchings:
        routes = [route(decoders, batching) for decoders in split.decoders]
        server.append_worker(
            Classify, num=batching.processes, max_batch_size=batching.most, max_wait_time=batching.wait_ms, route=routes
        )
    server.run()


if __name__ == "__main__":
    main()
