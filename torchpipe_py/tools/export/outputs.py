"""The outputs of a network by name, also of one that returns dicts and nested tuples, which an ONNX file has not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torchpipe_py.tools.report import ToolError

Path = tuple[str, ...]
"""Keys and indices that lead to an output; empty for a network that returns one Tensor."""


def tensors_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The Tensors in what ``forward`` returns, in its order. ``ToolError`` for anything else but ``None`` in it."""
    import torch

    if isinstance(value, torch.Tensor):
        yield path, value
        return
    parts: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (tuple, list)):
        parts = [(str(index), part) for index, part in enumerate(value)]
    elif is_dataclass(value):
        parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        where = f", as output {shown(path)}" if path else ""
        raise ToolError(
            f"forward returns a {type(value).__name__}{where}; expected Tensors, or dicts and tuples of them"
        )
    for name, part in parts:
        if part is not None:
            yield from tensors_of(part, (*path, name))


def shown(path: Path) -> str:
    """An output's place for messages; that of the only Tensor is 0."""
    return ".".join(path) or "0"


def has_names(places: Iterable[str]) -> bool:
    """Whether outputs at these places have keys, or are nested."""
    return not all(place.isdigit() for place in places)


def names_of(places: Sequence[str]) -> list[str]:
    """A name in the ONNX file for each output: its keys, ``output_1`` if it has just an index, ``logits`` if alone."""
    if len(places) == 1 and not has_names(places):
        return ["logits"]
    names: list[str] = []
    for place in places:
        name = re.sub(r"\W", "_", place)
        name = f"output_{name}" if name[:1].isdigit() else name
        while name in names or name in ("", "input"):
            name += "_"
        names.append(name)
    return names


def flat(model: Any) -> Any:
    """A module that returns the Tensors of what ``model`` returns as a tuple."""
    import torch

    class Flat(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: Any) -> Any:
            return tuple([tensor for _, tensor in tensors_of(self.model(images))])

    return Flat().eval()
