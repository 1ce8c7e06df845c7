"""JPEGs that simplejpeg decodes: the pixels and the outcomes of OpenCV, for whole and damaged files."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import cv2
import numpy as np
import pytest
from conftest import encode, picture

from torchpipe_py import DecodeError
from torchpipe_py.backends.image.decode import MatDecoder

SAMPLINGS = [getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}") for name in (411, 420, 422, 440, 444)]


def files(rng: np.random.Generator) -> Iterator[bytes]:
    """Small JPEGs of all samplings, baseline and progressive, with and without restart markers, and gray."""
    for sampling in SAMPLINGS:
        for progressive in (0, 1):
            for restart in (0, 2):
                height, width = rng.integers(1, 70, 2).tolist()
                mat = picture(height, width)
                options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive]
                options += [cv2.IMWRITE_JPEG_RST_INTERVAL, restart, cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(5, 101))]
                yield encode(mat, ".jpg", *options)
                yield encode(mat[:, :, 0], ".jpg", *options)


def damaged(file: bytes, rng: np.random.Generator) -> bytes:
    """The file cut off, or with other bytes in its header or anywhere."""
    data = bytearray(file[: rng.integers(2, len(file))] if rng.random() < 0.3 else file)
    for place in rng.integers(0, min(len(data), 700), rng.integers(0, 6)):
        data[place] = rng.choice([0, 255, rng.integers(256)])
    return bytes(data)


def outcome(decode: MatDecoder, data: bytes) -> np.ndarray | None:
    try:
        mat: np.ndarray = decode(data)
    except DecodeError:
        return None
    return mat


def test_simplejpeg_decodes_to_the_pixels_and_outcomes_of_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("simplejpeg")
    rng = np.random.default_rng(0)
    colors = "bgr", "rgb", "gray"
    both = [MatDecoder(color, max_pixels=2**20) for color in colors]
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    alone = [MatDecoder(color, max_pixels=2**20) for color in colors]
    differing, decoded = [], 0
    for file in files(rng):
        for number in range(12):
            data = damaged(file, rng) if number else file
            one, other = outcome(both[number % 3], data), outcome(alone[number % 3], data)
            decoded += one is not None
            if (one is None) != (other is None) or (one is not None and not np.array_equal(one, other)):
                differing.append(data)
    assert differing == []
    assert decoded > 150
