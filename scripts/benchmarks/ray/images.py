"""Many small JPEGs, cut out of the demo's; one in a hundred is bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks.common import REPOSITORY

EACH = 100
"""One of so many is bad: cut off in its header or in its pixels, empty, or no image at all."""


def write_images(folder: Path, count: int) -> None:
    """``count`` files whose names sort in their order."""
    demo = sorted((REPOSITORY / "configs" / "demo" / "images").glob("*.jpg"))
    mats: list[Any] = [cv2.imread(str(path)) for path in demo]
    rng = np.random.default_rng(0)
    for number in range(count):
        mat = mats[number % len(mats)]
        height, width = (7 * size // 8 for size in mat.shape[:2])
        top, left = (int(rng.integers(0, size - kept)) for size, kept in zip(mat.shape, (height, width), strict=False))
        cut = mat[top : top + height, left : left + width].astype(np.int16) + rng.integers(-20, 20)
        encoded = cv2.imencode(".jpg", np.clip(cut, 0, 255).astype(np.uint8))[1].tobytes()
        if number % EACH == EACH // 2:
            encoded = (encoded[:200], encoded[: len(encoded) // 2], b"", b"no image")[number // EACH % 4]
        (folder / f"{number:06d}.jpg").write_bytes(encoded)
