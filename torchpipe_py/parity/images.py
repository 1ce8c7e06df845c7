"""The images of a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from torchpipe_py.parity.record import ParityError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def find_images(img_dir: str) -> list[Path]:
    """All files below ``img_dir`` that are images by suffix, in any case, relative to it and sorted.

    Raises ``ParityError`` for a directory that is none, cannot be read or holds no image.
    """
    root = Path(img_dir)
    if not root.is_dir():
        raise ParityError(f"--img_dir {img_dir}: no such directory")
    found = []
    for folder, _, files in os.walk(root, onerror=_unreadable):
        names = [name for name in files if Path(name).suffix.lower() in SUFFIXES]
        found += [Path(folder, name).relative_to(root) for name in names]
    if not found:
        raise ParityError(f"--img_dir {img_dir}: no image in it (looked for {' '.join(SUFFIXES)})")
    return sorted(found)


def _unreadable(error: OSError) -> NoReturn:
    raise ParityError(f"--img_dir: {error.filename}: cannot be read: {error.strerror}") from None


def shown_name(path: Path) -> str:
    """The path with '/', on one line, and without what UTF-8 cannot say."""
    text = path.as_posix().encode("utf-8", "replace").decode("utf-8")
    return "".join(letter if letter.isprintable() else "?" for letter in text)
