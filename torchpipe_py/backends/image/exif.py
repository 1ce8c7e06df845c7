"""The orientation of an image in its EXIF or XMP metadata, by the rules of Pillow's ``ImageOps.exif_transpose``.

Every decoder here ignores the metadata; the pixels are turned by what this module reads.
"""

from __future__ import annotations

import re
import struct
from fractions import Fraction

_ORDERS = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}
"""Byte orders, by the first 4 bytes; two of them are wrong, but Pillow takes them."""

_ORIENTATION = 0x0112

# Sizes of the types of values (TIFF 6.0, section 2), and how those that are numbers are read.
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
_NUMBERS = {3: "H", 4: "I", 5: "II", 6: "b", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I", 16: "Q"}

_PREFIX = re.compile(rb"(?:Exif\0\0){1,2}")
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def orientation(exif: bytes, xmp: bytes = b"") -> int:
    """The orientation 1..8 (Exif 2.3, table 6); 1, as stored, if it is missing, damaged or invalid.

    ``exif`` is a TIFF, perhaps with the prefix ``Exif``. Its first tag counts, and of several values the first; XMP
    counts if there is no tag.
    """
    value = _tag(exif)
    if value is None:
        found = _IN_XMP.search(xmp)
        value = 1 if found is None else int(found[1])
    return int(value) if value in range(2, 9) else 1


def _tag(exif: bytes) -> float | Fraction | None:
    """The first value of the orientation tag, 0 if that is not a number; ``None`` without the tag."""
    prefix = _PREFIX.match(exif)
    exif = exif[prefix.end() :] if prefix else exif
    order = _ORDERS.get(exif[:4])
    if order is None:
        return None
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, directory)
        declared = 0
        for entry in range(directory + 2, directory + 2 + 12 * count, 12):
            tag, kind, values, place = struct.unpack_from(order + "HHII", exif, entry)
            size, start = values * _SIZES.get(kind, 0), entry + 8
            if size > 4:
                start, declared = place, declared + size
                if declared > len(exif):
                    continue
                if start + size > len(exif):
                    break  # Pillow reads no further
            if tag != _ORIENTATION or not size:
                continue  # without a value or a known type, a second one counts
            if kind not in _NUMBERS:
                return 0
            first, *denominator = struct.unpack_from(order + _NUMBERS[kind], exif, start)
            if not denominator:
                return float(first)
            return Fraction(first, denominator[0]) if denominator[0] else 0
    except struct.error:
        pass  # cut off: damaged metadata do not spoil the image
    return None
