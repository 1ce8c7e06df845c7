"""Pipes on a Ray cluster: ``app`` and ``PipeDeployment`` for Ray Serve, ``PipeMapper`` for Ray Data.

Nothing of Ray is imported before one of the names is used.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["PipeDeployment", "PipeMapper", "add_inference", "app"]

_MODULES = {"PipeDeployment": "serve", "PipeMapper": "data", "add_inference": "serve", "app": "serve"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(f"{__name__}.{name} needs Ray (pip install 'torchpipe_py[ray]'): {error}") from error
    return getattr(module, name)
