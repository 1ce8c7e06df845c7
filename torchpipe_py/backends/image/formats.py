"""Reads headers of image files: their size, and the memory that decoding may need.

JPEG, TIFF and HEIC have modules of their own.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from torchpipe_py.backends.image.exif import orientation
from torchpipe_py.errors import DecodeError

Bytes = bytes | bytearray | memoryview

IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm", ".heic",
    ".heif", ".avif",
)  # fmt: skip
"""Of files in the formats that a decoder can be configured for."""

Span = tuple[int, int]
"""Start and end of a range of bytes."""


class ImageHeader:
    """Size in pixels as stored, and the ``bits`` of each of the ``channels``, from the first bytes of an image file.

    ``exif`` and ``xmp`` are the places of metadata. ``by_pillow``: OpenCV reads such a file with other pixels than
    Pillow, or not at all.
    """

    def __init__(self, format: str, width: int, height: int, channels: int = 3, bits: int = 8) -> None:
        self.format, self.width, self.height, self.channels, self.bits = format, width, height, channels, bits
        self.exif: list[Span] = []
        self.xmp: list[Span] = []
        self.by_pillow = False

    @property
    def memory(self) -> int:
        """Maximum bytes that decoding to three channels of 8 bits takes; known after ``check``."""
        return self.width * self.height * (3 + max(4, self.channels * self.bits // 8))

    def check(self, data: Bytes, max_pixels: int) -> None:
        """Raise ``DecodeError`` if the rest of the file would take more to decode than its size implies."""

    def without_texts(self, data: Bytes) -> Bytes:
        """The file without unused chunks that a decoder would inflate, or quote on stderr."""
        return data

    def orientation(self, data: Bytes) -> int:
        """The orientation 1..8 in the metadata (see ``exif``); known after ``check``."""
        if not self.exif and not self.xmp:
            return 1
        exif, xmp = (b"".join([bytes(data[start:end]) for start, end in spans]) for spans in (self.exif, self.xmp))
        return orientation(exif, xmp)

    def levels(self) -> np.ndarray | None:
        """A table that makes 8 bits of the decoded levels, if they are not already 0..255."""
        return None


# -- WebP: https://developers.google.com/speed/webp/docs/riff_container ----------------------------------------------

_WEBP_CHUNKS = 64
"""Before the image, in an extended file: a profile, alpha, and unknown ones."""


def read_webp(data: Bytes) -> ImageHeader:
    """The size of a still image, and its metadata; ``DecodeError`` for an animation, or a canvas of another size."""
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WEBP":
        raise DecodeError("WebP: its first 12 bytes are not those of a WebP")
    canvas, features, position = None, 0, 12
    for _ in range(_WEBP_CHUNKS):
        kind, length = struct.unpack_from("<4sI", data, position)
        start, position = position + 8, position + 8 + length + length % 2
        flags = data[start] if kind == b"VP8X" else 0
        if flags & 0x02 or kind in (b"ANIM", b"ANMF"):
            raise DecodeError("WebP: animated files are not read; save one of the frames")
        if kind in (b"VP8 ", b"VP8L"):
            size = _lossy_size(data, start) if kind == b"VP8 " else _lossless_size(data, start)
            if canvas not in (None, size):
                raise DecodeError(
                    f"WebP: an image of {size[0]}x{size[1]} pixels on a canvas of {canvas[0]}x{canvas[1]}"
                )
            header = ImageHeader("webp", *size, channels=4)
            header.exif = _webp_metadata(data, b"EXIF") if features & 0x08 else []
            header.xmp = _webp_metadata(data, b"XMP ") if features & 0x04 else []
            return header
        if kind == b"VP8X" and start == 20 and length == 10:
            features = flags
            low_w, high_w, low_h, high_h = struct.unpack_from("<HBHB", data, start + 4)
            canvas = 1 + low_w + (high_w << 16), 1 + low_h + (high_h << 16)
        elif canvas is None:
            raise DecodeError(f"WebP: it begins with a chunk {kind!r} of {length} bytes")
    raise DecodeError(f"WebP: no image in its first {_WEBP_CHUNKS} chunks")


def _webp_metadata(data: Bytes, wanted: bytes) -> list[Span]:
    """The first chunk of that kind, which usually follows the image."""
    position = 12
    for _ in range(2 * _WEBP_CHUNKS):
        if position + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, position)
        if kind == wanted:
            return [(position + 8, position + 8 + length)]
        position += 8 + length + length % 2
    return []


def _lossy_size(data: Bytes, start: int) -> tuple[int, int]:
    tag, code, width, height = struct.unpack_from("<B2x3sHH", data, start)
    if tag & 1 or code != b"\x9d\x01\x2a":
        raise DecodeError("WebP: its image is not a key frame")
    return width & 0x3FFF, height & 0x3FFF


def _lossless_size(data: Bytes, start: int) -> tuple[int, int]:
    signature, bits = struct.unpack_from("<BI", data, start)
    if signature != 0x2F:
        raise DecodeError("WebP: its lossless image has no signature")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


# -- BMP -------------------------------------------------------------------------------------------------------------

_BMP_HEADERS = (40, 52, 56, 64, 108, 124)
_BMP_BITS = (1, 2, 4, 8, 16, 24, 32)
_BMP_MASKED = (3, 6)  # compressions: the channels are where masks say


def read_bmp(data: Bytes) -> ImageHeader:
    """The size; a negative height, of rows from the top down, becomes positive. 12 bytes of header are OS/2's."""
    (length,) = struct.unpack_from("<I", data, 14)
    if length != 12 and length not in _BMP_HEADERS:
        raise DecodeError(f"BMP: a header of {length} bytes; known are 12, {', '.join(map(str, _BMP_HEADERS))}")
    width, height, _, bits = struct.unpack_from("<HHHH" if length == 12 else "<iiHH", data, 18)
    if bits not in _BMP_BITS:
        raise DecodeError(f"BMP: {bits} bits for a pixel; known are {', '.join(map(str, _BMP_BITS))}")
    compression = 0 if length == 12 else struct.unpack_from("<I", data, 30)[0]
    header = ImageHeader("bmp", width, abs(height))
    colors = 0 if bits > 8 else (0 if length == 12 else struct.unpack_from("<I", data, 46)[0]) or 2**bits
    (start,) = struct.unpack_from("<I", data, 10)
    is_overlapping = start < 14 + length + colors * (3 if length == 12 else 4)
    is_short = compression == 0 and len(data) < start + (width * bits + 31) // 32 * 4 * abs(height)
    # OpenCV expands five bits by a shift, ignores most masks, and needs the padding of the last row.
    header.by_pillow = bits == 16 or compression in _BMP_MASKED or is_overlapping or is_short
    return header


# -- GIF: https://www.w3.org/Graphics/GIF/spec-gif89a.txt ------------------------------------------------------------

_GIF_BLOCKS = 4096


def read_gif(data: Bytes) -> ImageHeader:
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
            header = ImageHeader("gif", width, height, channels=4)
            header.by_pillow = True  # OpenCV makes transparent pixels black; older versions read none
            return header
        if is_inside:
            is_inside, position = kind != 0, position + 1 + kind  # a block of that many bytes; the last is empty
        elif kind == 0x21:  # an extension
            is_inside, position = True, position + 2
        else:
            raise DecodeError(f"GIF: a block of type {kind} at byte {position}")
    raise DecodeError(f"GIF: no frame in its first {_GIF_BLOCKS} blocks")


# -- PBM, PGM, PPM ---------------------------------------------------------------------------------------------------

# NOTE: a comment begins after white space: directly after a number, OpenCV takes its sign for white space.
_SPACE = rb"\s(?:\s|#[^\r\n]*[\r\n])*"
_PNM = re.compile(rb"P([1-6])%b(\d{1,9})%b(\d{1,9})\s" % (_SPACE, _SPACE))
_LEVELS = re.compile(rb"(?:\s|#[^\r\n]*[\r\n])*(\d{1,5})\s")
_PNM_START = 2**12


class PnmHeader(ImageHeader):
    """The size and the highest level, ``most``, which are in the first 4 KiB, after comments."""

    def __init__(self, data: Bytes) -> None:
        start = bytes(data[:_PNM_START])
        found = _PNM.match(start)
        if found is None:
            raise DecodeError("PNM: no size in its first 4 KiB")
        kind, width, height = map(int, found.groups())
        self.most, self._is_plain = 255, kind < 4
        if kind not in (1, 4):
            most = _LEVELS.match(start, found.end())
            if most is None or not 0 < int(most[1]) < 2**16:
                raise DecodeError("PNM: no highest level of 1 to 65535 in its first 4 KiB")
            self.most = int(most[1])
        super().__init__("pnm", width, height, 3 if kind in (3, 6) else 1, 16)

    def levels(self) -> np.ndarray | None:
        """Round to 0..255 as Pillow does, since OpenCV leaves levels as they are; the upper 8 bits of gray of 16."""
        if self.most == 255:
            return None
        return _pnm_levels(self.most, is_gray=self.channels == 1, is_plain=self._is_plain)


@lru_cache(16)
def _pnm_levels(most: int, is_gray: bool, is_plain: bool) -> np.ndarray:
    # Half to even, as Pillow rounds.
    levels = np.arange(2**16 if most > 255 else 2**8) / most
    if most > 255 and is_gray:
        return (np.minimum(np.rint(levels * 65535), 65535).astype(np.uint16) >> 8).astype(np.uint8)
    rounded = np.minimum(np.rint(levels * 255), 255).astype(np.uint8)
    if most < 255 and is_plain:
        # OpenCV has scaled these, but cuts fractions off; no two levels became one.
        scaled = np.zeros(256, np.uint8)
        scaled[[level * 255 // most for level in range(most + 1)]] = rounded[: most + 1]
        return scaled
    return rounded


# -- PNG (specification, third edition) ------------------------------------------------------------------------------

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Number of channels by color type."""

FREE_CHUNKS = 4096
"""Chunks of any size that are allowed; more must have 512 bytes in the mean. Encoders write 8 KiB and more."""

UNCHECKED = 2**20
"""Compressed bytes that are inflated without a check; at most two seconds in libpng.

NOTE: libpng inflates all of them, also those after the last row.
"""

_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_ANIMATED = {b"acTL", b"fcTL", b"fdAT"}
_COMPRESSED = {b"iCCP", b"zTXt", b"iTXt"}
_TEXTS = {b"tEXt", b"zTXt", b"iTXt"}
_XMP, _RAW_EXIF = b"XML:com.adobe.xmp", b"Raw profile type exif"  # names of texts
_LONGEST_NAME = 80
_LONGEST_TEXT = 2**20
_CRITICAL = {b"PLTE", b"IEND"}
_CHUNK = struct.Struct(">I4s")
_IHDR = struct.Struct(">I4sIIBBBBB")


class PngHeader(ImageHeader):
    """The header of a PNG; after ``check`` also where its compressed texts and colour profiles are."""

    def __init__(self, data: Bytes) -> None:
        """Read the header alone; ``DecodeError`` if it is not that of a PNG."""
        if bytes(data[:8]) != b"\x89PNG\r\n\x1a\n":
            raise DecodeError("PNG: its first 8 bytes are not those of a PNG")
        try:
            length, kind, width, height, bits, color, method, filters, interlace = _IHDR.unpack_from(data, 8)
        except struct.error:
            raise DecodeError(f"PNG: cut off in its header, after {len(data)} bytes") from None
        if kind != b"IHDR" or length != 13:
            raise DecodeError("PNG: it does not begin with its header, IHDR")
        if bits not in _DEPTHS.get(color, ()) or method or filters or interlace > 1:
            raise DecodeError(
                f"PNG: color type {color} with {bits} bits, compressed by {method}, {filters}, {interlace}"
            )
        super().__init__("png", width, height, CHANNELS[color], bits)
        self._texts: list[Span] = []
        self._named: dict[bytes, tuple[bytes, Span]] = {}  # texts with metadata: their kind, and their content

    def check(self, data: Bytes, max_pixels: int) -> None:
        """Raise ``DecodeError`` for an animated file, or one with more image data than its size needs."""
        image: list[Span] = []
        position, size = 33, len(data)
        most = FREE_CHUNKS + size // 512
        for _ in range(most):
            if position + 8 > size:
                break  # the last chunks may be missing
            start = position + 8
            length, kind = _CHUNK.unpack_from(data, position)
            if start + length + 4 > size and kind != b"IEND":
                # NOTE: OpenCV from 4.12 on allocates the declared length, up to 4 GiB, before it reads the bytes.
                if length >= 2**31 or (kind != b"IDAT" and not image):
                    raise DecodeError(f"PNG: cut off in a chunk {kind!r} of {length} bytes")
                self.by_pillow = True  # all rows may be there
                if kind == b"IDAT":
                    image.append((start, size))
                break
            if kind == b"eXIf":
                self.exif = [(start, start + length)]
            elif kind in _TEXTS:
                name = bytes(data[start : start + _LONGEST_NAME]).partition(b"\0")[0]
                self._named[name] = kind, (start + len(name) + 1, start + length)
            if kind == b"IDAT":
                image.append((start, start + length))
            elif kind in _COMPRESSED:
                self._texts.append((position, start + length + 4))
            elif kind in _ANIMATED:
                raise DecodeError("PNG: animated (APNG) files are not read; save one of the frames")
            elif not kind[0] & 0x20 and kind not in _CRITICAL:  # a capital first letter: a decoder must know it
                raise DecodeError(f"PNG: a chunk {kind!r} at byte {position + 4}")
            if kind == b"IEND":
                break
            position = start + length + 4
        else:
            raise DecodeError(f"PNG: more than {most} chunks in {size} bytes")
        if not image:
            raise DecodeError("PNG: it has no image data")
        row = 1 + (self.width * self.channels * self.bits + 7) // 8
        limit = 2 * row * self.height + 2**12  # interlaced, it is somewhat more than the rows
        if sum(end - start for start, end in image) > limit or _grows_beyond(data, image, limit):
            shown = f"{self.width}x{self.height} pixels of {self.channels}x{self.bits} bits"
            raise DecodeError(f"PNG: its image data grow to more than {shown}")

    def orientation(self, data: Bytes) -> int:
        """The orientation in its chunk ``eXIf``, else in a text with EXIF as ImageMagick writes it, else in XMP."""
        exif = b"".join([bytes(data[start:end]) for start, end in self.exif])
        if not self.exif and _RAW_EXIF in self._named:
            exif = _unhex(self._text(data, _RAW_EXIF))
        return orientation(exif, self._text(data, _XMP)) if exif or _XMP in self._named else 1

    def _text(self, data: Bytes, name: bytes) -> bytes:
        """The text of that name; empty without one, if it is damaged, and if it is longer than a mebibyte."""
        if name not in self._named:
            return b""
        kind, (start, end) = self._named[name]
        content = bytes(data[start:end])
        is_compressed = kind == b"zTXt"
        if kind == b"iTXt":
            is_compressed = content[:1] == b"\1"
            content = content[2:].split(b"\0", 2)[-1]  # after a language, and the name in it
        elif is_compressed:
            content = content[1:]
        if not is_compressed:
            return content
        inflater = zlib.decompressobj()
        try:
            text = inflater.decompress(content, _LONGEST_TEXT)
        except zlib.error:
            return b""
        return b"" if inflater.unconsumed_tail else text

    def without_texts(self, data: Bytes) -> Bytes:
        """The file without the chunks that libpng inflates and OpenCV does not use.

        NOTE: a text of some kilobytes can grow to gigabytes. libpng's warnings on stderr quote the name of a profile,
        which a client chooses, line ends included.
        """
        if not self._texts:
            return data
        edges = [0, *(edge for span in self._texts for edge in span), len(data)]
        return b"".join([data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)])


def _unhex(text: bytes) -> bytes:
    """EXIF from hexadecimal digits after three lines; empty for anything else."""
    try:
        return bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return b""


def _grows_beyond(data: Bytes, spans: Sequence[Span], limit: int) -> bool:
    """Whether the zlib stream in these parts inflates to more than ``limit`` bytes; false for a damaged one.

    The last ``UNCHECKED`` bytes are not inflated.
    """
    unchecked = sum(end - start for start, end in spans) - UNCHECKED
    inflater, grown = zlib.decompressobj(), 0
    pieces = (data[at : min(at + 2**16, end)] for start, end in spans for at in range(start, end, 2**16))
    for piece in pieces:
        if unchecked <= 0 or inflater.eof:
            return False
        unchecked -= len(piece)
        try:
            while piece:
                grown += len(inflater.decompress(piece, min(2**20, limit + 1 - grown)))
                if grown > limit:
                    return True
                piece = inflater.unconsumed_tail
        except zlib.error:
            return False
    return False
