"""Sizes, parts and colors of Tensors, 1×C×H×W on the CPU or a GPU, by PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.image.geometry import (
    HEIGHT_KEY,
    MAX_SIDE,
    WIDTH_KEY,
    central,
    check_channels,
    check_size,
    crop_box,
    fit_inside,
    shorter_size,
    wanted_pixels,
    wanted_side,
)
from torchpipe_py.backends.image.layout import ImageBackend
from torchpipe_py.backends.image.mat import keep_aspect, pad_value
from torchpipe_py.backends.image.opencv import MAT_COLORS, OF_TENSORS, color_of, max_pixels, side, to_color
from torchpipe_py.backends.image.pillow import smooth_interpolation
from torchpipe_py.backends.image.resampling import (
    PRECISION_BITS,
    FloatResize,
    keep_coefficients,
    pillow_coefficients,
    resample,
    resize_smoothly,
    shrinks_height_first,
)
from torchpipe_py.backends.params import Param
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int, to_str

TOGETHER = 2**25  # values that one call resizes on a GPU: they are held at once, as they were and in float32

FLOAT_BYTES = 4

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "area")


def tensor_interpolation() -> Param:
    """The parameter ``interpolation`` of a backend on Tensors."""
    return Param(to_str, "bilinear", choices=INTERPOLATIONS, doc="as OpenCV's INTER_ flag of that name")


def border(where: str) -> Param:
    """A number of pixels to add."""
    return Param(to_int, 0, low=0, high=MAX_SIDE, doc=f"pixels to add {where}, unless the dict says it")


class cvtColorTensor(ImageBackend):
    """Tensor 1×3×H×W of any dtype to channel order ``color``, only if it differs, on its own device; or to 1×1×H×W.

    A dict without ``color`` holds an RGB Tensor, as ``DecodeTensor`` makes them; a Mat without ``color`` is BGR. A
    Tensor of one channel is gray. Gray is computed as ``cv2.cvtColor`` does it, of ``uint8`` to the bit. Sets
    ``color``. ``InvalidRequest`` for a Tensor that has neither one channel nor three, and for a ``color`` of the dict
    that is no channel order.
    """

    keeps_sides = True

    color = Param(to_color, choices=MAT_COLORS, doc="channel order wanted, or gray for one channel")

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        channels = tensor.shape[1]
        if channels not in (1, 3):
            raise InvalidRequest(f"color {self.color} needs a Tensor of 1 or 3 channels, got {channels}")
        color = color_of(item, channels, OF_TENSORS)
        if color != self.color:
            tensor = self._converted(tensor, color)
        item[TASK_COLOR_KEY] = self.color
        return tensor

    def _converted(self, tensor: Any, color: str) -> Any:
        if color == "gray":
            return tensor.repeat(1, 3, 1, 1)
        if self.color != "gray":
            return tensor.flip(1)
        red, green, blue = tensor.split(1, dim=1) if color == "rgb" else tensor.flip(1).split(1, dim=1)
        if tensor.is_floating_point():
            return (0.299 * red + 0.587 * green + 0.114 * blue).to(tensor.dtype)
        # OpenCV's weights, of 15 bits.
        red, green, blue = (plane.to(self._torch.int64) for plane in (red, green, blue))
        return ((9798 * red + 19235 * green + 3735 * blue + 2**14) >> 15).to(tensor.dtype)


class ResizeTensor(ImageBackend):
    """Tensor 1×C×H×W of any real dtype to float32, 1×C×``resize_h``×``resize_w``; the aspect ratio is not kept.

    Geometry of ``cv2.resize``: half-pixel centres, borders repeated, no smoothing when it shrinks but by ``area``.
    Values keep their scale and are neither rounded nor clamped: ``bicubic`` can leave 0..255. Always a copy; on a GPU
    those of images of one size that come in one batch share memory.
    """

    sides = ("resize_h", "resize_w")

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

    sides = ("max_h", "max_w")

    centred = False

    interpolation = tensor_interpolation()
    max_h = side("output height, pixels")
    max_w = side("output width, pixels")
    pad_value = pad_value(0)

    def setup_guarded(self) -> None:
        super().setup_guarded()
        self._resize = FloatResize(self.interpolation)

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        channels, height, width = tensor.shape[1:]
        check_channels(self.max_h, self.max_w, channels)
        placed = fit_inside(height, width, self.max_h, self.max_w, self.centred)
        item["inverse_trans"] = placed.inverse_trans
        return self._resize.padded(tensor, placed, (self.max_h, self.max_w), self.pad_value)


class LetterBoxTensor(ResizePadTensor):
    """As ``ResizePadTensor``, but in the middle, as YOLO models take it, by default on gray; see ``LetterBoxMat``."""

    centred = True

    pad_value = pad_value(114)


class DynamicResizeTensor(ImageBackend):
    """Tensor to float32 of the dict's ``resize_h`` × ``resize_w``; the aspect ratio is kept only if asked.

    As ``DynamicResizeMat``, with the values of ``ResizeTensor``.
    """

    interpolation = tensor_interpolation()
    keep_aspect = keep_aspect()
    pad_value = pad_value(0)
    max_pixels = max_pixels()

    def setup_guarded(self) -> None:
        super().setup_guarded()
        self._resize = FloatResize(self.interpolation)

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        size = wanted_side(item, HEIGHT_KEY), wanted_side(item, WIDTH_KEY)
        check_size(*size, tensor.shape[1] * FLOAT_BYTES, self.max_pixels)
        if not self.keep_aspect:
            return self._resize(tensor, *size)
        height, width = tensor.shape[2:]
        return self._resize.padded(tensor, fit_inside(height, width, *size), size, self.pad_value)


class ResizeShorterTensor(ImageBackend):
    """Tensor to one with ``size`` as its shorter side, of its dtype, as torchvision's ``Resize(size)`` on a tensor.

    It smooths when it shrinks (``antialias``). ``uint8`` is rounded, and one level away from ``ResizeShorterMat`` at
    most, two with ``bicubic``. ``InvalidRequest`` for an image so long that more than ``max_pixels`` would come out.
    """

    size = side("the shorter side, pixels")
    interpolation = smooth_interpolation()
    max_pixels = max_pixels()

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        height, width = tensor.shape[2:]
        size = shorter_size(height, width, self.size)
        if (height, width) == size:
            return tensor.clone()
        check_size(*size, tensor.shape[1] * tensor.element_size(), self.max_pixels)
        return resize_smoothly(tensor, size, self.interpolation)


class PillowResizeTensor(ImageBackend):
    """Tensor 1×C×H×W to 1×C×``resize_h``×``resize_w``, uint8, bit-exact with Pillow's bilinear, which smooths.

    As in ``Resample.c`` of the Pillow that is installed: one pass over each row, one over each column, with
    coefficients of 22 bits and each rounded to 8; a pass that changes nothing is left out. Which goes first differs
    between versions of Pillow. Every channel is resized by itself, as in modes L and RGB; an alpha channel is not
    multiplied in. Always a copy. ``InvalidRequest`` for a Tensor that is not uint8.
    """

    sides = ("resize_h", "resize_w")

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


class CenterCropTensor(ImageBackend):
    """The middle ``crop_h`` × ``crop_w`` of a Tensor, as torchvision's ``CenterCrop``; a smaller one is padded with 0.

    Of the dtype of the Tensor; a contiguous copy.
    """

    sides = ("crop_h", "crop_w")

    crop_h = side("output height, pixels")
    crop_w = side("output width, pixels")

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        channels, height, width = tensor.shape[1:]
        check_channels(self.crop_h, self.crop_w, channels)
        (top, above), (left, before) = central(height, self.crop_h), central(width, self.crop_w)
        part = tensor[:, :, top : top + self.crop_h, left : left + self.crop_w]
        cropped = tensor.new_zeros((1, channels, self.crop_h, self.crop_w))
        cropped[:, :, above : above + part.shape[2], before : before + part.shape[3]] = part
        return cropped


class CopyMakeBorderTensor(ImageBackend):
    """Tensor to one with ``top``, ``bottom``, ``left`` and ``right`` more pixels, of ``pad_value``; always a copy.

    A number in the dict of the request comes before the parameter of that name. ``InvalidRequest`` for one that is no
    integer from 0 to 2**20, and for more than ``max_pixels`` altogether.
    """

    top = border("above")
    bottom = border("below")
    left = border("on the left")
    right = border("on the right")
    pad_value = pad_value(0)
    max_pixels = max_pixels()

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        sides = {"left": self.left, "right": self.right, "top": self.top, "bottom": self.bottom}
        sides |= {side: wanted_pixels(item, side, 0) for side in sides if side in item}
        left, right, top, bottom = sides.values()
        height, width = tensor.shape[2] + top + bottom, tensor.shape[3] + left + right
        check_size(height, width, tensor.shape[1] * tensor.element_size(), self.max_pixels)
        if not any(sides.values()):
            return tensor.clone()
        return self._torch.nn.functional.pad(tensor, tuple(sides.values()), value=self.pad_value)


class CropTensor(ImageBackend):
    """The part of a Tensor 1×C×H×W that ``box`` in the dict names: [left, top, right, bottom] in pixels; a copy.

    ``box`` is a list, tuple, array or tensor of four numbers; right and bottom are the first pixels outside. Fractions
    are rounded, and what lies outside the image is cut off. A box that is missing, is no four finite numbers, or
    leaves no pixel: no ``result``, ``error`` is an ``InvalidRequest``.
    """

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        left, top, right, bottom = crop_box(item, tensor.shape[2], tensor.shape[3])
        return tensor[:, :, top:bottom, left:right].clone(memory_format=self._torch.contiguous_format)
