"""Which JPEGs go to a decoder on the GPU, which takes less than libjpeg and reports little of what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torchpipe_py.backends.base import Data, Isolation, StatelessBackend
from torchpipe_py.backends.image.opencv import encoded_bytes, max_pixels
from torchpipe_py.backends.signature import ENCODED, ENCODED_IMAGE, Signature
from torchpipe_py.errors import BackendUnavailable, DecodeError
from torchpipe_py.images.header import HeaderCheck
from torchpipe_py.images.jpeg import PROGRESSIVE, JpegHeader
from torchpipe_py.keys import TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY

_END = b"\xff\xd9"
_RESTART_INTERVAL = b"\xff\xdd"

CHECK = HeaderCheck(("jpeg",))


class GpuJpeg(NamedTuple):
    """Size in pixels as stored, number of color components, and the EXIF orientation 1..8 (1: as stored)."""

    width: int
    height: int
    components: int
    orientation: int


def read_header(data: bytes, check: HeaderCheck = CHECK) -> GpuJpeg:
    """The header; ``DecodeError`` for what ``check`` refuses, is cut off, or is of a kind the GPU does not take."""
    try:
        jpeg = JpegHeader(data)
    except DecodeError:
        check(data)  # says what the bytes are, if they are no JPEG
        raise
    check(data, jpeg)
    if not jpeg.is_tight:
        raise DecodeError("JPEG: there are bytes between its segments, which is not supported on the GPU")
    if jpeg.components == 4:
        raise DecodeError("JPEG: 4 color components (CMYK) are not supported on the GPU")
    if data.rfind(_END, jpeg.data_start) < 0:
        raise DecodeError(f"JPEG: cut off after {len(data)} bytes, there is no end marker")
    if jpeg.frame == PROGRESSIVE and _RESTART_INTERVAL in data:
        # NOTE: nvJPEG (CUDA 13.0, H200) decodes these wrongly without a word; `torchpipe parity` showed it.
        raise DecodeError("JPEG: progressive with restart markers is not supported on the GPU")
    if jpeg.components == 3 and jpeg.transform == 0:
        raise DecodeError("JPEG: colors stored as RGB, not YCbCr, are not supported on the GPU")
    return GpuJpeg(jpeg.width, jpeg.height, jpeg.components, jpeg.orientation(data))


class WholeCheck:
    """Refuses what the JPEG engines of a GPU must not have, of the files that ``read_header`` takes.

    Where compressed data is broken, the engines show pixels of an image that they decoded before, which may be another
    client's (H200, nvImageCodec 0.9 and torchvision 0.26). So they get a file only if libjpeg-turbo decodes it without
    a warning, at an eighth of its size, which takes two thirds of the time of decoding it and no lock. libjpeg-turbo
    also takes files whose tables or components are missing, or whose tables have symbols that mean nothing: they must
    be plain.
    """

    def __init__(self) -> None:
        """``BackendUnavailable`` where simplejpeg, which brings libjpeg-turbo, is not installed."""
        try:
            import simplejpeg
        except ImportError as error:
            problem = "JPEGs are checked before the GPU's JPEG engines decode them, which needs simplejpeg"
            raise BackendUnavailable(f"{problem} (pip install simplejpeg): {error}") from error
        self._decode: Callable[..., Any] = simplejpeg.decode_jpeg

    def __call__(self, data: bytes) -> None:
        """``DecodeError`` for a broken file, and for a whole one of a kind that the engines do not get."""
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

# NOTE: libjpeg-turbo's fast path takes codes that no table has without a warning. It is not used where restart markers
# may come; this interval is longer than the image, and the file's own, if there is one, comes later and counts.
_INTERVAL = b"\xff\xdd\x00\x04" + MOST_MCUS.to_bytes(2, "big")

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]").search
_SAMPLINGS = {(0x11,), *((luma, 0x11, 0x11) for luma in (0x11, 0x21, 0x12, 0x22))}
_SOF0, _DHT, _EOI, _SOS, _DQT, _DRI, _COM = 0xC0, 0xC4, 0xD9, 0xDA, 0xDB, 0xDD, 0xFE
_DC_SYMBOLS = bytes(range(12))
_AC_SYMBOLS = bytes([0x00, 0xF0, *(run << 4 | size for run in range(16) for size in range(1, 11))])


def plain_scan(data: bytes) -> int:
    """Where the compressed data of a plain JPEG starts; 0 for one of another kind.

    Plain is baseline with one scan of all its components, in their order, and with every table it needs, those of 8
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
            if len(segment) != 2 or segment == b"\0\0":
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


class CheckJpeg(StatelessBackend):
    """Passes on JPEG bytes that ``DecodeTensor`` may decode unchecked, on the CPU, beside whatever the GPU does.

    ``result`` is ``data``. A broken file, one of another format, one of more than ``max_pixels``, and one that the JPEG
    engines do not take (progressive, CMYK, several scans): no ``result``, ``error`` is a ``DecodeError``. A next node
    ``DecodeMat`` with ``filter = "or"`` decodes it on the CPU, and ``DecodeTensor`` takes that as well. Needs
    simplejpeg.
    """

    takes, gives = ENCODED, ENCODED
    passes_on = True
    isolation = Isolation.REFUSED

    max_pixels = max_pixels()

    def setup(self) -> None:
        self._check = HeaderCheck(("jpeg",), self.max_pixels)
        self._whole_check = WholeCheck()

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def forward_item(self, item: Data) -> None:
        data = item[TASK_DATA_KEY]
        data = data if isinstance(data, bytes) else encoded_bytes(data).tobytes()
        try:
            read_header(data, self._check)
            self._whole_check(data)
        except DecodeError as error:
            item[TASK_ERROR_KEY] = error
        else:
            item[TASK_RESULT_KEY] = data
