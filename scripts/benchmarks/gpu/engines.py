"""ResNet-50 by TensorRT as the benchmarks use it: its engines, and a loop that runs one without a pipe."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.common import Load, load_of
from benchmarks.in_process.int8 import write_int8
from torchpipe_py.backends.models.engine.api import load_tensorrt
from torchpipe_py.backends.models.engine.build import load_engine
from torchpipe_py.backends.models.engine.precision import Layer, multiplying_layers

MEAN, STD = "123.675, 116.28, 103.53", "58.395, 57.12, 57.375"
SIDE = 224


class Engines:
    """ResNet-50 as ONNX and as engines for several largest batches, made at their first use and kept in a folder.

    ``version_compatible``: engines that TensorRT's lean runtime takes too, which builds none.
    """

    def __init__(self, folder: str, version_compatible: bool = False) -> None:
        self.folder, self.version_compatible = Path(folder), version_compatible
        self.folder.mkdir(parents=True, exist_ok=True)

    def onnx(self) -> str:
        """Path of the ONNX model."""
        path = self.folder / "resnet50.onnx"
        if not path.exists():
            import torch
            import torchvision

            from torchpipe_py.tools.export.onnx_file import save_onnx

            torch.manual_seed(0)
            save_onnx(torchvision.models.resnet50(weights=None), path, SIDE)
        return str(path)

    def node(self, most: int, **more: Any) -> dict[str, Any]:
        """The model's node for batches up to ``most``."""
        return {
            "backend": "SyncTensor[TensorrtTensor]",
            "model": self.onnx(),
            "model::cache": self._cache("resnet50", most),
            **({"version_compatible": True} if self.version_compatible else {}),
            "max": most,
            "mean": MEAN,
            "std": STD,
            "precision": "fp16",
            **more,
        }

    def int8_node(self, most: int, **more: Any) -> dict[str, Any]:
        """The same with the model in int8, which is made at its first use."""
        path = self.folder / "resnet50.int8.onnx"
        if not path.exists():
            write_int8(Path(self.onnx()), path)
        return self.node(most, **{"model": str(path), "model::cache": self._cache("int8", most), **more})

    def engine(self, most: int) -> str:
        """Path of an engine for batches up to ``most``."""
        return engine_of(self.node(most))

    def _cache(self, name: str, most: int) -> str:
        return str(self.folder / f"{name}_{most}{'_compatible' if self.version_compatible else ''}.trt")


def engine_of(node: dict[str, Any]) -> str:
    """Path of the engine of a model's node, built where it is not there."""
    from torchpipe_py import pipe

    with pipe(node):
        return str(node["model::cache"])


class BareEngine:
    """The engine alone: a thread, a context and static buffers each, nothing copied in or out."""

    def __init__(self, path: str, batch: int, threads: int, graphs: bool) -> None:
        self._trt = load_tensorrt()
        self._batch, self._threads, self._graphs = batch, threads, graphs
        self._engine = load_engine(self._trt, Path(path).read_bytes(), path, version_compatible=True)
        self._input_mode = self._trt.TensorIOMode.INPUT
        self._capturing = threading.Lock()

    def load(self, seconds: float) -> Load:
        """Images per second over all threads; latencies of a batch."""
        latencies: list[float] = []
        until = [0.0]
        ready = threading.Barrier(self._threads + 1)
        threads = [
            threading.Thread(target=self._loop, args=(ready, until, latencies, seconds)) for _ in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        ready.wait()
        start = until[0] = perf_counter()
        ready.wait()
        for thread in threads:
            thread.join()
        load = load_of(latencies, perf_counter() - start)
        return Load(load.qps * self._batch, load.p50, load.p99)

    def _loop(self, ready: threading.Barrier, until: list[float], latencies: list[float], seconds: float) -> None:
        import torch

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            with self._capturing:
                run, keep = self._prepare(stream)
            ready.wait()
            ready.wait()
            while (start := perf_counter()) < until[0] + seconds:
                run()
                stream.synchronize()
                latencies.append(perf_counter() - start)
            del keep

    def layers(self) -> list[Layer]:
        """Those that multiply, with the precision of each."""
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == self._input_mode]
        shapes = {name: (self._batch, *tuple(self._engine.get_tensor_shape(name))[1:]) for name in inputs}
        return multiplying_layers(self._trt, self._engine, shapes)

    def layer_times(self, batches: int) -> dict[str, float]:
        """Milliseconds of each layer, the median of so many batches; they add up to more than an unwatched batch."""
        import torch

        times: dict[str, list[float]] = {}

        base = self._trt.IProfiler

        class Profiler(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                base.__init__(self)

            def report_layer_time(self, layer_name: str, ms: float) -> None:
                times.setdefault(layer_name, []).append(ms)

        stream, profiler = torch.cuda.Stream(), Profiler()
        with torch.cuda.stream(stream):
            context, _buffers = self._context(stream)
            context.profiler = profiler  # from here on execute_async_v3 waits for the batch and tells of it
            for _ in range(batches):
                context.execute_async_v3(stream.cuda_stream)
            stream.synchronize()
        return {name: statistics.median(taken) for name, taken in times.items()}

    def _prepare(self, stream: Any) -> tuple[Callable[[], object], Any]:
        import torch

        context, buffers = self._context(stream)
        run = partial(context.execute_async_v3, stream.cuda_stream)
        if not self._graphs:
            return run, (context, buffers)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        run()
        graph.capture_end()
        return graph.replay, (context, buffers, graph)

    def _context(self, stream: Any) -> tuple[Any, list[Any]]:
        """An execution context that has run, and the buffers that it works on."""
        import torch

        context, buffers = self._engine.create_execution_context(), []
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            shape = tuple(self._engine.get_tensor_shape(name))
            if self._engine.get_tensor_mode(name) == self._input_mode:
                context.set_input_shape(name, (self._batch, *shape[1:]))
            buffers.append(torch.rand((self._batch, *shape[1:]), device="cuda") * 255)
            context.set_tensor_address(name, buffers[-1].data_ptr())
        for _ in range(3):
            context.execute_async_v3(stream.cuda_stream)
        stream.synchronize()
        return context, buffers
