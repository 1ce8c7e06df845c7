"""Import of DALI, and errors of its pipelines in one line."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from time import monotonic
from typing import Any

from torchpipe_py.training import TrainingError

SEARCH_SECONDS = 60.0
"""Maximum time to search for the image that DALI could not decode, since DALI does not name it."""

DECODERS = ("decoders.image", "peek_image_shape")


def dali(name: str = "") -> Any:
    """The module ``nvidia.dali``, or ``.name`` in it; if it is missing, ``TrainingError`` says what to install."""
    try:
        return import_module(f"nvidia.dali{name}")
    except ImportError as error:
        raise TrainingError(f"NVIDIA DALI is not installed: pip install -e '.[dali]' ({error})") from error


def explained(error: RuntimeError, images: Iterable[tuple[str, Callable[[], bytes]]]) -> TrainingError:
    """The error of a pipeline as one line. ``images``: names, and functions that read their bytes."""
    text = str(error)
    operator = re.search(r"operator `nvidia\.dali\.fn\.([\w.]+)`", text)
    lines = text.partition("encountered:")[2].split("\n") if operator else text.split("\n")
    reason = next((line.strip() for line in lines if line.strip()), text)
    name = operator[1] if operator else "pipeline"
    if name not in DECODERS:
        return TrainingError(f"DALI's {name}: {reason}")
    return TrainingError(_first_bad(images) or f"DALI's {name}: {reason}, in an image that Pillow can decode")


def _first_bad(images: Iterable[tuple[str, Callable[[], bytes]]]) -> str:
    """The name of the first image that Pillow cannot decode either, and the reason; empty if there is none."""
    from PIL import Image

    ends = monotonic() + SEARCH_SECONDS
    for name, read in images:
        try:
            Image.open(io.BytesIO(read())).load()
        except Exception as error:  # Pillow raises a dozen kinds for damaged files
            reason = "not an image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
            return f"{name}: cannot be decoded: {reason}"
        if monotonic() > ends:
            return f"an image cannot be decoded; it is not {name}, nor one before it in the order of their names"
    return ""
