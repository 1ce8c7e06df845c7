"""The header of a PNG file, and what its chunks may grow to (PNG specification, third edition)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from torchpipe_py.errors import DecodeError
from torchpipe_py.images.jpeg import Bytes

SIGNATURE = b"\x89PNG\r\n\x1a\n"

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""By color type."""

MAX_TEXT = 2**23
"""Bytes that texts and the colour profile may grow to together. Nobody reads them, but libpng inflates each."""

FREE_CHUNKS = 4096
"""However small: milliseconds' work. Beyond them a chunk has 512 bytes in the mean; encoders write 8 KiB and more."""

UNCHECKED = 2**20
"""Compressed bytes of image data, of which nobody looks at what they grow to: two seconds' work for libpng at the most.

NOTE: it inflates all of them, also those behind the last row.
"""

_GROWTH = 1032  # of deflate, at the most
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_ANIMATED = {b"acTL", b"fcTL", b"fdAT"}
_COMPRESSED = {b"iCCP", b"zTXt", b"iTXt"}
_CRITICAL = {b"PLTE", b"IEND"}
_CHUNK = struct.Struct(">I4s")
_IHDR = struct.Struct(">I4sIIBBBBB")

Span = tuple[int, int]
"""Where bytes start and end."""


class PngHeader(NamedTuple):
    width: int
    height: int
    channels: int
    bits: int


def read_png(data: Bytes) -> PngHeader:
    """The header; ``DecodeError`` for what is no PNG, is animated, or holds more than its image."""
    header = read_ihdr(data)
    image, texts = _chunks(data)
    _check_texts(data, texts)
    row = 1 + (header.width * header.channels * header.bits + 7) // 8
    limit = 2 * row * header.height + 2**12  # interlaced, it is somewhat more than the rows
    if sum(end - start for start, end in image) > limit or _grows_beyond(data, image, limit):
        size = f"{header.width}x{header.height} pixels of {header.channels}x{header.bits} bits"
        raise DecodeError(f"PNG: its image data grow to more than {size}")
    return header


def read_ihdr(data: Bytes) -> PngHeader:
    """The header, without a look at what follows; ``DecodeError`` for what is no PNG."""
    if bytes(data[:8]) != SIGNATURE:
        raise DecodeError("PNG: its first 8 bytes are not those of a PNG")
    try:
        length, kind, width, height, bits, color, method, filters, interlace = _IHDR.unpack_from(data, 8)
    except struct.error:
        raise DecodeError(f"PNG: cut off in its header, after {len(data)} bytes") from None
    if kind != b"IHDR" or length != 13:
        raise DecodeError("PNG: it does not begin with its header, IHDR")
    if bits not in _DEPTHS.get(color, ()) or method or filters or interlace > 1:
        raise DecodeError(f"PNG: color type {color} with {bits} bits, compressed by {method}, {filters}, {interlace}")
    return PngHeader(width, height, CHANNELS[color], bits)


def without_profile_name(data: Bytes) -> Bytes:
    """The same file with another name for its colour profile; the pixels, and what is wrong with it, stay.

    NOTE: the name is a client's text, line ends included, and libpng's warnings about the profile repeat it on stderr.
    """
    changed: bytearray | None = None
    position = 33
    while position + 8 <= len(data):
        length, kind = _CHUNK.unpack_from(data, position)
        if kind == b"IDAT":
            break
        end = position + 8 + length
        if kind == b"iCCP":
            changed = bytearray(data) if changed is None else changed
            chunk = bytes(data[position + 4 : end])
            size = len(chunk[4:84].partition(b"\0")[0])
            changed[position + 8 : position + 8 + size] = b"_" * size
            is_damaged = zlib.crc32(chunk) != int.from_bytes(data[end : end + 4], "big")
            changed[end : end + 4] = (zlib.crc32(changed[position + 4 : end]) ^ is_damaged).to_bytes(4, "big")
        position = end + 4
    return data if changed is None else changed


def _chunks(data: Bytes) -> tuple[list[Span], list[tuple[bytes, Span]]]:
    """The image data, and what else is compressed, with its kind; the last chunks may be missing."""
    image: list[Span] = []
    texts: list[tuple[bytes, Span]] = []
    position, size = 33, len(data)
    most = FREE_CHUNKS + size // 512
    for _ in range(most):
        if position + 8 > size:
            break
        length, kind = _CHUNK.unpack_from(data, position)
        start, position = position + 8, position + 12 + length
        if position > size and kind != b"IEND":
            # NOTE: OpenCV from 4.12 on allocates what the length says, up to 4 GiB, before it looks for the bytes.
            raise DecodeError(f"PNG: cut off in a chunk {kind!r} of {length} bytes")
        if kind == b"IDAT":
            image.append((start, start + length))
        elif kind in _COMPRESSED:
            texts.append((kind, (start, start + length)))
        elif kind in _ANIMATED:
            raise DecodeError("PNG: animated (APNG) files are not read; save one of the frames")
        elif not kind[0] & 0x20 and kind not in _CRITICAL:  # a capital first letter: it must be understood
            raise DecodeError(f"PNG: a chunk {kind!r} at byte {start - 4}")
        if kind == b"IEND":
            break
    else:
        raise DecodeError(f"PNG: more than {most} chunks in {size} bytes")
    if not image:
        raise DecodeError("PNG: it has no image data")
    return image, texts


def _check_texts(data: Bytes, texts: Sequence[tuple[bytes, Span]]) -> None:
    if sum(end - start for _, (start, end) in texts) * _GROWTH <= MAX_TEXT:
        return
    left = MAX_TEXT
    for kind, (start, end) in texts:
        content = bytes(data[start:end])
        _, _, rest = content.partition(b"\0")  # the keyword
        if kind == b"iTXt":
            if rest[:1] != b"\1":
                continue
            rest = rest[2:].partition(b"\0")[2].partition(b"\0")[2]  # the language, the keyword in that
            rest = b"\0" + rest
        left -= _inflated(zlib.decompressobj(), rest[1:], left + 1)
        if left < 0:
            raise DecodeError(f"PNG: its texts and profiles grow to more than {MAX_TEXT} bytes")


def _grows_beyond(data: Bytes, spans: Sequence[Span], limit: int) -> bool:
    """Whether the zlib stream in these parts inflates to more than ``limit`` bytes.

    The last ``UNCHECKED`` bytes are not inflated.
    """
    left = sum(end - start for start, end in spans) - UNCHECKED
    inflater, grown = zlib.decompressobj(), 0
    for start, end in spans:
        while start < end:
            if left <= 0 or inflater.eof:
                return False
            piece = min(2**16, end - start)
            grown += _inflated(inflater, data[start : start + piece], limit + 1 - grown)
            if grown > limit:
                return True
            start += piece
            left -= piece
    return False


def _inflated(inflater: zlib._Decompress, content: Bytes, limit: int) -> int:
    """How many bytes ``content`` grows to, ``limit`` at most; damaged ones to none."""
    grown = 0
    try:
        while content and grown < limit:
            grown += len(inflater.decompress(content, min(2**20, limit - grown)))
            content = inflater.unconsumed_tail
    except zlib.error:
        pass
    return grown
