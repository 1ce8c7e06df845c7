"""The limit of the service benchmark: decode, resize and ONNX Runtime in bare threads, no pipe and no network.

Run as a program in a process of its own; prints the best of several thread counts and batch sizes as JSON.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import cv2
import numpy as np
import onnxruntime

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.models.onnx_graph import normalized_model
from torchpipe_py.encryption.model_file import ModelFile

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class Classifier:
    """JPEGs to probabilities in the calling thread: what every side of the benchmark computes."""

    def __init__(self, model: str, options: Any) -> None:
        content = normalized_model(ModelFile(model), MEAN, STD)
        self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def __call__(self, jpegs: Sequence[bytes], stack: np.ndarray) -> np.ndarray:
        """N×classes; ``stack``, float32 N×3×H×W, is overwritten with the decoded images, resized to H×W."""
        height, width = stack.shape[2:]
        for row, jpeg in zip(stack, jpegs, strict=True):
            image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
            np.copyto(row, np.stack(cv2.split(cv2.resize(image, (width, height)))))
        logits = self._session.run(None, {self._input: stack})[0]
        exp = np.exp(logits - logits.max(1, keepdims=True))
        probabilities: np.ndarray = exp / exp.sum(1, keepdims=True)
        return probabilities


def worker(classify: Classifier, jpeg: bytes, size: int, batch: int) -> Callable[[], int]:
    """A function that computes one batch and returns how many images that were."""
    jpegs, stack = [jpeg] * batch, np.empty((batch, 3, size, size), np.float32)

    def compute() -> int:
        classify(jpegs, stack).max(1).tolist()
        return batch

    return compute


def measure(computes: list[Callable[[], int]], seconds: float) -> float:
    """Images per second of all threads together."""
    counts = [0] * len(computes)
    end = perf_counter() + seconds

    def loop(index: int) -> None:
        while perf_counter() < end:
            counts[index] += computes[index]()

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(len(computes))]
    start = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (perf_counter() - start)


def classifiers(model: str, cores: int) -> dict[int, Classifier]:
    """One for each number of threads inside one run."""
    made = {}
    for inside in {1, cores}:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = inside
        made[inside] = Classifier(model, options)
    return made


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--size", type=int, required=True, help="input side, pixels")
    parser.add_argument("--jpeg", required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each combination")
    parser.add_argument("--only", help='one combination, "threads,batch,inside", instead of all')
    args = parser.parse_args()
    cv2.setNumThreads(1)
    jpeg, cores = Path(args.jpeg).read_bytes(), cv2.getNumberOfCPUs()
    by_inside = classifiers(args.model, cores)
    combinations = itertools.product((1, cores, 2 * cores), (1, 2, 4, 8), sorted(by_inside))
    if args.only:
        combinations = iter([tuple(map(int, args.only.split(",")))])  # type: ignore[assignment]
    best = (0.0, "")
    for threads, batch, inside in combinations:
        computes = [worker(by_inside[inside], jpeg, args.size, batch) for _ in range(threads)]
        measure(computes, 0.2)
        best = max(best, (measure(computes, args.seconds), f"{threads},{batch},{inside}"))
    print(json.dumps({"qps": best[0], "combination": best[1]}))


if __name__ == "__main__":
    main()
