"""Reads JPEG headers (ITU-T T.81, annex B) as libjpeg does, and checks whole files for the GPU's engines."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from torchpipe_py.backends.image.formats import Bytes, ImageHeader
from torchpipe_py.errors import BackendUnavailable, DecodeError

MAX_SCANS = 32
"""Maximum scans; each is a pass over all coefficients. libjpeg writes 10 by default and 18 for CMYK."""

MAX_PASSES = 16
"""Maximum pixels of all scans together, as a multiple of ``max_pixels``. The largest images may have fewer scans."""

MAX_SEGMENTS = 2048
"""Maximum segments before the image data. A colour profile of 16 MB takes 255."""

PROGRESSIVE = 0xC2

_EXIF, _XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
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
"""Frame types; a text says why a type is refused."""

_TABLES = {0xC4, 0xCC, 0xDB, 0xDC, 0xDD}  # DHT, DAC, DQT, DNL, DRI
_SEGMENTS = {_SOS, *_FRAMES, *_TABLES, *range(0xE0, 0xF0), 0xFE}
_STANDALONE = {0x01, *range(0xD0, 0xD8)}

_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff]")
_NEXT_IN_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# FF, marker, length; then the fields of a frame header: bits, height, width, components. In a scan header the number
# of components is in the place of the bits.
_segment_at = struct.Struct(">BBHBHHB").unpack_from
_PIECE = 2**18  # bytes that are searched in one call, which holds the GIL


class JpegHeader(ImageHeader):
    """The header of a JPEG: everything before the image data.

    ``channels`` are its color components, ``frame`` is the marker of the frame header. ``transform`` is Adobe's
    (1: YCbCr). ``is_tight``: there is nothing between the segments. ``data_start`` is where the first scan's bytes
    begin. ``scans`` are counted by ``check``; 1 for an image that is decoded in one pass.
    """

    def __init__(self, data: Bytes) -> None:
        """Read the header; ``DecodeError`` if it is not that of a JPEG, is cut off, or of an unsupported kind."""
        super().__init__("jpeg", 0, 0)
        self.frame, self.transform = 0, 1
        self.is_tight, self.scans = True, 1
        try:
            self._read(data)
        except (IndexError, struct.error):
            raise DecodeError(f"JPEG: cut off in its header, after {len(data)} bytes") from None

    def _read(self, data: Bytes) -> None:
        position = 2
        for _ in range(MAX_SEGMENTS):
            start, marker, length, first, height, width, components = _segment_at(data, position)
            if start != 0xFF or length < 2 or marker not in _SEGMENTS:
                position = self._next(data, position)
                continue
            if marker == _SOS:
                break
            if marker in _FRAMES:
                if self.frame:
                    # NOTE: decoders disagree about which frame header's size counts.
                    raise DecodeError("JPEG: it has two frame headers")
                if _FRAMES[marker] or first != 8:
                    frame = f"a frame of type SOF{marker - 0xC0} ({_FRAMES[marker] or f'{first} bits'})"
                    raise DecodeError(f"JPEG: {frame} is not supported, only 8 bits, Huffman")
                if components not in (1, 3, 4) or length != 8 + 3 * components:
                    raise DecodeError(f"JPEG: {components} color components in a frame header of {length} bytes")
                self.frame, self.height, self.width, self.channels = marker, height, width, components
            elif marker == _APP14:
                if data[position + 4 : position + 9] == b"Adobe":
                    self.transform = data[position + 15]
            elif marker == _APP1:
                if data[position + 4 : position + 10] == _EXIF:
                    self.exif.append((position + 10, position + 2 + length))  # a long one takes several segments
                elif data[position + 4 : position + 33] == _XMP:
                    self.xmp = [(position + 33, position + 2 + length)]
            position += 2 + length
        else:
            raise DecodeError(f"JPEG: more than {MAX_SEGMENTS} segments before the image data")
        if not self.frame:
            raise DecodeError("JPEG: no frame header before the image data")
        self.by_pillow = self.channels == 4  # CMYK becomes RGB by other formulas in OpenCV
        self.data_start = position + 2 + length
        self._first = first  # components in the first scan

    def _next(self, data: Bytes, position: int) -> int:
        """Position of the next segment, after bytes that are not one."""
        marker = data[position + 1]
        if data[position] != 0xFF or marker in (0, 0xFF):
            # Skip, as libjpeg does, but only so far; FF may precede a marker.
            match = _NEXT_MARKER.search(data, position, position + _PIECE)
            if match is None:
                raise DecodeError(f"JPEG: no marker in the {_PIECE} bytes from byte {position} on")
            if bytes(data[position : match.start()]).strip(b"\xff"):
                self.is_tight = False
            return match.start()
        if marker in _STANDALONE:
            return position + 2
        if marker == _EOI:
            raise DecodeError("JPEG: it ends before the image data")
        if marker not in _SEGMENTS:
            raise DecodeError(f"JPEG: marker FF{marker:02X} at byte {position} has no place in the header")
        raise DecodeError(f"JPEG: the segment at byte {position} has no length")

    @property
    def memory(self) -> int:
        """Bytes that decoding to three channels of 8 bits takes at the most; known after ``check``."""
        # Several passes need all coefficients, of 16 bits; Pillow stores CMYK besides.
        # NOTE: with one pass, cv2.imdecode holds the pixels twice at its end, since it copies them into an array.
        has_passes = self.scans > 1 or self.frame == PROGRESSIVE
        stored = 4 if self.channels == 4 else 3
        return self.width * self.height * (max(6, stored + 2 * self.channels) if has_passes else 3 + stored)

    def without_texts(self, data: Bytes) -> Bytes:
        """The file without EXIF if Pillow decodes it, which would read the resolution there and warn about damage."""
        if not self.by_pillow or not self.exif:
            return data
        edges = [0, *(edge for start, end in self.exif for edge in (start - 10, end)), len(data)]
        return b"".join([data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)])

    def check(self, data: Bytes, max_pixels: int) -> None:
        """Raise ``DecodeError`` for too many scans, each of which is a pass over all pixels."""
        if self.frame != PROGRESSIVE and self._first == self.channels:
            return
        self.scans = scans = count_scans(data, self.data_start)
        if scans > MAX_SCANS:
            raise DecodeError(f"a JPEG of more than {MAX_SCANS} scans, each a pass over all pixels")
        if scans > 1 and scans * self.width * self.height > MAX_PASSES * max_pixels:
            work = f"{scans} scans of {self.width}x{self.height} pixels"
            raise DecodeError(f"a JPEG of {work}, together more than {MAX_PASSES} times max_pixels = {max_pixels}")


def count_scans(data: Bytes, position: int) -> int:
    """Number of scans from ``position``, in the first of them, to the end of the image; at most ``MAX_SCANS`` + 1.

    Bytes after the end of the image do not count; nor do bytes that look like a marker inside a segment.
    """
    scans, size = 1, len(data)
    for _ in range(MAX_SEGMENTS):
        match = None
        # NOTE: in pieces that overlap by a byte, so that another thread gets the GIL between them.
        while match is None:
            if position >= size:
                return scans
            match = _NEXT_IN_SCAN.search(data, position, position + _PIECE)
            if match is None:
                position += _PIECE - 1
        position = match.end()
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


# -- whole files ------------------------------------------------------------------------------------------------------


class WholeCheck:
    """Refuses files that ``read_header`` accepts, but the JPEG engines of a GPU must not decode.

    For broken compressed data, the engines return pixels of an image that they decoded before, which may be another
    client's (H200, nvImageCodec 0.9 and torchvision 0.26). So they get a file only if libjpeg-turbo decodes it without
    a warning, at an eighth of its size, which takes two thirds of the time of decoding it and no lock. libjpeg-turbo
    also decodes files with missing tables or components, or tables with invalid symbols: files must be plain, too.
    """

    def __init__(self) -> None:
        """Raise ``BackendUnavailable`` if simplejpeg, which contains libjpeg-turbo, is not installed."""
        try:
            import simplejpeg
        except ImportError as error:
            problem = "JPEGs are checked before the GPU's JPEG engines decode them, which needs simplejpeg"
            raise BackendUnavailable(f"{problem} (pip install simplejpeg): {error}") from error
        self._decode: Callable[..., Any] = simplejpeg.decode_jpeg

    def __call__(self, data: bytes) -> None:
        """Raise ``DecodeError`` for a broken file, or one that is not plain."""
        start = plain_scan(data)
        marker = _MARKER(data, start) if start else None
        if marker is None or data[marker.end() - 1] != _EOI:
            kind = f"not baseline with one scan, usual tables and at most {MOST_MCUS} blocks"
            raise DecodeError(f"{len(data)} bytes: JPEG: {kind}; decode it on the CPU")
        try:
            checked = data[:2] + _INTERVAL + data[2:]
            self._decode(checked, "GRAY", min_height=1, min_width=1, min_factor=8, strict=True)
        except ValueError as error:
            raise DecodeError(f"{len(data)} bytes: JPEG: {error}") from None


MOST_MCUS = 65535
"""Blocks of all components (MCUs) that a file without restart markers may have."""

# NOTE: libjpeg-turbo's fast path accepts codes that are in no table. It is not used if restart markers are possible;
# this interval is longer than the image, and a file's own one follows and replaces it.
_INTERVAL = b"\xff\xdd\x00\x04" + MOST_MCUS.to_bytes(2, "big")

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]").search
_SAMPLINGS = {(0x11,), *((luma, 0x11, 0x11) for luma in (0x11, 0x21, 0x12, 0x22))}
_SOF0, _DHT, _DQT, _DRI, _COM = 0xC0, 0xC4, 0xDB, 0xDD, 0xFE
_DC_SYMBOLS = bytes(range(12))
_AC_SYMBOLS = bytes([0x00, 0xF0, *(run << 4 | size for run in range(16) for size in range(1, 11))])


def plain_scan(data: bytes) -> int:
    """Start of the compressed data of a plain JPEG; 0 for any other.

    Plain means baseline with one scan of all its components, in their order, and with every table it needs, of 8
    bits (ITU-T T.81, F.1.2). Only the segments before the compressed data are read; ``data`` begins with a JPEG's two
    bytes.
    """
    quantisation: set[int] = set()
    huffman: set[int] = set()
    components: list[bytes] = []  # of the frame header: number, sampling factors, quantisation table
    mcus, has_restarts = 0, False
    position = 2
    while data[position : position + 1] == b"\xff":
        marker = data[position + 1]
        segment = data[position + 4 : position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")]
        position += 4 + len(segment)
        if marker == _DQT:
            numbers = segment[::65]
            if len(segment) != 65 * len(numbers) or max(numbers, default=4) > 3 or segment.count(0) > numbers.count(0):
                return 0  # a table of 16 bits has a number above 15, and none has a 0
            quantisation.update(numbers)
        elif marker == _DHT:
            while segment:
                end = 17 + sum(segment[1:17])
                usual = {0x00: _DC_SYMBOLS, 0x10: _AC_SYMBOLS}.get(segment[0] & 0xFE)
                if usual is None or len(segment) < end or segment[17:end].translate(None, usual):
                    return 0
                huffman.add(segment[0])
                segment = segment[end:]
        elif marker == _DRI:
            if len(segment) != 2 or segment == b"\0\0" or has_restarts:
                return 0
            has_restarts = True
        elif marker == _SOF0 and not components:
            components = [segment[start : start + 3] for start in range(6, len(segment), 3)]
            if tuple(component[1] for component in components) not in _SAMPLINGS:
                return 0
            across, down = 8 * (components[0][1] >> 4), 8 * (components[0][1] & 0x0F)
            height, width = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
            mcus = -(-width // across) * -(-height // down)
        elif marker == _SOS:
            used = segment[2:-3:2]
            is_plain = (
                (has_restarts or mcus <= MOST_MCUS)
                and segment[:1] + segment[1:-3:2] == bytes([len(components)]) + b"".join(c[:1] for c in components)
                and segment[-3:] == b"\x00\x3f\x00"
                and quantisation.issuperset(component[2] for component in components)
                and huffman.issuperset(table >> 4 for table in used)
                and huffman.issuperset(0x10 | table & 0x0F for table in used)
            )
            return position if is_plain else 0
        elif marker != _COM and marker >> 4 != 0xE:
            return 0
    return 0
