"""The recipe that users come from, behind the service's IDL: ``scripts/baseline_server.py`` says more."""

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
from typing import Any, NoReturn

import cv2
import numpy as np
from thriftpy2.server import TThreadedServer
from thriftpy2.thrift import TProcessor
from thriftpy2.transport import TServerSocket

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.idl import load_idl

IDL = load_idl()


class CannotRunError(Exception):
    """Why there is nothing to serve: a missing library or device, or an engine that does not fit."""


class LockedEngine:
    """A TensorRT engine with one execution context, one stream and one set of buffers, used by one thread at a time.

    Its CUDA context is the device's primary one, which PyTorch uses too, pushed for the time of a call only.
    """

    def __init__(self, engine_path: str | Path, size: int = 224) -> None:
        """Loads the engine for an input of 1×3×size×size; raises `CannotRunError` and `OSError`."""
        self._cuda, self._trt = _load("pycuda.driver"), _load("tensorrt")
        try:
            self._cuda.init()
            self._cuda_context = self._cuda.Device(0).retain_primary_context()
        except self._cuda.Error as error:
            raise CannotRunError(f"no usable CUDA device: {error}") from error
        self._lock = threading.Lock()
        self.input_shape = (1, 3, size, size)
        with self._current():
            self._logger = self._trt.Logger(self._trt.Logger.WARNING)
            self._runtime = self._trt.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(Path(engine_path).read_bytes())
            if self._engine is None:
                raise CannotRunError(f"{engine_path} is no engine of TensorRT {self._trt.__version__} for this GPU")
            self._context = self._engine.create_execution_context()
            self._stream = self._cuda.Stream()
            self._allocate(str(engine_path))
        self.infer(np.zeros(self.input_shape, np.float32))  # the first run is slow

    def _allocate(self, path: str) -> None:
        """Page-locked host buffers and device buffers for a batch of 1, whatever the profile's largest is."""
        engine = self._engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in inputs]
        if len(inputs) != 1 or not self._context.set_input_shape(inputs[0], self.input_shape):
            shapes = [tuple(engine.get_tensor_shape(name)) for name in inputs]
            raise CannotRunError(f"{path} takes {shapes}, not one input of {self.input_shape}")
        self._host: dict[str, np.ndarray] = {}
        self._device: dict[str, Any] = {}
        for name in names:
            shape = tuple(self._context.get_tensor_shape(name))
            self._host[name] = self._cuda.pagelocked_empty(shape, self._trt.nptype(engine.get_tensor_dtype(name)))
            self._device[name] = self._cuda.mem_alloc(self._host[name].nbytes)
            self._context.set_tensor_address(name, int(self._device[name]))
        self._input = inputs[0]

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The calling thread's turn at the GPU."""
        with self._lock:
            self._cuda_context.push()
            try:
                yield
            finally:
                self._cuda.Context.pop()

    def infer(self, array: np.ndarray) -> list[np.ndarray]:
        """The outputs for ``input_shape``, as arrays of their own, in the engine's order."""
        with self._current():
            np.copyto(self._host[self._input], array)
            self._cuda.memcpy_htod_async(self._device[self._input], self._host[self._input], self._stream)
            if not self._context.execute_async_v3(self._stream.handle):
                raise RuntimeError("TensorRT could not enqueue the inference")
            for name in self._outputs:
                self._cuda.memcpy_dtoh_async(self._host[name], self._device[name], self._stream)
            self._stream.synchronize()
            return [self._host[name].copy() for name in self._outputs]

    def close(self) -> None:
        """Waits for the inference under way and frees the GPU's memory; further calls of `infer` fail."""
        with self._current():
            # NOTE: in this order; an execution context must not outlive its engine, nor the engine its runtime.
            del self._context, self._engine, self._runtime, self._host, self._device, self._stream


def _load(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise CannotRunError(f"{name} cannot be imported ({error}); pip install 'torchpipe_py[tensorrt]'") from error


def preprocess(jpeg: bytes, size: int = 224) -> np.ndarray:
    """RGB 0 to 255, float32, 1×3×size×size, resized bilinearly without cropping; raises `ValueError`."""
    encoded = np.frombuffer(jpeg, np.uint8)
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR) if encoded.size else None
    if image is None:
        raise ValueError(f"{len(jpeg)} bytes that are no readable image")
    image = cv2.cvtColor(cv2.resize(image, (size, size), interpolation=cv2.INTER_LINEAR), cv2.COLOR_BGR2RGB)
    return np.ascontiguousarray(image.transpose(2, 0, 1)[None], dtype=np.float32)


class Baseline:
    """An encoded image to ``(label, score)`` in the calling thread: the index of the best logit, its probability."""

    def __init__(self, engine: LockedEngine, size: int = 224) -> None:
        self._engine, self._size = engine, size

    def __call__(self, jpeg: bytes) -> tuple[str, float]:
        logits = self._engine.infer(preprocess(jpeg, self._size))[0].astype(np.float32).ravel()
        exponentials = np.exp(logits - logits.max())
        index = int(logits.argmax())
        return str(index), float(exponentials[index] / exponentials.sum())


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

    def _refuse(self, *_: Any) -> NoReturn:
        raise IDL.InferenceError(code="invalid_request", message="the baseline has ping and infer_batch only")

    infer_many = infer = _refuse


def make_server(listener: socket.socket, baseline: Baseline) -> TThreadedServer:
    """A thread per connection; buffered transport and binary protocol, which are thriftpy2's defaults."""
    transport = TServerSocket(client_timeout=None)  # connections may be idle for ever
    transport.sock, transport.listen = listener, lambda: None  # it listens already, so its port is known
    return TThreadedServer(TProcessor(IDL.InferenceService, Handler(baseline)), transport, daemon=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then exit with 0; 1 where it cannot run."""
    parser = ArgumentParser(description="TensorRT behind a lock: the baseline of the benchmarks.")
    parser.add_argument("--engine", required=True, metavar="FILE", help="serialized TensorRT engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8888, help="0: any free one, which is printed")
    parser.add_argument("--size", type=int, default=224, help="height and width of the engine's input")
    options = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    cv2.setNumThreads(1)  # the connections are the parallelism
    try:
        engine = LockedEngine(options.engine, options.size)
        listener = socket.create_server((options.host, options.port), backlog=1024)
    except (CannotRunError, OSError) as error:
        print(f"baseline_server.py: {error}", file=sys.stderr)
        return 1
    with closing(engine), listener:
        port = listener.getsockname()[1]
        print(f"serving {options.engine} on {options.host}:{port} (pid {os.getpid()})", flush=True)
        make_server(listener, Baseline(engine, options.size)).serve()
    return 0
