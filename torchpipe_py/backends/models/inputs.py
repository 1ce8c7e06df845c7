"""From a request's ``data`` to the inputs of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from torchpipe_py.backends.base import Data
from torchpipe_py.errors import InvalidRequest, nearest, shown
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY

Shapes = TypeVar("Shapes")


@dataclass(frozen=True)
class TensorSpec:
    """What a model says of an input or output: ``dims`` with the batch, ``None`` for any size, empty if unknown.

    ``dtype`` is a name that NumPy and PyTorch share, or ``bfloat16``; empty if unknown.
    """

    name: str
    dims: tuple[int | None, ...] = ()
    dtype: str = ""

    def __str__(self) -> str:
        return " ".join([self.name, *([shown_dims((1, *self.dims[1:]))] if self.dims else []), self.dtype]).strip()


def shown_dims(dims: Sequence[int | None]) -> str:
    """A shape as messages have it: ``1x3x?x?``."""
    return "x".join("?" if dim is None else str(dim) for dim in dims) or "a scalar"


def by_shapes(
    items: Sequence[Data], read: Callable[[Data], tuple[Shapes, list[Any]]]
) -> list[tuple[Shapes, list[Data], list[list[Any]]]]:
    """The items whose inputs have the same shapes, with their inputs, as ``read`` gives both.

    An ``InvalidRequest`` of ``read`` is the outcome of its item, which is in no group then.
    """
    groups: dict[Shapes, tuple[list[Data], list[list[Any]]]] = {}
    for item in items:
        try:
            shapes, row = read(item)
        except InvalidRequest as error:
            item[TASK_ERROR_KEY] = error
            continue
        members, rows = groups.setdefault(shapes, ([], []))
        members.append(item)
        rows.append(row)
    return [(shapes, members, rows) for shapes, (members, rows) in groups.items()]


def request_values(item: Data, inputs: Sequence[TensorSpec]) -> list[Any]:
    """The inputs of one request, in the model's order: ``data`` itself, or a list of them, or a dict by their names.

    ``InvalidRequest`` where they are not the model's ``inputs``, which are empty where the model does not say them.
    """
    data = item[TASK_DATA_KEY]
    if isinstance(data, Mapping):
        return [_value(data[name]) for name in _names(data, inputs)]
    values = [_value(value) for value in data] if isinstance(data, (list, tuple)) else [data]
    if inputs and len(values) != len(inputs):
        raise InvalidRequest(f"the model has {len(inputs)} inputs, data holds {len(values)}: {_listed(inputs)}")
    return values


def _names(data: Mapping[Any, Any], inputs: Sequence[TensorSpec]) -> list[str]:
    if not inputs:
        raise InvalidRequest("data is a dict, but the model does not say what its inputs are called; give a list")
    names = [spec.name for spec in inputs]
    for key in data:
        if key not in names:
            hint = nearest(key, names) if isinstance(key, str) else "names are texts"
            raise InvalidRequest(f"the model has no input {shown(key)}; {hint} Its inputs: {_listed(inputs)}")
    for name in names:
        if name not in data:
            raise InvalidRequest(f"input {name!r} is not in data; the model's inputs: {_listed(inputs)}")
    return names


def _listed(inputs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, inputs))


def _value(value: Any) -> Any:
    """An input of a request: a list of numbers as an array, one of tensors, arrays or Mats stacked."""
    if not isinstance(value, (list, tuple)) or not value:
        return value
    try:
        if hasattr(value[0], "detach"):
            import torch

            return torch.stack(list(value))
        planes = [each.transpose(2, 0, 1) if is_image(each) else each for each in value]
        array = np.stack(planes) if isinstance(value[0], np.ndarray) else np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidRequest(f"a list that makes no tensor: {str(error)[:200]}") from None
    if array.dtype.kind not in "biuf":
        raise InvalidRequest(f"a list of {type(value[0]).__name__} makes no tensor")
    return array


def is_image(value: Any) -> bool:
    """Whether ``value`` is a Mat H×W×C of one, three or four channels."""
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype == np.uint8 and value.shape[2] in (1, 3, 4)


def as_array(value: Any, dims: Sequence[int | None], name: str) -> np.ndarray:
    """A tensor or array as the 1×… array that fits ``dims`` (``None``: any size); C×H×W is taken as 1×C×H×W.

    A ``uint8`` array of three dimensions, for an input of four, is a Mat H×W×C. ``InvalidRequest`` for what
    does not fit.
    """
    array = value if isinstance(value, np.ndarray) else _tensor_to_numpy(value, name)
    if len(dims) == 4 and array.ndim == 3 and value is array and array.dtype == np.uint8:
        array = array.transpose(2, 0, 1)  # a Mat
    if array.ndim == len(dims) - 1:
        array = array[None]
    shape = array.shape
    fits = len(shape) == len(dims) and shape[0] == 1
    if not fits or any(want is not None and want != have for want, have in zip(dims[1:], shape[1:], strict=True)):
        raise InvalidRequest(f"input {name!r} takes {shown_dims((1, *dims[1:]))}, got {shown_dims(np.shape(value))}")
    return array


def _tensor_to_numpy(value: Any, name: str) -> np.ndarray:
    try:
        return value.detach().cpu().numpy()  # type: ignore[no-any-return]
    except AttributeError:
        raise InvalidRequest(f"input {name!r} takes a tensor, got {type(value).__name__}") from None
