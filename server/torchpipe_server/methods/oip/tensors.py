"""The protocol's tensors: their types, and their elements as JSON and as binary."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchpipe_py import InvalidRequest, NoResult
from torchpipe_py.errors import counted, nearest
from torchpipe_py.wire.json_values import NUMBER_BYTES, array_from, from_json, shaped
from torchpipe_py.wire.values import MOST_DIMENSIONS

BYTES, BF16 = "BYTES", "BF16"
NUMBERS = {
    "BOOL": "bool",
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
"""NumPy's names of the types that NumPy has."""
DATATYPES = (*NUMBERS, BF16, BYTES)
OF_DTYPE = {name: datatype for datatype, name in NUMBERS.items()} | {"bfloat16": BF16, "bytes": BYTES}

MOST_SIZE = 2**40  # of one dimension
_LENGTH = struct.Struct("<I")  # in front of each element of BYTES


class Form(NamedTuple):
    """What a tensor of a request says of itself. ``shape`` has one item of the request in each of its first size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def where(self) -> str:
        """For messages."""
        return f"input {self.name[:40]!r}: "

    @property
    def items(self) -> int:
        """How many items of the request it is for."""
        return self.shape[0]


def form_of(name: str, datatype: str, shape: Sequence[int]) -> Form:
    """Checked; ``InvalidRequest`` for a type that there is not, or a shape that none can have."""
    form = Form(name, datatype, tuple(shape))
    if datatype == BYTES and len(shape) == 1 and 0 < shape[0] <= MOST_SIZE:
        return form  # nearly all
    if datatype not in DATATYPES:
        raise InvalidRequest(f"{form.where}datatype {datatype[:40]!r}; {nearest(datatype[:40], DATATYPES)}")
    if not all(0 <= size <= MOST_SIZE for size in shape):
        raise InvalidRequest(f"{form.where}the shape is no list of sizes")
    if len(shape) > MOST_DIMENSIONS:
        raise InvalidRequest(f"{form.where}{len(shape)} dimensions; the limit is {MOST_DIMENSIONS}")
    if not shape or not shape[0]:
        raise InvalidRequest(f"{form.where}the shape {shape} has no batch: its first size is the number of items")
    if datatype == BYTES and math.prod(shape) != shape[0]:
        raise InvalidRequest(f"{form.where}the shape {shape} of BYTES: each item is one element, [n] or [n, 1]")
    return form


def rows_of_json(form: Form, data: Any) -> list[Any]:
    """Each item's part: a Tensor 1×…, of ``BYTES`` its bytes. ``InvalidRequest`` for data that is not of the form."""
    if form.datatype != BYTES:
        dtype = NUMBERS.get(form.datatype, "float32")
        array = array_from(form.where, dtype, data)
        tensor = torch.from_numpy(shaped(form.where, array, form.shape))
        return _rows(tensor.bfloat16() if form.datatype == BF16 else tensor)
    if not isinstance(data, list):
        raise InvalidRequest(f"{form.where}the data is no list")
    elements = [element[0] if isinstance(element, list) and len(element) == 1 else element for element in data]
    if len(elements) != form.items:
        raise InvalidRequest(f"{form.where}shape {list(form.shape)} does not fit {counted(len(elements), 'element')}")
    return [_element(form, element) for element in elements]


def rows_of_binary(form: Form, data: memoryview) -> list[Any]:
    """The same of little-endian numbers in C order; of ``BYTES`` each element behind its length, of four bytes."""
    if form.datatype == BYTES:
        return list(_elements(form, data))
    dtype = np.dtype(NUMBERS.get(form.datatype, "uint16")).newbyteorder("<")
    wanted = math.prod(form.shape) * dtype.itemsize
    if wanted != len(data):
        raise InvalidRequest(
            f"{form.where}{form.datatype} of shape {list(form.shape)} has {wanted} bytes, binary_data_size {len(data)}"
        )
    if form.datatype == "BOOL":
        array = np.frombuffer(data, np.uint8) != 0
    else:
        array = np.frombuffer(data, dtype).astype(dtype.newbyteorder("="))
    array = shaped(form.where, array, form.shape)
    tensor = torch.from_numpy(array.view(np.int16) if form.datatype == BF16 else array)
    return _rows(tensor.view(torch.bfloat16) if form.datatype == BF16 else tensor)


def _rows(tensor: torch.Tensor) -> list[Any]:
    return [tensor] if len(tensor) == 1 else list(tensor.split(1))


def _element(form: Form, element: Any) -> bytes:
    if isinstance(element, dict):
        element = from_json(form.name, element)
    if isinstance(element, bytes):
        return element
    try:
        return element.encode()  # type: ignore[no-any-return]
    except (AttributeError, UnicodeEncodeError):
        raise InvalidRequest(f'{form.where}an element of BYTES is a text, or {{"b64": "…"}} for bytes') from None


def _elements(form: Form, data: memoryview) -> Iterator[bytes]:
    start = 0
    for index in range(form.items):
        end = start + _LENGTH.size
        if end <= len(data):
            start, end = end, end + _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            raise InvalidRequest(
                f"{form.where}element {index} of {form.items} ends at byte {end}, binary_data_size is {len(data)}"
            )
        yield bytes(data[start:end])
        start = end
    if start != len(data):
        raise InvalidRequest(f"{form.where}{len(data) - start} bytes behind its last element")


class Output(NamedTuple):
    """A tensor of an answer: numbers, of BF16 as ``uint16``, or the elements of ``BYTES``."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: np.ndarray | list[bytes]

    def size(self, is_binary: bool) -> int:
        """About how many bytes it has, as binary or as JSON."""
        if isinstance(self.data, list):
            return sum(map(len, self.data))
        return int(self.data.nbytes) if is_binary else NUMBER_BYTES * self.data.size

    def to_binary(self) -> bytes:
        """As ``rows_of_binary`` reads it."""
        if isinstance(self.data, list):
            return b"".join([part for element in self.data for part in (_LENGTH.pack(len(element)), element)])
        return np.ascontiguousarray(self.data, self.data.dtype.newbyteorder("<")).tobytes()

    def to_list(self) -> list[Any]:
        """As JSON has it, flat; ``NoResult`` for what JSON has not."""
        if isinstance(self.data, list):
            try:
                return [element.decode() for element in self.data]
            except UnicodeDecodeError:
                raise NoResult(f"{self.name!r} is no UTF-8 text; ask for it with binary_data") from None
        array = self.data
        if self.datatype == BF16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NoResult(
                f"{self.name!r} holds numbers that JSON has not: infinite, or not a number; ask for it with binary_data"
            )
        found: list[Any] = array.ravel().tolist()
        return found


def numbers(name: str, value: Any) -> tuple[str, np.ndarray]:
    """A Tensor or an array as its datatype and its elements; ``NoResult`` for a type that the protocol has not."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            return BF16, value.contiguous().view(torch.int16).numpy().view(np.uint16)
        dtype = str(value.dtype).removeprefix("torch.")
    else:
        dtype = value.dtype.name
    if dtype not in OF_DTYPE:
        raise NoResult(f"{name!r} is an array of {value.dtype}; the protocol has {', '.join(DATATYPES)}")
    return OF_DTYPE[dtype], value.numpy() if isinstance(value, torch.Tensor) else value


def texts(name: str, elements: Iterable[bytes], shape: Sequence[int] | None = None) -> Output:
    """A tensor of ``BYTES``, flat unless it has a ``shape``."""
    held = list(elements)
    return Output(name, BYTES, [len(held)] if shape is None else shape, held)
