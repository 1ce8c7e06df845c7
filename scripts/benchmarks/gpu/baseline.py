"""The usual recipe behind the service's IDL: ``scripts/baseline_server.py`` describes it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from thriftpy2.server import TThreadedServer
from thriftpy2.thrift import TProcessor
from thriftpy2.transport import TServerSocket

from benchmarks.gpu.engines import Context
from torchpipe_py import TorchpipeError
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.model.engine.api import load_tensorrt
from torchpipe_py.backends.model.engine.build import load_engine
from torchpipe_py.idl import load_idl

IDL = load_idl()


class LockedEngine:
    """A TensorRT engine with one execution context, one stream and one set of buffers, used by one thread at a time."""

    def __init__(self, path: str, size: int = 224) -> None:
        import torch

        trt = load_tensorrt()
        engine = load_engine(trt, Path(path).read_bytes(), path, version_compatible=True)
        self._context, self._lock = Context(trt, engine, 1), threading.Lock()
        self._pinned = torch.empty(1, 3, size, size, pin_memory=True)

    def infer(self, array: np.ndarray) -> np.ndarray:
        """The first output for float32 1×3×size×size."""
        import torch

        with self._lock, torch.cuda.stream(self._context.stream):
            self._pinned.numpy()[:] = array
            self._context.inputs[0].copy_(self._pinned, non_blocking=True)
            self._context.run()
            logits: np.ndarray = self._context.outputs[0].cpu().numpy()
            return logits


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
        logits = self._engine.infer(preprocess(jpeg, self._size)).astype(np.float32).ravel()
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


def make_server(listener: socket.socket, baseline: Baseline) -> TThreadedServer:
    """A thread per connection; buffered transport and binary protocol, which are thriftpy2's defaults."""
    transport = TServerSocket(client_timeout=None)  # connections may be idle forever
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
    except (TorchpipeError, RuntimeError, ValueError, OSError) as error:
        print(f"baseline_server.py: {error}", file=sys.stderr)
        return 1
    with listener:
        port = listener.getsockname()[1]
        print(f"serving {options.engine} on {options.host}:{port} (pid {os.getpid()})", flush=True)
        make_server(listener, Baseline(engine, options.size)).serve()
    return 0
