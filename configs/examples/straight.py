"""The example detector as plain code over ONNX Runtime and OpenCV: what it must equal and is timed against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import postprocess

FOLDER = Path(__file__).parent
Digit = dict[str, Any]


class Detector:
    """``detector(jpeg)`` gives a list of dicts with box, label and score; usable from any number of threads."""

    def __init__(self, threads: int = 0, one_by_one: bool = False) -> None:
        """``threads`` of ONNX Runtime in one run, 0 for all cores; crops ``one_by_one`` or all of a picture at once."""
        self._detect = session("detector.onnx", threads)
        self._classify = session("digits.onnx", threads)
        self._labels = (FOLDER / "digits.txt").read_text(encoding="utf-8").split()
        self._one_by_one = one_by_one

    def __call__(self, jpeg: bytes) -> list[Digit]:
        mat = cv2.resize(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), (256, 192))
        (output,) = self._detect.run(None, {"input": postprocess.to_input(mat)})
        boxes = postprocess.decode_boxes(output)[:, :4]
        crops = [postprocess.to_input(cv2.resize(postprocess.crop(mat, box), (32, 32))) for box in boxes]
        digits = []
        for box, logits in zip(boxes, self._logits(crops), strict=True):
            scores = np.exp(logits - logits.max())
            best = int(scores.argmax())
            digits.append(
                {"box": box.tolist(), "label": self._labels[best], "score": float(scores[best] / scores.sum())}
            )
        return digits

    def _logits(self, crops: list[np.ndarray]) -> list[np.ndarray]:
        if not crops or self._one_by_one:
            return [self._classify.run(None, {"input": crop})[0][0] for crop in crops]
        return list(self._classify.run(None, {"input": np.concatenate(crops)})[0])


def session(name: str, threads: int) -> Any:
    """An ONNX Runtime session of one of the example models."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(FOLDER / name), options, providers=["CPUExecutionProvider"])
