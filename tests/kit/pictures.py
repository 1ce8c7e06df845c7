"""Image files made by hand, for what no library writes."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable

import numpy as np
from PIL import Image

Chunk = tuple[bytes, bytes]
"""Kind and content, of a PNG or a WebP."""


def saved(kind: str, height: int = 24, width: int = 32, mode: str = "RGB", **options: object) -> bytes:
    """A small picture by Pillow."""
    pixels = np.random.default_rng(height * width).integers(0, 255, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    """A small JPEG whose EXIF says how it is shown."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved("JPEG", exif=exif)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(chunks: Iterable[Chunk]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def ihdr(width: int = 8, height: int = 8, bits: int = 8, color: int = 2) -> Chunk:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)


def idat(size: int = 8 * 25) -> Chunk:
    """Zeros; by default those of ``ihdr()``."""
    return b"IDAT", zlib.compress(bytes(size), 9)


IEND: Chunk = (b"IEND", b"")


def webp_of(chunks: Iterable[Chunk]) -> bytes:
    body = b"".join(kind + struct.pack("<I", len(part)) + part + b"\0" * (len(part) % 2) for kind, part in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def webp_chunks(data: bytes) -> list[Chunk]:
    chunks, position = [], 12
    while position + 8 <= len(data):
        kind, length = struct.unpack_from("<4sI", data, position)
        chunks.append((kind, data[position + 8 : position + 8 + length]))
        position += 8 + length + length % 2
    return chunks


def canvas(width: int, height: int, flags: int = 0) -> Chunk:
    """The header of an extended WebP."""
    sizes = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"VP8X", bytes([flags, 0, 0, 0]) + sizes


def bmp(width: int, height: int, bits: int = 24, compression: int = 0, header: int = 40, data: bytes = b"") -> bytes:
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack("<IiiHHIIiiII", header, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + max(header, len(info))) + info.ljust(header, b"\0") + data


def gif(width: int, height: int, frame: tuple[int, int, int, int] | None = None) -> bytes:
    left, top, frame_w, frame_h = frame or (0, 0, width, height)
    start = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    comment = b"\x21\xfe\x05,\0\0\0\0\0"
    return start + comment + b"\x2c" + struct.pack("<HHHHB", left, top, frame_w, frame_h, 0) + b"\x02\x02\x4c\x01\0\x3b"


def tiff(tags: Iterable[tuple[int, int, int, int]]) -> bytes:
    """Little-endian, of (tag, type, number of values, value)."""
    entries = list(tags)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(struct.pack("<HHII", *tag) for tag in entries)


def heif(sizes: list[tuple[int, int]], primary: int, brand: bytes = b"heic") -> bytes:
    """The boxes of a HEIC or AVIF with these sizes as its properties; the primary image has that one, from 1."""

    def box(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I4s", 8 + len(content), kind) + content

    properties = b"".join(box(b"ispe", bytes(4) + struct.pack(">II", *size)) for size in sizes)
    of_primary = bytes(4) + struct.pack(">IHBB", 1, 7, 1, 0x80 | primary)
    tables = box(b"iprp", box(b"ipco", properties) + box(b"ipma", of_primary))
    start = box(b"ftyp", brand + bytes(4) + b"mif1" + (brand if brand != b"msf1" else b"heic"))
    return start + box(b"meta", bytes(4) + box(b"pitm", bytes(4) + struct.pack(">H", 7)) + tables)


def jpeg_segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def with_scans(data: bytes, count: int) -> bytes:
    """A progressive JPEG with ``count`` scans, the last ones repeated."""
    starts = [at for at in range(len(data) - 1) if data[at : at + 2] == b"\xff\xda"]
    last = data[starts[-1] : -2]
    return data[:-2] + last * (count - len(starts)) + data[-2:]
