"""Optional libraries, looked for when they are used."""

from __future__ import annotations

import importlib
from typing import Any

from torchpipe_py.training.errors import TrainingError


def library(name: str, package: str, purpose: str) -> Any:
    """The module ``name``; ``TrainingError`` that says what to install where there is none."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrainingError(f"{purpose} needs {package} (pip install {package}): {error}") from error
