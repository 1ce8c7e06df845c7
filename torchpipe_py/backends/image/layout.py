"""Images as Tensors: which dimension is which. Nothing else decides that."""

from __future__ import annotations

from typing import Any

from torchpipe_py.backends.base import Data
from torchpipe_py.backends.cuda import TensorBackend
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import TENSOR
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.values import to_str

CHANNELS = (1, 3, 4)
FORMATS = ("auto", "chw", "hwc")


class ImageBackend(TensorBackend):
    """Works on one image at a time: implement ``forward_tensor(tensor, item)``; the tensor is 1×C×H×W.

    ``as_image`` says what it takes. ``InvalidRequest`` for anything else.
    """

    gives = TENSOR

    data_format = Param(
        to_str,
        "auto",
        choices=FORMATS,
        doc="the dimensions of a Tensor that has three; auto: as its shape says",
    )

    def tensor_of(self, item: Data) -> Any:
        return as_image(super().tensor_of(item), self.data_format)


def as_image(tensor: Any, data_format: str) -> Any:
    """``tensor`` as 1×C×H×W, without a copy.

    One of three dimensions is C×H×W or H×W×C, as ``data_format`` says, ``chw`` or ``hwc``. With ``auto`` the shape says
    it: either the first or the last dimension is 1, 3 or 4, and counts the channels. One of four is 1×C×H×W; where only
    the last is 1, 3 or 4, ``data_format`` must be ``chw``. ``InvalidRequest`` for all others.
    """
    dims = tensor.shape
    if len(dims) not in (3, 4) or 0 in dims or (len(dims) == 4 and dims[0] != 1):
        raise InvalidRequest(f"expected a Tensor 1xCxHxW, CxHxW or HxWxC, got {_shape(tensor)}")
    is_first, is_last = dims[-3] in CHANNELS, dims[-1] in CHANNELS
    if len(dims) == 4:
        if is_last and not is_first and data_format != "chw":
            raise InvalidRequest(
                f"expected a Tensor 1xCxHxW, got {_shape(tensor)}; leave out the 1 where it is 1xHxWxC,"
                ' and set data_format = "chw" where it is not'
            )
        return tensor
    if data_format == "auto" and is_first == is_last:
        raise InvalidRequest(
            f"expected a Tensor CxHxW or HxWxC, got {_shape(tensor)}, which may be either;"
            ' set data_format = "chw" or "hwc"'
        )
    if data_format == "hwc" or (data_format == "auto" and is_last):
        tensor = tensor.permute(2, 0, 1)
    return tensor[None]


def _shape(tensor: Any) -> str:
    return f"shape {'x'.join(map(str, tensor.shape))}" if tensor.ndim else "a scalar"
