"""Decoding by Pillow, of files that OpenCV reads with other pixels or not at all."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from torchpipe_py.errors import BackendUnavailable, DecodeError, first_line

_PLUGINS = {
    **{
        kind.lower(): (f"PIL.{kind}ImagePlugin", f"{kind}ImageFile")
        for kind in ("Jpeg", "Png", "Bmp", "Gif", "Tiff", "Avif")
    },
    "heic": ("pi_heif", "HeifImageFile"),
}
"""For each format the module and the class that read it."""

_TURN_THEMSELVES = ("tiff", "heic", "avif")

_STRIP = 2**18
"""Pixels that are converted at a time, so that no second copy of the image is made."""


class PillowDecoder:
    """Decodes images of ``formats`` to the pixels of Pillow's ``convert("RGB")``; of 16 bits the upper 8 count.

    Takes at most eight bytes for a pixel, 14 of HEIC and AVIF. It imports nothing after its construction and opens no
    file.
    """

    def __init__(self, formats: Sequence[str]) -> None:
        # NOTE: TiffImagePlugin reads EXIF. It is imported here, since an isolated decoder opens no file later.
        from PIL import ImageOps, TiffImagePlugin  # noqa: F401

        # NOTE: not Image.open, which tries other formats, and has a limit of its own beside max_pixels.
        self._readers: dict[str, Callable[[io.BytesIO], Any]] = {}
        for format in formats:
            if format in _PLUGINS:
                self._readers[format] = _reader(format)
        self._transpose: Any = ImageOps.exif_transpose

    def __call__(self, format: str, encoded: bytes) -> np.ndarray:
        """A Mat H×W×3 ``uint8`` RGB, as stored; TIFF, HEIC and AVIF are turned upright. Raises ``DecodeError``."""
        try:
            image = self._readers[format](io.BytesIO(encoded))
            image.load()
            if format in _TURN_THEMSELVES:  # in part, depending on Pillow's version
                with suppress(SyntaxError):  # damaged EXIF
                    self._transpose(image, in_place=True)
            return _rgb(image)
        except DecodeError:
            raise
        except Exception as error:  # a file may be broken in any way
            raise DecodeError(f"{len(encoded)} bytes: Pillow: {first_line(error)}") from None


def _reader(format: str) -> Callable[[io.BytesIO], Any]:
    """The class that reads a format; ``BackendUnavailable`` if it is not installed."""
    module, name = _PLUGINS[format]
    try:
        plugin = importlib.import_module(module)
    except ImportError as error:
        package = "'torchpipe_py[heif]'" if format == "heic" else "'pillow>=11.3'"
        raise BackendUnavailable(f"formats with {format} need {module} (pip install {package}): {error}") from error
    if not getattr(plugin, "SUPPORTED", True):
        raise BackendUnavailable(f"this build of Pillow cannot read {format.upper()}")
    return getattr(plugin, name)  # type: ignore[no-any-return]


def _rgb(image: Any) -> np.ndarray:
    """The pixels of a loaded image."""
    width, height = image.size
    mat = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        if image.mode in ("I;16", "I;16L", "I;16B"):
            mat[top : top + rows] = (np.asarray(strip) >> 8).astype(np.uint8)[:, :, None]
        elif image.mode in ("I", "F"):
            raise DecodeError(f"{image.format}: pixels of 32 bits are not read")
        else:
            mat[top : top + rows] = np.asarray(strip.convert("RGB"))
    return mat
