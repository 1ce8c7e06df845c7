"""Write JPEGs of every kind a decoder meets, the same for the same seed and libraries.

    python scripts/run.py parity_images --out images --count 200

For ``torchpipe parity``, which runs them through two preprocessing configurations. The name of a file says what it is:
number, width x height as stored, quality, chroma subsampling (444, 422, 420 or gray), ``prog`` for progressive, ``rst``
and the blocks between restart markers, ``exif`` and the orientation, then what it shows. ``--odd`` adds CMYK and broken
files.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFile, ImageFilter

from torchpipe_py.arguments import ArgumentParser

ORIENTATION = 0x0112  # the EXIF tag
RESTART_SEGMENT = b"\xff\xdd"  # a JPEG that has restart intervals defines them with this marker
ENCODER_BUFFER = 2**26  # bytes; Pillow's own estimate is too small for noise, and a progressive JPEG must fit
SUBSAMPLINGS = ("444", "422", "420", "gray")  # the first three are Pillow's 0, 1, 2

TINY = ((17, 23), (16, 16), (8, 8), (1, 1), (2, 3))  # width, height; what random sizes seldom meet
EXTREME = ((2000, 1500), (1500, 2000), (1000, 20), (20, 1000), (1999, 33), (33, 1999))
COMMON = ((224, 224), (225, 223), (640, 480), (1024, 683), (1920, 1080))
SIZES = TINY + EXTREME + COMMON


# --- what is shown: each draws a scene of width x height, RGB -------------------------------------------------------

Scene = Callable[[np.random.Generator, int, int], Image.Image]


def gradient(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """From one color to another at any angle."""
    angle, colors = rng.uniform(0, 2 * math.pi), rng.uniform(0, 255, (2, 3))
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    mix = (x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle)
    mix = ((mix - mix.min()) / max(float(np.ptp(mix)), 1e-9))[:, :, None]
    return Image.fromarray(np.uint8(colors[0] * (1 - mix) + colors[1] * mix))


def noise(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Independent values: the worst a chroma upsampler can meet."""
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def stripes(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Lines of one to six pixels in two colors, at any angle."""
    angle, period = rng.choice([0, math.pi / 2, rng.uniform(0, math.pi)]), 2 * rng.integers(1, 7)
    y, x = np.mgrid[0:height, 0:width]
    phase = np.floor(x * math.cos(angle) + y * math.sin(angle) + 1e-6) % period < period / 2
    return Image.fromarray(rng.integers(0, 256, (2, 3), np.uint8)[phase.astype(int)])


def text(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Lines of letters, dark on light or light on dark."""
    dark, light = tuple(rng.integers(0, 90, 3).tolist()), tuple(rng.integers(170, 256, 3).tolist())
    ink, paper = (dark, light) if rng.random() < 0.7 else (light, dark)
    image = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(image)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789   "))
    for y in range(2, height, 14):
        draw.text((2, y), "".join(rng.choice(letters, width // 6 + 1)), fill=ink)
    return image


def drawn(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Coarse clouds with discs and boxes before them, slightly blurred: a photograph's stand-in."""
    coarse = rng.integers(0, 256, (5, 7, 3), np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = rng.uniform(-0.1, 1, 2) * (width, height)
        size = rng.uniform(0.05, 0.4) * min(width, height)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((x, y, x + size, y + size), fill=tuple(rng.integers(0, 256, 3).tolist()))
    return image.filter(ImageFilter.GaussianBlur(0.7))


SCENES: dict[str, Scene] = {"drawn": drawn, "gradient": gradient, "noise": noise, "text": text, "stripes": stripes}
OTHERS = [*SCENES][1:]  # more stand-ins of photographs than anything else, since those are what pipelines see

# --- how it is stored ------------------------------------------------------------------------------------------------


def write_image(folder: Path, index: int, seed: int) -> int:
    """Image ``index``; its bytes. Its size is from ``SIZES`` for the first ones, then random; every third is turned."""
    rng = np.random.default_rng([seed, index])
    scene = "drawn" if rng.random() < 0.6 else str(rng.choice(OTHERS))
    width, height = SIZES[index] if index < len(SIZES) else random_size(rng)
    quality, subsampling = int(rng.integers(30, 101)), str(rng.choice(SUBSAMPLINGS, p=(0.225, 0.18, 0.495, 0.1)))
    progressive, restart = bool(rng.random() < 0.25), int(rng.choice((0, 0, 0, 0, 1, 4, 16)))
    orientation = index // 3 % 8 + 1 if index % 3 == 2 else 0
    image = SCENES[scene](rng, width, height)
    options: dict[str, Any] = {"quality": quality, "progressive": progressive}
    if subsampling == "gray":
        image = image.convert("L")
    else:
        options["subsampling"] = SUBSAMPLINGS.index(subsampling)
    if restart:
        options["restart_marker_blocks"] = restart  # which an older Pillow leaves out
    if orientation:
        options["exif"] = Image.Exif()
        options["exif"][ORIENTATION] = orientation
    encoded = saved(image, "JPEG", **options)
    parts = [f"{index:03d}", f"{width}x{height}", f"q{quality}", subsampling, *(["prog"] if progressive else [])]
    parts += [f"rst{restart}"] if restart and RESTART_SEGMENT in encoded[:2000] else []
    parts += [f"exif{orientation}"] if orientation else []
    (folder / f"{'_'.join([*parts, scene])}.jpg").write_bytes(encoded)
    return len(encoded)


def random_size(rng: np.random.Generator) -> tuple[int, int]:
    """Width and height: the longer side 17 to 2000, small ones as likely as large ones, at most 3:1."""
    longer = round(math.exp(rng.uniform(math.log(17), math.log(2000))))
    shorter = max(8, round(longer * rng.uniform(1 / 3, 1)))
    return (longer, shorter) if rng.random() < 0.6 else (shorter, longer)


def write_odd(folder: Path, seed: int) -> int:
    """CMYK, and files that are broken or not what their names say; how many."""
    rng = np.random.default_rng([seed, 0, 1])
    image = drawn(rng, 320, 240)
    whole = saved(image, "JPEG", quality=85)
    scan = whole.index(b"\xff\xda")
    damaged = bytearray(whole)
    for place in rng.integers(scan + 20, len(whole) - 2, 20):
        damaged[place] = int(rng.integers(0, 255))
    files = {
        "odd_cmyk.jpg": saved(image.convert("CMYK"), "JPEG"),
        "odd_damaged.jpg": bytes(damaged),
        "odd_empty.jpg": b"",
        "odd_header_only.jpg": whole[:scan],
        "odd_no_image.jpg": rng.bytes(2000),
        "odd_png.jpg": saved(image, "PNG"),
        "odd_truncated.jpg": whole[: scan + (len(whole) - scan) // 2],
    }
    for name, encoded in files.items():
        (folder / name).write_bytes(encoded)
    return len(files)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """0 when written."""
    parser = ArgumentParser(description="Write JPEGs of every kind a decoder meets.")
    parser.add_argument("--out", type=Path, required=True, help="folder, made where there is none")
    parser.add_argument("--count", type=int, default=200, help="images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--odd", action="store_true", help="CMYK and broken files besides")
    args = parser.parse_args(argv)
    ImageFile.MAXBLOCK = ENCODER_BUFFER
    args.out.mkdir(parents=True, exist_ok=True)
    total = sum(write_image(args.out, index, args.seed) for index in range(args.count))
    odd = write_odd(args.out, args.seed) if args.odd else 0
    print(f"{args.out}: {args.count} images, {total / 1e6:.1f} MB" + (f", and {odd} odd files" if odd else ""))
    return 0
