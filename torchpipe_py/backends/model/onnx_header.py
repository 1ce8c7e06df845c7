"""What an ONNX file says of its input and output, read in milliseconds and without the library.

All else in it is stepped over.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

# Of onnx.proto.
_GRAPH, _INITIALIZER, _INITIALIZER_NAME, _INPUT, _OUTPUT = 7, 5, 8, 11, 12
_NAME, _DIM_VALUE = 1, 1
_SHAPE = (2, 1, 2)  # of an input or output: its type, that of a tensor, its shape
_DIM = 1

Span = tuple[int, int]
"""Where something begins and ends in the file."""


def input_channels(path: str) -> int | None:
    """C of the input N×C×H×W, where a model has this one input and says its C; else ``None``, as for no ONNX file."""
    dims = only_input(path)[1]
    return None if len(dims) != 4 or has_channels_last(dims) else dims[1] or None


def has_channels_last(dims: Sequence[int]) -> bool:
    """Whether four sizes look like N×H×W×C."""
    return dims[3] in (1, 3, 4) and dims[1] not in (1, 3, 4)


def only_input(path: str) -> tuple[str, list[int]]:
    """Name and sizes of the only input, 0 for any size; no sizes where there are others, or for no ONNX file."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _input(content)
    except (OSError, ValueError, IndexError):  # it is empty, cut off, or something else
        return "", []


def first_output(path: str) -> list[int]:
    """Sizes of the first output, 0 for any size; empty where it does not say them, or for no ONNX file."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            (graph,) = _parts(content, (0, len(content)), _GRAPH)
            return _sizes(content, _parts(content, graph, _OUTPUT)[0])
    except (OSError, ValueError, IndexError):
        return []


def _input(content: mmap.mmap) -> tuple[str, list[int]]:
    (graph,) = _parts(content, (0, len(content)), _GRAPH)
    inputs = _parts(content, graph, _INPUT)
    if len(inputs) > 1:  # in old files the weights are among them
        constants = {_text(content, part, _INITIALIZER_NAME) for part in _parts(content, graph, _INITIALIZER)}
        inputs = [part for part in inputs if _text(content, part, _NAME) not in constants]
    if len(inputs) != 1:
        return "", []
    (given,) = inputs
    return _text(content, given, _NAME).decode(), _sizes(content, given)


def _sizes(content: mmap.mmap, value: Span) -> list[int]:
    shape = value
    for number in _SHAPE:
        (shape,) = _parts(content, shape, number)
    return [_size(content, dim) for dim in _parts(content, shape, _DIM)]


def _text(content: mmap.mmap, message: Span, number: int) -> bytes:
    return b"".join([content[start:end] for start, end in _parts(content, message, number)])


def _size(content: mmap.mmap, dim: Span) -> int:
    size = sum(_varint(content, start)[0] for start, _ in _parts(content, dim, _DIM_VALUE))
    return size if size < 2**63 else 0  # some exporters write -1 for any, which ONNX Runtime takes for that


def _parts(content: mmap.mmap, message: Span, number: int) -> list[Span]:
    """The fields of a message that have this number."""
    return [span for found, span in _fields(content, message) if found == number]


def _fields(content: mmap.mmap, message: Span) -> Iterator[tuple[int, Span]]:
    """Numbers and contents of a message's fields. ``ValueError`` and ``IndexError`` where it is none of protobuf's."""
    at, end = message
    while at < end:
        tag, start = _varint(content, at)
        kind = tag & 7
        if kind == 2:
            length, start = _varint(content, start)
            at = start + length
        elif kind == 0:
            at = _varint(content, start)[1]
        elif kind in (1, 5):
            at = start + (8 if kind == 1 else 4)
        else:
            raise ValueError(f"a field of type {kind}")
        if at > end:
            raise ValueError("a field that ends after its message")
        yield tag >> 3, (start, at)


def _varint(content: mmap.mmap, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 64, 7):
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")
