"""Images as Tensors, 1×C×H×W on the CPU or a GPU, by PyTorch; their way to Mats, lists and files, and back."""

from __future__ import annotations

import io
import math
import os
import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, ItemBackend, Param
from torchpipe_py.backends.cuda import GuardedBackend, TensorBackend
from torchpipe_py.backends.opencv import COLORS, as_mat, fit_inside, side, to_color
from torchpipe_py.errors import ConfigError
from torchpipe_py.keys import TASK_BOX_KEY, TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int, to_str

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "area")
PRECISION_BITS = 22  # of Pillow's coefficients: src/libImaging/Resample.c
KEPT_TAPS = 64

Taps = tuple[np.ndarray, np.ndarray]
"""What each pixel of a resized row is made of: columns of the input, int64, and their weights, float64; both out×k.

The columns of one row differ from each other; where a weight is 0 the column does not matter.
"""


class cvtColorTensor(TensorBackend):
    """Tensor 1×3×H×W of any dtype to channel order ``color``, only if it differs, on its own device.

    A dict without ``color`` holds an RGB Tensor, as ``DecodeTensor`` makes them; a Mat without ``color`` is BGR.
    Sets ``color``. ``ValueError`` for a Tensor that has not three channels.
    """

    color = Param(to_color, choices=COLORS, doc="channel order wanted")

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        if tensor.shape[1] != 3:
            raise ValueError(f"color {self.color} needs a Tensor of 3 channels, got {tensor.shape[1]}")
        if item.get(TASK_COLOR_KEY, "rgb") != self.color:
            tensor = tensor.flip(1)
        item[TASK_COLOR_KEY] = self.color
        return tensor


class _TorchBackend(TensorBackend):
    """Has PyTorch at hand as ``self._torch``."""

    def setup_guarded(self) -> None:
        import torch

        self._torch: Any = torch


class _FloatResizer(_TorchBackend):
    """What the backends with a float32 result share."""

    interpolation = Param(to_str, "bilinear", choices=INTERPOLATIONS, doc="as OpenCV's INTER_ flag of that name")

    def setup_guarded(self) -> None:
        super().setup_guarded()
        self._interpolate: Any = self._torch.nn.functional.interpolate
        self._area = keep_taps(area_taps)

    def resized(self, tensor: Any, height: int, width: int) -> Any:
        """A new float32 Tensor of ``height`` × ``width``."""
        if tensor.shape[2:] == (height, width):
            return tensor.to(self._torch.float32, copy=True)
        if self.interpolation == "nearest":
            return self._nearest(tensor, height, width).to(self._torch.float32)
        if self.interpolation == "area":
            return self._by_area(tensor, height, width).to(self._torch.float32)
        tensor = tensor.to(self._torch.float32)
        return self._interpolate(tensor, (height, width), mode=self.interpolation, align_corners=False)

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


class ResizeTensor(_FloatResizer):
    """Tensor 1×C×H×W of any real dtype to float32, 1×C×``resize_h``×``resize_w``; the aspect ratio is not kept.

    Geometry of ``cv2.resize``: half-pixel centres, borders repeated, no smoothing when it shrinks but by ``area``.
    Values keep their scale and are neither rounded nor clamped: ``bicubic`` can leave 0..255. Always a copy.
    """

    resize_h = side("output height, pixels")
    resize_w = side("output width, pixels")

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        return self.resized(tensor, self.resize_h, self.resize_w)


class ResizePadTensor(_FloatResizer):
    """Tensor to float32, 1×C×``max_h``×``max_w``: the largest that fits with its aspect ratio, top left, padded.

    Writes ``inverse_trans(x, y)``, which maps a point of the output to the input, in pixels. Size and place are those
    of ``ResizePadMat``, values those of ``ResizeTensor``.
    """

    max_h = side("output height, pixels")
    max_w = side("output width, pixels")
    pad_value = Param(to_int, 0, low=0, high=255, doc="value of the padding in every channel")

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        channels, height, width = tensor.shape[1:]
        new_h, new_w, item["inverse_trans"] = fit_inside(height, width, self.max_h, self.max_w)
        shape = (1, channels, self.max_h, self.max_w)
        padded = self._torch.full(shape, self.pad_value, dtype=self._torch.float32, device=tensor.device)
        padded[:, :, :new_h, :new_w] = self.resized(tensor, new_h, new_w)
        return padded


class PillowResizeTensor(_TorchBackend):
    """Tensor 1×C×H×W to 1×C×``resize_h``×``resize_w``, uint8, bit-exact with Pillow's bilinear, which smooths.

    As in ``Resample.c`` of the Pillow that is installed: one pass over each row, one over each column, with
    coefficients of 22 bits and each rounded to 8; a pass that changes nothing is left out. Which goes first differs
    between versions of Pillow. Every channel is resized by itself, as in modes L and RGB; an alpha channel is not
    multiplied in. Always a copy. ``TypeError`` for a Tensor that is not uint8.
    """

    resize_h = side("output height, pixels")
    resize_w = side("output width, pixels")

    def setup_guarded(self) -> None:
        from PIL import __version__

        super().setup_guarded()
        major, minor = __version__.split(".")[:2]
        self._pillow = int(major), int(minor)
        self._taps = keep_taps(pillow_taps)

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        if tensor.dtype != self._torch.uint8:
            raise TypeError(f"expected a Tensor of uint8, got {tensor.dtype}; Pillow's resize is defined on 8 bits")
        if tensor.shape[2:] == (self.resize_h, self.resize_w):
            return tensor.clone()
        passes = [(3, self.resize_w), (2, self.resize_h)]
        if shrinks_height_first(tensor.shape[2:], (self.resize_h, self.resize_w), self._pillow):
            passes.reverse()
        for dim, wanted in passes:
            tensor = self._pass(tensor, dim, wanted)
        return tensor

    def _pass(self, tensor: Any, dim: int, wanted: int) -> Any:
        size = tensor.shape[dim]
        if size == wanted:
            return tensor
        # float64 holds these sums of integers exactly, in whatever order they are added.
        sums = resample(tensor.to(self._torch.float64), dim, wanted, *self._taps(size, wanted, tensor.device))
        sums += 1 << (PRECISION_BITS - 1)
        return sums.mul_(0.5**PRECISION_BITS).floor_().clamp_(0, 255).to(self._torch.uint8)


class CropTensor(_TorchBackend):
    """The part of a Tensor 1×C×H×W that ``box`` in the dict names: [left, top, right, bottom] in pixels; a copy.

    ``box`` is a list, tuple, array or tensor of four numbers; right and bottom are the first pixels outside. Fractions
    are rounded, and what lies outside the image is cut off. ``ValueError`` for a box that is missing, is no four
    finite numbers, or leaves no pixel.
    """

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        height, width = tensor.shape[2:]
        where = f"an image of {width}x{height} pixels"
        if item.get(TASK_BOX_KEY) is None:
            raise ValueError(f"the dict has no {TASK_BOX_KEY!r} = [left, top, right, bottom] to crop {where} to")
        numbers = _box_numbers(item[TASK_BOX_KEY], where)
        left, right = (min(max(x, 0), width) for x in numbers[::2])
        top, bottom = (min(max(y, 0), height) for y in numbers[1::2])
        if left >= right or top >= bottom:
            raise ValueError(f"{TASK_BOX_KEY} {numbers} (left, top, right, bottom) leaves no pixel of {where}")
        return tensor[:, :, top:bottom, left:right].clone(memory_format=self._torch.contiguous_format)


def _box_numbers(box: Any, where: str) -> list[int]:
    """Left, top, right, bottom, rounded; ``ValueError`` for anything but four finite numbers."""
    values = box.tolist() if hasattr(box, "tolist") else box
    good = isinstance(values, (list, tuple)) and len(values) == 4
    if not good or not all(isinstance(one, (int, float, np.number)) and math.isfinite(one) for one in values):
        raise ValueError(f"{TASK_BOX_KEY} must hold 4 numbers, left, top, right, bottom, got {box!r} for {where}")
    return [round(float(one)) for one in values]


class Tensor2Mat(_TorchBackend):
    """Tensor 1×C×H×W to a Mat H×W×C on the host, ``uint8`` and contiguous; always a copy.

    Values other than ``uint8`` are rounded (half to even) and clamped to 0..255. Channels keep their order.
    """

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        if tensor.dtype != self._torch.uint8:
            tensor = tensor.to(self._torch.float32).round().clamp(0, 255).to(self._torch.uint8)
        layout = self._torch.contiguous_format
        return tensor[0].permute(1, 2, 0).clone(memory_format=layout).cpu().numpy()


class _AnyTensor(_TorchBackend):
    """Takes a ``torch.Tensor`` of any shape; ``TypeError`` for anything else."""

    def forward_item(self, item: Data) -> None:
        value = item[TASK_DATA_KEY]
        if not isinstance(value, self._torch.Tensor):
            raise TypeError(f"expected a Tensor (torch.Tensor), got {type(value).__name__}")
        item[TASK_RESULT_KEY] = self.forward_tensor(self.here(value), item)


class Tensor2Vector(_AnyTensor):
    """Tensor of any shape and real dtype to a flat list of floats, in row-major order."""

    def forward_tensor(self, tensor: Any, item: Data) -> list[float]:
        values: list[float] = tensor.to(self._torch.float64).flatten().tolist()
        return values


class SaveTensor(_AnyTensor):
    """Writes each Tensor, of any shape, to a ``.pt`` file of its own in ``save_dir`` and passes it on.

    The path is ``saved`` in the dict; ``torch.load`` and ``LoadTensor`` read it, as a CPU tensor. The folder is made if
    it is missing. A file has its name only once it is complete. ``ConfigError`` for a folder that cannot be written.
    """

    save_dir = Param(to_str, doc="folder for the files")

    def setup_guarded(self) -> None:
        super().setup_guarded()
        make_folder(self.save_dir)

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        file = io.BytesIO()
        # NOTE: a view would be saved with all the memory it looks into: one row with its whole batch.
        self._torch.save(tensor.detach().clone().cpu(), file)
        item["saved"] = write_new(self.save_dir, ".pt", file.getbuffer())
        return tensor


class SaveMat(ItemBackend):
    """Writes each Mat of 1, 3 or 4 channels to a ``.png`` file of its own in ``save_dir`` and passes it on.

    ``color`` in the dict is honoured; a dict without holds a BGR Mat. The path is ``saved`` in the dict. The folder is
    made if it is missing. A file has its name only once it is complete. ``ConfigError`` for a folder that cannot be
    written, ``ValueError`` for another number of channels.
    """

    save_dir = Param(to_str, doc="folder for the files")

    def setup(self) -> None:
        import cv2

        self._encode: Callable[..., Any] = cv2.imencode
        make_folder(self.save_dir)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        item["saved"] = write_new(self.save_dir, ".png", self._png(mat, item.get(TASK_COLOR_KEY, "bgr")))
        item[TASK_RESULT_KEY] = item[TASK_DATA_KEY]

    def _png(self, mat: np.ndarray, color: str) -> memoryview:
        channels = mat.shape[2]
        if channels not in (1, 3, 4):
            raise ValueError(f"a PNG has 1, 3 or 4 channels, the Mat has {channels}")
        if color == "rgb" and channels > 1:
            mat = mat[:, :, [2, 1, 0, 3][:channels]]
        # What cv2.imwrite does, without its rule that the name of the unfinished file end in ".png" too.
        done, encoded = self._encode(".png", np.ascontiguousarray(mat))
        if not done:
            raise ValueError(f"OpenCV cannot write a Mat of shape {mat.shape} as PNG")
        return memoryview(encoded)


class LoadTensor(GuardedBackend, ItemBackend):
    """The Tensor in the file ``tensor_name``, whatever ``data`` is: a copy on this node's device for each request.

    The file is read once, when the node starts; ``torch.load`` takes tensors from it and runs no code.
    ``ConfigError`` for a file that holds no tensor.
    """

    tensor_name = Param(to_str, file=True, doc="path of a .pt file with one tensor")

    def setup_guarded(self) -> None:
        self._tensor = load_tensor(self.tensor_name, self.device)

    def forward_guarded(self, items: list[Data]) -> None:
        for item in items:
            item[TASK_RESULT_KEY] = self._tensor.clone()

    def close(self) -> None:
        self._tensor = None
        super().close()


def load_tensor(path: str, device: Any) -> Any:
    """The tensor in a ``.pt`` file, on ``device``; ``ConfigError`` for a file that holds none."""
    import torch

    try:
        value = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise ConfigError(f"tensor_name {path}: PyTorch cannot load it: {reason}") from error
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"tensor_name {path}: it holds no tensor but a {type(value).__name__}")
    return value.detach()


def make_folder(path: str) -> None:
    """Make the folder unless it is there; ``ConfigError`` where files cannot be written into it."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_dir {path!r} cannot be made: {error} (working directory: {os.getcwd()})") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"save_dir {path!r} cannot be written (working directory: {os.getcwd()})")


def write_new(folder: str, extension: str, content: memoryview) -> str:
    """The path of a new file in ``folder`` with a name nobody else uses; under it, it is complete from the start."""
    name = uuid.uuid4().hex
    path, unfinished = os.path.join(folder, name + extension), os.path.join(folder, f".{name}.tmp")
    try:
        with open(unfinished, "xb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise
    return path


def keep_taps(make: Callable[..., Taps]) -> Callable[..., tuple[Any, Any]]:
    """``taps(size, wanted, device, *options)``: what ``make`` gives, as tensors on ``device``; keeps the last 64."""
    import torch

    @lru_cache(maxsize=KEPT_TAPS)
    def taps(size: int, wanted: int, device: Any, *options: Any) -> tuple[Any, Any]:
        columns, weights = make(size, wanted, *options)
        return torch.from_numpy(columns).to(device), torch.from_numpy(weights).to(device)

    return taps


def resample(tensor: Any, dim: int, wanted: int, columns: Any, weights: Any) -> Any:
    """A float64 Tensor with dimension ``dim`` (2: rows, 3: columns) resized to ``wanted``, by one matrix product."""
    # The matrix, wanted×size, is made anew: of large images it is large, and kept it would fill the GPU.
    matrix = tensor.new_zeros((wanted, tensor.shape[dim])).scatter_(1, columns, weights)
    return tensor @ matrix.T if dim == 3 else matrix @ tensor


def pillow_taps(size: int, wanted: int) -> Taps:
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


def area_taps(size: int, wanted: int, shrinks: bool) -> Taps:
    """Weights of OpenCV's INTER_AREA; ``shrinks``: neither side of the image grows."""
    return _covered_taps(size, wanted) if shrinks else _widened_taps(size, wanted)


def _covered_taps(size: int, wanted: int) -> Taps:
    """The mean over the pixels that an output pixel covers, each counted by the part covered."""
    scale = size / wanted
    start = np.arange(wanted)[:, None] * scale
    columns = _columns(start[:, 0].astype(np.int64), math.ceil(scale) + 1, size)
    weights = np.maximum(np.minimum(start + scale, columns + 1) - np.maximum(start, columns), 0.0)
    return columns, weights / weights.sum(axis=1, keepdims=True)


def _widened_taps(size: int, wanted: int) -> Taps:
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
