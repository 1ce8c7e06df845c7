"""A request's dict as a message, without a Python call for each object in it where it holds what most of them do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.proc.process.outcome import ItemOutcome, stuck, visible
from torchpipe_py.proc.process.transport import INLINE, Packed, loaded_torch, padded, sizes_in
from torchpipe_py.proc.process.transport import unpack as unpack_any

FLAT = 2**32 - 1
"""In place of the number of arrays: the head describes each part."""

_SCALARS = frozenset((str, int, float, bool, type(None)))
_BYTES, _ARRAY, _READ_ONLY, _TENSOR = range(4)

_Layout = tuple[tuple[str, int, str, tuple[int, ...]], ...]


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


def pack_outcomes(outcomes: list[ItemOutcome]) -> Packed:
    """What became of items, of each as ``take_outcome`` takes it, in a list unless it is one.

    Raises whatever pickling raises, and ``TypeError`` where a key has what cannot be sent.
    """
    try:
        if len(outcomes) == 1:
            return pack(outcomes[0].changed, outcomes[0].kept)
        return Packed.of([(outcome.changed, outcome.kept) for outcome in outcomes])
    except Exception as error:
        failure = stuck(outcomes, error)
    raise failure


def _packed(items: list[Data]) -> Packed:
    return pack(items[0]) if len(items) == 1 else Packed.of(items)


def unpack(
    head: bytes,
    pickled: bytes,
    arrays: int,
    buffer: Any,
    offset: int,
    copies: bool,
    before_main: Callable[[], object] | None = None,
) -> Any:
    """What was packed, as a pair, or any other message. Its parts lie in ``buffer`` from ``offset`` on.

    Arrays and tensors lie there as well, unless it ``copies`` them.
    """
    if arrays != FLAT:
        parts: list[Any] = []
        for size in sizes_in(head):
            part: Any = np.ndarray((size,), np.uint8, buffer, offset)
            parts.append(part.tobytes() if len(parts) >= arrays else part.copy() if copies else part)
            offset += padded(size)
        return unpack_any(pickled, parts, arrays, before_main)
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


def _flat(values: Data, also: Any) -> Packed | None:
    """Scalars pickled together, and beside them what is large; ``None`` where the dict holds anything else."""
    if type(values) is not dict:
        return None
    torch = loaded_torch()
    plain: Data = {}
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
                except (RuntimeError, TypeError):  # elsewhere than in CPU memory, or of a dtype that NumPy has not
                    return None
            elif kind is not np.ndarray:
                return None
            dtype, flags = value.dtype, value.flags
            # NOTE: of another dtype, ``str`` does not tell all: of bfloat16, say, only that an item has two bytes.
            if not flags.c_contiguous or dtype.isbuiltin != 1 or dtype.hasobject or not value.nbytes:
                return None
            form = _TENSOR if is_tensor else _ARRAY if flags.writeable else _READ_ONLY
            layout.append((key, form, dtype.str, value.shape))
            parts.append(value)
    if len(layout) > 1 and len({id(values[key]) for key, *_ in layout}) < len(layout):
        return None  # one object twice, which is to stay one
    return Packed(_head(tuple(layout)) if layout else b"", pickle.dumps((plain, also), 5), parts, FLAT)


@lru_cache(256)
def _head(layout: _Layout) -> bytes:
    """What tells the other end of the parts of a flat message: most messages are laid out as others were."""
    return pickle.dumps(layout, 5)


@lru_cache(256)
def _places(head: bytes) -> list[tuple[str, int, np.dtype[Any], tuple[int, ...], int]]:
    """Key, form, dtype and shape of each part, and where it starts."""
    places, start = [], 0
    for key, form, code, shape in pickle.loads(head):
        dtype = np.dtype(code)
        places.append((key, form, dtype, shape, start))
        start += padded(dtype.itemsize * prod(shape))
    return places


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)
