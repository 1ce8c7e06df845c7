"""Runs models on a GPU: batches staged into buffers that never move, one CUDA graph for each batch size."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.cuda import Guard, no_collection
from torchpipe_py.backends.model.check import Layout
from torchpipe_py.backends.model.inputs import InputSpec, is_mat, request_values, to_numpy
from torchpipe_py.backends.model.model import Shapes
from torchpipe_py.backends.signature import TensorSpec
from torchpipe_py.errors import InvalidRequest, counted

Infer = Callable[[list[Any]], list[Any]]
"""Enqueues a network on the current stream: input tensors N×… to output tensors."""

RunKey = tuple[Any, ...]
"""The size of a batch, and for each input the ``Staging`` that is copied from, or ``None``."""

ALL_SIZES = 8  # up to here each batch size has a graph of its own
MAX_UNDECLARED_INPUTS = 64
MAX_SHAPES = 16  # buffers and graphs are kept for the shapes used last

# NOTE: process-wide: CUDA allows one capture beside other work, PyTorch's allocator only one at a time.
_capturing = threading.Lock()


MAT = "mat"


def row_tensor(value: Any, shape: tuple[int, ...]) -> Any:
    """One request's value, a Mat, array or tensor, as a tensor of ``shape``, which has no batch dimension."""
    import torch

    if len(shape) == 3 and (is_mat(value) or _is_turned(value, shape)):
        value = value.reshape(*shape[1:], shape[0]).transpose(2, 0, 1)  # not -1: the image may have no pixel
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.copy())  # contiguous and writable
    return value.detach().reshape(shape)


def _is_turned(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value for this shape is a Mat of another dtype than ``uint8``, so that it must be transposed."""
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.shape != shape


class StagedInput:
    """One input's buffer on the GPU, max×…, filled from the values of a batch: Mats, arrays or tensors."""

    def __init__(self, buffer: Any) -> None:
        import torch

        self.buffer = buffer
        self._torch: Any = torch
        self._row = tuple(buffer.shape[1:])
        self._staging: dict[Any, Staging] = {}

    def gather(self, values: list[Any]) -> Staging | None:
        """Collect the values; return the ``Staging`` to copy from, or ``None`` if the copies are enqueued."""
        kinds = {self._kind(value) for value in values}
        if len(kinds) > 1:
            for index, value in enumerate(values):
                self.buffer[index].copy_(row_tensor(value, self._row))
            return None
        (kind,) = kinds
        if kind == MAT:
            staging = self.mat_staging()
            staging.gather_mats(values)
        elif kind[0] == "cuda":
            self._concatenate(values, kind[1])
            return None
        else:
            staging = self._staging_of(kind[1])
            staging.gather([as_numpy(row_tensor(value, self._row)) for value in values])
        return staging

    def mat_staging(self) -> Staging:
        """The buffer that collects Mats, N×H×W×C."""
        if MAT not in self._staging:
            channels, height, width = self._row
            shape = (len(self.buffer), height, width, channels)
            pinned = self._torch.empty(shape, dtype=self._torch.uint8, pin_memory=True)
            self._staging[MAT] = Staging(self.buffer, pinned, True)
        return self._staging[MAT]

    def takes_images(self) -> bool:
        """Whether Mats are likely values: one, three or four channels."""
        return len(self._row) == 3 and self._row[0] in (1, 3, 4)

    def _kind(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if len(self._row) == 3 and is_mat(value):
                return MAT
            return ("cpu", self._torch.from_numpy(np.empty(0, value.dtype)).dtype)
        return ("cuda" if value.is_cuda else "cpu", value.dtype)

    def _concatenate(self, values: list[Any], dtype: Any) -> None:
        buffer = self.buffer[: len(values)]
        rows = [value.detach() if value.requires_grad else value for value in values]
        rows = [row if row.ndim > len(self._row) else row[None] for row in rows]
        rows = [row if row.device == buffer.device else row.to(buffer.device) for row in rows]
        if dtype == buffer.dtype:
            self._torch.cat(rows, out=buffer)
        else:
            buffer.copy_(self._torch.cat(rows))

    def _staging_of(self, dtype: Any) -> Staging:
        if dtype not in self._staging:
            pinned = self._torch.empty(self.buffer.shape, dtype=dtype, pin_memory=True)
            self._staging[dtype] = Staging(self.buffer, pinned, False)
        return self._staging[dtype]


class Staging:
    """Rows gathered in pinned memory; copied to the GPU as they are, and converted and laid out there."""

    def __init__(self, buffer: Any, pinned: Any, channels_last: bool) -> None:
        import cv2
        import torch

        self._stack: Any = cv2.vconcat
        self._rows = as_numpy(pinned)
        self._pinned, self._buffer = pinned, buffer
        direct = pinned.dtype == buffer.dtype and not channels_last
        self._device = buffer if direct else torch.empty(pinned.shape, dtype=pinned.dtype, device=buffer.device)
        self._source = None if direct else self._device.permute(0, 3, 1, 2) if channels_last else self._device

    def gather(self, arrays: list[np.ndarray]) -> None:
        """Copy arrays of one row each."""
        for row, array in zip(self._rows, arrays, strict=False):
            np.copyto(row, array.reshape(row.shape))

    def gather_mats(self, mats: list[np.ndarray]) -> None:
        """Copy Mats of one size."""
        _, height, width, channels = self._rows.shape
        if channels == 1 or len(mats) == 1:
            self.gather(mats)
            return
        # One call for all of them: NumPy would release the GIL and wait for it again for each.
        target = self._rows[: len(mats)].reshape(len(mats) * height, width, channels)
        if self._stack(mats, target) is not target:
            self.gather(mats)  # OpenCV allocated its own memory

    def enqueue(self, size: int) -> None:
        """Enqueue the copy of ``size`` rows."""
        self._device[:size].copy_(self._pinned[:size], non_blocking=True)
        if self._source is not None:
            self._buffer[:size].copy_(self._source[:size])


def as_numpy(tensor: Any) -> np.ndarray:
    """A CPU tensor's memory as an array; bfloat16, which NumPy lacks, becomes 16-bit integers."""
    import torch

    array: np.ndarray = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


class GraphedNetwork:
    """A network on buffers of fixed shape: for each batch size a CUDA graph from inputs to host buffers.

    ``finish`` is the part of the postprocessor that runs on the GPU; with it, outputs end in pinned memory.
    """

    def __init__(
        self, buffers: list[Any], infer: Infer, layout: Layout, finish: Infer | None, use_graphs: bool = True
    ) -> None:
        import torch

        self._torch: Any = torch
        self._inputs = [StagedInput(buffer) for buffer in buffers]
        self._infer, self._layout, self._finish = infer, layout, finish
        self._pool: Any = torch.cuda.graph_pool_handle() if use_graphs else None
        self._runs: dict[RunKey, Callable[[], list[Any]]] = {}
        self._stream = torch.cuda.current_stream()
        self._is_staged = False

    def run(self, rows: list[list[Any]], size: int) -> list[Any]:
        """Enqueue a batch, padded to ``size``; its outputs, on the GPU or, with ``finish``, in pinned memory.

        Both are overwritten by the next run.
        """
        if self._is_staged and not self._stream.query():
            self._stream.synchronize()  # the last batch may still be copied from pinned memory
        stagings = [staged.gather([row[index] for row in rows]) for index, staged in enumerate(self._inputs)]
        self._is_staged = any(stagings)
        return self._prepared((size, *stagings))()

    def warm_up(self, size: int) -> None:
        """Capture graphs for a batch of ``size``: for tensors on the GPU, and for Mats if the inputs may be images."""
        self._prepared((size, *[None] * len(self._inputs)))
        if all(staged.takes_images() for staged in self._inputs):
            self._prepared((size, *[staged.mat_staging() for staged in self._inputs]))

    def close(self) -> None:
        """Release the graphs."""
        self._runs.clear()

    def _prepared(self, key: RunKey) -> Callable[[], list[Any]]:
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = partial(self._enqueue, key, []) if self._pool is None else self._captured(key)
        return run

    def _captured(self, key: RunKey) -> Callable[[], list[Any]]:
        host: list[Any] = []
        for _ in range(2):  # load kernels and choose algorithms before the capture
            self._enqueue(key, host)
        self._stream.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        # NOTE: a collection that frees an engine on this thread would end the capture.
        with _capturing, no_collection():
            # NOTE: "thread_local": other threads may allocate and synchronize during the capture.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._enqueue(key, host)
            except Exception:
                with suppress(Exception):  # the capture must end; its own error does not help
                    graph.capture_end()
                raise
            graph.capture_end()

        def run() -> list[Any]:
            graph.replay()
            return outputs

        return run

    def _enqueue(self, key: RunKey, host: list[Any]) -> list[Any]:
        """Enqueue input copies, network, ``finish`` and copies to ``host``, whose buffers the first call creates."""
        size, *stagings = key
        for staging in stagings:
            if staging is not None:
                staging.enqueue(size)
        outputs = self._infer([staged.buffer[:size] for staged in self._inputs])
        self._layout.check(outputs, (), size)
        if self._finish is None:
            return outputs
        outputs = self._finish(outputs)
        if [buffer.shape for buffer in host] != [output.shape for output in outputs]:  # first call, or a new shape
            host[:] = [self._torch.empty(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs]
        for buffer, output in zip(host, outputs, strict=True):
            buffer.copy_(output, non_blocking=True)
        return host


def batch_sizes(least: int, most: int) -> list[int]:
    """The sizes that get a graph: each up to 8, then four for each doubling; a batch is padded to the next of them."""
    sizes = list(range(1, ALL_SIZES + 1))
    step = ALL_SIZES // 4
    while sizes[-1] < most:
        step = step if sizes[-1] < 4 * step * 2 else step * 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if least <= size < most] + [most]


def finish_of(postprocessor: Any) -> Infer | None:
    """The GPU part of a postprocessor; ``None`` for a subclass that overrides only ``forward``."""
    for cls in type(postprocessor).__mro__:
        if "on_device" in vars(cls):
            finish: Infer = postprocessor.on_device
            return finish
        if "forward" in vars(cls):
            return None
    return None


class CudaBackend(Protocol):
    """A ``ModelBackend`` that is ``on_stream`` and runs by a ``CudaRunner``."""

    guard: Guard
    layout: Layout
    inputs: Sequence[TensorSpec]
    use_graphs: bool
    default_dtype: Any
    """The dtype of inputs whose type the model does not declare."""
    _postprocess: Any

    def min(self) -> int: ...

    def max(self) -> int: ...

    def write_finished(self, items: Sequence[Data], tensors: list[Any]) -> None: ...

    def write_results(self, items: Sequence[Data], outputs: list[Any]) -> None: ...

    def enqueue(self, inputs: list[Any]) -> list[Any]:
        """Enqueue the model on the current stream; output tensors, in the model's order."""

    def size_for(self, count: int, shapes: Shapes) -> int:
        """The size that a batch of ``count`` is padded to; ``InvalidRequest`` for shapes that the model refuses."""

    def forget(self, shapes: Shapes) -> None:
        """Release the resources of ``enqueue`` for inputs of these shapes."""


class CudaRunner:
    """Runs a model on a GPU as CUDA graphs, whose shapes it remembers.

    A value is a Mat, which is copied as it is and laid out on the GPU, or an array or tensor 1×… on any device.
    """

    def __init__(self, backend: CudaBackend) -> None:
        import torch

        self._torch: Any = torch
        self._backend = backend
        self.sizes = batch_sizes(backend.min(), backend.max())
        self._specs_of: dict[int, Sequence[InputSpec]] = {}
        self._networks: OrderedDict[Shapes, GraphedNetwork] = OrderedDict()
        self._finish = finish_of(backend._postprocess)

    def close(self) -> None:
        """Release buffers and graphs."""
        for network in self._networks.values():
            network.close()
        self._networks = OrderedDict()

    def input_specs(self, count: int) -> Sequence[InputSpec]:
        """The model's inputs; ``count`` is the number in a request, for models that do not declare them."""
        specs = self._specs_of.get(count)
        if specs is None:
            specs = self._specs_of[count] = self._make_specs(count)
        return specs

    def _make_specs(self, count: int) -> Sequence[InputSpec]:
        backend = self._backend
        return [
            InputSpec(
                spec.name,
                getattr(self._torch, spec.dtype) if spec.dtype else backend.default_dtype,
                spec.dims[1:] if spec.dims else None,
                spec.rows_mix,
            )
            for spec in backend.inputs or [TensorSpec(f"input {index}") for index in range(count)]
        ]

    def least_size(self, count: int) -> int:
        """The smallest size with a graph for a batch of ``count``."""
        return self.sizes[bisect_left(self.sizes, count)]

    def warm_up(self, shapes: Shapes) -> None:
        """Capture every batch size for inputs of these shapes (without batch)."""
        network = self._network(shapes)
        for size in sorted({self._backend.size_for(size, shapes) for size in self.sizes}):
            network.warm_up(size)
        self._backend.guard.synchronize()

    def run_on_host(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Outputs for inputs N×…, in the model's order."""
        # NOTE: not those that are kept: the trial, which calls this, finds more about the backend's inputs.
        specs = self._make_specs(len(inputs))
        tensors = [
            self._torch.from_numpy(array).to(self._backend.guard.device, spec.dtype)
            for array, spec in zip(inputs, specs, strict=True)
        ]
        return [to_numpy(output) for output in self._backend.enqueue(tensors)]

    def read(self, item: Data) -> tuple[Shapes, list[Any]]:
        """The inputs of one request, and the shape of each, without batch; ``InvalidRequest`` where they do not fit."""
        row = request_values(item, self._backend.inputs)
        if len(row) > MAX_UNDECLARED_INPUTS and not self._backend.inputs:
            most = f"more than the {MAX_UNDECLARED_INPUTS} that a model may have"
            raise InvalidRequest(f"data holds {len(row)} inputs, {most}")
        specs = self.input_specs(len(row))
        if len(specs) != len(row):
            raise InvalidRequest(f"the model has {counted(len(specs), 'input')}, data holds {len(row)}")
        row = [spec.batched(value) for spec, value in zip(specs, row, strict=True)]
        return tuple([spec.row_shape(value) for spec, value in zip(specs, row, strict=True)]), row

    def run_group(self, shapes: Shapes, items: list[Data], rows: list[list[Any]]) -> None:
        """Run requests whose inputs have the same ``shapes``; ``rows`` holds the inputs of each."""
        backend, count = self._backend, len(items)
        size = backend.size_for(count, shapes)
        outputs = self._network(shapes).run(rows, size)
        if self._finish is None:
            backend.write_results(items, [output.clone() for output in backend.layout.first(outputs, count)])
            return
        backend.guard.synchronize(count)
        backend.write_finished(items, backend.layout.first(outputs, count))

    def _network(self, shapes: Shapes) -> GraphedNetwork:
        backend, network = self._backend, self._networks.get(shapes)
        if network is None:
            if len(self._networks) == MAX_SHAPES:
                backend.guard.synchronize()  # its graph may still run
                backend.forget(self._networks.popitem(last=False)[0])
            specs = self.input_specs(len(shapes))
            buffers = [
                self._torch.zeros((backend.max(), *shape), dtype=spec.dtype, device=backend.guard.device)
                for spec, shape in zip(specs, shapes, strict=True)
            ]
            network = self._networks[shapes] = GraphedNetwork(
                buffers, backend.enqueue, backend.layout, self._finish, backend.use_graphs
            )
        elif len(self._networks) > 1:
            self._networks.move_to_end(shapes)
        return network
