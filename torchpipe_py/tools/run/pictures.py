"""Annotated pictures: their names, and how they are drawn and written."""

from __future__ import annotations

import errno
import os
import re
from hashlib import blake2b
from typing import Any

import numpy as np

from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.errors import NoResult
from torchpipe_py.files import replace_file
from torchpipe_py.streams.boxes import draw_boxes
from torchpipe_py.tools.report import ToolError

_KEPT = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MOST_BYTES = 190
_OF_NAME = (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of one picture: in a tar, ``a.png`` and ``a.png/b.png`` may both be there."""
_UNFINISHED = re.compile(r"\..*\.[0-9a-f]{32}\.tmp")


def picture_name(path: str, source: str, frame: int | None) -> str:
    """The name of an item's picture, relative to the folder of all pictures; another one for each item.

    Files of a folder keep their names below it, frames are ``VIDEO/000012.jpg``; the names of others are made of their
    paths or URLs.
    """
    inner = os.path.relpath(path, source) if path.startswith(os.path.join(source, "")) else path
    parts = [part for part in re.split(r"/+", inner.partition("://")[2] or inner) if part not in ("", ".")]
    safe = "/".join("_" if part == ".." else _shortened(re.sub(r"[\0-\x1f\x7f]", "_", part)) for part in parts) or "_"
    if frame is not None:
        return f"{_unlike(safe, inner)}/{frame:06}.jpg"
    is_kept = os.path.splitext(safe)[1].lower() in _KEPT
    return _unlike(safe if is_kept else f"{safe}.jpg", inner)


def _shortened(name: str) -> str:
    """The end of a name that is too long: a file system takes 255 bytes, and an unfinished file adds 50."""
    return os.fsdecode(os.fsencode(name)[-_MOST_BYTES:]) if len(os.fsencode(name)) > _MOST_BYTES else name


def _unlike(safe: str, given: str) -> str:
    """``safe``, with a hash if it differs from what was given, so that no two are the same."""
    if safe == given:
        return safe
    stem, suffix = os.path.splitext(safe)
    return f"{stem}-{blake2b(given.encode('utf-8', 'surrogatepass'), digest_size=4).hexdigest()}{suffix}"


def draw_picture(folder: str, name: str, source: Any, color: str, result: Any, decoders: Decoders) -> None:
    """Draw a result on its image, and write it to ``folder``; whoever reads it sees it whole.

    ``source`` are the bytes of an image, which ``decoders`` decode to BGR, or pixels H×W×3 ``uint8`` in the order of
    ``color``. Raises ``DecodeError``, ``NoResult`` if the image cannot be encoded or have this name, and ``ToolError``
    if no picture can be written, as on a full disk.
    """
    import cv2

    if isinstance(source, np.ndarray):
        image = source[..., ::-1] if color == "rgb" else source
    else:
        image = decoders.decode(source)
    drawn = draw_boxes(np.ascontiguousarray(image), result)
    path = os.path.join(folder, name)
    is_made, file = cv2.imencode(os.path.splitext(name)[1], drawn)
    if not is_made:
        raise NoResult(f"an image of {drawn.shape[1]}x{drawn.shape[0]} pixels cannot be written as {name}")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        replace_file(path, file.tobytes())
    except OSError as error:
        if error.errno in _OF_NAME:
            raise NoResult(f"its picture cannot be written as {name}: {error.strerror}") from error
        raise ToolError(f"{folder}: cannot be written: {error.strerror}; start it again to go on") from error


def remove_unfinished(folder: str) -> None:
    """Remove what killed processes left of unfinished pictures."""
    for place, _, names in os.walk(folder):
        for name in names:
            if _UNFINISHED.fullmatch(name):
                os.unlink(os.path.join(place, name))
