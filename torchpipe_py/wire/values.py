"""Values of a request's dict that may cross a wire: their types and bounds."""

from __future__ import annotations

import math
import string
import struct
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from torchpipe_py.errors import InvalidRequest, NoResult, counted, first_line, nearest
from torchpipe_py.results import Detections
from torchpipe_py.wire.errors import reason

# Data types of numbers that PyTorch and NumPy share; bfloat16 comes in and goes out as float32.
DTYPES = frozenset(
    {
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    }
)
BFLOAT16, STRING = "bfloat16", "string"
DTYPES_IN = DTYPES | {BFLOAT16, STRING}
"""Data types of arrays in requests; ``string`` is that of texts, UTF-8."""

_FLOAT32_BYTES = 4


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The type's ``name``, which NumPy makes anew each time it is read."""
    return str(dtype.name)


LENGTH = struct.Struct("<I")  # before each text of an array
NAME_CHARACTERS = 1024  # limit of a uuid, a key or a node's name
MOST_VALUES = 2**9  # inputs of a request, and outputs; no model with more is served
MOST_PARAMETERS = 256
_DETECTION_BYTES = len('{"box":[0,0,0,0],"score":0,"class":0},')  # of one in JSON, at least
MOST_TENSORS = MOST_VALUES  # in one value
MOST_TEXTS = 2**12  # in an array
MOST_DIMENSIONS = 32
_MOST_SIZE = 2**63 - 1  # largest dimension; NumPy has other errors for this one and for larger ones


def check_names(what: str, names: Collection[str], most: int = MOST_VALUES) -> None:
    """Raises ``InvalidRequest`` for more than ``most`` of them, or one that is too long."""
    if len(names) > most:
        raise InvalidRequest(f"{len(names)} {what}; the limit is {most}")
    for name in names:
        check_name(what, name)


def check_name(what: str, name: str) -> None:
    """Raises ``InvalidRequest`` for one that is too long, or that UTF-8 cannot encode."""
    if len(name) > NAME_CHARACTERS:
        raise InvalidRequest(f"{what}: a name of {len(name)} characters; the limit is {NAME_CHARACTERS}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what}: {name[:40]!r} has half of a surrogate pair") from None


# -- what comes in --------------------------------------------------------------------------------------------------


def shaped(where: str, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The array in another shape; ``InvalidRequest`` if its size differs, or if no array can have it."""
    if array.size != math.prod(shape):
        raise InvalidRequest(f"{where}shape {list(shape)} does not fit {counted(array.size, 'number')}")
    try:
        return array.reshape(shape)
    except ValueError as error:  # more elements in a dimension than NumPy can count, where another one is 0
        raise InvalidRequest(f"{where}shape {list(shape)}: {error}") from None


def array_of_bytes(where: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> np.ndarray:
    """Little-endian numbers in C order as an array that can be written to; ``InvalidRequest`` for data of another size.

    ``dtype`` is NumPy's name. Every byte of a bool other than 0 is true.
    """
    stored = np.dtype("uint8" if dtype == "bool" else dtype).newbyteorder("<")
    wanted = math.prod(shape) * stored.itemsize
    if wanted != len(data):
        raise InvalidRequest(f"{where}{dtype} of shape {list(shape)} has {wanted} bytes, not {len(data)}")
    return shaped(where, np.frombuffer(data, stored).astype(dtype), shape)


def check_form(where: str, dtype: Any, shape: Any, dtypes: Collection[str] = DTYPES_IN) -> None:
    """Raises ``InvalidRequest`` for a type that does not exist, and for what is not a list of sizes."""
    if not isinstance(dtype, str) or dtype not in dtypes:
        raise InvalidRequest(f"{where}datatype {str(dtype)[:40]!r}; {_nearest_type(str(dtype)[:40], dtypes)}")
    if not isinstance(shape, (list, tuple)) or not all(type(size) is int and 0 <= size <= _MOST_SIZE for size in shape):
        raise InvalidRequest(f"{where}the shape is not a list of sizes")
    if len(shape) > MOST_DIMENSIONS:  # before the product, whose time grows with the square of their number
        raise InvalidRequest(f"{where}{len(shape)} dimensions; the limit is {MOST_DIMENSIONS}")


def _nearest_type(name: str, dtypes: Collection[str]) -> str:
    """``nearest``; of types of the same kind the one with the nearest number of bits."""
    kind, bits = _split_type(name)
    each = {dtype: _split_type(dtype) for dtype in sorted(dtypes)}
    same = {dtype: int(own) for dtype, (its_kind, own) in each.items() if its_kind == kind and own}
    if not bits or not same:
        return nearest(name, dtypes)
    return f"did you mean {min(same, key=lambda dtype: abs(same[dtype] - int(bits)))!r}?"


def _split_type(name: str) -> tuple[str, str]:
    """The letters of a type's name, in lower case, and its digits."""
    kind = name.rstrip(string.digits)
    return kind.lower(), name[len(kind) :]


def single(value: Any) -> Any:
    """The only element of an array, and bytes as the text that they encode; other values as they are.

    The Open Inference Protocol brings a text or a number for a key of the dict in these forms.
    """
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return value


# -- what goes out --------------------------------------------------------------------------------------------------


def json_size(value: Any) -> int:
    """The fewest bytes that it takes as JSON: bytes are base64, a number in an array is a digit and a comma."""
    if isinstance(value, (bytes, bytearray)):
        return 4 * math.ceil(len(value) / 3)
    if isinstance(value, str):
        return len(value)
    if is_array(value):
        return 2 * int(math.prod(value.shape))
    if isinstance(value, Detections):
        points = 0 if value.keypoints is None else 2 * value.keypoints.size
        files = [mask for mask in value.masks or () if isinstance(mask, bytes)]
        return _DETECTION_BYTES * len(value) + points + sum(map(json_size, files))
    if isinstance(value, (list, tuple)):
        return sum(map(json_size, value)) if any(map(is_array, value)) else 2 * len(value)
    return 0


def size_of(value: Any) -> int:
    """About how many bytes it takes on a wire, as binary; 0 where that is not known before."""
    if isinstance(value, (bytes, bytearray, str)):
        return len(value)
    if is_texts(value):
        return sum(map(len, value.ravel().tolist()))
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in value if is_array(item))
    if is_array(value):
        is_bfloat16 = str(value.dtype) == "torch.bfloat16"
        return int(value.numel() * (_FLOAT32_BYTES if is_bfloat16 else value.element_size()))
    return 0


def output_of(data: Mapping[str, Any], key: str, others: Iterable[str] = ()) -> Any:
    """The value under ``key``; without a result, raises the error that explains why.

    ``others`` are valid names beside the keys, which the error may suggest.
    """
    if key in data:
        return data[key]
    raise reason(data, key, others)


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy and PyTorch as JSON can represent them."""
    import torch

    made = value
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        try:
            made = value.tolist()
        except RuntimeError as error:  # of a Tensor without data, say
            raise TypeError(first_line(error)) from None
    if made is value or isinstance(made, np.generic):  # Python has no long double
        raise TypeError(f"a {type(value).__name__} in it")
    return made


def is_array(value: Any) -> bool:
    """Whether ``value`` is a Tensor or an array of NumPy. Loads no PyTorch: without it nothing is a Tensor."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(value, (np.ndarray, tensor))


def is_texts(value: Any) -> bool:
    """Whether ``value`` is an array of texts, or of bytes."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "OSU":
        return False
    return all(isinstance(element, (str, bytes)) for element in value.ravel().tolist())


def array_of_texts(where: str, shape: Sequence[int], elements: Sequence[str | bytes]) -> np.ndarray:
    """Texts as an array of objects; ``InvalidRequest`` if the number of elements is not that of ``shape``."""
    array = np.empty(len(elements), object)
    array[:] = elements
    return shaped(where, array, shape)


def split_texts(where: str, data: bytes) -> list[bytes]:
    """The elements of ``joined_texts``; ``InvalidRequest`` for other bytes, and for more than ``MOST_TEXTS``."""
    elements: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + LENGTH.size
        if end <= len(data):
            start, end = end, end + LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            ends = f"element [{len(elements)}] ends at byte {end}, there are {len(data)}"
            raise InvalidRequest(f"{where}{ends}; each begins with its length in 4 bytes, little-endian")
        if len(elements) == MOST_TEXTS:
            raise InvalidRequest(f"{where}more than {MOST_TEXTS} texts")
        elements.append(bytes(data[start:end]))
        start = end
    return elements


def joined_texts(array: np.ndarray) -> bytes:
    """The elements of an array of texts, each after its length in four bytes, little-endian."""
    elements = [each.encode("utf-8", "replace") if isinstance(each, str) else each for each in array.ravel().tolist()]
    return b"".join([part for element in elements for part in (LENGTH.pack(len(element)), element)])


def to_array(key: str, value: Any, dtypes: Collection[str] = DTYPES) -> np.ndarray:
    """A Tensor or an array, as one of ``dtypes``; ``NoResult`` for another type.

    bfloat16, which NumPy lacks, becomes float32 of the same numbers.
    """
    if not isinstance(value, np.ndarray):
        import torch

        if str(value.dtype).removeprefix("torch.") in (*dtypes, "bfloat16"):
            value = numpy_of(key, value.float() if value.dtype is torch.bfloat16 else value)
    if not isinstance(value, np.ndarray) or dtype_name(value.dtype) not in dtypes:
        raise NoResult(f"{key!r} is an array of {value.dtype}, which has no form on the wire")
    return np.asarray(value)  # of one with a mask the numbers


def numpy_of(key: str, tensor: Any) -> np.ndarray:
    """A Tensor as an array; ``NoResult`` for one that NumPy cannot represent, such as a sparse one."""
    try:
        array: np.ndarray = tensor.detach().cpu().resolve_neg().numpy()
    except (RuntimeError, TypeError) as error:
        raise NoResult(f"{key!r} is a tensor that has no form on the wire: {first_line(error)}") from None
    return array


def check_finite(key: str, array: np.ndarray, hint: str = "") -> None:
    """Raises ``NoResult`` for an array with NaN or infinity."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise NoResult(f"{key!r} contains NaN or infinity, which JSON cannot represent{hint}")


def to_float(key: str, value: Any) -> float:
    """A number as a float; ``NoResult`` for an integer that is too large."""
    try:
        return float(value)
    except OverflowError:
        raise NoResult(f"{key!r} is an integer beyond the numbers of float64") from None


def finite(key: str, value: Any) -> float:
    """A number; ``NoResult`` for NaN and infinity."""
    number = to_float(key, value)
    if not math.isfinite(number):
        raise NoResult(f"{key!r} is {number}, which JSON cannot represent")
    return number


def are_arrays(value: Any) -> bool:
    """Whether ``value`` is a list of them, and not an empty one."""
    return isinstance(value, (list, tuple)) and bool(value) and all(map(is_array, value))


_LABEL, _SCORE = (str, int, np.integer), (float, int, np.number)


def is_label_and_score(value: Any) -> bool:
    """Whether ``value`` is a pair of a label and a number."""
    return (
        isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], _LABEL) and isinstance(value[1], _SCORE)
    )


def is_ranking(value: Any) -> bool:
    """Whether ``value`` is a list of pairs of a label and a number."""
    return isinstance(value, list) and bool(value) and all(map(is_label_and_score, value))
