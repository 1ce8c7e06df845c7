"""The benchmark's classifier as a LitServe service: JPEG in, label out, over HTTP. Settings come in the environment."""

# NOTE: no `from __future__ import annotations`: LitServe hands the annotation of decode_request to FastAPI as it is.
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import cv2
import litserve
from fastapi import Depends, Request

from benchmarks.bare import work


async def raw_body(request: Request) -> bytes:
    """The image as it is; without this, LitServe reads JSON or a form."""
    return await request.body()


class Classify(litserve.LitAPI):
    """Decode, resize and model in one process; LitServe batches between ``batch`` and ``unbatch``."""

    def setup(self, device: Any) -> None:
        cv2.setNumThreads(1)
        self.classify = work()

    def decode_request(self, request: Annotated[bytes, Depends(raw_body)]) -> bytes:
        return request

    def batch(self, inputs: Sequence[bytes]) -> Sequence[bytes]:
        return inputs

    def predict(self, x: Any) -> Any:
        return [{"label": str(row.argmax()), "score": float(row.max())} for row in self.classify(x)]

    def unbatch(self, output: Any) -> Any:
        return output

    def encode_response(self, output: Any) -> Any:
        return output


if __name__ == "__main__":
    api = Classify(max_batch_size=int(os.environ["BENCH_BATCH"]), batch_timeout=int(os.environ["BENCH_WAIT_MS"]) / 1000)
    workers, timeout = int(os.environ["BENCH_WORKERS"]), float(os.environ.get("BENCH_TIMEOUT_S", "30"))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers, timeout=timeout)
    # NOTE: 300 s, since 5 are too few for clients that wait until all are warm.
    options = {"log_level": "warning", "generate_client_file": False, "timeout_keep_alive": 300}
    server.run(host="127.0.0.1", port=int(sys.argv[-1]), **options)
