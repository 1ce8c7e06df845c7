"""Scenes with digit tiles, and lines of digits, drawn from scikit-learn's 8×8 digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import cv2
import numpy as np

Drawn = TypeVar("Drawn")

TRAIN, HELD_OUT = 0, 1  # second word of every drawing's random seed: the two sets share no stream
SCENES, LINES = 0, 1  # third word
HELD_OUT_DIGITS = 300  # of 1797; no digit is in both sets
HEIGHT, WIDTH = 192, 256  # pixels of a scene
TILE_SIDES = (24, 44)  # pixels
MARGIN = 6  # pixels between two tiles
BORDER = 2  # pixels between a tile and the edge of its scene
JPEG_QUALITY = 92


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, ink 1 on 0."""

    glyphs: np.ndarray  # float32 N×8×8
    classes: np.ndarray  # int64 N

    def pick(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        index = int(rng.integers(len(self.classes)))
        return self.glyphs[index], int(self.classes[index])


@dataclass(frozen=True)
class Scene:
    """A picture of tiles with one digit each."""

    jpeg: bytes  # HEIGHT×WIDTH
    boxes: np.ndarray  # int64 K×4: left, top, right, bottom in pixels
    classes: np.ndarray  # int64 K

    def mat(self) -> np.ndarray:
        """uint8 H×W×3, BGR: the JPEG decoded."""
        return np.asarray(cv2.imdecode(np.frombuffer(self.jpeg, np.uint8), cv2.IMREAD_COLOR))


@dataclass(frozen=True)
class Line:
    """A picture of a row of digits."""

    grey: np.ndarray  # uint8 H×W
    text: str

    def mat(self) -> np.ndarray:
        """uint8 H×W×3, BGR."""
        return np.asarray(cv2.cvtColor(self.grey, cv2.COLOR_GRAY2BGR))


def load_digits(seed: int) -> tuple[Digits, Digits]:
    """To train on, and held out. Needs scikit-learn, which brings the set with it."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise SystemExit("make_examples: scikit-learn has the digits: pip install scikit-learn") from error
    data = datasets.load_digits()
    order = np.random.default_rng(seed).permutation(len(data.target))
    glyphs, classes = (data.images / 16).astype(np.float32)[order], data.target.astype(np.int64)[order]
    cut = len(order) - HELD_OUT_DIGITS
    return Digits(glyphs[:cut], classes[:cut]), Digits(glyphs[cut:], classes[cut:])


def draw_set(
    draw: Callable[[np.random.Generator, Digits], Drawn], digits: Digits, seed: tuple[int, int, int], count: int
) -> list[Drawn]:
    """``count`` drawings. Number i is the same however many are drawn."""
    return [draw(np.random.default_rng([*seed, number]), digits) for number in range(count)]


# --- ink ---------------------------------------------------------------------------------------------------------


def _coverage(rng: np.random.Generator, glyph: np.ndarray, height: int, width: int) -> np.ndarray:
    """float32 H×W in [0, 1]: the glyph filling this many pixels, a little turned, slanted and scaled."""
    angle, slant = rng.uniform(-0.12, 0.12), rng.uniform(-0.15, 0.15)
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin], [sin, cos]]) @ np.array([[1, slant], [0, 1]]) * rng.uniform(0.85, 1.0)
    linear = linear @ np.diag([width / glyph.shape[1], height / glyph.shape[0]])
    middle = (np.array(glyph.shape[::-1]) - 1) / 2
    centre = (np.array([width, height]) - 1) / 2 + rng.uniform(-0.03, 0.03, 2) * (width, height)
    affine = np.column_stack([linear, centre - linear @ middle])
    drawn = cv2.warpAffine(glyph, affine, (width, height), flags=cv2.INTER_CUBIC)
    return np.asarray(np.clip(drawn * rng.uniform(1.1, 1.5), 0, 1))


def _colour_far_from(rng: np.random.Generator, other: np.ndarray, distance: float) -> np.ndarray:
    """A random colour (3,) at least so far from another; at most 200, so that there always is one."""
    candidates = rng.uniform(0, 255, (256, 3)).astype(np.float32)
    distances = np.linalg.norm(candidates - other, axis=1)
    return np.asarray(candidates[int(np.argmax(distances >= min(distance, distances.max())))])


# --- scenes ------------------------------------------------------------------------------------------------------


def _background(rng: np.random.Generator) -> np.ndarray:
    """float32 HEIGHT×WIDTH×3: a few random colours blended into each other."""
    cells = rng.integers(2, 6, 2)
    coarse = rng.uniform(0, 255, (*cells.tolist(), 3)).astype(np.float32)
    return np.asarray(np.clip(cv2.resize(coarse, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC), 0, 255))


def _free_place(rng: np.random.Generator, taken: list[list[int]]) -> list[int] | None:
    """Left, top, right, bottom of a new tile, or nothing when no place turned up."""
    low, high = TILE_SIDES
    for _ in range(50):
        side = int(rng.integers(low, high + 1))
        width, height = np.clip(np.round(side * rng.uniform(0.85, 1.18, 2)), low, high).astype(int).tolist()
        left = int(rng.integers(BORDER, WIDTH - BORDER - width + 1))
        top = int(rng.integers(BORDER, HEIGHT - BORDER - height + 1))
        box = [left, top, left + width, top + height]
        if not any(_nearer_than_margin(box, other) for other in taken):
            return box
    return None


def _nearer_than_margin(box: list[int], other: list[int]) -> bool:
    apart = max(box[0] - other[2], other[0] - box[2], box[1] - other[3], other[1] - box[3])
    return apart < MARGIN


def _paste_tile(rng: np.random.Generator, picture: np.ndarray, box: list[int], glyph: np.ndarray) -> None:
    """In place: a tile of one colour with the glyph in another."""
    left, top, right, bottom = box
    under = picture[top:bottom, left:right]
    paper = _colour_far_from(rng, under.mean(axis=(0, 1)), 80)
    ink = _colour_far_from(rng, paper, 140)
    coverage = _coverage(rng, glyph, bottom - top, right - left)[:, :, None]
    under[:] = paper * (1 - coverage) + ink * coverage


def draw_scene(rng: np.random.Generator, digits: Digits) -> Scene:
    """One to six tiles on a smooth background, with a little noise."""
    picture = _background(rng)
    boxes: list[list[int]] = []
    classes = []
    for _ in range(int(rng.integers(1, 7))):
        box = _free_place(rng, boxes)
        if box is None:
            continue
        glyph, digit = digits.pick(rng)
        _paste_tile(rng, picture, box, glyph)
        boxes.append(box)
        classes.append(digit)
    picture += rng.standard_normal(picture.shape, dtype=np.float32) * np.float32(rng.uniform(0, 5))
    _, encoded = cv2.imencode(
        ".jpg", np.clip(picture, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY]
    )
    return Scene(encoded.tobytes(), np.array(boxes, np.int64), np.array(classes, np.int64))


# --- lines -------------------------------------------------------------------------------------------------------


def _line_sides(rng: np.random.Generator, count: int) -> tuple[int, int, list[int], list[int]]:
    """Height of the line, height and widths of its digits, and the gap before each digit and at the end; pixels."""
    height = int(rng.integers(24, 49))
    tall = round(height * rng.uniform(0.75, 0.88))
    widths = [round(tall * rng.uniform(0.8, 1.0)) for _ in range(count)]
    spread = rng.uniform(0.02, 0.22)  # of the height: lines are set tight or wide
    gaps = np.round(height * spread * rng.uniform(0.5, 1.5, count + 1)).astype(int)
    gaps[[0, -1]] = np.round(height * rng.uniform(0.05, 0.4, 2))
    return height, tall, widths, gaps.tolist()


def draw_line(rng: np.random.Generator, digits: Digits) -> Line:
    """Two to twelve digits in a row, dark on light or light on dark, 24 to 48 pixels high."""
    count = int(rng.integers(2, 13))
    height, tall, widths, gaps = _line_sides(rng, count)
    coverage = np.zeros((height, sum(widths) + sum(gaps)), np.float32)
    text, left = "", 0
    for gap, width in zip(gaps, widths, strict=False):
        glyph, digit = digits.pick(rng)
        left += gap
        top = int(rng.integers(0, height - tall + 1))
        coverage[top : top + tall, left : left + width] = _coverage(rng, glyph, tall, width)
        left += width
        text += str(digit)
    return Line(_inked(rng, coverage), text)


def _inked(rng: np.random.Generator, coverage: np.ndarray) -> np.ndarray:
    """uint8 H×W: ink on paper that brightens or darkens from left to right, with noise."""
    paper = rng.uniform(0, 255)
    ink = rng.choice([value for value in range(256) if abs(value - paper) >= 100])
    slope = np.linspace(-1, 1, coverage.shape[1], dtype=np.float32) * rng.uniform(-20, 20)
    picture = paper + slope + (ink - paper) * coverage
    picture += rng.standard_normal(picture.shape) * rng.uniform(1, 8)
    return np.asarray(np.clip(picture, 0, 255).astype(np.uint8))
