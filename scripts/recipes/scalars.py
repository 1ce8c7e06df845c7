"""Numbers over time, for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchpipe_py.training.libraries import library


class Scalars:
    """Writes to ``folder``; without one nothing. ``TrainingError`` that says what to install, without tensorboard."""

    def __init__(self, folder: Path | None) -> None:
        self._writer: Any = None
        if folder is not None:
            module = library("torch.utils.tensorboard", "tensorboard", "--tensorboard")
            self._writer = module.SummaryWriter(str(folder))

    @property
    def are_wanted(self) -> bool:
        """Whether anybody sees them."""
        return self._writer is not None

    def add(self, step: int, **values: float) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
