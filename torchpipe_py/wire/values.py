"""Values of a request's dict that may cross a wire: their types and bounds."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from torchpipe_py.errors import InvalidRequest, NoResult
from torchpipe_py.wire.errors import reason

# Data types that PyTorch and NumPy share; only these cross the wire.
DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"})

_FLOAT32_BYTES = 4
NAME_CHARACTERS = 1024  # of a uuid, a key or a node's name
MOST_VALUES = 256  # inputs of a request, and outputs
MOST_TENSORS = 256  # in one value
MOST_DIMENSIONS = 32


def check_names(what: str, names: Collection[str]) -> None:
    """Raises ``InvalidRequest`` for too many of them, or one that is too long."""
    if len(names) > MOST_VALUES:
        raise InvalidRequest(f"{len(names)} {what}; the limit is {MOST_VALUES}")
    for name in names:
        check_name(what, name)


def check_name(what: str, name: str) -> None:
    """Raises ``InvalidRequest`` for one that is too long."""
    if len(name) > NAME_CHARACTERS:
        raise InvalidRequest(f"{what}: a name of {len(name)} characters; the limit is {NAME_CHARACTERS}")


def size_of(value: Any) -> int:
    """About how many bytes it takes on a wire, as binary; 0 where that is not known before."""
    import torch

    if isinstance(value, torch.Tensor):
        return int(value.numel() * (_FLOAT32_BYTES if value.dtype is torch.bfloat16 else value.element_size()))
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in value if isinstance(item, (torch.Tensor, np.ndarray)))
    return 0


def output_of(data: Mapping[str, Any], key: str) -> Any:
    """The value under ``key``; without a result, the error that says why."""
    if key in data:
        return data[key]
    raise reason(data, key)


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy and PyTorch as JSON can say them."""
    import torch

    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} in it")


def is_array(value: Any) -> bool:
    """Whether ``value`` is a Tensor or an array of NumPy. Loads no PyTorch: without it nothing is a Tensor."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(value, (np.ndarray, tensor))


def to_array(value: Any, where: str) -> np.ndarray:
    """A Tensor or an array, as one of ``DTYPES``; bfloat16, which NumPy has not, as float32 of the same numbers.

    ``NoResult`` for another type; ``where`` says where it has no form.
    """
    import torch

    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.dtype is torch.bfloat16:
        value = value.float()
    name = str(value.dtype).removeprefix("torch.") if is_tensor else value.dtype.name
    if name not in DTYPES:
        raise NoResult(f"an array of {value.dtype} has no form {where}")
    array: np.ndarray = value.detach().cpu().numpy() if is_tensor else value
    return array


def are_arrays(value: Any) -> bool:
    """Whether ``value`` is a list of them, and not an empty one."""
    return isinstance(value, (list, tuple)) and bool(value) and all(map(is_array, value))


_LABEL, _SCORE = (str, int, np.integer), (float, int, np.number)


def is_label_and_score(value: Any) -> bool:
    """Whether ``value`` is a pair of a label and a number."""
    return (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], _LABEL) and isinstance(value[1], _SCORE)
    )
