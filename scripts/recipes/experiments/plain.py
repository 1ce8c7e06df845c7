"""The loader that most trainings begin with: images decoded and augmented in the workers of a DataLoader.

What the tricks of a slow training change in it are arguments: the decoder, where images are augmented, pinned memory,
and copies on a separate stream.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from benchmarks import decoder_libraries
from torch.utils.data import DataLoader

from recipes.data import MEAN, STD, FlipAndNormalise
from torchpipe_py.training import Batch, CudaPrefetcher, ImageFolder
from torchpipe_py.training.errors import library

SIZE = 224


def by_pillow(encoded: bytes) -> np.ndarray:
    """uint8, 224×224×3, RGB, resized without smoothing, as OpenCV does."""
    from PIL import Image

    image: Any = Image.open(io.BytesIO(encoded)).convert("RGB")
    return resized(np.asarray(image))


def by_opencv(encoded: bytes) -> np.ndarray:
    """Decode as ``by_pillow`` does."""
    return resized(decoder_libraries.by_opencv(encoded))


def by_simplejpeg(encoded: bytes) -> np.ndarray:
    """Decode as ``by_pillow`` does."""
    return resized(library("simplejpeg", "simplejpeg", "TurboJPEG").decode_jpeg(encoded, colorspace="RGB"))


def resized(image: np.ndarray) -> np.ndarray:
    import cv2

    small: np.ndarray = cv2.resize(image, (SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
    return small


class Decoded:
    """A dataset of ``(image, label)``: 3×224×224, float32, flipped and normalised; uint8, as it is, if ``raw``."""

    def __init__(self, files: ImageFolder, decode: Callable[[bytes], np.ndarray], raw: bool = False) -> None:
        self._files, self._decode, self._raw = files, decode, raw

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        encoded, label = self._files[index]
        image = torch.from_numpy(self._decode(encoded)).permute(2, 0, 1)
        if self._raw:
            return image.contiguous(), label
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (MEAN, STD))
        return image.contiguous().float().div_(255.0).sub_(mean).div_(std), label


class PlainLoader:
    """Endless batches of ``Decoded``, on ``device``; with the interface that ``Session`` needs.

    ``raw``: images come as uint8, and are flipped and normalised on the device, a batch at a time. ``pinned``: memory
    from which copies are asynchronous; ``ahead``: they are made on a separate stream, one batch ahead.
    """

    epoch = 0

    def __init__(
        self,
        files: ImageFolder,
        device: Any,
        batch_size: int,
        workers: int,
        decode: Callable[[bytes], np.ndarray] = by_opencv,
        raw: bool = False,
        pinned: bool = True,
        ahead: bool = False,
    ) -> None:
        self.devices, self._ahead = [device], ahead
        self._asynchronous = pinned and device.type == "cuda"
        self._augment = FlipAndNormalise() if raw else None
        self._loader = DataLoader(
            Decoded(files, decode, raw),
            batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=self._asynchronous,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def batches(self) -> Generator[Batch, None, None]:
        """Batches of one epoch after another; closing the generator ends the workers."""
        device = self.devices[0]
        while True:
            for images, labels in CudaPrefetcher(self._loader, device) if self._ahead else self._loader:
                images = images.to(device, non_blocking=self._asynchronous)
                labels = labels.to(device, non_blocking=self._asynchronous)
                images = images if self._augment is None else self._augment(images)
                yield Batch(images, labels, mask=torch.ones(len(labels), dtype=torch.bool))
