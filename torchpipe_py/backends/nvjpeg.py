"""JPEG decoding on the GPU: nvJPEG through torchvision."""

from __future__ import annotations

import warnings
from typing import Any

from torchpipe_py.backends.base import Data, Param
from torchpipe_py.backends.cuda import GuardedBackend
from torchpipe_py.backends.jpeg import read_header
from torchpipe_py.backends.opencv import COLORS, encoded_bytes, to_color
from torchpipe_py.errors import BackendUnavailable, DecodeError, first_line
from torchpipe_py.keys import TASK_COLOR_KEY, TASK_DATA_KEY, TASK_ERROR_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_int


class DecodeTensor(GuardedBackend):
    """JPEG bytes to a Tensor 1×3×H×W, ``uint8``, on the GPU by nvJPEG; a batch is decoded in one call.

    Baseline and progressive JPEGs, gray or YCbCr; EXIF orientation is applied, as ``cv2.imdecode`` does. Anything else
    (another format, CMYK, progressive with restart markers, cut-off or corrupt bytes): no ``result``, ``error`` is a
    ``DecodeError``; a next node with ``filter = "or"`` can decode it on the CPU. Pixels differ from OpenCV's where
    chroma is subsampled, since nvJPEG does not smooth it; ``torchpipe parity`` shows by how much.
    """

    needs_cuda = True

    color = Param(to_color, "rgb", choices=COLORS, doc="channel order of the Tensor")
    max_batch = Param(to_int, 1, low=1, key="max", doc="most images decoded in one call")

    def setup_guarded(self) -> None:
        try:
            import torch
            from torchvision.io import ImageReadMode, decode_jpeg
        except ImportError as error:
            raise BackendUnavailable(f"DecodeTensor needs torchvision (pip install torchvision): {error}") from error
        self._frombuffer: Any = torch.frombuffer
        self._uint8 = torch.uint8
        self._out_of_memory = torch.cuda.OutOfMemoryError
        self._decode: Any = decode_jpeg
        self._rgb = ImageReadMode.RGB
        # Nobody writes to an encoded image. NOTE: not catch_warnings, since instances are set up side by side.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        encoded = self._frombuffer(_small_jpeg(), dtype=self._uint8)
        try:
            for count in {1, self.max()}:  # nvJPEG starts at its first call: no request waits for that
                self._decode([encoded] * count, mode=self._rgb, device=self.device)
        except self._out_of_memory:
            raise
        except RuntimeError as error:
            raise BackendUnavailable(f"nvJPEG does not work here: {first_line(error)}") from error

    def max(self) -> int:
        return int(self.max_batch)

    def forward_guarded(self, items: list[Data]) -> None:
        good: list[tuple[Data, Any, int]] = []
        for item in items:
            data = item[TASK_DATA_KEY]
            data = data if isinstance(data, bytes) else encoded_bytes(data).tobytes()
            try:
                orientation = read_header(data).orientation
            except DecodeError as error:
                item[TASK_ERROR_KEY] = error
            else:
                good.append((item, self._frombuffer(data, dtype=self._uint8), orientation))
        if good:
            self._decode_batch(good)

    def _decode_batch(self, batch: list[tuple[Data, Any, int]]) -> None:
        try:
            images = self._decode([encoded for _, encoded, _ in batch], mode=self._rgb, device=self.device)
        except self._out_of_memory:
            raise
        except RuntimeError as error:
            if len(batch) > 1:
                for one in batch:
                    self._decode_batch([one])
            else:
                item, encoded, _ = batch[0]
                item[TASK_ERROR_KEY] = DecodeError(f"{len(encoded)} bytes: {first_line(error)}")
            return
        for (item, _, orientation), image in zip(batch, images, strict=True):
            if orientation != 1:
                image = oriented(image, orientation)
            item[TASK_RESULT_KEY] = image[None] if self.color == "rgb" else image.flip(0)[None]
            item[TASK_COLOR_KEY] = self.color


def oriented(image: Any, orientation: int) -> Any:
    """An image C×H×W turned upright by its EXIF orientation 1..8 (Exif 2.3, table 6)."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    dims = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation, ())
    return (image.flip(dims) if dims else image).contiguous()


def _small_jpeg() -> bytes:
    """16×16 pixels, black."""
    import cv2
    import numpy as np

    return bytes(cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))[1])
