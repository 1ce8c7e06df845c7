"""The same work as a mosec service: JPEG in, label out, over HTTP. Settings come in the environment.

Without ``BENCH_MODEL`` the work is to decode the image and to take the mean of its values.
"""

from __future__ import annotations

import os
from typing import Any

import cv2
import numpy as np
import onnxruntime
from mosec import Server, Worker

from torchpipe_py.backends.models.onnx_graph import normalized_model

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
MODEL = os.environ.get("BENCH_MODEL", "")
SIZE = int(os.environ.get("BENCH_SIZE", "0"))
BATCH = int(os.environ["BENCH_BATCH"])
WORKERS = int(os.environ["BENCH_WORKERS"])


class Classify(Worker):
    """Decode, resize, model and softmax in one stage, in ``WORKERS`` processes."""

    def __init__(self) -> None:
        super().__init__()
        cv2.setNumThreads(1)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        content = normalized_model(MODEL, MEAN, STD)
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0].name

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: Any) -> Any:
        images = data if BATCH > 1 else [data]
        stack = np.empty((len(images), 3, SIZE, SIZE), np.float32)
        for row, jpeg in zip(stack, images, strict=True):
            image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
            np.copyto(row, np.stack(cv2.split(cv2.resize(image, (SIZE, SIZE)))))
        logits = self.session.run(None, {self.input: stack})[0]
        exp = np.exp(logits - logits.max(1, keepdims=True))
        scores = exp / exp.sum(1, keepdims=True)
        results = [{"label": int(row.argmax()), "score": float(row.max())} for row in scores]
        return results if BATCH > 1 else results[0]


class Mean(Worker):
    """Decode and mean, in ``WORKERS`` processes."""

    def __init__(self) -> None:
        super().__init__()
        cv2.setNumThreads(1)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: Any) -> Any:
        results = []
        for jpeg in data if BATCH > 1 else [data]:
            image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
            results.append({"label": "mean", "score": sum(cv2.mean(image)[:3]) / 3})
        return results if BATCH > 1 else results[0]


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Classify if MODEL else Mean, num=WORKERS, max_batch_size=BATCH, max_wait_time=int(os.environ["BENCH_WAIT_MS"])
    )
    server.run()
