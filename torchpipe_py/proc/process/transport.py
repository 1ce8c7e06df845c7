"""Messages between two processes: a pickle, and what is large beside it."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

INLINE = 8192
"""Bytes up to which a buffer stays in the pickle."""

_ALIGNMENT = 64


def padded(size: int) -> int:
    """Bytes that a buffer of this size takes where the next one is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Packed(NamedTuple):
    """A message as a pickle, and what is large in it: first ``arrays`` buffers of arrays, then those of ``bytes``.

    ``head`` tells the other end how large these parts are, which are objects with a contiguous buffer, and ``nbytes``.
    """

    head: bytes
    pickled: bytes
    parts: Sequence[Any]
    arrays: int

    @classmethod
    def of(cls, message: Any) -> Packed:
        """Raises whatever pickling raises."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(message)
        parts = [*pickler.buffers, *pickler.blobs]
        head = struct.pack(f"<{len(parts)}Q", *[part.nbytes for part in parts])
        # NOTE: not getbuffer(): where an error keeps that in a cycle, the collector crashes (CPython 3.12).
        return cls(head, file.getvalue(), parts, len(pickler.buffers))


def sizes_in(head: bytes) -> tuple[int, ...]:
    """How large the parts of a message are that ``Packed.of`` made."""
    return struct.unpack(f"<{len(head) // 8}Q", head)


def unpack(
    pickled: bytes | memoryview, parts: list[Any], arrays: int, before_main: Callable[[], object] | None = None
) -> Any:
    """The message, with its parts in it as they are; raises whatever unpickling raises."""
    return _Unpickler(io.BytesIO(pickled), parts[:arrays], parts[arrays:], before_main).load()


def check_travels(value: Any) -> None:
    """Raise what keeps ``value`` from being sent, if anything does."""
    _Pickler(io.BytesIO()).dump(value)


class _Pickler(pickle.Pickler):
    """Keeps large buffers apart: those of arrays in ``buffers``, ``bytes`` in ``blobs``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep)
        self.buffers: list[memoryview] = []
        self.blobs: list[memoryview] = []
        self._seen: dict[int, tuple[int, bool]] = {}

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer belongs into the pickle itself."""
        raw = buffer.raw()
        if raw.nbytes <= INLINE:
            return True
        self.buffers.append(raw)
        return False

    def persistent_id(self, value: Any) -> tuple[int, bool] | None:
        kind = type(value)
        if (kind is not bytes and kind is not bytearray) or len(value) <= INLINE:
            return None
        # An object that occurs twice is sent once; the views in `blobs` keep it alive, and its id its own.
        if id(value) not in self._seen:
            self._seen[id(value)] = (len(self.blobs), kind is bytearray)
            self.blobs.append(memoryview(value))
        return self._seen[id(value)]

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            if value.flags.forc or value.dtype.hasobject:
                return NotImplemented
            return np.ascontiguousarray(value).__reduce_ex__(5)
        torch = loaded_torch()
        if torch is not None and isinstance(value, torch.Tensor):
            return reduce_tensor(torch, value)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[Any],
        blobs: list[Any],
        before_main: Callable[[], object] | None,
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._blobs, self._before_main = blobs, before_main

    def persistent_load(self, pid: tuple[int, bool]) -> bytes | bytearray:
        index, is_bytearray = pid
        if is_bytearray and type(self._blobs[index]) is bytes:
            self._blobs[index] = bytearray(self._blobs[index])
        blob: bytes | bytearray = self._blobs[index]
        return blob

    def find_class(self, module: str, name: str) -> Any:
        if self._before_main is not None and module in ("__main__", "__mp_main__"):
            self._before_main()
        return super().find_class(module, name)


def loaded_torch() -> Any:
    """PyTorch, if there may be tensors; ``None`` as well while another thread is about to import it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def reduce_tensor(torch: Any, tensor: Any) -> tuple[Any, ...]:
    """A tensor as the array of its bytes, any dtype, with its strides where it fills its memory; without gradient.

    ``TypeError`` for one that is not in CPU memory, or not strided.

    PyTorch's own way hands a file descriptor over for each tensor.
    """
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on device {tensor.device} cannot go to another process; only one on the CPU can")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout}, dtype {tensor.dtype} cannot go to another process")
    if tensor.is_contiguous() and not tensor.requires_grad:
        try:
            return torch.from_numpy, (tensor.numpy(),)
        except (RuntimeError, TypeError):  # conjugated, say, or of a dtype that NumPy has not
            pass
    tensor = tensor.detach().resolve_conj().resolve_neg()
    by_stride = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    if tensor.permute(by_stride).is_contiguous():
        flat = tensor.permute(by_stride).reshape(-1)
    else:
        tensor = tensor.contiguous()
        flat = tensor.reshape(-1)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _make_tensor, (flat.view(torch.uint8).numpy(), dtype, tuple(tensor.shape), tensor.stride())


def _make_tensor(content: np.ndarray, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(content).view(getattr(torch, dtype)).as_strided(shape, strides)
