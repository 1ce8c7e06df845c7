"""The images of a directory, found and labelled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchpipe_py.images import find_images
from torchpipe_py.loadtest.errors import CannotRunError


@dataclass(frozen=True)
class Payload:
    """What all clients send: a body for each image, and the label expected for it, or None where none is known."""

    bodies: list[bytes]
    labels: list[str | None]


def load_images(directory: Path, labelled: bool) -> Payload:
    """The images below ``directory`` as they are; ``CannotRunError`` where there is none, or one cannot be read."""
    try:
        paths = find_images(directory)
    except OSError as error:
        raise CannotRunError(f"--img_dir {error}") from error
    labels = [label_from_name(path) if labelled else None for path in paths]
    return Payload([read_image(path) for path in paths], labels)


def read_image(path: Path) -> bytes:
    """The encoded bytes of one image; ``CannotRunError`` when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CannotRunError(f"{path}: cannot be read: {error.strerror}") from error


def label_from_name(path: Path) -> str:
    """The file's name up to its last underscore: ``circle_03.jpg`` is ``circle``; without one, the whole stem."""
    return path.stem.rpartition("_")[0] or path.stem
