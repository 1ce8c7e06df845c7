"""The protocol's tensors: their types, and their elements as JSON and as binary."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchpipe_py.errors import InvalidRequest, NoResult, counted
from torchpipe_py.wire.errors import Bound
from torchpipe_py.wire.json_values import (
    NUMBER_BYTES,
    array_from,
    from_base64,
    from_json,
    numbers_to_json,
)
from torchpipe_py.wire.values import array_of_bytes, check_finite, check_form, dtype_name, numpy_of, shaped, to_array

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

_LENGTH = struct.Struct("<I")  # in front of each element of BYTES
_BEFORE_EACH = "each element of BYTES begins with its length in 4 bytes, little-endian"


class Form(NamedTuple):
    """The declaration of a request's tensor. The first size of ``shape`` is the number of items.

    ``is_image``: its elements are encoded images, so that texts of JSON are base64.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    is_image: bool = False

    @property
    def values(self) -> int:
        """The number of objects that it becomes: each element of ``BYTES`` is one, and so is an item of numbers."""
        return math.prod(self.shape) if self.datatype == BYTES else self.shape[0]

    @property
    def where(self) -> str:
        """Its place, for messages."""
        return f"input {self.name[:40]!r}: "


def form_of(name: str, datatype: str, shape: Sequence[int], is_image: bool = False) -> Form:
    """Checked; ``InvalidRequest`` for a type that does not exist, or a shape that no tensor of a batch has."""
    form = Form(name, datatype, tuple(shape), is_image)
    check_form(form.where, datatype, shape, DATATYPES)
    if not shape or not shape[0]:
        raise InvalidRequest(f"{form.where}the shape {shape} has no batch: its first size is the number of items")
    return form


def rows_of(form: Form, data: Any) -> list[Any]:
    """Each item's part: a Tensor 1×…, of ``BYTES`` its bytes, or of several elements an array 1×… of bytes.

    ``InvalidRequest`` for data that is not of the form.

    ``data``: JSON, a flat array of numbers, or a memoryview of little-endian numbers in C order, of ``BYTES`` each
    element after its length of four bytes.
    """
    is_binary, where, shape = isinstance(data, memoryview), form.where, form.shape
    if form.datatype == BYTES:
        elements = list(_binary_elements(form, data) if is_binary else _elements(form, data))
        if len(elements) == shape[0]:
            return elements
        texts = np.empty(len(elements), object)
        texts[:] = elements
        return np.split(texts.reshape(shape), shape[0])
    import torch

    if isinstance(data, np.ndarray):
        array = shaped(where, data, shape)
    elif is_binary:
        array = array_of_bytes(where, NUMBERS.get(form.datatype, "int16"), shape, data)
    else:
        array = shaped(where, array_from(where, NUMBERS.get(form.datatype, "float32"), data), shape)
    tensor = torch.from_numpy(array)
    if form.datatype == BF16:
        tensor = tensor.view(torch.bfloat16) if is_binary else tensor.bfloat16()
    return [tensor] if shape[0] == 1 else list(tensor.split(1))


def _elements(form: Form, data: Any) -> Iterator[bytes]:
    if not isinstance(data, list):
        raise InvalidRequest(f"{form.where}the data is not a list")
    for _ in form.shape[1:]:
        if all(isinstance(part, list) for part in data):
            data = list(chain.from_iterable(data))
    if len(data) != form.values:
        raise InvalidRequest(f"{form.where}shape {list(form.shape)} does not fit {counted(len(data), 'element')}")
    for element in data:
        if isinstance(element, dict):
            element = from_json(form.where, element)
        elif form.is_image and isinstance(element, str):
            element = from_base64(form.where, element, "the text of an image is neither base64 nor a data URI")
        try:
            yield element if isinstance(element, bytes) else element.encode()
        except (AttributeError, UnicodeEncodeError):
            raise InvalidRequest(f'{form.where}an element of BYTES is a text, or {{"b64": "…"}} for bytes') from None


def _binary_elements(form: Form, data: memoryview) -> Iterator[bytes]:
    start, count = 0, form.values
    for index in range(count):
        end = start + _LENGTH.size
        if end <= len(data):
            start, end = end, end + _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            where = f"{form.where}element [{index}] of {count}"
            raise InvalidRequest(f"{where} ends at byte {end}, there are {len(data)}; {_BEFORE_EACH}")
        yield bytes(data[start:end])
        start = end
    if start != len(data):
        raise InvalidRequest(f"{form.where}{len(data) - start} bytes behind its last element; {_BEFORE_EACH}")


def only_element(data: Any) -> bytes | None:
    """The element of binary ``BYTES`` that hold exactly one; ``None`` for any other data."""
    if type(data) is not memoryview or len(data) < _LENGTH.size:
        return None
    return bytes(data[_LENGTH.size :]) if _LENGTH.unpack_from(data)[0] == len(data) - _LENGTH.size else None


class Output(NamedTuple):
    """A tensor of an answer: numbers, of BF16 as ``uint16``, or the elements of ``BYTES``."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: np.ndarray | list[bytes]

    def size(self, is_binary: bool) -> int:
        """The fewest bytes that it has, as binary or as JSON."""
        if isinstance(self.data, list):
            return sum(map(len, self.data))
        return int(self.data.nbytes) if is_binary else NUMBER_BYTES * self.data.size

    def to_binary(self) -> bytes:
        """Its binary form, which ``rows_of`` reads."""
        if isinstance(self.data, list):
            return b"".join([part for element in self.data for part in (_LENGTH.pack(len(element)), element)])
        return np.ascontiguousarray(self.data, self.data.dtype.newbyteorder("<")).tobytes()

    def numbers(self) -> np.ndarray:
        """Its numbers, of BF16 as ``float32``."""
        assert isinstance(self.data, np.ndarray)
        return (self.data.astype(np.uint32) << 16).view(np.float32) if self.datatype == BF16 else self.data

    def to_json(self, most: Bound, hint: str = "", in_pieces: bool = False) -> list[Any] | msgspec.Raw:
        """Its elements, flat, for msgspec to encode; ``in_pieces``, the JSON of its numbers: see ``numbers_to_json``.

        Raises ``NoResult`` for values that JSON cannot represent, ``ReplyTooLargeError`` for more than ``most``.
        """
        array = self.data
        if isinstance(array, list):
            try:
                return [element.decode() for element in array]
            except UnicodeDecodeError:
                raise NoResult(f"{self.name!r} is not UTF-8 text; ask for it with binary_data") from None
        array = self.numbers()
        check_finite(self.name, array, "; ask for it with binary_data")
        if in_pieces:
            return msgspec.Raw(numbers_to_json(array, most, hint))
        elements: list[Any] = array.ravel().tolist()
        return elements


def numbers(name: str, value: Any) -> tuple[str, np.ndarray]:
    """A Tensor or an array as its datatype and its elements; ``NoResult`` for a type that the protocol lacks."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "OSU":
            return BYTES, np.asarray(value).astype(object)
        array = to_array(name, value, OF_DTYPE)
        datatype = OF_DTYPE[dtype_name(array.dtype)]
        return datatype, array.view(np.uint16) if datatype == BF16 else array  # of ml_dtypes
    import torch

    if value.dtype == torch.bfloat16:
        return BF16, numpy_of(name, value.contiguous().view(torch.int16)).view(np.uint16)
    array = to_array(name, value, OF_DTYPE)
    return OF_DTYPE[dtype_name(array.dtype)], array


def texts(name: str, elements: Iterable[bytes], shape: Sequence[int] | None = None) -> Output:
    """A tensor of ``BYTES``, flat unless it has a ``shape``."""
    data = list(elements)
    return Output(name, BYTES, [len(data)] if shape is None else shape, data)
