"""The header of a JPEG file (ITU-T T.81, annex B), found as libjpeg finds it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from torchpipe_py.errors import DecodeError

Bytes = bytes | bytearray | memoryview

MAX_SCANS = 32
"""Each is a pass over all coefficients. libjpeg writes 10 by default and 18 for CMYK, optimisers no more than that."""

MAX_PASSES = 16
"""Times ``max_pixels``: what all scans of a JPEG together pass over. So the largest have fewer scans."""

MAX_SEGMENTS = 2048
"""Before the image data. A colour profile of 16 MB takes 255."""

PROGRESSIVE = 0xC2
ORIENTATION = 0x0112  # the EXIF tag

_EOI, _SOS, _APP1, _APP14 = 0xD9, 0xDA, 0xE1, 0xEE
_FRAMES = {
    0xC0: "",
    0xC1: "",
    PROGRESSIVE: "",
    0xC3: "lossless",
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "hierarchical"),
    **dict.fromkeys((0xC9, 0xCA), "arithmetic coding"),
    0xCB: "lossless, arithmetic coding",
}
"""Frame headers, and what of them no decoder here is given."""

_TABLES = {0xC4, 0xCC, 0xDB, 0xDC, 0xDD}  # DHT, DAC, DQT, DNL, DRI
_SEGMENTS = {_SOS, *_FRAMES, *_TABLES, *range(0xE0, 0xF0), 0xFE}
_STANDALONE = {0x01, *range(0xD0, 0xD8)}

# JFIF's and tables, of the lengths that they have in most files: passed over in one call of C.
# NOTE: a few of them. The call holds the GIL, and takes memory for each; the others count towards MAX_SEGMENTS.
_USUAL = (0xE0, 16), (0xDB, 67), (0xDB, 132), (0xC4, 31), (0xC4, 181), (0xC4, 418)
_USUAL_SEGMENTS: Callable[[Bytes, int], re.Match[bytes]] = re.compile(
    b"(?s:%s){0,16}" % b"|".join([re.escape(struct.pack(">BBH", 0xFF, m, n)) + b".{%d}" % (n - 2) for m, n in _USUAL])
).match  # type: ignore[assignment]  # it matches nothing, at least

_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff]")
_NEXT_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# FF, marker, length; behind it what a frame header has: bits, height, width, components. A scan's number of components
# stands where the bits do.
_SEGMENT = struct.Struct(">BBHBHHB")
_segment_at, _SEGMENT_BYTES = _SEGMENT.unpack_from, _SEGMENT.size
_PIECE = 2**18  # bytes that are searched in one call, which holds the GIL


class JpegHeader:
    """What stands before the image data.

    ``width``, ``height`` in pixels as stored, ``components`` of color, ``frame`` is the marker of the frame header.
    ``transform`` is Adobe's (1: YCbCr). ``is_tight``: nothing stands between the segments. ``data_start`` is where the
    first scan's bytes begin.
    """

    __slots__ = ("_exif", "_first", "components", "data_start", "frame", "height", "is_tight", "transform", "width")

    def __init__(self, data: Bytes) -> None:
        """``DecodeError`` for what is no JPEG, is cut off, or is of a kind that is not read."""
        self.frame, self.transform = 0, 1
        self.is_tight = True
        self._exif = 0, 0
        try:
            self._read(data)
        except (IndexError, struct.error):
            raise DecodeError(f"JPEG: cut off in its header, after {len(data)} bytes") from None

    def _read(self, data: Bytes) -> None:
        position, last = _USUAL_SEGMENTS(data, 2).end(), len(data) - _SEGMENT_BYTES
        for _ in range(MAX_SEGMENTS):
            if position > last:
                position = self._next(data, position)
                continue
            start, marker, length, first, height, width, components = _segment_at(data, position)
            if start != 0xFF or length < 2 or marker not in _SEGMENTS:
                position = self._next(data, position)
                continue
            if marker == _SOS:
                break
            if marker in _FRAMES:
                if self.frame:
                    # NOTE: whose size would count, one decoder says so and another so.
                    raise DecodeError("JPEG: it has two frame headers")
                _check_frame(marker, first, components, length)
                self.frame, self.height, self.width, self.components = marker, height, width, components
                position = _USUAL_SEGMENTS(data, position + 2 + length).end()
                continue
            if marker == _APP14:
                if data[position + 4 : position + 9] == b"Adobe":
                    self.transform = data[position + 15]
            elif marker == _APP1 and data[position + 4 : position + 10] == b"Exif\0\0":
                self._exif = position + 10, position + 2 + length
            position += 2 + length
        else:
            raise DecodeError(f"JPEG: more than {MAX_SEGMENTS} segments before the image data")
        if not self.frame:
            raise DecodeError("JPEG: no frame header before the image data")
        self.data_start = position + 2 + length
        self._first = first  # components in the first scan

    def _next(self, data: Bytes, position: int) -> int:
        """Where to go on from what is no segment, or is one of the file's last bytes."""
        marker = data[position + 1]
        if data[position] != 0xFF or marker in (0, 0xFF):
            return self._next_marker(data, position)
        if marker in _STANDALONE:
            return position + 2
        if marker == _EOI:
            raise DecodeError("JPEG: it ends before the image data")
        if marker not in _SEGMENTS:
            raise DecodeError(f"JPEG: marker FF{marker:02X} at byte {position} has no place in the header")
        length = data[position + 2] << 8 | data[position + 3]
        if length < 2:
            raise DecodeError(f"JPEG: the segment at byte {position} is {length} bytes long")
        if marker == _SOS or marker in _FRAMES:
            raise IndexError
        return position + 2 + length

    def _next_marker(self, data: Bytes, position: int) -> int:
        """What is no marker is passed over, as libjpeg does it, but not without end; FF may stand before a marker."""
        found = _NEXT_MARKER.search(data, position, position + _PIECE)
        if found is None and position + _PIECE < len(data):
            raise DecodeError(f"JPEG: no marker in the {_PIECE} bytes from byte {position} on")
        if found is None:
            raise IndexError
        if bytes(data[position : found.start()]).strip(b"\xff"):
            self.is_tight = False
        return found.start()

    def scans(self, data: Bytes) -> int:
        """How many there are, one more than are allowed at the most; 1 for what is decoded in one pass."""
        if self.frame == PROGRESSIVE or self._first < self.components:
            return count_scans(data, self.data_start)
        return 1

    def orientation(self, data: Bytes) -> int:
        """The EXIF orientation 1..8; 1, as stored, where there is none or it makes no sense."""
        start, end = self._exif
        segment = bytes(data[start:end])
        order = {b"II*\0": "<", b"MM\0*": ">"}.get(segment[:4])
        if order is None:
            return 1
        try:
            (directory,) = struct.unpack_from(order + "I", segment, 4)
            (count,) = struct.unpack_from(order + "H", segment, directory)
            for entry in range(directory + 2, directory + 2 + 12 * count, 12):
                tag, kind, values = struct.unpack_from(order + "HHI", segment, entry)
                if tag == ORIENTATION:
                    (value,) = struct.unpack_from(order + {3: "H", 4: "I"}[kind], segment, entry + 8)
                    return value if values == 1 and 1 <= value <= 8 else 1
        except (struct.error, KeyError):
            pass  # as OpenCV does: damaged metadata, but a good image
        return 1


def _check_frame(marker: int, bits: int, components: int, length: int) -> None:
    kind = _FRAMES[marker]
    if kind or bits != 8:
        what = kind or f"{bits} bits"
        raise DecodeError(f"JPEG: a frame of type SOF{marker - 0xC0} ({what}) is not supported, only 8 bits, Huffman")
    if components not in (1, 3, 4) or length != 8 + 3 * components:
        raise DecodeError(f"JPEG: {components} color components in a frame header of {length} bytes")


def count_scans(data: Bytes, position: int) -> int:
    """Scans from the one whose bytes begin at ``position`` to the end of the image; at most one more than are allowed.

    What follows the end of the image does not count; nor do bytes that look like a marker inside of a segment.
    """
    scans, size = 1, len(data)
    for _ in range(MAX_SEGMENTS):
        found = None
        # NOTE: in pieces that overlap by a byte, so that another thread gets the GIL between them.
        while found is None:
            if position >= size:
                return scans
            found = _NEXT_IN_SCAN.search(data, position, position + _PIECE)
            if found is None:
                position += _PIECE - 1
        position = found.end()
        marker = data[position - 1]
        if marker == _EOI or position + 2 > size:
            return scans
        if marker == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                return scans
        if marker in _SEGMENTS:
            position += max(2, data[position] << 8 | data[position + 1])
    raise DecodeError(f"JPEG: more than {MAX_SEGMENTS} segments between its scans")
