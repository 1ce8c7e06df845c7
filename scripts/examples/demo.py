"""Draw a small labelled JPEG set, train a small network on it, and write what the demo pipeline needs.

    python scripts/train_demo.py --out configs/demo

writes ``model.onnx``, ``labels.txt`` (one label per line, in class order) and ``images/<label>_<nn>.jpg``, pictures the
network was never trained on. Everything is drawn from ``--seed``; no data set is downloaded.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from examples.networks import fit, normalise
from torchpipe_py.arguments import ArgumentParser
from torchpipe_py.tools.export.onnx_file import export_checked, open_session

Polygons = list[np.ndarray]  # each float32 K×2, (x, y) within the unit disc

SIDE = 64  # pixels; the network's input is SIDE×SIDE
OPSET = 17
TRAIN, HELD_OUT = 0, 1  # second word of every picture's random seed: the two sets share no stream
HELD_OUT_PER_CLASS = 100
KEPT_PER_CLASS = 6  # of the held-out ones, the first so many are written to disk
BATCH = 32
LEARNING_RATE = 6e-3
ENOUGH = 0.97  # held-out accuracy below which the summary warns

GLYPHS = {  # strokes between the points of a 3×3 grid, numbered in reading order
    "A": "61 18 35",
    "E": "06 02 35 68",
    "F": "06 02 35",
    "H": "06 28 35",
    "K": "06 32 38",
    "L": "06 68",
    "M": "60 04 42 28",
    "N": "60 08 82",
    "T": "02 17",
    "V": "07 72",
    "W": "06 64 48 82",
    "X": "08 26",
    "Y": "04 24 47",
    "Z": "02 26 68",
}


# --- shapes: a label's outline as polygons in the unit disc --------------------------------------------------------


def _around(radii: Sequence[float]) -> np.ndarray:
    """float32 K×2: points at equal angles, at these radii."""
    angles = np.arange(len(radii)) * (2 * math.pi / len(radii))
    return np.asarray(
        (np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.asarray(radii)[:, None]).astype(np.float32)
    )


def _box(x: float, y: float, width: float, height: float) -> np.ndarray:
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height)]
    return np.array(corners, dtype=np.float32)


def _circle(rng: np.random.Generator) -> Polygons:
    return [_around([1.0] * 48)]


def _ring(rng: np.random.Generator) -> Polygons:
    """One polygon: round the outside, through a slit of no width, and back round the inside."""
    outer = _around([1.0] * 48)
    inner = outer * rng.uniform(0.5, 0.72)
    return [np.concatenate([outer, outer[:1], inner[:1], inner[::-1]])]


def _triangle(rng: np.random.Generator) -> Polygons:
    return [_around(rng.uniform(0.8, 1.0, 3).tolist())]


def _star(rng: np.random.Generator) -> Polygons:
    points = int(rng.integers(5, 7))
    return [_around([1.0, rng.uniform(0.38, 0.5)] * points)]


def _cross(rng: np.random.Generator) -> Polygons:
    arm = rng.uniform(0.18, 0.3)
    return [_box(-0.95, -arm, 1.9, 2 * arm), _box(-arm, -0.95, 2 * arm, 1.9)]


def _stripes(rng: np.random.Generator) -> Polygons:
    count = int(rng.integers(3, 6))
    step = 1.5 / (count - 0.5)
    return [_box(-0.75, -0.75 + i * step, 1.5, step / 2) for i in range(count)]


def _checker(rng: np.random.Generator) -> Polygons:
    count = int(rng.integers(3, 6))
    step = 1.5 / count
    cells = [(i, j) for i in range(count) for j in range(count) if (i + j) % 2 == 0]
    return [_box(-0.75 + i * step, -0.75 + j * step, step, step) for i, j in cells]


def _stroke(start: np.ndarray, end: np.ndarray, half_width: float) -> np.ndarray:
    along = (end - start) / np.linalg.norm(end - start) * half_width
    across = np.array([-along[1], along[0]], dtype=np.float32)
    return np.stack([start - along + across, end + along + across, end + along - across, start - along - across])


def _text(rng: np.random.Generator) -> Polygons:
    """Three or four capitals in a row."""
    letters = rng.choice(sorted(GLYPHS), size=int(rng.integers(3, 5)))
    pitch = 1.9 / len(letters)
    grid = np.array([(x, y) for y in (-0.8, 0, 0.8) for x in (0, 0.35, 0.7)], dtype=np.float32) * pitch
    thickness = rng.uniform(0.07, 0.1) * pitch
    polygons = []
    for place, letter in enumerate(letters):
        points = grid + np.array([-0.95 + (place + 0.15) * pitch, 0], dtype=np.float32)
        polygons += [_stroke(points[int(ends[0])], points[int(ends[1])], thickness) for ends in GLYPHS[letter].split()]
    return polygons


def shapes() -> dict[str, Callable[[np.random.Generator], Polygons]]:
    """Label → outline, in class order."""
    return {
        "checker": _checker,
        "circle": _circle,
        "cross": _cross,
        "ring": _ring,
        "star": _star,
        "stripes": _stripes,
        "text": _text,
        "triangle": _triangle,
    }


# --- pictures ----------------------------------------------------------------------------------------------------


def _picture_size(rng: np.random.Generator) -> tuple[int, int]:
    """Height and width in pixels, 96 to 640, at most 2:1 either way; small ones as likely as large ones."""
    long_side = math.exp(rng.uniform(math.log(112), math.log(640)))
    short_side = max(96.0, long_side * rng.uniform(0.5, 1.0))
    sides = (round(long_side), round(short_side))
    return sides if rng.random() < 0.5 else sides[::-1]


def _gradient(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    angle = rng.uniform(0, 2 * math.pi)
    y, x = np.mgrid[-0.5 : 0.5 : height * 1j, -0.5 : 0.5 : width * 1j]
    return np.asarray(0.5 + (x * math.cos(angle) + y * math.sin(angle)) / math.sqrt(2))


def _glow(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return np.asarray(np.exp(-2 * ((x - rng.random()) ** 2 + (y - rng.random()) ** 2)))


def _clouds(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Noise at four scales, the coarser the stronger."""
    field = np.zeros((height, width))
    for cells in (3, 6, 12, 24):
        coarse = rng.random((cells, cells)) / cells
        field += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    low, high = field.min(), field.max()
    return np.asarray((field - low) / (high - low))


def _patches(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Clouds cut at two levels: flat areas with hard, irregular borders."""
    return np.asarray(np.digitize(_clouds(rng, height, width), [0.4, 0.65]) / 2)


def _background(rng: np.random.Generator, height: int, width: int, colours: np.ndarray) -> np.ndarray:
    """float32 H×W×3: the two colours (2×3) mixed by one of the fields above."""
    fields = (_gradient, _glow, _clouds, _patches)
    mix = fields[int(rng.integers(len(fields)))](rng, height, width)[:, :, None].astype(np.float32)
    return np.asarray(colours[0] * (1 - mix) + colours[1] * mix)


def _ink(rng: np.random.Generator, colours: np.ndarray) -> np.ndarray:
    """A colour (3,) that stands out from both background colours (2×3)."""
    candidates = rng.uniform(0, 255, (64, 3)).astype(np.float32)
    distances = np.linalg.norm(candidates[:, None] - colours[None], axis=2).min(axis=1)
    fit = np.flatnonzero(distances >= min(110.0, distances.max()))
    return np.asarray(candidates[fit[0]])


def _placement(rng: np.random.Generator, label: str, height: int, width: int) -> np.ndarray:
    """float32 2×3, unit disc → pixels: scale, slight squeeze, rotation, and a position that keeps the shape inside."""
    radius = min(height, width) * rng.uniform(0.26, 0.45)
    angle = rng.uniform(-0.6, 0.6) if label == "text" else rng.uniform(0, 2 * math.pi)
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin], [sin, cos]]) @ np.diag([radius, radius * rng.uniform(0.8, 1.0)])
    centre = [rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)]
    return np.column_stack([linear, centre]).astype(np.float32)


def _coverage(polygons: Polygons, placement: np.ndarray, height: int, width: int) -> np.ndarray:
    """float32 H×W×1 in [0, 1]: how much of each pixel the shape covers."""
    mask = np.zeros((height, width), dtype=np.uint8)
    for polygon in polygons:
        pixels = polygon @ placement[:, :2].T + placement[:, 2]
        cv2.fillPoly(mask, [np.round(pixels * 16).astype(np.int32)], 255, cv2.LINE_AA, 4)  # 4 fractional bits
    return np.asarray(mask[:, :, None] / np.float32(255))


def _scratch(rng: np.random.Generator, picture: np.ndarray) -> None:
    """Up to three thin lines across the picture, in place, so that an edge alone decides nothing."""
    height, width = picture.shape[:2]
    for _ in range(int(rng.integers(0, 4))):
        ends = rng.uniform(0, 1, (2, 2)) * (width, height)
        start, end = (tuple(map(int, point)) for point in ends)
        cv2.line(picture, start, end, rng.uniform(0, 255, 3).tolist(), max(1, min(height, width) // 100), cv2.LINE_AA)


def draw_picture(label: str, rng: np.random.Generator) -> np.ndarray:
    """One picture of ``label``: uint8 H×W×3, BGR."""
    height, width = _picture_size(rng)
    colours = rng.uniform(0, 255, (2, 3)).astype(np.float32)
    picture = _background(rng, height, width, colours)
    placement = _placement(rng, label, height, width)
    opacity = np.float32(rng.uniform(0.85, 1.0)) * _coverage(shapes()[label](rng), placement, height, width)
    picture = picture * (1 - opacity) + _ink(rng, colours) * opacity
    _scratch(rng, picture)
    picture += rng.standard_normal(picture.shape, dtype=np.float32) * np.float32(rng.uniform(2, 12))
    return np.asarray(np.clip(picture, 0, 255).astype(np.uint8))


def draw_jpeg(label: str, rng: np.random.Generator) -> bytes:
    """``draw_picture`` as a JPEG of quality 70 to 95."""
    quality = int(rng.integers(70, 96))
    _, encoded = cv2.imencode(".jpg", draw_picture(label, rng), [cv2.IMWRITE_JPEG_QUALITY, quality])
    return encoded.tobytes()


@dataclass(frozen=True)
class Pictures:
    """JPEGs with the class index of each, the classes taking turns."""

    jpegs: list[bytes]
    classes: np.ndarray  # int64 N


def draw_set(seed: int, part: int, per_class: int) -> Pictures:
    """``part`` is ``TRAIN`` or ``HELD_OUT``. Picture i of a class is the same however many are drawn."""
    labels = list(shapes())
    keys = [(index, number) for number in range(per_class) for index in range(len(labels))]
    bar = tqdm(keys, "drawing", leave=False)
    jpegs = [draw_jpeg(labels[index], np.random.default_rng([seed, part, index, number])) for index, number in bar]
    return Pictures(jpegs, np.array([index for index, _ in keys], dtype=np.int64))


# --- network -----------------------------------------------------------------------------------------------------


def preprocess(jpeg: bytes) -> np.ndarray:
    """uint8 3×SIDE×SIDE, RGB: what ``DecodeMat``, ``ResizeMat``, ``cvtColorMat`` and ``Mat2Tensor`` make of a JPEG."""
    picture = cv2.imdecode(np.frombuffer(jpeg, dtype=np.uint8), cv2.IMREAD_COLOR)
    picture = cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
    return np.ascontiguousarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB).transpose(2, 0, 1))


def build_network(classes: int) -> nn.Sequential:
    """Normalised float32 N×3×64×64 → logits N×classes; about 92,000 parameters, 14 million multiplications."""
    widths = (3, 16, 32, 32, 48, 64, 64)
    strides = (2, 1, 2, 2, 1, 2)
    layers: list[nn.Module] = []
    for (inputs, outputs), stride in zip(pairwise(widths), strides, strict=True):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


def _augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mirror the batch along each axis or not, turn it or not, shift it by up to 4 pixels, and exchange its colours."""
    axes = [axis for axis in (2, 3) if torch.rand((), generator=generator) < 0.5]
    shifts = torch.randint(-4, 5, (2,), generator=generator).tolist()
    turned = images.rot90(int(torch.randint(2, (), generator=generator)), (2, 3))
    return turned.flip(axes).roll(shifts, (2, 3))[:, torch.randperm(3, generator=generator)]


def train_network(pictures: Pictures, epochs: int, seed: int) -> nn.Module:
    """Adam with a one-cycle rate and cross-entropy; the network in eval mode."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images = torch.from_numpy(np.stack([preprocess(jpeg) for jpeg in pictures.jpegs]))
    classes = torch.from_numpy(pictures.classes)
    network = build_network(len(shapes())).to(memory_format=torch.channels_last)  # twice as fast to train on a CPU
    steps = epochs * math.ceil(len(images) / BATCH)
    orders = (torch.randperm(len(images), generator=generator).split(BATCH) for _ in range(epochs))
    chosen = tqdm((batch for order in orders for batch in order), "training", steps, leave=False)
    batches = ((_augment(images[batch], generator), classes[batch]) for batch in chosen)
    return fit(network, batches, nn.functional.cross_entropy, steps, LEARNING_RATE)


# --- artefacts ---------------------------------------------------------------------------------------------------


def correct(model: Path, pictures: Pictures) -> np.ndarray:
    """bool N: which pictures the exported model names rightly, one at a time."""
    session = open_session(model)
    hits = []
    for jpeg, expected in zip(pictures.jpegs, pictures.classes, strict=True):
        inputs = normalise(torch.from_numpy(preprocess(jpeg))[None]).numpy()
        (logits,) = session.run(["logits"], {"input": inputs})
        hits.append(logits.argmax() == expected)
    return np.array(hits)


def milliseconds(model: Path, batch: int, repeats: int = 200) -> float:
    """Median time of one run of the model on one CPU thread."""
    session = open_session(model, threads=1)
    inputs = np.zeros((batch, 3, SIDE, SIDE), dtype=np.float32)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        session.run(["logits"], {"input": inputs})
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def write_pictures(folder: Path, pictures: Pictures, per_class: int) -> int:
    """The first ``per_class`` of each class as ``<label>_<nn>.jpg``; returns their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = list(shapes())
    kept = pictures.jpegs[: per_class * len(labels)]
    for place, jpeg in enumerate(kept):
        number, index = divmod(place, len(labels))
        (folder / f"{labels[index]}_{number:02d}.jpg").write_bytes(jpeg)
    return sum(map(len, kept))


def _accuracy(hits: np.ndarray) -> str:
    return f"{hits.mean():.4f} ({int(hits.sum())} of {len(hits)})"


def _weakest(hits: np.ndarray, pictures: Pictures) -> str:
    rates = {label: hits[pictures.classes == index].mean() for index, label in enumerate(shapes())}
    label = min(rates, key=lambda name: rates[name])
    return f"{label} {rates[label]:.2f}"


def report(model: Path, held_out: Pictures, image_bytes: int, difference: float) -> bool:
    """Print what was made and how good it is; whether it is good enough."""
    hits = correct(model, held_out)
    kept = hits[: KEPT_PER_CLASS * len(shapes())]
    print(f"held out: accuracy {_accuracy(hits)}, weakest class {_weakest(hits, held_out)}")
    print(f"written:  accuracy {_accuracy(kept)}, {image_bytes / 1e6:.2f} MB of JPEG")
    print(f"model:    {model.stat().st_size / 1e3:.0f} kB, within {difference:.1g} of PyTorch")
    per_image = ", ".join(f"{milliseconds(model, batch) / batch:.3f} ms at batch {batch}" for batch in (1, 8))
    print(f"speed:    per image on one CPU thread {per_image}")
    return bool(hits.mean() >= ENOUGH)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("configs/demo"), help="folder (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=32, help="passes over the pictures (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of pictures and training (default: %(default)s)")
    parser.add_argument("--images-per-class", type=int, default=500, help="to train on (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when written, 1 when written but less accurate than ``ENOUGH``."""
    args = _parser().parse_args(argv)
    start = time.perf_counter()
    train, held_out = (
        draw_set(args.seed, TRAIN, args.images_per_class),
        draw_set(args.seed, HELD_OUT, HELD_OUT_PER_CLASS),
    )
    drawn = time.perf_counter()
    network = train_network(train, args.epochs, args.seed)
    trained = time.perf_counter()

    image_bytes = write_pictures(args.out / "images", held_out, KEPT_PER_CLASS)
    (args.out / "labels.txt").write_text("".join(f"{label}\n" for label in shapes()), encoding="utf-8")
    model = args.out / "model.onnx"
    difference = export_checked(network, model, size=SIDE, opset=OPSET, batches=(1, 5), tolerance=1e-4)

    print(f"pictures: {len(shapes())} classes, {len(train.jpegs)} to train on, {len(held_out.jpegs)} held out")
    print(f"time:     drawing {drawn - start:.0f} s, training {trained - drawn:.0f} s ({args.epochs} epochs)")
    if report(model, held_out, image_bytes, difference):
        return 0
    print(f"train_demo: held-out accuracy is below {ENOUGH}: more --epochs or --images-per-class?", file=sys.stderr)
    return 1
