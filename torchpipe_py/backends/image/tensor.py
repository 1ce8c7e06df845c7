"""Backends for Tensors: shapes of images, placement, colors, and conversion from and to Mats.

A Tensor is a ``torch.Tensor`` 1×C×H×W, on the CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from torchpipe_py.backends.arrays import is_foreign, to_tensor
from torchpipe_py.backends.base import Data, ItemBackend
from torchpipe_py.backends.cuda import Guard, on_stream
from torchpipe_py.backends.image.geometry import Placement
from torchpipe_py.backends.image.mat import MAT_COLORS, OF_MATS, OF_TENSORS, as_mat, color_of, name_color, to_color
from torchpipe_py.backends.image.resampling import Resize
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import MAT, NUMBERS, TENSOR
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_str

CHANNELS = (1, 3, 4)
FORMATS = ("auto", "chw", "hwc")
FAST_CHANNELS = 4  # for cv2.split, which allocates its own memory for many channels


# -- inputs --------------------------------------------------------------------------------------------------


def data_format() -> Param:
    """The parameter ``data_format`` of a backend on images."""
    doc = "the dimensions of a Tensor that has three; auto: as its shape says"
    return Param(to_str, "auto", choices=FORMATS, doc=doc)


def as_image(tensor: Any, data_format: str) -> Any:
    """``tensor`` as 1×C×H×W, without a copy.

    Three dimensions are C×H×W or H×W×C, by ``data_format``, ``chw`` or ``hwc``. ``auto`` decides by the shape: the
    first or the last dimension is 1, 3 or 4, the number of channels. Four dimensions are 1×C×H×W; if only
    the last is 1, 3 or 4, ``data_format`` must be ``chw``. ``InvalidRequest`` for all others.
    """
    dims = tensor.shape
    shape = f"shape {'x'.join(map(str, dims))}" if dims else "a scalar"
    if len(dims) not in (3, 4) or 0 in dims or (len(dims) == 4 and dims[0] != 1):
        raise InvalidRequest(f"expected a Tensor 1xCxHxW, CxHxW or HxWxC, got {shape}")
    is_first, is_last = dims[-3] in CHANNELS, dims[-1] in CHANNELS
    if len(dims) == 4:
        if is_last and not is_first and data_format != "chw":
            raise InvalidRequest(
                f"expected a Tensor 1xCxHxW, got {shape}; leave out the 1 where it is 1xHxWxC,"
                ' and set data_format = "chw" where it is not'
            )
        return tensor
    if data_format == "auto" and is_first == is_last:
        raise InvalidRequest(
            f'expected a Tensor CxHxW or HxWxC, got {shape}, which may be either; set data_format = "chw" or "hwc"'
        )
    if data_format == "hwc" or (data_format == "auto" and is_last):
        tensor = tensor.permute(2, 0, 1)
    return tensor[None]


def tensor_of(backend: Any, item: Data) -> Any:
    """The tensor that ``backend`` works on: an image 1×C×H×W if it has a ``data_format``, else of any shape.

    A tensor on the CPU stays there; one on another GPU is copied to this node's. ``InvalidRequest`` for a value that
    is neither a Tensor nor an array of another library (see ``arrays``).
    """
    import torch

    tensor: Any = item[TASK_DATA_KEY]
    if not isinstance(tensor, torch.Tensor):
        if not is_foreign(tensor):
            raise InvalidRequest(f"expected a Tensor (torch.Tensor), got {type(tensor).__name__}")
        tensor = to_tensor(tensor)
    data_format = getattr(backend, "data_format", "")
    if data_format:
        tensor = as_image(tensor, data_format)
    device = backend.guard.device
    return tensor.to(device) if tensor.is_cuda and tensor.device != device else tensor


B = TypeVar("B", bound=type[ItemBackend])


def on_tensors(cls: B) -> B:
    """Add ``forward_item`` to a class with ``forward_tensor(tensor, item)``, which returns the result for a tensor."""

    def forward_item(self: Any, item: Data) -> None:
        item[TASK_RESULT_KEY] = self.forward_tensor(tensor_of(self, item), item)

    cls.takes, cls.any_batch = TENSOR, True
    cls.forward_item = forward_item  # type: ignore[method-assign]
    return on_stream(cls)


def place_tensor(tensor: Any, placement: Placement, resize: Resize | None, value: int) -> Any:
    """``tensor`` cropped, resized and padded with ``value``; always a contiguous copy."""
    import torch

    size, crop, canvas, top, left, _ = placement
    if crop is not None:
        tensor = tensor[:, :, crop[0] : crop[2], crop[1] : crop[3]]
    if resize is not None:
        tensor = resize(tensor, *size)
    elif canvas is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    if canvas is None:
        return tensor
    placed = tensor.new_full((1, tensor.shape[1], *canvas), value)
    placed[:, :, top : top + size[0], left : left + size[1]] = tensor
    return placed


# -- colors -----------------------------------------------------------------------------------------------------------


@on_tensors
class cvtColorTensor(ItemBackend):
    """Tensor 1×3×H×W of any dtype to channel order ``color``, only if it differs, on its own device; or to 1×1×H×W.

    A dict without ``color`` holds an RGB Tensor, as ``DecodeTensor`` makes them; a Mat without ``color`` is BGR. A
    Tensor of one channel is gray. Gray is computed as ``cv2.cvtColor`` does it, of ``uint8`` to the bit. Sets
    ``color``. ``InvalidRequest`` for a Tensor that has neither one channel nor three, and for a ``color`` of the dict
    that is not a channel order.
    """

    reads = (TASK_COLOR_KEY,)
    gives = TENSOR
    keeps_sides = True

    data_format = data_format()
    color = Param(to_color, choices=MAT_COLORS, doc="channel order wanted, or gray for one channel")

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        channels = tensor.shape[1]
        if channels not in (1, 3):
            raise InvalidRequest(f"color {self.color} needs a Tensor of 1 or 3 channels, got {channels}")
        color = color_of(item, channels, OF_TENSORS)
        item[TASK_COLOR_KEY] = self.color
        if color == self.color:
            return tensor
        if color == "gray":
            return tensor.repeat(1, 3, 1, 1)
        return tensor.flip(1) if self.color != "gray" else _gray(tensor if color == "rgb" else tensor.flip(1))


def _gray(tensor: Any) -> Any:
    import torch

    red, green, blue = tensor.split(1, dim=1)
    if tensor.is_floating_point():
        return (0.299 * red + 0.587 * green + 0.114 * blue).to(tensor.dtype)
    # OpenCV's weights, of 15 bits.
    red, green, blue = (plane.to(torch.int64) for plane in (red, green, blue))
    return ((9798 * red + 19235 * green + 3735 * blue + 2**14) >> 15).to(tensor.dtype)


# -- from and to Mats -------------------------------------------------------------------------------------------------


@on_stream
class Mat2Tensor(ItemBackend):
    """Mat, H×W×C, to Tensor, 1×C×H×W, of the same dtype; always a copy.

    Channels keep their order. Where the dict names no ``color``, three or four channels are ``bgr`` from here on.
    """

    reads = (TASK_COLOR_KEY,)

    takes, gives = MAT, TENSOR
    keeps_sides = True
    any_batch = True
    guard: Guard

    device_type = Param(
        to_str, "", key="device", choices=("", "cpu", "cuda"), doc='"cpu" or "cuda"; default: "cuda" if there is one'
    )

    @classmethod
    def requires_cuda(cls, params: Mapping[str, Any], children: Sequence[bool]) -> bool:
        return bool(params["device_type"] == "cuda")

    def any_thread(self) -> bool:
        return not self.guard.is_cuda

    def setup(self) -> None:
        import cv2
        import torch

        self._split: Callable[..., Any] = cv2.split
        self._from_numpy: Callable[..., Any] = torch.from_numpy

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        name_color(item, mat.shape[2], OF_MATS)
        if self.guard.is_cuda:
            # Split the planes on the GPU, whose memory is faster: half the work on the host.
            writable = mat if mat.flags.c_contiguous and mat.flags.writeable else mat.copy()
            tensor = self._from_numpy(writable).to(self.guard.device)
            item[TASK_RESULT_KEY] = tensor.permute(2, 0, 1)[None].contiguous()
            return
        height, width, channels = mat.shape
        planes = np.empty((1, channels, height, width), mat.dtype)
        if channels <= FAST_CHANNELS:
            # cv2.split writes each plane in place, several times faster than NumPy's transposed copy.
            self._split(mat, list(planes[0]))
        else:
            np.copyto(planes[0], mat.transpose(2, 0, 1))
        item[TASK_RESULT_KEY] = self._from_numpy(planes)


@on_tensors
class Tensor2Mat(ItemBackend):
    """Tensor 1×C×H×W to a Mat H×W×C on the host, of the same values and contiguous; always a copy.

    ``uint8`` and ``bool`` give a Mat of ``uint8``, floats one of ``float32``, integers one of ``uint8`` where each lies
    in 0..255; other integers are an ``InvalidRequest``. With ``dtype = "uint8"`` all are rounded (half to even) and
    clamped to 0..255. Channels keep their order. Where the dict names no ``color``, three or four channels are ``rgb``
    from here on.
    """

    reads = (TASK_COLOR_KEY,)
    gives = MAT
    keeps_sides = True

    data_format = data_format()
    dtype = Param(to_str, "", choices=("", "uint8"), doc='"uint8" rounds and clamps; default: no value changes')

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        import torch

        name_color(item, tensor.shape[1], OF_TENSORS)
        if tensor.is_floating_point():
            tensor = tensor.detach().to(torch.float32)
            if self.dtype:
                tensor = tensor.round().clamp(0, 255).to(torch.uint8)
        elif tensor.dtype != torch.uint8:
            lowest, highest = (int(value) for value in tensor.to(torch.int64).aminmax())
            if not self.dtype and not 0 <= lowest <= highest <= 255:
                raise InvalidRequest(
                    f"a Mat holds 0..255 or floats, the Tensor of {tensor.dtype} {lowest}..{highest};"
                    ' dtype = "uint8" clamps them'
                )
            tensor = tensor.to(torch.int64).clamp(0, 255).to(torch.uint8)
        return tensor[0].permute(1, 2, 0).clone(memory_format=torch.contiguous_format).cpu().numpy()


@on_tensors
class Tensor2Vector(ItemBackend):
    """Tensor of any shape and real dtype to a flat list of floats, in row-major order."""

    reads = ()
    gives = NUMBERS

    def forward_tensor(self, tensor: Any, item: Data) -> list[float]:
        import torch

        values: list[float] = tensor.to(torch.float64).flatten().tolist()
        return values
