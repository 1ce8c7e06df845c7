"""Mats by Pillow, for models trained on Pillow's (torchvision's) resize."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchpipe_py.backends.base import Data, Isolation, StatelessBackend
from torchpipe_py.backends.images.opencv import EIGHT_BITS, as_mat, side
from torchpipe_py.keys import TASK_DATA_KEY, TASK_RESULT_KEY


class PillowResizeMat(StatelessBackend):
    """Mat to Mat of ``resize_h`` × ``resize_w``, bit-exact with Pillow's bilinear, which smooths when it shrinks."""

    keeps_color = True
    isolation = Isolation.FOLLOWS

    resize_h = side("output height, pixels")
    resize_w = side("output width, pixels")

    def setup(self) -> None:
        from PIL import Image

        self._image: Any = Image

    def forward_item(self, item: Data) -> None:
        mat = as_mat(item[TASK_DATA_KEY], EIGHT_BITS)
        channels = [mat[:, :, 0]] if mat.shape[2] == 1 else [mat]
        image = self._image.fromarray(channels[0])
        resized = image.resize((self.resize_w, self.resize_h), self._image.Resampling.BILINEAR)
        item[TASK_RESULT_KEY] = as_mat(np.array(resized))
