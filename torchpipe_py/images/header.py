"""What an image's header says, checked before a decoder sees the bytes: a decoder allocates what a header declares."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from torchpipe_py.errors import DecodeError, nearest
from torchpipe_py.images.formats import read_bmp, read_gif, read_pnm, read_tiff, read_webp
from torchpipe_py.images.jpeg import MAX_PASSES, MAX_SCANS, PROGRESSIVE, Bytes, JpegHeader
from torchpipe_py.images.png import read_ihdr, read_png
from torchpipe_py.values import Value, to_strings

MAX_PIXELS = 2**26
"""67 megapixels: the photo of a phone with 50 passes."""

FORMATS = ("jpeg", "png", "webp", "bmp")
"""Those that are read unless a configuration names others."""


def is_large(pixels: int, max_pixels: int) -> bool:
    """Whether an image may take seconds where others take milliseconds."""
    return 4 * pixels > max_pixels


class ImageHeader(NamedTuple):
    """``width`` and ``height`` in pixels as stored, ``bits`` of each of the ``channels``.

    ``frames`` are those that are decoded, ``scans`` the passes over all pixels. ``memory`` is what decoding to three
    channels of 8 bits takes at the most, in bytes.
    """

    format: str
    width: int
    height: int
    channels: int
    bits: int
    frames: int
    scans: int
    memory: int


class Size(Protocol):
    """What a header says at its beginning."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...


ReadHeader = Callable[[Bytes, "Size | None"], ImageHeader]
"""Bytes, and what was read of their size if that was."""


def _read_jpeg(data: Bytes, start: Size | None = None) -> ImageHeader:
    jpeg = start if isinstance(start, JpegHeader) else JpegHeader(data)
    scans = jpeg.scans(data)
    # What is decoded in several passes is kept in coefficients of 16 bits.
    # NOTE: else cv2.imdecode has the pixels twice at its end, since it copies them into an array.
    bytes_each = 6 if scans == 1 and jpeg.frame != PROGRESSIVE else max(6, 3 + 2 * jpeg.components)
    memory = jpeg.width * jpeg.height * bytes_each
    return ImageHeader("jpeg", jpeg.width, jpeg.height, jpeg.components, 8, 1, scans, memory)


def _reader(name: str, read: Callable[[Bytes], Any]) -> ReadHeader:
    def read_header(data: Bytes, start: Size | None = None) -> ImageHeader:
        width, height, channels, bits = read(data)
        memory = width * height * (3 + max(4, channels * bits // 8))
        return ImageHeader(name, width, height, channels, bits, 1, 1, memory)

    return read_header


class _Format(NamedTuple):
    name: str
    shown: str
    starts: tuple[bytes, ...]
    read: ReadHeader
    read_size: Callable[[Bytes], Size]
    """Only as far as ``width`` and ``height``."""


# Only what has a reader here can be named in a configuration.
_FORMATS = {
    entry.name: entry
    for entry in (
        _Format("jpeg", "JPEG", (b"\xff\xd8",), _read_jpeg, JpegHeader),
        _Format("png", "PNG", (b"\x89P",), _reader("png", read_png), read_ihdr),
        _Format("webp", "WebP", (b"RI",), _reader("webp", read_webp), read_webp),
        _Format("bmp", "BMP", (b"BM",), _reader("bmp", read_bmp), read_bmp),
        _Format("gif", "GIF", (b"GI",), _reader("gif", read_gif), read_gif),
        _Format("tiff", "TIFF", (b"II", b"MM"), _reader("tiff", read_tiff), read_tiff),
        _Format("pnm", "PNM", tuple(b"P%d" % kind for kind in range(1, 7)), _reader("pnm", read_pnm), read_pnm),
    )
}
_BY_START = {start: entry for entry in _FORMATS.values() for start in entry.starts}


def to_formats(value: Value) -> tuple[str, ...]:
    """Names of formats, from a list or from ``"jpeg, png"``; ``ValueError`` for one that is not known, or for none."""
    names = tuple(name.lower() for name in to_strings(value))
    for name in names:
        if name not in _FORMATS:
            raise ValueError(f"no image format {name!r} can be read here; {nearest(name, _FORMATS)}")
    if not names:
        raise ValueError(f"expected at least one of {', '.join(_FORMATS)}")
    return names


class HeaderCheck:
    """Reads headers, and refuses images by them: what is not of ``formats``, or has more than ``max_pixels``."""

    def __init__(self, formats: Sequence[str] = FORMATS, max_pixels: int = MAX_PIXELS) -> None:
        self._formats, self.max_pixels = tuple(formats), max_pixels
        self._readers = {start: _FORMATS[name].read for name in formats for start in _FORMATS[name].starts}

    def __call__(self, data: Bytes, start: Size | None = None) -> ImageHeader:
        """The header, in time that grows no faster than the bytes; ``DecodeError`` that names the bound.

        ``start`` is what ``declared_size`` has read of the same bytes.
        """
        read = self._readers.get(bytes(data[:2]))
        if read is None:
            raise DecodeError(f"{len(data)} bytes are no image of formats {', '.join(self._formats)}{_known(data)}")
        try:
            header = read(data, start)
        except (struct.error, IndexError):
            shown = _BY_START[bytes(data[:2])].shown
            raise DecodeError(f"{len(data)} bytes: {shown}: cut off in its header") from None
        except DecodeError as error:
            raise DecodeError(f"{len(data)} bytes: {error}") from None
        _, width, height, _, _, _, scans, _ = header
        if not 0 < width * height <= self.max_pixels or width < 0:
            raise DecodeError(f"{len(data)} bytes: {self._wrong_size(header)}")
        if scans > MAX_SCANS:
            raise DecodeError(f"{len(data)} bytes: a JPEG of more than {MAX_SCANS} scans, each a pass over all pixels")
        if scans > 1 and scans * width * height > MAX_PASSES * self.max_pixels:
            work = f"{scans} scans of {width}x{height} pixels"
            limit = f"{MAX_PASSES} times max_pixels = {self.max_pixels}"
            raise DecodeError(f"{len(data)} bytes: a JPEG of {work}, together more than {limit}")
        return header

    def _wrong_size(self, header: ImageHeader) -> str:
        size = f"a {_FORMATS[header.format].shown} of {header.width}x{header.height} pixels"
        if header.width <= 0 or header.height <= 0:
            return size
        return f"{size}, more than max_pixels = {self.max_pixels}"


def declared_size(data: object) -> Size | None:
    """What the header of encoded bytes says at its beginning; read in microseconds.

    ``None`` where it cannot be told: such an image is refused anyway.
    """
    if isinstance(data, np.ndarray):
        data = data.data if data.ndim == 1 and data.dtype == np.uint8 else b""
    if not isinstance(data, (bytes, bytearray, memoryview)) or (entry := _BY_START.get(bytes(data[:2]))) is None:
        return None
    try:
        return entry.read_size(data)
    except (struct.error, IndexError, DecodeError):
        return None


def _known(data: Bytes) -> str:
    known = _BY_START.get(bytes(data[:2]))
    if known:
        return f"; they look like {known.shown}, which DecodeMat reads where its 'formats' name it"
    if bytes(data[4:8]) == b"ftyp":
        return "; they look like HEIC, AVIF or a video, which are not read; save the image as JPEG"
    if bytes(data[:5]).startswith(_BASE64):
        return '; they look like base64: decode it first, or send it as JSON, {"inputs": {"data": {"b64": "…"}}}'
    if bytes(data[:1]) == b"{":
        return "; they look like JSON, which over HTTP has the header Content-Type: application/json"
    return ""


_BASE64 = (b"/9j/", b"iVBOR", b"UklGR", b"data:")
"""How JPEG, PNG and WebP begin in it, and URLs that hold it."""
