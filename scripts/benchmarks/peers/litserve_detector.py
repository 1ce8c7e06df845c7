"""The benchmark's detector as a LitServe service: JPEG in, a list of boxes out. Settings come in the environment."""

# NOTE: no `from __future__ import annotations`: LitServe hands the annotation of decode_request to FastAPI as it is.
import os
import sys
from typing import Annotated, Any

import litserve
from fastapi import Depends

from benchmarks.opencv_detector import OpenCvDetector
from benchmarks.peers.litserve_service import raw_body


class Detect(litserve.LitAPI):
    """Decoding, the model and suppression in one process, one picture at a time."""

    def setup(self, device: Any) -> None:
        self.detect = OpenCvDetector(os.environ["BENCH_MODEL"], threads=1)

    def decode_request(self, request: Annotated[bytes, Depends(raw_body)]) -> bytes:
        return request

    def predict(self, x: Any) -> Any:
        return self.detect(x)

    def encode_response(self, output: Any) -> Any:
        return output


if __name__ == "__main__":
    server = litserve.LitServer(Detect(), accelerator="cpu", workers_per_device=int(os.environ["BENCH_WORKERS"]))
    # NOTE: 300 s, since 5 are too few for clients that wait until all are warm.
    options = {"log_level": "warning", "generate_client_file": False, "timeout_keep_alive": 300}
    server.run(host="127.0.0.1", port=int(sys.argv[-1]), **options)
