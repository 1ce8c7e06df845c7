"""Resizes Tensors: computes which input pixels, with which weights, form each output pixel of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from torchpipe_py.backends.params import Param
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.values import to_str

COEFFICIENT_BITS = 22  # as in Pillow's src/libImaging/Resample.c
KEPT = 64

Resize = Callable[[Any, int, int], Any]
"""``resize(tensor, height, width)``: a new Tensor of that size, of N×C×H×W."""

Coefficients = tuple[np.ndarray, np.ndarray]
"""For each pixel of a resized row, columns of the input, int64, and their weights, float64; both out×k.

The columns of a pixel are distinct; those with a weight of 0 do not matter.
"""


def interpolation() -> Param:
    """The parameter ``interpolation`` of a backend that resizes as OpenCV does."""
    choices = ("nearest", "bilinear", "bicubic", "area")
    return Param(to_str, "bilinear", choices=choices, doc="as OpenCV's INTER_ flag of that name")


def float_resize(interpolation: str) -> Resize:
    """To float32, as OpenCV's INTER_ flag of that name does it."""
    import torch

    area = _keep_coefficients(area_coefficients)

    def resized(tensor: Any, height: int, width: int) -> Any:
        old_h, old_w = tensor.shape[2:]
        if (old_h, old_w) == (height, width):
            return tensor.to(torch.float32, copy=True)
        if interpolation == "nearest":
            return _nearest(_nearest(tensor, 2, height), 3, width).to(torch.float32)
        if interpolation == "area":
            # NOTE: PyTorch's "area" is an adaptive pooling over whole pixels, OpenCV's counts parts of them.
            shrinks = height <= old_h and width <= old_w
            tensor = _weighted_sums(tensor.to(torch.float64), 3, width, *area(old_w, width, tensor.device, shrinks))
            tensor = _weighted_sums(tensor, 2, height, *area(old_h, height, tensor.device, shrinks))
            return tensor.to(torch.float32)
        options: dict[str, Any] = {"mode": interpolation, "align_corners": False}
        return torch.nn.functional.interpolate(tensor.to(torch.float32), (height, width), **options)

    return resized


def smooth_resize(interpolation: str) -> Resize:
    """To the same dtype, as torchvision resizes a tensor with ``antialias``."""
    import torch

    options: dict[str, Any] = {"mode": interpolation, "align_corners": False, "antialias": True}
    interpolate = torch.nn.functional.interpolate

    def resized(tensor: Any, height: int, width: int) -> Any:
        dtype = tensor.dtype
        if tensor.shape[2:] == (height, width):
            return tensor.clone()
        # NOTE: PyTorch resizes 8 bits as they are only on the CPU, as torchvision does there; to one pixel it fails.
        is_native = dtype == torch.uint8 and not tensor.is_cuda and height * width > 1
        if is_native or dtype in (torch.float32, torch.float64):
            return interpolate(tensor, (height, width), **options)
        given = tensor.to(torch.float32)
        if dtype != torch.uint8:
            given = interpolate(given, (height, width), **options)
            return (given if dtype.is_floating_point else given.round()).to(dtype)
        # NOTE: as on the CPU and in Pillow: rows first, rounded to 8 bits before the columns: bicubic leaves 0..255.
        passes = [(tensor.shape[2], width), (height, width)] if interpolation == "bicubic" else [(height, width)]
        for size in passes:
            given = interpolate(given, size, **options).clamp(0, 255).round()
        return given.to(dtype)

    return resized


def pillow_resize(interpolation: str) -> Resize:
    """A resize for ``uint8``, bit-exact with the bilinear one of the installed Pillow (``Resample.c``).

    One pass over each row, one over each column, with coefficients of 22 bits, each rounded to 8 bits; a pass that
    changes nothing is left out. Their order differs between versions of Pillow.
    """
    import torch
    from PIL import __version__

    major, minor = __version__.split(".")[:2]
    version = int(major), int(minor)
    coefficients = _keep_coefficients(pillow_coefficients)

    def resized(tensor: Any, height: int, width: int) -> Any:
        if tensor.dtype != torch.uint8:
            raise InvalidRequest(f"expected a Tensor of uint8, got {tensor.dtype}; Pillow resizes 8 bits")
        if tensor.shape[2:] == (height, width):
            return tensor.clone()
        passes = [(3, width), (2, height)]
        if shrinks_height_first(tensor.shape[2:], (height, width), version):
            passes.reverse()
        for dim, wanted in passes:
            size = tensor.shape[dim]
            if size == wanted:
                continue
            columns, weights = coefficients(size, wanted, tensor.device)
            # float64 holds these sums of integers exactly, in whatever order they are added.
            sums = _weighted_sums(tensor.to(torch.float64), dim, wanted, columns, weights)
            sums += 1 << (COEFFICIENT_BITS - 1)
            tensor = sums.mul_(0.5**COEFFICIENT_BITS).floor_().clamp_(0, 255).to(torch.uint8)
        return tensor

    return resized


def shrinks_height_first(old: Sequence[int], new: Sequence[int], pillow: tuple[int, int]) -> bool:
    """Whether version ``pillow`` of Pillow resizes the height before the width; ``old``, ``new``: height and width.

    Never before 12.2; then images over 100 times as high as wide (python-pillow/Pillow#9524); since 13.0 wherever the
    height loses more than twice as many pixels as the width (#9549).
    """
    (old_h, old_w), (new_h, new_w) = old, new
    if pillow < (12, 2) or new_h >= old_h:
        return False
    return old_h > 100 * old_w if pillow < (13, 0) else old_h - new_h > 2 * (old_w - new_w)


def _keep_coefficients(make: Callable[..., Coefficients]) -> Callable[..., tuple[Any, Any]]:
    """``coefficients(size, wanted, device, *options)``: the result of ``make`` on ``device``, with a cache of 64."""
    import torch

    @lru_cache(maxsize=KEPT)
    def coefficients(size: int, wanted: int, device: Any, *options: Any) -> tuple[Any, Any]:
        columns, weights = make(size, wanted, *options)
        return torch.from_numpy(columns).to(device), torch.from_numpy(weights).to(device)

    return coefficients


def _weighted_sums(tensor: Any, dim: int, wanted: int, columns: Any, weights: Any) -> Any:
    """A float64 Tensor with dimension ``dim`` (2: rows, 3: columns) resized to ``wanted``, by one matrix product."""
    # The matrix, wanted×size, is not cached: for large images it would fill the GPU.
    matrix = tensor.new_zeros((wanted, tensor.shape[dim])).scatter_(1, columns, weights)
    return tensor @ matrix.T if dim == 3 else matrix @ tensor


def _nearest(tensor: Any, dim: int, wanted: int) -> Any:
    # NOTE: PyTorch's "nearest" means the same, but computes in float32 and misses by one pixel for some sizes.
    import torch

    size = tensor.shape[dim]
    positions = torch.arange(wanted, device=tensor.device, dtype=torch.float64) * (1 / (wanted / size))
    return tensor.index_select(dim, positions.long().clamp_(max=size - 1))


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
    return columns, np.floor(weights * (1 << COEFFICIENT_BITS) + 0.5)


def area_coefficients(size: int, wanted: int, shrinks: bool) -> Coefficients:
    """Weights of OpenCV's INTER_AREA; ``shrinks``: neither side of the image grows."""
    if shrinks:  # the mean over the pixels that an output pixel covers, each counted by the part covered
        scale = size / wanted
        start = np.arange(wanted)[:, None] * scale
        columns = _columns(start[:, 0].astype(np.int64), math.ceil(scale) + 1, size)
        weights = np.maximum(np.minimum(start + scale, columns + 1) - np.maximum(start, columns), 0.0)
        return columns, weights / weights.sum(axis=1, keepdims=True)
    # Where a side grows OpenCV interpolates, in both directions, only where an output pixel lies across two pixels.
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
    """``count`` columns from ``first`` on for each row, moved left if they would leave the image."""
    count = min(count, size)
    columns: np.ndarray = np.minimum(first, size - count)[:, None] + np.arange(count)
    return columns
