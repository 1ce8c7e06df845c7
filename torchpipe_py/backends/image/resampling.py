"""Resizing as weighted sums: which pixels of a row make a pixel of the resized one, and how much of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from torchpipe_py.backends.image.geometry import Placed

PRECISION_BITS = 22  # of Pillow's coefficients: src/libImaging/Resample.c
KEPT = 64

Coefficients = tuple[np.ndarray, np.ndarray]
"""What each pixel of a resized row is made of: columns of the input, int64, and their weights, float64; both out×k.

The columns of one row differ from each other; where a weight is 0 the column does not matter.
"""


def keep_coefficients(make: Callable[..., Coefficients]) -> Callable[..., tuple[Any, Any]]:
    """``coefficients(size, wanted, device, *options)``: what ``make`` gives, on ``device``; the last 64 are kept."""
    import torch

    @lru_cache(maxsize=KEPT)
    def coefficients(size: int, wanted: int, device: Any, *options: Any) -> tuple[Any, Any]:
        columns, weights = make(size, wanted, *options)
        return torch.from_numpy(columns).to(device), torch.from_numpy(weights).to(device)

    return coefficients


def resample(tensor: Any, dim: int, wanted: int, columns: Any, weights: Any) -> Any:
    """A float64 Tensor with dimension ``dim`` (2: rows, 3: columns) resized to ``wanted``, by one matrix product."""
    # The matrix, wanted×size, is made anew: of large images it is large, and kept it would fill the GPU.
    matrix = tensor.new_zeros((wanted, tensor.shape[dim])).scatter_(1, columns, weights)
    return tensor @ matrix.T if dim == 3 else matrix @ tensor


def pillow_coefficients(size: int, wanted: int) -> Coefficients:
    """Pillow's bilinear coefficients times 2²², whole numbers: ``precompute_coeffs``, ``normalize_coeffs_8bpc``."""
    scale = size / wanted
    support = max(scale, 1.0)
    centers = (np.arange(wanted) + 0.5) * scale
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centers + support + 0.5).astype(np.int64), size)
    columns = _columns(first, 2 * math.ceil(support) + 1, size)
    weights = np.maximum(1.0 - np.abs((columns - centers[:, None] + 0.5) * (1.0 / support)), 0.0)
    weights[(columns < first[:, None]) | (columns >= end[:, None])] = 0.0
    # NOTE: cumsum adds from left to right, as Pillow does; sum does not, and the last bit decides some roundings.
    weights /= weights.cumsum(axis=1)[:, -1:]
    return columns, np.floor(weights * (1 << PRECISION_BITS) + 0.5)


def shrinks_height_first(old: Sequence[int], new: Sequence[int], pillow: tuple[int, int]) -> bool:
    """Whether Pillow of version ``pillow`` resizes the height before the width; ``old``, ``new``: height and width.

    Never before 12.2; then images over 100 times as high as wide (python-pillow/Pillow#9524); since 13.0 wherever the
    height loses more than twice as many pixels as the width (#9549).
    """
    (old_h, old_w), (new_h, new_w) = old, new
    if pillow < (12, 2) or new_h >= old_h:
        return False
    return old_h > 100 * old_w if pillow < (13, 0) else old_h - new_h > 2 * (old_w - new_w)


def area_coefficients(size: int, wanted: int, shrinks: bool) -> Coefficients:
    """Weights of OpenCV's INTER_AREA; ``shrinks``: neither side of the image grows."""
    return _covered_coefficients(size, wanted) if shrinks else _widened_coefficients(size, wanted)


def _covered_coefficients(size: int, wanted: int) -> Coefficients:
    """The mean over the pixels that an output pixel covers, each counted by the part covered."""
    scale = size / wanted
    start = np.arange(wanted)[:, None] * scale
    columns = _columns(start[:, 0].astype(np.int64), math.ceil(scale) + 1, size)
    weights = np.maximum(np.minimum(start + scale, columns + 1) - np.maximum(start, columns), 0.0)
    return columns, weights / weights.sum(axis=1, keepdims=True)


def _widened_coefficients(size: int, wanted: int) -> Coefficients:
    """Where a side grows OpenCV interpolates, in both directions, only where an output pixel lies across two pixels."""
    growth = wanted / size
    left = (np.arange(wanted) * (1 / growth)).astype(np.int64)
    # NOTE: float32 as in OpenCV: rounding to a whole number here decides between no part and all of the next pixel.
    part = (np.arange(1, wanted + 1) - (left + 1) * growth).astype(np.float32).astype(np.float64)
    part = np.where(part <= 0, 0.0, part - np.floor(part))
    part[left >= size - 1] = 0.0
    left = np.minimum(left, size - 1)
    columns = _columns(left, 2, size)
    weights = np.where(columns == left[:, None], 1 - part[:, None], 0.0)
    return columns, np.where(columns == left[:, None] + 1, part[:, None], weights)


def _columns(first: np.ndarray, count: int, size: int) -> np.ndarray:
    """For each row ``count`` columns from ``first`` on, moved left where they would leave the image."""
    count = min(count, size)
    columns: np.ndarray = np.minimum(first, size - count)[:, None] + np.arange(count)
    return columns


class FloatResize:
    """``resize(tensor, height, width)`` to a new float32 Tensor, as OpenCV's INTER_ flag of the name ``mode`` does."""

    def __init__(self, mode: str) -> None:
        import torch

        self._torch: Any = torch
        self._mode = mode
        self._area = keep_coefficients(area_coefficients)

    def __call__(self, tensor: Any, height: int, width: int) -> Any:
        float32 = self._torch.float32
        if tensor.shape[2:] == (height, width):
            return tensor.to(float32, copy=True)
        if self._mode == "nearest":
            return self._nearest(tensor, height, width).to(float32)
        if self._mode == "area":
            return self._by_area(tensor, height, width).to(float32)
        interpolate = self._torch.nn.functional.interpolate
        return interpolate(tensor.to(float32), (height, width), mode=self._mode, align_corners=False)

    def padded(self, tensor: Any, placed: Placed, size: tuple[int, int], value: int) -> Any:
        """``tensor`` resized and ``placed`` in an image of ``size``, height and width, of ``value``."""
        shape = (1, tensor.shape[1], *size)
        padded = self._torch.full(shape, value, dtype=self._torch.float32, device=tensor.device)
        rows, columns = slice(placed.top, placed.top + placed.height), slice(placed.left, placed.left + placed.width)
        padded[:, :, rows, columns] = self(tensor, placed.height, placed.width)
        return padded

    def _nearest(self, tensor: Any, height: int, width: int) -> Any:
        # NOTE: PyTorch's "nearest" means the same, but computes in float32 and misses by one pixel for some sizes.
        for dim, wanted in ((2, height), (3, width)):
            size = tensor.shape[dim]
            positions = self._torch.arange(wanted, device=tensor.device, dtype=self._torch.float64)
            positions = (positions * (1 / (wanted / size))).long().clamp_(max=size - 1)
            tensor = tensor.index_select(dim, positions)
        return tensor

    def _by_area(self, tensor: Any, height: int, width: int) -> Any:
        # NOTE: PyTorch's "area" is an adaptive pooling over whole pixels, OpenCV's counts parts of them.
        old_h, old_w = tensor.shape[2:]
        shrinks = height <= old_h and width <= old_w
        tensor = tensor.to(self._torch.float64)
        tensor = resample(tensor, 3, width, *self._area(old_w, width, tensor.device, shrinks))
        return resample(tensor, 2, height, *self._area(old_h, height, tensor.device, shrinks))


def resize_smoothly(tensor: Any, size: tuple[int, int], mode: str) -> Any:
    """A Tensor of ``size``, height and width, and of the same dtype, as torchvision resizes it with ``antialias``."""
    import torch

    dtype = tensor.dtype
    # NOTE: PyTorch resizes 8 bits as they are only on the CPU; there torchvision does so too.
    is_taken = dtype in (torch.float32, torch.float64) or (dtype == torch.uint8 and not tensor.is_cuda)
    given = tensor if is_taken else tensor.to(torch.float32)
    if is_taken or dtype != torch.uint8:
        resized = torch.nn.functional.interpolate(given, size, mode=mode, align_corners=False, antialias=True)
        return (resized if dtype.is_floating_point or is_taken else resized.round()).to(dtype)
    # NOTE: as the CPU and Pillow do it: rows first, and 8 bits again before the columns, since bicubic can leave them.
    for part in ((tensor.shape[2], size[1]), size) if mode == "bicubic" else (size,):
        given = torch.nn.functional.interpolate(given, part, mode=mode, align_corners=False, antialias=True)
        given = given.clamp(0, 255).round()
    return given.to(dtype)
