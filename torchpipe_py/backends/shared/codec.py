"""A request's dict as a message, without a Python call for each object in it where it holds what most of them do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.process.outcome import visible
from torchpipe_py.backends.process.transport import INLINE, Packed, loaded_torch
from torchpipe_py.backends.process.transport import unpack as unpack_any

FLAT = 2**32 - 1
"""In place of the number of arrays: each part is described in the pickle."""

_SCALARS = frozenset((str, int, float, bool, type(None)))
_BYTES, _ARRAY, _READ_ONLY, _TENSOR = range(4)

_Layout = list[tuple[Any, int, str, tuple[int, ...]]]


def pack(values: Data, also: Any = None) -> Packed:
    """The dict, and something small besides; raises whatever pickling raises."""
    flat = _flat(values, also)
    return Packed.of((values, also)) if flat is None else flat


def pack_sent(items: list[Data], label: str) -> tuple[list[Data], Packed]:
    """What of each item can be sent, and that as a message: of one, its dict. Raises as ``visible`` does."""
    try:
        return items, _packed(items)
    except Exception:
        sent = [visible(item, label) for item in items]
        return sent, _packed(sent)


def _packed(items: list[Data]) -> Packed:
    return pack(items[0]) if len(items) == 1 else Packed.of(items)


def unpack(pickled: bytes, parts: list[Any], arrays: int, before_main: Callable[[], object] | None = None) -> Any:
    """What was packed, as a pair, or any other message; arrays and tensors lie in ``parts``, which are of bytes."""
    if arrays != FLAT:
        return unpack_any(pickled, parts, arrays, before_main)
    values, layout, also = pickle.loads(pickled)
    for (key, form, dtype, shape), part in zip(layout, parts, strict=True):
        if form == _BYTES:
            values[key] = part.tobytes()
            continue
        array = part.view(dtype).reshape(shape)
        if form == _READ_ONLY:
            array.flags.writeable = False
        values[key] = _tensor(array) if form == _TENSOR else array
    return values, also


def _flat(values: Data, also: Any) -> Packed | None:
    """Scalars pickled together, and beside them what is large; ``None`` where the dict holds anything else."""
    if type(values) is not dict or not all(type(key) is str for key in values):
        return None
    torch = loaded_torch()
    plain, layout, parts = {}, [], []
    for key, value in values.items():
        kind = type(value)
        if kind in _SCALARS or (kind is tuple and all(type(each) in _SCALARS for each in value)):
            plain[key] = value
        elif kind is bytes:
            if len(value) <= INLINE:
                plain[key] = value
            else:
                layout.append((key, _BYTES, "", ()))
                parts.append(memoryview(value))
        else:
            is_tensor = torch is not None and kind is torch.Tensor
            if is_tensor and not value.requires_grad and value.device.type == "cpu" and value.is_contiguous():
                try:
                    value = value.numpy()
                except (RuntimeError, TypeError):  # of a dtype that NumPy has not
                    return None
            elif kind is not np.ndarray:
                return None
            # NOTE: of another dtype, ``str`` does not tell all: of bfloat16, say, only that an item has two bytes.
            if not value.flags.c_contiguous or value.dtype.isbuiltin != 1 or value.dtype.hasobject or not value.nbytes:
                return None
            form = _TENSOR if is_tensor else _ARRAY if value.flags.writeable else _READ_ONLY
            layout.append((key, form, value.dtype.str, value.shape))
            parts.append(value.reshape(-1).view(np.uint8).data)
    if len({id(values[key]) for key, *_ in layout}) < len(layout):  # one object twice, which is to stay one
        return None
    return Packed(memoryview(pickle.dumps((plain, layout, also), 5)), parts, FLAT)


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)
