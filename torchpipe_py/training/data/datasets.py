"""Datasets of encoded images in files, and how a file is read and decoded on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchpipe_py.backends.image.decode import MatDecoder
from torchpipe_py.backends.image.files import find_images
from torchpipe_py.training.errors import TrainingError, UnreadableFile


def cv2_loader(path: str | os.PathLike[str]) -> bytes:
    """The file's bytes, not decoded; for a dataset's ``loader``: ``ImageFolder(root, loader=cv2_loader)``.

    ``UnreadableFile`` (an ``OSError``), naming the file, where it cannot be read or is empty.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            encoded = file.read()
    except OSError as error:
        raise UnreadableFile(f"{name}: cannot be read: {error.strerror or error}") from None
    if not encoded:
        raise UnreadableFile(f"{name}: the file is empty")
    return encoded


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
        self.classes = sorted(folder.name for folder in self.root.iterdir() if folder.is_dir())
        if not self.classes:
            raise TrainingError(f"{root}: no folder in it; expected one for each class")
        samples = []
        for number, name in enumerate(self.classes):
            try:
                samples += [(path, number) for path in sorted(map(str, find_images(self.root / name)))]
            except OSError as error:
                raise TrainingError(str(error)) from error
        super().__init__(samples, loader)


def decode_rgb(encoded: bytes) -> Any:
    """An RGB ``PIL.Image`` with the pixels of ``DecodeMat``: ``cv2.imdecode``, upright by EXIF, 8 bits.

    ``DecodeError`` for bytes that are no image.
    """
    from PIL import Image

    return Image.fromarray(MatDecoder("rgb")(encoded))
