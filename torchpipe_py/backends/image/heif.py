"""Reads headers of HEIC and AVIF files (ISO/IEC 23008-12): boxes, of which one holds the size of the primary image."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from torchpipe_py.backends.image.formats import Bytes, ImageHeader
from torchpipe_py.errors import DecodeError

_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "avif"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"), "heic"),
}
_SEQUENCES = (b"avis", b"hevc", b"hevx", b"hevm", b"hevs", b"msf1")
_MOST_BOXES = 4096
_ITEM = {0: "H", 1: "I"}  # an item's number, by the version of a box


class _Box(NamedTuple):
    kind: bytes
    start: int
    end: int


def _boxes(data: Bytes, position: int, end: int) -> Iterator[_Box]:
    """The boxes between two places; ``DecodeError`` for one that leaves them."""
    for _ in range(_MOST_BOXES):
        if position + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", data, position)
        start = position + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        elif size == 0:
            size = end - position
        if size < start - position or position + size > end:
            raise DecodeError(f"HEIF: a box {kind!r} of {size} bytes at byte {position}")
        yield _Box(kind, start, position + size)
        position += size
    raise DecodeError(f"HEIF: more than {_MOST_BOXES} boxes")


def heif_format(data: Bytes) -> str | None:
    """``"avif"`` or ``"heic"``, by the brands of a file; ``None`` for a video and any other."""
    if bytes(data[4:8]) != b"ftyp":
        return None
    size = min(int.from_bytes(data[:4], "big"), 256)
    for start in (8, *range(16, size - 3, 4)):
        if found := _BRANDS.get(bytes(data[start : start + 4])):
            return found
    return None


class HeifHeader(ImageHeader):
    """The size of the primary image before it is cropped and turned, as its properties say.

    libheif refuses coded images that are larger.
    """

    def __init__(self, data: Bytes) -> None:
        """Read the boxes; ``DecodeError`` for a sequence, and for an image without a size."""
        format = heif_format(data)
        if format is None:
            raise DecodeError("HEIF: its first box does not name HEIC or AVIF")
        if bytes(data[8:12]) in _SEQUENCES:
            raise DecodeError(f"{format.upper()}: sequences of images are not read; save one of them")
        for box in _boxes(data, 0, len(data)):
            if box.kind == b"meta":
                sizes, primary = _sizes(data, box)
                break
        else:
            raise DecodeError(f"{format.upper()}: no box 'meta' that describes it")
        super().__init__(format, *primary, channels=4)
        self.by_pillow = True
        self._largest = max(sizes, key=lambda size: size[0] * size[1])

    @property
    def memory(self) -> int:
        """The decoder's planes and its RGB, Pillow's pixels, and the Mat."""
        return 14 * self._largest[0] * self._largest[1]

    def check(self, data: Bytes, max_pixels: int) -> None:
        """Raise ``DecodeError`` if another image of the file, such as a tile, has too many pixels."""
        width, height = self._largest
        if width * height > max_pixels:
            raise DecodeError(f"{self.format.upper()}: an image of {width}x{height} pixels in it")


def _sizes(data: Bytes, meta: _Box) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """The sizes of all images, and of the primary one."""
    boxes = {box.kind: box for box in _boxes(data, meta.start + 4, meta.end)}
    if b"pitm" not in boxes or b"iprp" not in boxes:
        raise DecodeError("HEIF: it does not say which image is the primary one, or how large")
    start = boxes[b"pitm"].start
    (primary,) = struct.unpack_from(">" + _ITEM[min(data[start], 1)], data, start + 4)
    tables = {box.kind: box for box in _boxes(data, boxes[b"iprp"].start, boxes[b"iprp"].end)}
    if b"ipco" not in tables or b"ipma" not in tables:
        raise DecodeError("HEIF: its images have no properties")
    sizes: dict[int, tuple[int, int]] = {}
    for number, box in enumerate(_boxes(data, tables[b"ipco"].start, tables[b"ipco"].end), 1):
        if box.kind == b"ispe":
            sizes[number] = struct.unpack_from(">II", data, box.start + 4)
    for number in _properties(data, tables[b"ipma"], primary):
        if number in sizes:
            return list(sizes.values()), sizes[number]
    raise DecodeError("HEIF: the primary image has no size")


def _properties(data: Bytes, ipma: _Box, item: int) -> list[int]:
    """Numbers of the properties of an image, from 1."""
    version, flags = data[ipma.start], data[ipma.start + 3]
    item_format, number_format = ">" + _ITEM[min(version, 1)], ">H" if flags & 1 else ">B"
    mask = 0x7FFF if flags & 1 else 0x7F
    item_size, number_size = struct.calcsize(item_format), struct.calcsize(number_format)
    (count,) = struct.unpack_from(">I", data, ipma.start + 4)
    position = ipma.start + 8
    for _ in range(min(count, _MOST_BOXES)):
        (found,) = struct.unpack_from(item_format, data, position)
        amount = data[position + item_size]
        position += item_size + 1
        if found == item:
            places = range(position, position + amount * number_size, number_size)
            return [struct.unpack_from(number_format, data, place)[0] & mask for place in places]
        position += amount * number_size
    return []
