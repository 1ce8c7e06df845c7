"""The limit of the service benchmark: decode, resize and ONNX Runtime in bare threads, no pipe and no network.

Run as a program in a process of its own; prints the best of several thread counts and batch sizes as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import cv2
import numpy as np
import onnxruntime

from torchpipe_py.backends.models.onnx_graph import normalized_model

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def worker(session: Any, jpeg: bytes, size: int, batch: int) -> Callable[[], int]:
    """A function that computes one batch and returns how many images that were."""
    name = session.get_inputs()[0].name
    stack = np.empty((batch, 3, size, size), np.float32)

    def compute() -> int:
        for row in stack:
            image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
            np.copyto(row, np.stack(cv2.split(cv2.resize(image, (size, size)))))
        logits = session.run(None, {name: stack})[0]
        exp = np.exp(logits - logits.max(1, keepdims=True))
        (exp / exp.sum(1, keepdims=True)).max(1).tolist()
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


def sessions(model: str, cores: int) -> dict[int, Any]:
    """A session for each number of threads inside one run."""
    content = normalized_model(model, MEAN, STD)
    made = {}
    for inside in {1, cores}:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = inside
        made[inside] = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--size", type=int, required=True, help="input side, pixels")
    parser.add_argument("--jpeg", required=True)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each combination")
    parser.add_argument("--only", help='one combination, "threads,batch,inside", instead of all')
    args = parser.parse_args()
    cv2.setNumThreads(1)
    jpeg, cores = Path(args.jpeg).read_bytes(), cv2.getNumberOfCPUs()
    by_inside = sessions(args.model, cores)
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
