"""Reads headers of TIFF files (TIFF 6.0): of which size the first image is, and which decoder reads it right."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import numpy as np

from torchpipe_py.backends.image.formats import Bytes, ImageHeader
from torchpipe_py.errors import DecodeError, counted

TIFF_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
"""Byte orders, by the first 4 bytes."""

_WIDTH, _HEIGHT, _BITS, _COLORS, _CHANNELS, _PLANES, _TILE_WIDTH, _TILE_HEIGHT = _TAGS = (
    256, 257, 258, 262, 277, 284, 322, 323,
)  # fmt: skip
_ONCE = {*_TAGS, 259, 273, 274, 278, 279, 317, 320, 324, 325, 338, 339}
"""Tags that the pixels depend on. Of two, Pillow before version 13 takes the last, Pillow 13 and libtiff the first."""
_DEPTHS = (1, 2, 4, 8, 16)
_SEPARATE = 2  # planes, one for each channel
_BY_OPENCV = {(0, 1), (1, 1), (0, 2), (1, 2), (2, 3)}
"""Kinds of colors and numbers of channels of images of 16 bits: gray, also with alpha, and RGB."""
_TIFF_ENTRIES = 1024
_TIFF_TILE = 4096
"""A side in pixels, above which a tile may not be larger than its image."""


def tiff_entries(data: Bytes, order: str, most: int = 2**16) -> Iterator[tuple[int, int, int, int]]:
    """Tag, type, number of values and place of these, or of their address, of each entry of the first directory."""
    (directory,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, directory)
    if count > most:
        raise DecodeError(f"TIFF: {count} tags, more than {most}")
    for entry in range(directory + 2, directory + 2 + 12 * count, 12):
        yield *struct.unpack_from(order + "HHI", data, entry), entry + 8


class TiffHeader(ImageHeader):
    """A TIFF, whose decoders turn it themselves."""

    def __init__(self, tags: Mapping[int, int]) -> None:
        super().__init__("tiff", tags[_WIDTH], tags[_HEIGHT], tags.get(_CHANNELS, 1), tags.get(_BITS, 1))
        # OpenCV multiplies colors of 8 bits with alpha. Pillow does not read all kinds of 16 bits.
        # NOTE: of separate planes of 16 bits, and of RGB with one channel, OpenCV leaves most pixels as they were in
        # memory: those of other images.
        is_separate = self.channels > 1 and tags.get(_PLANES, 1) == _SEPARATE
        is_by_opencv = self.bits == 16 and (tags.get(_COLORS), self.channels) in _BY_OPENCV and not is_separate
        self.by_pillow = not is_by_opencv

    def levels(self) -> np.ndarray | None:
        """The upper 8 bits of 16, where OpenCV rounds."""
        return _UPPER if self.bits == 16 else None


_UPPER = (np.arange(2**16) >> 8).astype(np.uint8)


def read_tiff(data: Bytes) -> ImageHeader:
    """The size of the first image."""
    order = TIFF_ORDERS.get(bytes(data[:4]))
    if order is None:
        raise DecodeError("TIFF: its first 4 bytes are not those of a TIFF of 32 bits")
    tags: dict[int, int] = {}
    seen: set[int] = set()
    for tag, kind, values, place in tiff_entries(data, order, _TIFF_ENTRIES):
        if tag in seen and tag in _ONCE:
            raise DecodeError(f"TIFF: it has the tag {tag} twice")
        seen.add(tag)
        if tag not in _TAGS:
            continue
        if kind not in (3, 4) or (values != 1 and tag != _BITS):
            raise DecodeError(f"TIFF: the tag {tag} holds {values} values of type {kind}")
        if values * (2 if kind == 3 else 4) > 4:  # the bits of each channel, elsewhere
            (place,) = struct.unpack_from(order + "I", data, place)
        numbers = struct.unpack_from(f"{order}{min(values, 8)}{'H' if kind == 3 else 'I'}", data, place)
        tags[tag] = max(numbers, default=0)
    width, height, tile_w, tile_h = (tags.get(tag, 0) for tag in (_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT))
    if _WIDTH not in tags or _HEIGHT not in tags or (_TILE_WIDTH in tags) != (_TILE_HEIGHT in tags):
        raise DecodeError("TIFF: without its size, or that of its tiles")
    channels, bits = tags.get(_CHANNELS, 1), tags.get(_BITS, 1)
    if channels > 4 or bits not in _DEPTHS:
        raise DecodeError(f"TIFF: {counted(channels, 'channel')} of {bits} bits")
    if tile_w > max(width, _TIFF_TILE) or tile_h > max(height, _TIFF_TILE):
        raise DecodeError(f"TIFF: tiles of {tile_w}x{tile_h} pixels for an image of {width}x{height}")
    return TiffHeader(tags)
