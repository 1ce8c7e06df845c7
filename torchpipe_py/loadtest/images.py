"""The images of a directory, found and labelled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchpipe_py.loadtest.errors import CannotRunError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})


@dataclass(frozen=True)
class Payload:
    """What all clients send: a body for each image, and the label expected for it, or None where none is known."""

    bodies: list[bytes]
    labels: list[str | None]


def load_images(directory: Path, labelled: bool) -> Payload:
    """The images below ``directory`` as they are; ``CannotRunError`` where there is none, or one cannot be read."""
    paths = find_images(directory)
    labels = [label_from_name(path) if labelled else None for path in paths]
    return Payload([read_image(path) for path in paths], labels)


def find_images(directory: Path) -> list[Path]:
    """All files below ``directory`` that are images by suffix, in any case, in the order of their paths.

    Raises ``CannotRunError`` when there is no such directory, or no image in it.
    """
    if not directory.is_dir():
        raise CannotRunError(f"--img_dir {directory}: no such directory")
    paths = sorted(path for path in directory.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())
    if not paths:
        suffixes = " ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
        raise CannotRunError(f"--img_dir {directory}: no image in it (looked for {suffixes})")
    return paths


def read_image(path: Path) -> bytes:
    """The encoded bytes of one image; ``CannotRunError`` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CannotRunError(f"{path}: cannot be read: {error.strerror}") from error


def label_from_name(path: Path) -> str:
    """The file's name up to its last underscore: ``circle_03.jpg`` is ``circle``; without one, the whole stem."""
    return path.stem.rpartition("_")[0] or path.stem
