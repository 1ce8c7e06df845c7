"""Which JPEGs go to a decoder on the GPU: those decoders take less than libjpeg, and say little of what they refuse."""

from __future__ import annotations

from typing import NamedTuple

from torchpipe_py.errors import DecodeError
from torchpipe_py.images.header import HeaderCheck
from torchpipe_py.images.jpeg import PROGRESSIVE, JpegHeader

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
