"""The usual recipe with the service's IDL; see ``scripts/baseline_server.py``."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np
from thriftpy2.server import TThreadedServer
from thriftpy2.thrift import TProcessor
from thriftpy2.transport import TServerSocket

from benchmarks.bare import MEAN, STD
from benchmarks.gpu.engines import SIDE, Context
from torchpipe_py import TorchpipeError
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.model.engine.api import load_tensorrt
from torchpipe_py.backends.model.engine.build import load_engine
from torchpipe_py.errors import BackendUnavailable
from torchpipe_py.idl import load_idl

IDL = load_idl()
LIBRARIES = {"pycuda": "PyCUDA", "torch": "PyTorch"}

# -- models -------------------------------------------------------------------------------------------------------


class Model(Protocol):
    """A model for one image at a time, called by one thread at a time. ``description`` names its libraries."""

    description: str

    def run(self, array: np.ndarray) -> np.ndarray:
        """The first output for float32 1×3×size×size, as an array that the next call leaves alone."""
        ...

    def close(self) -> None:
        """Free its memory; nothing runs any more."""
        ...


class PycudaEngine:
    """A TensorRT engine fed by PyCUDA: page-locked host buffers, device buffers, one stream.

    Its CUDA context is the device's primary one, which PyTorch uses too. It is current in the calling thread only
    during a call.
    """

    def __init__(self, path: str, size: int = SIDE) -> None:
        """``BackendUnavailable`` without TensorRT or a device, ``ConfigError`` or ``ValueError`` for another engine."""
        self._cuda = import_module("pycuda.driver")
        try:
            self._cuda.init()
            self._primary = self._cuda.Device(0).retain_primary_context()
        except self._cuda.Error as error:
            raise BackendUnavailable(f"PyCUDA finds no usable CUDA device: {error}") from error
        trt = load_tensorrt()
        version = getattr(import_module("pycuda"), "VERSION_TEXT", "")
        self.description = f"TensorRT {trt.__version__}, PyCUDA {version}".rstrip()
        with self._current():
            self._engine = load_engine(trt, Path(path).read_bytes(), path, version_compatible=True)
            self._context = self._engine.create_execution_context()
            self._stream = self._cuda.Stream()
            self._allocate(trt, path, (1, 3, size, size))
        self.run(np.zeros((1, 3, size, size), np.float32))  # the first run is slow

    def _allocate(self, trt: Any, path: str, shape: tuple[int, ...]) -> None:
        """Buffers for a batch of 1, whatever the engine's largest is."""
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        if len(inputs) != 1 or not self._context.set_input_shape(inputs[0], shape):
            takes = [tuple(self._engine.get_tensor_shape(name)) for name in inputs]
            raise ValueError(f"{path} takes {takes}, not one input of {shape}")
        self._input, self._output = inputs[0], next(name for name in names if name not in inputs)
        self._host: dict[str, np.ndarray] = {}
        self._device: dict[str, Any] = {}
        for name in names:
            if self._engine.get_tensor_dtype(name) != trt.float32:
                raise ValueError(f"{path}: {name} is {self._engine.get_tensor_dtype(name)}, not float32")
            self._host[name] = self._cuda.pagelocked_empty(tuple(self._context.get_tensor_shape(name)), np.float32)
            self._device[name] = self._cuda.mem_alloc(self._host[name].nbytes)
            self._context.set_tensor_address(name, int(self._device[name]))

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context the calling thread's."""
        self._primary.push()
        try:
            yield
        finally:
            self._cuda.Context.pop()

    def run(self, array: np.ndarray) -> np.ndarray:
        """The first output for float32 1×3×size×size; `RuntimeError` where TensorRT fails."""
        host, device, stream = self._host, self._device, self._stream
        with self._current():
            np.copyto(host[self._input], array)
            self._cuda.memcpy_htod_async(device[self._input], host[self._input], stream)
            if not self._context.execute_async_v3(stream.handle):
                raise RuntimeError("TensorRT could not enqueue the inference")
            self._cuda.memcpy_dtoh_async(host[self._output], device[self._output], stream)
            stream.synchronize()
            output: np.ndarray = host[self._output].copy()
            return output

    def close(self) -> None:
        """Free the memory on host and device."""
        with self._current():
            # NOTE: in this order; an execution context must not outlive its engine.
            del self._context, self._engine, self._host, self._device, self._stream


class TorchEngine:
    """A TensorRT engine fed by PyTorch: a pinned Tensor, Tensors on the device, one stream."""

    def __init__(self, path: str, size: int = SIDE) -> None:
        """``BackendUnavailable`` without TensorRT, ``ConfigError`` or ``ValueError`` for another engine."""
        import torch

        trt = load_tensorrt()
        self.description = f"TensorRT {trt.__version__}, PyTorch {torch.__version__}"
        self._context = Context(trt, load_engine(trt, Path(path).read_bytes(), path, version_compatible=True), 1)
        self._pinned = torch.empty(1, 3, size, size, pin_memory=True)

    def run(self, array: np.ndarray) -> np.ndarray:
        """The first output for float32 1×3×size×size; `RuntimeError` where TensorRT fails."""
        import torch

        with torch.cuda.stream(self._context.stream):
            self._pinned.numpy()[:] = array
            self._context.inputs[0].copy_(self._pinned, non_blocking=True)
            self._context.run()
            output: np.ndarray = self._context.outputs[0].cpu().numpy()
            return output

    def close(self) -> None:
        """Free the memory on host and device."""
        del self._context, self._pinned


class OnnxModel:
    """An ONNX model run by ONNX Runtime on the CPU, in TensorRT's place; ImageNet's mean and std are put into it."""

    def __init__(self, path: str, size: int = SIDE) -> None:
        """``ConfigError`` or ``ValueError`` for a model that does not take 1×3×size×size."""
        import onnxruntime

        from torchpipe_py.backends.model.normalisation import Normalisation
        from torchpipe_py.backends.model.onnx_graph import normalized_model
        from torchpipe_py.encryption.model_file import ModelFile

        self.description = f"ONNX Runtime {onnxruntime.__version__}"
        content = normalized_model(ModelFile(path), Normalisation(MEAN, STD))
        self._session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0]
        dims = self._input.shape
        if any(isinstance(dim, int) and dim != want for dim, want in zip(dims, (1, 3, size, size), strict=True)):
            raise ValueError(f"{path} takes {dims}, not {[1, 3, size, size]}")

    def run(self, array: np.ndarray) -> np.ndarray:
        """The first output for float32 1×3×size×size."""
        output: np.ndarray = self._session.run(None, {self._input.name: array})[0]
        return output

    def close(self) -> None:
        """Free the session."""
        del self._session


def choose_library(wanted: str) -> tuple[str, str]:
    """``pycuda`` or ``torch``, and the reason if ``auto`` did not choose PyCUDA; ``BackendUnavailable`` if required."""
    if wanted == "torch":
        return "torch", ""
    try:
        import_module("pycuda.driver")
    except ImportError as error:
        problem = f"PyCUDA cannot be imported ({error}; pip install 'torchpipe_py[pycuda]')"
        if wanted == "pycuda":
            raise BackendUnavailable(problem) from error
        return "torch", problem
    return "pycuda", ""


def load_model(engine: str | None, onnx: str | None = None, size: int = SIDE, library: str = "auto") -> Model:
    """The engine, fed by this library, or the ONNX model."""
    if onnx is not None:
        return OnnxModel(onnx, size)
    assert engine is not None
    return PycudaEngine(engine, size) if choose_library(library)[0] == "pycuda" else TorchEngine(engine, size)


# -- the recipe ---------------------------------------------------------------------------------------------------


def preprocess(jpeg: bytes, size: int = SIDE) -> np.ndarray:
    """RGB 0 to 255, float32, 1×3×size×size, resized bilinearly without cropping; raises `ValueError`."""
    encoded = np.frombuffer(jpeg, np.uint8)
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR) if encoded.size else None
    if image is None:
        raise ValueError(f"{len(jpeg)} bytes that are not a readable image")
    image = cv2.cvtColor(cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR), cv2.COLOR_BGR2RGB)
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None], dtype=np.float32)


class Baseline:
    """An encoded image to ``(label, score)`` in the calling thread: the index of the best logit, its probability.

    A lock lets one thread at a time use the model.
    """

    def __init__(self, model: Model, size: int = SIDE) -> None:
        self._model, self._size, self._lock = model, size, threading.Lock()

    def __call__(self, jpeg: bytes) -> tuple[str, float]:
        array = preprocess(jpeg, self._size)
        with self._lock:
            output = self._model.run(array)
        logits = output.astype(np.float32).ravel()
        exponentials = np.exp(logits - logits.max())
        index = int(logits.argmax())
        return str(index), float(exponentials[index] / exponentials.sum())

    def close(self) -> None:
        """Wait for the call under way and free the model; later calls fail."""
        with self._lock:
            self._model.close()


# -- the service --------------------------------------------------------------------------------------------------


class Handler:
    """``InferenceService`` as thriftpy2's servers call it: a method per call, in the connection's thread."""

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline

    def ping(self) -> None: ...

    def infer_batch(self, params: Any) -> Any:
        try:
            label, score = self._baseline(params.data)
        except ValueError as error:
            raise IDL.InferenceError(code="decode_error", message=str(error)) from error
        except Exception as error:
            raise IDL.InferenceError(code="backend_error", message=f"{type(error).__name__}: {error}") from error
        return IDL.InferenceResult(label=label, score=score)


def make_server(listener: socket.socket, baseline: Baseline) -> TThreadedServer:
    """A server with a thread per connection, and thriftpy2's defaults: buffered transport, binary protocol."""
    transport = TServerSocket(client_timeout=None)  # connections may stay idle
    transport.sock, transport.listen = listener, lambda: None  # it listens already, so its port is known
    return TThreadedServer(TProcessor(IDL.InferenceService, Handler(baseline)), transport, daemon=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then exit with 0; 1 where it cannot run."""
    parser = ArgumentParser(description="A model behind a lock, one image at a time: the baseline of the benchmarks.")
    option = parser.add_mutually_exclusive_group(required=True).add_argument
    option("--engine", metavar="FILE", help="serialized TensorRT engine, mean and std inside")
    option("--onnx", metavar="FILE", help="ONNX model without mean and std, run by ONNX Runtime on the CPU instead")
    option = parser.add_argument
    cuda = "what copies to and from the GPU; auto: PyCUDA if it can be imported, else PyTorch (default: auto)"
    option("--cuda", choices=["auto", *LIBRARIES], default="auto", help=cuda)
    option("--host", default="127.0.0.1")
    option("--port", type=int, default=8888, help="0: any free one, which is printed")
    option("--size", type=int, default=SIDE, help="height and width of the model's input (default: %(default)s)")
    options = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    cv2.setNumThreads(1)  # the connections are the parallelism
    try:
        if options.engine and (problem := choose_library(options.cuda)[1]):
            print(f"baseline_server.py: {problem}: PyTorch copies instead", file=sys.stderr)
        model = load_model(options.engine, options.onnx, options.size, options.cuda)
        listener = socket.create_server((options.host, options.port), backlog=1024)
    except (TorchpipeError, RuntimeError, ValueError, OSError) as error:
        print(f"baseline_server.py: {error}", file=sys.stderr)
        return 1
    with closing(Baseline(model, options.size)) as baseline, listener:
        where = f"{options.host}:{listener.getsockname()[1]} (pid {os.getpid()})"
        print(f"serving {options.engine or options.onnx} on {where}, {model.description} behind a lock", flush=True)
        make_server(listener, baseline).serve()
    return 0
