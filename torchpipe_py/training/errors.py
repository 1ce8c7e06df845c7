"""Errors of the training side, and the import of optional libraries."""

from __future__ import annotations

import importlib
from typing import Any

from torchpipe_py.errors import TorchpipeError


class TrainingError(TorchpipeError, RuntimeError):
    """Base class of this package's errors; raised itself if a loader is used or composed wrongly."""

    code = "training"


class UnreadableFile(TrainingError, OSError):
    """A file that cannot be read, or is empty; the message names it."""

    code = "unreadable_file"


class BadSample(TrainingError, ValueError):
    """A sample without an image, under ``bad_samples = "raise"``: ``index`` in the dataset, ``kind``, ``reason``."""

    code = "bad_sample"

    def __init__(self, index: int, name: str, kind: str, reason: str) -> None:
        super().__init__(f'{name}: {kind}: {reason} (bad_samples="skip" or "mask" goes on without it)')
        self.index, self.kind, self.reason = index, kind, reason
        self._name = name

    def __reduce__(self) -> tuple[type[BadSample], tuple[int, str, str, str]]:
        return BadSample, (self.index, self._name, self.kind, self.reason)


class PeerFailed(TrainingError):
    """Another rank stopped with an error, which the message quotes; this rank stops at the same step."""

    code = "peer_failed"


def library(name: str, package: str, purpose: str) -> Any:
    """Import the module ``name``; if it is missing, ``TrainingError`` explains what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TrainingError(f"{purpose} needs {package} (pip install {package}): {error}") from error
