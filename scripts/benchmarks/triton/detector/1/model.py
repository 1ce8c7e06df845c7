"""The benchmark's detector in Triton's Python backend; the model is the file that BENCH_MODEL names."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from opencv_detector import OpenCvDetector  # type: ignore[import-not-found]


class TritonPythonModel:
    """Decoding, the model and suppression."""

    def initialize(self, args: Any) -> None:
        self.detect = OpenCvDetector(os.environ["BENCH_MODEL"], threads=1)

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            content = triton.get_input_tensor_by_name(request, "data").as_numpy()[0]
            result = np.array([json.dumps(self.detect(content)).encode()], object)
            responses.append(triton.InferenceResponse([triton.Tensor("result", result)]))
        return responses
