"""JPEG decoders on a folder of images: speed, difference from OpenCV's pixels, EXIF orientation."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from benchmarks.common import Load, interleave, machine, run_threads
from benchmarks.decoders.decoders import Decoder, NotMeasuredError, by_opencv, subjects
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.images.files import JPEG_SUFFIXES, find_images
from torchpipe_py.tools.options import above_zero, at_least

ORIENTATION = 0x0112  # the EXIF tag

Makers = Mapping[str, Callable[[], Decoder]]


@dataclass
class Outcome:
    """One decoder: images per second by number of threads, and absolute differences in levels 0..255.

    ``images`` is how many were decoded, ``refused`` why the others were not, by file; ``shapes`` names images that
    came out in another size than OpenCV's. ``missing`` says why nothing was measured.
    """

    name: str
    images_per_second: dict[int, float] = field(default_factory=dict)
    mean: float | None = None
    max: int | None = None
    exif: bool | None = None
    images: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    shapes: list[str] = field(default_factory=list)
    missing: str | None = None


# --- images --------------------------------------------------------------------------------------------------------


def read_images(folder: Path, limit: int | None) -> tuple[dict[str, bytes], dict[str, str]]:
    """The JPEGs below ``folder`` by path in it, the first ``limit`` that are whole, and why others were left out.

    ``OSError`` where there is none, as `find_images` says.
    """
    images: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for path in find_images(folder, JPEG_SUFFIXES):
        if limit is not None and len(images) >= limit:
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
    """``ValueError`` or ``OSError`` for bytes that are no JPEG, or a cut-off one, which OpenCV fills with gray."""
    from PIL import Image

    if not encoded:
        raise ValueError("the file is empty")
    if not encoded.startswith(b"\xff\xd8"):
        raise ValueError(f"{len(encoded)} bytes are no JPEG")
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


# --- pixels --------------------------------------------------------------------------------------------------------


def compare_pixels(outcome: Outcome, decoder: Decoder, images: Mapping[str, bytes]) -> list[bytes]:
    """Fill in the differences from OpenCV, over all values of all images; the images that ``decoder`` can decode.

    A decoder that leaves images as they are stored is compared with what OpenCV makes of them without turning them.
    """
    outcome.exif = _turns(decoder)
    decoded: list[bytes] = []
    total, values, most = 0, 0, 0
    for name, encoded in images.items():
        try:
            (image,) = decoder.decode([encoded])
        except Exception as error:  # each library raises its own
            outcome.refused[name] = str(error).strip().partition("\n")[0] or type(error).__name__
            continue
        decoded.append(encoded)
        pixels, expected = decoder.pixels(image), by_opencv(encoded, upright=outcome.exif)
        if pixels.shape != expected.shape:
            outcome.shapes.append(name)
            continue
        distance = cv2.absdiff(pixels, expected)
        total, values, most = total + int(distance.sum()), values + distance.size, max(most, int(distance.max()))
    outcome.images = len(decoded)
    if values:
        outcome.mean, outcome.max = total / values, most
    return decoded


def _turns(decoder: Decoder) -> bool:
    """Whether it turns an image upright by its EXIF orientation: shape and pixels as OpenCV's."""
    encoded = sideways()
    try:
        (image,) = decoder.decode([encoded])
    except Exception:
        return False
    pixels, upright = decoder.pixels(image), by_opencv(encoded)
    return pixels.shape == upright.shape and float(cv2.absdiff(pixels, upright).mean()) < 10


# --- speed ---------------------------------------------------------------------------------------------------------


def batch_call(decoder: Decoder, images: Sequence[bytes]) -> Callable[[], object]:
    """A call that decodes the next ``decoder.batch`` of the images, over and over; from any number of threads."""
    # The images as often as it takes to deal them all out in whole batches.
    repeated = list(itertools.islice(itertools.cycle(images), len(images) * decoder.batch))
    batches = [repeated[start : start + decoder.batch] for start in range(0, len(repeated), decoder.batch)]
    following = itertools.cycle(batches).__next__
    return lambda: decoder.decode(following())


def measure(
    makers: Makers, images: Mapping[str, bytes], threads: Sequence[int], seconds: float, rounds: int
) -> list[Outcome]:
    """Each decoder's outcome, in the order of ``makers``; at each of ``threads`` its rounds take ``seconds``."""
    outcomes: list[Outcome] = []
    loads: dict[str, Callable[[], Load]] = {}
    runs: list[tuple[str, Outcome, int, int]] = []
    with ExitStack() as stack:
        for name, make in makers.items():
            outcome = Outcome(name)
            outcomes.append(outcome)
            try:
                decoder = make()
            except NotMeasuredError as error:
                outcome.missing = str(error)
                continue
            stack.callback(decoder.close)
            decodable = compare_pixels(outcome, decoder, images)
            if not decodable:
                outcome.missing = f"it decodes none of the images: {next(iter(outcome.refused.values()))}"
                continue
            call = batch_call(decoder, decodable)
            call()  # a first call of this batch: buffers, and on a GPU kernels
            for count in threads:
                key = f"{name} {count}"
                loads[key] = partial(run_threads, call, count, seconds / rounds)
                runs.append((key, outcome, count, decoder.batch))
        medians = interleave(loads, rounds)
    for key, outcome, count, batch in runs:
        outcome.images_per_second[count] = medians[key].qps * batch
    return outcomes


# --- what is shown -------------------------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome], threads: Sequence[int]) -> str:
    """A line for each decoder, then what was refused."""
    width = max(len(outcome.name) for outcome in outcomes)
    heads = "".join(f"{count:>6} thr" for count in threads)
    lines = [f"{'images/s':{width}}{heads}  mean diff  max diff  EXIF"]
    for outcome in outcomes:
        if outcome.missing is not None:
            lines.append(f"{outcome.name:{width}}  not measured: {outcome.missing}")
            continue
        speeds = "".join(f"{outcome.images_per_second[count]:10.0f}" for count in threads)
        mean, most = ("-", "-") if outcome.mean is None else (f"{outcome.mean:.4f}", str(outcome.max))
        lines.append(f"{outcome.name:{width}}{speeds}{mean:>11}{most:>10}  {'yes' if outcome.exif else 'no'}")
    for outcome in outcomes:
        lines += [f"{outcome.name}: {file} is refused, and left out: {why}" for file, why in outcome.refused.items()]
        lines += [f"{outcome.name}: {file} is of another size than OpenCV's, no difference" for file in outcome.shapes]
    return "\n".join(lines)


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1 or len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f"expected different whole numbers from 1, separated by commas, got {text!r}")
    return counts


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Compare JPEG decoders on a folder of images.")
    parser.add_argument("--img_dir", type=Path, required=True, help="a folder of JPEGs, of any depth")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="most images (default: all)")
    parser.add_argument(
        "--seconds", type=above_zero("seconds"), default=3.0, metavar="S", help="of each decoder and count (default: 3)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=3, help="that the seconds are split into (default: 3)")
    parser.add_argument("--threads", type=_counts, default=[1, 4], help="that call a decoder (default: 1,4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as well")
    return parser


def main(argv: Sequence[str] | None = None, makers: Makers | None = None) -> int:
    """0 when measured; 2, after a line that says why, where there is nothing to measure on."""
    args = _parser().parse_args(argv)
    try:
        images, left_out = read_images(args.img_dir, args.limit)
    except OSError as error:
        print(f"compare_decoders: --img_dir {error}", file=sys.stderr)
        return 2
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")
    if not images:
        print(f"compare_decoders: --img_dir {args.img_dir}: no JPEG that can be decoded", file=sys.stderr)
        return 2
    here, size = machine(), sum(map(len, images.values())) / len(images) / 1000
    print(f"{here['cpu']}, {here['cores']} cores, Python {here['python']}; {len(images)} images of {size:.0f} KB")
    outcomes = measure(makers or subjects(max(args.threads)), images, args.threads, args.seconds, args.rounds)
    print(table(outcomes, args.threads))
    print(f"medians of {args.rounds} rounds; differences are absolute, in levels of 255, from OpenCV's pixels")
    if args.json:
        content = {"machine": here, "command": sys.argv, "images": len(images), "left_out": left_out}
        content["decoders"] = [asdict(outcome) for outcome in outcomes]
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0
