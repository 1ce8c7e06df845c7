"""Mats by Pillow, for models trained on Pillow's (torchvision's) resize."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, Isolation, StatelessBackend
from torchpipe_py.backends.image.geometry import check_size, shorter_size
from torchpipe_py.backends.image.opencv import EIGHT_BITS, as_mat, max_pixels, side
from torchpipe_py.backends.params import Param
from torchpipe_py.backends.signature import MAT
from torchpipe_py.errors import InvalidRequest
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY
from torchpipe_py.values import to_str


def smooth_interpolation() -> Param:
    """The parameter ``interpolation`` of a backend that smooths when it shrinks."""
    return Param(to_str, "bilinear", choices=("bilinear", "bicubic"), doc="as torchvision's InterpolationMode")


class PillowResizeMat(StatelessBackend):
    """Mat to Mat of ``resize_h`` × ``resize_w``, bit-exact with Pillow's bilinear, which smooths when it shrinks."""

    takes, gives = MAT, MAT
    sides = ("resize_h", "resize_w")
    keeps_color = True
    isolation = Isolation.FOLLOWS

    resize_h = side("output height, pixels")
    resize_w = side("output width, pixels")

    def setup(self) -> None:
        self._resize = PillowResize("bilinear")

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY], EIGHT_BITS)
        item[TASK_RESULT_KEY] = self._resize(mat, self.resize_h, self.resize_w)


class ResizeShorterMat(StatelessBackend):
    """Mat to Mat with ``size`` as its shorter side, bit-exact with torchvision's ``Resize(size)`` on a PIL image.

    It smooths when it shrinks (``antialias``). ``InvalidRequest`` for a Mat that is not ``uint8``, and for one so long
    that more than ``max_pixels`` would come out.
    """

    takes, gives = MAT, MAT
    keeps_color = True
    isolation = Isolation.FOLLOWS

    size = side("the shorter side, pixels")
    interpolation = smooth_interpolation()
    max_pixels = max_pixels()

    def setup(self) -> None:
        self._resize = PillowResize(self.interpolation)

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY], EIGHT_BITS)
        height, width = shorter_size(mat.shape[0], mat.shape[1], self.size)
        if mat.shape[:2] != (height, width):
            check_size(height, width, mat.shape[2], self.max_pixels)
            mat = self._resize(mat, height, width)
        item[TASK_RESULT_KEY] = mat


class PillowResize:
    """``resize(mat, height, width)``: a new Mat, by Pillow's ``Image.resize``."""

    def __init__(self, interpolation: str) -> None:
        from PIL import Image

        self._image: Any = Image
        self._resampling = Image.Resampling[interpolation.upper()]

    def __call__(self, mat: np.ndarray, height: int, width: int) -> np.ndarray:
        if mat.shape[2] > 4:
            raise InvalidRequest(f"Pillow resizes up to 4 channels, the Mat has {mat.shape[2]}")
        image = self._image.fromarray(mat[:, :, 0] if mat.shape[2] == 1 else mat)
        return as_mat(np.array(image.resize((width, height), self._resampling)))
