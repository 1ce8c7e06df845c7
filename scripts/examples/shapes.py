"""Draw labelled pictures of eight kinds of shapes, of any color, place and background, with noise: all by chance."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np

Random = np.random.Generator
Polygons = list[np.ndarray]  # each float32 K×2, (x, y) within the unit disc

LABELS = ("checker", "circle", "cross", "ring", "star", "stripes", "text", "triangle")
TRAIN, HELD_OUT = 0, 1  # second word of every picture's random seed: the two sets share no stream

GLYPHS = {  # strokes between the points of a 3×3 grid, numbered in reading order
    "A": "61 18 35", "E": "06 02 35 68", "F": "06 02 35", "H": "06 28 35", "K": "06 32 38", "L": "06 68",
    "M": "60 04 42 28", "N": "60 08 82", "T": "02 17", "V": "07 72", "W": "06 64 48 82", "X": "08 26",
    "Y": "04 24 47", "Z": "02 26 68",
}  # fmt: skip


# -- shapes: a label's outline as polygons in the unit disc --------------------------------------------------------


def around(radii: Sequence[float]) -> np.ndarray:
    """float32 K×2: points at equal angles, at these radii."""
    angles = np.arange(len(radii)) * (2 * math.pi / len(radii))
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.asarray(radii)[:, None]
    return np.asarray(points.astype(np.float32))


def box(x: float, y: float, width: float, height: float) -> np.ndarray:
    """A rectangle from its upper left corner."""
    return np.array([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], dtype=np.float32)


def stroke(start: np.ndarray, end: np.ndarray, half_width: float) -> np.ndarray:
    """A thick line whose ends extend by half its width."""
    along = (end - start) / np.linalg.norm(end - start) * half_width
    across = np.array([-along[1], along[0]], dtype=np.float32)
    return np.stack([start - along + across, end + along + across, end + along - across, start - along - across])


def outline(label: str, rng: Random) -> Polygons:
    """A random shape of this label."""
    if label == "circle":
        return [around([1.0] * 48)]
    if label == "ring":  # one polygon: round the outside, through a slit of no width, and back round the inside
        outer = around([1.0] * 48)
        inner = outer * rng.uniform(0.5, 0.72)
        return [np.concatenate([outer, outer[:1], inner[:1], inner[::-1]])]
    if label == "triangle":
        return [around(rng.uniform(0.8, 1.0, 3).tolist())]
    if label == "star":
        tips = int(rng.integers(5, 7))
        return [around([1.0, rng.uniform(0.38, 0.5)] * tips)]
    if label == "cross":
        arm = rng.uniform(0.18, 0.3)
        return [box(-0.95, -arm, 1.9, 2 * arm), box(-arm, -0.95, 2 * arm, 1.9)]
    if label in ("stripes", "checker"):
        count = int(rng.integers(3, 6))
        if label == "stripes":
            step = 1.5 / (count - 0.5)
            return [box(-0.75, -0.75 + i * step, 1.5, step / 2) for i in range(count)]
        step = 1.5 / count
        cells = [(i, j) for i in range(count) for j in range(count) if (i + j) % 2 == 0]
        return [box(-0.75 + i * step, -0.75 + j * step, step, step) for i, j in cells]
    letters = rng.choice(sorted(GLYPHS), size=int(rng.integers(3, 5)))
    pitch = 1.9 / len(letters)
    grid = np.array([(x, y) for y in (-0.8, 0, 0.8) for x in (0, 0.35, 0.7)], dtype=np.float32) * pitch
    thickness = rng.uniform(0.07, 0.1) * pitch
    polygons = []
    for place, letter in enumerate(letters):
        points = grid + np.array([-0.95 + (place + 0.15) * pitch, 0], dtype=np.float32)
        polygons += [stroke(points[int(ends[0])], points[int(ends[1])], thickness) for ends in GLYPHS[letter].split()]
    return polygons


# -- pictures -----------------------------------------------------------------------------------------------------


def background(rng: Random, height: int, width: int, colours: np.ndarray) -> np.ndarray:
    """float32 H×W×3: the two colours (2×3) mixed by a gradient, a glow, clouds, or patches with hard borders."""
    kind = int(rng.integers(4))
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    mix: np.ndarray
    if kind == 0:
        angle = rng.uniform(0, 2 * math.pi)
        mix = 0.5 + ((x - 0.5) * math.cos(angle) + (y - 0.5) * math.sin(angle)) / math.sqrt(2)
    elif kind == 1:
        mix = np.exp(-2 * ((x - rng.random()) ** 2 + (y - rng.random()) ** 2))
    else:
        clouds = np.zeros((height, width))
        for octave in (3, 6, 12, 24):  # noise at four scales, the coarser the stronger
            clouds += cv2.resize(rng.random((octave, octave)) / octave, (width, height), interpolation=cv2.INTER_CUBIC)
        mix = (clouds - clouds.min()) / (clouds.max() - clouds.min())
        if kind == 3:
            mix = np.digitize(mix, [0.4, 0.65]) / 2
    share = mix[:, :, None].astype(np.float32)
    return np.asarray(colours[0] * (1 - share) + colours[1] * share)


def coverage(label: str, rng: Random, height: int, width: int) -> np.ndarray:
    """float32 H×W×1 in [0, 1]: how much of each pixel a shape covers, anywhere, a little squeezed and turned."""
    radius = min(height, width) * rng.uniform(0.26, 0.45)
    angle = rng.uniform(-0.6, 0.6) if label == "text" else rng.uniform(0, 2 * math.pi)
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin], [sin, cos]]) @ np.diag([radius, radius * rng.uniform(0.8, 1.0)])
    centre = [rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)]
    placement = np.column_stack([linear, centre]).astype(np.float32)
    opacity = np.float32(rng.uniform(0.85, 1.0))
    mask = np.zeros((height, width), dtype=np.uint8)
    for polygon in outline(label, rng):
        pixels = polygon @ placement[:, :2].T + placement[:, 2]
        cv2.fillPoly(mask, [np.round(pixels * 16).astype(np.int32)], 255, cv2.LINE_AA, 4)  # 4 fractional bits
    return np.asarray(opacity * (mask[:, :, None] / np.float32(255)))


def draw_picture(label: str, rng: Random, size: tuple[int, int] | None = None) -> np.ndarray:
    """One picture of ``label``: uint8 H×W×3, BGR.

    ``size`` is its height and width in pixels; by default each is 96 to 640, uniform in the logarithm.
    """
    if size is None:
        long_side = math.exp(rng.uniform(math.log(112), math.log(640)))
        sides = (round(long_side), round(max(96.0, long_side * rng.uniform(0.5, 1.0))))
        size = sides if rng.random() < 0.5 else sides[::-1]
    height, width = size
    colours = rng.uniform(0, 255, (2, 3)).astype(np.float32)
    picture = background(rng, height, width, colours)
    opacity = coverage(label, rng, height, width)
    inks = rng.uniform(0, 255, (64, 3)).astype(np.float32)
    distances = np.linalg.norm(inks[:, None] - colours[None], axis=2).min(axis=1)  # from both background colours
    ink = inks[np.flatnonzero(distances >= min(110.0, distances.max()))[0]]
    picture = picture * (1 - opacity) + ink * opacity
    for _ in range(int(rng.integers(0, 4))):  # thin lines across the picture, so that an edge alone decides nothing
        ends = rng.uniform(0, 1, (2, 2)) * (width, height)
        start, end = (tuple(map(int, point)) for point in ends)
        thickness = max(1, min(height, width) // 100)
        cv2.line(picture, start, end, rng.uniform(0, 255, 3).tolist(), thickness, cv2.LINE_AA)
    picture += rng.standard_normal(picture.shape, dtype=np.float32) * np.float32(rng.uniform(2, 12))
    return np.asarray(np.clip(picture, 0, 255).astype(np.uint8))


def draw_jpeg(seed: int, part: int, index: int, number: int, size: tuple[int, int] | None = None) -> bytes:
    """Picture ``number`` of class ``index`` in ``TRAIN`` or ``HELD_OUT``, as a JPEG of quality 70 to 95."""
    rng = np.random.default_rng([seed, part, index, number])
    quality = int(rng.integers(70, 96))
    _, encoded = cv2.imencode(".jpg", draw_picture(LABELS[index], rng, size), [cv2.IMWRITE_JPEG_QUALITY, quality])
    return bytes(encoded)


def write_set(root: Path, train: int, val: int, size: tuple[int, int]) -> None:
    """Write ``root/train/<class>/<nnnn>.jpg`` and ``root/val/…``: so many images of each class, by all cores."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn")) as processes:
        kinds = [
            (index, part, count) for index in range(len(LABELS)) for part, count in ((TRAIN, train), (HELD_OUT, val))
        ]
        for _ in processes.map(_write_class, *zip(*((root, size, *kind) for kind in kinds), strict=True)):
            pass


def _write_class(root: Path, size: tuple[int, int], index: int, part: int, count: int) -> None:
    folder = root / ("train" if part == TRAIN else "val") / LABELS[index]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:04d}.jpg").write_bytes(draw_jpeg(0, part, index, number, size))
