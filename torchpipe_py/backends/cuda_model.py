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
from torchpipe_py.backends.cuda import GuardedBackend
from torchpipe_py.backends.model import ModelBackend
from torchpipe_py.backends.opencv import UINT8
from torchpipe_py.keys import TASK_DATA_KEY

Dims = tuple[int | None, ...]
"""A shape without the batch; ``None``: any size."""

Infer = Callable[[list[Any]], list[Any]]
"""From input tensors N×… to output tensors N×…, enqueued on the current stream."""

Way = tuple[Any, ...]
"""How a batch runs: its size, and for each input the ``Staging`` that its copy starts from, or ``None``."""

MAT = "mat"

ALL_SIZES = 8  # up to here each batch size has a graph of its own
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
        """Shape without the batch of one request's value; ``ValueError`` where it does not fit."""
        shape = self._row_shape(value)
        dims = self.dims
        if (
            dims is not None
            and shape != dims
            and (
                len(shape) != len(dims) or any(want not in (None, have) for want, have in zip(dims, shape, strict=True))
            )
        ):
            wanted = "x".join("?" if dim is None else str(dim) for dim in dims)
            raise ValueError(f"input {self.name!r} takes 1x{wanted}, got {'x'.join(map(str, value.shape))}")
        return shape

    def _row_shape(self, value: Any) -> tuple[int, ...]:
        if is_mat(value):
            shape = value.shape
            return (shape[2], shape[0], shape[1]) if len(shape) == 3 else (1, *shape)
        try:
            shape = tuple(value.shape)
        except AttributeError:
            raise TypeError(f"input {self.name!r} takes a Mat or a tensor, got {type(value).__name__}") from None
        if len(shape) == (3 if self.dims is None else len(self.dims)):
            return shape  # C×H×W is taken as 1×C×H×W
        if not shape or shape[0] != 1:
            raise ValueError(f"input {self.name!r} takes one item, 1x…, got {'x'.join(map(str, shape)) or 'a scalar'}")
        return shape[1:]


def is_mat(value: Any) -> bool:
    """Whether ``value`` is a Mat: an array H×W or H×W×C, ``uint8``."""
    return isinstance(value, np.ndarray) and value.dtype is UINT8 and value.ndim in (2, 3)


class StagedInput:
    """One input's buffer on the GPU, max×…, filled from the values of a batch: Mats, arrays or tensors."""

    def __init__(self, buffer: Any) -> None:
        import torch

        self.buffer = buffer
        self._torch: Any = torch
        self._row = tuple(buffer.shape[1:])
        self._staging: dict[Any, Staging] = {}

    def gather(self, values: list[Any]) -> Staging | None:
        """Bring the values together; what still has to be copied to the buffer, or ``None`` if that is enqueued."""
        kinds = {self._kind(value) for value in values}
        if len(kinds) > 1:
            for index, value in enumerate(values):
                self.buffer[index].copy_(self._as_tensor(value))
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
            staging.gather([self._as_tensor(value).numpy() for value in values])
        return staging

    def mat_staging(self) -> Staging:
        """Where Mats are gathered, N×H×W×C."""
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
            return MAT if is_mat(value) else ("cpu", self._torch.from_numpy(value[:0]).dtype)
        return ("cuda" if value.is_cuda else "cpu", value.dtype)

    def _as_tensor(self, value: Any) -> Any:
        """A value as a tensor without its batch dimension, C×H×W for a Mat."""
        if is_mat(value):
            value = np.ascontiguousarray(value.reshape(*value.shape[:2], -1).transpose(2, 0, 1))
        tensor = value if isinstance(value, self._torch.Tensor) else self._torch.from_numpy(value)
        return tensor.detach().reshape(self._row)

    def _concatenate(self, values: list[Any], dtype: Any) -> None:
        count = len(values)
        device = self.buffer.device
        rows = [value if value.device == device else value.to(device) for value in values]
        if rows[0].ndim == len(self._row):
            rows = [row[None] for row in rows]
        if dtype == self.buffer.dtype:
            self._torch.cat(rows, out=self.buffer[:count])
        else:
            self.buffer[:count].copy_(self._torch.cat(rows))

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
        self._rows = pinned.numpy()
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
        # One call for all of them: NumPy would give up the GIL, and queue for it again, for each.
        target = self._rows[: len(mats)].reshape(len(mats) * height, width, channels)
        if self._stack(mats, target) is not target:
            self.gather(mats)  # OpenCV has put them elsewhere

    def enqueue(self, size: int) -> None:
        """Enqueue the copy of ``size`` rows."""
        self._device[:size].copy_(self._pinned[:size], non_blocking=True)
        if self._source is not None:
            self._buffer[:size].copy_(self._source[:size])


class GraphedNetwork:
    """A network on buffers of fixed shape: for each batch size a CUDA graph from inputs to what the host reads.

    ``finish`` is the part of the postprocessor that runs on the GPU; with it, outputs end in pinned memory.
    """

    def __init__(self, buffers: list[Any], infer: Infer, finish: Infer | None, use_graphs: bool = True) -> None:
        import torch

        self._torch: Any = torch
        self._inputs = [StagedInput(buffer) for buffer in buffers]
        self._infer, self._finish = infer, finish
        self._pool: Any = torch.cuda.graph_pool_handle() if use_graphs else None
        self._runs: dict[Way, Callable[[], list[Any]]] = {}
        self._stream = torch.cuda.current_stream()
        self._is_staged = False

    def run(self, rows: list[list[Any]], size: int) -> list[Any]:
        """Enqueue a batch, padded to ``size``; outputs N×…, on the GPU or, with ``finish``, in pinned memory.

        Both are overwritten by the next run.
        """
        if self._is_staged:
            self._stream.synchronize()  # the last batch may still be on its way out of pinned memory
        stagings = [staged.gather([row[index] for row in rows]) for index, staged in enumerate(self._inputs)]
        self._is_staged = any(stagings)
        return self._prepared((size, *stagings))()

    def warm_up(self, size: int) -> None:
        """Capture what runs a batch of ``size``: of tensors on the GPU, and of Mats where the inputs look like it."""
        self._prepared((size, *[None] * len(self._inputs)))
        if all(staged.takes_images() for staged in self._inputs):
            self._prepared((size, *[staged.mat_staging() for staged in self._inputs]))

    def _prepared(self, way: Way) -> Callable[[], list[Any]]:
        run = self._runs.get(way)
        if run is None:
            run = self._runs[way] = self._eager(way) if self._pool is None else self._captured(way)
        return run

    def _eager(self, way: Way) -> Callable[[], list[Any]]:
        host: list[Any] = []
        return lambda: self._enqueue(way, host)

    def _captured(self, way: Way) -> Callable[[], list[Any]]:
        host: list[Any] = []
        for _ in range(2):  # kernels are loaded and algorithms chosen before the capture
            self._enqueue(way, host)
        self._stream.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with _capturing:
            # NOTE: "thread_local": other threads go on allocating and synchronizing meanwhile.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._enqueue(way, host)
            except Exception:
                with suppress(Exception):  # the capture must end, but it has nothing more to say
                    graph.capture_end()
                raise
            graph.capture_end()

        def run() -> list[Any]:
            graph.replay()
            return outputs

        return run

    def _enqueue(self, way: Way, host: list[Any]) -> list[Any]:
        """Copies, network, ``finish`` and the copies to ``host``, which is filled with buffers at the first call."""
        size, *stagings = way
        for staging in stagings:
            if staging is not None:
                staging.enqueue(size)
        outputs = self._infer([staged.buffer[:size] for staged in self._inputs])
        for output in outputs:
            if output.ndim == 0 or len(output) != size:
                raise ValueError(f"an output of shape {tuple(output.shape)} for {size} items: no batch dimension")
        if self._finish is None:
            return outputs
        outputs = self._finish(outputs)
        if not host:
            host.extend(self._torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in outputs)
        for one, output in zip(host, outputs, strict=True):
            one.copy_(output, non_blocking=True)
        return host


def batch_sizes(least: int, most: int) -> list[int]:
    """The sizes that get a graph: each up to 8, then four for each doubling; a batch is padded to the next of them."""
    sizes = list(range(1, ALL_SIZES + 1))
    step = ALL_SIZES // 4
    while sizes[-1] < most:
        step = step if sizes[-1] < 4 * step * 2 else step * 2
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if least <= size < most] + [most]


class CudaModel(GuardedBackend, ModelBackend):
    """A model that runs on a GPU as CUDA graphs: subclasses load it, say what its inputs are, and enqueue it.

    A value is a Mat, which is copied as it is and laid out on the GPU, or an array or tensor 1×… on any device.
    """

    use_graphs = True

    def setup(self) -> None:
        ModelBackend.setup(self)
        GuardedBackend.setup(self)

    def setup_guarded(self) -> None:
        import torch

        self._torch: Any = torch
        self._sizes = batch_sizes(self.min(), self.max())
        self._specs_of: dict[int, Sequence[InputSpec]] = {}
        self._networks: OrderedDict[tuple[tuple[int, ...], ...], GraphedNetwork] = OrderedDict()
        self._finish: Infer | None = getattr(self._postprocess, "on_device", None)

    def close(self) -> None:
        self._networks = OrderedDict()
        super().close()

    def input_specs(self, count: int) -> Sequence[InputSpec]:
        """The model's inputs; ``count`` is what a request brings, for models that do not say."""
        raise NotImplementedError(type(self).__name__)

    def enqueue(self, inputs: list[Any]) -> list[Any]:
        """Enqueue the model on the current stream; output tensors N×…, in the model's order."""
        raise NotImplementedError(type(self).__name__)

    def warm_up(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        """Capture every batch size for inputs of these shapes (without batch)."""
        network = self._network(shapes)
        for size in self._sizes:
            network.warm_up(size)
        self._guard_synchronize()

    def forward_guarded(self, items: list[Data]) -> None:
        groups: dict[tuple[tuple[int, ...], ...], tuple[list[Data], list[list[Any]]]] = {}
        for item in items:
            data = item[TASK_DATA_KEY]
            row = list(data) if isinstance(data, (list, tuple)) else [data]
            shapes = self._shapes(row)
            members, rows = groups.setdefault(shapes, ([], []))
            members.append(item)
            rows.append(row)
        for shapes, (members, rows) in groups.items():
            self._run(self._network(shapes), members, rows)

    def _shapes(self, row: list[Any]) -> tuple[tuple[int, ...], ...]:
        """The shape of each input of one request, without batch; ``ValueError`` where they do not fit."""
        specs = self._specs_of.get(len(row))
        if specs is None:
            specs = self._specs_of[len(row)] = self.input_specs(len(row))
        if len(row) != len(specs):
            raise ValueError(f"the model has {len(specs)} inputs, data holds {len(row)}")
        if len(row) == 1:
            return (specs[0].row_shape(row[0]),)
        return tuple([spec.row_shape(value) for spec, value in zip(specs, row, strict=True)])

    def _run(self, network: GraphedNetwork, items: list[Data], rows: list[list[Any]]) -> None:
        count = len(items)
        outputs = network.run(rows, self._sizes[bisect_left(self._sizes, count)])
        if self._finish is None:
            self.write_results(items, [output[:count].clone() for output in outputs])
            return
        self._guard_synchronize()
        post: Any = self._postprocess
        self.spread(items, post.on_host([output[:count] for output in outputs]))

    def _guard_synchronize(self) -> None:
        assert self._guard is not None  # a CudaModel needs CUDA
        self._guard.synchronize()

    def _network(self, shapes: tuple[tuple[int, ...], ...]) -> GraphedNetwork:
        network = self._networks.get(shapes)
        if network is None:
            if len(self._networks) == MAX_SHAPES:
                self._guard_synchronize()  # its graph may still run
                self._networks.popitem(last=False)
            specs = self.input_specs(len(shapes))
            buffers = [
                self._torch.zeros((self.max(), *shape), dtype=spec.dtype, device=self.device)
                for spec, shape in zip(specs, shapes, strict=True)
            ]
            network = self._networks[shapes] = GraphedNetwork(buffers, self.enqueue, self._finish, self.use_graphs)
        elif len(self._networks) > 1:
            self._networks.move_to_end(shapes)
        return network
