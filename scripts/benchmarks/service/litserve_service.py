"""The same work as a LitServe service: JPEG in, label out, over HTTP. Settings come in the environment."""

# NOTE: no `from __future__ import annotations`: LitServe hands the annotation of decode_request to FastAPI as it is.
import os
from collections.abc import Sequence
from typing import Annotated, Any

import cv2
import litserve
import numpy as np
import onnxruntime
from fastapi import Depends, Request

from benchmarks.service.bare_threads import Classifier

SIZE = int(os.environ["BENCH_SIZE"])
BATCH = int(os.environ["BENCH_BATCH"])


async def raw_body(request: Request) -> bytes:
    """The image as it is; without this, LitServe reads JSON or a form."""
    return await request.body()


class Classify(litserve.LitAPI):
    """Decode, resize and model in one process; LitServe batches between the two calls."""

    def setup(self, device: Any) -> None:
        cv2.setNumThreads(1)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.classify = Classifier(os.environ["BENCH_MODEL"], options)

    def decode_request(self, request: Annotated[bytes, Depends(raw_body)]) -> bytes:
        return request

    def predict(self, x: Any) -> Any:
        return self._results(x) if BATCH > 1 else self._results([x])[0]

    def batch(self, inputs: Sequence[bytes]) -> Sequence[bytes]:
        return inputs

    def unbatch(self, output: Any) -> Any:
        return output

    def encode_response(self, output: Any) -> Any:
        return output

    def _results(self, jpegs: Sequence[bytes]) -> list[dict[str, Any]]:
        rows = self.classify(jpegs, np.empty((len(jpegs), 3, SIZE, SIZE), np.float32))
        return [{"label": str(row.argmax()), "score": float(row.max())} for row in rows]


if __name__ == "__main__":
    api = Classify(max_batch_size=BATCH, batch_timeout=int(os.environ["BENCH_WAIT_MS"]) / 1000)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=int(os.environ["BENCH_WORKERS"]))
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        log_level="warning",
        generate_client_file=False,
        timeout_keep_alive=300,  # 5 s are too few for clients that wait until all are warm
    )
