"""Transforms that take the place of torchvision's where the pipe has done, or must match, their work."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchpipe_py.backends.signature import shown_dims

INTERPOLATION = "INTER_LINEAR"  # ResizeMat's default


class TensorToTensor:
    """In the place of ``ToTensor``: what the pipe gives becomes float32 C×H×W in 0..1, on the same device.

    Takes a Tensor 1×C×H×W or C×H×W, uint8 or floating point, with values in 0..255. So that ``transforms_cpu`` can end
    with it as well, also a ``PIL.Image`` or a uint8 array H×W×C or H×W. ``TypeError`` for anything else.
    """

    def __call__(self, image: Any) -> Any:
        tensor = image if isinstance(image, torch.Tensor) else _planes(image)
        if tensor.ndim == 4 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim != 3:
            raise TypeError(f"expected a Tensor 1xCxHxW or CxHxW, got {shown_dims(tensor.shape)}")
        if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
            raise TypeError(f"expected a Tensor of uint8 or floats in 0..255, got {tensor.dtype}")
        # NOTE: a division, as ToTensor's: times 1/255 differs in the last bit.
        floats = tensor.to(torch.float32)
        return floats.div(255.0) if floats is tensor else floats.div_(255.0)

    def __repr__(self) -> str:
        return "TensorToTensor()"


class cv2Resize:
    """Resize to ``h`` × ``w`` pixels by ``cv2.resize``, bilinear: the pixels of ``ResizeMat``; for ``transforms_cpu``.

    Takes a ``PIL.Image`` or a uint8 array H×W×C or H×W, and gives the same kind. ``ValueError`` for a side below 1.
    """

    def __init__(self, h: int, w: int) -> None:
        if h < 1 or w < 1:
            raise ValueError(f"cv2Resize: the sides are at least 1 pixel, got h={h}, w={w}")
        self.h, self.w = h, w

    def __call__(self, image: Any) -> Any:
        import cv2
        from PIL import Image

        mat = np.asarray(image)
        if mat.dtype != np.uint8 or mat.ndim not in (2, 3):
            raise TypeError(f"expected a PIL.Image or a uint8 array HxWxC, got {type(image).__name__} of {mat.dtype}")
        if mat.shape[:2] != (self.h, self.w):
            channels = mat.shape[2:]
            mat = cv2.resize(mat, (self.w, self.h), None, 0, 0, getattr(cv2, INTERPOLATION))
            mat = mat.reshape(self.h, self.w, *channels)
        return Image.fromarray(mat) if isinstance(image, Image.Image) else mat

    def __repr__(self) -> str:
        return f"cv2Resize(h={self.h}, w={self.w})"


def _planes(image: Any) -> Any:
    """A picture H×W×C or H×W as a uint8 Tensor C×H×W."""
    mat = np.asarray(image)
    if mat.dtype != np.uint8 or mat.ndim not in (2, 3):
        raise TypeError(f"expected a Tensor, a PIL.Image or a uint8 array HxWxC, got {type(image).__name__}")
    mat = mat[:, :, None] if mat.ndim == 2 else mat
    return torch.from_numpy(np.ascontiguousarray(mat.transpose(2, 0, 1)))
