"""Sizes, parts and colors of Tensors, 1×C×H×W on the CPU or a GPU, by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchpipe_py.backends.base import Data, Param
from torchpipe_py.backends.images.geometry import check_channels, crop_box, fit_inside
from torchpipe_py.backends.images.layout import ImageBackend
from torchpipe_py.backends.images.opencv import COLORS, side, to_color
from torchpipe_py.backends.images.resampling import (
    PRECISION_BITS,
    FloatResize,
    keep_coefficients,
    pillow_coefficients,
    resample,
    shrinks_height_first,
)
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int, to_str

TOGETHER = 2**25  # values that one call resizes on a GPU: they are held at once, as they were and in float32

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "area")


def tensor_interpolation() -> Param:
    """The parameter ``interpolation`` of a backend on Tensors."""
    return Param(to_str, "bilinear", choices=INTERPOLATIONS, doc="as OpenCV's INTER_ flag of that name")


class cvtColorTensor(ImageBackend):
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


class ResizeTensor(ImageBackend):
    """Tensor 1×C×H×W of any real dtype to float32, 1×C×``resize_h``×``resize_w``; the aspect ratio is not kept.

    Geometry of ``cv2.resize``: half-pixel centres, borders repeated, no smoothing when it shrinks but by ``area``.
    Values keep their scale and are neither rounded nor clamped: ``bicubic`` can leave 0..255. Always a copy; on a GPU
    those of images of one size that come in one batch share memory.
    """

    interpolation = tensor_interpolation()
    resize_h = side("output height, pixels")
    resize_w = side("output width, pixels")

    def setup_guarded(self) -> None:
        super().setup_guarded()
        self._resize = FloatResize(self.interpolation)

    def forward_guarded(self, items: list[Data]) -> None:
        """On a GPU images of one size are resized by one call, which costs the host no more than a single one does."""
        groups: dict[Any, list[tuple[Data, Any]]] = {}
        for item in items:
            try:
                tensor = self.here(self.tensor_of(item))
                check_channels(self.resize_h, self.resize_w, tensor.shape[1])
            except InvalidRequest as error:
                item[TASK_ERROR_KEY] = error
                continue
            key = (tensor.shape, tensor.dtype, tensor.device) if _is_quick_together(tensor) else id(item)
            groups.setdefault(key, []).append((item, tensor))
        for group in groups.values():
            some = max(1, TOGETHER // group[0][1].numel())
            for start in range(0, len(group), some):
                self._resize_group(group[start : start + some])

    def _resize_group(self, group: Sequence[tuple[Data, Any]]) -> None:
        tensors = [tensor for _, tensor in group]
        batch = self._torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        rows = self._resize(batch, self.resize_h, self.resize_w).split(1)
        for (item, _), row in zip(group, rows, strict=True):
            item[TASK_RESULT_KEY] = row


def _is_quick_together(tensor: Any) -> bool:
    # NOTE: on the CPU a copy that does not fit the cache costs more than the calls.
    return bool(tensor.is_cuda)


class ResizePadTensor(ImageBackend):
    """Tensor to float32, 1×C×``max_h``×``max_w``: the largest that fits with its aspect ratio, top left, padded.

    Writes ``inverse_trans(x, y)``, which maps a point of the output to the input, in pixels. Size and place are those
    of ``ResizePadMat``, values those of ``ResizeTensor``.
    """

    interpolation = tensor_interpolation()
    max_h = side("output height, pixels")
    max_w = side("output width, pixels")
    pad_value = Param(to_int, 0, low=0, high=255, doc="value of the padding in every channel")

    def setup_guarded(self) -> None:
        super().setup_guarded()
        self._resize = FloatResize(self.interpolation)

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        channels, height, width = tensor.shape[1:]
        check_channels(self.max_h, self.max_w, channels)
        new_h, new_w, item["inverse_trans"] = fit_inside(height, width, self.max_h, self.max_w)
        shape = (1, channels, self.max_h, self.max_w)
        padded = self._torch.full(shape, self.pad_value, dtype=self._torch.float32, device=tensor.device)
        padded[:, :, :new_h, :new_w] = self._resize(tensor, new_h, new_w)
        return padded


class PillowResizeTensor(ImageBackend):
    """Tensor 1×C×H×W to 1×C×``resize_h``×``resize_w``, uint8, bit-exact with Pillow's bilinear, which smooths.

    As in ``Resample.c`` of the Pillow that is installed: one pass over each row, one over each column, with
    coefficients of 22 bits and each rounded to 8; a pass that changes nothing is left out. Which goes first differs
    between versions of Pillow. Every channel is resized by itself, as in modes L and RGB; an alpha channel is not
    multiplied in. Always a copy. ``InvalidRequest`` for a Tensor that is not uint8.
    """

    resize_h = side("output height, pixels")
    resize_w = side("output width, pixels")

    def setup_guarded(self) -> None:
        from PIL import __version__

        super().setup_guarded()
        major, minor = __version__.split(".")[:2]
        self._pillow = int(major), int(minor)
        self._coefficients = keep_coefficients(pillow_coefficients)

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        if tensor.dtype != self._torch.uint8:
            raise InvalidRequest(f"expected a Tensor of uint8, got {tensor.dtype}; Pillow resizes 8 bits")
        if tensor.shape[2:] == (self.resize_h, self.resize_w):
            return tensor.clone()
        check_channels(self.resize_h, self.resize_w, tensor.shape[1])
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
        sums = resample(tensor.to(self._torch.float64), dim, wanted, *self._coefficients(size, wanted, tensor.device))
        sums += 1 << (PRECISION_BITS - 1)
        return sums.mul_(0.5**PRECISION_BITS).floor_().clamp_(0, 255).to(self._torch.uint8)


class CropTensor(ImageBackend):
    """The part of a Tensor 1×C×H×W that ``box`` in the dict names: [left, top, right, bottom] in pixels; a copy.

    ``box`` is a list, tuple, array or tensor of four numbers; right and bottom are the first pixels outside. Fractions
    are rounded, and what lies outside the image is cut off. A box that is missing, is no four finite numbers, or
    leaves no pixel: no ``result``, ``error`` is an ``InvalidRequest``.
    """

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        left, top, right, bottom = crop_box(item, tensor.shape[2], tensor.shape[3])
        return tensor[:, :, top:bottom, left:right].clone(memory_format=self._torch.contiguous_format)
