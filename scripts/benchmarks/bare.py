"""Limits and baselines of the benchmarks: programs without a pipe, in separate processes.

``nodes``, ``classifier`` and ``cpp`` prepare a program there, and return a function that measures it, by clients and
seconds, and a remark.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from time import perf_counter, sleep
from typing import Any

from benchmarks.common import Load, Report, in_threads, load_of, picture

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Measure = Callable[[int, float], Load]

_prepared: list[Measure] = []  # of this process


def child() -> ProcessPoolExecutor:
    """A separate process, whose end frees its memory here and on the device."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


class Processes:
    """``count`` processes with the same program, loaded at the same time; ``remark`` is the program's."""

    def __init__(self, count: int, program: Callable[..., tuple[Measure, str]], *args: Any) -> None:
        self._children = [child() for _ in range(count)]
        try:
            self.remark: str = self._in_all(_prepare, program, *args)[0]
        except BaseException:
            self.close()
            raise

    def load(self, clients: int, seconds: float) -> Load:
        """Load all processes with ``clients`` each; return their sum, with the latencies of the slowest one."""
        loads: list[Load] = self._in_all(_measure, clients, seconds)
        return Load(sum(one.qps for one in loads), max(one.p50 for one in loads), max(one.p99 for one in loads))

    def close(self) -> None:
        """End them."""
        for each in self._children:
            each.shutdown()

    def _in_all(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [future.result() for future in [each.submit(function, *args) for each in self._children]]


def _prepare(program: Callable[..., tuple[Measure, str]], *args: Any) -> str:
    measure, remark = program(*args)
    _prepared.append(measure)
    return remark


def _measure(clients: int, seconds: float) -> Load:
    return _prepared[0](clients, seconds)


# -- nodes of a configuration -------------------------------------------------------------------------------------


def measure_nodes(
    report: Report,
    name: str,
    config: Mapping[str, Any],
    count: int,
    batch: int,
    seconds: float,
    rounds: int,
    image: tuple[int, int] = (500, 375),
) -> None:
    """Images per second of the backends of a chain of nodes, in ``count`` processes of one thread each.

    Each process runs one node after the other on ``batch`` copies of a JPEG, ``image`` wide and high. Latencies are
    per batch.
    """
    with closing(Processes(count, nodes, config, batch, image)) as processes:
        for _ in range(rounds):
            report.add(name, count, processes.load(1, seconds))


def nodes(config: Mapping[str, Any], size: int, image: tuple[int, int]) -> tuple[Measure, str]:
    """The backends of a chain of nodes, called one after the other by one thread."""
    from torchpipe_py.backends.base import BackendConfig
    from torchpipe_py.cores import limit_threads
    from torchpipe_py.plan.build import plan_pipeline

    limit_threads()
    backends = [plan.backends[0].create(BackendConfig()) for plan in plan_pipeline(config).plans.values()]
    for backend in backends:
        backend.setup()
    jpeg = picture(*image)

    def compute() -> None:
        items: list[dict[str, Any]] = [{"result": jpeg} for _ in range(size)]
        for backend in backends:
            for item in items:
                item["data"] = item.pop("result")
            for start in range(0, size, backend.max()):
                backend.forward(items[start : start + backend.max()])
            for item in items:
                if "result" not in item:
                    raise RuntimeError(f"no result: {item.get('error')}")

    def measure(clients: int, seconds: float) -> Load:
        # NOTE: on this thread, which set the backends up: their CUDA streams belong to it.
        latencies: list[float] = []
        start = end = perf_counter()
        while end < start + seconds:
            compute()
            latencies.append(perf_counter() - end)
            end += latencies[-1]
        return load_of(latencies, end - start, size)

    compute()
    return measure, ""


# -- a classifier in threads --------------------------------------------------------------------------------------


class Classifier:
    """JPEGs to probabilities by OpenCV and ONNX Runtime in the calling thread: the work of all sides of a benchmark."""

    def __init__(self, model: str, size: int, threads: int = 1, allow_spinning: bool = False) -> None:
        import onnxruntime

        from torchpipe_py.backends.model.normalisation import Normalisation
        from torchpipe_py.backends.model.onnx_graph import normalized_model
        from torchpipe_py.encryption.model_file import ModelFile

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(allow_spinning)))
        content = normalized_model(ModelFile(model), Normalisation(MEAN, STD))
        self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self._input, self._size = self._session.get_inputs()[0].name, size

    def __call__(self, jpegs: Sequence[bytes]) -> Any:
        """float32 N×classes."""
        import cv2
        import numpy as np

        stack = np.empty((len(jpegs), 3, self._size, self._size), np.float32)
        for row, jpeg in zip(stack, jpegs, strict=True):
            image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
            np.copyto(row, np.stack(cv2.split(cv2.resize(image, (self._size, self._size)))))
        logits = self._session.run(None, {self._input: stack})[0]
        exp = np.exp(logits - logits.max(1, keepdims=True))
        return exp / exp.sum(1, keepdims=True)


def work() -> Callable[[Sequence[bytes]], Any]:
    """The work of another library's service on a batch, by the environment: the classifier, or a pause."""
    pause = float(os.environ.get("BENCH_SLEEP_MS", "0")) / 1000
    if not pause:
        return Classifier(os.environ["BENCH_MODEL"], int(os.environ["BENCH_SIZE"]))

    import numpy as np

    def wait(batch: Sequence[bytes]) -> Any:
        sleep(pause)
        return np.ones((len(batch), 1))

    return wait


def classifier(model: str, size: int) -> tuple[Measure, str]:
    """The classifier with the threads, the batch and the threads inside one run that are fastest on this machine."""
    import cv2

    cv2.setNumThreads(1)
    cores, jpeg = cv2.getNumberOfCPUs(), picture()
    inside = {count: Classifier(model, size, count, allow_spinning=True) for count in {1, cores}}

    def measure(threads: int, batch: int, within: int, seconds: float) -> Load:
        return in_threads(lambda: inside[within]([jpeg] * batch).max(1).tolist(), batch)(threads, seconds)

    combinations = itertools.product((1, cores, 2 * cores), (1, 2, 4, 8), inside)
    best = max(combinations, key=lambda one: measure(one[0], one[1], one[2], 1.0).qps)
    remark = "bare threads: {} threads, batches of {}, {} threads inside a run measured best".format(*best)
    return lambda clients, seconds: measure(*best, seconds), remark


# -- the C++ library ----------------------------------------------------------------------------------------------


def cpp(config: dict[str, Any]) -> tuple[Measure, str]:
    """The pipe of the C++ library: its threads and its allocator stay out of the benchmark's process."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # it logs many warnings
    # NOTE: importing it tries for most of a minute to compile extensions that nothing here needs.
    import torchpipe

    run = torchpipe.pipe(config)
    return in_threads(lambda: run({"data": 1})), ""
