"""The header of a JPEG file (ITU-T T.81, annex B), read before the bytes go to a decoder that says little."""

from __future__ import annotations

import struct
from typing import NamedTuple

from torchpipe_py.errors import DecodeError

MAX_PIXELS = 2**30  # cv2.imdecode's own bound
ORIENTATION = 0x0112  # the EXIF tag

_EOI, _SOS, _APP1, _APP14 = 0xD9, 0xDA, 0xE1, 0xEE
_PROGRESSIVE = 0xC2
_RESTART_INTERVAL = b"\xff\xdd"
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # C4, C8, CC are no frames but tables
_HUFFMAN_DCT = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended, progressive


class JpegHeader(NamedTuple):
    """Size in pixels as stored, number of color components, and the EXIF orientation 1..8 (1: as stored)."""

    width: int
    height: int
    components: int
    orientation: int


def read_header(data: bytes) -> JpegHeader:
    """The header; ``DecodeError`` for what is no JPEG, is cut off, or is of a kind hardware decoders do not take."""
    if data[:2] != b"\xff\xd8":
        raise DecodeError(f"{len(data)} bytes are no JPEG{_known_format(data)}")
    frame, kind, transform, orientation, position = None, 0, 1, 1, 2
    try:
        while True:
            if data[position] != 0xFF:
                raise DecodeError(f"JPEG: no marker at byte {position}")
            marker = data[position + 1]
            if marker == 0xFF:  # a fill byte
                position += 1
                continue
            position += 2
            if marker in _STANDALONE:
                continue
            if marker == _EOI:
                raise DecodeError("JPEG: it ends before the image data")
            (length,) = struct.unpack_from(">H", data, position)
            if marker == _SOS:
                break
            if marker in _FRAMES:
                frame, kind = _read_frame(data, position, marker), marker
            elif marker == _APP14 and data[position + 2 : position + 7] == b"Adobe":
                transform = data[position + 13]
            elif marker == _APP1 and data[position + 2 : position + 8] == b"Exif\0\0":
                orientation = _read_orientation(data[position + 2 : position + length])
            position += length
    except (IndexError, struct.error):
        raise DecodeError(f"JPEG: cut off in its header, after {len(data)} bytes") from None
    if frame is None:
        raise DecodeError("JPEG: no frame header before the image data")
    if data.rfind(b"\xff\xd9", position) < 0:
        raise DecodeError(f"JPEG: cut off after {len(data)} bytes, there is no end marker")
    if kind == _PROGRESSIVE and _RESTART_INTERVAL in data:
        # NOTE: nvJPEG (CUDA 13.0, H200) decodes these wrongly without a word; `torchpipe parity` showed it.
        raise DecodeError("JPEG: progressive with restart markers is not supported on the GPU")
    if frame[2] == 3 and transform == 0:
        raise DecodeError("JPEG: colors stored as RGB, not YCbCr, are not supported on the GPU")
    return JpegHeader(*frame, orientation)


def _read_frame(data: bytes, position: int, marker: int) -> tuple[int, int, int]:
    """Width, height and components from a frame header."""
    _, precision, height, width, components = struct.unpack_from(">HBHHB", data, position)
    if marker not in _HUFFMAN_DCT or precision != 8:
        raise DecodeError(f"JPEG: a frame of type SOF{marker - 0xC0} with {precision} bits is not supported")
    if components not in (1, 3):
        kind = " (CMYK)" if components == 4 else ""
        raise DecodeError(f"JPEG: {components} color components{kind} are not supported on the GPU")
    if not width or not height:
        raise DecodeError(f"JPEG: an image of {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise DecodeError(f"JPEG: {width}x{height} pixels, more than 2**30")
    return width, height, components


def _read_orientation(segment: bytes) -> int:
    """The EXIF orientation; 1 where the segment does not say or makes no sense."""
    from PIL import Image

    exif = Image.Exif()
    try:
        exif.load(segment)
        value = exif.get(ORIENTATION, 1)
    except Exception:
        return 1  # as OpenCV does: damaged metadata, but a good image
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _known_format(data: bytes) -> str:
    for start, name in ((b"\x89PNG", "PNG"), (b"BM", "BMP"), (b"RIFF", "WebP"), (b"GIF8", "GIF"), (b"II*\0", "TIFF")):
        if data.startswith(start):
            return f", they look like {name}"
    return ""
