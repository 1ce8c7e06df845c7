"""JPEG decoders side by side: images per second, difference from OpenCV's pixels, EXIF orientation.

    python scripts/run.py decoders
    python scripts/run.py decoders --img_dir DIR --threads 1,8

Without ``--img_dir`` it draws the pictures: 256×192, 500×375, 1080×1080 and 12 megapixels. A
decoder on a GPU, and DALI and nvImageCodec, get several images a call. A decoder whose library or GPU is missing is a
remark that says what to install. Differences are absolute, in levels of 255, from what OpenCV decodes; a decoder that
does not apply the EXIF orientation is compared with the stored image.
"""

from __future__ import annotations

import argparse
import io
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks.common import Load, Report, Subject, add_options, in_threads, numbers, picture, run
from benchmarks.decoder_libraries import DECODERS, Decoder, NotMeasured, Setting, by_opencv
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.backends.image.files import find_images
from torchpipe_py.cores import usable_cores
from torchpipe_py.errors import TorchpipeError
from torchpipe_py.tools.options import at_least

PICTURES: dict[str, dict[str, Any]] = {
    "256x192": {"width": 256, "height": 192, "quality": 80},
    "500x375": {"width": 500, "height": 375},
    "1080x1080": {"width": 1080, "height": 1080},
    "12 megapixels": {"width": 4000, "height": 3000},
}
"""Pictures to draw: arguments of ``picture`` by title."""
ORIENTATION = 0x0112  # the EXIF tag
BATCH, BATCH_PIXELS = 32, 64_000_000
"""Images of a call, and their pixels together, at most."""
MOST_THREADS = 16
SAME_IMAGE = 10.0
"""Levels of mean difference below which two images are taken for the same one."""

Images = Mapping[str, bytes]


@dataclass
class Difference:
    """Differences of one decoder from OpenCV, over all values of all images; ``refused`` has reasons by file.

    ``shapes`` are images with another size than OpenCV's, which are not compared.
    """

    turns: bool
    mean: float
    most: int
    refused: dict[str, str]
    shapes: list[str]

    def __str__(self) -> str:
        upright = "EXIF applied" if self.turns else "EXIF not applied"
        return f"difference {self.mean:.3f}, at most {self.most}; {upright}"


# -- images -------------------------------------------------------------------------------------------------------


def read_images(folder: Path, limit: int) -> tuple[dict[str, bytes], dict[str, str]]:
    """The first ``limit`` JPEGs below ``folder`` that are whole, by path in it, and why other files are left out.

    ``OSError`` for a folder without images.
    """
    images: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for path in find_images(folder):
        if len(images) == limit:
            break
        name = path.relative_to(folder).as_posix()
        try:
            encoded = path.read_bytes()
            _check_whole(encoded)
        except (OSError, ValueError) as error:
            left_out[name] = str(error)
        else:
            images[name] = encoded
    return images, left_out


def _check_whole(encoded: bytes) -> None:
    """Raise ``ValueError`` or ``OSError`` unless it is a complete JPEG: OpenCV fills a truncated one with gray."""
    from PIL import Image

    if not encoded.startswith(b"\xff\xd8"):
        raise ValueError(f"its {len(encoded)} bytes are not a JPEG")
    by_opencv(encoded)
    with Image.open(io.BytesIO(encoded)) as image:
        image.load()


def sideways() -> bytes:
    """A JPEG of 48×32 pixels that its EXIF orientation, 6, turns to 32×48."""
    from PIL import Image

    exif = Image.Exif()
    exif[ORIENTATION] = 6
    ramp = np.linspace(20, 230, 48, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.repeat(np.tile(ramp, (32, 1))[:, :, None], 3, axis=2)).save(file, "JPEG", exif=exif)
    return file.getvalue()


# -- pixels -------------------------------------------------------------------------------------------------------


def compared(decoder: Decoder, images: Images) -> Difference:
    """Decode each image and compare it with OpenCV's; ``NotMeasured`` if the decoder decodes none."""
    difference = Difference(_turns(decoder), 0.0, 0, {}, [])
    total, values = 0, 0
    for name, encoded in images.items():
        try:
            pixels = decoder.pixels(decoder.decode([encoded])[0])
        except Exception as error:  # each library raises its own
            difference.refused[name] = reason(error)
            continue
        expected = by_opencv(encoded, upright=difference.turns)
        if pixels.shape != expected.shape:
            difference.shapes.append(name)
            continue
        distance = cv2.absdiff(pixels, expected)
        total, values = total + int(distance.sum()), values + distance.size
        difference.most = max(difference.most, int(distance.max()))
    if len(difference.refused) == len(images):
        raise NotMeasured(f"it decodes none of the images: {next(iter(difference.refused.values()))}")
    difference.mean = total / values if values else float("nan")
    return difference


def _turns(decoder: Decoder) -> bool:
    """Whether the decoder applies the EXIF orientation."""
    encoded = sideways()
    try:
        pixels, upright = decoder.pixels(decoder.decode([encoded])[0]), by_opencv(encoded)
    except Exception:
        return False
    return pixels.shape == upright.shape and float(cv2.absdiff(pixels, upright).mean()) < SAME_IMAGE


def reason(error: Exception) -> str:
    """The informative line of an error's message; DALI's follows a traceback."""
    text = str(error).partition("encountered:\n")[2] or str(error)
    return text.strip().partition("\n")[0] or type(error).__name__


# -- speed --------------------------------------------------------------------------------------------------------


def next_batch(decoder: Decoder, images: Sequence[bytes]) -> Callable[[], object]:
    """A function that decodes the next ``decoder.batch`` of the images, endlessly, from any number of threads."""
    repeated = list(itertools.islice(itertools.cycle(images), len(images) * decoder.batch))
    batches = [repeated[start : start + decoder.batch] for start in range(0, len(repeated), decoder.batch)]
    following = itertools.cycle(batches).__next__
    return lambda: decoder.decode(following())


def compare(title: str, images: Images, args: argparse.Namespace) -> Report:
    """Measure each decoder with each number of threads."""
    pixels = max(encoded.shape[0] * encoded.shape[1] for encoded in map(by_opencv, images.values()))
    batch = max(1, min(BATCH, BATCH_PIXELS // pixels))
    size = sum(map(len, images.values())) / len(images) / 1000
    count = f"{len(images)} image{'s' * (len(images) != 1)}"
    report = Report(f"{title}: {count} of {size:.0f} KB, {batch} a call where a call takes several; QPS are images/s")
    subjects: list[Subject] = []
    with ExitStack() as stack:

        def add(name: str, threads: int) -> None:
            decoder = args.decoders[name](Setting(threads, batch))
            stack.callback(decoder.close)
            difference = compared(decoder, images)
            if threads == args.threads[0]:
                report.remarks += [f"{name}: {file} is left out: {why}" for file, why in difference.refused.items()]
                report.remarks += [f"{name}: {file} has another size than OpenCV's" for file in difference.shapes]
            call = next_batch(decoder, [encoded for file, encoded in images.items() if file not in difference.refused])
            more = {"difference": difference.mean, "most": float(difference.most), "exif": float(difference.turns)}
            load = in_threads(call, decoder.batch)

            def measured(clients: int, seconds: float) -> Load:
                call()  # buffers of this size; on a GPU also kernels, and JPEG engines that sleep when not in use
                return replace(load(decoder.callers, seconds), note=str(difference), more=more)

            subjects.append(Subject(f"{name}, {{}} thread{'s' * (threads != 1)}", measured, (threads,)))

        for name in args.only or args.decoders:
            if name in args.missing:
                continue
            for threads in args.threads:
                if not attempted(report, name, partial(add, name, threads)):
                    break
        if args.missing:
            report.remarks.append(f"not measured, as above: {'; '.join(args.missing)}")
        tried = [name for name in args.only or args.decoders if name not in args.missing]
        args.missing += [name for name in tried if not any(made(name, subject) for subject in subjects)]
        for _ in range(args.rounds):
            for subject in list(subjects):
                one_round = partial(report.measure, [subject], subject.clients, args.seconds, 1)
                if not attempted(report, subject.name.format(*subject.clients), one_round):
                    subjects.remove(subject)
    if not report.loads:
        report.require("decoders that were measured", 0, low=1)
    return report


def made(name: str, subject: Subject) -> bool:
    """Whether a subject belongs to the decoder of this name."""
    return subject.name.startswith(f"{name}, {{}} thread")


def attempted(report: Report, what: str, action: Callable[[], object]) -> bool:
    """``report.attempt``, but remarks about known errors omit the name of the exception."""
    try:
        action()
    except (NotMeasured, TorchpipeError) as error:
        report.remarks.append(f"{what}: not measured: {error}")
    except Exception as error:
        report.remarks.append(f"{what}: not measured: {type(error).__name__}: {reason(error)}")
    else:
        return True
    return False


def main(argv: Sequence[str] | None = None, decoders: Mapping[str, Callable[[Setting], Decoder]] = DECODERS) -> int:
    """Return 0, 1 if no decoder works, or 2 if there is nothing to decode."""
    parser = ArgumentParser(description="Compare JPEG decoders: speed, pixels, EXIF orientation.")
    add_options(parser)
    parser.set_defaults(seconds=0.25, rounds=3)
    cores = tuple(dict.fromkeys((1, min(MOST_THREADS, usable_cores()))))
    option = parser.add_argument
    option("--img_dir", type=Path, help="a folder of JPEGs, found recursively (default: pictures are drawn)")
    option("--limit", type=at_least(1), default=200, metavar="N", help="most images (default: %(default)s)")
    shown = ",".join(map(str, cores))
    option("--threads", type=numbers, default=cores, help=f"that decode, with commas between (default: {shown})")
    option("--only", nargs="+", choices=decoders, metavar="NAME", help=f"decoders to measure, of {', '.join(decoders)}")
    args = parser.parse_args(argv)
    args.name, args.decoders, args.missing = "all", decoders, []
    if args.img_dir is None:
        sets = {title: {"picture.jpg": picture(**how)} for title, how in PICTURES.items()}
    else:
        try:
            images, left_out = read_images(args.img_dir, args.limit)
        except OSError as error:
            print(f"decoders: --img_dir {error}", file=sys.stderr)
            return 2
        print(*(f"left out: {name}: {why}" for name, why in left_out.items()), sep="\n", end="\n" if left_out else "")
        if not images:
            print(f"decoders: --img_dir {args.img_dir}: no JPEG that can be decoded", file=sys.stderr)
            return 2
        sets = {str(args.img_dir): images}
    return run({title: partial(compare, title, images, args) for title, images in sets.items()}, args)
