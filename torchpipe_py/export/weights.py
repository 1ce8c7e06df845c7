"""Files of weights: what is in them, and whether it fits a module."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.export.errors import ExportError, one_line
from torchpipe_py.files import archive_kind, file_kind

STATE_KEYS = ("state_dict", "model", "model_state", "model_state_dict", "weights", "net")
"""Under which a checkpoint may have its state dict, the first of them that is there."""

PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DDP, ``torch.compile`` and Lightning put before every name."""

SAVED = (b"PK\x03\x04", b"\x80")
"""How files of ``torch.save`` begin: today's, and those from before PyTorch 1.6."""

SHOWN = 3


@dataclass(frozen=True)
class Weights:
    """A state dict; ``under`` names its key in the file, ``classes`` are the labels that a checkpoint has besides."""

    path: Path
    tensors: Mapping[str, Any]
    under: str = ""
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}[{self.under!r}]" if self.under else str(self.path)


def read_weights(path: Path) -> Weights:
    """What a file of ``torch.save`` holds, without running code; ``ExportError`` where that is no state dict."""
    content = _load(path)
    if not isinstance(content, Mapping) or not content:
        raise ExportError(f"{path}: holds a {type(content).__name__}; expected a state dict: {_how(path)}")
    if _is_state(content):
        return Weights(path, content)
    key = next((key for key in STATE_KEYS if _is_state(content.get(key))), None)
    if key is None:
        expected = ", ".join(map(repr, STATE_KEYS))
        raise ExportError(
            f"{path}: no state dict; it holds {_some(list(map(str, content)))}; "
            f"expected Tensors by name, or those under one of {expected}"
        )
    classes: Any = content.get("classes")
    if not isinstance(classes, (list, tuple)) or not all(isinstance(name, str) for name in classes):
        classes = ()
    return Weights(path, content[key], key, tuple(classes))


def count_classes(weights: Weights, shapes: Mapping[str, Sequence[int]], classes: int) -> int:
    """How many classes the weights are of, where the architecture of these ``shapes`` is built for ``classes``.

    It is the one size that stands in the file wherever a first dimension is ``classes`` and does not fit.
    """
    tensors = named_as(weights.tensors, shapes)
    sizes = {
        tensors[name].shape[0]
        for name, shape in shapes.items()
        if name in tensors
        and len(shape)
        and shape[0] == classes
        and tensors[name].shape[1:] == tuple(shape[1:])
        and len(tensors[name].shape) == len(shape)
    }
    return int(sizes.pop()) if len(sizes) == 1 else classes


def load_into(model: Any, weights: Weights, name: str, hint: str = "") -> None:
    """Give ``model``, which messages call ``name``, the weights; ``ExportError`` that says what does not fit."""
    wanted = model.state_dict()
    tensors = named_as(weights.tensors, wanted)
    problems = []
    missing, odd = [key for key in wanted if key not in tensors], [key for key in tensors if key not in wanted]
    if missing:
        problems.append(f"missing in the file: {_some(missing)}")
    if odd:
        problems.append(f"unexpected in it: {_some(odd)}")
    shapes = [
        f"{key} is {shown_dims(tensors[key].shape)} in the file and {shown_dims(wanted[key].shape)} in the model"
        for key in wanted
        if key in tensors and tensors[key].shape != wanted[key].shape
    ]
    if shapes:
        problems.append(_some(shapes))
    if problems:
        raise ExportError("\n".join(filter(None, [f"{weights}: does not fit {name}: {'; '.join(problems)}", hint])))
    model.load_state_dict(tensors)


def named_as(tensors: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors under the names that a module knows them by."""
    named = dict(tensors)
    while True:
        prefix = next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in named)), "")
        if not prefix or all(name.startswith(prefix) for name in wanted):
            return named
        named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}


def _load(path: Path) -> Any:
    import torch

    if not os.path.isfile(path):
        raise ExportError(f"{path}: no such file")
    try:
        with path.open("rb") as file:
            if not file.read(4).startswith(SAVED):
                kind = file_kind(path)
                raise ExportError(f"{path}: no file of torch.save{kind and f': {kind}'}")
        with suppress(zipfile.BadZipFile):
            if archive_kind(str(path)) not in ("checkpoint", ""):
                raise ExportError(f"{path}: TorchScript or a .pt2 file; the backend TorchTensor serves it as it is")
    except OSError as error:
        raise ExportError(f"{path}: {error.strerror}") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL `?([\w.]+)", str(error))
        if refused is None:
            raise ExportError(f"{path}: no file of torch.save") from error
        raise ExportError(
            f"{path}: holds more than Tensors: {refused[1]}, and to load it could run any code; {_how(path)}"
        ) from error
    except Exception as error:
        raise ExportError(f"{path}: no file of torch.save: {one_line(error)}") from error


def _how(path: Path) -> str:
    return f"save the weights alone: torch.save(model.state_dict(), {path.name!r})"


def _is_state(value: Any) -> bool:
    import torch

    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and isinstance(tensor, torch.Tensor) for key, tensor in value.items())
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
