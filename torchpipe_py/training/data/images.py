"""Datasets of encoded images."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchpipe_py.images import find_images
from torchpipe_py.training.data.readers import cv2_loader
from torchpipe_py.training.errors import TrainingError


class ImageFiles:
    """A dataset of ``(encoded bytes, label)`` from a list of ``(path, label)``: ``samples``."""

    def __init__(self, samples: Sequence[tuple[Any, Any]], loader: Callable[[Any], bytes] = cv2_loader) -> None:
        self.samples, self._loader = list(samples), loader

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[bytes, Any]:
        path, label = self.samples[index]
        return self._loader(path), label


class ImageFolder(ImageFiles):
    """Images in a folder for each class, whatever lies deeper included: ``classes`` in the order of their names.

    As torchvision's ``ImageFolder(root, loader=cv2_loader)``, without torchvision. ``TrainingError`` for a folder
    without classes, or a class without images.
    """

    def __init__(self, root: str | os.PathLike[str], loader: Callable[[Any], bytes] = cv2_loader) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise TrainingError(f"{root}: no such folder (working directory: {os.getcwd()})")
        self.classes = sorted(one.name for one in self.root.iterdir() if one.is_dir())
        if not self.classes:
            raise TrainingError(f"{root}: no folder in it; expected one for each class")
        samples = []
        for number, name in enumerate(self.classes):
            try:
                samples += [(path, number) for path in sorted(map(str, find_images(self.root / name)))]
            except OSError as error:
                raise TrainingError(str(error)) from error
        super().__init__(samples, loader)
