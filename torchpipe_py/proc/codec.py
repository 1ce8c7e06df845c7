"""Messages between two processes: a pickle, and large buffers outside it.

A typical request's dict is packed without a Python call for each object in it; only its changes are sent back.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import first_line
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.metrics import Metrics

INLINE = 8192
"""Maximum size of a buffer inside the pickle, in bytes."""

FLAT = 2**32 - 1
"""Replaces the number of arrays if the head describes each part."""

METRICS_KEY = "\0metrics"
"""The key of a first item's changes under which the metrics of a custom backend come, if they have changed."""

_ALIGNMENT = 64
_IMMUTABLE = frozenset((bytes, str, int, float, bool, type(None)))
_SCALARS = frozenset((str, int, float, bool, type(None)))
_BYTES, _ARRAY, _READ_ONLY, _TENSOR = range(4)

_Layout = tuple[tuple[str, int, str, tuple[int, ...]], ...]


def padded(size: int) -> int:
    """Size of a buffer with padding, so that the next one is aligned, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Packed(NamedTuple):
    """A message as a pickle and its large parts: first ``arrays`` buffers of arrays, then buffers of ``bytes``.

    The parts are objects with a contiguous buffer and ``nbytes``; ``head`` holds their sizes for the other end.
    """

    head: bytes
    pickled: bytes
    parts: Sequence[Any]
    arrays: int

    @classmethod
    def of(cls, message: Any) -> Packed:
        """Pack a message; raises any exception of pickling."""
        file = io.BytesIO()
        pickler = Pickler(file)
        pickler.dump(message)
        parts = [*pickler.buffers, *pickler.blobs]
        head = struct.pack(f"<{len(parts)}Q", *[part.nbytes for part in parts])
        # NOTE: not getbuffer(): if an error keeps it in a reference cycle, the collector crashes (CPython 3.12).
        return cls(head, file.getvalue(), parts, len(pickler.buffers))


def pack(values: Data, also: Any = None) -> Packed:
    """Pack the dict and a small extra object; raises any exception of pickling."""
    flat = _flat(values, also)
    return Packed.of((values, also)) if flat is None else flat


def unpack(
    head: bytes,
    pickled: bytes,
    arrays: int,
    buffer: Any,
    offset: int,
    copies: bool,
    before_main: Callable[[], object] | None = None,
) -> Any:
    """Unpack the pair passed to ``pack``, or any other message. Its parts are in ``buffer`` from ``offset`` on.

    Arrays and tensors refer to ``buffer``, unless it ``copies`` them. ``before_main`` is called before a class of the
    main module is looked up. Raises any exception of unpickling.
    """
    if arrays != FLAT:
        parts: list[Any] = []
        for size in struct.unpack(f"<{len(head) // 8}Q", head):
            part: Any = np.ndarray((size,), np.uint8, buffer, offset)
            parts.append(part.tobytes() if len(parts) >= arrays else part.copy() if copies else part)
            offset += padded(size)
        return Unpickler(pickled, parts[:arrays], parts[arrays:], before_main).load()
    values, also = pickle.loads(pickled)
    if head:
        for key, form, dtype, shape, start in _places(head):
            array: Any = np.ndarray(shape, dtype, buffer, offset + start)
            if form == _BYTES:
                values[key] = array.tobytes()
                continue
            if copies:
                array = array.copy()
            if form == _READ_ONLY:
                array.flags.writeable = False
            values[key] = _tensor(array) if form == _TENSOR else array
    return values, also


class ItemOutcome(NamedTuple):
    """A dict after ``forward``: ``kept`` maps keys to the request's keys with the same value; the rest is changed."""

    changed: dict[Any, Any]
    kept: dict[Any, Any]

    @classmethod
    def of(cls, before: Data, after: Data, keeps_arrays: bool = False) -> ItemOutcome:
        """Compare the dicts; immutable values that the caller already has are not sent back.

        If the other process ``keeps_arrays``, arrays and tensors under their original key are not sent back either,
        even if it changed them. Under another key, such as ``result``, they are sent with its changes.
        """
        kept, changed = {}, {}
        torch = loaded_torch() if keeps_arrays else None
        arrays = (np.ndarray, *([] if torch is None else [torch.Tensor])) if keeps_arrays else ()
        for key, value in after.items():
            kind = type(value)
            if kind in _IMMUTABLE:
                for source in (key, *before):
                    if source in before and before[source] is value:
                        kept[key] = source
                        break
                else:
                    changed[key] = value
            elif kind in arrays and key in before and before[key] is value:
                kept[key] = key
            else:
                changed[key] = value
        return cls(changed, kept)

    def apply(self, item: Data, sent: Data) -> None:
        """Apply the changes of the other process to the dict; values that were not sent stay."""
        kept = {key: sent[source] for key, source in self.kept.items()}
        for key in [*sent]:
            if key not in kept and key not in self.changed:
                del item[key]
        item.update(kept)
        item.update(self.changed)


def take_outcome(item: Data, sent: Data, outcome: Any, metrics: Metrics | None = None) -> BaseException | None:
    """``apply`` a packed outcome to the dict; returns any exception.

    ``metrics`` gets the changes of the other process's, and its name. NOTE: the dict may be of a caller's class and
    raise, but the thread that takes answers must continue.
    """
    try:
        if metrics is not None and (changes := outcome[0].pop(METRICS_KEY, None)):
            metrics.merge(*changes)
        ItemOutcome(*outcome).apply(item, sent)
    except BaseException as error:
        return error
    return None


def pack_sent(items: list[Data], label: str) -> tuple[list[Data], Packed]:
    """The sendable values of each item, and their message: a dict for one item. ``TypeError`` if ``data`` is not."""
    try:
        return items, _packed(items)
    except Exception:
        sent = [_picklable_items(item, label) for item in items]
        return sent, _packed(sent)


def pack_outcomes(outcomes: list[ItemOutcome]) -> Packed:
    """Pack outcomes for ``take_outcome``; several outcomes become a list.

    Raises any exception of pickling, and ``TypeError`` if the value of a key cannot be sent.
    """
    try:
        if len(outcomes) == 1:
            return pack(*outcomes[0])
        return Packed.of([tuple(outcome) for outcome in outcomes])
    except Exception as error:
        failure = error
    for key, changed in (item for outcome in outcomes for item in outcome.changed.items()):
        try:
            check_picklable((key, changed))
        except Exception as reason:
            failure = TypeError(f"{key!r} cannot be pickled: {first_line(reason)}")
            break
    raise failure


def _packed(items: list[Data]) -> Packed:
    return pack(items[0]) if len(items) == 1 else Packed.of(items)


def _picklable_items(item: Data, label: str) -> Data:
    items = {}
    for key, value in item.items():
        try:
            check_picklable((key, value))
        except Exception as error:
            if key == TASK_DATA_KEY:
                raise TypeError(f"{label}: {key!r} cannot be pickled: {first_line(error)}") from error
        else:
            items[key] = value
    return items


def check_picklable(value: Any) -> None:
    """Raise the error that prevents ``value`` from being sent, if any."""
    Pickler(io.BytesIO()).dump(value)


class Pickler(pickle.Pickler):
    """Keeps large buffers outside the pickle: those of arrays in ``buffers``, ``bytes`` in ``blobs``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep)
        self.buffers: list[memoryview] = []
        self.blobs: list[memoryview] = []
        self._seen: dict[int, tuple[int, bool]] = {}

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer stays in the pickle itself; else it is added to ``buffers``."""
        raw = buffer.raw()
        if raw.nbytes <= INLINE:
            return True
        self.buffers.append(raw)
        return False

    def persistent_id(self, value: Any) -> tuple[int, bool] | None:
        kind = type(value)
        if (kind is not bytes and kind is not bytearray) or len(value) <= INLINE:
            return None
        # An object that occurs twice is sent once; the views in `blobs` keep it alive, so its id stays unique.
        if id(value) not in self._seen:
            self._seen[id(value)] = (len(self.blobs), kind is bytearray)
            self.blobs.append(memoryview(value))
        return self._seen[id(value)]

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            if value.flags.forc or value.dtype.hasobject:
                return NotImplemented
            return np.ascontiguousarray(value).__reduce_ex__(5)
        if type(value) is memoryview and value.ndim == value.itemsize == 1:
            return memoryview, (value.tobytes(),)
        torch = loaded_torch()
        if torch is not None and isinstance(value, torch.Tensor):
            return reduce_tensor(torch, value)
        return NotImplemented


class Unpickler(pickle.Unpickler):
    """Reads the output of a ``Pickler``, without copying its parts."""

    def __init__(
        self, pickled: bytes, buffers: list[Any], blobs: list[Any], before_main: Callable[[], object] | None
    ) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
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
    """PyTorch, if it is imported (else there are no tensors); ``None`` while another thread is still importing it."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") else None


def reduce_tensor(torch: Any, tensor: Any) -> tuple[Any, ...]:
    """Reduce a tensor of any dtype to an array of its bytes, with its strides if it is dense; without gradient.

    Raises ``TypeError`` for a tensor that is not in CPU memory, or not strided.

    PyTorch's own reduction would pass a file descriptor for each tensor.
    """
    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on device {tensor.device} cannot go to another process; only one on the CPU can")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor of layout {tensor.layout}, dtype {tensor.dtype} cannot go to another process")
    if tensor.is_contiguous() and not tensor.requires_grad:
        try:
            return torch.from_numpy, (tensor.numpy(),)
        except (RuntimeError, TypeError):  # for example, conjugated, or of a dtype that NumPy lacks
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


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)


def _flat(values: Data, also: Any) -> Packed | None:
    """Pickle scalars together, with large parts outside; ``None`` if the dict holds anything else."""
    if type(values) is not dict:
        return None
    torch = loaded_torch()
    plain: dict[str, Any] = {}
    layout: list[tuple[str, int, str, tuple[int, ...]]] = []
    parts: list[Any] = []
    for key, value in values.items():
        kind = type(value)
        if type(key) is not str:
            return None
        if kind in _SCALARS or (kind is tuple and _SCALARS.issuperset(map(type, value))):
            plain[key] = value
        elif kind is bytes:
            if len(value) <= INLINE:
                plain[key] = value
            else:
                layout.append((key, _BYTES, "|u1", (len(value),)))
                parts.append(memoryview(value))
        else:
            is_tensor = torch is not None and kind is torch.Tensor
            if is_tensor:
                try:
                    value = value.numpy()
                except (RuntimeError, TypeError):  # not in CPU memory, or of a dtype that NumPy lacks
                    return None
            elif kind is not np.ndarray:
                return None
            dtype, flags = value.dtype, value.flags
            # NOTE: ``str`` does not fully describe other dtypes: for bfloat16 it gives only the item size of two bytes.
            if not flags.c_contiguous or dtype.isbuiltin != 1 or dtype.hasobject or not value.nbytes:
                return None
            form = _TENSOR if is_tensor else _ARRAY if flags.writeable else _READ_ONLY
            layout.append((key, form, dtype.str, value.shape))
            parts.append(value)
    if len(layout) > 1 and len({id(values[key]) for key, *_ in layout}) < len(layout):
        return None  # an object that occurs twice must stay one object
    return Packed(_head(tuple(layout)) if layout else b"", pickle.dumps((plain, also), 5), parts, FLAT)


@lru_cache(256)
def _head(layout: _Layout) -> bytes:
    """The head that describes the parts of a flat message; it is cached, as most messages share a layout."""
    return pickle.dumps(layout, 5)


@lru_cache(256)
def _places(head: bytes) -> list[tuple[str, int, np.dtype[Any], tuple[int, ...], int]]:
    """Key, form, dtype, shape and offset of each part."""
    places, start = [], 0
    for key, form, code, shape in pickle.loads(head):
        dtype = np.dtype(code)
        places.append((key, form, dtype, shape, start))
        start += padded(dtype.itemsize * prod(shape))
    return places
