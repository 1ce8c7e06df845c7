"""The benchmark's classifier as a mosec service: JPEG in, label out, over HTTP. Settings come in the environment."""

from __future__ import annotations

import os
from typing import Any

import cv2
from mosec import Server, Worker

from benchmarks.bare import work


class Classify(Worker):
    """Decode, resize, model and softmax in one stage."""

    def __init__(self) -> None:
        super().__init__()
        cv2.setNumThreads(1)
        self.classify = work()

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: Any) -> Any:
        # NOTE: without batches mosec gives no list, and wants none.
        batch = data if isinstance(data, list) else [data]
        answers = [{"label": int(row.argmax()), "score": float(row.max())} for row in self.classify(batch)]
        return answers if isinstance(data, list) else answers[0]


if __name__ == "__main__":
    server = Server()
    wait, count = int(os.environ["BENCH_WAIT_MS"]), int(os.environ["BENCH_WORKERS"])
    server.append_worker(Classify, num=count, max_batch_size=int(os.environ["BENCH_BATCH"]), max_wait_time=wait)
    server.run()
