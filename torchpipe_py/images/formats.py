"""The headers of WebP, BMP, GIF, TIFF and PNM files, as OpenCV reads them."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from torchpipe_py.errors import DecodeError, counted
from torchpipe_py.images.jpeg import Bytes


class Size(NamedTuple):
    """In pixels, and of a pixel the ``bits`` of each of the ``channels``."""

    width: int
    height: int
    channels: int = 3
    bits: int = 8


# -- WebP: https://developers.google.com/speed/webp/docs/riff_container ----------------------------------------------

_WEBP_CHUNKS = 64
"""Before the image, in an extended file: a profile, alpha, and unknown ones."""


def read_webp(data: Bytes) -> Size:
    """The size of a still image; ``DecodeError`` for an animation, or a canvas of another size than its image."""
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WEBP":
        raise DecodeError("WebP: its first 12 bytes are not those of a WebP")
    canvas, position = None, 12
    for _ in range(_WEBP_CHUNKS):
        kind, length = struct.unpack_from("<4sI", data, position)
        start, position = position + 8, position + 8 + length + length % 2
        if kind in (b"VP8 ", b"VP8L"):
            size = _lossy_size(data, start) if kind == b"VP8 " else _lossless_size(data, start)
            if canvas not in (None, size):
                raise DecodeError(
                    f"WebP: an image of {size[0]}x{size[1]} pixels on a canvas of {canvas[0]}x{canvas[1]}"
                )
            return Size(*size, channels=4)
        if kind in (b"ANIM", b"ANMF"):
            raise _animated()
        if kind == b"VP8X" and start == 20 and length == 10:
            flags, low_w, high_w, low_h, high_h = struct.unpack_from("<B3xHBHB", data, start)
            if flags & 0x02:
                raise _animated()
            canvas = 1 + low_w + (high_w << 16), 1 + low_h + (high_h << 16)
        elif canvas is None:
            raise DecodeError(f"WebP: it begins with a chunk {kind!r} of {length} bytes")
    raise DecodeError(f"WebP: no image in its first {_WEBP_CHUNKS} chunks")


def _animated() -> DecodeError:
    return DecodeError("WebP: animated files are not read; save one of the frames")


def _lossy_size(data: Bytes, start: int) -> tuple[int, int]:
    tag, code, width, height = struct.unpack_from("<B2x3sHH", data, start)
    if tag & 1 or code != b"\x9d\x01\x2a":
        raise DecodeError("WebP: its image is no key frame")
    return width & 0x3FFF, height & 0x3FFF


def _lossless_size(data: Bytes, start: int) -> tuple[int, int]:
    signature, bits = struct.unpack_from("<BI", data, start)
    if signature != 0x2F:
        raise DecodeError("WebP: its lossless image has no signature")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


# -- BMP -------------------------------------------------------------------------------------------------------------

_BMP_HEADERS = (40, 52, 56, 64, 108, 124)
_BMP_BITS = (1, 2, 4, 8, 16, 24, 32)


def read_bmp(data: Bytes) -> Size:
    """The size; a negative height, of rows from the top down, becomes positive. 12 bytes of header are OS/2's."""
    (length,) = struct.unpack_from("<I", data, 14)
    if length == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    elif length in _BMP_HEADERS:
        width, height, _, bits = struct.unpack_from("<iiHH", data, 18)
    else:
        raise DecodeError(f"BMP: a header of {length} bytes; known are 12, {', '.join(map(str, _BMP_HEADERS))}")
    if bits not in _BMP_BITS:
        raise DecodeError(f"BMP: {bits} bits for a pixel; known are {', '.join(map(str, _BMP_BITS))}")
    return Size(width, abs(height))


# -- GIF: https://www.w3.org/Graphics/GIF/spec-gif89a.txt ------------------------------------------------------------

_GIF_BLOCKS = 4096


def read_gif(data: Bytes) -> Size:
    """The size of the screen, on which the first frame must fit; of several frames only the first is decoded."""
    if bytes(data[:6]) not in (b"GIF87a", b"GIF89a"):
        raise DecodeError("GIF: its first 6 bytes are not those of a GIF")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    is_inside, position = False, 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    for _ in range(_GIF_BLOCKS):
        kind = data[position]
        if kind == 0x2C and not is_inside:  # a frame
            left, top, frame_w, frame_h = struct.unpack_from("<HHHH", data, position + 1)
            if left + frame_w > width or top + frame_h > height:
                raise DecodeError(f"GIF: a frame of {frame_w}x{frame_h} pixels leaves the screen of {width}x{height}")
            return Size(width, height, channels=4)
        if is_inside:
            is_inside, position = kind != 0, position + 1 + kind  # a block of that many bytes; the last has none
        elif kind == 0x21:  # an extension
            is_inside, position = True, position + 2
        else:
            raise DecodeError(f"GIF: a block of type {kind} at byte {position}")
    raise DecodeError(f"GIF: no frame in its first {_GIF_BLOCKS} blocks")


# -- TIFF 6.0 --------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _BITS, _CHANNELS, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 258, 277, 322, 323
_TIFF_TAGS = {_WIDTH, _HEIGHT, _BITS, _CHANNELS, _TILE_WIDTH, _TILE_HEIGHT}
_TIFF_ENTRIES = 1024
_TIFF_TILE = 4096
"""A side in pixels, above which a tile may not be larger than its image."""


def read_tiff(data: Bytes) -> Size:
    """The size of the first image."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(bytes(data[:4]))
    if order is None:
        raise DecodeError("TIFF: its first 4 bytes are not those of a TIFF of 32 bits")
    (directory,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, directory)
    if count > _TIFF_ENTRIES:
        raise DecodeError(f"TIFF: {count} tags, more than {_TIFF_ENTRIES}")
    tags = {_BITS: 1, _CHANNELS: 1, _TILE_WIDTH: 0, _TILE_HEIGHT: 0}
    seen = set()
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", data, entry)
        if tag not in _TIFF_TAGS:
            continue
        if tag in seen:
            raise DecodeError(f"TIFF: it has the tag {tag} twice")
        seen.add(tag)
        if kind not in (3, 4) or (values != 1 and tag != _BITS):
            raise DecodeError(f"TIFF: the tag {tag} holds {values} values of type {kind}")
        size = 2 if kind == 3 else 4
        place = entry + 8
        if values * size > 4:  # the bits of each channel, elsewhere
            (place,) = struct.unpack_from(order + "I", data, place)
        tags[tag] = max(
            struct.unpack_from(f"{order}{min(values, 8)}{'H' if kind == 3 else 'I'}", data, place), default=0
        )
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise DecodeError("TIFF: it does not say its size")
    if tags[_CHANNELS] > 4 or not 1 <= tags[_BITS] <= 64:
        raise DecodeError(f"TIFF: {counted(tags[_CHANNELS], 'channel')} of {tags[_BITS]} bits")
    width, height, tile_w, tile_h = (tags[tag] for tag in (_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT))
    if tile_w > max(width, _TIFF_TILE) or tile_h > max(height, _TIFF_TILE):
        raise DecodeError(f"TIFF: tiles of {tile_w}x{tile_h} pixels for an image of {width}x{height}")
    return Size(width, height, tags[_CHANNELS], tags[_BITS])


# -- PBM, PGM, PPM ---------------------------------------------------------------------------------------------------

# NOTE: a comment begins after white space: directly behind a number, OpenCV takes its sign for white space.
_PNM = re.compile(rb"P([1-6])\s(?:\s|#[^\r\n]*[\r\n])*(\d{1,9})\s(?:\s|#[^\r\n]*[\r\n])*(\d{1,9})\s")
_PNM_START = 2**12


def read_pnm(data: Bytes) -> Size:
    """The size that stands in the first 4 KiB, after comments."""
    found = _PNM.match(bytes(data[:_PNM_START]))
    if found is None:
        raise DecodeError("PNM: no size in its first 4 KiB")
    kind, width, height = map(int, found.groups())
    return Size(width, height, 3 if kind in (3, 6) else 1, 16)
