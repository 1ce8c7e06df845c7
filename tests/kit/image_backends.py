"""Helpers for the tests of image backends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cv2
import numpy as np
import torch

from torchpipe_py import Backend, InvalidRequest, pipe
from torchpipe_py.backends.base import BackendConfig
from torchpipe_py.registry import default

Data = dict[str, Any]

FLAGS = {
    "nearest": cv2.INTER_NEAREST,
    "bilinear": cv2.INTER_LINEAR,
    "bicubic": cv2.INTER_CUBIC,
    "area": cv2.INTER_AREA,
    "lanczos": cv2.INTER_LANCZOS4,
}

NO_MATS = [b"bytes", *map(np.zeros, ((4, 4, 3), 4, (0, 4, 3)), (np.float64, np.uint8, np.uint8)), torch.zeros(3)]


def run(backend: str, data: Any, **config: Any) -> Data:
    """The dict after one request through a pipe; ``data``, or a whole dict."""
    item = data if isinstance(data, dict) else {"data": data}
    with pipe({"backend": backend, **config}) as p:
        p(item)
    return item


def refusal(backend: str, data: Any, **config: Any) -> str:
    """The message of the ``InvalidRequest`` that is the outcome."""
    item = run(backend, data, **config)
    assert "result" not in item
    assert isinstance(item["error"], InvalidRequest)
    return str(item["error"])


@contextmanager
def made(name: str, **params: Any) -> Iterator[Backend]:
    """An instance of a backend, set up without a pipe."""
    cls = default.find_backend(name)
    assert cls is not None
    values = {attribute: param.default for attribute, param in cls.parameters().items()}
    backend = cls(BackendConfig(params={**values, **params}))
    backend.setup()
    try:
        yield backend
    finally:
        backend.close()


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """A Mat without anything smooth in it."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def to_tensor(mat: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(mat.transpose(2, 0, 1)[None].copy())


def to_mat(tensor: torch.Tensor) -> np.ndarray:
    return tensor[0].permute(1, 2, 0).cpu().numpy()
