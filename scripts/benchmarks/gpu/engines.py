"""ResNet-50, or another model, by TensorRT: engines, the pipelines around it, and two ways to run it without a pipe.

ResNet-50's weights are random, which the time does not depend on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Load, in_threads
from torchpipe_py.backends.model.engine.api import load_tensorrt
from torchpipe_py.backends.model.engine.build import load_engine

SIDE = 224


class Engines:
    """ResNet-50 as ONNX and as engines for several largest batches, made at their first use and kept in a folder.

    ``version_compatible``: engines that also run on TensorRT's lean runtime. ``model``: an ONNX model
    in place of ResNet-50, which takes N×3×``side``×``side`` normalised as ImageNet is.
    """

    def __init__(
        self, folder: str, version_compatible: bool = False, model: str | None = None, side: int = SIDE
    ) -> None:
        self.folder, self.version_compatible = Path(folder), version_compatible
        self.side, self._model = side, model
        self.name = "resnet50" if model is None else Path(model).stem
        self.folder.mkdir(parents=True, exist_ok=True)

    def onnx(self) -> str:
        """Path of the ONNX model."""
        if self._model is not None:
            return self._model
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
        compatible = "_compatible" if self.version_compatible else ""
        return {
            "backend": "SyncTensor[TensorrtTensor]",
            "model": self.onnx(),
            "model::cache": str(self.folder / f"{self.name}_{most}{compatible}.trt"),
            **({"version_compatible": True} if compatible else {}),
            "max": most,
            "mean": "123.675, 116.28, 103.53",
            "std": "58.395, 57.12, 57.375",
            "precision": "fp16",
            **more,
        }

    def engine(self, most: int) -> str:
        """Path of an engine for batches up to ``most``, built where it is not there."""
        from torchpipe_py import pipe

        node = self.node(most)
        with pipe(node):
            return str(node["model::cache"])


def cpu_pipe(engines: Engines, *, decoders: int, most: int, instances: int) -> dict[str, Any]:
    """JPEG bytes in, decoded and resized by OpenCV, ``(label, score)`` out."""
    return {
        "global": {"batching_timeout": 2, "resize_h": engines.side, "resize_w": engines.side, "color": "rgb"},
        "decode": {"backend": "S[DecodeMat,ResizeMat,cvtColorMat]", "instance_num": decoders, "next": "model"},
        "model": engines.node(most, instance_num=instances, postprocessor="SoftmaxMax"),
    }


def gpu_pipe(engines: Engines, *, most: int, instances: int, checks: str = "node") -> dict[str, Any]:
    """Images in, ``(label, score)`` out; decoded by nvJPEG, resized and classified in one node.

    ``checks`` is the place where JPEGs are checked: "node", in a node before, whose refused files are decoded on the
    CPU; "inside", in ``DecodeTensor``; "none", nowhere.
    """
    node = engines.node(most, instance_num=instances, postprocessor="SoftmaxMax", unchecked=checks != "inside")
    backend = "SyncTensor[S[DecodeTensor,ResizeTensor,TensorrtTensor]]"
    before = {
        "check": {"backend": "CheckJpeg", "next": "cpu"},
        "cpu": {"backend": "S[DecodeMat,ResizeMat]", "filter": "or", "next": "model"},
    }
    return {
        "global": {"batching_timeout": 2, "resize_h": engines.side, "resize_w": engines.side},
        **(before if checks == "node" else {}),
        "model": {**node, "backend": backend, "DecodeTensor::max": most},
    }


class Context:
    """An execution context of an engine for batches of one size, with static buffers and a separate stream."""

    def __init__(self, trt: Any, engine: Any, batch: int) -> None:
        import torch

        self.stream = torch.cuda.Stream()
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        # NOTE: the engine has to live as long as its execution context.
        self._engine, self._context = engine, engine.create_execution_context()
        with torch.cuda.stream(self.stream):
            for index in range(engine.num_io_tensors):
                name = engine.get_tensor_name(index)
                shape = (batch, *tuple(engine.get_tensor_shape(name))[1:])
                is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
                if is_input and not self._context.set_input_shape(name, shape):
                    raise ValueError(f"the engine takes {tuple(engine.get_tensor_shape(name))}, not {shape}")
                buffer = torch.rand(shape, device="cuda") * 255
                self._context.set_tensor_address(name, buffer.data_ptr())
                (self.inputs if is_input else self.outputs).append(buffer)
            for _ in range(3):  # the first runs are slow
                self.run()
        self.stream.synchronize()

    def run(self) -> None:
        """Start a batch; nothing is copied in or out."""
        if not self._context.execute_async_v3(self.stream.cuda_stream):
            raise RuntimeError("TensorRT could not enqueue the inference")

    def captured(self) -> Callable[[], object]:
        """``run`` as a CUDA graph, for a thread whose stream is this one."""
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            self.run()
            graph.capture_end()
        replay: Callable[[], object] = graph.replay
        return replay


class BareEngine:
    """The engine alone: a thread and a context each."""

    def __init__(self, path: str, batch: int, graphs: bool = True) -> None:
        self._trt, self._batch, self._graphs = load_tensorrt(), batch, graphs
        self._engine = load_engine(self._trt, Path(path).read_bytes(), path, version_compatible=True)

    def load(self, threads: int, seconds: float) -> Load:
        """Images per second over so many threads; latencies of a batch."""
        import torch

        contexts = [Context(self._trt, self._engine, self._batch) for _ in range(threads)]
        waiting = [(context, context.captured() if self._graphs else context.run) for context in contexts]
        own = threading.local()

        def call() -> None:
            if not hasattr(own, "run"):
                context, own.run = waiting.pop()
                own.stream = context.stream
                torch.cuda.set_stream(own.stream)
            own.run()
            own.stream.synchronize()

        return in_threads(call, self._batch)(threads, seconds)
