"""The work of a detector by OpenCV, NumPy and ONNX Runtime alone: what a service has to do for each picture.

Triton's Python has nothing else, so this module imports nothing of the repository.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import onnxruntime

THRESHOLD, IOU, MOST = 0.25, 0.7, 300


class OpenCvDetector:
    """A picture's bytes to a list of boxes, scores and classes, best first; for the outputs of YOLOv8.

    ``threads`` are those of ONNX Runtime within a run, 0 for all cores.
    """

    def __init__(self, model: str, threads: int) -> None:
        cv2.setNumThreads(1)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        (given,) = self._session.get_inputs()
        self._name, self._side = given.name, given.shape[2]

    def __call__(self, content: bytes) -> list[dict[str, Any]]:
        image: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
        height, width = image.shape[:2]
        gain = min(self._side / height, self._side / width)
        new_w, new_h = round(width * gain), round(height * gain)
        left, top = (self._side - new_w) // 2, (self._side - new_h) // 2
        canvas = np.full((self._side, self._side, 3), 114, np.uint8)
        canvas[top : top + new_h, left : left + new_w] = cv2.resize(image, (new_w, new_h))
        blob = cv2.dnn.blobFromImage(canvas, 1 / 255, swapRB=True)
        (output,) = self._session.run(None, {self._name: blob})
        best = output[0, 4:].max(0)
        chosen = np.flatnonzero(best > THRESHOLD)
        if not len(chosen):
            return []
        rows, scores = output[0].take(chosen, 1), best[chosen]
        classes = rows[4:].argmax(0)
        corners = rows[:2].T - rows[2:4].T / 2
        boxes: Any = np.concatenate([corners, rows[2:4].T], 1)
        kept = np.asarray(cv2.dnn.NMSBoxesBatched(boxes, scores, classes, THRESHOLD, IOU), np.int64).ravel()[:MOST]
        sides = np.concatenate([corners, corners + rows[2:4].T], 1)[kept]
        sides = np.clip((sides - [left, top] * 2) / ([new_w / width, new_h / height] * 2), 0, [width, height] * 2)
        found = zip(sides.tolist(), scores[kept].tolist(), classes[kept].tolist(), strict=True)
        return [{"box": box, "score": score, "class": index} for box, score, index in found]
