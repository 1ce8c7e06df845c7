"""JPEGs of every kind a decoder meets: ``scripts/make_parity_images.py`` says what the names mean."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFile, ImageFilter

from torchpipe_py.arguments import ArgumentParser

ORIENTATION = 0x0112  # the EXIF tag
RESTART_SEGMENT = b"\xff\xdd"  # a JPEG that has restart intervals defines them with this marker
ENCODER_BUFFER = 2**26  # bytes; Pillow's own estimate is too small for noise, and a progressive JPEG must fit
SUBSAMPLINGS = ("444", "422", "420")  # Pillow's 0, 1, 2

TINY = ((17, 23), (16, 16), (8, 8), (1, 1), (2, 3))  # width, height; what random sizes seldom meet
EXTREME = ((2000, 1500), (1500, 2000), (1000, 20), (20, 1000), (1999, 33), (33, 1999))
COMMON = ((224, 224), (225, 223), (640, 480), (1024, 683), (1920, 1080))
SIZES = TINY + EXTREME + COMMON


@dataclass(frozen=True)
class Kind:
    """How one image is stored; ``restart`` blocks between markers and ``orientation`` are 0 for none."""

    width: int
    height: int
    quality: int
    subsampling: str
    progressive: bool
    restart: int
    orientation: int


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


def of_photo(photo: Image.Image) -> Scene:
    """A random part of ``photo``, turned and brightened or darkened, as a scene of any size."""

    def scene(rng: np.random.Generator, width: int, height: int) -> Image.Image:
        turned = photo.rotate(rng.uniform(-20, 20), Image.Resampling.BICUBIC) if rng.random() < 0.4 else photo
        share = rng.uniform(0.35, 0.75) * min(photo.width / width, photo.height / height)
        part_w, part_h = max(1.0, share * width), max(1.0, share * height)
        left, top = rng.uniform(0, photo.width - part_w), rng.uniform(0, photo.height - part_h)
        box = (left, top, left + part_w, top + part_h)
        image = turned.resize((width, height), Image.Resampling.BICUBIC, box)
        return ImageEnhance.Brightness(image).enhance(rng.uniform(0.6, 1.4))

    return scene


def scenes() -> dict[str, Scene]:
    """Scenes by name; more photographs than anything else, since that is what pipelines see."""
    others: dict[str, Scene] = {"gradient": gradient, "noise": noise, "text": text, "stripes": stripes}
    return {**photographs(), **others}


def photographs() -> dict[str, Scene]:
    """``china`` and ``flower`` of scikit-learn, or ``drawn`` without it."""
    try:
        from sklearn.datasets import load_sample_image
    except ImportError:
        return {"drawn": drawn}
    return {name: of_photo(Image.fromarray(load_sample_image(f"{name}.jpg"))) for name in ("china", "flower")}


# --- how it is stored ------------------------------------------------------------------------------------------------


def choose_kind(rng: np.random.Generator, index: int) -> Kind:
    """The size from ``SIZES`` for the first ones, then at random; every third turned; the rest at random."""
    width, height = SIZES[index] if index < len(SIZES) else random_size(rng)
    return Kind(
        width=width,
        height=height,
        quality=int(rng.integers(30, 101)),
        subsampling="gray" if rng.random() < 0.1 else str(rng.choice(SUBSAMPLINGS, p=(0.25, 0.2, 0.55))),
        progressive=bool(rng.random() < 0.25),
        restart=int(rng.choice((0, 0, 0, 0, 1, 4, 16))),
        orientation=index // 3 % 8 + 1 if index % 3 == 2 else 0,
    )


def random_size(rng: np.random.Generator) -> tuple[int, int]:
    """Width and height: the longer side 17 to 2000, small ones as likely as large ones, at most 3:1."""
    longer = round(math.exp(rng.uniform(math.log(17), math.log(2000))))
    shorter = max(8, round(longer * rng.uniform(1 / 3, 1)))
    return (longer, shorter) if rng.random() < 0.6 else (shorter, longer)


def encode(image: Image.Image, kind: Kind) -> bytes:
    """JPEG bytes; an older Pillow leaves restart markers out."""
    options: dict[str, Any] = {"quality": kind.quality, "progressive": kind.progressive}
    if kind.subsampling != "gray":
        options["subsampling"] = SUBSAMPLINGS.index(kind.subsampling)
    if kind.restart:
        options["restart_marker_blocks"] = kind.restart
    if kind.orientation:
        exif = Image.Exif()
        exif[ORIENTATION] = kind.orientation
        options["exif"] = exif
    file = io.BytesIO()
    (image.convert("L") if kind.subsampling == "gray" else image).save(file, "JPEG", **options)
    return file.getvalue()


def file_name(index: int, kind: Kind, scene: str, encoded: bytes) -> str:
    """What was stored, not what was asked for."""
    parts = [f"{index:03d}", f"{kind.width}x{kind.height}", f"q{kind.quality}", kind.subsampling]
    parts += ["prog"] if kind.progressive else []
    parts += [f"rst{kind.restart}"] if kind.restart and RESTART_SEGMENT in encoded[:2000] else []
    parts += [f"exif{kind.orientation}"] if kind.orientation else []
    return "_".join([*parts, scene]) + ".jpg"


def write_images(folder: Path, count: int, seed: int) -> int:
    """``count`` files; the bytes in all. File i is the same however many are written."""
    by_name = scenes()
    photos = [name for name in by_name if name in ("china", "flower", "drawn")]
    others = [name for name in by_name if name not in photos]
    total = 0
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        name = str(rng.choice(photos if rng.random() < 0.6 else others))
        kind = choose_kind(rng, index)
        encoded = encode(by_name[name](rng, kind.width, kind.height), kind)
        (folder / file_name(index, kind, name, encoded)).write_bytes(encoded)
        total += len(encoded)
    return total


def write_odd(folder: Path, seed: int) -> int:
    """CMYK, and files that are broken or not what their names say; how many."""
    rng = np.random.default_rng([seed, 0, 1])
    image = drawn(rng, 320, 240)
    whole = encode(image, Kind(320, 240, 85, "420", False, 0, 0))
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


def saved(image: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Write JPEGs of every kind a decoder meets.")
    parser.add_argument("--out", type=Path, required=True, help="folder, made where there is none")
    parser.add_argument("--count", type=int, default=200, help="images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--odd", action="store_true", help="CMYK and broken files besides")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when written."""
    args = _parser().parse_args(argv)
    ImageFile.MAXBLOCK = ENCODER_BUFFER
    args.out.mkdir(parents=True, exist_ok=True)
    total = write_images(args.out, args.count, args.seed)
    odd = write_odd(args.out, args.seed) if args.odd else 0
    print(f"{args.out}: {args.count} images, {total / 1e6:.1f} MB" + (f", and {odd} odd files" if odd else ""))
    return 0
