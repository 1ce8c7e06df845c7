"""Tensors by PyTorch. A Tensor is a ``torch.Tensor`` of shape 1×C×H×W."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchpipe_py.backends.base import Backend, BackendConfig, Data, ItemBackend, Param
from torchpipe_py.backends.basic import Identity, Wrapper
from torchpipe_py.backends.opencv import as_mat
from torchpipe_py.errors import BackendUnavailable
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_str

FAST_CHANNELS = 4  # OpenCV's own images; it has a limit on channels, above which cv2.split writes elsewhere


class Mat2Tensor(ItemBackend):
    """Mat, H×W×C, to Tensor, 1×C×H×W, of the same dtype; always a copy."""

    device = Param(to_str, "", choices=("", "cpu", "cuda"), doc='"cpu" or "cuda"; default: "cuda" if there is one')

    def setup(self) -> None:
        import cv2
        import torch

        has_cuda = torch.cuda.is_available()
        if self.device == "cuda" and not has_cuda:
            raise BackendUnavailable('device = "cuda", but PyTorch finds no CUDA device')
        self._device = f"cuda:{self.config.device_id}" if has_cuda and self.device != "cpu" else None
        self._split: Any = cv2.split
        self._from_numpy: Any = torch.from_numpy

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY])
        height, width, channels = mat.shape
        planes = np.empty((1, channels, height, width), np.uint8)
        if channels <= FAST_CHANNELS:
            # cv2.split writes each plane in place, several times as fast as NumPy's transposed copy.
            self._split(mat, list(planes[0]))
        else:
            np.copyto(planes[0], mat.transpose(2, 0, 1))
        tensor = self._from_numpy(planes)
        item[TASK_RESULT_KEY] = tensor if self._device is None else tensor.to(self._device)


class SyncTensor(Wrapper):
    """Runs the backend in its brackets and waits for the GPU once at the end; without brackets only waits.

    On a CPU there is nothing to wait for. Also called ``StreamGuard``, ``TensorSync`` and ``Torch``.
    """

    children = (0, 1)

    @property
    def inner(self) -> Backend:
        return self._inner

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self._inner = config.children[0] if config.children else Identity(config)

    def setup(self) -> None:
        import torch

        self._stream = torch.cuda.current_stream(self.config.device_id) if torch.cuda.is_available() else None
        self.inner.setup()

    def forward(self, items: list[Data]) -> None:
        self.inner.forward(items)
        if self._stream is not None:
            self._stream.synchronize()
