"""From a path to encoded bytes, and from those to a picture on the CPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from torchpipe_py.errors import DecodeError
from torchpipe_py.training.errors import UnreadableFile


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


def decode_rgb(encoded: bytes) -> Any:
    """An RGB ``PIL.Image`` with the pixels of ``DecodeMat``: ``cv2.imdecode``, upright by EXIF, 8 bits.

    ``DecodeError`` for bytes that are no image.
    """
    import cv2
    from PIL import Image

    mat = None
    try:
        mat = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error as error:
        raise DecodeError(f"{len(encoded)} bytes: {str(error).strip()}") from None
    if mat is None:
        raise DecodeError(f"{len(encoded)} bytes are no image OpenCV can read")
    return Image.fromarray(mat)
