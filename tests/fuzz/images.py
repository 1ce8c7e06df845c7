"""Damaged images through a decoder in child processes: ``python tests/fuzz/images.py --mutants 2000000``.

A mutant is made of its number and ``--seed`` alone. It is a finding if the decoder crashes on it, hangs, raises what is
no ``DecodeError``, gives an image of another size than the header's, takes more than 50 ms of CPU time three times, or
if the process grows by more than 32 MiB. Findings are saved, in ``tests/fuzz/seeds/images`` by default; what lies there
is mutated as well. Exit status 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import multiprocessing.connection
import random
import re
import signal
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from kit.pictures import png_chunk

from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.cores import usable_cores

SEEDS = Path(__file__).parent / "seeds" / "images"
MAX_PIXELS = 2**18  # of an image, so that what is slow or large is so without reason
SLOW, HANGS, GROWTH = 0.05, 60, 32 * 1024  # seconds of CPU, seconds without progress, KiB
FORMATS = ("jpeg", "png", "webp", "bmp", "gif", "tiff", "pnm", "avif")
DECODERS = {
    "opencv": {"backend": "DecodeMat"},
    "every-format": {"backend": "DecodeMat", "formats": FORMATS},
    "torchvision": {"backend": "DecodeTensor", "decoder": "torchvision"},
    "nvimgcodec": {"backend": "DecodeTensor", "decoder": "nvimgcodec"},
}

Pieces = list[bytes]


# -- what is mutated ------------------------------------------------------------------------------------------------


def bases() -> list[bytes]:
    """Small images of every kind, and the findings of earlier runs."""
    from kit.pictures import IEND, ihdr, png_of, saved
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    extras = {"exif": exif, "icc_profile": b"profile" * 20}
    rows = b"".join((b"\0" + bytes(range(3 * width))) * height for width, height in
                    ((1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (8, 4)))  # fmt: skip
    interlaced = ihdr()[0], ihdr()[1][:-1] + b"\1"
    images = [
        *(saved("JPEG", mode=mode) for mode in ("RGB", "L", "CMYK")),
        saved("JPEG", progressive=True),
        saved("JPEG", mode="CMYK", progressive=True),
        saved("JPEG", restart_marker_rows=1, subsampling=0, **extras),
        saved("JPEG", keep_rgb=True),
        *(saved("PNG", mode=mode) for mode in ("RGB", "L", "P", "1", "RGBA", "LA", "I;16")),
        saved("PNG", **extras),
        png_of([interlaced, (b"IDAT", zlib.compress(rows)), IEND]),
        saved("WEBP"),
        saved("WEBP", lossless=True),
        saved("WEBP", mode="RGBA", **extras),
        saved("WEBP", 9, 9, "RGBA", lossless=True),
        *(saved("BMP", mode=mode) for mode in ("RGB", "L", "P", "1", "RGBA")),
        _run_lengths(),
        *(saved("GIF", mode=mode) for mode in ("RGB", "L")),
        *(saved("TIFF", compression=kind) for kind in ("raw", "tiff_deflate", "tiff_lzw", "packbits", "jpeg")),
        *(saved("PPM", mode=mode) for mode in ("RGB", "L", "1")),
        b"P6 4 4 100\n" + bytes(range(48)),
        *(saved("AVIF", mode=mode) for mode in ("RGB", "RGBA")),
    ]
    return images + [path.read_bytes() for path in sorted(SEEDS.iterdir())]


def _run_lengths() -> bytes:
    """A BMP of 8×8 pixels in runs."""
    data = b"\x08\x01\0\0" * 8 + b"\0\x01"
    info = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(data), 0, 0, 54 + 1024) + info + bytes(range(256)) * 4 + data


def split(data: bytes) -> Pieces:
    """Segments, chunks, or headers."""
    if data.startswith(b"\xff\xd8"):
        starts = [found.start() for found in re.finditer(rb"\xff[\xc0-\xcf\xd8-\xfe]", data)]
        return [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
    if data.startswith(b"\x89PNG"):
        return [data[:8], *_chunks(data, 8, lambda at: 12 + int.from_bytes(data[at : at + 4], "big"))]
    if data.startswith(b"RIFF"):
        return [data[:12], *_chunks(data, 12, lambda at: 9 + int.from_bytes(data[at + 4 : at + 8], "little") & ~1)]
    return [data[:14], data[14:54], data[54:]]


def _chunks(data: bytes, at: int, length: Callable[[int], int]) -> Iterator[bytes]:
    while at < len(data):
        size = length(at)
        yield data[at : at + size]
        at += size


def join(pieces: Pieces, mend: bool) -> bytes:
    """The file again; ``mend``: with the checksums and the file's length that it needs to be read on."""
    start = pieces[0] if pieces else b""
    if mend and start.startswith(b"\x89PNG"):
        return start + b"".join(_mended(piece) for piece in pieces[1:])
    data = b"".join(pieces)
    if mend and start.startswith(b"RIFF"):
        return data[:4] + struct.pack("<I", max(0, len(data) - 8)) + data[8:]
    return data


def _mended(piece: bytes) -> bytes:
    return png_chunk(piece[4:8], piece[8:-4]) if len(piece) >= 12 else piece


# -- mutation -------------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 127, 128, 255, 256, 511, 512, 4096, 32767, 32768, 65535, 65536, 2**20, 2**24 - 1,
           2**31 - 1, 2**31, 2**32 - 1)  # fmt: skip
JPEG_PIECES = (
    b"\xff\xd9", b"\xff\xd8", b"\xff\xdd\0\4\0\1", b"\xff\xdc\0\4\0\x18", b"\xff\xd0", b"\xff\xfe\0\4\xff\xda"
)  # fmt: skip
PNG_PIECES = tuple(
    png_chunk(kind, content)
    for kind, content in (
        (b"acTL", struct.pack(">II", 3, 0)),
        (b"fcTL", struct.pack(">IIIIIHHBB", 0, 32, 24, 0, 0, 10, 1000, 0, 0)),
        (b"fdAT", struct.pack(">I", 1) + zlib.compress(bytes(300))),
        (b"IDAT", b""),
        (b"PLTE", bytes(768)),
        (b"tRNS", bytes(6)),
        (b"gAMA", struct.pack(">I", 45455)),
        (b"bKGD", bytes(6)),
        (b"zTXt", b"key\0\0" + zlib.compress(bytes(99999))),
        (b"iCCP", b"key\0\0" + zlib.compress(bytes(9999))),
        (b"eXIf", b"II*\0\x08\0\0\0\x01\0\x12\x01\3\0\1\0\0\0\6\0\0\0"),
        (b"I\x7f\xff\xff", b""),
    )
)
WEBP_PIECES = (
    b"VP8X\x0a\0\0\0\x10\0\0\0\x1f\0\0\x17\0\0",
    b"ANIM\6\0\0\0\0\0\0\0\0\0",
    b"ANMF\x10\0\0\0" + bytes(16),
    b"ALPH\4\0\0\0\1\0\0\0",
)


class Mutator:
    """Mutants by number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random()
        files = bases()
        self._bases = [(split(data), self._family(data)) for data in files]

    @staticmethod
    def _family(data: bytes) -> tuple[bytes, ...]:
        """What may be put into a file of this format."""
        for start, pieces in ((b"\xff\xd8", JPEG_PIECES), (b"\x89PNG", PNG_PIECES), (b"RIFF", WEBP_PIECES)):
            if data.startswith(start):
                return pieces
        return (b"\0\0", b"\0\2\xff\xff")

    def __call__(self, number: int) -> bytes:
        pick = self._random
        pick.seed(self._seed << 40 | number)
        base, family = self._bases[number % len(self._bases)]
        pieces = list(base)
        for _ in range(1 + int(3 * pick.random() ** 2)):
            _mutate(pieces, family, base, pick)
        data = join(pieces, pick.random() < 0.8)
        if pick.random() < 0.05:
            data = data[: int(len(data) * pick.random())]
        return data


def _mutate(pieces: Pieces, family: tuple[bytes, ...], base: Pieces, pick: random.Random) -> None:
    """One change, in place."""
    chance = pick.random()
    at = int(pick.random() * len(pieces))
    if not pieces or chance < 0.15:
        pieces.insert(at, pick.choice(family))
    elif chance < 0.2:
        pieces.insert(at, pick.choice(base))
    elif chance < 0.25:
        del pieces[at]
    elif chance < 0.3:
        other = int(pick.random() * len(pieces))
        pieces[at], pieces[other] = pieces[other], pieces[at]
    elif chance < 0.35:
        pieces[at:at] = [pieces[at]] * int(1 + 60 * pick.random() ** 3)
    else:
        pieces[at] = _changed(pieces[at], pick)


def _changed(piece: bytes, pick: random.Random) -> bytes:
    if not piece:
        return piece
    changed, chance = bytearray(piece), pick.random()
    place = int(pick.random() * min(len(piece), 32 if pick.random() < 0.7 else len(piece)))
    if chance < 0.35:
        size = pick.choice((1, 2, 4))
        number = pick.choice(NUMBERS) & (1 << 8 * size) - 1
        changed[place : place + size] = number.to_bytes(size, "big" if pick.random() < 0.5 else "little")
    elif chance < 0.6:
        changed[place] ^= 1 << int(8 * pick.random())
    elif chance < 0.8:
        for _ in range(1 + int(20 * pick.random() ** 2)):
            changed[int(pick.random() * len(changed))] = int(256 * pick.random())
    elif chance < 0.9:
        del changed[place:]
    else:
        changed[place:place] = bytes(int(200 * pick.random()))
    return bytes(changed)


# -- a child --------------------------------------------------------------------------------------------------------


class Judge:
    """Decodes and says what is wrong with how that went."""

    def __init__(self, run: Any) -> None:
        from torchpipe_py.backends.image.decode import HeaderCheck

        self._run, self._check = run, HeaderCheck(FORMATS, MAX_PIXELS)
        self._limit: int | None = None

    def warm_up(self) -> None:
        """What is allocated once, at the first image of each kind, does not count."""
        for data in bases():
            self._decode(data)
        self._limit = getrusage(RUSAGE_SELF).ru_maxrss + GROWTH

    def _decode(self, data: bytes) -> dict[str, Any]:
        item: dict[str, Any] = {"data": data}
        self._run(item)
        return item

    def __call__(self, data: bytes) -> str:
        """What is wrong, or nothing."""
        from torchpipe_py import DecodeError

        start = time.process_time()
        try:
            item = self._decode(data)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
        seconds = time.process_time() - start
        if ("result" in item) == ("error" in item):
            return f"has {sorted(item)}"
        if "error" in item and not isinstance(item["error"], DecodeError):
            return f"is a {type(item['error']).__name__}: {item['error']}"
        if "result" in item:
            header, shape = self._check(data), tuple(item["result"].shape)
            sides = shape[:2] if len(shape) == 3 else shape[2:]
            if sides not in ((header.height, header.width), (header.width, header.height)):
                return f"is {shape}, and its header says {header}"
        peak = getrusage(RUSAGE_SELF).ru_maxrss
        if self._limit is not None and peak > self._limit:
            grown, self._limit = peak - self._limit + GROWTH, peak + GROWTH
            return f"the process has grown by {grown >> 10} MiB, in {1000 * seconds:.0f} ms"
        if seconds > SLOW and min(self._seconds(data) for _ in range(2)) > SLOW:
            return f"takes {1000 * seconds:.0f} ms"
        return ""

    def _seconds(self, data: bytes) -> float:
        start = time.process_time()
        self._decode(data)
        return time.process_time() - start


def judge_all(options: argparse.Namespace, at: Any, last: int, until: float) -> None:
    """In a process of its own: judge mutants from ``at``, which tells how far it is, to before ``last``."""
    import cv2

    from torchpipe_py import pipe

    cv2.setNumThreads(1)
    mutant = Mutator(options.seed)
    with pipe({**DECODERS[options.decoder], "max_pixels": MAX_PIXELS}) as run:
        judge = Judge(run)
        judge.warm_up()
        while at.value < last and (at.value % 64 or time.monotonic() < until):
            signal.alarm(HANGS)
            finding = judge(mutant(at.value))
            if finding:
                keep(options, at.value, finding)
            at.value += 1


def replay(options: argparse.Namespace) -> int:
    """Judge files; the status of a process that crashes is its own."""
    from torchpipe_py import pipe

    with pipe({**DECODERS[options.decoder], "max_pixels": MAX_PIXELS}) as run:
        judge = Judge(run)
        findings = {path: judge(Path(path).read_bytes()) for path in options.replay}
    for path, finding in findings.items():
        print(f"{path}: {finding or 'ok'}")
    return int(any(findings.values()))


# -- the parent -----------------------------------------------------------------------------------------------------


def campaign(options: argparse.Namespace) -> int:
    """Judges in several processes, the next one of which goes on after the mutant that ended it; how many it judged."""
    context = multiprocessing.get_context("fork")
    until, share = time.monotonic() + options.seconds, -(-options.mutants // options.jobs)
    jobs = [
        (context.Value("q", first), min(first + share, options.mutants)) for first in range(0, options.mutants, share)
    ]
    running: dict[int, tuple[Any, Any, int]] = {}

    def start(at: Any, last: int) -> None:
        process = context.Process(target=judge_all, args=(options, at, last, until))
        process.start()
        running[process.sentinel] = process, at, last

    for job in jobs:
        start(*job)
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process, at, last = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode > 0:
                raise SystemExit(f"a child ended with status {process.exitcode}, by its own fault")
            if process.exitcode:
                how = f"ends the process with status {process.exitcode}"
                keep(options, at.value, "hangs" if process.exitcode == -signal.SIGALRM else how)
                at.value += 1
                start(at, last)
    return sum(at.value for at, _ in jobs) - share * sum(range(len(jobs)))


def keep(options: argparse.Namespace, number: int, finding: str) -> None:
    data = Mutator(options.seed)(number)
    path = Path(options.save) / f"{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    print(f"mutant {number} of seed {options.seed}, {len(data)} bytes: {finding}; saved as {path}", flush=True)


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes at a time")
    parser.add_argument("--decoder", choices=DECODERS, default="opencv", help="what is behind it, needs its GPU")
    parser.add_argument("--save", default=str(SEEDS), help="folder for findings")
    parser.add_argument("--replay", nargs="+", metavar="FILE", help="judge these files instead, in this process")
    options = parser.parse_args()
    if options.replay:
        return replay(options)
    start, before = time.monotonic(), set(Path(options.save).iterdir())
    done = campaign(options)
    seconds, findings = time.monotonic() - start, len(set(Path(options.save).iterdir()) - before)
    print(f"{done} mutants in {seconds:.1f} s, {done / seconds:.0f}/s, {findings} findings")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
