"""20 ms for each request."""

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found]


class TritonPythonModel:
    """The service of the benchmark ``goodput`` in Triton's Python backend."""

    def execute(self, requests: list[Any]) -> list[Any]:
        time.sleep(0.02 * len(requests))
        return [triton.InferenceResponse([triton.Tensor("result", np.ones((1, 1), np.uint8))]) for _ in requests]
