"""Models on a GPU: batches staged into buffers that never move, one CUDA graph for each batch size."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.cuda import Guard
from torchpipe_py.backends.model.check import Layout
from torchpipe_py.backends.model.inputs import by_shapes, check_numbers, fits, looks_like_mat, request_values, to_numpy
from torchpipe_py.backends.model.model import ModelBackend, Shapes
from torchpipe_py.backends.model.staging import StagedInput, is_mat
from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.errors import InvalidRequest, counted
from torchpipe_py.keys import TASK_ERROR_KEY

Dims = tuple[int | None, ...]
"""A shape without the batch; ``None``: any size."""

Infer = Callable[[list[Any]], list[Any]]
"""From input tensors N×… to output tensors, enqueued on the current stream."""

RunKey = tuple[Any, ...]
"""How a batch runs: its size, and for each input the ``Staging`` that its copy starts from, or ``None``."""

ALL_SIZES = 8  # up to here each batch size has a graph of its own
MAX_INPUTS = 64  # of a model that does not say how many it has
MAX_SHAPES = 16  # buffers and graphs are kept for the shapes used last

# NOTE: process-wide: CUDA allows one capture beside other work, PyTorch's allocator only one at a time.
_capturing = threading.Lock()


@dataclass(frozen=True)
class InputSpec:
    """What a model says of one input; ``dims`` is ``None`` where it says nothing."""

    name: str
    dtype: Any
    dims: Dims | None = None

    def row_shape(self, value: Any) -> tuple[int, ...]:
        """Shape without the batch of one request's value; ``InvalidRequest`` where it does not fit."""
        shape = self._row_shape(value)
        dims = self.dims
        if dims is not None and not fits(shape, dims):
            raise InvalidRequest(f"input {self.name!r} takes {shown_dims((1, *dims))}, got {shown_dims(value.shape)}")
        if not self.dtype.is_floating_point and value.dtype != self.dtype:
            self._check_integers(value)
        return shape

    def _check_integers(self, value: Any) -> None:
        """``InvalidRequest`` for numbers that are none of this input's integers."""
        dtype = np.dtype(str(self.dtype).removeprefix("torch."))
        if isinstance(value, np.ndarray):
            check_numbers(value, dtype, self.name)
        elif value.is_floating_point():
            raise InvalidRequest(f"input {self.name!r} takes {dtype}, got {str(value.dtype).removeprefix('torch.')}")
        elif not value.is_cuda:  # to look at those on a GPU is to wait for it
            check_numbers(value.numpy(), dtype, self.name)

    def _row_shape(self, value: Any) -> tuple[int, ...]:
        if is_mat(value) and (self.dims is None or len(self.dims) == 3):
            shape = value.shape
            return (shape[2], shape[0], shape[1]) if len(shape) == 3 else (1, *shape)
        if isinstance(value, np.ndarray) and value.ndim == 2 and self.dims is not None and len(self.dims) == 3:
            return (1, *value.shape)  # a Mat of one channel
        if isinstance(value, np.ndarray) and value.ndim == 3 and looks_like_mat(value):
            if self.dims is None or self.dims[0] is None:
                raise InvalidRequest(
                    f"input {self.name!r} takes a Tensor or a Mat of uint8, got {'x'.join(map(str, value.shape))} of "
                    f"{value.dtype}, which may be a Mat; Mat2Tensor makes a Tensor of it"
                )
            if len(self.dims) == 3 and value.shape[2] == self.dims[0]:
                return value.shape[2], value.shape[0], value.shape[1]
        try:
            shape = tuple(value.shape)
        except AttributeError:
            raise InvalidRequest(f"input {self.name!r} takes a Mat or a tensor, got {type(value).__name__}") from None
        if len(shape) == (3 if self.dims is None else len(self.dims)):
            return shape  # C×H×W is taken as 1×C×H×W
        if self.dims is None and len(shape) == 1 and shape[0] > 1:
            return shape  # a vector; of one number, it is an item without dimensions
        if not shape or shape[0] != 1:
            raise InvalidRequest(f"input {self.name!r} takes one item, 1x…, got {shown_dims(shape)}")
        return shape[1:]


class GraphedNetwork:
    """A network on buffers of fixed shape: for each batch size a CUDA graph from inputs to what the host reads.

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
            self._stream.synchronize()  # the last batch may still be on its way out of pinned memory
        stagings = [staged.gather([row[index] for row in rows]) for index, staged in enumerate(self._inputs)]
        self._is_staged = any(stagings)
        return self._prepared((size, *stagings))()

    def warm_up(self, size: int) -> None:
        """Capture what runs a batch of ``size``: of tensors on the GPU, and of Mats where the inputs look like it."""
        self._prepared((size, *[None] * len(self._inputs)))
        if all(staged.takes_images() for staged in self._inputs):
            self._prepared((size, *[staged.mat_staging() for staged in self._inputs]))

    def _prepared(self, key: RunKey) -> Callable[[], list[Any]]:
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._eager(key) if self._pool is None else self._captured(key)
        return run

    def _eager(self, key: RunKey) -> Callable[[], list[Any]]:
        host: list[Any] = []
        return lambda: self._enqueue(key, host)

    def _captured(self, key: RunKey) -> Callable[[], list[Any]]:
        host: list[Any] = []
        for _ in range(2):  # kernels are loaded and algorithms chosen before the capture
            self._enqueue(key, host)
        self._stream.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with _capturing:
            # NOTE: "thread_local": other threads go on allocating and synchronizing meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._enqueue(key, host)
            except Exception:
                with suppress(Exception):  # the capture must end, but it has nothing more to say
                    graph.capture_end()
                raise
            graph.capture_end()

        def run() -> list[Any]:
            graph.replay()
            return outputs

        return run

    def _enqueue(self, key: RunKey, host: list[Any]) -> list[Any]:
        """Copies, network, ``finish`` and the copies to ``host``, which holds buffers from the first call on."""
        size, *stagings = key
        for staging in stagings:
            if staging is not None:
                staging.enqueue(size)
        outputs = self._infer([staged.buffer[:size] for staged in self._inputs])
        self._layout.check(outputs, (), size)
        if self._finish is None:
            return outputs
        outputs = self._finish(outputs)
        if [buffer.shape for buffer in host] != [output.shape for output in outputs]:  # at first, or with other data
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
    """The part of a postprocessor that runs on the GPU; a subclass that has only ``forward`` of its own has none."""
    for cls in type(postprocessor).__mro__:
        if "on_device" in vars(cls):
            finish: Infer = postprocessor.on_device
            return finish
        if "forward" in vars(cls):
            return None
    return None


class CudaModel(ModelBackend):
    """A model that runs on a GPU as CUDA graphs: subclasses load it, say what its inputs are, and enqueue it.

    Subclasses are ``on_stream``. A value is a Mat, which is copied as it is and laid out on the GPU, or an array or
    tensor 1×… on any device.
    """

    use_graphs = True
    guard: Guard

    def setup(self) -> None:
        import torch

        super().setup()
        self._torch: Any = torch
        self._sizes = batch_sizes(self.min(), self.max())
        self._specs_of: dict[int, Sequence[InputSpec]] = {}
        self._networks: OrderedDict[Shapes, GraphedNetwork] = OrderedDict()
        self._finish = finish_of(self._postprocess)

    def close(self) -> None:
        self._networks = OrderedDict()

    def input_specs(self, count: int) -> Sequence[InputSpec]:
        """The model's inputs; ``count`` is what a request brings, for models that do not say."""
        raise NotImplementedError(type(self).__name__)

    def size_for(self, count: int, shapes: Shapes) -> int:
        """The size that a batch of ``count`` is padded to; ``InvalidRequest`` where the model takes no such shapes."""
        return self._sizes[bisect_left(self._sizes, count)]

    def forget(self, shapes: Shapes) -> None:
        """Release what ``enqueue`` keeps for inputs of these shapes."""

    def enqueue(self, inputs: list[Any]) -> list[Any]:
        """Enqueue the model on the current stream; output tensors, in the model's order."""
        raise NotImplementedError(type(self).__name__)

    def warm_up(self, shapes: Shapes) -> None:
        """Capture every batch size for inputs of these shapes (without batch)."""
        network = self._network(shapes)
        for size in sorted({self.size_for(size, shapes) for size in self._sizes}):
            network.warm_up(size)
        self.guard.synchronize()

    def run_on_host(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        specs = self.input_specs(len(inputs))
        tensors = [
            self._torch.from_numpy(array).to(self.guard.device, spec.dtype)
            for array, spec in zip(inputs, specs, strict=True)
        ]
        return [to_numpy(output) for output in self.enqueue(tensors)]

    def forward(self, items: list[Data]) -> None:
        for shapes, members, rows in by_shapes(items, self._read):
            try:
                self.check_batches(shapes)
                self.run_group(shapes, members, rows)
            except InvalidRequest as error:
                if len(members) > self.min():
                    raise  # each alone may be of a size that the model takes
                for item in members:
                    item[TASK_ERROR_KEY] = error

    def _read(self, item: Data) -> tuple[Shapes, list[Any]]:
        row = request_values(item, self.inputs)
        shapes = self._shapes(row)
        self.check_shapes(shapes)
        return shapes, row

    def _shapes(self, row: list[Any]) -> Shapes:
        """The shape of each input of one request, without batch; ``InvalidRequest`` where they do not fit."""
        specs = self._specs_of.get(len(row))
        if specs is None:
            if len(row) > MAX_INPUTS:
                raise InvalidRequest(f"data holds {len(row)} inputs, more than the {MAX_INPUTS} that a model may have")
            specs = self.input_specs(len(row))
            if len(specs) != len(row):
                raise InvalidRequest(f"the model has {counted(len(specs), 'input')}, data holds {len(row)}")
            self._specs_of[len(row)] = specs
        if len(row) == 1:
            return (specs[0].row_shape(row[0]),)
        return tuple([spec.row_shape(value) for spec, value in zip(specs, row, strict=True)])

    def run_group(self, shapes: Shapes, items: list[Data], rows: list[list[Any]]) -> None:
        """Run requests whose inputs have the same ``shapes``; ``rows`` holds the inputs of each."""
        count = len(items)
        size = self.size_for(count, shapes)
        outputs = self._network(shapes).run(rows, size)
        if self._finish is None:
            self.write_results(items, [output.clone() for output in self.layout.first(outputs, count)])
            return
        self.guard.synchronize(count)
        post: Any = self._postprocess
        self.spread(items, post.on_host(self.layout.first(outputs, count)))

    def _network(self, shapes: Shapes) -> GraphedNetwork:
        network = self._networks.get(shapes)
        if network is None:
            if len(self._networks) == MAX_SHAPES:
                self.guard.synchronize()  # its graph may still run
                self.forget(self._networks.popitem(last=False)[0])
            specs = self.input_specs(len(shapes))
            buffers = [
                self._torch.zeros((self.max(), *shape), dtype=spec.dtype, device=self.guard.device)
                for spec, shape in zip(specs, shapes, strict=True)
            ]
            network = self._networks[shapes] = GraphedNetwork(
                buffers, self.enqueue, self.layout, self._finish, self.use_graphs
            )
        elif len(self._networks) > 1:
            self._networks.move_to_end(shapes)
        return network
