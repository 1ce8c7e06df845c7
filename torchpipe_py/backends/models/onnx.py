"""Models by ONNX Runtime, on the CPU anywhere and on CUDA where its provider is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, Param
from torchpipe_py.backends.models.model import ModelBackend, as_array, by_shapes, check_count
from torchpipe_py.backends.models.onnx_graph import keep_telemetry_off
from torchpipe_py.errors import BackendUnavailable, ConfigError, InvalidRequest, nearest
from torchpipe_py.values import to_int, to_strings

logger = logging.getLogger("torchpipe_py")

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(uint8)": np.uint8,
    "tensor(int8)": np.int8,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}

_ON_DEVICE = ("CUDAExecutionProvider", "TensorrtExecutionProvider")


class OnnxTensor(ModelBackend):
    """An ONNX model by ONNX Runtime: Tensors 1×C×H×W in, Tensors 1×… out, ``max`` items at a time.

    Inputs are converted to the model's dtype where that loses nothing in kind (``uint8`` to ``float32``, say).
    The instances of a node share one session.
    """

    ignored_keys = dict.fromkeys(
        ("model::cache", "precision", "precision::fp32", "workspace", "max_workspace_size"),
        "ONNX Runtime keeps no engine and computes in the model's own precision; TensorrtTensor has it",
    )

    providers = Param(to_strings, (), doc="execution providers, best first; default: CUDA if installed, then CPU")

    threads = Param(to_int, 0, low=0, doc="threads inside one run; 0 divides the cores among the instances")

    def setup(self) -> None:
        super().setup()
        keep_telemetry_off()
        try:
            import onnxruntime
            import torch
        except ImportError as error:
            raise BackendUnavailable(f"{error.name} is not installed (pip install onnxruntime)") from error
        self._from_numpy: Any = torch.from_numpy
        self._session = self.config.shared.get(
            (self.model, self.mean, self.std, self.providers, self.threads, self.config.device_id),
            lambda: self._load(onnxruntime),
        )
        self._inputs = [_Input(value, self.max()) for value in self._session.get_inputs()]
        self._check_batch()
        self.check_labels(self._session.get_outputs()[0].shape)
        self.config.shared.get((self._session, "warm"), self._warm_up)

    def forward(self, items: list[Data]) -> None:
        for _, members, rows in by_shapes(items, self._read):
            self._run(members, rows)

    def _read(self, values: list[Any]) -> tuple[tuple[tuple[int, ...], ...], list[np.ndarray]]:
        """The inputs of a request as arrays 1×…, and their shapes; ``InvalidRequest`` where they do not fit."""
        check_count(values, len(self._inputs))
        arrays = [given.array(value) for given, value in zip(self._inputs, values, strict=True)]
        return tuple([array.shape for array in arrays]), arrays

    def _run(self, items: list[Data], rows: list[list[np.ndarray]]) -> None:
        """One batch of items whose inputs have the same shapes."""
        feed = {given.name: given.stack([row[index] for row in rows]) for index, given in enumerate(self._inputs)}
        arrays = self._session.run(None, feed)
        for array in arrays:
            if array.ndim == 0 or len(array) != len(items):
                raise ValueError(f"an output of shape {array.shape} for {len(items)} items: it has no batch dimension")
        self.write_results(items, [self._from_numpy(array) for array in arrays])

    def _load(self, onnxruntime: Any) -> Any:
        options = onnxruntime.SessionOptions()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options.intra_op_num_threads = self.threads or max(1, cores // self.config.instance_num)
        # A spinning pool takes the cores from the nodes that decode.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        names = self._providers(onnxruntime)
        on_device = {"device_id": str(self.config.device_id)}
        providers = [(name, on_device if name in _ON_DEVICE else {}) for name in names]
        try:
            session = onnxruntime.InferenceSession(self._source(), options, providers=providers)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"model {self.model}: ONNX Runtime cannot load it: {error}") from error
        missing = [name for name in names if name not in session.get_providers()]
        if missing and self.providers:
            raise BackendUnavailable(f"{missing[0]} is installed, but ONNX Runtime cannot start it here")
        if missing:
            logger.warning("%s: %s cannot be started here, the model runs without it", self.model, missing[0])
        return session

    def _warm_up(self) -> None:
        """Run zeros through the model, where it says of what shape: first runs allocate, and on a GPU choose kernels.

        There each batch size is a shape of its own; on the CPU the smallest and the largest tell all there is.
        """
        if any(None in given.dims[1:] for given in self._inputs):
            return
        on_device = any(name in _ON_DEVICE for name in self._session.get_providers())
        sizes = range(self.min(), self.max() + 1) if on_device else sorted({self.min(), self.max()})
        try:
            for size in sizes:
                self._session.run(None, {given.name: given.zeros(size) for given in self._inputs})
        except Exception as error:  # zeros need not be a meaningful input
            logger.warning("%s: not warmed up: %s", self.model, error)

    def _source(self) -> Any:
        """The path, or with ``mean`` or ``std`` the bytes of the model that has them inside."""
        if not self.mean and not self.std:
            return self.model
        from torchpipe_py.backends.models.onnx_graph import normalized_model

        return normalized_model(self.model, self.mean, self.std)

    def _providers(self, onnxruntime: Any) -> list[str]:
        available = onnxruntime.get_available_providers()
        for name in self.providers:
            if name not in available and name in onnxruntime.get_all_providers():
                raise BackendUnavailable(f"this build of ONNX Runtime has no {name}")
            if name not in available:
                raise ConfigError(f"providers: {name!r} is not installed; {nearest(name, available)}")
        if self.providers:
            return list(self.providers)
        return [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in available]

    def _check_batch(self) -> None:
        for given in self._inputs:
            fixed = given.dims[0]
            if fixed is not None and not self.min() == self.max() == fixed:
                raise ConfigError(
                    f"model {self.model}: input {given.name!r} has a fixed batch of {fixed}, "
                    f"but the range is {self.min()}..{self.max()}; export it with a dynamic batch"
                )


class _Input:
    """One input of the model and the buffer its batches are stacked in."""

    def __init__(self, value: Any, most: int) -> None:
        self.name: str = value.name
        self.dims: Sequence[int | None] = [dim if isinstance(dim, int) else None for dim in value.shape]
        if not self.dims:
            raise ConfigError(f"input {self.name!r} is a scalar; expected a batch dimension")
        if value.type not in _DTYPES:
            raise ConfigError(f"input {self.name!r} is a {value.type}; supported: {', '.join(_DTYPES)}")
        self._dtype = _DTYPES[value.type]
        self._most = most
        self._buffer: Any = np.empty(0, self._dtype)

    def array(self, value: Any) -> np.ndarray:
        """A value, 1×… or without its first dimension, as an array 1×… that fits this input, or ``InvalidRequest``."""
        array = as_array(value, self.dims, self.name)
        if not np.can_cast(array.dtype, self._dtype, "same_kind"):
            raise InvalidRequest(f"input {self.name!r} takes {np.dtype(self._dtype)}, got {array.dtype}")
        return array

    def zeros(self, size: int) -> np.ndarray:
        """A batch of that size, where all dimensions behind the first are known."""
        return np.zeros((size, *(dim or 0 for dim in self.dims[1:])), self._dtype)

    def stack(self, arrays: list[np.ndarray]) -> np.ndarray:
        """N arrays 1×… of one shape as one array N×… of the input's dtype; valid until the next call."""
        shape = arrays[0].shape[1:]
        if self._buffer.shape[1:] != shape or len(self._buffer) < len(arrays):
            self._buffer = np.empty((max(len(arrays), self._most), *shape), self._dtype)
        batch: np.ndarray = self._buffer[: len(arrays)]
        for row, array in zip(batch, arrays, strict=True):
            np.copyto(row, array[0], casting="same_kind")
        return batch
