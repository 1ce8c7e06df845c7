"""Decodes images to Mats with OpenCV, after a check of their headers.

The check comes first because a decoder allocates the size that a header declares.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from torchpipe_py.backends.base import Data, Isolation, ItemBackend
from torchpipe_py.backends.image import formats, original
from torchpipe_py.backends.image.formats import Bytes, ImageHeader
from torchpipe_py.backends.image.geometry import MAX_PIXELS, Size, max_pixels
from torchpipe_py.backends.image.heif import HeifHeader, heif_format
from torchpipe_py.backends.image.jpeg import JpegHeader
from torchpipe_py.backends.image.mat import MAT_COLORS, UINT8, Recolor, encoded_bytes, to_color
from torchpipe_py.backends.image.memory import DECODING, SMALL
from torchpipe_py.backends.image.pillow import PillowDecoder
from torchpipe_py.backends.image.tiff import read_tiff
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import ENCODED, ENCODED_IMAGE, MAT, Signature
from torchpipe_py.errors import DecodeError, first_line, nearest
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import Value, to_str, to_strings

FORMATS = ("jpeg", "png", "webp", "bmp")
"""The default formats."""


def is_large(pixels: int, max_pixels: int) -> bool:
    """Whether an image has more than a quarter of ``max_pixels``, so that decoding may take seconds."""
    return 4 * pixels > max_pixels


# For each format that a configuration may name: its header reader, and the first bytes of its files.
_FORMATS: dict[str, tuple[Callable[[Bytes], ImageHeader], tuple[bytes, ...]]] = {
    "jpeg": (JpegHeader, (b"\xff\xd8",)),
    "png": (formats.PngHeader, (b"\x89P",)),
    "webp": (formats.read_webp, (b"RI",)),
    "bmp": (formats.read_bmp, (b"BM",)),
    "gif": (formats.read_gif, (b"GI",)),
    "tiff": (read_tiff, (b"II", b"MM")),
    "pnm": (formats.PnmHeader, tuple(b"P%d" % kind for kind in range(1, 7))),
    "heic": (HeifHeader, ()),
    "avif": (HeifHeader, ()),
}
_BY_START = {start: name for name, (_, starts) in _FORMATS.items() for start in starts}


def _format_of(data: Bytes) -> str | None:
    """The format of encoded bytes, by their start."""
    return _BY_START.get(bytes(data[:2])) or heif_format(data)


def _shown(name: str) -> str:
    return "WebP" if name == "webp" else name.upper()


def _one_of(names: Sequence[str]) -> str:
    *others, last = map(_shown, names)
    return f"{', '.join(others)} or {last}" if others else last


def to_formats(value: Value) -> tuple[str, ...]:
    """Names of formats, from a list or from ``"jpeg, png"``; ``ValueError`` for an unknown name, or without any."""
    names = tuple(name.lower() for name in to_strings(value))
    for name in names:
        if name not in _FORMATS:
            raise ValueError(f"no image format {name!r} can be read here; {nearest(name, _FORMATS)}")
    if not names:
        raise ValueError(f"expected at least one of {', '.join(_FORMATS)}")
    return names


class HeaderCheck:
    """Reads headers, and refuses images of other formats than ``formats`` or of more than ``max_pixels``."""

    def __init__(self, formats: Sequence[str] = FORMATS, max_pixels: int = MAX_PIXELS) -> None:
        self._formats, self.max_pixels = tuple(formats), max_pixels

    def __call__(self, data: Bytes) -> ImageHeader:
        """The header, read in time at most linear in the bytes; ``DecodeError``, which names the bound, if refused."""
        name = _format_of(data)
        if name is None or name not in self._formats:
            raise DecodeError(f"{len(data)} bytes: not a {_one_of(self._formats)} image{_hint(data)}")
        try:
            header = _FORMATS[name][0](data)
            if header.width <= 0 or header.height <= 0 or header.width * header.height > self.max_pixels:
                bound = f", more than max_pixels = {self.max_pixels}" if min(header.width, header.height) > 0 else ""
                article = "an" if name == "avif" else "a"
                raise DecodeError(f"{article} {_shown(name)} of {header.width}x{header.height} pixels{bound}")
            header.check(data, self.max_pixels)
        except (struct.error, IndexError):
            raise DecodeError(f"{len(data)} bytes: {_shown(name)}: cut off in its header") from None
        except DecodeError as error:
            raise DecodeError(f"{len(data)} bytes: {error}") from None
        return header


def declared_size(data: object) -> ImageHeader | None:
    """The properties in the header of encoded bytes; read in microseconds.

    ``None`` if unknown: such an image is refused anyway.
    """
    if isinstance(data, np.ndarray):
        data = data.data if data.ndim == 1 and data.dtype == np.uint8 else b""
    if not isinstance(data, (bytes, bytearray, memoryview)) or (name := _format_of(data)) is None:
        return None
    try:
        return _FORMATS[name][0](data)
    except (struct.error, IndexError, DecodeError):
        return None


_FILE_NAME = re.compile(
    rb"[\x20-\x7e]{1,200}(?i:%b)" % b"|".join(re.escape(each.encode()) for each in formats.IMAGE_SUFFIXES)
)


def _hint(data: Bytes) -> str:
    """The probable kind of unsupported bytes, and what to do with them."""
    known = _format_of(data)
    if known:
        return f"; it looks like {_shown(known)}, which DecodeMat reads if its 'formats' include it"
    if bytes(data[4:8]) == b"ftyp":
        return "; it looks like a video, which cannot be read as an image"
    if bytes(data[:5]).startswith((b"/9j/", b"iVBOR", b"UklGR", b"data:")):  # JPEG, PNG, WebP, and URLs with them
        return '; it looks like base64: decode it first, or send it as JSON, {"inputs": {"data": {"b64": "…"}}}'
    if bytes(data[:1]) == b"{":
        return "; it looks like JSON, which over HTTP needs the header Content-Type: application/json"
    if _FILE_NAME.fullmatch(bytes(data[:256])):
        return "; it looks like the name of a file: send its content, with curl by --data-binary @FILE"
    return "" if len(data) else "; nothing was sent"


Least = Callable[[int, int], Size]
"""Of an upright image of that height and width, the least height and width to decode it at."""


class Decoded(NamedTuple):
    """A Mat, the ``size`` of the whole image, and the ``reduction``: 1, or the Mat has 1/2, 1/4 or 1/8 of that size.

    A fraction of a pixel is rounded up; the last column and row then reach beyond the edge of the image.
    """

    mat: Any
    size: Size
    reduction: int


def _reduction(size: Size, least: Size, orientation: int) -> int:
    """The largest reduction of an upright image that leaves the ``least`` sides; 1 for none.

    What reaches beyond the edge must be on the right and below: if the image is mirrored or turned so that it is not,
    nothing may reach beyond.
    """
    height, width = size
    most = min(height // least[0], width // least[1])
    for reduction in original.REDUCTIONS:
        divides = not (height % reduction or width % reduction)
        if reduction <= most and (divides or orientation in (1, 5)):
            return reduction
    return 1


class MatDecoder:
    """Decodes image bytes that pass a ``HeaderCheck`` to a Mat H×W×3, or H×W×1 if gray, upright.

    Its pixels are those of Pillow's ``ImageOps.exif_transpose(image).convert("RGB")``, and gray is converted from
    them. ``cv2.imdecode`` decodes, and Pillow what OpenCV reads differently or not at all. Where simplejpeg is
    installed, it decodes JPEGs to the same pixels in less time, unless they are damaged.

    In a process, large images (see ``is_large``) use at most eight bytes for each of ``max_pixels`` at a time, and the
    others half as much in addition; the next image waits.
    """

    def __init__(self, color: str, formats: Sequence[str] = FORMATS, max_pixels: int = MAX_PIXELS) -> None:
        import cv2

        self._check = HeaderCheck(formats, max_pixels)
        self._max_pixels = max_pixels
        self._imdecode: Callable[..., Any] = cv2.imdecode
        # NOTE: not IMREAD_GRAYSCALE, which makes linear light of a PNG with a chunk sRGB or gAMA. The orientation is
        # applied by one rule for all decoders and formats.
        self._flags = (cv2.IMREAD_COLOR_RGB if color == "rgb" else cv2.IMREAD_COLOR_BGR) | cv2.IMREAD_IGNORE_ORIENTATION
        self._reduced = {by: getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{by}") for by in original.REDUCTIONS} | {1: 0}
        self._is_rgb, self._is_gray = color == "rgb", color == "gray"
        # NOTE: OpenCV 5 gives BGR for RGB of 16 bits from a TIFF.
        self._of_any_depth = cv2.IMREAD_COLOR_BGR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
        self._cv2_error = cv2.error
        # NOTE: simplejpeg and OpenCV have the same libjpeg-turbo, but OpenCV copies the pixels once more.
        try:
            import simplejpeg
        except ImportError:
            self._decode_jpeg: Callable[..., Any] | None = None
        else:
            self._decode_jpeg = simplejpeg.decode_jpeg
        self._swap = partial(cv2.cvtColor, code=cv2.COLOR_RGB2BGR)
        self._to_gray = partial(cv2.cvtColor, code=cv2.COLOR_BGR2GRAY)
        self._turn = Turn()
        self._by_pillow = PillowDecoder(formats)

    def __call__(self, data: Any) -> Any:
        """A Mat, of the size in the header or turned by a quarter; HEIC may be cropped.

        Raises ``DecodeError`` for bytes that cannot be decoded, ``InvalidRequest`` for a value that is not bytes.
        """
        return self.decode(data).mat

    def decode(self, data: Any, least: Least | None = None) -> Decoded:
        """``__call__``, but a JPEG is decoded at the smallest of 1/2, 1/4 and 1/8 of its size that has the ``least``
        sides, or whole if none has.
        """
        encoded = encoded_bytes(data)
        header = self._check(data if isinstance(data, bytes) else encoded.data)
        if header.memory <= SMALL:
            return self._decode(header, encoded, least)
        large = is_large(header.width * header.height, self._max_pixels)
        with DECODING.reserved(header.memory, 8 * self._max_pixels, large):
            return self._decode(header, encoded, least)

    def _decode(self, header: ImageHeader, encoded: np.ndarray, least: Least | None) -> Decoded:
        content = np.frombuffer(header.without_texts(encoded.data), UINT8)
        orientation = header.orientation(encoded.data)
        height, width = (header.width, header.height) if orientation >= 5 else (header.height, header.width)
        reduction = 1
        if least is not None and header.format == "jpeg" and not header.by_pillow:
            reduction = _reduction((height, width), least(height, width), orientation)
        mat = None if header.by_pillow else self._by_opencv(header, content, reduction)
        if mat is None and (header.by_pillow or header.format == "png"):  # Pillow passes over wrong checksums
            mat = self._by_pillow(header.format, content.tobytes())
            mat = mat if self._is_rgb else self._swap(mat)
        if mat is None:
            raise DecodeError(
                f"{len(encoded)} bytes: OpenCV cannot decode this {header.format} of {header.width}x{header.height}"
                " pixels; it is damaged, cut off or of a rare kind"
            )
        mat = self._turn(mat, orientation)
        mat = self._to_gray(mat)[:, :, None] if self._is_gray else mat
        return Decoded(mat, mat.shape[:2] if reduction == 1 else (height, width), reduction)

    def _by_opencv(self, header: ImageHeader, content: np.ndarray, reduction: int) -> Any:
        """A Mat in this decoder's order, or BGR if it is to be gray; ``None`` if OpenCV cannot decode it."""
        levels = header.levels()
        if header.format == "jpeg" and reduction == 1 and self._decode_jpeg is not None:
            try:
                return self._decode_jpeg(content, "RGB" if self._is_rgb else "BGR")
            except ValueError:
                pass  # libjpeg-turbo has warned: OpenCV decides what is read of a damaged file
        try:
            if levels is None:
                return self._imdecode(content, self._flags | self._reduced[reduction])
            mat = self._imdecode(content, self._of_any_depth)
        except self._cv2_error as error:
            reason = getattr(error, "err", "") or first_line(error)  # the rest names source files of OpenCV
            raise DecodeError(f"{len(content)} bytes: OpenCV: {reason.strip()}") from None
        if mat is None or mat.dtype.kind != "u":
            return None  # a TIFF may declare 16 bits of other types
        mat = levels[mat]
        return self._swap(mat) if self._is_rgb else mat


class Turn:
    """Turns a Mat upright, given its orientation 1..8 (Exif 2.3, table 6)."""

    def __init__(self) -> None:
        import cv2

        def transverse(mat: Any) -> Any:
            return cv2.flip(cv2.rotate(mat, cv2.ROTATE_90_CLOCKWISE), 0)

        self._turns: dict[int, Callable[[Any], Any]] = {
            2: partial(cv2.flip, flipCode=1),
            3: partial(cv2.rotate, rotateCode=cv2.ROTATE_180),
            4: partial(cv2.flip, flipCode=0),
            5: cv2.transpose,
            6: partial(cv2.rotate, rotateCode=cv2.ROTATE_90_CLOCKWISE),
            7: transverse,
            8: partial(cv2.rotate, rotateCode=cv2.ROTATE_90_COUNTERCLOCKWISE),
        }

    def __call__(self, mat: Any, orientation: int) -> Any:
        turn = self._turns.get(orientation)
        return mat if turn is None else turn(mat)


class DecodeMat(ItemBackend):
    """Encoded image bytes (JPEG, PNG, WebP, BMP) to an upright H×W×3 Mat; H×W×1 with ``color = "gray"``.

    Any pixel format becomes these channels of 8 bits: the pixels of Pillow's
    ``ImageOps.exif_transpose(image).convert("RGB")``, and gray is converted from them. Alpha is dropped.
    No ``result``, but a ``DecodeError`` as ``error``: bytes that are not an image, a format that is not in
    ``formats``, more pixels than ``max_pixels``, JPEGs of more than 32 scans or of more than 16 × ``max_pixels`` in
    all of them, animated PNG and WebP. All this is read from the header, before OpenCV sees the image. A process uses
    at most twelve bytes for each of ``max_pixels`` to decode at a time (18 with HEIC or AVIF); the next image waits.
    With ``at_least`` a JPEG is decoded at 1/2, 1/4 or 1/8 of its size, the smallest at which both sides are still that
    many times what the next resize makes of it (``"1x"``, ``"2x"``), or whole if none is. ``ConfigError`` unless that
    resize is one of Mats, to a size that the configuration sets, with only ``cvtColorMat`` before it. Then
    ``image_size``, ``to_original`` and ``inverse_trans`` are those of the whole image, and so are all limits. CMYK,
    other formats, and images that EXIF mirrors or turns and whose sides cannot be divided are decoded whole.
    An image of more than a quarter of ``max_pixels`` does not delay smaller ones if its node takes one request at a
    time and has two or more instances. The format ``heic`` needs pi-heif, ``avif`` Pillow 11.3.
    A decoded image, H×W×3 ``uint8`` in the order of its ``color`` (a frame of a video), is passed on.
    """

    reads = ()

    takes, gives = ENCODED, MAT
    isolation = Isolation.MOVES
    keeps_nothing = True

    decodes_reduced = True

    at_least = Param(
        to_str, "", choices=("", "1x", "2x"), doc="decode JPEGs no larger than 1 or 2 times what the next resize needs"
    )
    color = Param(to_color, "bgr", choices=MAT_COLORS, doc="channel order of the Mat, or gray for one channel")
    formats = Param(to_formats, FORMATS, doc="formats to read, of jpeg, png, webp, bmp, gif, tiff, pnm, heic, avif")
    max_pixels = max_pixels()

    def prefer_color(self, color: str | None) -> str | None:
        # The backends between them get one channel, as the configuration says.
        if color is not None and self.color != "gray":
            self.color = color
        return None

    def setup(self) -> None:
        self._decode = MatDecoder(self.color, self.formats, self.max_pixels).decode
        self._recolor = Recolor(self.color)
        sizes = [cls.sizes(params) for cls, params in self.reduced_for]
        self._sizes, self._times = [size for size in sizes if size is not None], int(self.at_least[:1] or 1)

    def signature(self) -> Signature:
        return ENCODED_IMAGE

    def is_large(self, item: Data) -> bool:
        header = declared_size(item[TASK_DATA_KEY])
        return header is not None and is_large(header.width * header.height, self.max_pixels)

    def forward_item(self, item: Data) -> None:
        data, reduction = item[TASK_DATA_KEY], 1
        try:
            if isinstance(data, np.ndarray) and data.ndim == 3:
                mat = self._recolor(item)
                size: Size = mat.shape[:2]  # type: ignore[assignment]
            else:
                mat, size, reduction = self._decode(data, self._least if self._sizes else None)
        except DecodeError as error:
            item[TASK_ERROR_KEY] = error
        else:
            item[TASK_RESULT_KEY], item[TASK_COLOR_KEY] = mat, self.color
            original.begin(item, *size, reduction)

    def _least(self, height: int, width: int) -> Size:
        sizes = [size(height, width) for size in self._sizes]
        return self._times * max([high for high, _ in sizes]), self._times * max([wide for _, wide in sizes])
