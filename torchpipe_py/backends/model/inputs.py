"""Converts a request's ``data`` to the inputs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number, Real
from typing import Any

import numpy as np

from torchpipe_py.backends.arrays import is_foreign, to_tensor
from torchpipe_py.backends.base import Data
from torchpipe_py.backends.image.mat import UINT8
from torchpipe_py.backends.signature import BYTES, TensorSpec, shown_dims
from torchpipe_py.errors import InvalidRequest, counted, first_line, nearest, quoted, shown
from torchpipe_py.keys import TASK_DATA_KEY
from torchpipe_py.wire.pictures import is_picture
from torchpipe_py.wire.values import dtype_name


def request_values(item: Data, inputs: Sequence[TensorSpec]) -> list[Any]:
    """The inputs of one request, in the model's order, from ``data``: a value, a list of values, or a dict by name.

    Optional inputs are not among them. Raises ``InvalidRequest`` if they do not match the model's ``inputs``, which are
    empty if the model declares none.
    """
    data = item[TASK_DATA_KEY]
    required = [spec for spec in inputs if not spec.is_optional]
    if hasattr(data, "dtype"):  # a tensor or an array: checked first, as the usual case
        values = [data]
    elif isinstance(data, Mapping):
        specs = {spec.name: spec for spec in required}
        return [_value(data[name], specs[name]) for name in _names(data, inputs)]
    elif isinstance(data, (list, tuple)):
        kinds = (Number, str, bytes) if len(required) < 2 else (Number,)  # an input is never a single one of these
        is_row = all(isinstance(value, kinds) for value in data)
        if not data:
            is_row = len(required) == 1 and required[0].dtype == BYTES
        values = [data] if is_row else list(data)
    else:
        values = [data]
    if inputs and len(values) != len(required):
        count = counted(len(required), "input")
        raise InvalidRequest(f"the model has {count}, data holds {len(values)}: {_listed(inputs)}")
    return [_value(value, spec) for value, spec in zip(values, required or [_UNKNOWN] * len(values), strict=True)]


def _names(data: Mapping[Any, Any], inputs: Sequence[TensorSpec]) -> list[str]:
    if not inputs:
        raise InvalidRequest("data is a dict, but the model does not name its inputs; give a list")
    names = [spec.name for spec in inputs]
    known = set(names)
    for key in data:
        if key not in known:
            hint = nearest(key, names) if isinstance(key, str) else "names are texts"
            near = "its" if hint.startswith("valid") else f"{hint} Its" if hint.endswith("?") else f"{hint}; its"
            raise InvalidRequest(f"the model has no input {shown(key)}; {near} inputs: {_listed(inputs)}")
    required = [spec.name for spec in inputs if not spec.is_optional]
    for name in required:
        if name not in data:
            raise InvalidRequest(f"input {name!r} is not in data; the model's inputs: {_listed(inputs)}")
    return required


def optional_values(item: Data, inputs: Sequence[TensorSpec]) -> dict[str, Any]:
    """The values of optional ``inputs`` that a request has, by name."""
    data = item[TASK_DATA_KEY]
    if not isinstance(data, Mapping):
        return {}
    return {spec.name: _value(data[spec.name], spec) for spec in inputs if spec.is_optional and spec.name in data}


def _listed(inputs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, inputs))


def _adopted(value: Any) -> Any:
    """An array of another library as a tensor, any other value as it is."""
    return to_tensor(value) if is_foreign(value) else value


_UNKNOWN = TensorSpec("")


def _value(value: Any, spec: TensorSpec) -> Any:
    """A request's input: a list of numbers or texts as an array, one of tensors, arrays or Mats stacked."""
    if not isinstance(value, (list, tuple)) or not value:
        return _adopted(value)
    value = [_adopted(element) for element in value] if is_foreign(value[0]) else value
    where = f"input {spec.name!r}: " if spec.name else ""
    try:
        if hasattr(value[0], "detach"):
            import torch

            return torch.stack(list(value))
        planes = [each.transpose(2, 0, 1) if is_image(each) else each for each in value]
        are_arrays = isinstance(value[0], np.ndarray)
        array = np.stack(planes) if are_arrays else np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidRequest(f"{where}a list that makes no tensor: {str(error)[:200]}") from None
    kind = array.dtype.kind
    if spec.dtype == BYTES and kind in "USO":
        return np.array(value, object)  # NOTE: bytes of NumPy's own end at a NUL
    has_other = (kind == "f" and spec.dtype.startswith(("int", "uint"))) or (kind in "iuf" and spec.dtype == "bool")
    if kind in "biuf" and (are_arrays or not has_other):
        return array
    if are_arrays:
        raise InvalidRequest(f"{where}a list of arrays of {array.dtype} makes no tensor")
    if (other := _not_number(value)) is not None:
        raise InvalidRequest(f"{where}a list with {shown(other[1])} at {other[0]}; expected {spec.dtype or 'numbers'}")
    return plain_numbers(value, spec.dtype, spec.name)


def _not_number(value: Any, place: str = "") -> tuple[str, Any] | None:
    """The place and value of the first element of nested lists that is not a number; ``None`` if all are."""
    if isinstance(value, (list, tuple)):
        found = (_not_number(element, f"{place}[{index}]") for index, element in enumerate(value))
        return next(filter(None, found), None)
    return None if isinstance(value, Real) else (place, value)


def plain_numbers(value: Any, dtype: str, name: str) -> np.ndarray:
    """A number of Python, or nested lists of some, as an array for an input of ``dtype``, which may be unknown.

    As in JSON, where numbers have no types, 1.0 is an integer, and 0 and 1 are booleans. ``InvalidRequest`` for a
    number that the type does not have.
    """
    wanted = np.dtype({"bfloat16": "float32", "": "float64"}.get(dtype, dtype))

    def converted(number: Any) -> Any:
        is_whole, why = False, ""
        try:
            if wanted.kind == "f":
                return float(number)
            whole = int(number)
            is_whole = whole == number
        except OverflowError:
            why = ", which is beyond float64" if wanted.kind == "f" else ""
        except ValueError:  # NaN
            pass
        if is_whole and wanted.kind == "b" and whole in (0, 1):
            return bool(whole)
        if is_whole and wanted.kind in "iu":
            limits = np.iinfo(wanted)
            if limits.min <= whole <= limits.max:
                return whole
            number, why = whole, f"; its least is {limits.min}, its most {limits.max}"
        raise InvalidRequest(f"input {name!r} takes {dtype or 'numbers'}, got {quoted(number)}{why}")

    numbers = np.array(value, object)
    kept = np.dtype("float64") if wanted.kind == "f" else wanted
    return np.array([converted(number) for number in numbers.ravel().tolist()], kept).reshape(numbers.shape)


def is_image(value: Any) -> bool:
    """Whether ``value`` is a Mat H×W×C of one, three or four channels."""
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype == np.uint8 and value.shape[2] in (1, 3, 4)


def laid_out(value: np.ndarray, dims: Sequence[int | None], name: str) -> np.ndarray:
    """A Mat in the order of the dimensions that the input has; an array of another kind as it is."""
    is_gray = value.ndim == 2
    array = value[:, :, None] if is_gray else value
    planes = array.transpose(2, 0, 1)
    array_fits, planes_fit = fits(array.shape, dims[1:]), fits(planes.shape, dims[1:])
    if not (array_fits and planes_fit):
        return planes if planes_fit else array
    if dims[1] is None and dims[3] is None and (is_gray or looks_like_mat(array)):
        raise InvalidRequest(
            f"input {name!r} takes {shown_dims((1, *dims[1:]))}, which does not define the place of a Mat's channels; "
            "pass a Tensor (Mat2Tensor makes one, 1xCxHxW) or an array of four dimensions"
        )
    return planes if (is_gray or array.dtype == np.uint8) and dims[1] is not None else array


def looks_like_mat(array: np.ndarray) -> bool:
    """Whether an array of three dimensions is H×W×C, as all of ``uint8`` are."""
    return array.dtype == np.uint8 or (array.shape[2] in (1, 3, 4) and array.shape[0] not in (1, 3, 4))


def fits(shape: Sequence[int], dims: Sequence[int | None]) -> bool:
    """Whether a shape has as many dimensions as ``dims``, each of its size (``None``: any size)."""
    return shape == dims or (
        len(shape) == len(dims) and all(want is None or want == have for want, have in zip(dims, shape, strict=True))
    )


def misfit(name: str, dims: Sequence[int | None], shape: Sequence[int], rows_mix: bool = False) -> str:
    """The message for a value of ``shape`` if an item of ``dims`` is expected; ``rows_mix``: see ``TensorSpec``."""
    turned = (*shape[:-3], shape[-1], *shape[-3:-1]) if len(shape) >= 3 else ()
    is_turned = bool(turned) and bool(dims) and fits(turned[-len(dims) :], dims)
    hint = "; Mat2Tensor makes such a Tensor of H×W×C" if is_turned else ""
    if not hint and shape and shape[0] > 1 and fits(tuple(shape[1:]), dims):
        hint = "; the first dimension counts items, and a request has one"
        if rows_mix:
            batched = shown_dims((1, None, *dims))
            hint = (
                "; the model's rows depend on each other, so its first dimension is not a batch, and a request has one "
                f"row: export the model with a batch before it, {batched}"
            )
    return f"input {name!r} takes {shown_dims((1, *dims))}, got {shown_dims(shape)}{hint}"


BEYOND = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": 2.0**128 - 2.0**103}
"""The least number that each type rounds to infinity."""


def check_numbers(array: np.ndarray, dtype: str, name: str) -> None:
    """Raise ``InvalidRequest`` if an array loses more than precision in ``dtype``: fractions, or large numbers.

    Infinity and NaN are kept.
    """
    wanted = np.dtype("float32" if dtype == "bfloat16" else dtype)
    if dtype_name(array.dtype) == dtype:
        return
    if array.dtype.kind in "iu" and wanted.kind in "iu":
        limits, least, most = np.iinfo(wanted), int(array.min(initial=0)), int(array.max(initial=0))
        if not limits.min <= least <= most <= limits.max:
            raise InvalidRequest(f"input {name!r} takes {dtype}, got {array.dtype} of {least}..{most}")
    elif not _can_cast(array.dtype, wanted):
        raise InvalidRequest(f"input {name!r} takes {dtype}, got {array.dtype}")
    elif may_overflow(dtype_name(array.dtype), dtype):
        if -BEYOND[dtype] < float(array.min(initial=0)) <= float(array.max(initial=0)) < BEYOND[dtype]:
            return
        large = array[np.isfinite(array) & ~((-BEYOND[dtype] < array) & (array < BEYOND[dtype]))]
        if large.size:
            raise InvalidRequest(
                f"input {name!r} takes {dtype}, got {array.dtype} of {float(large[0]):g}, which is beyond it"
            )


@lru_cache(256)
def may_overflow(source: str, target: str) -> bool:
    """Whether a number of the type ``source`` may be too large for the type ``target`` of floats."""
    if source == "bfloat16":  # which NumPy lacks
        return target == "float16"
    kind = np.dtype(source).kind
    if target not in BEYOND or kind not in "iuf":
        return False
    limits = np.finfo(source) if kind == "f" else np.iinfo(source)
    return float(limits.max) >= BEYOND[target]


@lru_cache(256)
def _can_cast(source: np.dtype, target: np.dtype) -> bool:
    return np.can_cast(source, target, "same_kind")


def to_texts(value: Any, rank: int, name: str) -> np.ndarray:
    """A text, UTF-8, or an array or a list of them as an array of ``str``; one text has ``rank`` dimensions.

    ``InvalidRequest`` for another value.
    """
    array = None if hasattr(value, "detach") else np.array(value, object)
    elements = [None] if array is None else array.ravel().tolist()
    if array is None or not all(isinstance(element, (str, bytes)) for element in elements):
        got = str(getattr(value, "dtype", type(value).__name__))
        if got == "object":  # the first that is not a text
            got = shown(next(each for each in elements if not isinstance(each, (str, bytes))))
        raise InvalidRequest(f"input {name!r} takes texts, got {got}")
    texts = np.empty(array.size, object)
    try:
        texts[:] = [element.decode() if isinstance(element, bytes) else element for element in elements]
        "".join(texts).encode()  # NOTE: libraries raise for half of a surrogate pair, and then for the whole batch
    except UnicodeDecodeError:
        raise InvalidRequest(f"input {name!r} takes texts, got bytes that are not UTF-8") from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"input {name!r} takes texts, got one with half of a surrogate pair") from None
    return texts.reshape(array.shape or (1,) * rank)


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """``float32`` rounded to the bits of bfloat16, ``uint16``; those of a NaN are kept."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(array), bits >> 16 | ((bits >> 16 & 0x7F) == 0), rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 as the same numbers in ``float32``."""
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def undecoded(value: Any) -> str:
    """A hint for an encoded picture in place of a tensor; empty for other values."""
    if not (isinstance(value, bytes) and is_picture(value)):
        return ""
    return ", an encoded picture: the pipeline needs DecodeMat and Mat2Tensor before the model"


def tensor_to_numpy(value: Any, name: str) -> np.ndarray:
    """``to_numpy``; ``InvalidRequest`` if ``value`` is not a tensor."""
    try:
        return to_numpy(_adopted(value))
    except AttributeError:
        raise InvalidRequest(f"input {name!r} takes a tensor, got {type(value).__name__}{undecoded(value)}") from None
    except (TypeError, NotImplementedError) as error:  # a sparse tensor, or one without data
        raise InvalidRequest(f"input {name!r}: {first_line(error)}") from None


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor as an array on the host, perhaps sharing its memory; ``float32`` if NumPy lacks its dtype."""
    # Try the last step first: PyTorch releases the GIL in each call, and most tensors need no other.
    if not tensor.is_cpu or tensor.requires_grad:
        tensor = tensor.detach().cpu()
    try:
        array: np.ndarray = tensor.numpy()
    except TypeError:  # bfloat16
        array = tensor.float().numpy()
    return array


# -- for a GPU --------------------------------------------------------------------------------------------------------


def is_mat(value: Any) -> bool:
    """Whether ``value`` is a Mat: an array H×W or H×W×C, ``uint8``."""
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 3):
        return False
    return value.dtype is UINT8 or value.dtype == UINT8  # `is` fails for an unpickled dtype


@dataclass(frozen=True)
class InputSpec:
    """A model's declaration of one input; ``dims`` are without the batch, ``None`` if undeclared.

    ``rows_mix``: see ``TensorSpec``.
    """

    name: str
    dtype: Any
    dims: tuple[int | None, ...] | None = None
    rows_mix: bool = False

    def row_shape(self, value: Any) -> tuple[int, ...]:
        """Shape without the batch of one request's value; ``InvalidRequest`` if it does not fit."""
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            raise InvalidRequest(f"input {self.name!r} takes a Mat or a tensor, got an array of {value.dtype}")
        shape = self._row_shape(value)
        dims = self.dims
        if dims is not None and not fits(shape, dims):
            raise InvalidRequest(misfit(self.name, dims, value.shape))
        if value.dtype != self.dtype:
            self._check_numbers(value)
        return shape

    def batched(self, value: Any) -> Any:
        """A Mat for an input N×H×W×C as an array 1×H×W×C; any other value as it is."""
        if not isinstance(value, np.ndarray) or value.ndim not in (2, 3) or self.dims is None or len(self.dims) != 3:
            return value
        array = value if value.ndim == 3 else value[:, :, None]
        if not fits(array.shape, self.dims):
            return value
        # As ``laid_out``: where both orders fit, the channels are first if their place has a number.
        planes_fit = fits((array.shape[2], *array.shape[:2]), self.dims)
        return value if planes_fit and (self.dims[0] is not None or self.dims[2] is None) else array[None]

    def _check_numbers(self, value: Any) -> None:
        """Raise ``InvalidRequest`` for numbers that this input's type cannot hold."""
        dtype, given = (str(each).removeprefix("torch.") for each in (self.dtype, value.dtype))
        if self.dtype.is_floating_point and not may_overflow(given, dtype):
            return
        if isinstance(value, np.ndarray):
            check_numbers(value, dtype, self.name)
        elif value.is_floating_point() and not self.dtype.is_floating_point:
            raise InvalidRequest(f"input {self.name!r} takes {dtype}, got {given}")
        elif not value.is_cuda:  # reading values on a GPU would wait for it
            check_numbers(tensor_to_numpy(value, self.name), dtype, self.name)

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
                    f"{value.dtype}, which may be a Mat; convert it with Mat2Tensor"
                )
            if len(self.dims) == 3 and value.shape[2] == self.dims[0]:
                return value.shape[2], value.shape[0], value.shape[1]
        try:
            shape = tuple(value.shape)
        except AttributeError:
            got = f"{type(value).__name__}{undecoded(value)}"
            raise InvalidRequest(f"input {self.name!r} takes a Mat or a tensor, got {got}") from None
        if len(shape) == (3 if self.dims is None else len(self.dims)):
            return shape  # C×H×W is taken as 1×C×H×W
        if self.dims is None and len(shape) == 1 and shape[0] > 1:
            return shape  # a vector; of one number, it is an item without dimensions
        if not shape or shape[0] != 1:
            if self.rows_mix and self.dims is not None:
                raise InvalidRequest(misfit(self.name, self.dims, shape, self.rows_mix))
            raise InvalidRequest(f"input {self.name!r} takes one item, 1x…, got {shown_dims(shape)}")
        return shape[1:]
