"""Encoded images to Mats: headers, refusals by the header, and decoding by OpenCV."""

from __future__ import annotations

import mmap
import struct
import time
import zlib
from io import BytesIO
from itertools import product
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import encode, picture
from kit.cells import check_each
from kit.image_backends import made
from kit.pictures import (
    IEND,
    bmp,
    canvas,
    gif,
    heif,
    idat,
    ihdr,
    jpeg_segment,
    png_chunk,
    png_of,
    saved,
    tiff,
    turned,
    webp_chunks,
    webp_of,
    with_scans,
)
from PIL import Image

from torchpipe_py import ConfigError, DecodeError, InvalidRequest, pipe
from torchpipe_py.backends.image.decode import HeaderCheck, declared_size, to_formats
from torchpipe_py.backends.image.geometry import MAX_PIXELS
from torchpipe_py.backends.image.jpeg import MAX_PASSES, MAX_SCANS

EVERY = HeaderCheck(("jpeg", "png", "webp", "bmp", "gif", "tiff", "pnm", "heic", "avif"))

JPEG, PROGRESSIVE = saved("JPEG"), saved("JPEG", progressive=True)
LOSSY, LOSSLESS = saved("WEBP"), saved("WEBP", lossless=True)


def decode(data: Any, **config: Any) -> dict[str, Any]:
    """The dict after one request."""
    with pipe({"backend": "DecodeMat", **config}) as run:
        return run({"data": data})


# -- headers ----------------------------------------------------------------------------------------------------------

GOOD = {
    "jpeg": JPEG,
    "progressive": PROGRESSIVE,
    "gray jpeg": saved("JPEG", mode="L"),
    "cmyk jpeg": saved("JPEG", mode="CMYK"),
    "thumbnail": JPEG[:2] + jpeg_segment(0xE1, b"Exif\0\0" + saved("JPEG", 8, 8)) + JPEG[2:],
    "fill bytes": JPEG[:2] + b"\xff\xff" + JPEG[2:],
    "a frame within a segment": JPEG[:2]
    + jpeg_segment(0xE0, b"\xff\xc0\0\x11\x08\x7f\xff\x7f\xff\3\1\x11\0\2")
    + JPEG[2:],
    "a marker without content": JPEG[:2] + b"\xff\xd0" + JPEG[2:],
    "bytes between segments": JPEG[:20] + b"junk\xff\0" + JPEG[20:],
    "bytes after the end": JPEG + saved("JPEG", 100, 100),
    "scans after the end": PROGRESSIVE + with_scans(PROGRESSIVE, 100),
    "scans in a comment": PROGRESSIVE[:-2] + jpeg_segment(0xFE, b"\xff\xda" * 100) + PROGRESSIVE[-2:],
    "png": saved("PNG"),
    "palette png": saved("PNG", mode="P"),
    "one bit png": saved("PNG", mode="1"),
    "alpha png": saved("PNG", mode="RGBA"),
    "webp": LOSSY,
    "lossless webp": LOSSLESS,
    "extended webp": webp_of([canvas(32, 24), (b"ICCP", b"profile"), *webp_chunks(LOSSY)]),
    "alpha webp": saved("WEBP", mode="RGBA"),
    "bmp": saved("BMP"),
    "gray bmp": saved("BMP", mode="L"),
    "gif": saved("GIF"),
    "tiff": saved("TIFF"),
    "deflated tiff": saved("TIFF", compression="tiff_deflate"),
    "ppm": saved("PPM"),
    "pgm": saved("PPM", mode="L"),
    "avif": saved("AVIF"),
    "alpha avif": saved("AVIF", mode="RGBA"),
}


@pytest.mark.parametrize("name", GOOD)
def test_header_size_equals_decoded_size(name: str) -> None:
    data = GOOD[name]
    header = EVERY(data)
    assert (header.height, header.width) == (24, 32)
    assert vars(EVERY(memoryview(data))) == vars(header)
    for kind in (bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)):
        size = declared_size(kind(data))
        assert size is not None
        assert (size.height, size.width) == (24, 32)
    mat = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert mat is not None or "gif" in name or "avif" in name  # which older versions of OpenCV do not know
    assert mat is None or mat.shape == (24, 32, 3)


def test_reads_header_fields() -> None:
    deep, progressive = EVERY(saved("PNG", mode="I;16")), EVERY(PROGRESSIVE)
    assert (EVERY(JPEG).format, EVERY(JPEG).channels, EVERY(JPEG).scans) == ("jpeg", 3, 1)
    assert (deep.format, deep.channels, deep.bits) == ("png", 1, 16)
    assert {EVERY(GOOD[name]).scans for name in ("progressive", "scans in a comment", "scans after the end")} == {10}
    assert progressive.memory > EVERY(JPEG).memory >= 24 * 32 * 3
    assert (EVERY(bmp(32, -24)).height, EVERY(bmp(32, 24, header=12)).width) == (24, 32)
    assert EVERY(b"P5 # 9 9\n #\n 32\t24 255\n").width == 32
    three = JPEG.replace(b"\xff\xda\0\x0c\x03", b"\xff\xda\0\x0c\x01")  # not all components in the first scan
    assert EVERY(with_scans(three, 3)).scans == 3


def frame(data: bytes, kind: int = 0xC0, size: tuple[int, int] | None = None) -> bytes:
    """The JPEG with another kind of frame, or height and width."""
    at = data.index(b"\xff\xc0" if b"\xff\xc0" in data else b"\xff\xc2")
    dims = data[at + 5 : at + 9] if size is None else struct.pack(">HH", *size)
    return data[: at + 1] + bytes([kind]) + data[at + 2 : at + 5] + dims + data[at + 9 :]


def frames_of(data: bytes) -> bytes:
    at = data.index(b"\xff\xc0")
    return data[at : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")]


TEXT = zlib.compress(bytes(7_900_000), 9)
ANIMATION = [(b"acTL", struct.pack(">II", 3, 0)), (b"fcTL", bytes(26)), (b"fdAT", b"")]
IMAGE = webp_chunks(LOSSY)
TAGS = [(256, 4, 1, 32), (257, 4, 1, 24)]

REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "^0 bytes: not a JPEG.* image; nothing was sent$"),
    "one byte": (b"\xff", "not a JPEG"),
    "base64": (b"/9j/4AAQSkZJRg==", 'it looks like base64: decode it first, or send it as JSON, {"inputs": '),
    "URL": (b"data:image/png;base64,iVBORw0KGgo=", "it looks like base64"),
    "JSON": (b'{"inputs": {}}', "it looks like JSON, which over HTTP needs the header Content-Type: application/json"),
    "a file name": (b"ring_00.jpg", "it looks like the name of a file: send its content"),
    "radiance": (b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 4 +X 4\n" + bytes(99), "not a JPEG"),
    "sun raster": (struct.pack(">8I", 0x59A66A95, 9, 9, 8, 0, 2, 0, 0), "not a JPEG"),
    "video": (b"\0\0\0\x18ftypisom" + bytes(99), "it looks like a video, which cannot be read as an image"),
    # JPEG
    "jpeg, large": (frame(JPEG, size=(32767, 32767)), "a JPEG of 32767x32767 pixels, more than max_pixels = 67108864"),
    "jpeg, progressive, large": (frame(PROGRESSIVE, 0xC2, (65535, 65535)), "a JPEG of 65535x65535 pixels"),
    "jpeg, no height": (frame(JPEG, size=(0, 32)), "a JPEG of 32x0 pixels"),
    "jpeg, two frames": (JPEG[:2] + frames_of(JPEG) + JPEG[2:], "two frame headers"),
    "jpeg, lossless": (frame(JPEG, 0xC3), r"SOF3 \(lossless\)"),
    "jpeg, arithmetic": (frame(JPEG, 0xC9), r"SOF9 \(arithmetic coding\)"),
    "jpeg, hierarchical": (frame(JPEG, 0xC5), r"SOF5 \(hierarchical\)"),
    "jpeg, 12 bits": (JPEG.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"), r"\(12 bits\)"),
    "jpeg, no frame": (JPEG.replace(frames_of(JPEG), b""), "no frame header"),
    "jpeg, no data": (b"\xff\xd8\xff\xd9" + bytes(9), "ends before the image data"),
    "jpeg, two starts": (JPEG[:2] + JPEG, "marker FFD8 at byte 2"),
    "jpeg, a segment of no length": (JPEG[:2] + b"\xff\xe0\0\0" + JPEG[2:], "the segment at byte 2 has no length"),
    "jpeg, cut off": (JPEG[:100], "cut off in its header"),
    "jpeg, no marker": (JPEG[:2] + b"\xff\0" * 2**18 + JPEG[2:], "no marker in the 262144 bytes from byte 2 on"),
    "jpeg, scans": (with_scans(PROGRESSIVE, 2000), "a JPEG of more than 32 scans"),
    "jpeg, segments": (JPEG[:2] + jpeg_segment(0xFE, b"") * 3000 + JPEG[2:], "more than 2048 segments"),
    "jpeg, usual segments": (JPEG[:2] + jpeg_segment(0xE0, bytes(14)) * 3000 + JPEG[2:], "more than 2048 segments"),
    "jpeg, usual tables": (
        JPEG.replace(frames_of(JPEG), frames_of(JPEG) + jpeg_segment(0xC4, bytes(29)) * 3000),
        "more than 2048 segments",
    ),
    "jpeg, tables between scans": (PROGRESSIVE[:-2] + b"\xff\xdd\0\2" * 3000 + PROGRESSIVE[-2:], "between its scans"),
    # PNG
    "png, large": (png_of([ihdr(32767, 32767), idat(), IEND]), "a PNG of 32767x32767 pixels, more than max_pixels"),
    "png, no width": (png_of([ihdr(0), idat(), IEND]), "a PNG of 0x8 pixels"),
    "png, 3 bits": (png_of([ihdr(bits=3), idat(), IEND]), "color type 2 with 3 bits"),
    "png, no header first": (png_of([idat(), ihdr(), IEND]), "does not begin with its header"),
    "png, two headers": (png_of([ihdr(), ihdr(9, 9), idat(), IEND]), "a chunk b'IHDR' at byte 37"),
    "png, unknown": (png_of([ihdr(), idat(), (b"I\x7f\xff\xff", b""), IEND]), "a chunk b'I.x7f.xff.xff'"),
    **{f"png, {kind!r}": (png_of([ihdr(), (kind, more), idat(), IEND]), "animated") for kind, more in ANIMATION},
    "png, animated after its data": (png_of([ihdr(), idat(), *ANIMATION, IEND]), "animated"),
    "png, a length": (png_of([ihdr()]) + b"\xff\x01\x0a\xcfIDAT" + bytes(99), "a chunk b'IDAT' of 4278258383 bytes"),
    "png, no data": (png_of([ihdr(), IEND]), "no image data"),
    "png, chunks": (png_of([ihdr(), *[(b"tEXt", b"")] * 5000, idat(), IEND]), "more than 4213 chunks"),
    "png, its data grow": (png_of([ihdr(), idat(10_000_000), IEND]), "grow to more than 8x8 pixels"),
    # WebP
    "webp, large": (webp_of([(b"VP8L", b"\x2f\xff\xff\xff\x0f\0\0")]), "a WebP of 16384x16384 pixels"),
    "webp, another canvas": (webp_of([canvas(64, 64), *IMAGE]), "32x24 pixels on a canvas of 64x64"),
    "webp, animated": (webp_of([canvas(32, 24, 2), *IMAGE]), "animated"),
    "webp, a frame": (webp_of([canvas(32, 24), (b"ANMF", bytes(24)), *IMAGE]), "animated"),
    "webp, unknown first": (webp_of([(b"JUNK", b""), *IMAGE]), "begins with a chunk b'JUNK'"),
    "webp, no key frame": (webp_of([(b"VP8 ", b"\1" + IMAGE[0][1][1:])]), "not a key frame"),
    "webp, lossless": (webp_of([(b"VP8L", b"\x2e" + bytes(7))]), "has no signature"),
    "webp, chunks": (webp_of([canvas(32, 24), *[(b"JUNK", b"")] * 99, *IMAGE]), "no image in its first 64 chunks"),
    "webp, cut off": (LOSSY[:24], "cut off in its header"),
    # BMP
    "bmp, large": (bmp(32767, 32767, 8, 1), "a BMP of 32767x32767 pixels"),
    "bmp, top down": (bmp(1, -(2**31)), "a BMP of 1x2147483648 pixels"),
    "bmp, negative width": (bmp(-8, 8), "a BMP of -8x8 pixels"),
    "bmp, both negative": (bmp(-8, -8), "a BMP of -8x8 pixels"),
    "bmp, 48 bits": (bmp(8, 8, 48), "48 bits for a pixel"),
    "bmp, header": (bmp(8, 8, header=44), "a header of 44 bytes"),
    # what has to be named
    "gif, large": (gif(32767, 32767), "a GIF of 32767x32767 pixels"),
    "gif, a frame outside": (gif(4, 4, (0, 0, 60000, 60000)), "a frame of 60000x60000 pixels leaves"),
    "gif, blocks": (gif(4, 4)[:19] + b"\x21\xfe" + b"\1 " * 9999 + b"\0" + gif(4, 4)[19:], "in its first 4096 blocks"),
    "gif, block": (gif(4, 4)[:19] + b"\x99" + bytes(9), "a block of type 153 at byte 19"),
    "tiff, two widths": (tiff([(256, 4, 2, 32), *TAGS[1:]]), "the tag 256 holds 2 values of type 4"),
    "tiff, large": (tiff([(256, 4, 1, 2**31), (257, 4, 1, 24)]), "a TIFF of 2147483648x24 pixels"),
    "tiff, tile": (
        tiff([*TAGS, (322, 4, 1, 60000), (323, 4, 1, 60000)]),
        "tiles of 60000x60000 pixels for an image of 32x24",
    ),
    "tiff, tile width": (tiff([*TAGS, (322, 4, 1, 1313)]), "or that of its tiles"),
    "tiff, twice": (tiff([*TAGS, (256, 4, 1, 99999)]), "the tag 256 twice"),
    **{
        f"tiff, {name} twice": (tiff([*TAGS, (tag, 3, 1, 1), (tag, 3, 1, 3)]), f"the tag {tag} twice")
        for name, tag in {"orientation": 274, "compression": 259, "predictor": 317}.items()
    },
    "tiff, no size": (tiff([(256, 4, 1, 32)]), "without its size"),
    "tiff, channels": (tiff([*TAGS, (277, 3, 1, 65535)]), "65535 channels"),
    "tiff, bits": (tiff([*TAGS, (258, 3, 1, 128)]), "128 bits"),
    "tiff, cut off": (tiff(TAGS)[:20], "cut off in its header"),
    "pnm, no level": (b"P5\n3 3\n0\n" + bytes(16), "no highest level of 1 to 65535"),
    "heic, large": (heif([(512, 512), (32767, 32767)], 2), "a HEIC of 32767x32767 pixels, more than max_pixels"),
    "heic, a large tile": (heif([(512, 512), (32767, 32767)], 1), "an image of 32767x32767 pixels in it"),
    "heic, no width": (heif([(0, 512)], 1), "a HEIC of 0x512 pixels"),
    "heic, no size": (heif([(8, 8)], 2), "the primary image has no size"),
    "heic, no description": (heif([], 1)[:24], "no box 'meta'"),
    "heic, a sequence": (heif([(8, 8)], 1, b"msf1"), "HEIC: sequences of images are not read"),
    "heic, a box too long": (heif([(8, 8)], 1)[:24] + b"\0\0\2\0meta", "a box b'meta' of 512 bytes at byte 24"),
    "heic, a box too short": (heif([(8, 8)], 1)[:24] + b"\0\0\0\2meta", "a box b'meta' of 2 bytes at byte 24"),
    "avif, large": (heif([(32767, 32767)], 1, b"avif"), "an AVIF of 32767x32767 pixels, more than max_pixels"),
    "avif, a sequence": (heif([(8, 8)], 1, b"avis"), "AVIF: sequences of images are not read"),
    "pnm, large": (b"P5\n32767 32767\n255\n" + bytes(16), "a PNM of 32767x32767 pixels"),
    "pnm, a sign after a number": (b"P6\n32#24\n255 255\n" + bytes(99), "no size in its first 4 KiB"),
    "pnm, no size": (b"P5" + b" " * 5000 + b"3 3 255\n", "no size in its first 4 KiB"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_invalid_headers(name: str) -> None:
    refuse(*REFUSED[name])


def test_refuses_images_that_inflate_beyond_their_size() -> None:
    rows = (b"IDAT", zlib.compress(bytes(300_000_000), 1))  # more than the part that is not looked at
    refuse(png_of([ihdr(2000, 3000, 1, 0), rows, IEND]), "grow to more than")


def refuse(data: bytes, message: str) -> None:
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(DecodeError, match=message) as caught:
        EVERY(data)
    assert str(caught.value).startswith(f"{len(data)} bytes")
    assert len(str(caught.value)) < 300
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xd8", b"\x89P", b"RI", b"BM", b"II", b"P6", b"text", "text", None, np.eye(3)]
)
def test_declares_no_size_of_invalid_data(data: Any) -> None:
    assert declared_size(data) is None


def test_bounds_the_scans_of_large_images_together() -> None:
    """libjpeg's defaults write ten; a phone's 50 megapixels pass with them, by either limit."""
    pixels = 24 * 32
    assert HeaderCheck(max_pixels=pixels)(with_scans(PROGRESSIVE, MAX_PASSES)).scans == MAX_PASSES
    with pytest.raises(DecodeError, match="17 scans of 32x24 pixels, together more than 16 times max_pixels = 768"):
        HeaderCheck(max_pixels=pixels)(with_scans(PROGRESSIVE, MAX_PASSES + 1))
    assert HeaderCheck(max_pixels=2 * pixels)(with_scans(PROGRESSIVE, MAX_SCANS)).scans == MAX_SCANS
    assert MAX_PASSES * MAX_PIXELS > 20 * 50_000_000


def many_chunks() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (700, 700, 3), np.uint8)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels), 1)
    return png_of([ihdr(700, 700), *[(b"IDAT", rows[at : at + 300]) for at in range(0, len(rows), 300)], IEND])


@pytest.mark.parametrize(
    "data",
    [
        many_chunks(),
        png_of([ihdr(), (b"iCCP", b"a\0\0" + zlib.compress(np.random.default_rng(0).bytes(100_000))), idat(), IEND]),
        png_of([ihdr(), (b"iTXt", b"a\0\0\0\0\0" + bytes(10**6)), (b"zTXt", b"damaged" * 9999), idat(), IEND]),
        png_of([ihdr(), *[(b"zTXt", b"a\0\0" + TEXT), (b"iTXt", b"a\0\1\0\0\0" + TEXT)] * 3, idat(), IEND]),
        png_of([ihdr(), *[(b"iCCP", b"a\0\0" + TEXT)] * 9, idat(), IEND]),
    ],
    ids=["chunks", "profile", "texts", "texts that grow", "profiles that grow"],
)
def test_decodes_png_within_inflation_limit(data: bytes) -> None:
    wanted = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert np.array_equal(decode(data)["result"], wanted)


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
def test_truncated_file_has_header_or_error(data: bytes) -> None:
    for end, change in product(range(0, min(len(data), 700), 3), (b"", b"\xff")):
        try:
            header = EVERY(data[:end] + change)
        except DecodeError:
            continue
        assert 0 < header.width * header.height <= EVERY.max_pixels


@pytest.mark.parametrize(
    "data",
    [
        PROGRESSIVE[:-2] + b"\xff\0" * 2**22,
        JPEG[:2] + b"\xff\0" * 2**22 + JPEG[2:],
        JPEG[:2] + b"\xff" * 2**23 + JPEG[2:],
        PROGRESSIVE[:-2] + b"\xff\xd0" * 2**22,
        png_of([ihdr()]) + png_chunk(b"IDAT", b"") * 2**19,
        gif(4, 4)[:19] + b"\x21\xfe" + b"\1 " * 2**22,
        b"P5" + b"#" * 2**23,
    ],
    ids=["scan", "start", "fill", "restarts", "chunks", "blocks", "comment"],
)
def test_eight_megabytes_cost_bounded_time(data: bytes) -> None:
    start = time.thread_time()
    try:
        EVERY(data)
    except DecodeError:
        pass
    assert time.thread_time() - start < 2


# -- decoding ---------------------------------------------------------------------------------------------------------


BY_PILLOW = "cmyk jpeg", "gif", "tiff", "deflated tiff", "avif", "alpha avif"

DECODED = {
    **{name: data for name, data in GOOD.items() if name not in (*BY_PILLOW, "ppm", "pgm")},
    "16 bit png": encode(picture(20, 30).astype(np.uint16) * 257, ".png"),
    "16 bit gray png": encode(picture(20, 30)[:, :, 0].astype(np.uint16) * 257, ".png"),
    "one pixel": encode(picture(20, 30)[:1, :1], ".png"),
    "one column": encode(picture(10000, 30)[:, :1].copy()),
    "turned": turned(6),
}


@pytest.mark.parametrize("color", ["bgr", "rgb", "gray"])
@pytest.mark.parametrize("name", DECODED)
def test_decodes_as_opencv_does(name: str, color: str) -> None:
    data = DECODED[name]
    wanted = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    wanted = wanted if color != "gray" else cv2.cvtColor(wanted, cv2.COLOR_BGR2GRAY)[:, :, None]
    item = decode(data, color=color)
    assert np.array_equal(item["result"], wanted[:, :, ::-1] if color == "rgb" else wanted)
    assert item["result"].dtype == np.uint8
    assert (item["color"], item["data"]) == (color, data)


@pytest.mark.parametrize(
    "data", ["a.jpg", Path("a.jpg"), 3, None, np.zeros((4, 4), np.uint8), np.zeros(4, np.float32), [1, 2]]
)
def test_rejects_values_that_are_not_bytes(data: Any) -> None:
    error = decode(data)["error"]
    assert isinstance(error, InvalidRequest)
    assert "expected encoded bytes, got" in str(error)
    assert ("Path(...).read_bytes()" in str(error)) is isinstance(data, (str, Path))


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (Image.new("L", (4, 4)), "pass the file's bytes, or a Mat: np.asarray"),
        (BytesIO(JPEG), "pass what its read() returns"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), "Tensor of 4x4x3; send the bytes of the file"),
        (torch.zeros(1, 3, 4, 4), "is the dict one of an earlier call?"),
        (("cat", 0.5), "is the dict one of an earlier call?"),
    ],
)
def test_names_what_to_pass_in_place_of_other_images(data: Any, hint: str) -> None:
    assert hint in str(decode(data)["error"])


@pytest.mark.parametrize("data", [JPEG[: len(JPEG) // 2 + 200], LOSSY[:-99]], ids=["jpeg", "webp"])
def test_error_of_truncated_image_has_format_and_size(data: bytes) -> None:
    assert "of 32x24 pixels; it is damaged, cut off" in str(decode(data)["error"])


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
@pytest.mark.parametrize("damage", [0, 1], ids=["whole", "with a wrong checksum"])
def test_keeps_profile_name_off_stderr(mode: str, damage: int, capfd) -> None:
    """libpng's warnings repeat it, line ends included."""
    profile = struct.pack(">I", 200) + b"lcms\2\1\0\0mntrRGB XYZ " + bytes(12) + b"acsp" + bytes(160)
    chunk = bytearray(png_chunk(b"iCCP", b"\n2026 ERROR forged\n\0\0" + zlib.compress(profile, 0)))
    chunk[-1] ^= damage
    plain = saved("PNG", mode=mode)
    named = plain[:33] + bytes(chunk) * 2 + plain[33:]
    cv2.imdecode(np.frombuffer(named, np.uint8), cv2.IMREAD_COLOR)
    assert "\n2026 ERROR forged\n" in capfd.readouterr().err, "of libpng alone"
    for color, data in product(("bgr", "gray"), (named, bytearray(named), memoryview(named))):
        assert np.array_equal(decode(data, color=color)["result"], decode(plain, color=color)["result"])
    assert "forged" not in capfd.readouterr().err


# -- forms of data ----------------------------------------------------------------------------------------------------

BYTES_OF_JPEG = np.frombuffer(JPEG, np.uint8)
RELEASED = memoryview(JPEG)
RELEASED.release()
TAKEN: dict[str, Any] = {
    "bytearray": bytearray(JPEG),
    "NumPy's bytes": np.bytes_(JPEG),
    "memoryview": memoryview(JPEG),
    "memoryview of chars": memoryview(JPEG).cast("c"),
    "memoryview with gaps": memoryview(BYTES_OF_JPEG.repeat(2).tobytes())[::2],
    "memoryview in reverse": memoryview(JPEG[::-1])[::-1],
    "array": BYTES_OF_JPEG.copy(),
    "read-only array": BYTES_OF_JPEG,
    "array with gaps": BYTES_OF_JPEG.repeat(2)[::2],
    "array in reverse": BYTES_OF_JPEG[::-1].copy()[::-1],
}
NOT_TAKEN: dict[str, Any] = {
    "array without dimensions": np.array(1.5),
    "number of NumPy": np.uint8(3),
    "objects": np.array([JPEG], object),
    "booleans": np.ones(3, bool),
    "complex": np.zeros(3, complex),
    "texts": np.frombuffer(JPEG, "S1"),
    "big-endian": np.zeros(3, ">u2"),
    "signed": BYTES_OF_JPEG.view(np.int8),
    "released memoryview": RELEASED,
    "mmap": mmap.mmap(-1, 8),
    "file": BytesIO(JPEG),
    "path": Path("a.jpg"),
    "path as text": "a.jpg",
    "picture of Pillow": Image.new("RGB", (4, 4)),
    "tensor": torch.zeros(4, dtype=torch.uint8),
    "tensor without dimensions": torch.tensor(1.5),
    "list": [JPEG],
    "dict": {"data": JPEG},
    "nothing": None,
    "number": 1.5,
}


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_data_of_every_form_is_decoded_or_refused(isolation: str) -> None:
    whole = decode(JPEG)["result"]
    with pipe({"backend": "DecodeMat", "decode_isolation": isolation}) as run:

        def check(name: str) -> None:
            data = run({"data": {**TAKEN, **NOT_TAKEN}[name]})
            if name in TAKEN:
                assert np.array_equal(data["result"], whole)
            else:
                assert isinstance(data["error"], InvalidRequest)
                assert str(data["error"]).startswith("expected encoded bytes")

        check_each([*TAKEN, *NOT_TAKEN], check)


def test_bytes_of_every_form_go_to_a_process() -> None:
    whole = decode(JPEG)["result"]
    with pipe({"backend": "Process[DecodeMat]"}) as run:
        check_each(TAKEN, lambda name: np.testing.assert_array_equal(run({"data": TAKEN[name]})["result"], whole))


# -- what a configuration says ----------------------------------------------------------------------------------------


def test_reads_only_listed_formats() -> None:
    ppm = saved("PPM")
    refused = decode(ppm)
    assert refused.keys() == {"data", "error"}
    assert "looks like AVIF, which DecodeMat reads if its 'formats'" in str(decode(saved("AVIF"))["error"])
    message = "not a JPEG, PNG, WebP or BMP image; it looks like PNM, which DecodeMat reads if its 'formats'"
    assert message in str(refused["error"])
    assert decode(ppm, formats="jpeg, PNM")["result"].shape == (24, 32, 3)
    assert isinstance(decode(saved("PNG"), formats=["jpeg"])["error"], DecodeError)
    with pytest.raises(ConfigError, match="no image format 'hdr' can be read here"):
        decode(JPEG, formats="jpeg, hdr")
    with pytest.raises(ValueError, match="did you mean 'jpeg'"):
        to_formats("jpg")
    with pytest.raises(ValueError, match="at least one"):
        to_formats("")


def test_large_image_exceeds_quarter_of_max_pixels() -> None:
    for max_pixels, large in ((4 * 24 * 32, False), (4 * 24 * 32 - 1, True)):
        with made("DecodeMat", max_pixels=max_pixels) as backend:
            assert backend.is_large({"data": JPEG}) is large
            assert not backend.is_large({"data": b"no image"})


def test_refuses_declared_sizes_beyond_max_pixels() -> None:
    assert decode(JPEG, max_pixels=24 * 32)["result"].shape == (24, 32, 3)
    refused = decode(JPEG, max_pixels=24 * 32 - 1)
    assert refused.keys() == {"data", "error"}
    assert str(refused["error"]).endswith("a JPEG of 32x24 pixels, more than max_pixels = 767")
