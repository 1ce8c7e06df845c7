"""A table of decoders, formats and metadata: the pixels of all are those of Pillow, upright, in RGB."""

from __future__ import annotations

import io
import struct
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import cv2
import numpy as np
import PIL
import pytest
import torch
from kit.heic import HEIC
from kit.oriented import scene, with_metadata
from kit.pictures import IEND, png_chunk, png_of
from PIL import Image, ImageOps

from torchpipe_py import BackendUnavailable, DecodeError, pipe
from torchpipe_py.backends.image.decode import HeaderCheck
from torchpipe_py.backends.image.decoders import Decoders
from torchpipe_py.backends.image.gpujpeg import oriented, read_header
from torchpipe_py.plan.build import plan_pipeline
from torchpipe_py.training.samples import pil_image

FORMATS = "jpeg, png, webp, bmp, gif, tiff, pnm, avif"

SCENE = scene()
HEIGHT, WIDTH = SCENE.shape[:2]
RGB = Image.fromarray(SCENE)
GRAY = RGB.convert("L")
ALPHA = Image.merge("RGBA", (*RGB.split(), GRAY))
PALETTE = RGB.quantize(16)
DEEP = SCENE.astype(np.uint16) * 251 + 97
RANDOM = np.random.default_rng(0)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def bmp(bits: int, compression: int = 0, masks: tuple[int, ...] = (), header: int = 40) -> bytes:
    """Random pixels with masks in the header, or behind a short one."""
    pixels = RANDOM.integers(0, 256, (HEIGHT, (WIDTH * bits + 31) // 32 * 4), np.uint8).tobytes()
    packed = struct.pack(f"<{len(masks)}I", *masks)
    info = struct.pack("<IiiHHIIiiII", header, WIDTH, HEIGHT, 1, bits, compression, len(pixels), 0, 0, 0, 0) + packed
    info = info.ljust(header, b"\0")
    start = 14 + len(info)
    return b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + info + pixels


def deep_tiff(colors: int, channels: int, is_separate: bool = False, left_out: int = 0, order: str = "<") -> bytes:
    """Random pixels of 16 bits, each strip a plane if they are separate. ``left_out`` is a tag that is missing."""
    planes = channels if is_separate else 1
    pixels = RANDOM.integers(0, 256, 2 * channels * WIDTH * HEIGHT, np.uint8).tobytes()
    strip = len(pixels) // planes
    start = 8 + 2 + 9 * 12 + 4
    lists = {258: [16] * channels, 273: [start + 100 + strip * plane for plane in range(planes)], 279: [strip] * planes}
    values = {256: WIDTH, 257: HEIGHT, 259: 1, 262: colors, 277: channels, 284: 1 + is_separate, **lists}
    entries, away = b"", b""
    for tag, value in sorted(values.items()):
        kind, size = (4, "I") if tag in (273, 279) else (3, "H")
        packed = b"".join(struct.pack(order + size, each) for each in (value if isinstance(value, list) else [value]))
        place = packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack(order + "I", start + len(away))
        away += packed if len(packed) > 4 else b""
        name = 65000 if tag == left_out else tag
        entries += struct.pack(order + "HHI", name, kind, len(packed) // struct.calcsize(size)) + place
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 9)
    return head + entries + bytes(4) + away.ljust(100, b"\0") + pixels


def pnm(kind: int, most: int) -> bytes:
    """Random levels, some of which are too high."""
    channels, size = 3 if kind in (3, 6) else 1, 2 if most > 255 else 1
    levels = RANDOM.integers(0, min(most * 9 // 8 + 2, 256**size), (HEIGHT, WIDTH, channels))
    start = b"P%d # text\n%d %d\n#\n%d\n" % (kind, WIDTH, HEIGHT, most)
    if kind > 3:
        return start + levels.astype(">u2" if size == 2 else "u1").tobytes()
    return start + b" ".join(b"%d" % min(level, most) for level in levels.ravel()) + b"\n"


def cmyk(transform: int | None) -> bytes:
    """A JPEG of four components: as Adobe's programs write it, or without their segment."""
    data = saved(RGB.convert("CMYK"), "JPEG", quality=95)
    at = data.index(b"Adobe")
    if transform is None:
        return data[: at - 4] + data[at + 12 :]
    return data[: at + 11] + bytes([transform]) + data[at + 12 :]


def interlaced() -> bytes:
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    parts = [SCENE[top::down, left::right] for left, top, right, down in passes]
    rows = b"".join(b"\0" + row.tobytes() for part in parts for row in part)
    header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8, 2, 0, 0, 1)
    return png_of([(b"IHDR", header), (b"IDAT", zlib.compress(rows)), IEND])


def damaged() -> dict[str, bytes]:
    """PNGs of which Pillow reads most."""
    data = saved(RGB, "PNG")
    at = data.index(b"IDAT")
    return {
        "no end": data[:-12],
        "half an end": data[:-6],
        **{f"{cut} bytes short": data[:-cut] for cut in (1, 13, 16, 20, 30, 400)},
        "a wrong checksum": data[:-13] + bytes([data[-13] ^ 255]) + data[-12:],
        "a wrong checksum of its end": data[:-1] + b"\0",
        "a wrong checksum of the zlib stream": data[:-17] + bytes([data[-17] ^ 255]) + data[-16:],
        "damaged pixels": data[: at + 300] + bytes(40) + data[at + 340 :],
        "bytes after the end": data + b"text" * 99,
    }


FILES: dict[str, bytes] = {
    "jpeg": saved(RGB, "JPEG", quality=95, subsampling=0),
    "jpeg 4:2:0": saved(RGB, "JPEG", quality=90, subsampling=2),
    "jpeg 4:2:2": saved(RGB, "JPEG", quality=90, subsampling=1),
    "jpeg progressive": saved(RGB, "JPEG", progressive=True),
    "jpeg gray": saved(GRAY, "JPEG"),
    "jpeg rgb": saved(RGB, "JPEG", keep_rgb=True),
    "jpeg restart": saved(RGB, "JPEG", restart_marker_blocks=2),
    "jpeg cmyk": cmyk(0),
    "jpeg ycck": cmyk(2),
    "jpeg cmyk without Adobe": cmyk(None),
    "png": saved(RGB, "PNG"),
    "png gray": saved(GRAY, "PNG"),
    "png 1 bit": saved(GRAY.convert("1"), "PNG"),
    "png gray and alpha": saved(Image.merge("LA", (GRAY, GRAY.rotate(180))), "PNG"),
    "png alpha": saved(ALPHA, "PNG"),
    "png palette": saved(PALETTE, "PNG"),
    "png palette, transparent": saved(PALETTE, "PNG", transparency=bytes(range(0, 160, 10))),
    "png gray, transparent": saved(GRAY, "PNG", transparency=100),
    "png transparent": saved(RGB, "PNG", transparency=tuple(map(int, SCENE[0, 0]))),
    "png 16 bits": cv2.imencode(".png", DEEP)[1].tobytes(),
    "png alpha, 16 bits": cv2.imencode(".png", np.dstack([DEEP, DEEP[:, :, :1]]))[1].tobytes(),
    "png gray, 16 bits": cv2.imencode(".png", DEEP[:, :, 0])[1].tobytes(),
    "png interlaced": interlaced(),
    **{f"png, {name}": data for name, data in damaged().items()},
    "webp": saved(RGB, "WEBP", quality=80),
    "webp lossless": saved(RGB, "WEBP", lossless=True),
    "webp alpha": saved(ALPHA, "WEBP", lossless=True, exact=True),
    "webp alpha, lossy": saved(ALPHA, "WEBP", quality=80, exact=True),
    "bmp": saved(RGB, "BMP"),
    "bmp gray": saved(GRAY, "BMP"),
    "bmp palette": saved(PALETTE, "BMP"),
    "bmp 1 bit": saved(GRAY.convert("1"), "BMP"),
    "bmp alpha": saved(ALPHA, "BMP"),
    "bmp 5-5-5": bmp(16),
    "bmp 32 bits": bmp(32),
    **{
        f"bmp {name}, header of {header}": bmp(bits, 3, masks, header)
        for header in (40, 52, 56, 108, 124)
        for name, bits, masks in (
            ("5-6-5", 16, (0xF800, 0x7E0, 0x1F)),
            ("5-5-5 by masks", 16, (0x7C00, 0x3E0, 0x1F)),
            ("4-4-4", 16, (0xF00, 0xF0, 0xF)),
            ("bgrx", 32, (0xFF0000, 0xFF00, 0xFF)),
            ("xbgr", 32, (0xFF000000, 0xFF0000, 0xFF00)),
            ("rgbx", 32, (0xFF, 0xFF00, 0xFF0000)),
            ("bgra", 32, (0xFF0000, 0xFF00, 0xFF, 0xFF000000)),
            ("rgba", 32, (0xFF, 0xFF00, 0xFF0000, 0xFF000000)),
            ("10-10-10", 32, (0x3FF00000, 0xFFC00, 0x3FF)),
        )
    },
    **{f"bmp {cut} bytes short": saved(RGB.crop((0, 0, 33, 21)), "BMP")[:-cut] for cut in (1, 2)},
    "bmp of pixels at the start of the file": saved(RGB, "BMP").replace(b"\x36\0\0\0", bytes(4), 1),
    "bmp of pixels in the palette": saved(PALETTE, "BMP")[:10] + b"\x36\0\0\0" + saved(PALETTE, "BMP")[14:],
    "gif": saved(PALETTE, "GIF"),
    "gif transparent": saved(PALETTE, "GIF", transparency=3),
    "gif interlaced": saved(PALETTE, "GIF", interlace=1),
    "gif animated": saved(PALETTE, "GIF", save_all=True, append_images=[PALETTE.rotate(180)]),
    **{
        f"tiff {name}, orientation {turn}": saved(image, "TIFF", tiffinfo={274: turn}, compression=packed)
        for name, image, packed in (
            ("raw", RGB, None),
            ("lzw", RGB, "tiff_lzw"),
            ("jpeg", RGB, "jpeg"),
            ("gray", GRAY, "tiff_adobe_deflate"),
            ("fax", GRAY.convert("1"), "group4"),
            ("palette", PALETTE, None),
            ("alpha", ALPHA, None),
            ("gray and alpha", Image.merge("LA", (GRAY, GRAY)), None),
            ("cmyk", RGB.convert("CMYK"), None),
            ("ycbcr", RGB.convert("YCbCr"), None),
            ("gray, 16 bits", Image.fromarray(DEEP[:, :, 0]), None),
        )
        for turn in (1, 2, 3, 4, 5, 6, 7, 8)
    },
    **{f"avif, orientation {turn}": saved(RGB, "AVIF", exif=turned_exif(turn)) for turn in range(1, 9)},
    "avif 4:4:4": saved(RGB, "AVIF", subsampling="4:4:4"),
    "avif gray": saved(GRAY, "AVIF"),
    "avif alpha": saved(ALPHA, "AVIF"),
    "tiff of two pages": saved(RGB, "TIFF", save_all=True, append_images=[RGB.rotate(180)]),
    "tiff 16 bits": cv2.imencode(".tiff", DEEP)[1].tobytes(),
    **{
        f"tiff 16 bits, {name}, {order}": deep_tiff(*kind, order=order)  # type: ignore[arg-type]
        for name, kind in {
            "rgb": (2, 3),
            "rgb in planes": (2, 3, True),
            "alpha": (2, 4),
            "alpha in planes": (2, 4, True),
            "cmyk": (5, 4),
            "gray and alpha in planes": (1, 2, True),
            "rgb of one channel": (2, 3, False, 277),
            "rgb in planes of one channel": (2, 3, True, 277),
        }.items()
        for order in "<>"
    },
    **{f"pnm P{kind}, {most}": pnm(kind, most) for kind in (2, 3, 5, 6) for most in (1, 7, 100, 254, 255, 1000, 65535)},
    "pnm P4": saved(GRAY.convert("1"), "PPM"),
}

SAME_AS = {"exif, twice, 6 first": "exif, orientation 6", "exif, twice, 0 first": "exif, orientation 0"}
"""Metadata of which Pillow before version 13 takes the last tag, and what they count as: the first counts."""

READ_BY_PILLOW_ALONE = {
    "pfm": b"Pf\n%d %d\n-1.0\n" % (WIDTH, HEIGHT) + GRAY.convert("F").tobytes(),
    "pnm, a comment after a number": b"P6\n%d# width\n %d\n255\n" % (WIDTH, HEIGHT) + RGB.tobytes(),
    "png, a header of 14 bytes": png_of(
        [(b"IHDR", saved(RGB, "PNG")[16:29] + b"\0"), (b"IDAT", saved(RGB, "PNG")[41:-16]), IEND]
    ),
    "png, an unknown critical chunk": saved(RGB, "PNG")[:33] + png_chunk(b"ABCD", b"") + saved(RGB, "PNG")[33:],
    "tiff of floats": saved(GRAY.convert("F"), "TIFF"),
}
"""Rows of docs/parity.md."""


def wanted(data: bytes) -> np.ndarray | None:
    """Pillow's pixels, as stored if it raises for the metadata; ``None`` if it does not read the file.

    Of gray of 16 bits, which Pillow clips at 255, the upper 8 bits (docs/training.md).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged metadata
        try:
            image = Image.open(io.BytesIO(data))
            image.load()
        except (OSError, ValueError):
            return None
        try:
            image = ImageOps.exif_transpose(image)
        except SyntaxError:
            pass
        if image.mode in ("I", "I;16", "I;16B"):
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
        return np.asarray(image.convert("RGB"))


WITH_ALL_METADATA = "jpeg", "jpeg gray", "jpeg cmyk", "png", "png palette", "png gray, 16 bits", "webp", "webp alpha"

CASES = {
    name: {
        metadata: file
        for metadata, file in with_metadata(name.split()[0], data).items()
        if name in WITH_ALL_METADATA or metadata in ("none", "exif, orientation 6", "xmp 3", "sRGB")
    }
    for name, data in FILES.items()
}


Decode = Callable[[bytes], np.ndarray]
"""RGB, or ``DecodeError``."""


@pytest.fixture(scope="module")
def decoders() -> Iterator[dict[str, Decode]]:
    with ExitStack() as stack:

        def piped(**config: object) -> Decode:
            run = stack.enter_context(pipe({"backend": "DecodeMat", "formats": FORMATS, "instance_num": 1, **config}))

            def decode(data: bytes) -> np.ndarray:
                item = run({"data": data})
                if "error" in item:
                    raise item["error"]
                return item["result"]

            return decode

        bgr = piped(color="bgr")
        training = Decoders.of(plan_pipeline({"backend": "DecodeMat", "formats": FORMATS, "color": "rgb"}))
        yield {
            "rgb": piped(color="rgb"),
            "bgr": lambda data: bgr(data)[:, :, ::-1],
            "gray": piped(color="gray"),
            "isolated": piped(color="rgb", decode_isolation="process"),
            "training": lambda data: np.asarray(pil_image(training.decode(data))),
            "gpu": gpu,
        }


def gpu(data: bytes) -> np.ndarray:
    """The pixels as stored, turned as a GPU's are, by what the GPU's header reader says."""
    header = read_header(data, HeaderCheck(("jpeg",)))
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    stored = torch.from_numpy(cv2.imdecode(np.frombuffer(data, np.uint8), flags)).permute(2, 0, 1)
    return oriented(stored, header.orientation(data)).permute(1, 2, 0).numpy()


def decodes(decoder: str, name: str) -> bool:
    """Whether a decoder takes such files."""
    return decoder != "gpu" or (name.startswith("jpeg") and not {"cmyk", "ycck", "rgb"} & set(name.split()))


@pytest.mark.parametrize("name", FILES)
def test_every_decoder_gives_pillows_pixels(decoders: dict[str, Decode], name: str) -> None:
    wrong = []
    for metadata, data in CASES[name].items():
        expected = wanted(CASES[name].get(SAME_AS.get(metadata, metadata), data))
        for decoder, decode in decoders.items():
            if decodes(decoder, name) and (problem := difference(decoder, decode, data, expected)):
                wrong.append(f"{decoder}, {metadata}: {problem}")
    assert wrong == []


@pytest.mark.skipif(int(PIL.__version__.partition(".")[0]) < 13, reason="it takes the last tag")
@pytest.mark.parametrize("metadata", SAME_AS)
def test_pillow_takes_the_first_tag(metadata: str) -> None:
    assert np.array_equal(wanted(CASES["jpeg"][metadata]), wanted(CASES["jpeg"][SAME_AS[metadata]]))


@pytest.mark.parametrize("name", READ_BY_PILLOW_ALONE)
def test_refuses_rare_kinds_that_pillow_reads(decoders: dict[str, Decode], name: str) -> None:
    data = READ_BY_PILLOW_ALONE[name]
    assert wanted(data) is not None
    for decode in decoders.values():
        with pytest.raises(DecodeError):
            decode(data)


def difference(decoder: str, decode: Decode, data: bytes, expected: np.ndarray | None) -> str:
    """What is wrong with a decoder's pixels, or its refusal; Pillow refuses what it is not ``expected`` to decode."""
    try:
        pixels = decode(data)
    except DecodeError as error:
        return "" if expected is None else str(error)
    if expected is None:
        return "decoded, but Pillow refuses it"
    if decoder == "gray":
        expected = cv2.cvtColor(np.ascontiguousarray(expected), cv2.COLOR_RGB2GRAY)[:, :, None]
    if pixels.shape != expected.shape:
        return f"{pixels.shape}, not {expected.shape}"
    return "" if np.array_equal(pixels, expected) else f"{np.abs(pixels.astype(int) - expected).max()} levels"


@pytest.mark.parametrize("orientation", HEIC)
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_heic_is_upright(orientation: int, isolation: str) -> None:
    pytest.importorskip("pi_heif")
    config = {"backend": "DecodeMat", "formats": "heic", "color": "rgb", "instance_num": 1}
    with pipe(config | {"decode_isolation": isolation}) as run:
        pixels = run({"data": HEIC[orientation]})["result"]
    expected = np.asarray(ImageOps.exif_transpose(as_turned(RGB, orientation)))
    assert pixels.shape == expected.shape
    assert np.abs(pixels.astype(int) - expected).mean() < 4  # it is compressed


def as_turned(image: Image.Image, orientation: int) -> Image.Image:
    """The image with an orientation in its EXIF."""
    return Image.open(io.BytesIO(saved(image, "PNG", exif=turned_exif(orientation))))


def test_heic_needs_pi_heif(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pi_heif", None)
    with pytest.raises(
        BackendUnavailable, match=r"formats with heic need pi_heif \(pip install 'torchpipe_py\[heif\]'"
    ):
        pipe({"backend": "DecodeMat", "formats": "jpeg, heic"})


def test_table_has_two_thousand_cells(decoders: dict[str, Decode]) -> None:
    counts = [len(CASES[name]) for name in FILES for decoder in decoders if decodes(decoder, name)]
    assert sum(counts) > 2000
