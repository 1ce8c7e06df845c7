"""From Mats to Tensors and back, and the stream they are worked on. A Tensor is a ``torch.Tensor`` 1×C×H×W."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchpipe_py.backends.base import Backend, BackendConfig, Data
from torchpipe_py.backends.control.basic import Identity, Wrapper
from torchpipe_py.backends.cuda import GuardedBackend, TensorBackend
from torchpipe_py.backends.image.layout import ImageBackend
from torchpipe_py.backends.image.opencv import OF_MATS, OF_TENSORS, as_mat, name_color
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import MAT, NUMBERS, TENSOR
from torchpipe_py.errors import BackendUnavailable, InvalidRequest
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_str

FAST_CHANNELS = 4  # OpenCV's own images; it has a limit on channels, above which cv2.split writes elsewhere


class Mat2Tensor(GuardedBackend):
    """Mat, H×W×C, to Tensor, 1×C×H×W, of the same dtype; always a copy.

    Channels keep their order. Where the dict names no ``color``, three or four channels are ``bgr`` from here on.
    """

    takes, gives = MAT, TENSOR
    keeps_sides = True
    any_batch = True

    device_type = Param(
        to_str, "", key="device", choices=("", "cpu", "cuda"), doc='"cpu" or "cuda"; default: "cuda" if there is one'
    )

    @classmethod
    def requires_cuda(cls, params: Mapping[str, Any], children: Sequence[bool]) -> bool:
        return bool(params["device_type"] == "cuda")

    def any_thread(self) -> bool:
        return self._guard is None

    def setup(self) -> None:
        import cv2
        import torch

        self._split: Any = cv2.split
        self._from_numpy: Any = torch.from_numpy
        if self.device_type == "cpu":
            return
        if self.device_type == "cuda" and not torch.cuda.is_available():
            raise BackendUnavailable('device = "cuda", but PyTorch finds no CUDA device')
        super().setup()

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        name_color(item, mat.shape[2], OF_MATS)
        if self._guard is None:
            item[TASK_RESULT_KEY] = self._from_numpy(self._planes(mat))
        else:
            # Half the work on the host: the planes are taken apart where memory is fast.
            writable = mat if mat.flags.c_contiguous and mat.flags.writeable else mat.copy()
            tensor = self._from_numpy(writable).to(self.device)
            item[TASK_RESULT_KEY] = tensor.permute(2, 0, 1)[None].contiguous()

    def _planes(self, mat: np.ndarray) -> np.ndarray:
        height, width, channels = mat.shape
        planes = np.empty((1, channels, height, width), mat.dtype)
        if channels <= FAST_CHANNELS:
            # cv2.split writes each plane in place, several times as fast as NumPy's transposed copy.
            self._split(mat, list(planes[0]))
        else:
            np.copyto(planes[0], mat.transpose(2, 0, 1))
        return planes


class Tensor2Mat(ImageBackend):
    """Tensor 1×C×H×W to a Mat H×W×C on the host, of the same values and contiguous; always a copy.

    ``uint8`` and ``bool`` give a Mat of ``uint8``, floats one of ``float32``, integers one of ``uint8`` where each lies
    in 0..255; other integers are an ``InvalidRequest``. With ``dtype = "uint8"`` all are rounded (half to even) and
    clamped to 0..255. Channels keep their order. Where the dict names no ``color``, three or four channels are ``rgb``
    from here on.
    """

    gives = MAT
    keeps_sides = True

    dtype = Param(to_str, "", choices=("", "uint8"), doc='"uint8" rounds and clamps; default: no value changes')

    def forward_tensor(self, tensor: Any, item: Data) -> Any:
        name_color(item, tensor.shape[1], OF_TENSORS)
        torch = self._torch
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


class Tensor2Vector(TensorBackend):
    """Tensor of any shape and real dtype to a flat list of floats, in row-major order."""

    gives = NUMBERS

    def forward_tensor(self, tensor: Any, item: Data) -> list[float]:
        values: list[float] = tensor.to(self._torch.float64).flatten().tolist()
        return values


class SyncTensor(GuardedBackend, Wrapper):
    """Runs the backend in its brackets on this instance's own CUDA stream and waits for it once, at the end.

    Inside another ``SyncTensor`` it uses the outer's stream and leaves the waiting to it. Last in a ``Sequential`` and
    without brackets it stands for one around the whole sequence. On a CPU there is nothing to wait for. Also called
    ``StreamGuard``, ``TensorSync`` and ``Torch``.
    """

    children = (0, 1)
    wraps_sequence = True

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._inner = config.children[0] if config.children else Identity(config)

    @property
    def inner(self) -> Backend:
        return self._inner

    def setup(self) -> None:
        super().setup()
        if self._guard is None:
            self.forward = self.inner.forward  # type: ignore[method-assign]

    def setup_guarded(self) -> None:
        self.inner.setup()

    def forward_guarded(self, items: list[Data]) -> None:
        self.inner.forward(items)

    def any_thread(self) -> bool:
        return self._guard is None and self.inner.any_thread()

    def close(self) -> None:
        try:
            self.inner.close()
        finally:
            super().close()
