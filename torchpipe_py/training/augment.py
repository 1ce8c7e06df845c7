"""Random augmentations of whole batches, on the CPU or a GPU, with a seed for each sample.

Random numbers are a hash of a sample's seed, computed on the host. So a sample is augmented alike in any batch, and a
GPU is never waited for.
"""

from __future__ import annotations

import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchpipe_py.backends.signature import shown_dims
from torchpipe_py.training.prefetch import SideStreams

GAMMA, STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1342543DE82EF95)  # odd: counters never repeat
CROP_ATTEMPTS = 10  # as in torchvision
WHITE = 255.0
MIDDLE_GREY = 128.0  # unchanged by contrast, as in DALI

LUMA = (0.299, 0.587, 0.114)
"""Weights of R, G and B in Y of the colour space Y'IQ."""
RGB_TO_YIQ = (LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))

Range = float | tuple[float, float]
"""A number, or the lowest and the highest."""


def uniforms(seeds: Any, count: int) -> np.ndarray:
    """Random numbers from 0 to below 1, ``count`` for each seed: an array of float64, N×count.

    ``seeds``: a Tensor of N int64 on the CPU. Row n depends on seed n alone: it is the SplitMix64 sequence (Steele et
    al. 2014, "Fast splittable pseudorandom number generators") that starts at the hash of the seed.
    """
    starts = _mixed(seeds.numpy().view(np.uint64))
    counters = np.arange(1, count + 1, dtype=np.uint64) * GAMMA
    values = _mixed(starts + counters[:, None]) >> np.uint64(11)
    # NOTE: each column is contiguous in memory for any N, so that NumPy computes with it alike.
    drawn: np.ndarray = (values * 2.0**-53).T
    return drawn


def takes_seeds(function: Any) -> bool:
    """``True`` for a callable with a parameter ``seeds``; that of a ``torch.nn.Module`` is that of its ``forward``."""
    try:
        called = function.forward if isinstance(function, torch.nn.Module) else function
        return "seeds" in inspect.signature(called).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False


class Augmentation(ABC):
    """A random transform of images: ``augmentation(images)`` or ``augmentation(images, seeds=seeds)``.

    ``images``: a Tensor N×C×H×W or C×H×W, uint8 or floating point, with values in 0..255; it is not changed. ``seeds``:
    a Tensor of N int64 on the CPU, as a loader passes it to ``transforms_batch``; by default seeds are drawn from
    PyTorch's global generator. Raises ``TypeError`` for other inputs.

    A subclass sets ``draws`` and implements ``apply``.
    """

    draws: int
    """The random numbers that each sample needs."""

    def __call__(self, images: Any, seeds: Any = None) -> Any:
        name = type(self).__name__
        if not isinstance(images, torch.Tensor):
            raise TypeError(f"{name} takes a Tensor NxCxHxW or CxHxW, got {type(images).__name__}")
        if images.ndim not in (3, 4) or not all(images.shape[-3:]):
            raise TypeError(f"{name} takes a Tensor NxCxHxW or CxHxW, got {shown_dims(images.shape)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(f"{name} takes uint8 or floats in 0..255, got {images.dtype}")
        batch = images if images.ndim == 4 else images[None]
        seeds = _checked_seeds(name, seeds, len(batch)) if seeds is not None else _drawn_seeds(len(batch))
        result = self.apply(batch, uniforms(seeds, self.draws))
        return result if images.ndim == 4 else result[0]

    @abstractmethod
    def apply(self, images: Any, drawn: np.ndarray) -> Any:
        """Transform a batch N×C×H×W by its random numbers: float64 N×``draws``, in 0..1."""


class Compose:
    """Applies ``steps`` in turn, each with independent random numbers.

    A step is any callable; one with a parameter ``seeds``, such as an ``Augmentation``, gets seeds that are derived
    from the samples' seeds and the step's position. ``TypeError`` for a step that cannot be called.
    """

    def __init__(self, steps: Sequence[Callable[..., Any]]) -> None:
        for number, step in enumerate(steps):
            if not callable(step):
                raise TypeError(f"step {number} of Compose cannot be called: it is of type {type(step).__name__}")
        self._steps = [(step, takes_seeds(step)) for step in steps]

    def __call__(self, images: Any, seeds: Any = None) -> Any:
        is_batch = isinstance(images, torch.Tensor) and images.ndim == 4
        count = len(images) if is_batch else 1
        seeds = _checked_seeds("Compose", seeds, count) if seeds is not None else _drawn_seeds(count)
        for number, (step, is_seeded) in enumerate(self._steps, 1):
            images = step(images, seeds=_derived(seeds, number)) if is_seeded else step(images)
        return images


# -- erasing ----------------------------------------------------------------------------------------------------------


class CutOut(Augmentation):
    """Erase ``holes`` squares (DeVries and Taylor 2017, arXiv:1708.04552); images keep shape and dtype.

    The centre of a square is a random pixel of the image; parts outside the image are cut off. ``length``: its side in
    pixels, or, as a float up to 1.0, a share of the image's shorter side, rounded down. As in the authors' code, a
    square has ``length // 2`` pixels before its centre and as many from the centre on, so an odd length loses a pixel.
    ``fill``: the value of erased pixels, 0 to 255. Raises ``ValueError`` for impossible parameters.
    """

    def __init__(self, holes: int = 1, length: int | float = 0.5, fill: float = 0.0) -> None:
        self._holes = _whole("holes", holes, 0)
        self._length, self._fill = _length("length", length, 0), _value("fill", fill)
        self.draws = 2 * self._holes

    def apply(self, images: Any, drawn: np.ndarray) -> Any:
        """See ``Augmentation``; the random numbers are y and x of each square."""
        height, width = images.shape[-2:]
        half = _pixels(self._length, height, width) // 2
        inside = []
        for place, size in enumerate((height, width)):
            centres = np.floor(drawn[:, place::2] * size)[..., None]
            pixels = np.arange(size)
            inside.append((pixels >= centres - half) & (pixels < centres + half))
        down, across = _sent(np.concatenate(inside, axis=2), images.device).split([height, width], dim=2)
        erased = torch.zeros((len(images), height, width), dtype=torch.bool, device=images.device)
        for hole in range(self._holes):
            erased |= down[:, hole, :, None] & across[:, hole, None, :]
        return _erased(images, erased, self._fill)


class GridMask(Augmentation):
    """Erase a grid of squares (Chen et al. 2020, arXiv:2001.04086) as DALI's ``fn.grid_mask``; same shape and dtype.

    ``tile``: the grid's period in pixels, or, as a float up to 1.0, a share of the image's shorter side, rounded down.
    ``ratio``: the side of an erased square over that of a tile, 0..1. ``angle``: the rotation of the grid around the
    top left corner, in radians. ``ratio`` and ``angle`` may be ranges (low, high), uniformly distributed. So is the
    grid's phase: DALI's ``shift_x`` and ``shift_y`` are drawn from 0 to ``tile``. ``fill``: the value of erased pixels,
    0 to 255. Raises ``ValueError`` for impossible parameters.
    """

    draws = 4

    def __init__(self, tile: int | float = 0.25, ratio: Range = 0.5, angle: Range = 0.0, fill: float = 0.0) -> None:
        self._tile, self._fill = _length("tile", tile, 1), _value("fill", fill)
        self._ratio = _range("ratio", ratio, 0.0, 1.0)
        self._angle = _range("angle", angle, -math.inf, math.inf)

    def apply(self, images: Any, drawn: np.ndarray) -> Any:
        """See ``Augmentation``; the random numbers are ratio, phase in x and y, and angle."""
        height, width = images.shape[-2:]
        tile = max(1, _pixels(self._tile, height, width))
        ratio, angle = _within(self._ratio, drawn[:, 0]), _within(self._angle, drawn[:, 3])
        matrices = np.empty((len(images), 2, 3))
        matrices[:, :, :2] = _rotations(angle) / tile
        matrices[:, :, 2] = -drawn[:, 1:3]
        places = _coordinates(matrices, height, width, images.device)  # in tiles
        ratios = _sent(ratio.astype(np.float32), images.device)
        black = places.sub_(places.floor()) < ratios.view(-1, 1, 1, 1)
        return _erased(images, black[:, 0] & black[:, 1], self._fill)


def _erased(images: Any, erased: Any, fill: float) -> Any:
    """``images`` with ``fill`` where ``erased`` (bool N×H×W) is ``True``."""
    if fill:
        return images.masked_fill(erased[:, None], fill)
    return images * ~erased[:, None]  # on a CPU in less than half the time


# -- geometry and colours ---------------------------------------------------------------------------------------------


class RandomResizedCrop(Augmentation):
    """Rotate, crop a random part, resize it to ``size`` and flip, with one resampling; the result is float32.

    The crop is that of torchvision's ``RandomResizedCrop``: ``scale`` is the range of its area over the image's, and
    ``ratio`` that of its width over its height (uniform in the logarithm; ``None``: as the image). Of ten random crops
    the first that fits is used, at a random place; if none fits, the largest possible in the middle. Before that, the
    image is rotated around its middle by up to ``degrees`` in both directions, or by a range of degrees
    counter-clockwise, as ``RandomRotation`` does; pixels outside the image are black. ``flip``: the probability of a
    horizontal flip. ``size``: height and width, or one number for both; ``None``: that of the images. Raises
    ``ValueError`` for impossible parameters.

    Unlike torchvision's transforms it resamples once, bilinearly, and without antialiasing: a crop much larger than
    ``size`` aliases, so let the pipe resize to about ``size``. Values are not rounded.
    """

    draws = 2 * CROP_ATTEMPTS + 4

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        scale: Range = (0.08, 1.0),
        ratio: Range | None = (3 / 4, 4 / 3),
        degrees: Range = 0.0,
        flip: float = 0.0,
    ) -> None:
        pair = size if isinstance(size, (tuple, list)) else (size, size)
        if len(pair) != 2:
            raise ValueError(f"size is one number of pixels, or height and width, got {size!r}")
        self._size = None if size is None else (_whole("size", pair[0], 1), _whole("size", pair[1], 1))
        self._scale = _range("scale", scale, 0.0, 1.0)
        self._ratio = None if ratio is None else _range("ratio", ratio, 1e-3, 1e3)
        if isinstance(degrees, (int, float)):
            degrees = (-abs(degrees), abs(degrees))
        self._degrees = _range("degrees", degrees, -360.0, 360.0)
        if not isinstance(flip, (int, float)) or not 0 <= flip <= 1:
            raise ValueError(f"flip is a probability from 0 to 1, got {flip!r}")
        self._flip = flip

    def apply(self, images: Any, drawn: np.ndarray) -> Any:
        """See ``Augmentation``; the random numbers are areas, ratios, place in y and x, angle, and flip."""
        height, width = images.shape[-2:]
        rows, columns = self._size or (height, width)
        top, left, tall, wide = self._boxes(drawn, height, width)
        # From (column, row, 1) of the result to (x, y) in the rotated image, from its middle.
        boxes = np.zeros((len(images), 2, 3))
        is_flipped = drawn[:, -1] < self._flip
        boxes[:, 0, 0] = np.where(is_flipped, -wide, wide) / columns
        boxes[:, 0, 2] = left + np.where(is_flipped, wide, 0.0) + boxes[:, 0, 0] / 2 - width / 2
        boxes[:, 1, 1] = tall / rows
        boxes[:, 1, 2] = top + boxes[:, 1, 1] / 2 - height / 2
        # Then to the image, from -1 to 1.
        rotations = _rotations(np.deg2rad(_within(self._degrees, drawn[:, -2])))
        matrices = rotations @ boxes / np.array([width / 2, height / 2])[:, None]
        places = _coordinates(matrices, rows, columns, images.device)
        result = torch.nn.functional.grid_sample(
            images.to(torch.float32),
            places.permute(0, 2, 3, 1),
            mode="bilinear",
            padding_mode="border",
            align_corners=False,
        )
        if self._degrees != (0.0, 0.0):
            inside = places.abs_() <= 1.0
            result *= (inside[:, 0] & inside[:, 1])[:, None]
        return result

    def _boxes(self, drawn: np.ndarray, height: int, width: int) -> tuple[np.ndarray, ...]:
        """Top, left, height and width of each crop, in whole pixels."""
        lowest, highest = self._ratio or (width / height, width / height)
        areas = _within(self._scale, drawn[:, :CROP_ATTEMPTS].T) * (height * width)
        ratios = np.exp(_within((math.log(lowest), math.log(highest)), drawn[:, CROP_ATTEMPTS : 2 * CROP_ATTEMPTS].T))
        wide, tall = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        # If none fits: the largest in the middle.
        own = min(max(width / height, lowest), highest)
        last = min(width, round(height * own)), min(height, round(width / own))
        first, numbers = fits.argmax(axis=0), np.arange(len(drawn))
        is_found = fits[first, numbers]
        wide = np.where(is_found, wide[first, numbers], max(1, last[0]))
        tall = np.where(is_found, tall[first, numbers], max(1, last[1]))
        top = np.where(is_found, np.floor(drawn[:, -4] * (height - tall + 1)), (height - tall) // 2)
        left = np.where(is_found, np.floor(drawn[:, -3] * (width - wide + 1)), (width - wide) // 2)
        return top, left, tall, wide


class ColorTwist(Augmentation):
    """Change brightness, contrast, saturation and hue of RGB images, as DALI's ``fn.color_twist``; gives float32.

    Parameters are those of torchvision's ``ColorJitter``. ``brightness``, ``contrast``, ``saturation``: a range of
    factors, or a number x for the range from max(0, 1 - x) to 1 + x. ``hue``: a range of turns of the colour wheel
    within -0.5 to 0.5 (positive: from red to yellow), or a number for both directions. Raises ``ValueError`` for
    impossible parameters, ``TypeError`` for images without 3 channels.

    Each sample has one 3×3 matrix and an offset; the result is clamped to 0..255. Differences from ``ColorJitter``: the
    order is always hue, saturation, contrast, brightness; contrast changes around middle grey (128), not around the
    image's mean; hue rotates in Y'IQ, which keeps luma, not in HSV; intermediate values are not clamped.
    """

    draws = 4

    def __init__(
        self, brightness: Range = 0.0, contrast: Range = 0.0, saturation: Range = 0.0, hue: Range = 0.0
    ) -> None:
        self._brightness = _factors("brightness", brightness)
        self._contrast = _factors("contrast", contrast)
        self._saturation = _factors("saturation", saturation)
        if isinstance(hue, (int, float)):
            hue = (-abs(hue), abs(hue))
        self._hue = _range("hue", hue, -0.5, 0.5)

    def apply(self, images: Any, drawn: np.ndarray) -> Any:
        """See ``Augmentation``; the random numbers are brightness, contrast, saturation and hue."""
        if images.shape[1] != 3:
            raise TypeError(f"ColorTwist takes RGB images, Nx3xHxW, got {shown_dims(images.shape)}")
        ranges = (self._brightness, self._contrast, self._saturation, self._hue)
        brightness, contrast, saturation, hue = (
            _within(bounds, drawn[:, place])[:, None, None] for place, bounds in enumerate(ranges)
        )
        to_yiq = np.array(RGB_TO_YIQ)
        grey = np.ones((3, 1)) * np.array(LUMA)
        # A quarter turn of the hue; any other is a sum of this and of no turn.
        quarter = np.linalg.inv(to_yiq) @ np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]]) @ to_yiq
        angle = 2 * np.pi * hue
        chroma = np.cos(angle) * (np.eye(3) - grey) + np.sin(angle) * quarter
        matrices = brightness * contrast * (grey + saturation * chroma)
        offsets = np.repeat(brightness * MIDDLE_GREY * (1.0 - contrast), 3, axis=1)
        sent = _sent(np.concatenate([matrices, offsets], axis=2).astype(np.float32), images.device)
        red, green, blue, offset = (column[..., None, None] for column in sent.unbind(dim=2))
        # NOTE: not a matrix product, whose sums depend on the size of the batch, and on a GPU on TF32.
        floats = images.to(torch.float32)
        result = torch.addcmul(offset, floats[:, 0:1], red)
        return result.addcmul_(floats[:, 1:2], green).addcmul_(floats[:, 2:3], blue).clamp_(0.0, WHITE)


# -- random numbers ---------------------------------------------------------------------------------------------------


def _mixed(values: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64, which maps uint64 one to one."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


def _derived(seeds: Any, number: int) -> Any:
    """Other seeds for the same samples, for step ``number``."""
    shifted = seeds.numpy().view(np.uint64) + np.array(number, np.uint64) * STEP
    return torch.from_numpy(_mixed(shifted).view(np.int64))


def _drawn_seeds(count: int) -> Any:
    return torch.empty(count, dtype=torch.int64).random_()


def _checked_seeds(name: str, seeds: Any, count: int) -> Any:
    is_tensor = isinstance(seeds, torch.Tensor)
    if not is_tensor or seeds.dtype != torch.int64 or seeds.device.type != "cpu" or seeds.shape != (count,):
        kind = f"{shown_dims(seeds.shape)} of {seeds.dtype} on {seeds.device}" if is_tensor else type(seeds).__name__
        raise TypeError(f"{name}: seeds are a Tensor of {count} int64 on the CPU, got {kind}")
    return seeds.contiguous()


def _within(bounds: tuple[float, float], drawn: np.ndarray) -> np.ndarray:
    return np.asarray(bounds[0] + (bounds[1] - bounds[0]) * drawn)


# -- places of pixels -------------------------------------------------------------------------------------------------


def _rotations(angles: np.ndarray) -> np.ndarray:
    """N×2×2: from a place in the image that is rotated counter-clockwise to the place in the original, y down."""
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([np.stack([cos, -sin], axis=1), np.stack([sin, cos], axis=1)], axis=1)


def _coordinates(matrices: np.ndarray, height: int, width: int, device: Any) -> Any:
    """``matrices`` (float64 N×2×3) times (column, row, 1) for each pixel: float32 N×2×height×width on ``device``.

    NOTE: the device makes one addition for each, so that every device has the same bits.
    """
    across = matrices[:, :, 0:1] * np.arange(width) + matrices[:, :, 2:3]
    down = matrices[:, :, 1:2] * np.arange(height)
    sent = _sent(np.concatenate([across, down], axis=2).astype(np.float32), device)
    across, down = sent.split([width, height], dim=2)
    return across[:, :, None, :] + down[:, :, :, None]


def _sent(array: np.ndarray, device: Any) -> Any:
    """The array as a Tensor on ``device``; the host does not wait for the copy."""
    return SideStreams.to(torch.from_numpy(np.ascontiguousarray(array)), device)


# -- parameters -------------------------------------------------------------------------------------------------------


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number from {least} up, got {value!r}")
    return value


def _value(name: str, value: Any) -> Any:
    """Check the value of a pixel."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= float(value) <= WHITE:
        raise ValueError(f"{name} is a number from 0 to {WHITE:g}, got {value!r}")
    return value


def _length(name: str, value: Any, least: int) -> int | float:
    """Pixels, or a share of the shorter side."""
    if isinstance(value, float):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is a whole number of pixels, or a share of the side from 0.0 to 1.0, got {value}")
        return value
    return _whole(name, value, least)


def _pixels(length: int | float, height: int, width: int) -> int:
    return int(length * min(height, width)) if isinstance(length, float) else length


def _range(name: str, value: Any, least: float, most: float) -> tuple[float, float]:
    pair = (value, value) if isinstance(value, (int, float)) else value
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not all(isinstance(each, (int, float)) for each in pair):
        raise ValueError(f"{name} is a number, or a range (low, high), got {value!r}")
    low, high = map(float, pair)
    if not least <= low <= high <= most or math.isinf(low) or math.isinf(high):
        within = "finite" if math.isinf(most) else f"within {least:g} to {most:g}"
        raise ValueError(f"{name} must be {within}, and a range go from low to high, got {value!r}")
    return low, high


def _factors(name: str, value: Any) -> tuple[float, float]:
    if isinstance(value, (int, float)) and value >= 0:
        value = (max(0.0, 1.0 - value), 1.0 + value)
    return _range(name, value, 0.0, 1e6)
