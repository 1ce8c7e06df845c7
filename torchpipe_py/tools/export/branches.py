"""Where ``forward`` reads values of its pictures in Python: an exporter fixes these at the values of its example."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

ASSERT = "assert"
MOST_SHOWN = 3


@dataclass(frozen=True)
class Place:
    """A line of a module."""

    path: str
    line: int

    @property
    def code(self) -> str:
        return linecache.getline(self.path, self.line).strip()

    def __str__(self) -> str:
        path = os.path.relpath(self.path) if self.path.startswith(os.getcwd() + os.sep) else self.path
        return f"{path}:{self.line}: {self.code}" if self.code else f"{path}:{self.line}"


def listed_places(places: Iterable[Place]) -> str:
    """The first of the places, each once."""
    different = list(dict.fromkeys(places))
    more = f" and {len(different) - MOST_SHOWN} more" if len(different) > MOST_SHOWN else ""
    return "; ".join(map(str, different[:MOST_SHOWN])) + more


def places_that_read_values(model: Any, images: Any) -> list[Place]:
    """The lines that read values which depend on ``images``: as conditions, numbers, lists, or in comparisons.

    Sizes, and values of parameters and buffers, may be read: they are those of the file.
    """
    import torch

    places: list[Place] = []
    filled: list[Any] = []
    tensor = torch.Tensor
    reading = {
        *(tensor.__bool__, tensor.__int__, tensor.__float__, tensor.__index__, tensor.__complex__),
        *(tensor.item, tensor.tolist, tensor.numpy, tensor.__array__, tensor.__contains__),
        *(tensor.equal, tensor.allclose, torch.equal, torch.allclose, torch.is_nonzero, tensor.is_nonzero),
    }

    class Watched(torch.Tensor):  # type: ignore[misc]
        """A picture, and what is computed from it: the results of operators on it are of this class, too."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in reading:
                places.append(_caller(sys._getframe(1)))
            result = super().__torch_function__(func, types, args, kwargs or {})
            if args and type(args[0]) is tensor and _writes(getattr(func, "__name__", "")):
                args[0].__class__ = cls
                filled.append(args[0])
            return result

    try:
        with torch.no_grad():
            model(images.clone().as_subclass(Watched))
    finally:
        for each in filled:
            each.__class__ = tensor
    return list(dict.fromkeys(places))


def _writes(name: str) -> bool:
    """Whether a method of this name writes into its Tensor."""
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.startswith("__"))


def unresolved_branch(model: Any, images: Any) -> Place | None:
    """The line of the first branch that ``torch.export`` cannot resolve from sizes; ``None`` if there is none."""
    import torch

    try:
        with torch.no_grad():
            torch.export.export(model, (images,), strict=False)
    except Exception as error:
        if not any(word in f"{type(error).__name__} {error}" for word in ("DataDependent", "data-dependent")):
            return None  # something that it lacks
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = [frame for frame in frames if not _is_library(frame)]
        return Place(own[-1].f_code.co_filename, own[-1].f_lineno) if own else None
    return None


def _is_library(frame: FrameType) -> bool:
    """Whether its code is PyTorch's or of this package."""
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in ("torch", "torchpipe_py")


def _caller(frame: FrameType | None) -> Place:
    """The innermost line outside of PyTorch."""
    while frame is not None and frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    assert frame is not None
    return Place(frame.f_code.co_filename, frame.f_lineno)
