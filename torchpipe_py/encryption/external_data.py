"""ONNX models whose weights lie in files beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def outside_files(model: Any) -> list[str]:
    """The files beside an ``onnx.ModelProto`` that hold some of its tensors."""
    outside = (tensor for tensor in _tensors(model) if tensor.data_location == tensor.EXTERNAL)
    return sorted({entry.value for tensor in outside for entry in tensor.external_data if entry.key == "location"})


def _tensors(message: Any) -> Iterator[Any]:
    """Each ``onnx.TensorProto`` in it, however deep."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in (value,) if hasattr(value, "ListFields") else value:
            if field.message_type.name == "TensorProto":
                yield part
            yield from _tensors(part)
