"""Messages between two processes: a pickle through a socket, what is large through memory that both have mapped."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

INLINE = 8192
"""Bytes up to which a buffer stays in the pickle."""

_ALIGNMENT = 64
_HEADER = struct.Struct("<II")  # buffers of arrays, bytes objects; the size of each follows
_NOTE = struct.Struct("<Q")


class Block:
    """Memory of one direction, mapped by the writer and the reader; used from one thread of each.

    It grows when a message needs more and is kept for the next. It has no name: nothing is left of it when both
    processes are gone, however they ended. Its first bytes hold a number that the reader writes for the writer.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)

    @classmethod
    def create(cls) -> Block:
        """An empty one; the other process maps its ``fd``."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("torchpipe")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def write(self, parts: Iterable[Any], total: int) -> None:
        """Lay the buffers out one after the other; ``total`` is what ``space`` says of their sizes."""
        if total > len(self._map):
            # NOTE: pages are taken only when they are written, so that generous growth costs nothing.
            os.ftruncate(self.fd, max(total, 2 * len(self._map)))
            self._remap()
        offset = _ALIGNMENT
        for part in parts:
            self._slice(offset, part.nbytes)[:] = np.frombuffer(part, np.uint8)
            offset += padded(part.nbytes)

    def read(self, sizes: Sequence[int], arrays: int) -> Iterator[np.ndarray | bytes]:
        """A copy of each buffer: the first ``arrays`` of them as arrays of bytes, the others as ``bytes``."""
        if space(sizes) > len(self._map):
            self._remap()
        offset = _ALIGNMENT
        for index, size in enumerate(sizes):
            yield self._slice(offset, size).copy() if index < arrays else self._map[offset : offset + size]
            offset += padded(size)

    @property
    def note(self) -> int:
        """The reader's number."""
        return int(_NOTE.unpack_from(self._map)[0])

    @note.setter
    def note(self, number: int) -> None:
        _NOTE.pack_into(self._map, 0, number)

    def close(self) -> None:
        """Unmap; twice is allowed."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    def _slice(self, offset: int, size: int) -> np.ndarray:
        return np.frombuffer(self._map, np.uint8, size, offset)

    def _remap(self) -> None:
        # NOTE: where there is no memory for it, the old map stays, and messages that fit in it still go through.
        larger = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        self._map.close()
        self._map = larger


def space(sizes: Iterable[int]) -> int:
    """Bytes that buffers of these sizes take in a block."""
    return _ALIGNMENT + sum(map(padded, sizes))


def padded(size: int) -> int:
    """Bytes that a buffer of this size takes where the next one is aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def pack_sizes(sizes: Sequence[int]) -> bytes:
    """The sizes of parts, as they stand in a message."""
    return struct.pack(f"<{len(sizes)}Q", *sizes)


class Packed(NamedTuple):
    """A message as a pickle, and what is large in it: first ``arrays`` buffers of arrays, then those of ``bytes``."""

    pickled: memoryview
    parts: list[memoryview]
    arrays: int

    @classmethod
    def of(cls, message: Any) -> Packed:
        """Raises whatever pickling raises."""
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(message)
        return cls(file.getbuffer(), [*pickler.buffers, *pickler.blobs], len(pickler.buffers))


def unpack(
    pickled: bytes | memoryview, parts: list[Any], arrays: int, before_main: Callable[[], object] | None = None
) -> Any:
    """The message, with its parts in it as they are; raises whatever unpickling raises."""
    return _Unpickler(io.BytesIO(pickled), parts[:arrays], parts[arrays:], before_main).load()


class SharedMemoryChannel:
    """One end of the way between two processes; what comes out at the other end is a copy that owns its memory.

    One message at a time: the next may be packed only when the other end has unpacked the last.
    ``before_main`` is called before a class or function of ``__main__`` is looked up.
    """

    def __init__(self, connection: Connection, outgoing: Block, incoming: Block) -> None:
        self._connection, self._outgoing, self._incoming = connection, outgoing, incoming
        self._posted = self._received = 0
        self.before_main: Callable[[], object] | None = None

    def pack(self, message: Any) -> bytes:
        """What ``post`` takes; raises whatever pickling raises, and nothing has left this process then."""
        packed = Packed.of(message)
        sizes = [part.nbytes for part in packed.parts]
        self._outgoing.write(packed.parts, space(sizes))
        return _HEADER.pack(packed.arrays, len(sizes) - packed.arrays) + pack_sizes(sizes) + packed.pickled

    def post(self, packed: bytes) -> None:
        """Send what ``pack`` gave; ``OSError`` where nobody is at the other end."""
        self._posted += 1
        self._connection.send_bytes(packed)

    def receive(self) -> bytes:
        """Wait for a message, to be given to ``unpack``; ``EOFError`` or ``OSError`` where the other end is gone."""
        packed = self._connection.recv_bytes()
        self._received += 1
        self._incoming.note = self._received
        return packed

    def unpack(self, packed: bytes) -> Any:
        """The message; raises whatever unpickling raises."""
        arrays, blobs = _HEADER.unpack_from(packed)
        sizes = struct.unpack_from(f"<{arrays + blobs}Q", packed, _HEADER.size)
        parts = list(self._incoming.read(sizes, arrays))
        start = _HEADER.size + _NOTE.size * len(sizes)
        return unpack(memoryview(packed)[start:], parts, arrays, self.before_main)

    def loads(self, content: bytes) -> Any:
        """An ordinary pickle that came inside a message."""
        return unpack(content, [], 0, self.before_main)

    @property
    def is_taken(self) -> bool:
        """Whether the other end has received the last message, as far as it came before it died."""
        return self._outgoing.note == self._posted

    def close(self) -> None:
        self._connection.close()
        self._outgoing.close()
        self._incoming.close()


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
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return _reduce_tensor(torch, value)
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


def _reduce_tensor(torch: Any, tensor: Any) -> tuple[Any, ...]:
    """A tensor as the array of its bytes, any dtype, with its strides where it fills its memory; without gradient.

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
