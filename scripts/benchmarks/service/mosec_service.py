"""The same work as a mosec service: JPEG in, label out, over HTTP. Settings come in the environment.

Without ``BENCH_MODEL`` the work is to decode the image and to take the mean of its values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import onnxruntime
from mosec import Server, Worker

from benchmarks.service.bare_threads import Classifier

MODEL = os.environ.get("BENCH_MODEL", "")
SIZE = int(os.environ.get("BENCH_SIZE", "0"))
BATCH = int(os.environ["BENCH_BATCH"])
WORKERS = int(os.environ["BENCH_WORKERS"])


class Mean(Worker):
    """Decode and mean in one stage, in ``WORKERS`` processes."""

    def __init__(self) -> None:
        super().__init__()
        cv2.setNumThreads(1)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: Any) -> Any:
        return self.results(data) if BATCH > 1 else self.results([data])[0]

    def results(self, jpegs: Sequence[bytes]) -> list[dict[str, Any]]:
        mats = [cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR) for jpeg in jpegs]
        return [{"label": "mean", "score": sum(cv2.mean(mat)[:3]) / 3} for mat in mats]


class Classify(Mean):
    """Decode, resize, model and softmax instead."""

    def __init__(self) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.classify = Classifier(MODEL, options)

    def results(self, jpegs: Sequence[bytes]) -> list[dict[str, Any]]:
        rows = self.classify(jpegs, np.empty((len(jpegs), 3, SIZE, SIZE), np.float32))
        return [{"label": int(row.argmax()), "score": float(row.max())} for row in rows]


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Classify if MODEL else Mean, num=WORKERS, max_batch_size=BATCH, max_wait_time=int(os.environ["BENCH_WAIT_MS"])
    )
    server.run()
