"""Models of the user's own code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torchpipe_py.errors import nearest
from torchpipe_py.export.errors import ExportError, one_line
from torchpipe_py.export.source import PRETRAINED, UNTRAINED, Source
from torchpipe_py.export.transforms import Transform
from torchpipe_py.export.weights import load_into, read_weights
from torchpipe_py.registry import import_code


def find_module(name: str, weights: str | None, transform: Transform, origin: str) -> Source:
    """What ``module:function`` or ``file.py:function`` returns, with the weights of a file if one is given.

    The module is found as ``--import`` finds one; ``ConfigError`` where it cannot be imported, ``ExportError`` else.
    """
    module_name, _, function_name = name.rpartition(":")
    module = import_code(module_name)
    if not hasattr(module, function_name):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ExportError(f"{module_name} has no {function_name!r}; {nearest(function_name, names)}")
    model = _called(name, getattr(module, function_name))
    if weights is None:
        return Source(function_name, model, "its own weights", transform, origin)
    if weights in (PRETRAINED, UNTRAINED):
        raise ExportError(f"--weights {weights}: only of torchvision's; give a file, or let {function_name} load them")
    loaded = read_weights(Path(weights))
    load_into(model, loaded, name, f"{function_name} must build the model that the file was saved from")
    return Source(function_name, model, f"weights of {loaded}", transform, origin, loaded.classes)


def _called(name: str, function: Any) -> Any:
    """The module that it returns, on the CPU and in float32; a module itself is taken as it is.

    What ``torch.compile`` and the parallel wrappers put around it is taken away: no exporter takes them.
    """
    import torch

    try:
        model = function if isinstance(function, torch.nn.Module) else function()
    except Exception as error:
        needed = [
            one.name
            for one in (inspect.signature(function).parameters.values() if callable(function) else ())
            if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        why = f"it is called without arguments, and needs {', '.join(needed)}" if needed else one_line(error)
        raise ExportError(f"{name}: {why}") from error
    if not isinstance(model, torch.nn.Module):
        raise ExportError(f"{name}: returns a {type(model).__name__}; expected a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        model = model.module
    return model.cpu().float().eval()
