"""Files with metadata that say how a picture is turned, as cameras and programs write them, and as nobody should."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from kit.pictures import jpeg_segment, png_chunk, webp_chunks, webp_of

TAG = 0x0112


def scene(height: int = 21, width: int = 34) -> np.ndarray:
    """RGB, uint8, smooth, unlike itself in every turn."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    waves = [128 + 100 * np.sin(x / 7 + shift) * np.cos(y / 9 - shift) + 2 * x - y for shift in range(3)]
    return np.clip(np.stack(waves, -1), 0, 255).astype(np.uint8)


def entry(order: str, tag: int, kind: int, count: int, value: bytes) -> bytes:
    return struct.pack(order + "HHI", tag, kind, count) + value.ljust(4, b"\0")[:4]


def exif_of(order: str, entries: list[bytes], start: bytes = b"", rest: bytes = b"", count: int | None = None) -> bytes:
    """A TIFF with these entries, and ``rest`` behind them."""
    start = start or (b"II*\0" if order == "<" else b"MM\0*")
    number = len(entries) if count is None else count
    return start + struct.pack(order + "IH", 8, number) + b"".join(entries) + bytes(4) + rest


def short(value: int, order: str = "<") -> bytes:
    return entry(order, TAG, 3, 1, struct.pack(order + "H", value))


def kinds_of_exif() -> dict[str, bytes]:
    """EXIF by what is special about it."""
    behind = 8 + 2 + 12 + 4  # the place behind a directory of one entry

    def one(kind: int, count: int, value: bytes) -> bytes:
        return exif_of("<", [entry("<", TAG, kind, count, value)])

    def away(kind: int, count: int, value: bytes) -> bytes:
        return exif_of("<", [entry("<", TAG, kind, count, struct.pack("<I", behind))], rest=value)

    return {
        **{f"orientation {value}": exif_of("<", [short(value)]) for value in range(10)},
        **{f"big endian {value}": exif_of(">", [short(value, ">")]) for value in (1, 5, 6, 8)},
        "a wrong start, little endian": exif_of("<", [short(6)], b"II\0*"),
        "a wrong start, big endian": exif_of(">", [short(6, ">")], b"MM*\0"),
        "a prefix": b"Exif\0\0" + exif_of("<", [short(6)]),
        "300": exif_of("<", [short(300)]),
        "twice, 6 first": exif_of("<", [short(6), short(3)]),
        "twice, 0 first": exif_of("<", [short(0), short(3)]),
        "twice, the first empty": exif_of("<", [entry("<", TAG, 3, 0, b""), short(3)]),
        "twice, the first of no type": exif_of("<", [entry("<", TAG, 99, 1, b"\6\0"), short(3)]),
        "twice, the first outside": exif_of("<", [entry("<", TAG, 3, 9, b"\xff\xff\0\0"), short(3)]),
        "two values": one(3, 2, struct.pack("<HH", 6, 3)),
        "three values": away(3, 3, struct.pack("<HHH", 8, 3, 1)),
        "byte": one(1, 1, b"\6"),
        "text": one(2, 2, b"6\0"),
        "long": one(4, 1, struct.pack("<I", 6)),
        "large long": one(4, 1, struct.pack("<I", 0x10006)),
        "rational": away(5, 1, struct.pack("<II", 12, 2)),
        "no number": away(5, 1, struct.pack("<II", 6, 0)),
        "signed byte": one(6, 1, b"\6"),
        "undefined": one(7, 1, b"\6"),
        "signed short": one(8, 1, struct.pack("<h", 6)),
        "negative": one(8, 1, struct.pack("<h", -6)),
        "signed long": one(9, 1, struct.pack("<i", 6)),
        "signed rational": away(10, 1, struct.pack("<ii", 6, 1)),
        "float": one(11, 1, struct.pack("<f", 6)),
        "fraction": one(11, 1, struct.pack("<f", 6.5)),
        "double": away(12, 1, struct.pack("<d", 8)),
        "other tags around": exif_of(
            "<", [entry("<", 0x010F, 2, 4, b"abc\0"), short(7), entry("<", 0x0131, 2, 4, b"abc\0")]
        ),
        "cut off": exif_of("<", [short(6)])[:14],
        "more tags than there are": exif_of("<", [short(6)], count=9),
        "empty": exif_of("<", []),
    }


def xmp_of(value: int, element: bool = False) -> bytes:
    text = f"<tiff:Orientation>{value}</tiff:Orientation>" if element else f'<a tiff:Orientation="{value}"/>'
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/">{text}</x:xmpmeta>'.encode()


EXIF_6, EXIF_3, EXIF_0 = (exif_of("<", [short(value)]) for value in (6, 3, 0))
EXIF_NONE = exif_of("<", [])

KINDS = kinds_of_exif()

Tag = Callable[[bytes, bytes | None, bytes | None], bytes]
"""A file with EXIF and XMP, either of which may be missing."""


def _in_jpeg(data: bytes, exif: bytes | None, xmp: bytes | None) -> bytes:
    first = b"" if exif is None else jpeg_segment(0xE1, b"Exif\0\0" + exif)
    second = b"" if xmp is None else jpeg_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp)
    return data[:2] + first + second + data[2:]


def _in_png(data: bytes, exif: bytes | None, xmp: bytes | None) -> bytes:
    chunks = b"" if exif is None else png_chunk(b"eXIf", exif)
    chunks += b"" if xmp is None else png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    return data[:33] + chunks + data[33:]


def _in_webp(data: bytes, exif: bytes | None, xmp: bytes | None) -> bytes:
    image = [chunk for chunk in webp_chunks(data) if chunk[0] != b"VP8X"]
    with Image.open(io.BytesIO(data)) as opened:
        (width, height), has_alpha = opened.size, opened.mode == "RGBA"
    flags = 0x10 * has_alpha | 0x08 * (exif is not None) | 0x04 * (xmp is not None)
    canvas = bytes([flags, 0, 0, 0]) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    after = [] if exif is None else [(b"EXIF", exif)]
    after += [] if xmp is None else [(b"XMP ", xmp)]
    return webp_of([(b"VP8X", canvas), *image, *after])


TAGGED: dict[str, Tag] = {"jpeg": _in_jpeg, "png": _in_png, "webp": _in_webp}


def with_metadata(format: str, data: bytes) -> dict[str, bytes]:
    """The file with every kind of metadata that its format can have."""
    if format not in TAGGED:
        return {"none": data}
    tag = TAGGED[format]
    files = {"none": data, **{f"exif, {name}": tag(data, exif, None) for name, exif in KINDS.items()}}
    files |= {f"xmp {value}": tag(data, None, xmp_of(value)) for value in range(10)}
    files |= {
        "xmp, an element": tag(data, None, xmp_of(8, element=True)),
        "exif 6, xmp 3": tag(data, EXIF_6, xmp_of(3)),
        "exif 0, xmp 3": tag(data, EXIF_0, xmp_of(3)),
        "exif without it, xmp 3": tag(data, EXIF_NONE, xmp_of(3)),
        "exif of a wrong type, xmp 3": tag(data, KINDS["undefined"], xmp_of(3)),
        "exif 6 twice, then 3": tag(tag(data, EXIF_3, None), EXIF_6, None) if format != "webp" else data,
    }
    return files | {"jpeg": _jpeg_files, "png": _png_files}.get(format, lambda _: {})(data)


def _jpeg_files(data: bytes) -> dict[str, bytes]:
    cut = len(EXIF_6) - 10
    long = data[:2] + jpeg_segment(0xE1, b"Exif\0\0" + EXIF_6[:cut]) + jpeg_segment(0xE1, b"Exif\0\0" + EXIF_6[cut:])
    return {
        "exif behind other segments": data[:2] + jpeg_segment(0xFE, b"text") + _in_jpeg(data, EXIF_6, None)[2:],
        "exif in two segments": long + data[2:],
        "exif after the tables": data[:20] + _in_jpeg(data, EXIF_6, None)[2 : 2 + 4 + 6 + len(EXIF_6)] + data[20:],
        "xmp twice": _in_jpeg(_in_jpeg(data, None, xmp_of(3)), None, xmp_of(6)),
    }


def _png_files(data: bytes) -> dict[str, bytes]:
    def text(kind: bytes, content: bytes) -> bytes:
        return data[:33] + png_chunk(kind, content) + data[33:]

    digits = b"\nexif\n%8d\n%s\n" % (len(EXIF_6) + 6, (b"Exif\0\0" + EXIF_6).hex().encode())
    name, packed = b"Raw profile type exif", zlib.compress(digits)
    xmp = zlib.compress(xmp_of(6))
    gamma, chroma = (
        struct.pack(">I", 45455),
        struct.pack(">8I", *[31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000]),
    )
    colors = {
        "sRGB": [(b"sRGB", b"\0")],
        "gAMA 45455": [(b"gAMA", gamma)],
        "gAMA 100000": [(b"gAMA", struct.pack(">I", 100000))],
        "gAMA and cHRM": [(b"gAMA", gamma), (b"cHRM", chroma)],
        "sRGB, gAMA and cHRM": [(b"gAMA", gamma), (b"cHRM", chroma), (b"sRGB", b"\0")],
        "cICP": [(b"cICP", b"\x09\x10\x00\x01")],
        "cICP of sRGB": [(b"cICP", b"\x01\x0d\x00\x01")],
        "iCCP": [(b"iCCP", b"a\0\0" + zlib.compress(bytes(200)))],
        "sBIT": [(b"sBIT", b"\5\6\5")],
    }
    after = data[:-12] + png_chunk(b"eXIf", EXIF_6) + data[-12:]
    return {
        "raw profile": text(b"zTXt", name + b"\0\0" + packed),
        "raw profile as text": text(b"tEXt", name + b"\0" + digits),
        "raw profile of no digits": text(b"tEXt", b"Raw profile\0" + b"exif"),
        "compressed xmp": text(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + xmp),
        "xmp with a language": text(b"iTXt", b"XML:com.adobe.xmp\0\0\0en\0name\0" + xmp_of(6)),
        "exif after the image": after,
        **{
            name: data[:33] + b"".join(png_chunk(*chunk) for chunk in chunks) + data[33:]
            for name, chunks in colors.items()
            if name != "sBIT" or data[25] == 2
        },
    }
