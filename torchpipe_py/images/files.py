"""The image files of a folder, for all that read one."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import NoReturn

JPEG_SUFFIXES = (".jpg", ".jpeg")
IMAGE_SUFFIXES = (*JPEG_SUFFIXES, ".png", ".bmp", ".webp", ".tif", ".tiff")


def find_images(folder: str | os.PathLike[str], suffixes: Collection[str] = IMAGE_SUFFIXES) -> list[Path]:
    """All files below ``folder`` with one of the ``suffixes``, in any case, in the order of their paths.

    What is no file, a named pipe or a socket, is left out. Paths start with ``folder``. Raises ``OSError`` for a folder
    that is none, cannot be read or holds no image; the message is complete and begins with the folder's path.
    """
    if not os.path.isdir(folder):
        raise NotADirectoryError(f"{folder}: no such directory")
    paths = [Path(place, name) for place, _, names in os.walk(folder, onerror=_unreadable) for name in names]
    images = sorted(path for path in paths if path.suffix.lower() in suffixes and _is_readable(path))
    if not images:
        raise FileNotFoundError(f"{folder}: no image in it (looked for {' '.join(suffixes)})")
    return images


def label_of(path: PurePath, folder: PurePath) -> str:
    """The label of an image of ``find_images(folder)``: ``circle`` of ``circle/03.jpg`` and of ``circle_03.jpg``."""
    first, *others = path.relative_to(folder).parts
    return first if others else path.stem.rpartition("_")[0] or path.stem


def _is_readable(path: Path) -> bool:
    """Whether it is a file, or a link to one that is not there: of a pipe or a device, reading would not end."""
    # NOTE: os.path says no where pathlib raises, of a link to what may not be seen. Whoever reads it is told.
    return os.path.isfile(path) or not os.path.exists(path)


def _unreadable(error: OSError) -> NoReturn:
    raise PermissionError(f"{error.filename}: cannot be read: {error.strerror}") from error
