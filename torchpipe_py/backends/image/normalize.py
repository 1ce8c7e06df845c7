"""``(x - mean) / std`` for each channel of Mats and Tensors, for models that cannot have it inside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from torchpipe_py.backends.base import Data, ItemBackend
from torchpipe_py.backends.cuda import Guard
from torchpipe_py.backends.image.mat import UINT8, as_mat
from torchpipe_py.backends.image.tensor import data_format, on_tensors
from torchpipe_py.backends.params import Param, Remark
from torchpipe_py.backends.signature import MAT, TENSOR
from torchpipe_py.errors import InvalidRequest, counted
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import Value, to_floats

LARGEST_FACTOR = 0.02
"""Of pixels of 0..255, as 1/255 and 1/127.5; the standard deviation of pixels of 0..1 is larger."""


def to_divisors(value: Value) -> tuple[float, ...]:
    """Several numbers above 0."""
    numbers = to_floats(value)
    for number in numbers:
        if number <= 0:
            raise ValueError(f"expected numbers above 0, since channels are divided by them, got {number:g}")
    return numbers


def pixel_remarks(key: str, values: Sequence[float]) -> Iterator[Remark]:
    """A warning if ``mean`` or ``std`` looks like that of pixels of 0..1, as PyTorch models are trained on."""
    if not values or not 0 < max(map(abs, values)) < (1 if key.startswith("std") else 2):
        return
    written = ", ".join(f"{value:.6g}" for value in values)
    if key.startswith("std") and max(values) <= LARGEST_FACTOR:
        divisors = ", ".join(f"{1 / value:.4g}" for value in values)
        yield Remark(key, f"{written} looks like a factor; pixels are divided by std: {divisors}?", is_warning=True)
        return
    meant = ", ".join(f"{255 * value:.6g}" for value in values)
    text = (
        f"{written} looks like the {key.partition('::')[0]} of pixels 0..1, but pixels here are 0..255: probably "
        f"{meant} is meant, 255 times as much; it is right only where something before divides by 255"
    )
    yield Remark(key, text, is_warning=True)


def _remarks(cls: type, params: Mapping[str, Any], own: Collection[str]) -> Iterator[Remark]:
    counts = {key: len(params[key]) for key in ("mean", "std")}
    for key, count in counts.items():
        if not count:
            yield Remark(key, "expected a number, or one for each channel")
        yield from pixel_remarks(key, params[key])
    if len({count for count in counts.values() if count > 1}) > 1:
        yield Remark("mean", f"{counts['mean']} numbers, and std has {counts['std']}")


B = TypeVar("B", bound=type[ItemBackend])


def _normalises(cls: B) -> B:
    """Declare what backends for Mats and for Tensors have in common."""
    params = {
        "mean": Param(
            to_floats, doc="subtracted from each channel; pixels of 0..255; one number, or one for each channel"
        ),
        "std": Param(to_divisors, doc="each channel is divided by it after mean; one number, or one for each channel"),
    }
    for key, param in params.items():
        setattr(cls, key, param)
        param.__set_name__(cls, key)
    cls.reads = (TASK_COLOR_KEY,)
    cls.keeps_sides = cls.normalises = True
    cls.remarks = classmethod(_remarks)  # type: ignore[method-assign,assignment]
    return cls


class _Numbers:
    """Mean and std of a backend, as arrays of one number or one for each channel."""

    def __init__(self, backend: Any) -> None:
        self.mean, self.std = (np.array(values, np.float32) for values in (backend.mean, backend.std))
        self._count = max(len(self.mean), len(self.std))

    def check(self, channels: int) -> None:
        """Raise ``InvalidRequest`` for an image of another number of channels."""
        if self._count not in (1, channels):
            numbers = counted(self._count, "number")
            raise InvalidRequest(f"mean and std have {numbers}, the image has {counted(channels, 'channel')}")


@_normalises
class NormalizeMat(ItemBackend):
    """Mat, H×W×C of ``uint8`` or ``float32``, to a Mat of ``float32``: ``(x - mean) / std``, in each channel.

    The numbers are in the order of the Mat's channels, which stays. Equal to ``mean`` and ``std`` of a model's node,
    which cost less: this is for models that cannot have them inside. An ``InvalidRequest`` is the ``error`` of a value
    that is not a Mat, or has another number of channels than ``mean`` or ``std``.
    """

    takes, gives = MAT, MAT
    keeps_nothing = True

    def setup(self) -> None:
        import cv2

        self._numbers = _Numbers(self)
        self._look_up: Callable[..., Any] = cv2.LUT
        levels = np.arange(256, dtype=np.float32)[:, None]
        # 256 rows of one number or of one for each channel.
        self._table = np.ascontiguousarray(((levels - self._numbers.mean) / self._numbers.std)[None])

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        self._numbers.check(mat.shape[2])
        if mat.dtype != UINT8:
            item[TASK_RESULT_KEY] = (mat - self._numbers.mean) / self._numbers.std
            return
        # By a table, three times as fast as NumPy's loops over three channels.
        item[TASK_RESULT_KEY] = as_mat(self._look_up(mat, self._table))


@on_tensors
@_normalises
class NormalizeTensor(ItemBackend):
    """Tensor 1×C×H×W of any real dtype to ``float32``: ``(x - mean) / std``, in each channel, on its own device.

    The numbers are in the order of the Tensor's channels, which stays. See ``NormalizeMat``.
    """

    gives = TENSOR
    guard: Guard

    data_format = data_format()

    def setup(self) -> None:
        self._numbers = _Numbers(self)
        self._on_device: dict[Any, tuple[Any, Any]] = {}

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        import torch

        self._numbers.check(tensor.shape[1])
        if tensor.device not in self._on_device:
            arrays = (array.reshape(1, -1, 1, 1) for array in (self._numbers.mean, self._numbers.std))
            mean, std = (torch.from_numpy(array).to(tensor.device) for array in arrays)
            self._on_device[tensor.device] = mean, std
        mean, std = self._on_device[tensor.device]
        return (tensor.to(torch.float32) - mean) / std
