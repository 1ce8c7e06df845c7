"""Broken and odd JPEGs, of kinds that a decoder may take in a way of its own.

``python tests/fuzz/broken_jpegs.py --files 100000`` holds the check before the JPEG engines of a GPU against OpenCV:
what passes is decoded by libjpeg-turbo without a warning, to the pixels of OpenCV. It needs no GPU.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable
from functools import cache

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from torchpipe_py import DecodeError
from torchpipe_py.backends.image.decode import HeaderCheck
from torchpipe_py.backends.image.gpujpeg import read_header
from torchpipe_py.backends.image.jpeg import WholeCheck

SIZES = (160, 120), (128, 128), (200, 152), (500, 375)
"""Widths and heights; the last is rare, since it takes long."""

SUBSAMPLINGS = 2, 2, 1, 0
"""Pillow's numbers: 4:2:0 twice, 4:2:2, 4:4:4."""

_Segments = list[tuple[int, bytes]]


def encode(pixels: np.ndarray, subsampling: int = 2, quality: int = 92, **options: object) -> bytes:
    """An RGB image H×W×3 as JPEG bytes."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling=subsampling, **options)
    return file.getvalue()


MAGENTA, GREEN = (235, 20, 235), (20, 235, 20)


@cache
def plain(color: tuple[int, int, int], width: int, height: int, subsampling: int) -> bytes:
    """A picture of one color that can be recognised: nothing that ``dark`` makes has it."""
    noise = np.random.default_rng(0).integers(-20, 20, (height, width, 3))
    return encode(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8), subsampling)


@cache
def dark(width: int, height: int, subsampling: int, number: int, restarts: int = 0) -> bytes:
    """A gray slope with some noise; ``restarts``: MCUs between two restart markers."""
    noise = np.random.default_rng(number).integers(0, 10, (height, width, 3))
    pixels = np.linspace(0, 120, height)[:, None, None] + noise
    return encode(np.clip(pixels, 0, 255).astype(np.uint8), subsampling, restart_marker_blocks=restarts)


def is_magenta(pixels: np.ndarray) -> np.ndarray:
    """Which of the pixels …×3 have that color."""
    return (pixels[..., 0] > 180) & (pixels[..., 1] < 80) & (pixels[..., 2] > 180)


def require_opencvs(data: bytes) -> None:
    """Raise ``AssertionError`` unless libjpeg-turbo decodes the file without a warning, to OpenCV's pixels.

    Bytes between the last block and the end are no harm: the check reads as many ahead, and does not miss them.
    """
    problem = ""
    try:
        simplejpeg.decode_jpeg(data, "RGB", strict=True)
    except ValueError as error:
        problem = str(error)
    assert not problem or "extraneous bytes before marker 0xd9" in problem, problem
    pixels = simplejpeg.decode_jpeg(data, "RGB", strict=False)
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    assert np.array_equal(pixels, cv2.imdecode(np.frombuffer(data, np.uint8), flags)), "other pixels"


def segments(data: bytes) -> tuple[_Segments, bytes]:
    """Marker and content of each segment up to the first scan's header, and what follows that."""
    found, position = [], 2
    while True:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        found.append((marker, data[position + 4 : position + 2 + length]))
        position += 2 + length
        if marker == 0xDA:
            return found, data[position:]


def join(parts: _Segments, rest: bytes) -> bytes:
    """The inverse of ``segments``."""
    heads = (bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content for marker, content in parts)
    return b"\xff\xd8" + b"".join(heads) + rest


def _flipped(data: bytes, places: np.ndarray, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for place in places:
        changed[place] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _entropy(data: bytes) -> tuple[bytes, bytes]:
    """The header with that of the scan, and the compressed data without the end marker."""
    _, rest = segments(data)
    return data[: len(data) - len(rest)], rest[:-2]


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut off, with the end marker put back."""
    head, rest = _entropy(data)
    return head + rest[: int(rng.integers(len(rest)))] + b"\xff\xd9"


def bit(data: bytes, rng: np.random.Generator) -> bytes:
    """One bit of the compressed data is another."""
    head, rest = _entropy(data)
    return head + _flipped(rest, rng.integers(0, len(rest), 1), rng) + b"\xff\xd9"


def bits(data: bytes, rng: np.random.Generator) -> bytes:
    """2 to 20 bits are others."""
    head, rest = _entropy(data)
    return head + _flipped(rest, rng.integers(0, len(rest), int(rng.integers(2, 21))), rng) + b"\xff\xd9"


def run_of_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """40 bytes in a row are others."""
    head, rest = _entropy(data)
    start = int(rng.integers(len(rest) - 40))
    return head + rest[:start] + rng.bytes(40).replace(b"\xff", b"\xfe") + rest[start + 40 :] + b"\xff\xd9"


def header(data: bytes, rng: np.random.Generator) -> bytes:
    """1 to 3 bits before the compressed data are others."""
    head, rest = _entropy(data)
    return (
        head[:2] + _flipped(head[2:], rng.integers(0, len(head) - 2, int(rng.integers(1, 4))), rng) + rest + b"\xff\xd9"
    )


def restarts(data: bytes, rng: np.random.Generator) -> bytes:
    """Restart markers are missing, doubled, exchanged or moved, or the interval is another."""
    parts, rest = segments(data)
    places = [match.start() for match in re.finditer(rb"\xff[\xd0-\xd7]", rest)]
    choice = int(rng.integers(6))
    if choice == 0 or not places:
        interval = int(rng.choice([0, 1, 2, 3, 5, 7, 10, 100, 65535]))
        parts = [part for part in parts if part[0] != 0xDD]
        parts.insert(-1, (0xDD, interval.to_bytes(2, "big")))
        return join(parts, rest)
    place = int(rng.choice(places))
    marker = rest[place : place + 2]
    other = bytes([0xFF, int(rng.integers(0xD0, 0xD8))])
    changed = {
        1: rest[:place] + rest[place + 2 :],
        2: rest[:place] + marker + rest[place:],
        3: rest[:place] + other + rest[place + 2 :],
        4: rest[: place - 3] + marker + rest[place - 3 : place] + rest[place + 2 :],
        5: rest[:place] + rest[place : place + 2 + int(rng.integers(300))] + rest[place:],
    }[choice]
    return join(parts, changed)


def sizes(data: bytes, rng: np.random.Generator) -> bytes:
    """Height or width in the header is another, often of as many blocks."""
    parts, rest = segments(data)
    step = int(rng.choice([-64, -16, -8, -3, -1, 1, 2, 7, 8, 16, 64]))
    place = int(rng.choice([1, 3]))

    def resized(content: bytes) -> bytes:
        side = max(1, int.from_bytes(content[place : place + 2], "big") + step)
        return content[:place] + side.to_bytes(2, "big") + content[place + 2 :]

    return join([(m, resized(c) if m == 0xC0 else c) for m, c in parts], rest)


def samplings(data: bytes, rng: np.random.Generator) -> bytes:
    """Sampling factors, numbers and tables of components are others, or a gray image has factors."""
    parts, rest = segments(data)
    if rng.integers(3) == 0:
        gray = Image.open(io.BytesIO(data)).convert("L")
        file = io.BytesIO()
        gray.save(file, "JPEG", quality=92)
        parts, rest = segments(file.getvalue())
    values = [0x11, 0x21, 0x12, 0x22, 0x41, 0x14, 0x44, 0x31, 0x13, 0x00, 0x01, 0x02, 0x03]

    def changed(content: bytes) -> bytes:
        edited = bytearray(content)
        edited[int(rng.integers(6, len(content)))] = int(rng.choice(values))
        return bytes(edited)

    return join([(m, changed(c) if m == 0xC0 else c) for m, c in parts], rest)


def tables(data: bytes, rng: np.random.Generator) -> bytes:
    """A table is missing, doubled, of another number, of another's content, or placed after its use."""
    parts, rest = segments(data)
    index = int(rng.choice([number for number, (marker, _) in enumerate(parts) if marker in (0xC4, 0xDB)]))
    marker, content = parts[index]
    choice = int(rng.integers(6))
    if choice == 0:
        del parts[index]
    elif choice == 1:
        parts.insert(int(rng.integers(len(parts))), parts[index])
    elif choice == 2:
        parts[index] = marker, bytes([int(rng.choice([0, 1, 2, 3, 0x10, 0x11, 0x12, 0x13, 0x80]))]) + content[1:]
    elif choice == 3:
        edited = bytearray(content)
        for place in rng.integers(1, len(content), int(rng.integers(1, 4))):
            edited[place] = int(rng.integers(256))
        parts[index] = marker, bytes(edited)
    elif choice == 4:
        parts = [part for part in parts if part[0] != 0xC4]
    else:
        others = [part for part in parts if part[0] == marker]
        parts[index] = marker, content[:1] + others[int(rng.integers(len(others)))][1][1:]
    return join(parts, rest)


def scans(data: bytes, rng: np.random.Generator) -> bytes:
    """The scan's header names other components, or there are more scans or segments behind it, or fewer."""
    parts, rest = segments(data)
    marker, content = parts[-1]
    choice = int(rng.integers(6))
    if choice == 0:  # in another order
        order = rng.permutation(content[0])
        content = content[:1] + b"".join(content[1 + 2 * n : 3 + 2 * n] for n in order) + content[-3:]
    elif choice == 1:  # of the first component alone
        content = b"\x01" + content[1:3] + content[-3:]
    elif choice == 2:  # other parts of the spectrum
        content = content[:-3] + bytes(int(rng.choice([0, 1, 5, 62, 63, 64, 0x10])) for _ in range(3))
    elif choice == 3:  # the same again
        rest = rest[:-2] + join([(marker, content)], rest)[2:]
    elif choice == 4:  # another segment behind it
        extra = [(int(rng.choice([0xC0, 0xC4, 0xDB, 0xDC, 0xDD, 0xE1, 0xFE])), rng.bytes(int(rng.integers(0, 20))))]
        rest = join(extra, b"")[2:].join([rest[:-2], b"\xff\xd9"])
    else:  # a part of the data under another header
        middle = len(rest) // 2
        rest = rest[:middle] + join([(marker, content)], rest[middle:])[2:]
    return join([*parts[:-1], (marker, content)], rest)


def spliced(data: bytes, rng: np.random.Generator) -> bytes:
    """Pieces of the compressed data are doubled, left out or exchanged."""
    head, rest = _entropy(data)
    first, second, third = sorted(rng.integers(0, len(rest), 3))
    middle = {
        0: rest[second:third] + rest[first:second],
        1: rest[first:third] + rest[first:second],
        2: rest[second:third],
    }[int(rng.integers(3))]
    return head + rest[:first] + middle + rest[third:] + b"\xff\xd9"


def around(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes after the end, fill bytes, a thumbnail, or another image in front or behind."""
    parts, rest = segments(data)
    other = plain(MAGENTA, 128, 128, 2)
    choice = int(rng.integers(7))
    if choice == 0:
        return data + rng.bytes(int(rng.integers(1, 500)))
    if choice == 1:
        return data + other
    if choice == 2:
        return other[:-2] + data
    if choice == 3:
        return join([(0xE1, b"Exif\0\0" + other), *parts], rest)
    if choice == 4:
        return join(parts, rest[:-2] + b"\xff" * int(rng.integers(1, 9)) + b"\xff\xd9")
    if choice == 5:
        return join(parts, rest[:-2] + rng.bytes(int(rng.integers(1, 6))).replace(b"\xff", b"\0") + b"\xff\xd9")
    return join(parts, rest[:-2] + b"\xff" + bytes([int(rng.integers(1, 256))]) + b"\xff\xd9")


def frames(data: bytes, rng: np.random.Generator) -> bytes:
    """The frame header is of another type or precision: progressive, arithmetic coding, 12 bits."""
    parts, rest = segments(data)
    marker = int(rng.choice([0xC1, 0xC2, 0xC3, 0xC5, 0xC9, 0xCA]))
    precision = int(rng.choice([8, 8, 8, 12]))
    return join([(marker, bytes([precision]) + c[1:]) if m == 0xC0 else (m, c) for m, c in parts], rest)


def progressive(data: bytes, rng: np.random.Generator) -> bytes:
    """A progressive file, cut off or with other bits."""
    file = io.BytesIO()
    Image.open(io.BytesIO(data)).save(file, "JPEG", quality=92, progressive=True)
    head, rest = _entropy(file.getvalue())
    if rng.integers(2):
        return head + rest[: int(rng.integers(len(rest)))] + b"\xff\xd9"
    return head + _flipped(rest, rng.integers(0, len(rest), int(rng.integers(1, 9))), rng) + b"\xff\xd9"


KINDS: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    kind.__name__: kind
    for kind in (
        cut, bit, bits, run_of_bytes, header, restarts, sizes, samplings, tables, scans, spliced, around, frames,
        progressive
    )
}  # fmt: skip


def broken(kind: str, rng: np.random.Generator) -> tuple[bytes, tuple[int, int, int]]:
    """A file of that kind, and width, height and subsampling of what it was made of."""
    width, height = SIZES[-1] if rng.integers(40) == 0 else SIZES[int(rng.integers(3))]
    subsampling = SUBSAMPLINGS[int(rng.integers(4))]
    interval = int(rng.choice([1, 4, 10])) if kind == "restarts" or rng.integers(8) == 0 else 0
    data = dark(width, height, subsampling, int(rng.integers(4)), interval)
    return KINDS[kind](data, rng), (width, height, subsampling)


def main() -> int:
    """Check many files of each kind; exit status 1 if one that passes is not decoded as OpenCV decodes it."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=main.__doc__)
    parser.add_argument("--files", type=int, default=100_000, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    whole, header, bad = WholeCheck(), HeaderCheck(("jpeg",)), 0
    for number, kind in enumerate(KINDS):
        rng, passed = np.random.default_rng([options.seed, number]), 0
        for _ in range(options.files):
            data, _ = broken(kind, rng)
            try:
                read_header(data, header)
                whole(data)
            except DecodeError:
                continue
            passed += 1
            try:
                require_opencvs(data)
            except AssertionError as error:
                bad += 1
                print(f"{kind}: {error}; {data.hex()}", flush=True)
        print(f"{kind:14} {options.files:7} files {passed:7} passed", flush=True)
    print(f"{bad} of those that passed are not as OpenCV decodes them")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
