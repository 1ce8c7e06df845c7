"""The way of a batch's values to a GPU: gathered in pinned memory, copied as they are, laid out there."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchpipe_py.backends.image.mat import UINT8

MAT = "mat"


def is_mat(value: Any) -> bool:
    """Whether ``value`` is a Mat: an array H×W or H×W×C, ``uint8``."""
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 3):
        return False
    return value.dtype is UINT8 or value.dtype == UINT8  # an unpickled dtype is another object


def row_tensor(value: Any, shape: tuple[int, ...]) -> Any:
    """One request's value, a Mat, array or tensor, as a tensor of ``shape``, which has no batch dimension."""
    import torch

    if len(shape) == 3 and (is_mat(value) or _is_turned(value, shape)):
        value = value.reshape(*shape[1:], shape[0]).transpose(2, 0, 1)  # not -1: there may be no pixel
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.copy())  # in one piece, and writable
    return value.detach().reshape(shape)


def _is_turned(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value that is to have this shape is a Mat of another dtype than ``uint8``."""
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.shape != shape


class StagedInput:
    """One input's buffer on the GPU, max×…, filled from the values of a batch: Mats, arrays or tensors."""

    def __init__(self, buffer: Any) -> None:
        import torch

        self.buffer = buffer
        self._torch: Any = torch
        self._row = tuple(buffer.shape[1:])
        self._staging: dict[Any, Staging] = {}

    def gather(self, values: list[Any]) -> Staging | None:
        """Bring the values together; what still has to be copied to the buffer, or ``None`` if that is enqueued."""
        kinds = {self._kind(value) for value in values}
        if len(kinds) > 1:
            for index, value in enumerate(values):
                self.buffer[index].copy_(row_tensor(value, self._row))
            return None
        (kind,) = kinds
        if kind == MAT:
            staging = self.mat_staging()
            staging.gather_mats(values)
        elif kind[0] == "cuda":
            self._concatenate(values, kind[1])
            return None
        else:
            staging = self._staging_of(kind[1])
            staging.gather([as_numpy(row_tensor(value, self._row)) for value in values])
        return staging

    def mat_staging(self) -> Staging:
        """Where Mats are gathered, N×H×W×C."""
        if MAT not in self._staging:
            channels, height, width = self._row
            shape = (len(self.buffer), height, width, channels)
            pinned = self._torch.empty(shape, dtype=self._torch.uint8, pin_memory=True)
            self._staging[MAT] = Staging(self.buffer, pinned, True)
        return self._staging[MAT]

    def takes_images(self) -> bool:
        """Whether Mats are likely values: one, three or four channels."""
        return len(self._row) == 3 and self._row[0] in (1, 3, 4)

    def _kind(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if len(self._row) == 3 and is_mat(value):
                return MAT
            return ("cpu", self._torch.from_numpy(np.empty(0, value.dtype)).dtype)
        return ("cuda" if value.is_cuda else "cpu", value.dtype)

    def _concatenate(self, values: list[Any], dtype: Any) -> None:
        buffer = self.buffer[: len(values)]
        rows = [value.detach() if value.requires_grad else value for value in values]
        rows = [row if row.ndim > len(self._row) else row[None] for row in rows]
        rows = [row if row.device == buffer.device else row.to(buffer.device) for row in rows]
        if dtype == buffer.dtype:
            self._torch.cat(rows, out=buffer)
        else:
            buffer.copy_(self._torch.cat(rows))

    def _staging_of(self, dtype: Any) -> Staging:
        if dtype not in self._staging:
            pinned = self._torch.empty(self.buffer.shape, dtype=dtype, pin_memory=True)
            self._staging[dtype] = Staging(self.buffer, pinned, False)
        return self._staging[dtype]


class Staging:
    """Rows gathered in pinned memory; copied to the GPU as they are, and converted and laid out there."""

    def __init__(self, buffer: Any, pinned: Any, channels_last: bool) -> None:
        import cv2
        import torch

        self._stack: Any = cv2.vconcat
        self._rows = as_numpy(pinned)
        self._pinned, self._buffer = pinned, buffer
        direct = pinned.dtype == buffer.dtype and not channels_last
        self._device = buffer if direct else torch.empty(pinned.shape, dtype=pinned.dtype, device=buffer.device)
        self._source = None if direct else self._device.permute(0, 3, 1, 2) if channels_last else self._device

    def gather(self, arrays: list[np.ndarray]) -> None:
        """Copy arrays of one row each."""
        for row, array in zip(self._rows, arrays, strict=False):
            np.copyto(row, array.reshape(row.shape))

    def gather_mats(self, mats: list[np.ndarray]) -> None:
        """Copy Mats of one size."""
        _, height, width, channels = self._rows.shape
        if channels == 1 or len(mats) == 1:
            self.gather(mats)
            return
        # One call for all of them: NumPy would give up the GIL, and queue for it again, for each.
        target = self._rows[: len(mats)].reshape(len(mats) * height, width, channels)
        if self._stack(mats, target) is not target:
            self.gather(mats)  # OpenCV has put them elsewhere

    def enqueue(self, size: int) -> None:
        """Enqueue the copy of ``size`` rows."""
        self._device[:size].copy_(self._pinned[:size], non_blocking=True)
        if self._source is not None:
            self._buffer[:size].copy_(self._source[:size])


def as_numpy(tensor: Any) -> np.ndarray:
    """A CPU tensor's memory as an array; of 16-bit integers for bfloat16, which NumPy has not."""
    import torch

    array: np.ndarray = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
